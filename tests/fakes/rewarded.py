"""A served run with rewards: our own scorer source, a real helper server, references on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fakes import rollouts, scorer_source
from tests.fakes.helper import MODEL, FakeHelper
from tests.fakes.served import Served, served

QUESTION = "Where was the composer of the opera Faust born?"
TRUTH = ["Paris"]
VALIDATION_QUESTION = "Who wrote Middlemarch?"
VALIDATION_TRUTH = "George Eliot"
SOURCE = Path(str(scorer_source.__file__))
SOURCE_SHA256 = hashlib.sha256(SOURCE.read_bytes()).hexdigest()


@dataclass
class Rewarded:
    """A run that scores, and the helper behind it."""

    run: Served
    helper: FakeHelper
    source: Path

    async def told(self, query: str) -> str:
        """Asks as a rollout does; the result text it was given."""
        status, value = await self.run.execute(query)
        assert status == 200, value
        return str(value["result"])

    async def rollout(self, *queries: str, answer: str = "Paris", question: str = QUESTION) -> str:
        """A rollout whose searches were answered by this run."""
        turns = [rollouts.answered(query, await self.told(query)) for query in queries]
        return rollouts.rollout(question, turns, rollouts.final(answer))

    async def reward(self, solution: str, truth: Any = None) -> tuple[int, Any]:
        return await self.run.internal("POST", "/reward", item(solution, truth))

    async def batch(self, *items: dict[str, Any]) -> tuple[int, Any]:
        return await self.run.internal("POST", "/reward/batch", {"items": list(items)})


def item(solution: str, truth: Any = None) -> dict[str, Any]:
    """One row of a reward request."""
    return {"solution_str": solution, "ground_truth": TRUTH if truth is None else truth}


def write_files(folder: Path) -> tuple[Path, Path, Path]:
    """The scorer's source (kept where it is there), and two JSONL files as the datasets are."""
    source = folder / "scorer.py"
    if not source.exists():
        source.write_bytes(SOURCE.read_bytes())
    train, validation = folder / "train.jsonl", folder / "validation.jsonl"
    train.write_text(json.dumps({"question": QUESTION, "golden_answers": TRUTH}) + "\n")
    validation.write_text(
        json.dumps({"question": VALIDATION_QUESTION, "ground_truth": VALIDATION_TRUTH}) + "\n"
    )
    return source, train, validation


def reward_keys(folder: Path, helper_url: str, **keys: Any) -> dict[str, Any]:
    """The keys of a run that scores, with files of its own in the folder; ``keys`` over them."""
    source, train, validation = write_files(folder)
    return {
        "reward__enabled": True,
        "reward__source": str(source),
        "reward__source_sha256": SOURCE_SHA256,
        "reward__references__train": str(train),
        "reward__references__validation": str(validation),
        "reward__helper__url": helper_url,
        "reward__helper__model": MODEL,
        "reward__helper__model_sha256": "a" * 64,
        **keys,
    }


@asynccontextmanager
async def rewarded(
    tmp_path: Path, *, name: str = "run", helper: FakeHelper | None = None, **keys: Any
) -> AsyncIterator[Rewarded]:
    """Serves a run with rewards under ``tmp_path``."""
    chosen = helper or FakeHelper()
    if helper is None:
        await chosen.start()
    settings = reward_keys(tmp_path, chosen.url, **keys)
    try:
        async with served(tmp_path / name, **settings) as run:
            yield Rewarded(run, chosen, Path(settings["reward__source"]))
    finally:
        if helper is None:
            await chosen.stop()

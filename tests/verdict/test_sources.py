"""Files that a run was claimed with, edited between two rewards: the gate asks them itself.

Each row is done to the real files of a real daemon, and no search and no reward follows it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from smartsearch_sidecar.gate import health as health_module
from smartsearch_sidecar.gate import sources as sources_module
from smartsearch_sidecar.retrieval.bm25.build import build
from smartsearch_sidecar.retrieval.bm25.provider import Bm25Provider, verify_and_open
from tests.fakes.rewarded import Rewarded, rewarded
from tests.fakes.served import Served, served
from tests.fakes.until import until

Act = Callable[[Path], object]


def rewritten(path: Path) -> None:
    """The same bytes in another file under the same name."""
    beside = path.with_name("beside")
    shutil.copyfile(path, beside)
    beside.rename(path)


def edited(path: Path) -> None:
    """One byte more, within a comment or the end of the file."""
    path.write_bytes(path.read_bytes() + b"\n")


def answers_changed(path: Path) -> None:
    """Other answers to the same question, in as many bytes."""
    path.write_bytes(path.read_bytes().replace(b"Paris", b"Pariz"))


def question_added(path: Path) -> None:
    """One question more than was declared."""
    row = {"question": "Who wrote Emma?", "golden_answers": ["Jane Austen"]}
    path.write_bytes(path.read_bytes() + json.dumps(row).encode() + b"\n")


def linked(path: Path) -> None:
    """A link to the same bytes elsewhere."""
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def touched(path: Path) -> None:
    """Another time of change, and the same bytes."""
    os.utime(path, (1, 1))


def spaced(path: Path) -> None:
    """Blank lines, which declare nothing."""
    path.write_bytes(b"\n" + path.read_bytes() + b"\n")


CHANGED: dict[str, tuple[str, str, Act]] = {
    "scorer edited": ("scorer.py", "source_changed", edited),
    "scorer removed": ("scorer.py", "source_changed", Path.unlink),
    "scorer a link": ("scorer.py", "source_changed", linked),
    "references: other answers": ("train.jsonl", "references_changed", answers_changed),
    "references: one question more": ("train.jsonl", "references_changed", question_added),
    "references unreadable": (
        "train.jsonl",
        "references_changed",
        lambda path: path.write_text("{"),
    ),
    "references removed": ("validation.jsonl", "references_changed", Path.unlink),
}
THE_SAME: dict[str, tuple[str, Act]] = {
    "scorer touched": ("scorer.py", touched),
    "scorer written again": ("scorer.py", rewritten),
    "references touched": ("train.jsonl", touched),
    "references written again": ("train.jsonl", rewritten),
    "references in another layout": ("validation.jsonl", spaced),
}


async def scored(on: Rewarded) -> None:
    """One rollout that was searched for and scored, so that the run has something to accept."""
    assert (await on.reward(await on.rollout("q")))[0] == 200


async def cause(run: Served) -> str:
    """Why health says that the run has failed."""
    status, value = await run.health()
    assert (status, value["state"]) == (503, "failed"), value
    return str(value["cause"]["cause"])


@pytest.mark.parametrize("name", sorted(CHANGED))
async def test_a_source_edited_between_rewards_fails_the_gate(tmp_path: Path, name: str) -> None:
    """The first health after it says so, and names the file."""
    file, named, act = CHANGED[name]
    async with rewarded(tmp_path) as on:
        await scored(on)
        assert (await on.run.health())[1]["state"] == "healthy"
        await asyncio.to_thread(act, tmp_path / file)
        assert await cause(on.run) == named
        _, value = await on.run.health()
        assert file in value["cause"]["detail"]
        assert "Pari" not in value["cause"]["detail"]


@pytest.mark.parametrize("name", ["scorer edited", "references: other answers"])
async def test_no_checkpoint_is_accepted_over_it(tmp_path: Path, name: str) -> None:
    """The checkpoint is refused where it is the first to ask."""
    file, named, act = CHANGED[name]
    async with rewarded(tmp_path) as on:
        await scored(on)
        await asyncio.to_thread(act, tmp_path / file)
        status, refused = await on.run.internal("POST", "/checkpoints", {"step": 1})
        assert (status, refused["cause"]["cause"]) == (409, named)


@pytest.mark.parametrize("name", sorted(THE_SAME))
async def test_the_same_contents_are_no_failure(tmp_path: Path, name: str) -> None:
    """A file that was touched or written again is read, found the same, and not read again."""
    file, act = THE_SAME[name]
    async with rewarded(tmp_path) as on:
        await scored(on)
        await asyncio.to_thread(act, tmp_path / file)
        for step in range(2):
            status, _ = await on.run.internal(
                "POST", "/checkpoints", {"step": step, "allow_idle": True}
            )
            assert status == 201
        await scored(on)


async def test_only_one_split_is_declared_and_asked(tmp_path: Path) -> None:
    """A run that validates only has no train file to look at."""
    async with rewarded(tmp_path, reward__references__train=None) as on:
        assert (await on.run.health())[1]["state"] == "healthy"
        await asyncio.to_thread(touched, tmp_path / "validation.jsonl")
        assert (await on.run.health())[1]["state"] == "healthy"
        await asyncio.to_thread(question_added, tmp_path / "validation.jsonl")
        assert await cause(on.run) == "references_changed"


async def test_a_look_that_does_not_come_back_is_pending_then_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """References on a disk that hangs: named with their age, then failed; the end comes in time."""
    monkeypatch.setattr(health_module, "SOURCES_SECONDS", 0.05)
    monkeypatch.setattr(sources_module, "LOOK_SECONDS", 0.5)
    file = tmp_path / "train.jsonl"
    async with rewarded(tmp_path) as on:
        file.unlink()
        os.mkfifo(file)  # reading it waits for a writer, as a disk that hangs does
        try:
            _, value = await on.run.health()
            assert value["state"] == "pending"
            (row,) = value["waiting_for"]
            assert (row["on"], row["bound_seconds"]) == ("sources", 0.5)
            assert row["seconds"] >= 0.05
            await until(lambda: on.run.service.run.state.closed)
            assert await cause(on.run) == "source_changed"
            assert await asyncio.wait_for(on.run.stop(), 10) == 4
        finally:
            os.close(os.open(file, os.O_RDWR | os.O_NONBLOCK))


CORPUS = [{"id": str(number), "contents": f"Title {number}\ntext {number}"} for number in range(9)]
INDEX_ACTS: dict[str, Act] = {
    "edited": edited,
    "removed": Path.unlink,
    "replaced": rewritten,
    "folder moved": lambda path: path.parent.rename(path.parent.with_name("aside")),
    "emptied": lambda path: os.truncate(path, 0),
}


@pytest.mark.parametrize("name", sorted(INDEX_ACTS))
async def test_index_files_are_asked_by_the_gate(tmp_path: Path, name: str) -> None:
    """A file of the served index that is no longer the verified one fails the next health."""
    corpus, folder = tmp_path / "corpus.jsonl", tmp_path / "index"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in CORPUS))
    await asyncio.to_thread(build, corpus, folder)
    provider = Bm25Provider(await asyncio.to_thread(verify_and_open, folder))
    async with served(tmp_path / "run", provider=provider) as run:
        assert (await run.execute("title 3"))[0] == 200
        assert (await run.health())[1]["state"] == "healthy"
        chosen = next(path for path in folder.iterdir() if path.suffix == ".store")
        await asyncio.to_thread(INDEX_ACTS[name], chosen)
        assert await cause(run) == "identity_changed"


async def test_a_scorer_put_back_before_the_gate_asks_has_scored_nothing(tmp_path: Path) -> None:
    """Edited and put back without a reward between: the bytes are the pinned ones, and healthy."""
    async with rewarded(tmp_path) as on:
        await scored(on)
        source = tmp_path / "scorer.py"
        kept = await asyncio.to_thread(source.read_bytes)
        await asyncio.to_thread(edited, source)
        await asyncio.to_thread(source.write_bytes, kept)
        assert (await on.run.health())[1]["state"] == "healthy"

"""Questions to rehearse with: from a file, from the references, or made of the corpus itself."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path

from smartsearch_sidecar import errors
from smartsearch_sidecar.client import Client
from smartsearch_sidecar.config import Config

QUESTIONS_MAX = 5000
"""Enough that a rehearsal's caches see what a run's would; more only cost memory."""
_SEEDS = (
    "Who wrote the first history of the world?",
    "In which city was the composer born?",
    "When did the war end?",
    "What is the capital of the largest country?",
    "Which river flows through the city?",
    "Who discovered the element?",
    "What year was the film released?",
    "Which team won the championship?",
)
_WORDS = 9  # of a passage, as long as a question


def read(path: Path) -> list[str]:
    """The first questions of a file: the trainer's Parquet, JSONL with ``question``, or lines.

    Raises ``UsageError`` where there are none.
    """
    found: list[str] = []
    try:
        for question in _each(path):
            if question.strip():
                found.append(question.strip())
            if len(found) == QUESTIONS_MAX:
                break
    except (OSError, UnicodeDecodeError) as exc:
        raise errors.USAGE(f"{path} cannot be read as questions ({type(exc).__name__})") from None
    if not found:
        raise errors.USAGE(
            f"{path} holds no questions: Parquet or JSONL with a column `question`, or plain lines"
        )
    return found


def _each(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        if file.read(4) == b"PAR1":
            yield from _parquet(path)
            return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield _question(line)


def _question(line: str) -> str:
    if not line.lstrip().startswith("{"):
        return line
    try:
        value = json.loads(line)
    except ValueError:
        return line
    question = value.get("question")
    return question if isinstance(question, str) else ""


def _parquet(path: Path) -> Iterator[str]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise errors.NOT_AVAILABLE(
            f"{path} is a Parquet file and pyarrow is not installed: install "
            "smartsearch-sidecar[parquet], or name a file of lines with --questions"
        ) from None
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(1024, columns=["question"]):
            for row in batch.to_pylist():
                question = row.get("question")
                yield question if isinstance(question, str) else ""


def from_corpus(client: Client, config: Config) -> list[str]:
    """Pieces of passages that plain questions find: as long as questions, in the corpus's words."""
    found: dict[str, None] = {}
    for seed in _SEEDS:
        answer = client.execute(seed, config.execute.environment)
        if answer.status != 200:
            raise errors.USAGE(
                f"the scratch sidecar refused a plain question: {answer.value['error']['message']}"
            )
        words = answer.value["result"].split()
        for at in range(0, len(words) - _WORDS, _WORDS):
            found[" ".join(words[at : at + _WORDS])] = None
    if not found:
        raise errors.USAGE(
            "plain English questions find no passage to make questions of: name a file with "
            "--questions"
        )
    return list(found)[:QUESTIONS_MAX]


def named(config: Config, given: Path | None) -> tuple[list[str], str] | None:
    """Those of a file, and its path: the given one, else a split's references; None without one."""
    references = config.reward.references
    path = given or references.train or references.validation
    return None if path is None else (read(path), str(path))


def choose(
    config: Config, found: tuple[list[str], str] | None, client: Client
) -> tuple[list[str], str]:
    """The questions, and where they are from: what ``named`` found, else made of the corpus."""
    return found or (from_corpus(client, config), "passages of the corpus")

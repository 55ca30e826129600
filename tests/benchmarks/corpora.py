"""What is searched, and what is asked: the real articles, a large corpus made of their text.

Both indexes are built once, by the package's own command, and kept under ``.cache/bench``.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from smartsearch_sidecar.retrieval.bm25.analysis import ANALYZER
from tests.benchmarks.load import NUMBER, write_bodies
from tests.benchmarks.settings import Unmeasured
from tests.fakes.process import ROOT, environment

CACHE = ROOT / ".cache" / "bench"
VITAL = ROOT / ".cache" / "vital" / "summaries_en-us.json"
SLICES, SLICE_WORDS = 4, 25  # a passage of wiki-18 has 100 words
QUESTIONS = 5_000
SEED = 12


@cache
def articles() -> list[tuple[str, str]]:
    """Title and text of the 10,033 real articles, as ``make setup`` fetched them."""
    if not VITAL.is_file():
        raise Unmeasured("the vital articles are missing: run `make setup`")
    value = json.loads(VITAL.read_text())
    return [(str(item["title"]), str(item["extract"])) for item in value.values()]


def synthetic(count: int) -> Iterator[dict[str, str]]:
    """So many passages, each of four slices out of real ones: their words are as rare or as common
    as in English. The same for the same count, and a smaller corpus is the beginning of a larger.
    """
    words = " ".join(text for _, text in articles()).split()
    draw = random.Random(SEED)
    last = len(words) - SLICE_WORDS
    for number in range(count):
        starts = [draw.randrange(last) for _ in range(SLICES)]
        text = " ".join(" ".join(words[at : at + SLICE_WORDS]) for at in starts)
        title = " ".join(words[starts[0] : starts[0] + 3])
        yield {"id": str(number), "contents": f'"{title} {number}"\n{text}'}


def synthetic_corpus(count: int) -> Path:
    """The synthetic corpus on disk, in the form the dense retrievers' corpora have."""
    path = CACHE / f"synthetic-{count}.jsonl"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        with part.open("w", encoding="utf-8") as out:
            for passage in synthetic(count):
                out.write(json.dumps(passage, ensure_ascii=False) + "\n")
        part.rename(path)
    return path


def index_of(corpus: Path, name: str) -> Path:
    """The index of a corpus, built where it is missing or was built by another version."""
    made = f"{name}-{ANALYZER}-{version('tantivy')}"
    out = CACHE / made
    if not out.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "smartsearch_sidecar", "index", "build"]
        done = subprocess.run([*command, str(corpus), str(out)], env=environment(), check=False)
        if done.returncode:
            raise Unmeasured(f"the index of {corpus.name} could not be built")
    return out


def vital_index() -> Path:
    """The index of the real articles."""
    articles()
    return index_of(VITAL, "vital")


def synthetic_index(count: int) -> Path:
    """The index of the synthetic corpus."""
    return index_of(synthetic_corpus(count), f"synthetic-{count}")


@cache
def questions() -> list[str]:
    """What a policy asks, in kind: a name, some words of a passage, now and then a long thought.

    Every one has a place for a number, a word that no passage holds: so each can be asked again and
    is still another query. The same list always.
    """
    draw = random.Random(SEED)
    asked = []
    for number in range(QUESTIONS):
        title, text = draw.choice(articles())
        words = text.split()
        at = draw.randrange(max(1, len(words) - 40))
        kind = number % 10
        if kind < 5:
            query = f"What is {title}?"
        elif kind < 9:
            query = " ".join(words[at : at + draw.randint(6, 12)])
        else:
            query = " ".join(words[at : at + 40])
        asked.append(f"{query} {NUMBER}")
    return asked


def question_bodies(folder: Path) -> Path:
    """The questions as request bodies."""
    return write_bodies(folder / "bodies.jsonl", questions())


def plain_bodies(folder: Path) -> Path:
    """One short question, numbered: for providers that do not look at it."""
    return write_bodies(folder / "bodies.jsonl", [f"question {NUMBER}"])


def question_list(folder: Path) -> Path:
    """The questions as a JSON list."""
    path = folder / "queries.json"
    path.write_text(json.dumps(questions()))
    return path


def manifest(index: Path) -> dict[str, Any]:
    """What the index says of itself."""
    value: dict[str, Any] = json.loads((index / "manifest.json").read_bytes())
    return value

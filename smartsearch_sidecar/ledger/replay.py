"""Every recorded search asked again, and its documents held against the recorded ones.

A frozen corpus answers alike for ever. Where it does not, the difference is one of three:

- *near tie*: at every rank a score within ``TIE`` of the recorded one's, and so for every document
  that stayed; one that left the answer was tied with the last one. Another machine's rounding does
  that, and neither order is more right.
- *reordered*: the same documents in another order that no tie explains.
- *different*: anything else. Also a document whose text changed.

Apart from the command, its one user: it knows no terminal.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.reader import Progress
from smartsearch_sidecar.ledger.recorded_queries import RecordedRun, recorded_top_n
from smartsearch_sidecar.retrieval.passages import Found
from smartsearch_sidecar.run.record import RetrievalAnswered, RetrievalFailed, RetrievalRequested

TIE: Final = 1e-5
"""Relative difference of two scores that are as good as equal: single precision, summed."""
SEARCH_SECONDS: Final = 60.0
"""One search may take this long: a replay has no rollout waiting."""
FIRST_DIFFERENCES: Final = 10

Document = Mapping[str, Any]


class Outcome(enum.StrEnum):
    """How an answer compares with the recorded one."""

    EQUAL = enum.auto()
    NEAR_TIE = enum.auto()
    REORDERED = enum.auto()
    DIFFERENT = enum.auto()
    FAILED = enum.auto()


Search = Callable[[str, float, int], Awaitable[Found]]
"""A query, a deadline (loop clock) and how many passages, to documents: ``Guard.search``."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A search whose documents are not the recorded ones. ``detail`` says what differs."""

    number: int
    query: str
    outcome: Outcome
    detail: str


@dataclass(slots=True)
class Replayed:
    """What a replay came to: counts by outcome, and the first differences in the order found."""

    counts: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    differences: list[Difference] = field(default_factory=list)
    torn: bool = False

    @property
    def searches(self) -> int:
        return sum(self.counts.values())

    @property
    def same(self) -> bool:
        """Every answer is the recorded one, near ties allowed."""
        return self.searches == self.counts[Outcome.EQUAL] + self.counts[Outcome.NEAR_TIE]

    def add(self, number: int, query: str, outcome: Outcome, detail: str) -> None:
        self.counts[outcome] += 1
        if outcome is not Outcome.EQUAL and len(self.differences) < FIRST_DIFFERENCES:
            self.differences.append(Difference(number, query, outcome, detail))


async def replay(
    directory: Path, search: Search, *, concurrency: int = 8, progress: Progress | None = None
) -> Replayed:
    """Asks every answered search of a run again; ``progress`` is told bytes of the journal.

    Raises ``LedgerCorrupt`` where the run is damaged. Reading happens in a thread, a bounded
    batch at a time, so memory does not grow with the run.
    """
    run = await asyncio.to_thread(RecordedRun, directory, progress)
    searches, result = _answered(run), Replayed()
    while batch := await asyncio.to_thread(_take, searches, concurrency * 16):
        await _ask(batch, search, concurrency, result)
    run.scan.require_whole()
    result.torn = run.scan.torn_bytes > 0
    return result


@dataclass(frozen=True, slots=True)
class _Asked:
    number: int
    query: str
    top_n: int
    documents: Sequence[Document]


def _take(searches: Iterator[_Asked], most: int) -> list[_Asked]:
    return list(itertools.islice(searches, most))


def _answered(run: RecordedRun) -> Iterator[_Asked]:
    """The answered searches of a journal, each once its answer is read. Blocking."""
    scan, asked_by = run.scan, dict[int, tuple[str, int]]()
    for line in scan:
        match line.record:
            case RetrievalRequested(number, asked):
                asked_by[number] = (run.query(asked), recorded_top_n(asked))
            case RetrievalFailed(number):
                asked_by.pop(number, None)
            case RetrievalAnswered(number) as answered:
                try:
                    documents = answered.documents()
                except errors.LedgerCorrupt as exc:
                    raise errors.LEDGER_CORRUPT(f"{scan.place}: {exc.message}") from None
                yield _Asked(number, *asked_by.pop(number), documents)


async def _ask(batch: list[_Asked], search: Search, concurrency: int, result: Replayed) -> None:
    """Asks a batch, so many at a time, and adds it to ``result`` in the order of the journal."""
    free = asyncio.Semaphore(concurrency)
    loop = asyncio.get_running_loop()

    async def one(asked: _Asked) -> tuple[Outcome, str]:
        async with free:
            try:
                async with asyncio.timeout(SEARCH_SECONDS):
                    found = await search(asked.query, loop.time() + SEARCH_SECONDS, asked.top_n)
            except errors.SidecarError as exc:
                return Outcome.FAILED, exc.message
            except TimeoutError:
                return Outcome.FAILED, f"no answer in {SEARCH_SECONDS:.0f} s"
        return compare(asked.documents, found.documents())

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(asked)) for asked in batch]
    for asked, task in zip(batch, tasks, strict=True):
        result.add(asked.number, asked.query, *task.result())


def compare(old: Sequence[Document], new: Sequence[Document]) -> tuple[Outcome, str]:
    """How ``new`` compares with the recorded ``old``, and where it first differs."""
    before = [(item["id"], item["contents"]) for item in old]
    after = [(item["id"], item["contents"]) for item in new]
    if before == after:
        return Outcome.EQUAL, ""
    texts = dict(before)
    for name, contents in after:
        if texts.get(name, contents) != contents:
            return Outcome.DIFFERENT, f"document {name!r} has another text"
    if len(before) != len(after):
        return Outcome.DIFFERENT, f"{len(after)} documents instead of {len(before)}"
    rank = next(
        rank for rank, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]
    )
    detail = f"rank {rank + 1}: {after[rank][0]!r} instead of {before[rank][0]!r}"
    if _tied(old, new):
        return Outcome.NEAR_TIE, detail
    if set(before) == set(after):
        return Outcome.REORDERED, detail
    return Outcome.DIFFERENT, detail


def _tied(old: Sequence[Document], new: Sequence[Document]) -> bool:
    """Whether ties alone explain another order, or another document at the end."""
    if any(item.get("score") is None for item in (*old, *new)):
        return False
    if not all(_close(was["score"], now["score"]) for was, now in zip(old, new, strict=True)):
        return False
    scores = {item["id"]: item["score"] for item in old}
    kept = scores.keys() & {item["id"] for item in new}
    if not all(_close(scores[item["id"]], item["score"]) for item in new if item["id"] in kept):
        return False
    return all(
        _close(item["score"], other[-1]["score"])
        for ours, other in ((old, new), (new, old))
        for item in ours
        if item["id"] not in kept
    )


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=TIE)

"""What the page's charts show: a run over time, in a fixed amount of memory.

Apart from `operator`, its one importer: arithmetic without I/O or a clock. Two series of the same
rows. The last ten minutes keep every tick; the whole run keeps at most
``WHOLE_ROWS``, and where they are used up every second one goes and the step doubles: after a day
a row stands for some minutes. A row is computed from two snapshots of running totals, so that
rows can be merged without a loss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

TICK_SECONDS: Final = 1.0
LATEST_ROWS: Final = 600  # ten minutes of ticks
WHOLE_ROWS: Final = 360
RATE_SECONDS: Final = 10.0  # a shorter time is too little to say when a quota ends
WHOLE_STEP_SECONDS: Final = 5.0  # at first: half an hour, then doubled

COLUMNS: Final = ("at", "answers", "p50", "p95", "waiting", "in_service", "scores", "left")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Running totals at a moment; ``waiting`` and ``in_service`` are the most since the one before.

    ``at`` is in seconds of the wall clock; ``service`` the counts of a histogram of seconds;
    ``used`` and ``left`` are those of the run's quotas, in one order.
    """

    at: float
    answers: int
    service: tuple[int, ...]
    waiting: int
    in_service: int
    scores: int
    used: tuple[int, ...]
    left: tuple[int, ...]


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value under which ``share`` of the counted ones lie, even within a bucket.

    None where all counts are 0.
    ``counts`` has one more than ``bounds``; what lies over the last is taken to lie at it.
    """
    left = sum(counts) * share
    if not left:
        return None
    low = 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and left <= count:
            return low + (bound - low) * left / count
        left -= count
        low = bound
    return low


class PageSeries:
    """The two series of one process."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds`` are those of the histogram in every snapshot."""
        self._bounds = tuple(bounds)
        self._latest: deque[Snapshot] = deque(maxlen=LATEST_ROWS + 1)
        self._whole: list[Snapshot] = []
        self.step_seconds = WHOLE_STEP_SECONDS
        self._waiting = self._in_service = 0

    def add(self, snapshot: Snapshot) -> bool:
        """Takes a tick; returns whether the series of the whole run has grown by a row."""
        self._latest.append(snapshot)
        self._waiting = max(self._waiting, snapshot.waiting)
        self._in_service = max(self._in_service, snapshot.in_service)
        if self._whole and snapshot.at - self._whole[-1].at < self.step_seconds:
            return False
        kept = replace(snapshot, waiting=self._waiting, in_service=self._in_service)
        self._whole.append(kept)
        self._waiting = self._in_service = 0
        if len(self._whole) > WHOLE_ROWS + 1:
            self._halve()
        return True

    def _halve(self) -> None:
        """Every second row goes; the first and the last stay."""
        first, *rest = self._whole
        kept = [first]
        for before, after in zip(rest[::2], rest[1::2], strict=False):
            most = max(before.waiting, after.waiting)
            busiest = max(before.in_service, after.in_service)
            kept.append(replace(after, waiting=most, in_service=busiest))
        if len(rest) % 2:
            kept.append(rest[-1])
        self._whole = kept
        self.step_seconds *= 2

    def latest(self) -> list[list[Any]]:
        """Rows of ``COLUMNS``, one a tick, oldest first."""
        return [self._row(before, after) for before, after in pairwise(self._latest)]

    def newest(self) -> list[Any] | None:
        """The last row of ``latest``."""
        if len(self._latest) < 2:
            return None
        return self._row(self._latest[-2], self._latest[-1])

    def whole(self) -> list[list[Any]]:
        """Rows of ``COLUMNS`` of the whole run, oldest first."""
        return [self._row(before, after) for before, after in pairwise(self._whole)]

    def rates(self) -> list[float]:
        """How fast each quota is used, per second, over the latest rows; 0 while they are few."""
        first, last = self._latest[0], self._latest[-1]
        seconds = last.at - first.at
        if seconds < RATE_SECONDS:
            return [0.0] * len(last.used)
        return [(b - a) / seconds for a, b in zip(first.used, last.used, strict=True)]

    def _row(self, before: Snapshot, after: Snapshot) -> list[Any]:
        seconds = max(after.at - before.at, 1e-3)
        counts = [b - a for a, b in zip(before.service, after.service, strict=True)]
        return [
            round(after.at, 1),
            round((after.answers - before.answers) / seconds, 2),
            _rounded(quantile(self._bounds, counts, 0.5)),
            _rounded(quantile(self._bounds, counts, 0.95)),
            after.waiting,
            after.in_service,
            round((after.scores - before.scores) / seconds, 3),
            list(after.left),
        ]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 5)

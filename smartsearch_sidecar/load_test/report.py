"""What came of the calls, whether the node would hold, and what to set. No I/O, no clock."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from smartsearch_sidecar.load_test.shape import (
    ANSWERED,
    CLIENT_SECONDS,
    DECLINED,
    THREADS_PER_RANK,
)

if TYPE_CHECKING:
    from smartsearch_sidecar.config import Config

MARGIN: Final = 0.75
"""Share of the deadline that the slowest call of a rehearsal may take: a run is a thousand times
longer, and meets what is slower."""
SIDE_BY_SIDE: Final = 0.6
"""Of the speed that slots would have if searches did not slow each other: above it, more slots
help; below, the searches are bound by something slots do not add."""

BUCKETS_MS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)


@dataclass(slots=True)
class Tally:
    """Every call's outcome and seconds."""

    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    def add(self, outcome: str, seconds: float) -> None:
        """One call that ended."""
        self.outcomes[outcome] += 1
        self.seconds.append(seconds)

    @property
    def calls(self) -> int:
        """Calls that ended, in any way."""
        return len(self.seconds)

    @property
    def good(self) -> int:
        """Calls that a rollout could use."""
        return self.outcomes[ANSWERED] + self.outcomes[DECLINED]

    @property
    def failures(self) -> dict[str, int]:
        """The others, most frequent first."""
        return {
            outcome: count
            for outcome, count in self.outcomes.most_common()
            if outcome not in (ANSWERED, DECLINED)
        }

    def percentile(self, share: float) -> float:
        """Seconds within which ``share`` of the calls ended; 0 where there are none."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

    def histogram(self) -> list[tuple[str, int]]:
        """Calls per bucket, from the first that has some to the last."""
        names = [f"under {bound} ms" for bound in BUCKETS_MS] + ["longer"]
        counts = [0] * len(names)
        for seconds in self.seconds:
            place = next(
                (i for i, bound in enumerate(BUCKETS_MS) if seconds * 1000 < bound), len(BUCKETS_MS)
            )
            counts[place] += 1
        used = [i for i, count in enumerate(counts) if count]
        if not used:
            return []
        return list(zip(names, counts, strict=True))[used[0] : used[-1] + 1]


@dataclass(frozen=True, slots=True)
class Played:
    """A rehearsal that ended: the tally, and what the sidecar says of it."""

    ranks: int
    took_seconds: float
    alone_seconds: float
    """One search while nobody else asks, connection included: the median."""
    tally: Tally
    most_waiting: int
    state: str
    cause: str | None
    cache: dict[str, int]
    journal_bytes: int

    @property
    def at_once(self) -> int:
        """Calls out at the same time."""
        return self.ranks * THREADS_PER_RANK

    @property
    def rate(self) -> float:
        """Calls that ended, a second."""
        return self.tally.calls / self.took_seconds if self.took_seconds else 0.0


def reasons(played: Played, config: Config) -> list[str]:
    """Why this node would not hold; none where it would."""
    found = []
    tally = played.tally
    if not tally.good:
        found.append("no call was answered")
    if tally.failures:
        listed = ", ".join(f"{count:,} {outcome}" for outcome, count in tally.failures.items())
        found.append(f"{sum(tally.failures.values()):,} calls failed: {listed}")
    if played.state != "healthy":
        found.append(f"the sidecar ended {played.state}: {played.cause or 'work did not settle'}")
    deadline = min(config.execute.deadline_seconds, CLIENT_SECONDS)
    slowest = tally.percentile(1.0)
    if not tally.failures and slowest > MARGIN * deadline:
        found.append(
            f"the slowest call took {slowest:.1f} s of the {deadline:g} s there are; a run is "
            "longer and meets a slower one"
        )
    return found


def suggestions(played: Played, config: Config) -> list[str]:
    """What to set, a line each: slots, waiting room and deadline."""
    execute = config.execute
    slots, why = _slots(played, execute.slots)
    room = max(0, played.at_once - slots)
    slowest = played.tally.percentile(1.0)
    lines = [f"execute.slots = {slots}  # {why}"]
    if execute.waiting_max < room:
        lines.append(
            f"execute.waiting_max = {room}  # now {execute.waiting_max}; {played.at_once} call at "
            "once"
        )
    else:
        lines.append(f"execute.waiting_max = {execute.waiting_max}  # enough for {played.at_once}")
    wanted = _deadline(slowest, execute.deadline_seconds)
    lines.append(
        f"execute.deadline_seconds = {wanted:g}  # slowest call {slowest:.2f} s; the client "
        f"leaves after {CLIENT_SECONDS:g} s"
    )
    return lines


def _slots(played: Played, slots: int) -> tuple[int, str]:
    if played.tally.failures:
        return slots, "as it is: refused calls say nothing about the speed of searches"
    if played.most_waiting == 0:
        return slots, "nobody had to wait"
    ideal = slots / played.alone_seconds if played.alone_seconds else math.inf
    share = played.rate / ideal
    more = min(played.at_once, slots * 2)
    if share >= SIDE_BY_SIDE and more > slots:
        return more, (
            f"now {slots}, and {played.most_waiting} waited: searches run side by side at "
            f"{share:.0%} of their speed alone, so more of them help"
        )
    return slots, (
        f"{played.most_waiting} waited, but searches side by side run at {share:.0%} of their "
        "speed alone: more cores or a faster retriever would help, more slots would not"
    )


def _deadline(slowest: float, deadline: float) -> float:
    """As it is while it is under the client's patience and well above what was seen."""
    longest = CLIENT_SECONDS - 1
    if deadline < CLIENT_SECONDS and slowest <= MARGIN * deadline:
        return deadline
    return min(longest, max(deadline, math.ceil(slowest / MARGIN)))


def as_json(played: Played, config: Config) -> dict[str, Any]:
    """JSON values: the verdict first."""
    tally = played.tally
    why = reasons(played, config)
    return {
        "holds": not why,
        "reasons": why,
        "suggestions": suggestions(played, config),
        "ranks": played.ranks,
        "calls_at_once": played.at_once,
        "seconds": played.took_seconds,
        "calls": tally.calls,
        "calls_per_second": played.rate,
        "outcomes": dict(tally.outcomes),
        "declined": tally.outcomes[DECLINED],
        "milliseconds": {
            "alone": played.alone_seconds * 1000,
            **{
                name: tally.percentile(share) * 1000
                for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("slowest", 1.0))
            },
        },
        "histogram": dict(tally.histogram()),
        "most_waiting": played.most_waiting,
        "state": played.state,
        "cause": played.cause,
        "cache": played.cache,
        "journal_bytes": played.journal_bytes,
    }

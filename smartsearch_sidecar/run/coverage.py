"""What a checkpoint covers beyond the counts of a run: its gaps, and whether it was asked at all.

A gap is a time in which no process served the run. A rollout that asked then was refused by the
machine, and holds that refusal as text; no record says so. What is known of it is when it began,
when it ended, and what was judged since. Apart from ``state.py``, its one user: the fold counts
there, and here it is remembered up to which record a checkpoint has named it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from smartsearch_sidecar.run.record import CheckpointAccepted, RunClosed, RunResumed

EMPTIED_WINDOW: Final = 200  # searches of which the share is taken
EMPTIED_LEAST: Final = 20  # emptied ones among them: some articles are about tags


@dataclass(frozen=True, slots=True)
class Gap:
    """``began`` and ``ended`` are wall-clock times, ``ended`` is ``None`` while it lasts.

    ``clean``: ``run.closed`` stood before it; ``trainer_stopped``: the resume was told that the
    trainer stood still; ``judged_before``: result blocks that had been judged by then.
    """

    began: str | None
    ended: str | None
    clean: bool
    trainer_stopped: bool | None
    judged_before: int

    def to_data(self, judged: int) -> dict[str, Any]:
        """As receipts name it; ``judged`` are the blocks judged by now."""
        return {
            "from": self.began,
            "to": self.ended,
            "clean": self.clean,
            "trainer_stopped": self.trainer_stopped,
            "judged_blocks": judged - self.judged_before,
        }


@dataclass(slots=True)
class Coverage:
    """Part of the fold. ``gaps`` are all of this journal, one a restart.

    ``heard`` is whether a rollout, a trainer or its gate asked a process of this run that has
    ended. Of the last accepted checkpoint are ``named``, how many of ``gaps`` it and those before
    it named; ``restarts_named``, the same of each node of many; and ``searches``, how many all
    nodes had been asked for.
    """

    heard: bool = False
    gaps: list[Gap] = field(default_factory=list)
    named: int = 0
    restarts_named: dict[str, int] = field(default_factory=dict)
    searches: int = 0

    def since_accepted(self, judged: int) -> tuple[dict[str, Any], ...]:
        """The gaps that no accepted checkpoint has named."""
        return tuple(gap.to_data(judged) for gap in self.gaps[self.named :])

    def on_resumed(self, record: RunResumed, judged: int) -> None:
        if record.gap_to is not None:
            told = record.trainer_stopped
            self.gaps.append(Gap(record.gap_from, record.gap_to, record.clean, told, judged))

    def on_closed(self, record: RunClosed) -> None:
        self.heard = self.heard or record.asked is not False

    def on_accepted(self, record: CheckpointAccepted, searches: int) -> None:
        """``searches`` are this node's, for a record that does not state the run's."""
        for name, node in (record.nodes or {}).items():
            self.restarts_named[name] = node.get("restarts", 0)
        self.named = len(self.gaps)
        self.searches = searches if record.searches is None else record.searches


@dataclass(slots=True)
class Emptied:
    """Searches whose every passage was dropped, ``count`` of them in all.

    The share is taken over searches that repeated no other: a group of rollouts, and every tensor
    parallel rank of it, ask the same, and one unlucky query must not add up.
    """

    count: int = 0
    window: deque[bool] = field(default_factory=lambda: deque(maxlen=EMPTIED_WINDOW))
    lately: int = 0

    def add(self, *, emptied: bool, repeated: bool) -> None:
        self.count += emptied
        if repeated:
            return
        if len(self.window) == EMPTIED_WINDOW:
            self.lately -= self.window[0]
        self.window.append(emptied)
        self.lately += emptied

    @property
    def share(self) -> float:
        """Of the last ``EMPTIED_WINDOW``; 0 while fewer than ``EMPTIED_LEAST`` were emptied."""
        return self.lately / len(self.window) if self.lately >= EMPTIED_LEAST else 0.0

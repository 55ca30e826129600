"""What is made of a node by what is known of it: one table.

Theory. A failure that somebody states is a failure, however old the word and whatever the link. A
node without a link knows nothing of the others, so it says nothing of them: the link is what keeps
it from being healthy, and what has failed once it was away too long. With a link, silence weighs
more than a word, because a word grows old. What remains are nodes heard of, or ended, and their
words. ``presence.py`` takes the facts.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from smartsearch_sidecar.cluster.nodestate import RunStatus

# --- the facts ------------------------------------------------------------------------------------


class Link(enum.StrEnum):
    """The connection to the servers."""

    UP = "up"
    DOWN = "down"
    CUT = "cut"
    """Down for ``lost_seconds`` or longer; for good, whatever comes after."""


class Liveness(enum.StrEnum):
    """What was heard of a node."""

    FRESH = "fresh"
    UNANSWERED = "unanswered"
    """Fresh, but it did not answer a question that all were asked."""
    QUIET = "quiet"
    ENDED = "ended"
    AWAITED = "awaited"
    """Never joined, and may still."""
    LOST = "lost"
    NEVER = "never"
    """Never joined, and the run went on for ``lost_seconds`` without it."""


class Reason(enum.StrEnum):
    """Why a run is not healthy."""

    CLUSTER_UNREACHABLE = "cluster_unreachable"
    NODE_FAILED = "node_failed"
    NODE_LOST = "node_lost"
    NODE_ABSENT = "node_absent"
    NODE_QUIET = "node_quiet"
    NODE_PENDING = "node_pending"


# --- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """What three facts come to."""

    state: RunStatus
    reason: Reason | None


@dataclass(frozen=True, slots=True)
class _Row:
    """Facts that match (``None``: any), and what they come to."""

    cell: Cell
    link: Link | None = None
    hearing: Collection[Liveness] | None = None
    word: RunStatus | None = None

    def matches(self, link: Link, hearing: Liveness, word: RunStatus) -> bool:
        return (
            self.link in (None, link)
            and (self.hearing is None or hearing in self.hearing)
            and self.word in (None, word)
        )


# Read from the top; the first row that matches decides, and the last one matches everything. The
# rows are also the order of weight: of several nodes, the one whose row stands highest is told of.
_ROWS: Final = (
    _Row(Cell(RunStatus.FAILED, Reason.NODE_FAILED), word=RunStatus.FAILED),
    _Row(Cell(RunStatus.FAILED, Reason.CLUSTER_UNREACHABLE), link=Link.CUT),
    _Row(Cell(RunStatus.PENDING, Reason.CLUSTER_UNREACHABLE), link=Link.DOWN),
    _Row(Cell(RunStatus.FAILED, Reason.NODE_LOST), hearing=(Liveness.LOST, Liveness.NEVER)),
    _Row(Cell(RunStatus.PENDING, Reason.NODE_ABSENT), hearing=(Liveness.AWAITED,)),
    _Row(Cell(RunStatus.PENDING, Reason.NODE_QUIET), hearing=(Liveness.QUIET, Liveness.UNANSWERED)),
    _Row(Cell(RunStatus.PENDING, Reason.NODE_PENDING), word=RunStatus.PENDING),
    _Row(Cell(RunStatus.HEALTHY, None)),
)


def judge(link: Link, hearing: Liveness, word: RunStatus) -> Cell:
    """The one table: what is made of a node. ``word`` of one that said nothing is ``PENDING``."""
    return cell_of(row_of(link, hearing, word))


@functools.cache
def row_of(link: Link, hearing: Liveness, word: RunStatus) -> int:
    """Which row of the table decides: the lower its number, the more it weighs."""
    return next(at for at, row in enumerate(_ROWS) if row.matches(link, hearing, word))


def cell_of(row: int) -> Cell:
    """What a row comes to."""
    return _ROWS[row].cell


HEALTHY_ROW: Final = len(_ROWS) - 1
"""The row of a node with nothing to tell."""

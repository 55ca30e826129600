"""Whether the run's nodes are there: what was received of each, and what the run is by that.

Theory. Each node publishes its state at least every fifth of ``lost_seconds``; the others note when
they received it, on their own monotonic clock. No wall clock appears anywhere. A state that is
delivered again, as a reconnected watch does, is no sign of life: each carries the count of its
node's restarts and its own number since the last of them, and only a later one counts.

Silence counts only while this node listened. While the servers are not reached, or this process
itself stood still, no other node's silence is held against it: the time that counts begins anew
with the listening (such a node is quiet all the same). A connection that comes and goes could hide
a dead node for ever in this way, so a silence of ``GRACE`` times ``lost_seconds`` counts over such
gaps.

Of each node three facts are taken: the link to the servers (one for all), its liveness, and its
last status. The table below makes a state of each combination, by these rules:

- A failure that a node states is a failure. It does not grow old, and needs no link now.
- Without a link this node knows nothing of the others. The run is pending because of the link
  itself, and has failed once the link was away for too long.
- With a link, silence weighs more than a status, because a status grows old.
- What remains are nodes that are fresh or ended: their last status holds.

The run's state is that of its worst node. A failure has to close the latch; the first one stays.

A node that never joined has no name here: as many of them are counted as ``run.nodes`` has more
than are known. Their clock runs from the first admission of any node. A node that ended cleanly
publishes no more and is never lost; one that resumes is a node like any other again.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, NamedTuple

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.values import NodeState, RunStatus

HEARTBEATS: Final = 5  # states a node publishes in lost_seconds: four may be lost on the way
QUIET_SHARE: Final = 0.5  # of lost_seconds: a node silent for so long makes the run pending
GRACE: Final = 3
"""Times ``lost_seconds``: the longest silence that is excused by not having listened. Two are
needed: a connection may be away for almost one, and a node has one to come back after that."""


class Link(enum.StrEnum):
    UP = "up"
    DOWN = "down"
    CUT = "cut"  # down for ``lost_seconds``: it counts as down for good, even if it comes back


class Liveness(enum.StrEnum):
    """What was received of a node."""

    FRESH = "fresh"
    UNANSWERED = "unanswered"  # fresh, but it did not answer a question that all were asked
    QUIET = "quiet"
    ENDED = "ended"
    AWAITED = "awaited"  # never joined, and may still
    LOST = "lost"
    NEVER = "never"  # never joined, and the run went on for ``lost_seconds`` without it


class Reason(enum.StrEnum):
    CLUSTER_UNREACHABLE = "cluster_unreachable"
    NODE_FAILED = "node_failed"
    NODE_LOST = "node_lost"
    NODE_ABSENT = "node_absent"
    NODE_QUIET = "node_quiet"
    NODE_PENDING = "node_pending"


class Cell(NamedTuple):
    """A row of the table: what the run is, and the facts of which one is enough to make it so."""

    status: RunStatus
    reason: Reason | None
    facts: Collection[Link | Liveness | RunStatus]


# Read from the top; the first row that matches decides. The order is also the order of weight: of
# several nodes, the one whose row stands highest is named. The facts' enums share no value.
TABLE: Final = (
    Cell(RunStatus.FAILED, Reason.NODE_FAILED, (RunStatus.FAILED,)),
    Cell(RunStatus.FAILED, Reason.CLUSTER_UNREACHABLE, (Link.CUT,)),
    Cell(RunStatus.PENDING, Reason.CLUSTER_UNREACHABLE, (Link.DOWN,)),
    Cell(RunStatus.FAILED, Reason.NODE_LOST, (Liveness.LOST, Liveness.NEVER)),
    Cell(RunStatus.PENDING, Reason.NODE_ABSENT, (Liveness.AWAITED,)),
    Cell(RunStatus.PENDING, Reason.NODE_QUIET, (Liveness.QUIET, Liveness.UNANSWERED)),
    Cell(RunStatus.PENDING, Reason.NODE_PENDING, (RunStatus.PENDING,)),
    Cell(RunStatus.HEALTHY, None, (RunStatus.HEALTHY,)),
)


@functools.cache
def weight_of(*facts: Link | Liveness | RunStatus) -> int:
    """The place in ``TABLE`` of the row that decides: the lower, the more it weighs. The status
    among the facts is ``PENDING`` for a node that has published no state yet.
    """
    return next(at for at, cell in enumerate(TABLE) if not set(facts).isdisjoint(cell.facts))


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """What the run is, for the node that asks, and why it is not healthy."""

    status: RunStatus
    reason: Reason | None = None
    cause: str | None = None  # has to close this node's latch; ``None`` where nothing has failed
    detail: str = ""
    node: str | None = None  # the one it is about, where it is about one


class NodeRow(NamedTuple):
    """One node as the page shows it: its liveness, seconds since its last state, that state."""

    liveness: Liveness
    silent_seconds: float
    state: NodeState | None


@dataclass(slots=True)
class _Member:
    instance: str
    received_at: float
    state: NodeState | None = None


class Membership:
    """The ``nodes`` of a run as its node ``own`` sees it, in seconds of its monotonic clock. The
    methods ``on_…`` take what happens, in the order it happens; ``verdict`` and ``rows`` change
    nothing. Call ``on_tick`` at least every fifth of ``lost_seconds``: a longer gap between two
    events means that this process stood still and did not listen.
    """

    def __init__(self, own: str, nodes: int, lost_seconds: float, now: float) -> None:
        self._own = own
        self._nodes = nodes
        self._lost_seconds = lost_seconds
        self._members: dict[str, _Member] = {}
        self._awake_since = self._linked_since = self._last_event = now
        self._down_since: float | None = None
        self._admitted_at: float | None = None
        self._failure: RunVerdict | None = None

    def on_joined(self, name: str, instance: str, now: float) -> None:
        """A registration was read. From now on states of another instance do not count."""
        self._event(now)
        member = self._members.get(name)
        if member is None and self._nodes > len(self._members):
            self._keep_of("", now)
        if member is None or member.instance != instance:
            self._members[name] = _Member(instance, now)

    def on_state(self, name: str, state: NodeState, now: float) -> None:
        """A node's state arrived: watched, or as an answer. An old one is no sign of life."""
        self._event(now)
        member = self._members.get(name)
        if member is None:
            self.on_joined(name, state.instance, now)
            member = self._members[name]
        else:
            last = member.state
            later = last is None or (state.restarts, state.beat) > (last.restarts, last.beat)
            if not later or state.instance != member.instance:
                return
        # Before the news is taken in: a node is lost when its time is over, even where that is
        # noticed only as it comes back.
        self._keep_of(name, now)
        member.state, member.received_at = state, now
        if state.admitted and self._admitted_at is None:
            self._admitted_at = now
        self._keep_of(name, now)

    def on_connected(self, now: float) -> None:
        """The servers are reached again: from now on, silence counts anew."""
        self._event(now)
        if self._down_since is not None:
            self._keep(self.verdict(now))
            self._down_since = None
            self._linked_since = now

    def on_disconnected(self, now: float) -> None:
        self._event(now)
        if self._down_since is None:
            self._down_since = now

    def on_tick(self, now: float) -> RunVerdict:
        """Time has passed, and this process was there. The verdict, whose failure stays."""
        self._event(now)
        self._keep(verdict := self.verdict(now))
        return verdict

    def verdict(self, now: float, *, answered: Collection[str] | None = None) -> RunVerdict:
        """``answered`` names the nodes that answered a question to all, if one was asked: then a
        node that did not answer is healthy only if it has ended.
        """
        if self._failure is not None:
            return self._failure
        absent = [""] if self._nodes > len(self._members) else []
        found = [self._weighed(name, now, answered) for name in (*absent, *self._members)]
        return self._verdict(*min(found), now)

    def rows(self, now: float, *, answered: Collection[str] | None = None) -> dict[str, NodeRow]:
        """Every node that has joined, by name, sorted."""
        return {
            name: NodeRow(
                self._facts(name, now, answered)[0],
                0.0 if name == self._own else max(0.0, now - member.received_at),
                member.state,
            )
            for name, member in sorted(self._members.items())
        }

    def _event(self, now: float) -> None:
        self._awake_since = self._awake(now)
        self._last_event = now

    def _awake(self, now: float) -> float:
        """Since when this process listens. A gap between two events means that it stood still."""
        stood_still = now - self._last_event > QUIET_SHARE * self._lost_seconds
        return now if stood_still else self._awake_since

    def _silence(self, since: float, now: float) -> float:
        """Seconds of silence that count, of one that began at ``since``."""
        whole = now - max(since, self._awake(now))
        if whole >= GRACE * self._lost_seconds:
            return whole
        return min(whole, now - self._linked_since)

    def _link(self, now: float) -> Link:
        if self._down_since is None:
            return Link.UP
        return Link.CUT if now - self._down_since >= self._lost_seconds else Link.DOWN

    def _facts(
        self, name: str, now: float, answered: Collection[str] | None
    ) -> tuple[Liveness, RunStatus]:
        """What is known of a node; "" stands for those that never joined."""
        if not name:
            since = self._admitted_at
            gone = since is not None and self._silence(since, now) >= self._lost_seconds
            return Liveness.NEVER if gone else Liveness.AWAITED, RunStatus.PENDING
        member = self._members[name]
        status = RunStatus.PENDING if member.state is None else member.state.status
        if member.state is not None and member.state.ended:
            return Liveness.ENDED, status
        if name != self._own:
            silence = self._silence(member.received_at, now)
            if silence >= self._lost_seconds:
                return Liveness.LOST, status
            # The whole silence, not the one that counts: a node that published nothing since this
            # node listens again is not fresh.
            if now - member.received_at >= QUIET_SHARE * self._lost_seconds:
                return Liveness.QUIET, status
        if answered is not None and name not in answered:
            return Liveness.UNANSWERED, status
        return Liveness.FRESH, status

    def _weighed(
        self, name: str, now: float, answered: Collection[str] | None = None
    ) -> tuple[int, str, Liveness]:
        liveness, status = self._facts(name, now, answered)
        return weight_of(self._link(now), liveness, status), name, liveness

    def _keep_of(self, name: str, now: float) -> None:
        self._keep(self._verdict(*self._weighed(name, now), now))

    def _keep(self, verdict: RunVerdict) -> None:
        if self._failure is None and verdict.cause is not None:
            self._failure = verdict

    def _verdict(self, weight: int, name: str, liveness: Liveness, now: float) -> RunVerdict:
        status, reason, _ = TABLE[weight]
        if reason is None:
            return RunVerdict(status)
        cause: str | None = errors.NODE_LOST.closes_as
        if reason is Reason.CLUSTER_UNREACHABLE:
            name, detail = "", f"node {self._own} does not reach the NATS servers"
            cause = errors.CLUSTER_UNREACHABLE.closes_as
        else:
            detail = self._about(name, liveness, now)
        if reason is Reason.NODE_FAILED and (state := self._members[name].state) is not None:
            cause = state.cause
        failed = status is RunStatus.FAILED
        return RunVerdict(status, reason, cause if failed else None, detail, name or None)

    def _about(self, name: str, liveness: Liveness, now: float) -> str:
        if not name:
            joined = ", ".join(sorted(self._members)) or "none yet"
            missing = self._nodes - len(self._members)
            never = "have never joined" if liveness is Liveness.NEVER else "have not joined yet"
            return f"{missing} of the run's {self._nodes} nodes {never} (joined: {joined})"
        member = self._members[name]
        if liveness in (Liveness.QUIET, Liveness.LOST):
            return f"node {name} has not been heard of for {now - member.received_at:.1f} s"
        if liveness is Liveness.UNANSWERED:
            return f"node {name} did not answer"
        if member.state is None:
            return f"node {name} has published no state yet"
        if member.state.cause is None:
            return f"node {name} has work in flight"
        return said_by(name, member.state.detail)


def said_by(node: str, detail: str) -> str:
    """A cause as the other nodes tell it; one that a node was told itself keeps its first node."""
    if detail.startswith("on node "):
        return detail
    return f"on node {node}: {detail}" if detail else f"on node {node}, by its own report"

"""Whether the run's nodes are there: what is heard of them, and what the run is by that.

Theory. Each node says how it is, at least every fifth of ``lost_seconds``; the others note when
they heard it, on their own monotonic clock. Nobody's wall clock appears anywhere. A word that is
told again, as a reconnected watch does, is no sign of life: each carries the count of its node's
restarts and of its own words, and only a later one is news.

Silence says something only while we listened. While the servers are not reached, or this process
itself stood still, nobody's silence is held against them: the time that counts begins anew with the
listening (such a node is quiet all the same). So that a connection that comes and goes cannot hide
a dead node for ever, a silence of ``GRACE`` times ``lost_seconds`` counts over such gaps.

Of each node three facts are taken: the link to the servers (one for all), what was heard of the
node, and its last word. The table in ``verdicts.py`` makes a state of each combination; the run's
is the worst of them. A failure has to close the latch; the first one found stays.

A node that never joined has no name here: as many of them are counted as ``run.nodes`` has more
than are known. Their clock runs from the first admission of any node. A node that ended cleanly has
nothing more to say and is never lost; one that resumes is a node like any other again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.membership_table import (
    HEALTHY_ROW,
    Link,
    Liveness,
    Reason,
    cell_of,
    row_of,
)
from smartsearch_sidecar.cluster.nodestate import NodeState, RunStatus

HEARTBEATS: Final = 5
"""Words a node says in ``lost_seconds``: four may be lost on the way."""
QUIET_SHARE: Final = 0.5
"""Of ``lost_seconds``: a node silent for so long makes the run pending."""
GRACE: Final = 3
"""Times ``lost_seconds``: the longest silence that is excused by not having listened. Two are
needed: a connection may be away for almost one, and a node has one to come back after that."""


# --- the machine ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the run is, for the node that asks.

    ``cause`` is what has to close this node's latch, with ``detail`` as its detail; ``None`` where
    nothing has failed. ``node`` is the node it is about, where it is about one.
    """

    state: RunStatus
    reason: Reason | None = None
    cause: str | None = None
    detail: str = ""
    node: str | None = None


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node as it stands on the page: what was heard, how long ago (seconds), its last word."""

    hearing: Liveness
    silent_seconds: float
    state: NodeState | None


@dataclass(slots=True)
class _Member:
    instance: str
    heard_at: float
    state: NodeState | None = None


class Membership:
    """The nodes of one run as one of them sees it. Times are seconds of its monotonic clock.

    Told what happens, in the order it happens; ``verdict`` and ``rows`` change nothing. Tell it
    ``ticked`` at least every fifth of ``lost_seconds``: that is how it knows that it listened.
    """

    def __init__(self, own: str, nodes: int, lost_seconds: float, now: float) -> None:
        """``own`` is this node, whose own words are told like any other's; ``nodes`` the run's."""
        self._own = own
        self._nodes = nodes
        self._lost_seconds = lost_seconds
        self._members: dict[str, _Member] = {}
        self._awake_since = self._linked_since = self._last_event = now
        self._down_since: float | None = None
        self._admitted_at: float | None = None
        self._failure: Verdict | None = None

    # --- what happens -----------------------------------------------------------------------------

    def joined(self, name: str, instance: str, now: float) -> None:
        """A registration was read. Words of another instance than this are not this node's."""
        self._event(now)
        member = self._members.get(name)
        if member is None:
            self._keep_absence(now)
        if member is None or member.instance != instance:
            self._members[name] = _Member(instance, now)

    def heard(self, name: str, state: NodeState, now: float) -> None:
        """A node's word: watched, or an answer. One that is no news is no sign of life."""
        self._event(now)
        member = self._members.get(name)
        if member is None:
            self._keep_absence(now)
            member = self._members[name] = _Member(state.instance, now)
        elif not _is_news(member, state):
            return
        else:
            self._keep(self._of_member(name, now))
        member.state, member.heard_at = state, now
        if state.admitted and self._admitted_at is None:
            self._admitted_at = now
        self._keep(self._of_member(name, now))

    def connected(self, now: float) -> None:
        """The servers are reached again: from now on, silence counts anew."""
        self._event(now)
        if self._down_since is not None:
            self._keep(self.verdict(now))
            self._down_since = None
            self._linked_since = now

    def disconnected(self, now: float) -> None:
        """The servers are not reached."""
        self._event(now)
        if self._down_since is None:
            self._down_since = now

    def ticked(self, now: float) -> Verdict:
        """Time has passed, and this process was there. The verdict, whose failure stays."""
        self._event(now)
        verdict = self.verdict(now)
        self._keep(verdict)
        return verdict

    # --- what it comes to -------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes that have joined, sorted."""
        return tuple(sorted(self._members))

    def verdict(self, now: float, *, answered: Collection[str] | None = None) -> Verdict:
        """What the run is. ``answered``: who answered a question that all were asked; of the others
        only those that ended may be healthy.
        """
        if self._failure is not None:
            return self._failure
        link, found = self._link(now), [(HEALTHY_ROW, "", Liveness.FRESH)]
        if self._nodes > len(self._members):
            hearing = self._absent(now)
            found.append((row_of(link, hearing, RunStatus.PENDING), "", hearing))
        for name in self._members:
            hearing, word = self._facts(name, now, answered)
            found.append((row_of(link, hearing, word), name, hearing))
        return self._verdict(*min(found), now)

    def rows(self, now: float, *, answered: Collection[str] | None = None) -> dict[str, NodeRow]:
        """Every node that has joined, by name."""
        return {
            name: NodeRow(
                self._facts(name, now, answered)[0],
                0.0 if name == self._own else max(0.0, now - self._members[name].heard_at),
                self._members[name].state,
            )
            for name in self.names
        }

    # --- inside -----------------------------------------------------------------------------------

    def _event(self, now: float) -> None:
        self._awake_since = self._awake(now)
        self._last_event = now

    def _awake(self, now: float) -> float:
        """Since when. A gap in what this process was told means that it stood still itself."""
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

    def _absent(self, now: float) -> Liveness:
        since = self._admitted_at
        gone = since is not None and self._silence(since, now) >= self._lost_seconds
        return Liveness.NEVER if gone else Liveness.AWAITED

    def _facts(
        self, name: str, now: float, answered: Collection[str] | None = None
    ) -> tuple[Liveness, RunStatus]:
        member = self._members[name]
        word = RunStatus.PENDING if member.state is None else member.state.word
        if member.state is not None and member.state.ended:
            return Liveness.ENDED, word
        if name != self._own:
            silence = self._silence(member.heard_at, now)
            if silence >= self._lost_seconds:
                return Liveness.LOST, word
            # Whole silence: a node that was not heard since we are back is not fresh.
            if now - member.heard_at >= QUIET_SHARE * self._lost_seconds:
                return Liveness.QUIET, word
        if answered is not None and name not in answered:
            return Liveness.UNANSWERED, word
        return Liveness.FRESH, word

    def _of_member(self, name: str, now: float) -> Verdict:
        hearing, word = self._facts(name, now)
        return self._verdict(row_of(self._link(now), hearing, word), name, hearing, now)

    def _keep_absence(self, now: float) -> None:
        if self._nodes > len(self._members):
            hearing = self._absent(now)
            row = row_of(self._link(now), hearing, RunStatus.PENDING)
            self._keep(self._verdict(row, "", hearing, now))

    def _keep(self, verdict: Verdict) -> None:
        if self._failure is None and verdict.cause is not None:
            self._failure = verdict

    def _verdict(self, at: int, name: str, hearing: Liveness, now: float) -> Verdict:
        cell = cell_of(at)
        if cell.reason is None:
            return Verdict(cell.state)
        cause: str | None = errors.NODE_LOST.closes_as
        if cell.reason is Reason.CLUSTER_UNREACHABLE:
            name, detail = "", f"node {self._own} does not reach the NATS servers"
            cause = errors.CLUSTER_UNREACHABLE.closes_as
        else:
            detail = self._about(name, hearing, now)
        if cell.reason is Reason.NODE_FAILED and (state := self._members[name].state) is not None:
            cause = state.cause
        failed = cell.state is RunStatus.FAILED
        return Verdict(cell.state, cell.reason, cause if failed else None, detail, name or None)

    def _about(self, name: str, hearing: Liveness, now: float) -> str:
        """A sentence about a node that keeps the run from being healthy, or about the absent."""
        if not name:
            joined = ", ".join(self.names) or "nobody"
            missing = self._nodes - len(self._members)
            never = "have never joined" if hearing is Liveness.NEVER else "have not joined yet"
            return f"{missing} of the run's {self._nodes} nodes {never} (joined: {joined})"
        member = self._members[name]
        if hearing in (Liveness.QUIET, Liveness.LOST):
            return f"node {name} has not been heard of for {now - member.heard_at:.1f} s"
        if hearing is Liveness.UNANSWERED:
            return f"node {name} did not answer"
        if member.state is None:
            return f"node {name} has said nothing yet"
        failed = member.state.cause is not None
        return f"on node {name}, as it says itself" if failed else f"node {name} has work in flight"


def _is_news(member: _Member, state: NodeState) -> bool:
    if state.instance != member.instance:
        return False
    last = member.state
    return last is None or (state.restarts, state.beat) > (last.restarts, last.beat)

"""One node of a run: it publishes its state, receives and asks for the others', and acts on both.

The rules are in ``membership.py``, ``quota_leases.py`` and ``answer_digests.py``; the Protocol of
the servers is in ``bus.py``. Here both meet the run: a failure on another node closes this node's
latch, and a failure of its own is published. The daemon joins before it claims, begins before it
serves, and leaves after its last record.

The state that a node published last is as old as a heartbeat. A checkpoint is accepted on states
that were given for it (``verdict``), each after that node's own work had settled.

Apart from ``gate/cluster.py``, its one user, which knows services and ledger: this needs neither.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final

import structlog

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster import join
from smartsearch_sidecar.cluster.answer_digests import AnswerStream
from smartsearch_sidecar.cluster.bus import RETRY_SECONDS, Bus, Connect
from smartsearch_sidecar.cluster.membership import (
    HEARTBEATS,
    Membership,
    NodeRow,
    RunVerdict,
    said_by,
)
from smartsearch_sidecar.cluster.quota_leaser import QuotaLeaser
from smartsearch_sidecar.cluster.quota_leases import Amounts, used_of
from smartsearch_sidecar.cluster.values import NodeState, RunStatus, canonical, read_canonical
from smartsearch_sidecar.config import ClusterSection
from smartsearch_sidecar.run.record import Cause
from smartsearch_sidecar.run.state import RunState

LATCH: Final = "latch"
STATE: Final = "state"
CLAIM: Final = "claim"
READ_SECONDS: Final = 600.0  # a late node reads all answers there are before it serves
DETAIL_CHARACTERS: Final = 2000  # of a cause, where the others keep it
GAPS_MAX: Final = 100  # of a node that was restarted more often, the last ones are named
TICKS: Final = 2  # looks at the clock a heartbeat
UNCONFIRMED_SHARE: Final = 0.6
"""Of lost_seconds: after so long without a state that the servers confirmed, this node counts
itself as cut off. Longer than servers need for a new leader, and early enough that the others'
silence is not held against them."""
END_SHARE: Final = 0.2  # of lost_seconds: what leaving may take in all
ANSWER_SECONDS: Final = 3.0  # beyond the settling: a question, an identity, an answer
ASK_AGAIN_SECONDS: Final = 0.05
PATIENCE_SECONDS: Final = 5.0  # to publish and read the digests; it takes milliseconds as a rule

Rows = Mapping[str, NodeRow]


@dataclass(frozen=True, slots=True)
class LocalRun:
    state: RunState
    busy: Callable[[], bool]  # whether anything is in flight
    journal: Callable[[], tuple[int, str]]  # sequence number and sum of the last record
    settle: Callable[[float], Awaitable[object]]  # so many seconds, then checks identity
    close: Callable[..., None]  # the latch, with a cause and its ``detail``
    latched: asyncio.Event  # set once the latch is closed
    latch_durable: Callable[[], Awaitable[None]]  # returns once the closed latch is on disk


class Node:
    """This node. Everything is called on the loop."""

    def __init__(self, cluster: ClusterSection, nodes: int) -> None:
        """``nodes`` is how many the run has (``run.nodes``)."""
        self.name = cluster.node
        self.bus: Bus
        self.leaser: QuotaLeaser
        self.answers: AnswerStream | None = None
        self.claims: dict[str, str] = {}
        self.membership = Membership(self.name, nodes, cluster.lost_seconds, self.now())
        self._cluster = cluster
        self._nodes = nodes
        self._beat_seconds = cluster.lost_seconds / HEARTBEATS
        self._local: LocalRun | None = None
        self._instance = ""
        self._fresh = False
        self._beat = 0
        self._ended = False
        self._deaf_from: str | None = None
        self._confirmed_at = self.now()
        self._publish_now = asyncio.Event()
        self._failure: Cause | None = None  # what failed before there was a latch to close
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._log = structlog.get_logger("node")

    # --- joining ----------------------------------------------------------------------------------

    async def connect(self, connect: Connect, totals: Amounts) -> None:
        """``totals`` are the run's quotas. Raises ``ClusterUnreachable``."""
        self.bus = await connect(self._cluster, self._cluster.run_id, on_link=self._on_link)
        block = self._cluster.lease_block
        self.leaser = QuotaLeaser(self.bus, self.name, totals, self._nodes, block)

    async def follow_answers(self, on_digest: Callable[[bytes], object]) -> AnswerStream:
        """Reads what all nodes answered so far, and goes on reading."""
        stream = AnswerStream(self.bus, on_digest=on_digest, on_failure=self._fail)
        await stream.begin()
        async with asyncio.timeout(READ_SECONDS):
            await stream.read_up()
        self.answers = stream
        return stream

    async def join(
        self, ours: Mapping[str, Any], instance: str, claim_sha256: str, *, fresh: bool
    ) -> None:
        """Takes this node's place, or raises ``ClusterRefused``; ``fresh`` where its run begins."""
        await join.agree(self.bus, self.name, ours)
        await self.leaser.join()
        await join.register(self.bus, self.name, instance)
        self._instance, self._fresh = instance, fresh
        await self.bus.put(f"{CLAIM}.{self.name}", claim_sha256.encode())
        for prefix in (join.REGISTERED, CLAIM, STATE, LATCH):
            await self.bus.watch(prefix, self._on_value)

    async def begin(self, local: LocalRun) -> None:
        """The run is claimed: this node publishes its state, and its latch closes with the run's.
        Returns once a latch that was closed before is closed here too.
        """
        self._local = local
        self._confirmed_at = self.now()
        self.leaser.serve(local.state)
        if self._failure is not None:
            local.close(self._failure.cause, detail=self._failure.detail)
        if local.state.closed:
            with contextlib.suppress(errors.LedgerFailed):  # closed all the same, and known
                await local.latch_durable()
        self._start("answers questions", retry_forever(lambda: self.bus.answer(self._answer)))
        self._start("publishes its state", self._publish_states())
        self._start("looks at the clock", self._watch_clock())
        self._start("leases", self.leaser.run())
        self._start("publishes its latch", self._publish_latch())
        if self.answers is not None:
            self._start("publishes answers", self.answers.run())
        # Before it serves: a state of its last life must not stand for what it does now. Where the
        # servers stay away this node's own clock closes the latch, and it has nothing to serve.
        while True:
            try:
                await self._publish_state()
                return
            except errors.ClusterUnreachable:
                if local.state.closed:
                    return
            await asyncio.sleep(RETRY_SECONDS)

    def _start(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[what] = asyncio.create_task(work, name=f"the node {what}")
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        # Without one of its tasks this node misses what others publish, or publishes nothing
        # itself: the run is over.
        if task.cancelled() or (exc := task.exception()) is None:
            return
        self._log.error("the node's own work broke", task=task.get_name(), exc_info=exc)
        named = exc if isinstance(exc, errors.SidecarError) else None
        self._fail(named or errors.INTERNAL_ERROR(f"{task.get_name()}: {type(exc).__name__}"))

    # --- publishing -------------------------------------------------------------------------------

    def _state(self) -> NodeState:
        """What this node says about itself now. Each call has a number of its own."""
        self._beat += 1
        run, (seq, head) = self.local.state, self.local.journal()
        status = RunStatus.PENDING if self.local.busy() else RunStatus.HEALTHY
        if run.closed:
            status = RunStatus.FAILED
        counts = {"answered": run.responses, "failed": run.failed}
        counts |= {"declined": run.declined, "lost": run.lost, **used_of(run)}
        counts |= {f"blocks.{kind}": count for kind, count in run.scores.result_blocks().items()}
        gaps = [gap.to_data(run.scores.judged) for gap in run.coverage.gaps[-GAPS_MAX:]]
        return NodeState(
            instance=self._instance,
            restarts=run.restarts,
            beat=self._beat,
            status=status,
            ended=self._ended and status is not RunStatus.PENDING,
            admitted=run.attempts > 0,
            counts=counts,
            seq=seq,
            head=head,
            cause=None if run.cause is None else run.cause.cause,
            detail="" if run.cause is None else _detail(run.cause),
            deaf_from=self._deaf_from,
            accepted_searches=run.coverage.searches,
            gaps=tuple(gaps),
        )

    async def _publish_states(self) -> None:
        """At each heartbeat, and at once where something has changed."""
        while True:
            with contextlib.suppress(errors.ClusterUnreachable):
                await self._publish_state()
            self._publish_now.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._beat_seconds):
                    await self._publish_now.wait()

    async def _publish_state(self) -> None:
        """A state that the servers confirmed is how this node knows that the others can read it."""
        state = self._state()
        try:
            await self.bus.put(f"{STATE}.{self.name}", state.encode())
        except errors.ClusterUnreachable:
            self.membership.on_disconnected(self.now())
            raise
        self._confirmed_at = self.now()
        if self.bus.connected:
            self.membership.on_connected(self.now())
        self.membership.on_state(self.name, state, self.now())

    async def _watch_clock(self) -> None:
        while True:
            await asyncio.sleep(self._beat_seconds / TICKS)
            if not self.bus.connected:
                self.membership.on_disconnected(self.now())
            elif self.now() - self._confirmed_at > UNCONFIRMED_SHARE * self._cluster.lost_seconds:
                self.membership.on_disconnected(self._confirmed_at)
            verdict = self.membership.on_tick(self.now())
            self._close(verdict.cause, verdict.detail)

    async def _publish_latch(self) -> None:
        """The first node whose latch closes sets the run's; the key is created only once."""
        local = self.local
        await local.latched.wait()
        self.leaser.wake()
        # Also where this node's own ledger has failed: the others must learn the cause.
        with contextlib.suppress(errors.LedgerFailed):
            await local.latch_durable()
        cause = local.state.cause
        if cause is None:
            raise errors.INTERNAL_ERROR("a closed latch has no cause")
        value = {"node": self.name, "cause": cause.cause, "detail": _detail(cause)}
        key = canonical(value)
        await retry_forever(lambda: self.bus.update(LATCH, key, 0))
        self._publish_now.set()

    # --- receiving --------------------------------------------------------------------------------

    def _on_link(self, up: bool) -> None:
        if not up:
            self.membership.on_disconnected(self.now())
        self._publish_now.set()

    def _on_value(self, key: str, value: bytes) -> None:
        prefix, _, name = key.partition(".")
        try:
            if prefix == LATCH:
                latch = read_canonical(value, "the run's latch")
                self._close(latch["cause"], said_by(latch["node"], latch["detail"]))
            elif prefix == CLAIM:
                self.claims[name] = value.decode("ascii", "replace")
            elif prefix == join.REGISTERED:
                instance = join.decode_registration(value)
                if instance != join.WITHDRAWN:
                    self.membership.on_joined(name, instance, self.now())
            elif name != self.name:
                self.membership.on_state(name, NodeState.decode(value), self.now())
        except errors.SidecarError as exc:
            self._fail(exc)

    def _fail(self, exc: errors.SidecarError) -> None:
        self._close(exc.cause or errors.INTERNAL_ERROR.closes_as, exc.message)

    def _close(self, cause: str | None, detail: str) -> None:
        if cause is None:
            return
        if self._local is None:
            self._failure = self._failure or Cause(cause, None, False, detail)
        elif not self._ended:
            self._local.close(cause, detail=detail)

    # --- asking all nodes live --------------------------------------------------------------------

    async def verdict(self, settle_seconds: float) -> tuple[RunVerdict, Rows]:
        """What the run is, asked of every node now; waits up to ``settle_seconds`` for healthy.
        What it returns holds in the very step of the loop in which it returns.
        """
        end = self.now() + settle_seconds
        while True:
            if self.local.state.closed:
                return self.present()  # no node's answer would change it
            left = max(0.0, end - self.now())
            _, answered = await asyncio.gather(self.local.settle(left), self._ask_states(left))
            found = self.present(answered={self.name, *answered})
            if found[0].status is not RunStatus.PENDING or self.now() >= end:
                self._close(found[0].cause, found[0].detail)
                return found
            await asyncio.sleep(min(ASK_AGAIN_SECONDS, max(0.0, end - self.now())))

    def present(self, answered: Collection[str] | None = None) -> tuple[RunVerdict, Rows]:
        """What the run is by the states received so far, without asking."""
        now = self.now()
        self.membership.on_state(self.name, self._state(), now)
        rows = self.membership.rows(now, answered=answered)
        return self.membership.verdict(now, answered=answered), rows

    async def answers_known(self, deadline: float) -> None:
        """Returns once every answer that any node had handed over by now is known here.

        Called after a block was found unknown; its digest is looked up again afterwards.
        ``deadline`` is loop time. The first row that matches decides:

        | all nodes published | stream read up | messages missing | it raises, and the block is |
        |---|---|---|---|
        | no  | -           | -    | ``ClusterUnreachable``: nothing is proven |
        | yes | not in time | -    | ``ClusterUnreachable``: nothing is proven |
        | yes | yes         | some | ``ClusterUnreadable``: nothing is proven |
        | yes | yes         | none | nothing: an answer of the run exactly where it is known now |
        """
        stream = self.answers
        if stream is None:
            raise errors.INTERNAL_ERROR("answers are looked up, and their stream is not read")
        # One of three servers may die meanwhile: the others need seconds for a new leader, and a
        # reward must not fail for that.
        until = min(deadline, self.now() + max(PATIENCE_SECONDS, self._cluster.lost_seconds))
        live = self._live()
        answers = await self._ask({"answers": True}, len(live), until - self.now())
        published = {read_canonical(answer, "an answer")["instance"] for answer in answers}
        silent = sorted(name for instance, name in live.items() if instance not in published)
        if silent:
            raise errors.CLUSTER_UNREACHABLE(
                f"node {', '.join(silent)} did not publish what it answered: whether a block is an "
                "answer of this run cannot be said"
            )
        try:
            async with asyncio.timeout_at(until):
                await retry_forever(stream.read_up)
        except TimeoutError:
            raise errors.CLUSTER_UNREACHABLE(
                "the answers of the other nodes could not be read up to date in time"
            ) from None

    def _live(self) -> dict[str, str]:
        """Instances of the nodes that have joined and not ended, and their names."""
        states = {name: row.state for name, row in self.membership.rows(self.now()).items()}
        return {state.instance: name for name, state in states.items() if state and not state.ended}

    async def _ask_states(self, settle_seconds: float) -> set[str]:
        """Asks every node how it is; the names of those that answered."""
        live = self._live()
        question = {"settle_ms": round(settle_seconds * 1000)}
        found: set[str] = set()
        for answer in await self._ask(question, len(live), settle_seconds + ANSWER_SECONDS):
            state = NodeState.decode(answer)
            if (name := live.get(state.instance)) is not None:
                found.add(name)
                self.membership.on_state(name, state, self.now())
        return found

    async def _ask(self, question: dict[str, Any], answers: int, seconds: float) -> list[bytes]:
        if not self.bus.connected:
            return []
        data = canonical({"by": self._instance, **question})
        try:
            found = await self.bus.ask(data, answers=answers, seconds=seconds)
        except errors.ClusterUnreachable:
            return []
        return [answer for answer in found if answer]

    async def _answer(self, question: bytes) -> bytes:
        value = read_canonical(question, "a question")
        if value.get("answers"):
            if self.answers is not None:
                await self.answers.published()
            return canonical({"instance": self._instance})
        # The node that asks settles its own work itself, at the same time.
        if value["by"] != self._instance:
            await self.local.settle(value["settle_ms"] / 1000)
        return self._state().encode()

    # --- leaving ----------------------------------------------------------------------------------

    def ending(self, deaf_from: str | None) -> None:
        """Before the last record: from now on nothing closes this node's latch. ``deaf_from`` as
        in ``NodeState``.
        """
        self._ended, self._deaf_from = True, deaf_from

    async def leave(self) -> None:
        """After the run's last record: returns what was leased and not used, and publishes that
        this node has ended. Best effort within a bound: if the others do not learn of it, they
        count this node as lost.
        """
        await self._last(self._leave(), "the other nodes do not know that this one ended")

    async def _leave(self) -> None:
        if self.local.state.closed:
            await self._tasks["publishes its latch"]
        if self.answers is not None:
            await self.answers.published()
        self._tasks["leases"].cancel()  # it would lease anew what is given back
        await asyncio.wait([self._tasks["leases"]])
        await self.leaser.give_back()
        await self._publish_state()

    async def withdraw(self) -> None:
        """Gives the name back where the run was not begun after all; then closes. Best effort."""
        if self._fresh:
            work = join.withdraw(self.bus, self.name, self._instance)
            await self._last(work, "the node's name could not be given back")
        else:
            await self.close()

    async def _last(self, work: Awaitable[None], failed: str) -> None:
        try:
            async with asyncio.timeout(END_SHARE * self._cluster.lost_seconds):
                await work
        except (TimeoutError, errors.ClusterUnreachable, errors.ClusterUnreadable) as exc:
            self._log.warning(failed, reason=str(exc) or "the servers did not answer in time")
        await self.close()

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self.bus.close()

    def now(self) -> float:
        """This node's own monotonic clock, in seconds: the only one that the rules see."""
        return asyncio.get_running_loop().time()

    @property
    def local(self) -> LocalRun:
        if self._local is None:
            raise errors.INTERNAL_ERROR("the node was asked before its run had begun")
        return self._local


def _detail(cause: Cause) -> str:
    """As the other nodes keep it: bounded, and with a UTF-8 form."""
    return cause.detail.encode("utf-8", "backslashreplace").decode()[:DETAIL_CHARACTERS]


async def retry_forever(call: Callable[[], Awaitable[object]]) -> None:
    """Calls until the servers take it. Only for what may be done twice and must be done once."""
    while True:
        try:
            await call()
            return
        except errors.ClusterUnreachable:
            await asyncio.sleep(RETRY_SECONDS)

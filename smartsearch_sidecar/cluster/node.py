"""One node of a run: it publishes its state, receives the others', and acts on what follows.

The rules are in ``membership.py``, ``quota_leases.py`` and ``answer_digests.py``; the Protocol of
the servers is in ``bus.py``. Here both meet the run: a failure on another node closes this node's
latch, and a failure of its own is published. The daemon joins before it claims, begins before it
serves, and leaves after its last record.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final

import structlog

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.answer_digests import AnswerStream
from smartsearch_sidecar.cluster.bus import RETRY_SECONDS, Bus, Connect, OnQuestion
from smartsearch_sidecar.cluster.canonical import canonical, read_canonical
from smartsearch_sidecar.cluster.join import REGISTERED, WITHDRAWN, agree, register, withdraw
from smartsearch_sidecar.cluster.local_run import LocalRun
from smartsearch_sidecar.cluster.membership import HEARTBEATS, Membership, RunVerdict
from smartsearch_sidecar.cluster.node_state import NodeState, Registration
from smartsearch_sidecar.cluster.quota_leaser import QuotaLeaser
from smartsearch_sidecar.cluster.quota_leases import Amounts
from smartsearch_sidecar.config import ClusterSection
from smartsearch_sidecar.run.record import Cause

LATCH: Final = "latch"
STATE: Final = "state"
CLAIM: Final = "claim"
READ_SECONDS: Final = 600.0  # a late node reads all answers there are before it serves
DETAIL_CHARACTERS: Final = 2000  # of a cause, where the others keep it
TICKS: Final = 2  # looks at the clock a heartbeat
UNCONFIRMED_SHARE: Final = 0.6
"""Of lost_seconds: after so long without a state that the servers confirmed, this node counts
itself as cut off. Longer than servers need for a new leader, and early enough that the others'
silence is not held against them.
"""
END_SHARE: Final = 0.2  # of lost_seconds: what leaving may take in all


class Node:
    """This node. Everything is called on the loop."""

    def __init__(self, cluster: ClusterSection, nodes: int) -> None:
        """``nodes`` is how many the run has (``run.nodes``)."""
        self.cluster = cluster
        self.name = cluster.node
        self.bus: Bus
        self.leaser: QuotaLeaser
        self.answers: AnswerStream | None = None
        self._nodes = nodes
        self._beat_seconds = cluster.lost_seconds / HEARTBEATS
        self.membership = Membership(self.name, nodes, cluster.lost_seconds, self.now())
        self._local: LocalRun | None = None
        self.instance = ""
        self._beat = 0
        self._ended = False
        self._confirmed_at = self.now()
        self._publish_now = asyncio.Event()
        self.claims: dict[str, str] = {}
        self._failure: Cause | None = None  # what failed before there was a latch to close
        self._tasks: list[asyncio.Task[None]] = []
        self._latch_task: asyncio.Task[None] | None = None
        self._lease_task: asyncio.Task[None] | None = None
        self._log = structlog.get_logger("node")

    # --- joining ----------------------------------------------------------------------------------

    async def connect(self, connect: Connect, totals: Amounts) -> None:
        """Reaches the servers. ``totals`` are the run's quotas. Raises ``ClusterUnreachable``."""
        self.bus = await connect(self.cluster, self.cluster.run_id, on_link=self._on_link)
        self.leaser = QuotaLeaser(
            self.bus,
            self.name,
            totals=totals,
            members=self._nodes,
            lease_block=self.cluster.lease_block,
        )

    async def follow_answers(self, on_digest: Callable[[bytes], None]) -> AnswerStream:
        """Reads what all nodes answered so far, and goes on reading."""
        stream = AnswerStream(self.bus, on_digest=on_digest, on_failure=self._fail)
        await stream.begin()
        async with asyncio.timeout(READ_SECONDS):
            await stream.read_up()
        self.answers = stream
        return stream

    async def join(self, ours: Mapping[str, Any], instance: str, claim_sha256: str) -> None:
        """Takes this node's place. Raises ``ClusterRefused`` where it may not have it."""
        await agree(self.bus, self.name, ours)
        await self.leaser.join()
        await register(self.bus, self.name, instance)
        self.instance = instance
        await self.bus.put(f"{CLAIM}.{self.name}", claim_sha256.encode())
        for prefix in (REGISTERED, CLAIM, STATE, LATCH):
            await self.bus.watch(prefix, self._on_value)

    async def begin(self, local: LocalRun, on_question: OnQuestion) -> None:
        """The run is claimed: from now on this node publishes its state, and its latch closes with
        the run's.

        Returns once a latch that was closed before is closed here too.
        """
        self._local = local
        self._confirmed_at = self.now()
        self.leaser.serve(local.state)
        if self._failure is not None:
            local.close(self._failure.cause, self._failure.detail)
        if local.state.closed:
            with contextlib.suppress(errors.LedgerFailed):  # closed all the same, and known
                await local.latch_durable()
        self._start("answers questions", retry_forever(lambda: self.bus.answer(on_question)))
        self._start("publishes its state", self._publish_states())
        self._start("looks at the clock", self._watch_clock())
        self._lease_task = self._start("leases", self.leaser.run())
        self._latch_task = self._start("publishes its latch", self._publish_latch())
        if self.answers is not None:
            self._start("publishes answers", self.answers.run())
        # Before it serves: a state of its last life, as "ended", must not stand for what it does
        # now.
        with contextlib.suppress(errors.ClusterUnreachable):
            await self._publish_state()

    def _start(self, what: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=f"the node {what}")
        task.add_done_callback(self._on_task_done)
        self._tasks.append(task)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """Without one of its tasks this node misses what others publish, or publishes nothing
        itself: the run is over.
        """
        if task.cancelled() or task.exception() is None:
            return
        exc = task.exception()
        named = exc if isinstance(exc, errors.SidecarError) else None
        self._log.error("the node's own work broke", task=task.get_name(), exc_info=exc)
        self._fail(named or errors.INTERNAL_ERROR(f"{task.get_name()}: {type(exc).__name__}"))

    # --- publishing -------------------------------------------------------------------------------

    def state(self) -> NodeState:
        """What this node says about itself now. Each call has a number of its own."""
        self._beat += 1
        return self.local.status(instance=self.instance, beat=self._beat, ended=self._ended)

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
        state = self.state()
        try:
            await self.bus.put(f"{STATE}.{self.name}", state.encode())
        except errors.ClusterUnreachable:
            self.membership.on_disconnected(self.now())
            raise
        self._confirmed_at = self.now()
        if self.bus.connected:
            self.membership.on_connected(self.now())
        self.membership.on_state(self.name, state, self.now())

    def note_own_state(self) -> None:
        """Enters this node's own state, as of now, among the members."""
        self.membership.on_state(self.name, self.state(), self.now())

    async def _watch_clock(self) -> None:
        while True:
            await asyncio.sleep(self._beat_seconds / TICKS)
            if not self.bus.connected:
                self.membership.on_disconnected(self.now())
            elif self.now() - self._confirmed_at > UNCONFIRMED_SHARE * self.cluster.lost_seconds:
                self.membership.on_disconnected(self._confirmed_at)
            self.close_by(self.membership.on_tick(self.now()))

    async def _publish_latch(self) -> None:
        """The first node whose latch closes sets the run's; the key is created only once."""
        local = self.local
        await local.latched.wait()
        self.leaser.wake()
        self._publish_now.set()
        # Also where this node's own ledger has failed: the others must learn the cause.
        with contextlib.suppress(errors.LedgerFailed):
            await local.latch_durable()
        cause = local.state.cause
        if cause is None:
            raise errors.INTERNAL_ERROR("a closed latch has no cause")
        detail = cause.detail[:DETAIL_CHARACTERS]
        value = canonical({"node": self.name, "cause": cause.cause, "detail": detail})
        await retry_forever(lambda: self.bus.create(LATCH, value))

    # --- receiving --------------------------------------------------------------------------------

    def _on_link(self, up: bool) -> None:
        if not up:
            self.membership.on_disconnected(self.now())
        self._publish_now.set()

    def _on_value(self, key: str, value: bytes) -> None:
        prefix, _, name = key.partition(".")
        try:
            if prefix == LATCH:
                self._on_latch(value)
            elif prefix == CLAIM:
                self.claims[name] = value.decode("ascii", "replace")
            elif prefix == REGISTERED:
                instance = Registration.decode(value).instance
                if instance != WITHDRAWN:
                    self.membership.on_joined(name, instance, self.now())
            elif name != self.name:
                self.membership.on_state(name, NodeState.decode(value), self.now())
        except errors.SidecarError as exc:
            self._fail(exc)

    def _on_latch(self, value: bytes) -> None:
        latch = read_canonical(value, "the run's latch")
        self._close(latch["cause"], f"on node {latch['node']}: {latch['detail']}")

    def _fail(self, exc: errors.SidecarError) -> None:
        self._close(exc.cause or errors.INTERNAL_ERROR.closes_as, exc.message)

    def close_by(self, verdict: RunVerdict) -> None:
        """Closes this node's latch where the verdict names a cause."""
        if verdict.cause is not None:
            self._close(verdict.cause, verdict.detail)

    def _close(self, cause: str, detail: str) -> None:
        if self._local is None:
            self._failure = self._failure or Cause(cause, None, False, detail)
        elif not self._ended:
            self._local.close(cause, detail)

    # --- leaving ----------------------------------------------------------------------------------

    def ending(self) -> None:
        """From now on nothing closes this node's latch: its journal is about to end."""
        self._ended = True

    async def leave(self) -> None:
        """Returns what was leased and not used, and publishes that this node has ended.

        After the run's last record. Best effort within a bound: if the others do not learn of it,
        they count this node as lost.
        """
        try:
            async with asyncio.timeout(END_SHARE * self.cluster.lost_seconds):
                if self._latch_task is not None and self.local.state.closed:
                    await self._latch_task
                if self.answers is not None:
                    await self.answers.published()
                if self._lease_task is not None:  # it would lease anew what is given back
                    self._lease_task.cancel()
                    await asyncio.wait([self._lease_task])
                await self.leaser.give_back()
                await self._publish_state()
        except (TimeoutError, errors.ClusterUnreachable, errors.ClusterUnreadable) as exc:
            why = str(exc) or "the servers did not answer in time"
            self._log.warning("the other nodes do not know that this one ended", reason=why)
        await self.close()

    async def withdraw(self) -> None:
        """Gives the name back where the run was not begun after all; then closes. Best effort."""
        try:
            async with asyncio.timeout(END_SHARE * self.cluster.lost_seconds):
                if self.instance:
                    await withdraw(self.bus, self.name, self.instance)
        except (TimeoutError, errors.ClusterUnreachable, errors.ClusterUnreadable) as exc:
            why = str(exc) or "the servers did not answer in time"
            self._log.warning("the node's name could not be given back", reason=why)
        await self.close()

    async def close(self) -> None:
        """Ends this node's tasks and its connection."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.bus.close()

    def now(self) -> float:
        """This node's own monotonic clock, in seconds: the only one that the rules see."""
        return asyncio.get_running_loop().time()

    @property
    def local(self) -> LocalRun:
        """The run of this process, once it has begun."""
        if self._local is None:
            raise errors.INTERNAL_ERROR("the node was asked before its run had begun")
        return self._local


async def retry_forever(call: Callable[[], Awaitable[object]]) -> None:
    """Calls until the servers take it. Only for what may be done twice and must be done once."""
    while True:
        try:
            await call()
            return
        except errors.ClusterUnreachable:
            await asyncio.sleep(RETRY_SECONDS)

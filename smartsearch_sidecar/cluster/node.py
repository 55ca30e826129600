"""One node of a run: what it says to the others, what it hears of them, and what that comes to.

The rules are in ``presence.py``, ``lease.py`` and ``digests.py``; what is spoken is in ``bus.py``.
Here both meet the run: a failure heard of closes this node's latch, a failure of its own is told.
The daemon joins before it claims, begins before it serves, and leaves after its last record.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final

import structlog

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.answers import AnswerStream
from smartsearch_sidecar.cluster.bus import RETRY_SECONDS, Asked, Bus
from smartsearch_sidecar.cluster.canonical import canonical, read_canonical
from smartsearch_sidecar.cluster.joining import REGISTERED, WITHDRAWN, agree, register, withdraw
from smartsearch_sidecar.cluster.local_run import Connect, LocalRun
from smartsearch_sidecar.cluster.membership import HEARTBEATS, Membership, Verdict
from smartsearch_sidecar.cluster.nodestate import NodeState, Registration
from smartsearch_sidecar.cluster.quota_leaser import QuotaLeaser
from smartsearch_sidecar.cluster.quota_leases import Amounts
from smartsearch_sidecar.config import Cluster
from smartsearch_sidecar.run.record import Cause

LATCH: Final = "latch"
STATE: Final = "state"
CLAIM: Final = "claim"
READ_SECONDS: Final = 600.0  # a late node reads all answers there are before it serves
DETAIL_CHARACTERS: Final = 2000  # of a cause, where the others keep it
TICKS: Final = 2  # looks at the clock a beat
UNHEARD_SHARE: Final = 0.6
"""Of lost_seconds: a word that nobody has confirmed for so long was said to nobody. Longer than
servers need for a new leader, and early enough that the others' silence is not held against them.
"""
END_SHARE: Final = 0.2  # of lost_seconds: what leaving may take in all


class Node:
    """This node. Everything is called on the loop."""

    def __init__(self, cluster: Cluster, nodes: int) -> None:
        self.cluster = cluster
        self.name = cluster.node
        self.bus: Bus
        self.leasing: QuotaLeaser
        self.answers: AnswerStream | None = None
        self._nodes = nodes
        self._beat_seconds = cluster.lost_seconds / HEARTBEATS
        self.company = Membership(self.name, nodes, cluster.lost_seconds, self.now())
        self._own: LocalRun | None = None
        self.instance = ""
        self._beat = 0
        self._ended = False
        self._confirmed_at = self.now()
        self._say = asyncio.Event()
        self.claims: dict[str, str] = {}
        self._failure: Cause | None = None  # heard of before there was a latch to close
        self._tasks: list[asyncio.Task[None]] = []
        self._telling: asyncio.Task[None] | None = None
        self._leases: asyncio.Task[None] | None = None
        self._log = structlog.get_logger("node")

    # --- joining ----------------------------------------------------------------------------------

    async def connect(self, connect: Connect, totals: Amounts) -> None:
        """Reaches the servers. ``totals`` are the run's quotas. Raises ``ClusterUnreachable``."""
        self.bus = await connect(self.cluster, self.cluster.run_id, linked=self._linked)
        self.leasing = QuotaLeaser(
            self.bus,
            self.name,
            totals=totals,
            members=self._nodes,
            lease_block=self.cluster.lease_block,
        )

    async def follow_answers(self, learn: Callable[[bytes], None]) -> AnswerStream:
        """Reads what all nodes answered so far, and goes on reading."""
        stream = AnswerStream(self.bus, learn=learn, broken=self._broken)
        await stream.begin()
        async with asyncio.timeout(READ_SECONDS):
            await stream.read_up()
        self.answers = stream
        return stream

    async def join(self, ours: Mapping[str, Any], instance: str, claim_sha256: str) -> None:
        """Takes this node's place. Raises ``ClusterRefused`` where it may not have it."""
        await agree(self.bus, self.name, ours)
        await self.leasing.enrol()
        await register(self.bus, self.name, instance)
        self.instance = instance
        await self.bus.put(f"{CLAIM}.{self.name}", claim_sha256.encode())
        for prefix in (REGISTERED, CLAIM, STATE, LATCH):
            await self.bus.watch(prefix, self._heard)

    async def begin(self, own: LocalRun, asked: Asked) -> None:
        """The run is claimed: from now on this node speaks, and closes its latch with the run's.

        Returns once a latch that was closed before is closed here too.
        """
        self._own = own
        self._confirmed_at = self.now()
        self.leasing.serve(own.state)
        if self._failure is not None:
            own.close(self._failure.cause, self._failure.detail)
        if own.state.closed:
            with contextlib.suppress(errors.LedgerFailed):  # closed all the same, and known
                await own.latch_durable()
        self._start("answers questions", retry_forever(lambda: self.bus.answer(asked)))
        self._start("speaks", self._speak())
        self._start("looks at the clock", self._watch_clock())
        self._leases = self._start("leases", self.leasing.run())
        self._telling = self._start("tells of its latch", self._tell_latch())
        if self.answers is not None:
            self._start("publishes answers", self.answers.run())
        with contextlib.suppress(errors.ClusterUnreachable):
            await self._say_once()  # before it serves, nobody may take its last word for its state

    def _start(self, what: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=f"the node {what}")
        task.add_done_callback(self._stopped)
        self._tasks.append(task)
        return task

    def _stopped(self, task: asyncio.Task[None]) -> None:
        """A task of ours that broke leaves this node deaf or dumb: the run is over."""
        if task.cancelled() or task.exception() is None:
            return
        exc = task.exception()
        named = exc if isinstance(exc, errors.SidecarError) else None
        self._log.error("the node's own work broke", task=task.get_name(), exc_info=exc)
        self._broken(named or errors.INTERNAL_ERROR(f"{task.get_name()}: {type(exc).__name__}"))

    # --- speaking ---------------------------------------------------------------------------------

    def state(self) -> NodeState:
        """What this node says of itself now."""
        self._beat += 1
        return self.own.status(instance=self.instance, beat=self._beat, ended=self._ended)

    async def _speak(self) -> None:
        while True:
            with contextlib.suppress(errors.ClusterUnreachable):
                await self._say_once()
            self._say.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._beat_seconds):
                    await self._say.wait()

    async def _say_once(self) -> None:
        """What was said and kept is how this node knows that the others can hear it."""
        state = self.state()
        try:
            await self.bus.put(f"{STATE}.{self.name}", state.encode())
        except errors.ClusterUnreachable:
            self.company.disconnected(self.now())
            raise
        self._confirmed_at = self.now()
        if self.bus.connected:
            self.company.connected(self.now())
        self.company.heard(self.name, state, self.now())

    def say_to_self(self) -> None:
        """This node's own word, as of now."""
        self.company.heard(self.name, self.state(), self.now())

    async def _watch_clock(self) -> None:
        while True:
            await asyncio.sleep(self._beat_seconds / TICKS)
            if not self.bus.connected:
                self.company.disconnected(self.now())
            elif self.now() - self._confirmed_at > UNHEARD_SHARE * self.cluster.lost_seconds:
                self.company.disconnected(self._confirmed_at)
            self.judge(self.company.ticked(self.now()))

    async def _tell_latch(self) -> None:
        """The run's latch is closed by whoever closes it first; the servers say who that was."""
        own = self.own
        await own.latched.wait()
        self.leasing.wake()
        self._say.set()
        with contextlib.suppress(errors.LedgerFailed):  # then all the more: the others must know
            await own.latch_durable()
        cause = own.state.cause
        if cause is None:
            raise errors.INTERNAL_ERROR("a closed latch has no cause")
        detail = cause.detail[:DETAIL_CHARACTERS]
        value = canonical({"node": self.name, "cause": cause.cause, "detail": detail})
        await retry_forever(lambda: self.bus.create(LATCH, value))

    # --- hearing ----------------------------------------------------------------------------------

    def _linked(self, up: bool) -> None:
        if not up:
            self.company.disconnected(self.now())
        self._say.set()

    def _heard(self, key: str, value: bytes) -> None:
        prefix, _, name = key.partition(".")
        try:
            if prefix == LATCH:
                self._heard_latch(value)
            elif prefix == CLAIM:
                self.claims[name] = value.decode("ascii", "replace")
            elif prefix == REGISTERED:
                instance = Registration.decode(value).instance
                if instance != WITHDRAWN:
                    self.company.joined(name, instance, self.now())
            elif name != self.name:
                self.company.heard(name, NodeState.decode(value), self.now())
        except errors.SidecarError as exc:
            self._broken(exc)

    def _heard_latch(self, value: bytes) -> None:
        told = read_canonical(value, "the run's latch")
        self._close(told["cause"], f"on node {told['node']}: {told['detail']}")

    def _broken(self, exc: errors.SidecarError) -> None:
        self._close(exc.cause or errors.INTERNAL_ERROR.closes_as or exc.code, exc.message)

    def judge(self, verdict: Verdict) -> None:
        """A verdict that names a cause closes this node's latch."""
        if verdict.cause is not None:
            self._close(verdict.cause, verdict.detail)

    def _close(self, cause: str, detail: str) -> None:
        if self._own is None:
            self._failure = self._failure or Cause(cause, None, False, detail)
        elif not self._ended:
            self._own.close(cause, detail)

    # --- leaving ----------------------------------------------------------------------------------

    def ending(self) -> None:
        """Nothing closes this node's latch any more: its journal is about to end."""
        self._ended = True

    async def leave(self) -> None:
        """Says the last word: returns what was leased and not used, and that this node has ended.

        After the run's last record. Best effort, bounded: whoever is not told finds this node lost.
        """
        try:
            async with asyncio.timeout(END_SHARE * self.cluster.lost_seconds):
                if self._telling is not None and self.own.state.closed:
                    await self._telling
                if self.answers is not None:
                    await self.answers.published()
                if self._leases is not None:  # it would lease anew what is given back
                    self._leases.cancel()
                    await asyncio.wait([self._leases])
                await self.leasing.give_back()
                await self._say_once()
        except (TimeoutError, errors.ClusterUnreachable, errors.ClusterUnreadable) as exc:
            self._log.warning("the other nodes could not be told of the end", reason=str(exc))
        await self.close()

    async def withdraw(self) -> None:
        """Gives the name back where the run was not begun after all; then closes. Best effort."""
        try:
            async with asyncio.timeout(END_SHARE * self.cluster.lost_seconds):
                if self.instance:
                    await withdraw(self.bus, self.name, self.instance)
        except (TimeoutError, errors.ClusterUnreachable, errors.ClusterUnreadable) as exc:
            self._log.warning("the node's name could not be given back", reason=str(exc))
        await self.close()

    async def close(self) -> None:
        """Ends what this node does."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.bus.close()

    def now(self) -> float:
        """This node's own clock: nobody else's appears anywhere."""
        return asyncio.get_running_loop().time()

    @property
    def own(self) -> LocalRun:
        """What it knows of its run, once that has begun."""
        if self._own is None:
            raise errors.INTERNAL_ERROR("the node was asked before its run had begun")
        return self._own


async def retry_forever(call: Callable[[], Awaitable[object]]) -> None:
    """Until the servers have taken it; what may be said twice, and must be said once."""
    while True:
        try:
            await call()
            return
        except errors.ClusterUnreachable:
            await asyncio.sleep(RETRY_SECONDS)

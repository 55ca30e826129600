"""Keeps this node's lease of the run's quotas ahead of what it uses.

``quota_leases.py`` has the rules; here is when they are asked. One task makes every change to the
key, so a node never races itself. A request that finds no room waits for one round of that task:
what the run had left is only as new as the last value seen.

Apart from ``node.py``, which only starts and ends it: when to lease is a matter of its own.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster import quota_leases as quota
from smartsearch_sidecar.cluster.bus import RETRY_SECONDS, Bus
from smartsearch_sidecar.cluster.quota_leases import SEARCHES, Amounts, Leases, NodeLease, resource
from smartsearch_sidecar.run.state import RunState

QUOTA: Final = "quota"


class QuotaLeaser:
    """Leases for this node, and waits for room. Everything here is called on the loop. ``woken``
    and ``room_to_…`` are ``ledger.recorder.SharedQuota``.
    """

    def __init__(
        self, bus: Bus, node: str, totals: Amounts, members: int, lease_block: int
    ) -> None:
        """``totals`` are the run's quotas, ``members`` how many nodes it has."""
        self._bus, self._node = bus, node
        self.totals = dict(totals)
        self._members = members
        self._block = quota.blocks(totals, lease_block, members)
        self._lease = NodeLease(node, self._block)
        self._state = RunState()
        self._asked = asyncio.Event()
        self._needs: dict[asyncio.Future[None], Amounts] = {}
        self._calls: dict[str, tuple[Amounts, int]] = {}  # by split; asked for in which round
        self._wakes: list[Callable[[], None]] = []
        self._begun = 0  # rounds: each takes up what is needed when it begins
        self._ended = 0  # the last that came to its end
        self._away: errors.ClusterUnreachable | None = None

    async def join(self) -> None:
        """Takes a place in the run. Raises ``ClusterRefused`` where all are taken."""
        await self._change(lambda value: quota.joined(value, self._node))

    def serve(self, state: RunState) -> None:
        """From now on ``state`` says what this node has used."""
        self._state = state

    async def run(self) -> None:
        """Leases whenever there is need, until cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            self._begun += 1
            try:
                await self._change(self._more)
            except errors.ClusterUnreachable as exc:
                self._away = exc
                self._asked.set()
                await asyncio.sleep(RETRY_SECONDS)
                continue
            self._away, self._ended = None, self._begun
            self.wake()

    def wake(self) -> None:
        """Makes every waiting request look for room again."""
        for waiter in self._needs:
            if not waiter.done():
                waiter.set_result(None)
        for wake in self._wakes:
            wake()

    def woken(self, wake: Callable[[], None]) -> None:
        self._wakes.append(wake)

    async def give_back(self) -> None:
        """Returns what was leased and not used; for a clean end, after the last use."""
        used = quota.used_of(self._state)
        await self._change(lambda value: quota.returned(value, self._node, used))

    def _more(self, value: Leases) -> Leases:
        needed: Counter[str] = Counter()
        for need in (*self._needs.values(), *(need for need, _ in self._calls.values())):
            needed.update(need)
        wanted = self._lease.wanted(quota.used_of(self._state), needed)
        return quota.leased(value, self._node, wanted)[0] if wanted else value

    async def _change(self, change: Callable[[Leases], Leases]) -> None:
        """Replaces the key's value by what ``change`` makes of it, and tries again where another
        node was faster. An update whose answer was lost is settled by reading the value again.
        """
        attempt = 0
        while True:
            entry = await self._bus.get(QUOTA)
            value, revision = Leases(self._members, self.totals), 0
            if entry is not None:
                value, revision = Leases.decode(entry.value), entry.revision
                self._lease.seen(value, revision)
            new = change(value)
            if entry is not None and new == value:
                return
            # A key that is not there yet has revision 0.
            if await self._bus.update(QUOTA, new.encode(), revision):
                # The key's own revision is this or a later one; the next read brings it.
                self._lease.seen(new, revision + 1)
                return
            attempt += 1
            await asyncio.sleep(quota.pause(attempt, random.random()))

    async def room_to_search(self, deadline: float) -> None:
        used = self._state.attempts
        self._ahead(SEARCHES, used)
        if not self._lease.fits(SEARCHES, used):
            await self._room(lambda: {SEARCHES: 1}, deadline)

    async def room_to_score(self, wanted: Callable[[], Mapping[str, int]], deadline: float) -> None:
        def needed() -> dict[str, int]:
            return {resource(split, quota.SCORES): count for split, count in wanted().items()}

        await self._room(needed, deadline)

    async def _room(self, needed: Callable[[], Amounts], deadline: float) -> None:
        asked: int | None = None
        while True:
            self._state.refuse_closed()
            need, used = needed(), quota.used_of(self._state)
            if all(self._lease.fits(name, used[name], need[name]) for name in need):
                return
            if asked is None or self._ended > asked:
                if asked is not None:
                    self._refuse_exhausted(need, used)
                asked = self._begun  # a round that begins from now on includes this need
            await self._next_round(need, deadline)

    async def _next_round(self, need: Amounts, deadline: float) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._needs[waiter] = need
        self._asked.set()
        try:
            async with asyncio.timeout_at(deadline):
                await waiter
        except TimeoutError:
            raise errors.CLUSTER_UNREACHABLE(
                "this node's lease is used up, and no more could be leased before the deadline: "
                + (self._away.message if self._away else "too many nodes asked at once")
            ) from None
        finally:
            del self._needs[waiter]

    def room_to_call(self, split: str, wanted: int) -> int:
        meter = self._state.scores.splits[split]
        calls = resource(split, quota.HELPER_CALLS)
        tokens = resource(split, quota.OUTPUT_TOKENS)
        used = {calls: meter.model_attempts, tokens: meter.committed_output_tokens}
        need = {calls: 1, tokens: meter.cap}
        room = min(self._lease.left(name, used[name]) // need[name] for name in need)
        if room > 0:
            self._calls.pop(split, None)
            for name in need:
                self._ahead(name, used[name])
            return min(wanted, room)
        _, asked = self._calls.get(split, (None, None))
        # A call that is not settled yet gives back tokens as a rule, but never itself.
        may_settle = meter.unsettled and self._lease.fits(calls, used[calls])
        if asked is not None and self._ended > asked and not may_settle:
            self._refuse_exhausted(need, used)
        if asked is None or self._ended > asked:
            self._calls[split] = need, self._begun
            self._asked.set()
        return 0

    def _ahead(self, name: str, used: int) -> None:
        # Not while a round is under way: the first request after it sees what it brought.
        if 2 * self._lease.left(name, used) < self._block[name] and self._begun == self._ended:
            self._asked.set()

    def _refuse_exhausted(self, need: Amounts, used: Amounts) -> None:
        for name, amount in need.items():
            if self._lease.exhausted(name, used[name], amount):
                raise errors.QUOTA_EXHAUSTED(
                    f"{amount} more of {name} do not fit: all of the run's {self.totals[name]} "
                    f"are leased to its nodes, and node {self._node} has used what it had"
                )

"""In front of the guard: identical searches in flight are shared, repeats of one are cached.

Every request still counts and is recorded by its caller; here only the work is saved. A search runs
in a task of its own, so that a caller that leaves or runs out of time neither cancels it for others
nor waits for it: its late result is dropped (or serves the next one who asks).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Literal

from smartsearch_sidecar import errors
from smartsearch_sidecar.retrieval.guard import Guard
from smartsearch_sidecar.retrieval.passages import Found

Outcome = Literal["miss", "shared", "hit"]


async def _until(flight: asyncio.Task[Found], deadline: float) -> Found:
    """The flight's result, or ``DeadlinePassed``; neither the wait's end nor its cancellation
    touches the flight. One future and one timer: half of what ``timeout_at`` and ``shield`` cost.
    """
    loop = asyncio.get_running_loop()
    turn: asyncio.Future[None] = loop.create_future()

    def wake(_: object = None) -> None:
        if not turn.done():
            turn.set_result(None)

    flight.add_done_callback(wake)
    timer = loop.call_at(deadline, wake)
    try:
        await turn
    finally:
        timer.cancel()
        flight.remove_done_callback(wake)
    if not flight.done():
        raise errors.DeadlinePassed("the search was still running at the deadline")
    return flight.result()


class SearchCache:
    """Least recently used answers, bounded by bytes; a bound of 0 keeps nothing."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._entries: OrderedDict[str, Found] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, query: str) -> Found | None:
        """The answer to exactly this query, refreshed."""
        found = self._entries.get(query)
        if found is not None:
            self._entries.move_to_end(query)
        return found

    def put(self, query: str, found: Found) -> None:
        """Keeps an answer, and lets the oldest go until all fit."""
        if found.size + len(query) > self._bytes_max or query in self._entries:
            return
        self._entries[query] = found
        self.bytes += found.size + len(query)
        while self.bytes > self._bytes_max:
            old_query, old = self._entries.popitem(last=False)
            self.bytes -= old.size + len(old_query)


class Retrieval:
    """What the service asks: one query, one deadline, one named outcome."""

    def __init__(self, guard: Guard, *, cache_bytes: int) -> None:
        """``cache_bytes`` of 0 also turns the sharing of searches in flight off."""
        self.guard = guard
        self._share = cache_bytes > 0
        self.cache = SearchCache(cache_bytes)
        self._flights: dict[str, asyncio.Task[Found]] = {}
        self._tasks: set[asyncio.Task[Found]] = set()

    async def find(self, query: str, deadline: float) -> tuple[Found, Outcome]:
        """The documents of ``query``, and whether they cost a search.

        Raises ``DeadlinePassed`` at ``deadline`` (loop clock), or what the guard raised.
        """
        found = self.cache.get(query)
        if found is not None:
            return found, "hit"
        outcome: Outcome = "shared"
        flight = self._flights.get(query)
        if flight is None:
            outcome = "miss"
            flight = self._start(query, deadline)
        return await _until(flight, deadline), outcome

    def _start(self, query: str, deadline: float) -> asyncio.Task[Found]:
        task = asyncio.get_running_loop().create_task(self.guard.search(query, deadline))
        self._tasks.add(task)
        if self._share:
            self._flights[query] = task
        task.add_done_callback(lambda done: self._ended(query, done))
        return task

    def _ended(self, query: str, task: asyncio.Task[Found]) -> None:
        self._tasks.discard(task)
        if self._flights.get(query) is task:
            del self._flights[query]
        if not task.cancelled() and task.exception() is None and self._share:
            self.cache.put(query, task.result())

    async def close(self) -> None:
        """Cancels searches nobody waits for any more and closes the provider."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.guard.provider.close()

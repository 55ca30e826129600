"""In front of the guard: identical searches in flight are shared, repeats of one are cached.

Every request still counts and is recorded by its caller; here only the work is saved. A search runs
in a task of its own, so that a caller that leaves or runs out of time neither cancels it for others
nor waits for it: its late result is dropped, or serves the next request that asks alike.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, Literal

from cachetools import LRUCache

from smartsearch_sidecar import errors
from smartsearch_sidecar.retrieval.guard import Guard
from smartsearch_sidecar.retrieval.passages import Found

Outcome = Literal["miss", "shared", "hit"]
Key = tuple[str, int | None]
"""A query and how many passages are asked for; ``None`` is the contract's number."""
_Kept = tuple[str, Found]
"""A query beside its answer: values are sized without their keys, and a query counts too."""


async def _until(flight: asyncio.Task[Found], deadline: float) -> Found:
    """The flight's result, or ``DeadlinePassed``; neither the wait's end nor its cancellation
    touches the flight. One future and one timer: half of what ``timeout_at`` and ``shield`` cost.
    """
    if flight.done():
        return flight.result()
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
        raise errors.DEADLINE_PASSED("the search was still running at the deadline")
    return flight.result()


def _begun(search: Coroutine[Any, Any, Found]) -> asyncio.Task[Found]:
    """The search in a task of its own; from Python 3.12 on it runs at once as far as it can, and
    one that need not wait costs no turn of the loop.
    """
    loop = asyncio.get_running_loop()
    if sys.version_info >= (3, 12):
        return asyncio.Task(search, loop=loop, eager_start=True)
    return loop.create_task(search)


class SearchCache:
    """Least recently used answers, bounded by bytes; a bound of 0 keeps nothing."""

    def __init__(self, bytes_max: int) -> None:
        self._entries: LRUCache[Key, _Kept] = LRUCache(bytes_max, getsizeof=_size)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        """What the answers and their queries take."""
        return int(self._entries.currsize)

    def get(self, key: Key) -> Found | None:
        """The answer to exactly this search, refreshed."""
        entry = self._entries.get(key)
        return None if entry is None else entry[1]

    def put(self, key: Key, found: Found) -> None:
        """Keeps an answer, and lets the oldest go until all fit."""
        entry = (key[0], found)
        if _size(entry) <= self._entries.maxsize:  # a larger one would be refused with ValueError
            self._entries[key] = entry


def _size(entry: _Kept) -> int:
    query, found = entry
    return found.size + len(query)


class CachedSearch:
    """What the service asks: one query, one deadline, one named outcome."""

    def __init__(self, guard: Guard, *, cache_bytes: int) -> None:
        """``cache_bytes`` of 0 also turns the sharing of searches in flight off."""
        self.guard = guard
        self._share = cache_bytes > 0
        self.cache = SearchCache(cache_bytes)
        self._flights: dict[Key, asyncio.Task[Found]] = {}
        self._tasks: set[asyncio.Task[Found]] = set()

    async def find(
        self, query: str, deadline: float, top_n: int | None = None
    ) -> tuple[Found, Outcome]:
        """The documents of ``query``, and whether they cost a search.

        Raises ``DeadlinePassed`` at ``deadline`` (loop clock), or what the guard raised.
        """
        key = (query, None if top_n == self.guard.top_n else top_n)
        found = self.cache.get(key)
        if found is not None:
            return found, "hit"
        outcome: Outcome = "shared"
        flight = self._flights.get(key)
        if flight is None:
            outcome = "miss"
            flight = self._start(key, deadline)
        return await _until(flight, deadline), outcome

    def _start(self, key: Key, deadline: float) -> asyncio.Task[Found]:
        query, top_n = key
        task = _begun(self.guard.search(query, deadline, top_n))
        if task.done():
            self._ended(key, task)
            return task
        self._tasks.add(task)
        if self._share:
            self._flights[key] = task
        task.add_done_callback(lambda done: self._ended(key, done))
        return task

    def _ended(self, key: Key, task: asyncio.Task[Found]) -> None:
        self._tasks.discard(task)
        if self._flights.get(key) is task:
            del self._flights[key]
        if not task.cancelled() and task.exception() is None and self._share:
            self.cache.put(key, task.result())

    async def close(self) -> None:
        """Cancels the searches still running, which no request awaits, and closes the provider."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.guard.provider.close()

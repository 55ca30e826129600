"""Slots: at most so many requests in service, a bounded first-come room for requests that wait.

The slots are an ``asyncio.Semaphore``, which serves waiters in order; around it stand a bound on
the room and one deadline per request. A free slot costs no timer and no suspension; nor does a
question that is answered before its deadline from memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from types import coroutine
from typing import Any, TypeVar

from smartsearch_sidecar import errors

Value = TypeVar("Value")


class Slots:
    """``slots`` in service, at most ``waiting_max`` waiting, first come first served."""

    def __init__(
        self, slots: int, waiting_max: int, *, waited: Callable[[float], None] | None = None
    ) -> None:
        """``waited`` is told the seconds of each wait that ended with a slot."""
        self.slots = slots
        self.waiting_max = waiting_max
        self._semaphore = asyncio.Semaphore(slots)
        self.in_service = 0
        self.waiting = 0
        self.most_waiting = 0
        self.refused = 0
        self.taken = 0
        self._waited = waited
        self._idle = asyncio.Event()

    async def take(self, deadline: float) -> None:
        """Takes a slot; ``deadline`` is in seconds of the loop's clock. Raises ``Busy`` where the
        room is full or the deadline passes first. A cancelled waiter leaves no trace.
        """
        if self._semaphore.locked():
            await self._wait(deadline)
        else:
            await self._semaphore.acquire()  # free and no waiter: returns without suspending
        self.in_service += 1
        self.taken += 1

    async def _wait(self, deadline: float) -> None:
        if self.waiting >= self.waiting_max:
            self.refused += 1
            raise errors.BUSY(
                f"all {self.slots} slots are taken and the waiting room is full "
                f"({self.waiting_max}): raise execute.waiting_max, or send less at once"
            )
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        began = time.monotonic()
        try:
            async with asyncio.timeout_at(deadline):
                await self._semaphore.acquire()
            if self._waited is not None:
                self._waited(time.monotonic() - began)
        except TimeoutError:
            self.refused += 1
            raise errors.BUSY("the deadline passed while waiting for a slot") from None
        finally:
            self.waiting -= 1
            self._tell_idle()

    def give(self) -> None:
        """Gives a slot back; the longest waiter gets it."""
        self.in_service -= 1
        self._semaphore.release()
        self._tell_idle()

    @asynccontextmanager
    async def hold(self, deadline: float) -> AsyncIterator[None]:
        await self.take(deadline)
        try:
            yield
        finally:
            self.give()

    @property
    def idle(self) -> bool:
        return not self.in_service and not self.waiting

    def _tell_idle(self) -> None:
        if self.idle:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Returns once no request is in service or waiting; bound it with a timeout."""
        while not self.idle:
            self._idle.clear()
            await self._idle.wait()


async def run_until_deadline(deadline: float, asking: Coroutine[Any, Any, Value]) -> Value:
    """What ``asking`` returns; ``deadline`` is on the loop's clock.

    It is run as far as it goes at once, and only what then has to wait gets a timer: for a question
    that is answered from memory the timer costs ten times the answer. Raises ``TimeoutError`` at
    the deadline, with ``asking`` cancelled.
    """
    try:
        awaited = asking.send(None)
    except StopIteration as end:
        answer: Value = end.value
        return answer
    async with asyncio.timeout_at(deadline):
        return await _rest(asking, awaited)


@coroutine
def _rest(asking: Coroutine[Any, Any, Value], awaited: Any) -> Generator[Any, Any, Value]:
    """The rest of a coroutine that has already said what it waits for."""
    try:
        yield awaited
    except GeneratorExit:
        asking.close()
        raise
    except BaseException as exc:  # noqa: BLE001 - passed on to whom it was meant for
        try:
            awaited = asking.throw(exc)
        except StopIteration as end:
            answer: Value = end.value
            return answer
        return (yield from _rest(asking, awaited))
    return (yield from asking.__await__())

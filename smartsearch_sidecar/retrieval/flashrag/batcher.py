"""Concurrent searches gathered into few calls, without knowing what a call is.

A *search* is one waiter with a ``lane`` (what one call must have in common, here top-n) and a
``key`` (the query). A *call* takes at most ``batch_max`` distinct keys of one lane. At most
``calls_max`` calls are out at a time, one unless the other end is known to answer side by side.

    entry (lane, key)   joins            leaves (last waiter)      departs     call returns
    ------------------  ---------------  ------------------------  ----------  --------------------
    none                waiting          -                         -           -
    waiting             waiting, shared  gone                      out         -
    out                 (a new entry)    call cancelled when it    -           settled, each waiter
                                         was the last of its call              has its own outcome

- Nothing waits for company: with no call out the next pass of the loop departs, so a lone search
  goes at once, and searches that arrive in the same pass travel together for free.
- The next call departs when the previous one has returned, with what gathered meanwhile; the
  oldest entry chooses the lane, so no lane starves. Where calls take long it lingers a tenth of
  that, at most 5 ms, for the rollouts just answered: they ask again at once, and would otherwise
  travel in two halves that take turns for good. It leaves as soon as they are all back.
- An entry that is out is not joined: its answer belongs to searches that began before it left.
  Sharing with calls already out is the cache's decision, not this machine's.
- A waiter that is cancelled takes only itself away. A call without waiters is cancelled, so
  that a hung one does not hold the searches behind it.

The number waiting has no bound of its own: every waiter holds one of the service's slots.

Apart from ``provider.py``, which alone uses it: the machine knows no retriever and no HTTP.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from smartsearch_sidecar import errors

LINGER_SHARE = 0.1  # of how long the last call took
LINGER_SECONDS_MAX = 0.005
LINGER_SECONDS_MIN = 0.001  # of a quick retriever nothing is gained by waiting

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Failed:
    """The outcome of one key that has no answer, beside others that may have one."""

    error: Exception


@dataclass(slots=True, eq=False)
class _Entry(Generic[Answer]):
    lane: int
    key: str
    waiters: list[asyncio.Future[Answer | Failed]] = field(default_factory=list)
    call: _Call[Answer] | None = None


@dataclass(slots=True, eq=False)
class _Call(Generic[Answer]):
    entries: list[_Entry[Answer]]
    began: float  # loop time
    task: asyncio.Task[None] | None = None


class Gather(Generic[Answer]):
    """Gathers concurrent ``submit`` calls into calls of ``ask(lane, keys)``.

    ``ask`` answers with one outcome per key, in order: an answer or ``Failed``. What it raises is
    raised in every search of that call.
    """

    def __init__(
        self,
        ask: Callable[[int, Sequence[str]], Awaitable[Sequence[Answer | Failed]]],
        *,
        batch_max: int,
        calls_max: int = 1,
    ) -> None:
        self._ask = ask
        self._batch_max = batch_max
        self._calls_max = calls_max
        self._waiting: dict[tuple[int, str], _Entry[Answer]] = {}  # that no call has taken yet
        self._out: set[_Call[Answer]] = set()
        self._boarding: asyncio.Handle | None = None
        self._lingering: asyncio.TimerHandle | None = None
        self._expected = 0  # searches that would fill the call that lingers
        self._closed = False

    def reshape(self, *, batch_max: int, calls_max: int) -> None:
        """Other limits from the next departure on; calls already out are not touched."""
        self._batch_max = batch_max
        self._calls_max = calls_max

    async def submit(self, lane: int, key: str) -> Answer:
        """The answer to ``key``; raises what the call raised, or ``ProviderFault`` once closed."""
        if self._closed:
            raise _closed()
        entry = self._waiting.get((lane, key))
        if entry is None:
            entry = self._waiting[(lane, key)] = _Entry(lane, key)
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Answer | Failed] = loop.create_future()
        entry.waiters.append(waiter)
        if self._lingering is not None:
            if len(self._waiting) >= self._expected:
                self._depart()
        elif self._boarding is None and len(self._out) < self._calls_max:
            self._boarding = loop.call_soon(self._depart)
        try:
            outcome = await waiter
        except asyncio.CancelledError:
            self._leave(entry, waiter)
            raise
        if isinstance(outcome, Failed):
            raise _own_copy(outcome.error)
        return outcome

    async def close(self) -> None:
        """Cancels the calls that are out and fails every search that still waits."""
        self._closed = True
        if self._lingering is not None:
            self._lingering.cancel()
        calls = list(self._out)
        tasks = [call.task for call in calls if call.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        entries = [entry for call in calls for entry in call.entries]
        for entry in [*entries, *self._waiting.values()]:
            _settle(entry, Failed(_closed()))
        self._waiting.clear()

    def _depart(self) -> None:
        self._boarding = None
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
        while self._waiting and len(self._out) < self._calls_max and not self._closed:
            call = _Call(self._board(), asyncio.get_running_loop().time())
            for entry in call.entries:
                entry.call = call
            self._out.add(call)
            call.task = asyncio.get_running_loop().create_task(self._travel(call))
            # A callback and not a `finally`: a task cancelled before its first step runs no code.
            call.task.add_done_callback(lambda _, call=call: self._returned(call))  # type: ignore[misc]

    def _board(self) -> list[_Entry[Answer]]:
        lane = next(iter(self._waiting.values())).lane
        taken: list[_Entry[Answer]] = []
        for entry in self._waiting.values():
            if entry.lane == lane:
                taken.append(entry)
                if len(taken) == self._batch_max:
                    break
        for entry in taken:
            del self._waiting[(entry.lane, entry.key)]
        return taken

    async def _travel(self, call: _Call[Answer]) -> None:
        entries = call.entries
        try:
            outcomes = await self._ask(entries[0].lane, [entry.key for entry in entries])
            if len(outcomes) != len(entries):
                raise errors.INTERNAL_ERROR(
                    f"a call of {len(entries)} searches came back with {len(outcomes)} outcomes"
                )
        except Exception as error:  # noqa: BLE001 - each search of the call raises it
            outcomes = [Failed(error)] * len(entries)
        for entry, outcome in zip(entries, outcomes, strict=True):
            _settle(entry, outcome)

    def _returned(self, call: _Call[Answer]) -> None:
        self._out.discard(call)
        loop = asyncio.get_running_loop()
        seconds = min(LINGER_SHARE * (loop.time() - call.began), LINGER_SECONDS_MAX)
        alone = self._waiting and not self._out and not self._closed
        if not alone or seconds < LINGER_SECONDS_MIN or len(self._waiting) >= self._batch_max:
            self._depart()
        elif self._lingering is None:
            # The rollouts just answered ask again in a moment; else two halves take turns for good.
            self._expected = min(self._batch_max, len(self._waiting) + len(call.entries))
            self._lingering = loop.call_later(seconds, self._depart)

    def _leave(self, entry: _Entry[Answer], waiter: asyncio.Future[Answer | Failed]) -> None:
        if waiter not in entry.waiters:
            return  # Settled in the same pass of the loop: there is nothing left to leave.
        entry.waiters.remove(waiter)
        if entry.waiters:
            return
        if entry.call is None:
            self._waiting.pop((entry.lane, entry.key), None)
        elif entry.call.task is not None and not any(e.waiters for e in entry.call.entries):
            entry.call.task.cancel()


def _settle(entry: _Entry[Answer], outcome: Answer | Failed) -> None:
    waiters, entry.waiters = entry.waiters, []
    for waiter in waiters:
        if not waiter.done():
            # A result even for a failure: an exception set on a future whose waiter is cancelled
            # in the same pass would be reported by the loop as never retrieved.
            waiter.set_result(outcome)


def _own_copy(error: Exception) -> Exception:
    """An exception of this search's own: raising one object in many tasks mixes tracebacks."""
    own = copy.copy(error)
    own.__cause__ = error
    return own


def _closed() -> errors.ProviderFault:
    return errors.PROVIDER_FAULT("the retriever's client is closed; no search is taken any more")

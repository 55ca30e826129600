"""What stands still in a process: requests, calls that others answer, and the event loop itself.

A request, and each call to a provider, a helper, a scorer or a source, stands here from its
beginning to its end, with the time by which it must have ended. A thread that does not come back,
or a cancellation that foreign code swallows, leaves its call here; the gate finds it (``gate/``).

The loop beats four times a second. A beat that comes late says that the loop stood still and for
how long, whatever held it: a callback that blocks, a thread that keeps the interpreter's lock, or a
process that was stopped. What came meanwhile lies in the kernel then, unread: for a few beats
nothing is said to be healthy, and requests count from when the kernel took them (``web/edge/``).
While the loop stands, only a thread can say where; it cannot where the whole process stands.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple, Self

import structlog

from smartsearch_sidecar.errors import Failure

BEAT_SECONDS: Final = 0.25
STILL_SECONDS: Final = 1.0
"""A loop that is later than this stood still: the rollout's client leaves a second after the
default deadline, so less than this costs no answer."""
CATCH_UP_BEATS: Final = 4
"""Beats after which all that came while the loop stood still was read: a turn of the loop accepts a
connection, the next one reads it, the third one begins its request."""
CATCH_UP_BEAT_SECONDS: Final = 0.05
LISTEN_SECONDS: Final = 0.5
PLACES_MAX: Final = 4  # frames of a loop that stands: the innermost is often a library's


@dataclass(eq=False, repr=False, slots=True)
class Wait:
    """Something under way, entered as a context; times are the loop's.

    ``on`` says what is waited for (``provider``), ``call`` which of its calls, ``until`` when it
    must have ended, ``late`` how the latch closes where it has not. ``looks`` counts how often the
    gate has seen it late.
    """

    among: dict[object, Wait]
    on: str
    call: str
    began: float
    until: float
    late: Failure[Any]
    looks: int = 0

    @property
    def bound(self) -> float:
        """The seconds that were allowed."""
        return self.until - self.began

    def __enter__(self) -> Self:
        self.among[self] = self
        return self

    def __exit__(self, *_: object) -> None:
        del self.among[self]


class StoodStill(NamedTuple):
    """A time in which the loop did not move. ``at`` is when it moved again, in loop time."""

    at: float
    seconds: float
    where: str


@dataclass(eq=False, slots=True)
class Stalls:
    """What is under way in one process. Everything here is called on the loop.

    ``unanswered`` gives the loop time of the first byte of the oldest rollout's request that is not
    answered, infinite where there is none: the edge knows a request before any other code. A wait
    stands under itself, or under the task whose end takes it away.
    """

    requests: dict[object, Wait] = field(default_factory=dict)
    calls: dict[object, Wait] = field(default_factory=dict)
    loop: LoopWatch = field(default_factory=lambda: LoopWatch())
    unanswered: Callable[[], float] = field(default=lambda: float("inf"))

    def request(self, on: str, began: float, until: float, late: Failure[Any]) -> Wait:
        """A request of ours: the run is not settled before its end."""
        return Wait(self.requests, on, "request", began, until, late)

    def call(self, on: str, call: str, until: float, late: Failure[Any]) -> Wait:
        """A call that begins now."""
        began = asyncio.get_running_loop().time()
        return Wait(self.calls, on, call, began, until, late)

    def call_of(
        self, task: asyncio.Task[Any], on: str, call: str, until: float, late: Failure[Any]
    ) -> None:
        """A call that a task makes: it stands here from now on until the task is done."""
        began = asyncio.get_running_loop().time()
        self.calls[task] = Wait(self.calls, on, call, began, until, late)
        task.add_done_callback(self.calls.__delitem__)

    def oldest_seconds(self, on: str | None = None) -> float:
        """Age of the oldest request that has not ended, of those ``on`` a route if one is named."""
        begun = [wait.began for wait in self.requests.values() if on in (None, wait.on)]
        if on != "reward":
            begun.append(self.unanswered())
        now = asyncio.get_running_loop().time()
        return max(0.0, now - min(begun, default=now))

    def waits(self) -> Iterator[Wait]:
        """All that is under way, in no order."""
        return chain(self.calls.values(), self.requests.values())

    def late(self) -> Iterator[Wait]:
        """What has outlived its time."""
        now = asyncio.get_running_loop().time()
        return (wait for wait in self.waits() if wait.until < now)


class LoopWatch:
    """Whether the event loop moves. Before ``start`` and after ``stop`` it is taken to move.

    Attributes:
        times: how often it stood still.
        total_seconds, longest_seconds: these times together, and the longest of them.
        last: the last one.
        trusted_until: loop time up to which what is read from a socket has just come. Later than
            that, or while the loop catches up, the kernel must be asked when it came.
    """

    def __init__(self) -> None:
        self.times = 0
        self.total_seconds = self.longest_seconds = 0.0
        self.last: StoodStill | None = None
        self.trusted_until = float("inf")
        self._catching_up = 0
        self._due = 0.0  # loop time of the next beat
        self._timer: asyncio.TimerHandle | None = None
        self._log = structlog.get_logger("loop")
        # Read by the thread: one assignment each, which no lock makes safer.
        self._beat_at = 0.0
        self._where = ""
        self._thread_id = 0
        self._stopped = threading.Event()

    @property
    def steady(self) -> bool:
        """Whether all that came before now has been read, but for what the last turns brought."""
        return asyncio.get_running_loop().time() <= self.trusted_until

    async def caught_up(self) -> None:
        """Returns once the loop is steady; at once where it did not stand still, and after twice
        the time it takes where it stands still again and again.
        """
        for _ in range(2 * CATCH_UP_BEATS):
            if self.steady:
                return
            await asyncio.sleep(CATCH_UP_BEAT_SECONDS)

    def start(self) -> None:
        """Begins to beat on the running loop, and to listen in a thread."""
        self._thread_id = threading.get_ident()
        self._due = asyncio.get_running_loop().time()
        self._beat()
        threading.Thread(target=self._listen, name="loop-watch", daemon=True).start()

    def stop(self) -> None:
        """Ends both; safe to call without a start."""
        self._stopped.set()
        self.trusted_until = float("inf")
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        late, where, self._where = now - self._due, self._where, ""
        stood_still = late > STILL_SECONDS
        self._catching_up = CATCH_UP_BEATS if stood_still else max(0, self._catching_up - 1)
        self._beat_at = time.monotonic()
        self._due = now + (CATCH_UP_BEAT_SECONDS if self._catching_up else BEAT_SECONDS)
        # While it catches up no request is read as fresh: the kernel is asked.
        self.trusted_until = 0.0 if self._catching_up else self._due + STILL_SECONDS
        self._timer = loop.call_at(self._due, self._beat)
        if stood_still:
            self._moved_again(now, late, where or "the whole process")

    def _moved_again(self, now: float, seconds: float, where: str) -> None:
        self.times += 1
        self.total_seconds += seconds
        self.longest_seconds = max(self.longest_seconds, seconds)
        self.last = StoodStill(now, seconds, where)
        self._log.error("the event loop stood still", seconds=round(seconds, 3), where=where)

    # --- in the thread ----------------------------------------------------------------------------

    def _listen(self) -> None:
        began = time.monotonic()
        while not self._stopped.wait(LISTEN_SECONDS):
            now = time.monotonic()
            # A thread that stood still as well (a stopped process, the interpreter's lock) cannot
            # say where the loop stands: it would name the place where the loop moves again.
            own, began = now - began - LISTEN_SECONDS, now
            stood = now - self._beat_at
            if not self._where and own < LISTEN_SECONDS and stood > BEAT_SECONDS + STILL_SECONDS:
                self._where = where = _where(self._thread_id)
                self._log.error("the event loop stands still", seconds=round(stood, 3), where=where)


def _where(thread_id: int) -> str:
    """The innermost lines that a thread is at: file, line and function, without values."""
    frame = sys._current_frames().get(thread_id)  # noqa: SLF001 - public but for its name
    places: list[str] = []
    while frame is not None and len(places) < PLACES_MAX:
        code = frame.f_code
        places.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return " < ".join(places) or "an unknown place"

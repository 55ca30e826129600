"""Threads for code that blocks and may not come back: a retriever, the pinned scorer, a slow disk.

They are daemons, which is why they are not an executor's: ``concurrent.futures`` joins its threads
when the interpreter exits, and a call that hangs in foreign code would keep the process alive.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, TypeVar

from smartsearch_sidecar import errors

_T = TypeVar("_T")


class DaemonThreads:
    """``count`` daemon threads that take calls in order."""

    def __init__(self, count: int, name: str, fault: errors.Failure[Any]) -> None:
        """``name`` stands in messages; ``fault`` is raised where a call cannot be taken."""
        self._name = name
        self._fault = fault
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    async def run(self, call: Callable[[], _T]) -> _T:
        """What ``call`` returns or raises. A caller that leaves before its turn frees the turn.
        Raises ``fault`` after ``stop``, and for what cannot cross to the loop.
        """
        if self._stopped:
            raise self._closed()
        future: Future[_T] = Future()
        self._calls.put((future, call))
        return await asyncio.wrap_future(future)

    def stop(self) -> None:
        """Ends each thread after what it is running; calls still queued fail."""
        if self._stopped:
            return
        self._stopped = True
        with suppress(queue.Empty):
            while (item := self._calls.get_nowait()) is not None:
                if item[0].set_running_or_notify_cancel():
                    item[0].set_exception(self._closed())
        for _ in self._threads:
            self._calls.put(None)

    def join(self) -> None:
        """Waits, after ``stop``, for the calls that are running. Blocks, without a bound."""
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - raised in the task that awaits it
                future.set_exception(self._carried(error))
            else:
                future.set_result(result)
            # Held until the next call comes, they would keep an answer in memory for as long.
            del item, future, call

    def _closed(self) -> errors.SidecarError:
        fault: errors.SidecarError = self._fault(f"{self._name} is closed; no call is taken")
        return fault

    def _carried(self, error: BaseException) -> Exception:
        """What may cross from a thread to the loop: these kinds would mean something else there.

        ``StopIteration`` cannot be set on a future (the caller would wait for ever), a cancellation
        would look like the caller's own, and ``SystemExit`` would end the loop.
        """
        if isinstance(error, Exception) and not isinstance(error, StopIteration | CancelledError):
            return error
        fault: errors.SidecarError = self._fault(f"{self._name} raised {type(error).__name__}")
        fault.__cause__ = error
        return fault

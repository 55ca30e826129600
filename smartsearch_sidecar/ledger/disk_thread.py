"""The writer's thread: it blocks on the disk so that the loop does not, one job after the other.

What an executor keeps for many threads and many callers costs more than a write and its sync: two
futures, a lock and a condition a job. Here are one queue in and one call back.

Apart from ``writer.py``, its one user: a thread that knows no record.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

_Job = tuple["asyncio.Future[None]", Callable[..., None], tuple[Any, ...]]


class DiskThread:
    """One thread for one loop; jobs are done in the order given, and each reports its end."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # A daemon thread: a process that ends without `stop` must not hang on it.
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[..., None], *words: Any) -> asyncio.Future[None]:
        """Has ``work(*words)`` done; the future ends as it ended. Called on the loop."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._jobs.put((done, work, words))
        return done

    def stop(self) -> None:
        """Returns once everything given is done; blocking, and safe to call twice."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            done, work, words = job
            fault: BaseException | None = None
            try:
                work(*words)
            except BaseException as exc:  # noqa: BLE001 - raised where the future is awaited
                fault = exc
            with contextlib.suppress(RuntimeError):  # the loop is closed: no task awaits it
                done.get_loop().call_soon_threadsafe(_end, done, fault)
            del job, done, work, words, fault  # what a batch held is not kept while waiting


def _end(done: asyncio.Future[None], fault: BaseException | None) -> None:
    if done.done():  # the task that awaited it was cancelled
        return
    if fault is None:
        done.set_result(None)
    else:
        done.set_exception(fault)

"""Whether the files that a run was claimed with are still those, asked by the gate.

The provider looks after its own files (its identity). Here are the others, the scorer's source and
the references: edited between two rewards, they would be found at the next one at the earliest.

Apart from ``health.py``: that one says what the run's state is, this one reads files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from smartsearch_sidecar import errors
from smartsearch_sidecar.daemon_threads import DaemonThreads
from smartsearch_sidecar.ledger.recorder import Run

LOOK_SECONDS: Final = 60.0
"""References that were touched are read again, as long as at the start; a disk that takes longer
stands still."""


class FileSources:
    """The ``Sources`` of a service. ``look`` blocks and raises where a file differs."""

    def __init__(self, run: Run, look: Callable[[], None]) -> None:
        self._run = run
        self._look = look
        self._threads = DaemonThreads(1, "the look at the sources", errors.SOURCE_CHANGED)
        self._closed = False

    async def look(self, seconds: float) -> bool:
        """Whether the files were looked at within ``seconds``; one that differs has closed the
        latch. A look that takes longer goes on.
        """
        looking = asyncio.create_task(self._closing())
        await asyncio.wait([looking], timeout=seconds)
        return looking.done()

    async def _closing(self) -> None:
        until = asyncio.get_running_loop().time() + LOOK_SECONDS
        with self._run.stalls.call("sources", "look", until, errors.SOURCE_CHANGED):
            try:
                await self._threads.run(self._look)
            except errors.SidecarError as exc:
                if self._closed:
                    return  # not looked at, and no longer asked for
                self._run.recorder.close_latch(exc.closes_as, detail=exc.message)
            except Exception as exc:  # noqa: BLE001 - nothing may be accepted unlooked at
                failure = errors.INTERNAL_ERROR(f"the sources: {type(exc).__name__}")
                self._run.recorder.close_latch(failure.closes_as, detail=failure.message)

    def close(self) -> None:
        """Ends the thread after what it is at."""
        self._closed = True
        self._threads.stop()

"""The daemon that is hunted: ``python -m tests.verdict.hunted ORDER``, a process of its own.

Its disk and its wall clock obey a file, so that the hunter can strike either while it serves. The
order is a JSON object: ``directory``, ``keys`` of the configuration, ``control`` (the file),
``passage_bytes``, ``resume``, and with it ``more`` of what a resume may be given.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.disk import Disk, OneCallDisk
from smartsearch_sidecar.ledger.receipt import CheckpointReceipt
from smartsearch_sidecar.process.daemon import Daemon
from tests.fakes import wrong_clock
from tests.fakes.provider import FakeProvider, documents_for
from tests.fakes.served import configured

HUNG_SECONDS = 30.0  # a disk that hangs is let go by the hunter long before


class ObedientDisk(OneCallDisk):
    """Does to the run's files what the control file says.

    ``disk`` in it is ``ok``, ``full`` (``left`` more bytes fit; ``names``: a new file fits as
    well), ``read_only``, ``failing`` (the next sync fails), ``slow`` or ``hung`` (a sync takes
    ``seconds``, or lasts until the file says otherwise). ``clock`` is how many seconds the wall
    clock is ahead.
    """

    def __init__(self, control: Path) -> None:
        super().__init__()
        self._control = control
        self._seen = 0
        self._says: dict[str, Any] = {"disk": "ok"}

    @property
    def _state(self) -> str:
        changed = os.stat(self._control).st_mtime_ns
        if changed != self._seen:
            self._seen = changed
            self._says = json.loads(self._control.read_bytes())
            wrong_clock.OFF_SECONDS = self._says.get("clock", 0.0)
        return str(self._says["disk"])

    def open(self, path: Path, flags: int) -> int:
        state = self._state
        if state == "full" and flags & os.O_CREAT and not self._fits(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            self._writable(state)
        return super().open(path, flags)

    def _fits(self, path: Path) -> bool:
        return path.exists() or bool(self._says["names"])

    def _writable(self, state: str) -> None:
        if state == "read_only":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def write(self, fd: int, data: bytes) -> None:
        state = self._state
        self._writable(state)
        if state != "full":
            super().write(fd, data)
            return
        fits = min(len(data), int(self._says["left"]))
        self._says["left"] -= fits
        super().write(fd, data[:fits])
        if fits < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write_synced(self, fd: int, data: bytes) -> None:
        if self._state == "ok":
            super().write_synced(fd, data)
        else:
            Disk.write_synced(self, fd, data)

    def overwrite(self, fd: int, data: bytes) -> None:
        self._writable(self._state)
        self._stand_still()
        super().overwrite(fd, data)

    def truncate(self, fd: int, size: int) -> None:
        self._writable(self._state)
        super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        self._fail()
        self._stand_still()
        super().sync(fd)

    def sync_directory(self, path: Path) -> None:
        self._fail()
        self._stand_still()
        super().sync_directory(path)

    def _fail(self) -> None:
        if self._state == "failing":
            self._says["disk"] = "ok"
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _stand_still(self) -> None:
        if self._state == "slow":
            time.sleep(self._says["seconds"])
        end = time.monotonic() + HUNG_SECONDS
        while self._state == "hung" and time.monotonic() < end:
            time.sleep(0.01)


class SlowProvider(FakeProvider):
    """Takes as many milliseconds as the last word of a query says, and answers with passages of
    ``passage_bytes`` at least.
    """

    def __init__(self, passage_bytes: int) -> None:
        super().__init__()
        self._passage_bytes = passage_bytes

    async def search(self, query: str, top_n: int) -> Sequence[Mapping[str, Any]]:
        await asyncio.sleep(int(query.rpartition(" ")[2]) / 1000)
        return passages(query, self._passage_bytes)


def passages(query: str, passage_bytes: int) -> list[dict[str, Any]]:
    """What a query is answered with."""
    found = documents_for(query)
    for document in found:
        document["contents"] = document["contents"].ljust(passage_bytes, "x")
    return found


async def _serve(order: dict[str, Any]) -> int:
    directory = Path(order["directory"])
    disk = ObedientDisk(Path(order["control"]))
    config = configured(directory, **order["keys"])
    more = order["more"]
    if "receipt" in more:
        more["receipt"] = CheckpointReceipt.parse(more["receipt"].encode())
    daemon = Daemon(
        config,
        disk=disk,
        provider=SlowProvider(order["passage_bytes"]),
        resume=order["resume"],
        **more,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.stop)
    return await daemon.run()


def main() -> int:
    """Serves the order given as the one argument; the exit code is that of ``serve``."""
    order = json.loads(sys.argv[1])
    logging.disable()
    wrong_clock.OFF_SECONDS = 0.0
    wrong_clock.turn_back()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(order))
    except errors.SidecarError as exc:
        print(f"{exc.code}: {exc.message}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

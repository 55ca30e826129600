"""A daemon that dies where it is told to: ``python -m tests.crash.dying ORDER``.

The order is a JSON object: ``directory``, ``keys`` of the configuration, ``resume``,
``passage_bytes``, and the ``point`` at which its disk ends the process by SIGKILL the ``nth``
time that it comes there.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.disk import Disk
from smartsearch_sidecar.ledger.file import JOURNAL
from smartsearch_sidecar.process.daemon import Daemon
from tests.fakes.provider import FakeProvider, documents_for
from tests.fakes.served import configured


class KillingDisk(Disk):
    """Kills this process the ``nth`` time it reaches a point.

    ``point`` is a name of ``Disk.point`` (``torn:`` stands for every set-aside copy), or a file
    with ``:half``: the process dies when half of a write to it is done. Writes to the journal are
    ``write:half``.
    """

    def __init__(self, point: str, nth: int) -> None:
        self._point = point
        self._left = nth
        self._names: dict[int, str] = {}

    def point(self, name: str) -> None:
        self._come_to(_short(name))

    def open(self, path: Path, flags: int) -> int:
        fd = super().open(path, flags)
        self._names[fd] = "write" if path.parent.name == JOURNAL else _short(path.name)
        return fd

    def write(self, fd: int, data: bytes) -> None:
        half = len(data) // 2
        super().write(fd, data[:half])
        self._come_to(f"{self._names[fd]}:half")
        super().write(fd, data[half:])

    def _come_to(self, name: str) -> None:
        if name != self._point:
            return
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)


def _short(name: str) -> str:
    """A point's or a file's name without what only one run has."""
    stem, colon, where = name.partition(":")
    return f"{'torn' if stem.startswith('torn-') else stem}{colon}{where}"


def padded(query: str, passage_bytes: int) -> list[dict[str, Any]]:
    """The fake's documents, each of at least so many bytes: a journal then rotates soon."""
    found = documents_for(query)
    for document in found:
        document["contents"] = document["contents"].ljust(passage_bytes, "x")
    return found


class ForgettingProvider(FakeProvider):
    """Keeps no list of what it was asked: hours of load would show up as a leak."""

    async def search(self, query: str, top_n: int) -> Sequence[Mapping[str, Any]]:
        self.queries.clear()
        return await super().search(query, top_n)


async def _serve(order: dict[str, Any]) -> int:
    provider = ForgettingProvider()
    provider.answer = lambda query: padded(query, order["passage_bytes"])
    disk = KillingDisk(order["point"], order["nth"]) if order["point"] else None
    # A copy of a run is the same run: no key may name where it lies.
    keys = {"retrieval__bm25__index": "never-opened", **order["keys"]}
    config = configured(Path(order["directory"]), **keys)
    resume = order["resume"]
    # No client is at work while a daemon is down here: what a gap means is not these tests'.
    daemon = Daemon(config, disk=disk, provider=provider, resume=resume, trainer_stopped=resume)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, daemon.stop)
    return await daemon.run()


def main() -> int:
    """Serves the order given as the one argument; the exit code is that of ``serve``."""
    logging.disable()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(json.loads(sys.argv[1])))
    except errors.SidecarError as exc:
        print(exc.message, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

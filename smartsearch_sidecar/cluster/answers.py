"""Digests of the answers of all nodes: this node's on their way out, everybody's on their way in.

``digests.py`` has the rules. An answer's digest is added before the answer is handed over; whoever
meets a block that nobody knows asks every node to publish what it holds, and reads so far.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.bus import RETRY_SECONDS, Bus
from smartsearch_sidecar.cluster.digests import Backlog, Watermark, decode_batch


class AnswerStream:
    """The run's stream of digests. Everything here is called on the loop."""

    def __init__(
        self,
        bus: Bus,
        *,
        learn: Callable[[bytes], None],
        broken: Callable[[errors.SidecarError], None],
    ) -> None:
        """``learn`` is told of every digest read; ``broken`` of a stream that cannot be read."""
        self._bus = bus
        self._learn = learn
        self._broken = broken
        self._backlog = Backlog()
        self._added = 0
        self._news = asyncio.Event()
        self._turns: set[asyncio.Future[None]] = set()
        self._read = Watermark()

    @property
    def waiting(self) -> int:
        """Digests that the stream is not known to have."""
        return len(self._backlog)

    def add(self, digest: bytes) -> None:
        """An answer of this node is about to be handed over. Raises ``ClusterUnreachable`` where
        too many wait already.
        """
        self._backlog.add(digest, asyncio.get_running_loop().time())
        self._added += 1
        self._news.set()

    async def begin(self) -> None:
        """Starts to read, from the first message on."""
        await self._bus.read(self._message)

    def _message(self, sequence: int, data: bytes) -> None:
        try:
            if self._read.told(sequence):
                for digest in decode_batch(data):
                    self._learn(digest)
        except errors.SidecarError as exc:
            self._broken(exc)
        self._moved()

    async def run(self) -> None:
        """Publishes what is added, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            seconds = self._backlog.due(loop.time())
            if seconds is None:
                await self._news.wait()
                self._news.clear()
                continue
            await asyncio.sleep(seconds)
            message = self._backlog.take()
            try:
                await self._bus.publish(message)
            except errors.ClusterUnreachable:
                self._backlog.failed()
                await asyncio.sleep(RETRY_SECONDS)
            except BaseException:
                self._backlog.failed()
                raise
            else:
                self._backlog.kept()
                self._moved()

    async def published(self) -> None:
        """Returns once the stream has everything that was added by now."""
        added = self._added
        await self._until(lambda: self._backlog.published >= added)

    async def read_up(self) -> None:
        """Returns once everything that the stream holds by now has been read here."""
        last = await self._bus.last()
        await self._until(lambda: self._read.reached(last))
        if self._read.missed:
            raise errors.CLUSTER_UNREADABLE(
                f"{self._read.missed} messages of answers were never told: the stream was cut"
            )

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._turns.add(turn)
            try:
                await turn
            finally:
                self._turns.discard(turn)

    def _moved(self) -> None:
        for turn in self._turns:
            if not turn.done():
                turn.set_result(None)

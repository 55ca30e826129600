"""Digests of the answers of all nodes: what is published when, and how far the others are read.

Theory. An answer handed over on one node may come back in a rollout that is scored on another. So
every node publishes the 28-byte digest of each answer to one stream, in batches, and reads the
whole stream from its first message. The stream is used as a set: a digest twice is one digest, and
order means nothing, so a batch whose publication was not confirmed is published again.

A block of a rollout is unknown here for one of three reasons: no node of the run gave that answer;
the node that gave it has not published it yet; or it is published and not read here yet. Only the
first is the rollout's fault. ``node.Node.answers_known`` rules out the other two, in that
order: it asks every node to publish what it has added (``AnswerStream.published``), then reads the
stream to its end (``AnswerStream.read_up``).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.bus import RETRY_SECONDS, Bus
from smartsearch_sidecar.cluster.values import unreadable

DIGEST_BYTES: Final = 28
BATCH_MAX: Final = 1024  # digests of one message: 28 KiB, and more than 20 ms bring
BATCH_SECONDS: Final = 0.02  # a digest waits so long for others: at most 50 messages a second
BACKLOG_MAX: Final = 65_536  # 1.8 MB; a lease bounds what waits far below while NATS is away

_MARK: Final = b"SSD2"
_MARK_WITHOUT_QUERY: Final = b"SSD1"  # of a version that bound no answer to its query
_WHAT: Final = "a message of digests"


def encode_batch(digests: Iterable[bytes]) -> bytes:
    """A message: a mark of its format, then 1 to ``BATCH_MAX`` digests end to end."""
    return _MARK + b"".join(digests)


def decode_batch(data: bytes) -> list[bytes]:
    """Reads exactly what ``encode_batch`` writes. Raises ``ClusterUnreadable``."""
    count, rest = divmod(len(data) - len(_MARK), DIGEST_BYTES)
    if data[: len(_MARK)] != _MARK:
        raise unreadable(_WHAT, "it has another mark")
    if rest or not 1 <= count <= BATCH_MAX:
        raise unreadable(_WHAT, f"{len(data)} bytes are not a whole number of digests")
    return [data[at : at + DIGEST_BYTES] for at in range(len(_MARK), len(data), DIGEST_BYTES)]


class Backlog:
    """Digests on their way out: at most one message under way, the rest waits in order. ``take`` a
    message when ``due``, publish it, then call ``kept`` or ``failed``.
    """

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._oldest_at = 0.0
        self._under_way: list[bytes] = []
        self._under_way_since = 0.0
        self.published = 0

    def __len__(self) -> int:
        """Digests that the stream is not known to have."""
        return len(self._waiting) + len(self._under_way)

    def add(self, digest: bytes, now: float) -> None:
        """Raises ``ClusterUnreachable`` where the backlog is full: a digest is never dropped,
        because its answer would be refused on another node.
        """
        if len(digest) != DIGEST_BYTES:
            raise errors.INTERNAL_ERROR(f"a digest has {DIGEST_BYTES} bytes, not {len(digest)}")
        if len(self) >= BACKLOG_MAX:
            raise errors.CLUSTER_UNREACHABLE(
                f"{BACKLOG_MAX} digests of answers wait to be published: the NATS servers are "
                "not reached, or slower than this node answers"
            )
        if not self._waiting:
            self._oldest_at = now
        self._waiting.append(digest)

    def due(self, now: float) -> float | None:
        """Seconds until there is a message to ``take``; ``None`` where time alone brings none."""
        if self._under_way or not self._waiting:
            return None
        if len(self._waiting) >= BATCH_MAX:
            return 0.0
        return max(0.0, self._oldest_at + BATCH_SECONDS - now)

    def take(self) -> bytes:
        """The next message; it is under way until ``kept`` or ``failed``."""
        if self._under_way or not self._waiting:
            raise errors.INTERNAL_ERROR("there is no message of digests to publish")
        self._under_way_since = self._oldest_at
        count = min(BATCH_MAX, len(self._waiting))
        self._under_way = [self._waiting.popleft() for _ in range(count)]
        return encode_batch(self._under_way)

    def kept(self) -> None:
        """The stream has the message. What waits is due by its age: it may be due at once."""
        self.published += len(self._settled())

    def failed(self) -> None:
        """It is not known whether the stream has the message: it is published again, first."""
        self._waiting.extendleft(reversed(self._settled()))
        self._oldest_at = self._under_way_since

    def _settled(self) -> list[bytes]:
        if not self._under_way:
            raise errors.INTERNAL_ERROR("no message of digests is under way")
        settled, self._under_way = self._under_way, []
        return settled


@dataclass(eq=False)
class AnswerStream:
    """The run's stream of digests, as one node writes and reads it. Called on the loop."""

    bus: Bus
    on_digest: Callable[[bytes], object]
    on_failure: Callable[[errors.SidecarError], None]  # receives why a message cannot be read
    _backlog: Backlog = field(default_factory=Backlog, init=False)
    _news: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _progress: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _read: int = field(default=0, init=False)  # the last message read: numbered from 1
    _missed: int = field(default=0, init=False)  # messages that never came: the stream was cut

    def add(self, digest: bytes) -> None:
        """An answer of this node is about to be handed over. Raises as ``Backlog.add`` does."""
        self._backlog.add(digest, asyncio.get_running_loop().time())
        self._news.set()

    async def begin(self) -> None:
        await self.bus.read(self._on_message)

    def _on_message(self, sequence: int, data: bytes) -> None:
        if sequence <= self._read:
            return  # read before, as after a reconnect
        self._missed += sequence - self._read - 1
        self._read = sequence
        try:
            # An earlier version's says nothing here: its node publishes the same answers anew, with
            # their queries, when it resumes.
            old = data.startswith(_MARK_WITHOUT_QUERY)
            for digest in () if old else decode_batch(data):
                self.on_digest(digest)
        except errors.SidecarError as exc:
            self.on_failure(exc)
        self._wake()

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
                await self.bus.publish(message)
            except errors.ClusterUnreachable:
                self._backlog.failed()
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self._backlog.kept()
                self._wake()

    async def published(self) -> None:
        """Returns once the stream has everything that was added by now."""
        added = self._backlog.published + len(self._backlog)
        await self._until(lambda: self._backlog.published >= added)

    async def read_up(self) -> None:
        """Returns once everything that the stream holds by now has been read here. Raises
        ``ClusterUnreadable`` where messages are missing: an unknown digest proves nothing.
        """
        last = await self.bus.last()
        await self._until(lambda: self._read >= last)
        if self._missed:
            why = f"{self._missed} messages of answers never came: the stream was cut"
            raise errors.CLUSTER_UNREADABLE(why)

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._progress.wait()

    def _wake(self) -> None:
        # What waits holds the old event; it looks once more, and waits for the next one.
        self._progress.set()
        self._progress = asyncio.Event()

"""Digests of answers between nodes: what is published when, and when one is known to be missing.

Theory. An answer handed over on one node may come back in a rollout that is scored on another. So
every node publishes the 16-byte digest of each answer it hands over to one stream, in batches, and
reads the whole stream from its first message. The stream is a set in effect: a digest twice is a
digest, order means nothing, so a batch whose publication was never confirmed is published again.

A digest is unknown here for one of three reasons: nobody of the run gave that answer; whoever gave
it has not published it yet; or it was published and not read here. Only the first is the rollout's
fault. The stream's last message, asked for after the digest was found unknown, rules out the third
once read up to; the patience rules out the second. ``Search.decide`` is the table.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.canonical import unreadable

DIGEST_BYTES: Final = 16
BATCH_MAX: Final = 1024
"""Digests of one message: 16 KiB, far below what a server takes, and more than 20 ms bring."""
BATCH_SECONDS: Final = 0.02
"""A digest waits so long for company: 50 messages a second and node at most."""
BACKLOG_MAX: Final = 65_536
"""Digests that wait to be published: 1 MiB. A lease bounds them far below while NATS is away."""
PATIENCE_SECONDS: Final = 5.0
"""How long an unknown digest is waited for: batch, publication and reading take milliseconds."""

_MARK: Final = b"SSD1"
_WHAT: Final = "a message of digests"


# --- the message ----------------------------------------------------------------------------------


def encode_batch(digests: Iterable[bytes]) -> bytes:
    """A message: a mark of its format, then 1 to ``BATCH_MAX`` digests end to end."""
    parts = list(digests)
    if not 1 <= len(parts) <= BATCH_MAX or any(len(part) != DIGEST_BYTES for part in parts):
        raise errors.INTERNAL_ERROR(f"{len(parts)} digests are no batch, or one is of other size")
    return _MARK + b"".join(parts)


def decode_batch(data: bytes) -> list[bytes]:
    """Reads exactly what ``encode_batch`` writes. Raises ``ClusterUnreadable``."""
    count, rest = divmod(len(data) - len(_MARK), DIGEST_BYTES)
    if data[: len(_MARK)] != _MARK:
        raise unreadable(_WHAT, "it has another mark")
    if rest or not 1 <= count <= BATCH_MAX:
        raise unreadable(_WHAT, f"{len(data)} bytes are no number of digests")
    return [data[at : at + DIGEST_BYTES] for at in range(len(_MARK), len(data), DIGEST_BYTES)]


# --- publishing -----------------------------------------------------------------------------------


class Backlog:
    """Digests on their way out: at most one message under way, the rest waits in order.

    ``take`` a message when ``due``, publish it, then say ``kept`` or ``failed``. Times are seconds
    of the node's monotonic clock.
    """

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._oldest_at = 0.0
        self._under_way: list[bytes] = []
        self._under_way_since = 0.0
        self.published = 0
        self.messages = 0

    def __len__(self) -> int:
        """Digests not known to be kept by the stream."""
        return len(self._waiting) + len(self._under_way)

    def add(self, digest: bytes, now: float) -> None:
        """An answer is being handed over. Raises ``ClusterUnreachable`` where the backlog is full:
        no digest is ever dropped, because its answer would be refused elsewhere.
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
        """Seconds until there is a message to ``take``; ``None`` where only news can change it."""
        if self._under_way or not self._waiting:
            return None
        if len(self._waiting) >= BATCH_MAX:
            return 0.0
        return max(0.0, self._oldest_at + BATCH_SECONDS - now)

    def take(self) -> bytes:
        """The next message; it is under way until ``kept`` or ``failed``."""
        if self._under_way or not self._waiting:
            raise errors.INTERNAL_ERROR("there is no message of digests to publish")
        count = min(BATCH_MAX, len(self._waiting))
        self._under_way_since = self._oldest_at
        self._under_way = [self._waiting.popleft() for _ in range(count)]
        return encode_batch(self._under_way)

    def kept(self) -> None:
        """The stream has it. What waits has waited since: it is due at once."""
        self._require_under_way()
        self.published += len(self._under_way)
        self.messages += 1
        self._under_way = []

    def failed(self) -> None:
        """Nobody knows whether the stream has it: it goes out again, first."""
        self._require_under_way()
        self._waiting.extendleft(reversed(self._under_way))
        self._oldest_at = self._under_way_since
        self._under_way = []

    def _require_under_way(self) -> None:
        if not self._under_way:
            raise errors.INTERNAL_ERROR("no message of digests is under way")


def lacking(own: Iterable[bytes], known: Callable[[bytes], bool]) -> Iterator[bytes]:
    """What a resumed node has to publish again: digests of its own journal that the stream lacks.

    ``known`` must be asked after the stream was read up to its last message and before the journal
    is added to what is known; make each digest known as it comes out, and it comes out once.
    """
    return (digest for digest in own if not known(digest))


# --- reading --------------------------------------------------------------------------------------


class Watermark:
    """How far the stream has been read. Its messages are numbered from 1 without gaps."""

    def __init__(self) -> None:
        self.read = 0
        self.missed = 0
        """Messages that were never told: the stream was cut, and answers may stay unknown."""

    def told(self, sequence: int) -> bool:
        """A message; ``False`` where it was read before, as after a reconnect."""
        if sequence <= self.read:
            return False
        self.missed += sequence - self.read - 1
        self.read = sequence
        return True

    def reached(self, last: int) -> bool:
        """Whether everything up to message ``last`` has been read."""
        return self.read >= last


class Decision(enum.StrEnum):
    """What becomes of a reward whose block nobody here knows."""

    KNOWN = "known"
    WAIT = "wait"
    REFUSE = "refuse"
    UNREACHABLE = "unreachable"
    """Nothing is proven: the stream could not be read far enough in time."""


class Search:
    """The wait for one unknown digest; begun when it was found unknown.

    ``last`` is told once the servers said how far the stream goes, asked after that moment.
    """

    def __init__(self, now: float, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self.until = now + patience_seconds
        self._last: int | None = None

    def stream_ends(self, last: int) -> None:
        """The stream's last message."""
        self._last = last

    def decide(self, now: float, read: Watermark, *, known: bool) -> Decision:
        """Ask after each message read, and at ``until``.

        | known | patience over | read so far | |
        |---|---|---|---|
        | yes | - | - | known |
        | no | no | - | wait: another node may be about to publish it |
        | no | yes | yes | refuse: no node of the run gave this answer |
        | no | yes | no | unreachable |
        """
        if known:
            return Decision.KNOWN
        if now < self.until:
            return Decision.WAIT
        up_to_date = self._last is not None and read.reached(self._last) and not read.missed
        return Decision.REFUSE if up_to_date else Decision.UNREACHABLE

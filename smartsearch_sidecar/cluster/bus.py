"""What the nodes of one run need of the system between them: a Protocol, and its few values.

Four things, each as NATS JetStream has them: keys changed by compare-and-set, keys that are
watched, a stream that keeps everything, and a question that every node answers live. ``nats.py``
speaks to the real one; nothing else in the package knows that it is NATS.

Times of other machines' clocks appear nowhere: what matters is when something was heard here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple, Protocol

RETRY_SECONDS: Final = 0.1
"""Between attempts of who goes on asking while the servers do not answer."""


class Entry(NamedTuple):
    """A key's value and the revision that a compare-and-set has to name."""

    value: bytes
    revision: int


Heard = Callable[[str, bytes], None]
"""Told of each value of a watched key, on the loop: the key, the value. Must not raise."""

Read = Callable[[int, bytes], None]
"""Told of each message of the stream, in order, on the loop: its sequence number, its bytes."""

Asked = Callable[[bytes], Awaitable[bytes]]
"""Answers a question that another node (or this one) asked of all."""

Linked = Callable[[bool], None]
"""Told, on the loop, when the connection is lost (False) and when it is back (True)."""


class Bus(Protocol):
    """The nodes' common ground for one run. Every call is bounded in time.

    All raise ``ClusterUnreachable`` where the servers do not answer in time; nothing is ever
    retried behind the caller's back where that could change a value twice.
    """

    @property
    def connected(self) -> bool:
        """Whether the servers are reached right now, as far as is known."""
        ...

    async def get(self, key: str) -> Entry | None:
        """The key's value, or None where it was never set."""
        ...

    async def create(self, key: str, value: bytes) -> bool:
        """Sets a key that nobody has set; False where somebody has."""
        ...

    async def update(self, key: str, value: bytes, revision: int) -> bool:
        """Sets a key whose revision is still ``revision``; False where it is not."""
        ...

    async def put(self, key: str, value: bytes) -> None:
        """Sets a key whatever it was."""
        ...

    async def watch(self, prefix: str, heard: Heard) -> None:
        """Tells of every key under ``prefix``: first what is set, then each change, in order.

        Returns once the present values have been told; goes on until ``close``, over reconnects.
        """
        ...

    async def publish(self, data: bytes) -> int:
        """Appends to the run's stream; returns the message's sequence number once it is kept."""
        ...

    async def read(self, read: Read) -> None:
        """Tells of every message of the stream from the first on; goes on over reconnects.

        Returns at once; ``last`` says how far there is to read.
        """
        ...

    async def last(self) -> int:
        """The sequence number of the stream's last message, 0 where there is none."""
        ...

    async def ask(self, question: bytes, *, answers: int, seconds: float) -> Sequence[bytes]:
        """Asks every node; returns at ``answers`` answers or after ``seconds``: those heard."""
        ...

    async def answer(self, asked: Asked) -> None:
        """Answers what is asked from now on, until ``close``."""
        ...

    async def close(self) -> None:
        """Ends everything; safe to call twice and while disconnected."""
        ...

"""What the nodes of one run need of the system between them: a Protocol, and its few values.

Four things, each as NATS JetStream has them: keys changed by compare-and-set, keys that are
watched, a stream that keeps every message, and a question that every node answers live.
``nats/bus.py`` implements it; nothing outside ``nats/`` knows that it is NATS.

No time of another machine's clock appears in it: what counts is when this node received something.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple, Protocol

from smartsearch_sidecar.config import ClusterSection

RETRY_SECONDS: Final = 0.1  # between two attempts while the servers do not answer


class Entry(NamedTuple):
    """A key's value and the revision that a compare-and-set has to name."""

    value: bytes
    revision: int


# What a node hands to its bus; each is called on the loop.
OnValue = Callable[[str, bytes], None]  # each value of a watched key: key, value; must not raise
OnMessage = Callable[[int, bytes], None]  # each message of the stream, in order: number, bytes
OnQuestion = Callable[[bytes], Awaitable[bytes]]  # returns the answer to a question asked of all
OnLink = Callable[[bool], None]  # the connection is lost (False), or back (True)


class Bus(Protocol):
    """The connection of one node to the other nodes of its run. Every call is bounded in time.

    Every call raises ``ClusterUnreachable`` where the servers do not answer in time. No call is
    retried internally where a retry could change a value twice.

    | | |
    |---|---|
    | ``connected`` | whether the servers are reached right now, as far as this node knows |
    | ``get`` | a key's value; ``None`` where it was never set |
    | ``update`` | sets a key whose revision is still ``revision`` (0: no value); False where not |
    | ``put`` | sets a key, over any value it has |
    | ``watch`` | calls ``on_value`` for every key under ``prefix``, in order: first with each \
present value, after which it returns, then with each change |
    | ``publish`` | appends to the run's stream; returns the message's number once it is kept |
    | ``read`` | calls ``on_message`` for every message from the first on; returns at once |
    | ``last`` | the number of the stream's last message, 0 before the first |
    | ``ask`` | asks every node; returns the answers that came, at ``answers`` of them or after \
``seconds`` |
    | ``answer`` | answers questions from now on |

    ``watch``, ``read`` and ``answer`` go on over reconnects until ``close``, which ends everything
    and is safe to call twice and while disconnected.
    """

    @property
    def connected(self) -> bool: ...
    async def get(self, key: str) -> Entry | None: ...
    async def update(self, key: str, value: bytes, revision: int) -> bool: ...
    async def put(self, key: str, value: bytes) -> None: ...
    async def watch(self, prefix: str, on_value: OnValue) -> None: ...
    async def publish(self, data: bytes) -> int: ...
    async def read(self, on_message: OnMessage) -> None: ...
    async def last(self) -> int: ...
    async def ask(self, question: bytes, *, answers: int, seconds: float) -> Sequence[bytes]: ...
    async def answer(self, on_question: OnQuestion) -> None: ...
    async def close(self) -> None: ...


class Connect(Protocol):
    """Makes a node's ``Bus``: ``cluster.nats.bus.connect``, or a test's own."""

    async def __call__(self, cluster: ClusterSection, run_id: str, *, on_link: OnLink) -> Bus: ...

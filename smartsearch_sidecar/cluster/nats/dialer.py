"""Dials the servers, dials again, and reports when the servers are lost or reached again.

``connected`` is one rule over the reasons why it should be False. Each reason has a grace of its
own, because the death of one server of three must not show: another server is dialled within a
pulse, while a new leader among them takes four to nine seconds (NATS's own election, which cannot
be configured). A call that ran out of its time counts as the longest grace: not connected, until a
value is written again. A read is no proof: a server without a quorum still answers reads.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Final, TypeVar
from urllib.parse import urlsplit

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.bus import OnLink
from smartsearch_sidecar.cluster.nats.connection import NatsConnection

REDIAL_SECONDS: Final = 0.25
"""Between two rounds over all servers; short, as each round is a few packets."""

PAUSE_SECONDS: Final = (0.05, 0.5)
"""Between two tries of one call, from the first to the longest."""

T = TypeVar("T")
Attempt = Callable[[NatsConnection], Awaitable[T]]


class Dialer:
    """Holds the one connection to the servers, and replaces it when it ends.

    Attributes:
        patience: the bound of every call, in seconds.
        pulse: seconds between two looks at whether a server still answers; a change of servers
            that takes no longer is not called a loss.
    """

    def __init__(
        self, urls: Sequence[str], name: str, on_link: OnLink, *, patience: float, pulse: float
    ) -> None:
        # In an order of its own: nodes of one configuration spread over the servers.
        self._urls = random.sample(urls, len(urls))
        self._name = name
        self._on_link = on_link
        self.patience = patience
        self.pulse = pulse
        self._tls: ssl.SSLContext | None = None
        self._connection: NatsConnection | None = None
        self._dialled = asyncio.Event()
        self._why = "no NATS server has been dialled yet"
        self._refused: errors.ClusterRefused | None = None
        self._prove: Attempt[None] | None = None
        self._doubted = asyncio.Event()
        self._counts_from: dict[Hashable, float] = {}
        self._connected = False
        self._closed = False
        self._keeping: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """Whether the servers are reached, as far as is known."""
        return self._connected

    @property
    def servers(self) -> int:
        """How many servers are known: configured, or announced by one of them."""
        return len(self._urls)

    async def dial(self) -> None:
        """Starts to dial; returns at once."""
        # Reads the machine's certificates, which takes longer than a turn of the loop may.
        self._tls = await asyncio.to_thread(ssl.create_default_context)
        self._keeping = asyncio.create_task(self._keep(self._tls))

    def begin(self, prove: Attempt[None]) -> None:
        """From now on changes of ``connected`` are reported, and ``prove`` is called over every new
        connection.
        """
        self._prove = prove
        self._connected = True
        # The run's streams were just made over this connection: that is the first proof.
        self._counts_from.pop("proof", None)

    async def reach(self) -> NatsConnection:
        """The connection, as soon as there is one."""
        while True:
            if self._closed:
                raise errors.CLUSTER_UNREACHABLE("the connection to NATS was closed")
            if self._refused is not None:
                raise errors.CLUSTER_UNREACHABLE(self._refused.message)
            if self._connection is not None and not self._connection.ended.is_set():
                return self._connection
            self._dialled.clear()
            await self._dialled.wait()

    async def call(self, attempt: Attempt[T], seconds: float | None = None) -> T:
        """What ``attempt`` returns, tried again over new connections and leaders within the bound.

        Only for what may be done twice: a read, or a write with an id that the servers remember.

        Raises:
            ClusterUnreachable: within ``seconds`` (``patience`` by default); whether a write has
                been kept is then not known.
        """
        why = ""
        pause, longest = PAUSE_SECONDS
        try:
            async with asyncio.timeout(self.patience if seconds is None else seconds):
                while True:
                    connection = await self.reach()
                    try:
                        return await attempt(connection)
                    except errors.ClusterUnreachable as exc:
                        why = exc.message
                    await asyncio.sleep(pause)
                    pause = min(longest, 1.5 * pause)
        except TimeoutError:
            # Whenever this raises, ``connected`` is False: the caller's refusal names the servers.
            if self._connection is None:
                self.note("connection", 0)
            else:
                self.note("proof", 0)
                self._doubted.set()
            raise errors.CLUSTER_UNREACHABLE(
                f"NATS does not answer: {why or self._why}; check cluster.nats_url, and that a "
                "majority of its servers runs with JetStream"
            ) from None

    def note(self, reason: Hashable, grace: float) -> None:
        """Counts as not connected in ``grace`` seconds, unless cleared before."""
        if self._closed:
            return
        loop = asyncio.get_running_loop()
        at = loop.time() + grace
        if at < self._counts_from.get(reason, float("inf")):
            self._counts_from[reason] = at
            loop.call_at(at, self._weigh)
            self._weigh()

    def clear(self, reason: Hashable) -> None:
        """The reason does not hold any more."""
        if self._counts_from.pop(reason, None) is not None:
            self._weigh()

    async def close(self) -> None:
        """Ends the connection; no change of ``connected`` is reported any more."""
        self._closed = True
        self._connected = False
        self._dialled.set()
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
            self._keeping = None

    def _weigh(self) -> None:
        if self._closed or self._prove is None:
            return
        now = asyncio.get_running_loop().time()
        if self._connected and any(at <= now for at in self._counts_from.values()):
            self._connected = False
            self._on_link(False)
        elif not self._connected and not self._counts_from:
            self._connected = True
            self._on_link(True)

    async def _keep(self, tls: ssl.SSLContext) -> None:
        while True:
            connection = await self._dial(tls)
            self._connection = connection
            self._learn(connection)
            self._dialled.set()
            self.clear("connection")
            proving = asyncio.create_task(self._proving(connection))
            try:
                await connection.ended.wait()
            finally:
                self._connection = None
                proving.cancel()
                await asyncio.gather(proving, return_exceptions=True)
                self.note("connection", self.pulse)
                self.note("proof", self.patience)
                await connection.close()
            self._why = connection.why
            # The server that was lost is the last to be tried again.
            self._urls.remove(connection.url)
            self._urls.append(connection.url)

    async def _dial(self, tls: ssl.SSLContext) -> NatsConnection:
        while True:
            for url in tuple(self._urls):
                try:
                    return await NatsConnection.dial(
                        url, name=self._name, tls=tls, pulse=self.pulse
                    )
                except errors.ClusterUnreachable as exc:
                    self._why = exc.message
            await asyncio.sleep(REDIAL_SECONDS)

    def _learn(self, connection: NatsConnection) -> None:
        """Adds the servers that this one announces, to be tried after the configured ones."""
        parts = urlsplit(connection.url)
        if parts.scheme != "nats":
            # A certificate names the host that was configured, not what servers call each other.
            return
        known = {urlsplit(url).netloc.rpartition("@")[2] for url in self._urls}
        credentials, at, _ = parts.netloc.rpartition("@")
        self._urls += [
            f"nats://{credentials}{at}{place}"
            for place in connection.discovered
            if place not in known
        ]

    async def _proving(self, connection: NatsConnection) -> None:
        """Checks that values can be written over this connection, whenever that is in doubt."""
        while True:
            if self._prove is not None and "proof" in self._counts_from:
                self._doubted.clear()
                try:
                    await self.call(self._prove)
                except errors.ClusterRefused as exc:
                    self._refused = exc
                    self.note("proof", 0)
                    return
                except errors.ClusterUnreachable:
                    # This server may be on the wrong side of a split; another may have a quorum.
                    connection.end("the NATS server has no quorum")
                    return
                self.clear("proof")
            await self._doubted.wait()
            self._doubted.clear()

"""The connection to the NATS servers: one at a time, replaced when it ends, never repaired.

The one file that imports nats-py, and the only one that uses its private names. nats-py's own
reconnecting is switched off, for three reasons: it sends what was buffered while it was away, so
that a call that was given up long ago changes a key; it ends for good at some of a server's errors;
and it may wait for ever for the socket of a server that is frozen. ``Dialer`` dials another
``NatsConnection`` instead.

Pulses find a server that is frozen or cut off: messages of the connection to itself, one a second
or more often. After two unanswered pulses the connection has ended.

``Dialer.connected`` is one rule over the reasons why it should be False. Each reason has a grace of
its own, because the death of one server of three must not show: another server is dialled within a
pulse, while a new leader among them takes four to nine seconds (NATS's own election, which cannot
be configured). A call that ran out of its time counts as the longest grace: not connected, until a
value is written again. A read is no proof: a server without a quorum still answers reads.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.bus import OnLink

DIAL_SECONDS: Final = 2
PULSES_UNANSWERED: Final = 2
CLOSE_SECONDS: Final = 1.0
NEVER_SECONDS: Final = 86_400  # pulses of our own take the place of the library's pings
REDIAL_SECONDS: Final = 0.25  # between two rounds over all servers; a round is a few packets
PAUSE_SECONDS: Final = (0.05, 0.5)  # between two tries of one call: the first, the longest

# The library's errors are classified here. Its own log would print them to stderr, with addresses
# that may hold a password.
logging.getLogger("nats").addHandler(logging.NullHandler())
logging.getLogger("nats").propagate = False

ENDINGS: Final = (nats.errors.StaleConnectionError, nats.errors.ProtocolError, OSError)

# The private names of nats-py that ``close`` needs.
TASKS: Final = ("_reading_task", "_flusher_task", "_ping_interval_task")
TRANSPORT: Final = "_transport"
WRITER: Final = "_bare_io_writer"

Message = Msg
OnNatsMessage = Callable[[Msg], Awaitable[None]]


def place(url: str) -> str:
    """Host and port of an address: the part that a message may show, without a password."""
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or 4222}"


class NatsConnection:
    """A connection; ``ended`` is set once, and then every call raises ``ClusterUnreachable``."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.ended = asyncio.Event()
        self.why = f"the NATS server at {place(url)} closed the connection"
        self._client = Client()
        self._on_end: list[Callable[[], None]] = []
        self._asking: set[asyncio.Future[Msg]] = set()
        self._pulse: asyncio.Task[None] | None = None
        self._dialled = False
        self._unanswered = 0

    @classmethod
    async def dial(cls, url: str, name: str, tls: ssl.SSLContext, pulse: float) -> NatsConnection:
        """A connection with the server at ``url``, or ``ClusterUnreachable`` after twice
        ``DIAL_SECONDS``; ``pulse`` is in seconds.
        """
        connection = cls(url)
        try:
            async with asyncio.timeout(2 * DIAL_SECONDS):
                await connection._client.connect(
                    servers=[url],
                    name=name,
                    tls=tls,
                    error_cb=connection._erred,
                    closed_cb=connection._closed,
                    allow_reconnect=False,
                    # Two tries in all; 0 would mean without end.
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    connect_timeout=DIAL_SECONDS,
                    ping_interval=NEVER_SECONDS,
                )
            connection._dialled = True
            inbox = connection.new_inbox()
            await connection.subscribe(inbox, connection._answered)
            connection._pulse = asyncio.create_task(connection._pulses(inbox, pulse))
        except BaseException as exc:
            await connection.close()
            if isinstance(exc, nats.errors.Error | OSError | TimeoutError):
                raise errors.CLUSTER_UNREACHABLE(_not_dialled(url, exc)) from None
            raise
        return connection

    def end(self, why: str) -> None:
        """Ends it: every call that waits for an answer raises at once."""
        if not self.ended.is_set():
            self.why = why
            self.ended.set()
            for on_end in self._on_end:
                on_end()
            for asking in tuple(self._asking):
                asking.cancel()

    def at_end(self, on_end: Callable[[], None]) -> None:
        """Calls ``on_end`` once, when it ends; at once where it has ended."""
        if self.ended.is_set():
            on_end()
        else:
            self._on_end.append(on_end)

    async def close(self) -> None:
        """Ends it and closes its socket, in bounded time."""
        self.end("the connection to NATS was closed")
        if self._pulse is not None:
            self._pulse.cancel()
            await asyncio.gather(self._pulse, return_exceptions=True)
        client = self._client
        # Its tasks may end in an error of the socket; unless retrieved here, asyncio logs each.
        tasks = [task for name in TASKS if (task := getattr(client, name)) is not None]
        ending = asyncio.gather(client.close(), *tasks, return_exceptions=True)
        with suppress(TimeoutError):
            # Its close waits until all is sent, and a frozen server takes nothing.
            async with asyncio.timeout(CLOSE_SECONDS):
                await ending
        if (writer := getattr(getattr(client, TRANSPORT), WRITER, None)) is not None:
            writer.transport.abort()

    @property
    def discovered(self) -> tuple[str, ...]:
        """Host and port of the servers that this one has announced, itself included."""
        return tuple(uri.netloc for uri in self._client.discovered_servers)

    def new_inbox(self) -> str:
        """A subject that only this connection knows."""
        return self._client.new_inbox()

    async def subscribe(self, subject: str, on_message: OnNatsMessage) -> Subscription:
        """Calls ``on_message`` for each message of a subject, one after another."""
        self._check()
        try:
            return await self._client.subscribe(subject, cb=on_message)
        except (nats.errors.Error, OSError) as exc:
            raise errors.CLUSTER_UNREACHABLE(self._lost(exc)) from None

    @asynccontextmanager
    async def subscribed(
        self, subject: str, on_message: OnNatsMessage, on_end: Callable[[], None] | None = None
    ) -> AsyncIterator[None]:
        """The same for as long as it is entered; ``on_end`` is called where the connection ends."""
        subscription = await self.subscribe(subject, on_message)
        if on_end is not None:
            self.at_end(on_end)
        try:
            yield
        finally:
            if not self.ended.is_set():
                if on_end is not None:
                    self._on_end.remove(on_end)
                with suppress(nats.errors.Error, OSError):
                    await subscription.unsubscribe()

    async def settle(self) -> None:
        """Returns once the server has taken all that was sent before."""
        # Not the library's flush: its ping can overtake messages that are not sent yet.
        back = asyncio.Event()

        async def on_message(_: Msg) -> None:
            back.set()

        inbox = self.new_inbox()
        async with self.subscribed(inbox, on_message, back.set):
            await self.publish(inbox, b"")
            try:
                async with asyncio.timeout(DIAL_SECONDS):
                    await back.wait()
            except TimeoutError:
                why = f"the NATS server at {place(self.url)} does not answer"
                raise errors.CLUSTER_UNREACHABLE(why) from None
            self._check()

    async def publish(self, subject: str, data: bytes, *, reply: str = "") -> None:
        """Sends a message; the server does not confirm it."""
        self._check()
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                await self._client.publish(subject, data, reply=reply)
        except (nats.errors.Error, OSError, TimeoutError) as exc:
            raise self._failed(exc, subject, data) from None

    async def request(
        self, subject: str, data: bytes, *, seconds: float, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """Asks JetStream, which answers in JSON; ``ClusterUnreachable`` where it does not."""
        self._check()
        request = self._client.request(subject, data, timeout=seconds, headers=headers)
        asking = asyncio.ensure_future(request)
        self._asking.add(asking)
        asking.add_done_callback(self._asked)
        try:
            # Not awaited directly: the library's own waiting may swallow our cancellation.
            await asyncio.wait((asking,))
        finally:
            asking.cancel()
        try:
            answer = json.loads(asking.result().data)
        except asyncio.CancelledError:
            raise errors.CLUSTER_UNREACHABLE(self.why) from None
        except nats.errors.NoRespondersError:
            raise errors.CLUSTER_UNREACHABLE("JetStream has no leader, or is not enabled") from None
        except nats.errors.TimeoutError:
            raise errors.CLUSTER_UNREACHABLE("JetStream does not answer") from None
        except (nats.errors.Error, OSError) as exc:
            raise self._failed(exc, subject, data) from None
        except ValueError:
            raise errors.CLUSTER_UNREACHABLE("JetStream's answer is not JSON") from None
        if not isinstance(answer, dict):
            raise errors.CLUSTER_UNREACHABLE("JetStream's answer is not an object")
        return answer

    def _asked(self, asking: asyncio.Future[Msg]) -> None:
        self._asking.discard(asking)
        if not asking.cancelled():
            asking.exception()  # retrieved: a caller that was cancelled does not look at it

    def _check(self) -> None:
        if self.ended.is_set():
            raise errors.CLUSTER_UNREACHABLE(self.why)

    def _lost(self, exc: Exception) -> str:
        at = place(self.url)
        return f"the connection to the NATS server at {at} broke ({type(exc).__name__})"

    def _failed(self, exc: Exception, subject: str, data: bytes) -> errors.SidecarError:
        if isinstance(exc, nats.errors.MaxPayloadError):
            why = f"{len(data)} bytes for {subject} are more than a NATS server takes"
            return errors.INTERNAL_ERROR(why)
        return errors.CLUSTER_UNREACHABLE(self._lost(exc))

    async def _erred(self, exc: Exception) -> None:
        if not self._dialled:
            return  # one of two tries; ``dial`` raises what came of both
        if isinstance(exc, ENDINGS):
            self.end(self._lost(exc))
        elif not isinstance(exc, nats.errors.Error):
            # Not an error of the wire: a callback of this package raised, which it must not.
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a callback for a message of another node failed", "exception": exc}
            )

    async def _closed(self) -> None:
        self.end(self.why)

    async def _answered(self, _: Msg) -> None:
        self._unanswered = 0

    async def _pulses(self, inbox: str, seconds: float) -> None:
        while self._unanswered < PULSES_UNANSWERED:
            # Counted in turns, not in time: a loop that stood still is one turn late, not two.
            self._unanswered += 1
            with suppress(errors.ClusterUnreachable):
                await self.publish(inbox, b"")
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.ended.wait()
                return
        self.end(f"the NATS server at {place(self.url)} stopped answering")


def _not_dialled(url: str, exc: BaseException) -> str:
    said = str(exc).lower()
    if isinstance(exc, nats.errors.Error) and ("authorization" in said or "authentica" in said):
        return f"the NATS server at {place(url)} refused the user, password or token of the address"
    if isinstance(exc, ssl.SSLError):
        return f"the NATS server at {place(url)} has no certificate that this machine trusts"
    return f"no NATS server answers at {place(url)}"


T = TypeVar("T")
Attempt = Callable[[NatsConnection], Awaitable[T]]


class Dialer:
    """Holds the one connection to the servers, and replaces it when it ends."""

    def __init__(
        self, urls: Sequence[str], name: str, on_link: OnLink, *, patience: float, pulse: float
    ) -> None:
        # Those configured or announced, in an order of its own: nodes spread over the servers.
        self.urls = random.sample(urls, len(urls))
        self._name = name
        self._on_link = on_link
        self.connected = False
        self.patience = patience  # seconds: the bound of every call
        self.pulse = pulse  # seconds between two looks at a server; so short a loss is not reported
        self._connection: NatsConnection | None = None
        self._dialled = asyncio.Event()
        self._why = "no NATS server has been dialled yet"
        self._refused: errors.ClusterRefused | None = None
        self._prove: Attempt[None] | None = None
        self._doubted = asyncio.Event()
        self._counts_from: dict[Hashable, float] = {}
        self._closed = False
        self._keeping: asyncio.Task[None] | None = None

    async def dial(self) -> None:
        """Starts to dial; returns at once."""
        # Reads the machine's certificates, which takes longer than a turn of the loop may.
        tls = await asyncio.to_thread(ssl.create_default_context)
        self._keeping = asyncio.create_task(self._keep(tls))

    def begin(self, prove: Attempt[None]) -> None:
        """From now on changes are reported, and ``prove`` is called over every new connection."""
        self._prove = prove
        self.connected = True
        # The run's streams were just made over this connection: that is the first proof.
        self._counts_from.pop("proof", None)

    async def reach(self) -> NatsConnection:
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
        Raises ``ClusterUnreachable`` within ``seconds`` (``patience`` by default); whether a write
        has been kept is then not known.
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
            loop.call_at(at, self._due, reason, at)
            self._weigh()

    def _due(self, reason: Hashable, at: float) -> None:
        # Marked, and not compared with the clock: a timer may fire a moment before its time, and
        # no other one would look at this reason again.
        if self._counts_from.get(reason) == at:
            self._counts_from[reason] = float("-inf")
            self._weigh()

    def clear(self, reason: Hashable) -> None:
        if self._counts_from.pop(reason, None) is not None:
            self._weigh()

    async def close(self) -> None:
        """Ends the connection; no change of ``connected`` is reported any more."""
        self._closed, self.connected = True, False
        self._dialled.set()
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)

    def _weigh(self) -> None:
        if self._closed or self._prove is None:
            return
        now = asyncio.get_running_loop().time()
        if self.connected and any(at <= now for at in self._counts_from.values()):
            self.connected = False
            self._on_link(False)
        elif not self.connected and not self._counts_from:
            self.connected = True
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
            self.urls.remove(connection.url)
            self.urls.append(connection.url)

    async def _dial(self, tls: ssl.SSLContext) -> NatsConnection:
        while True:
            for url in tuple(self.urls):
                try:
                    return await NatsConnection.dial(url, self._name, tls, self.pulse)
                except errors.ClusterUnreachable as exc:
                    self._why = exc.message
            await asyncio.sleep(REDIAL_SECONDS)

    def _learn(self, connection: NatsConnection) -> None:
        """Adds the servers that this one announces, to be tried after the configured ones."""
        parts = urlsplit(connection.url)
        if parts.scheme != "nats":
            return  # a certificate names the host that was configured, not what servers say
        known = {urlsplit(url).netloc.rpartition("@")[2] for url in self.urls}
        credentials, at, _ = parts.netloc.rpartition("@")
        new = [server for server in connection.discovered if server not in known]
        self.urls += [f"nats://{credentials}{at}{server}" for server in new]

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

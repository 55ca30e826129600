"""One connection to one NATS server, from its dialling to its end: replaced, never repaired.

The one file that imports nats-py, and the only one that uses its private names. nats-py's own
reconnecting is switched off, for three reasons: it sends what was buffered while it was away, so
that a call that was given up long ago changes a key; it ends for good at some of a server's errors;
and it may wait for ever for the socket of a server that is frozen. ``dialer.py`` dials another
connection instead.

Pulses find a server that is frozen or cut off: messages of the connection to itself, one a second
or more often. After two unanswered pulses the connection has ended.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from smartsearch_sidecar import errors

DIAL_SECONDS: Final = 2
PULSES_UNANSWERED: Final = 2
CLOSE_SECONDS: Final = 1.0

# Pulses of our own take the place of the library's pings.
NEVER_SECONDS: Final = 86_400

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
    async def dial(
        cls, url: str, *, name: str, tls: ssl.SSLContext, pulse: float
    ) -> NatsConnection:
        """A connection with the server at ``url``; ``pulse`` is in seconds.

        Raises ``ClusterUnreachable`` after ``2 * DIAL_SECONDS`` at the latest.
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
        except (nats.errors.Error, OSError, TimeoutError) as exc:
            await connection.close()
            raise errors.CLUSTER_UNREACHABLE(_not_dialled(url, exc)) from None
        except BaseException:
            await connection.close()
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
        writer = getattr(getattr(client, TRANSPORT), WRITER, None)
        if writer is not None:
            writer.transport.abort()

    @property
    def discovered(self) -> tuple[str, ...]:
        """Host and port of the servers that this one has announced, itself included."""
        return tuple(uri.netloc for uri in self._client.discovered_servers)

    def new_inbox(self) -> str:
        """A subject that only this connection knows."""
        return self._client.new_inbox()

    async def subscribe(self, subject: str, on_message: OnNatsMessage) -> Subscription:
        """Calls ``on_message`` for each message of a subject, one after another.

        It goes on until ``unsubscribe``, or until the connection ends.
        """
        self._check()
        try:
            return await self._client.subscribe(subject, cb=on_message)
        except (nats.errors.Error, OSError) as exc:
            raise errors.CLUSTER_UNREACHABLE(self._lost(exc)) from None

    async def unsubscribe(self, subscription: Subscription) -> None:
        """Ends a subscription; nothing to do where the connection has ended."""
        if not self.ended.is_set():
            with suppress(nats.errors.Error, OSError):
                await subscription.unsubscribe()

    async def settle(self) -> None:
        """Returns once the server has taken all that was sent before."""
        # Not the library's flush: its ping can overtake messages that are not sent yet.
        back = asyncio.Event()

        async def on_message(message: Msg) -> None:
            del message
            back.set()

        self.at_end(back.set)
        inbox = self.new_inbox()
        subscription = await self.subscribe(inbox, on_message)
        try:
            await self.publish(inbox, b"")
            async with asyncio.timeout(DIAL_SECONDS):
                await back.wait()
            self._check()
        except TimeoutError:
            raise errors.CLUSTER_UNREACHABLE(
                f"the NATS server at {place(self.url)} does not answer"
            ) from None
        finally:
            await self.unsubscribe(subscription)

    async def publish(self, subject: str, data: bytes, *, reply: str = "") -> None:
        """Sends a message; the server does not confirm it."""
        self._check()
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                await self._client.publish(subject, data, reply=reply)
        except nats.errors.MaxPayloadError:
            raise errors.INTERNAL_ERROR(_too_large(subject, data)) from None
        except (nats.errors.Error, OSError, TimeoutError) as exc:
            raise errors.CLUSTER_UNREACHABLE(self._lost(exc)) from None

    async def request(
        self, subject: str, data: bytes, *, seconds: float, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """Asks JetStream, which answers in JSON; ``ClusterUnreachable`` where it does not."""
        self._check()
        asking = asyncio.ensure_future(
            self._client.request(subject, data, timeout=seconds, headers=headers)
        )
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
        except nats.errors.MaxPayloadError:
            raise errors.INTERNAL_ERROR(_too_large(subject, data)) from None
        except (nats.errors.Error, OSError) as exc:
            raise errors.CLUSTER_UNREACHABLE(self._lost(exc)) from None
        except ValueError:
            raise errors.CLUSTER_UNREACHABLE("JetStream's answer is not JSON") from None
        if not isinstance(answer, dict):
            raise errors.CLUSTER_UNREACHABLE("JetStream's answer is not an object")
        return answer

    def _asked(self, asking: asyncio.Future[Msg]) -> None:
        self._asking.discard(asking)
        if not asking.cancelled():
            # Retrieved here too: a caller that was cancelled does not look at it.
            asking.exception()

    def _check(self) -> None:
        if self.ended.is_set():
            raise errors.CLUSTER_UNREACHABLE(self.why)

    def _lost(self, exc: Exception) -> str:
        return (
            f"the connection to the NATS server at {place(self.url)} broke ({type(exc).__name__})"
        )

    async def _erred(self, exc: Exception) -> None:
        """Takes the library's errors; some of them end the connection."""
        if not self._dialled:
            # One of two tries; ``dial`` raises what came of both.
            return
        if isinstance(exc, ENDINGS):
            self.end(self._lost(exc))
        elif not isinstance(exc, nats.errors.Error):
            # Not an error of the wire: a callback of this package raised, which it must not.
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a callback for a message of another node failed", "exception": exc}
            )

    async def _closed(self) -> None:
        self.end(self.why)

    async def _answered(self, message: Msg) -> None:
        del message
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


def _too_large(subject: str, data: bytes) -> str:
    return f"{len(data)} bytes for {subject} are more than a NATS server takes"

"""One connection to one NATS server, from its dialling to its end: replaced, never repaired.

The one file that imports nats-py, and the only one that leans on its private names. Its own
reconnecting is switched off: it sends what was buffered while it was away, so that a call that had
long been given up changes a key; it ends for good at some of a server's errors; and it may wait
for ever for the socket of a server that is frozen. Whoever holds a ``Session`` dials another.

A server that is frozen or cut off is found out by pulses, messages of the session to itself: two
of them unanswered, each a second at most, and the session has ended.
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

# The library's own pings stay out of the way of ours.
NEVER_SECONDS: Final = 86_400

# What it has to say reaches us as errors that are classified here; by itself it would print them,
# with addresses that may hold a password.
logging.getLogger("nats").addHandler(logging.NullHandler())
logging.getLogger("nats").propagate = False

ENDINGS: Final = (nats.errors.StaleConnectionError, nats.errors.ProtocolError, OSError)

# The private names of nats-py that are leaned on, all of them to let go of a session.
TASKS: Final = ("_reading_task", "_flusher_task", "_ping_interval_task")
TRANSPORT: Final = "_transport"
WRITER: Final = "_bare_io_writer"

Message = Msg
Received = Callable[[Msg], Awaitable[None]]


def place(url: str) -> str:
    """Host and port of an address: what may be said of it."""
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or 4222}"


class Session:
    """A connection; ``ended`` is set once, and then every call raises ``ClusterUnreachable``."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.ended = asyncio.Event()
        self.why = f"the NATS server at {place(url)} closed the connection"
        self._client = Client()
        self._at_end: list[Callable[[], None]] = []
        self._asking: set[asyncio.Future[Msg]] = set()
        self._pulse: asyncio.Task[None] | None = None
        self._dialled = False
        self._unanswered = 0

    @classmethod
    async def dial(cls, url: str, *, name: str, tls: ssl.SSLContext, pulse: float) -> Session:
        """A session with the server at ``url``, or ``ClusterUnreachable`` within seconds.

        ``pulse`` is the time between two messages to itself, in seconds.
        """
        session = cls(url)
        try:
            async with asyncio.timeout(2 * DIAL_SECONDS):
                await session._client.connect(
                    servers=[url],
                    name=name,
                    tls=tls,
                    error_cb=session._erred,
                    closed_cb=session._closed,
                    allow_reconnect=False,
                    # Once and once more; 0 would be for ever.
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    connect_timeout=DIAL_SECONDS,
                    ping_interval=NEVER_SECONDS,
                )
            session._dialled = True
            inbox = session.new_inbox()
            await session.subscribe(inbox, session._answered)
            session._pulse = asyncio.create_task(session._pulses(inbox, pulse))
        except (nats.errors.Error, OSError, TimeoutError) as exc:
            await session.close()
            raise errors.CLUSTER_UNREACHABLE(_not_dialled(url, exc)) from None
        except BaseException:
            await session.close()
            raise
        return session

    def end(self, why: str) -> None:
        """Ends it: whoever waits for an answer hears so at once."""
        if not self.ended.is_set():
            self.why = why
            self.ended.set()
            for tell in self._at_end:
                tell()
            for asking in tuple(self._asking):
                asking.cancel()

    def at_end(self, tell: Callable[[], None]) -> None:
        """Has somebody told, once, that it has ended; at once where it has."""
        if self.ended.is_set():
            tell()
        else:
            self._at_end.append(tell)

    async def close(self) -> None:
        """Ends it and lets go of its socket, in bounded time."""
        self.end("the connection to NATS was closed")
        if self._pulse is not None:
            self._pulse.cancel()
            await asyncio.gather(self._pulse, return_exceptions=True)
        client = self._client
        # Its tasks may end in an error of the socket, which nobody else would ever retrieve.
        tasks = [task for name in TASKS if (task := getattr(client, name)) is not None]
        ending = asyncio.gather(client.close(), *tasks, return_exceptions=True)
        with suppress(TimeoutError):
            # It waits until all is sent, and a frozen server takes nothing.
            async with asyncio.timeout(CLOSE_SECONDS):
                await ending
        writer = getattr(getattr(client, TRANSPORT), WRITER, None)
        if writer is not None:
            writer.transport.abort()

    @property
    def discovered(self) -> tuple[str, ...]:
        """Host and port of the servers that this one has told of, itself included."""
        return tuple(uri.netloc for uri in self._client.discovered_servers)

    def new_inbox(self) -> str:
        """A subject that nobody else listens to."""
        return self._client.new_inbox()

    async def subscribe(self, subject: str, received: Received) -> Subscription:
        """Hears messages of a subject, one after another, until unsubscribed or ended."""
        self._check()
        try:
            return await self._client.subscribe(subject, cb=received)
        except (nats.errors.Error, OSError) as exc:
            raise errors.CLUSTER_UNREACHABLE(self._lost(exc)) from None

    async def unsubscribe(self, subscription: Subscription) -> None:
        """Hears no more of it; nothing to do where the session has ended."""
        if not self.ended.is_set():
            with suppress(nats.errors.Error, OSError):
                await subscription.unsubscribe()

    async def settle(self) -> None:
        """Returns once the server has taken all that was sent before."""
        # The library's own flush overtakes what it has not sent yet.
        back = asyncio.Event()

        async def heard(message: Msg) -> None:
            del message
            back.set()

        self.at_end(back.set)
        inbox = self.new_inbox()
        subscription = await self.subscribe(inbox, heard)
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
        """Sends a message that nobody confirms."""
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
            # Not awaited itself: the library's own waiting may swallow that we are cancelled.
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
            # Retrieved here too, for whoever was cancelled and does not look.
            asking.exception()

    def _check(self) -> None:
        if self.ended.is_set():
            raise errors.CLUSTER_UNREACHABLE(self.why)

    def _lost(self, exc: Exception) -> str:
        return (
            f"the connection to the NATS server at {place(self.url)} broke ({type(exc).__name__})"
        )

    async def _erred(self, exc: Exception) -> None:
        """The library's account of what went wrong, some of which ends the session."""
        if not self._dialled:
            # One of two tries; what came of both is what ``dial`` raises.
            return
        if isinstance(exc, ENDINGS):
            self.end(self._lost(exc))
        elif not isinstance(exc, nats.errors.Error):
            # Not of the wire: one of our own callbacks raised, which none of them may.
            asyncio.get_running_loop().call_exception_handler(
                {"message": "hearing a message of another node failed", "exception": exc}
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

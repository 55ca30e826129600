"""The door: the factory of connections, the listener, the end of both.

Apart from the daemon, its one user, so that aiohttp's insides stay in this folder.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

import aiohttp
from aiohttp import web

from smartsearch_sidecar import errors
from smartsearch_sidecar.web.edge.connection import (
    HALF_CLOSE_SECONDS,
    EdgeConnection,
    EdgeObserver,
)
from smartsearch_sidecar.web.edge.request import EdgeRequest
from smartsearch_sidecar.web.edge.response import (
    BAD_MESSAGE,
    INTERNAL_ERROR,
    Reply,
    response_head,
)
from smartsearch_sidecar.web.edge.runtime import WHOLE, check_runtime, untested

BACKLOG: Final = 4096  # connections; at 1024 half of 2,000 newcomers wait a second for a SYN retry
LINGERING_SECONDS: Final = 2.0  # for the rest of a refused body, so that its sender reads why
DRAIN_LOOK_SECONDS: Final = 0.05  # how often a drain looks for connections that became idle
STALL_SECONDS: Final = 10.0  # TCP_USER_TIMEOUT: a peer that takes nothing for as long is dropped
TURNS: Final = 20  # of the loop, that an exchange without a socket takes at most

Handler = Callable[[EdgeRequest], Awaitable[Reply | web.StreamResponse]]


class EdgeServer(web.Server):
    """The factory of connections, and what they share; made on the running loop."""

    def __init__(
        self,
        handler: Handler,
        *,
        observer: EdgeObserver,
        capability_marker: bytes,
        keepalive_seconds: float,
        connections_max: int,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        """Make a server that no connection can reach yet.

        Args:
            handler: answers every request; what it raises is answered with a constant 500.
            observer: is told of what no handler sees.
            capability_marker: ``b"/" + execute capability + b"/"``; a connection whose bytes hold
                it is no stranger's.
            keepalive_seconds: bounds idle connections, and headers that do not become whole.
            connections_max: connections open at once.
            stall_seconds: a peer that takes no byte for as long is dropped by the kernel.

        Raises:
            NotAvailable: aiohttp or the system lacks what the edge leans on.
            InvariantBroken: the marker is empty, or a bound is zero.
        """
        check_runtime()
        if not capability_marker or min(keepalive_seconds, connections_max, stall_seconds) <= 0:
            raise errors.INTERNAL_ERROR(
                "The edge needs a capability_marker, and bounds that are over zero."
            )
        super().__init__(
            cast("Any", handler),
            request_factory=cast("Any", EdgeRequest),
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=keepalive_seconds,
            lingering_time=LINGERING_SECONDS,
            tcp_keepalive=False,
        )
        self.observer = observer
        self.capability_marker = capability_marker
        self.connections_max = connections_max
        self.stall_seconds = stall_seconds
        self.draining = False
        self.open = 0  # connections
        self.tasks: set[asyncio.Task[Any]] = set()  # one a connection, until its work has ended
        self._settled = asyncio.Event()

    def __call__(self) -> EdgeConnection:
        # Not the inherited one: at an option it does not know it drops all of them.
        return EdgeConnection(self, loop=self._loop, **self._kwargs)

    def settle(self) -> None:
        """Called whenever a connection or its work has ended."""
        if self.draining and not self.open and not self.tasks:
            self._settled.set()

    async def settled(self, seconds: float) -> bool:
        """Wait at most so long, while draining, until every connection and all work has ended."""
        self.settle()
        try:
            async with asyncio.timeout(seconds):
                return await self._settled.wait()
        except TimeoutError:
            return False

    def make_room(self) -> bool:
        """Close the oldest connection that has shown no capability and awaits no answer.

        So strangers' connections, however many, never cost a rollout its own.
        """
        for edge in self.edges():
            if edge.dispensable():
                edge.cut()
                return True
        return False

    def oldest_began(self) -> float:
        """Loop time of the first byte of the oldest unanswered request under the execute
        capability; infinite where every one is answered.
        """
        return min((edge.unanswered_since() for edge in self.edges()), default=float("inf"))

    def edges(self) -> list[EdgeConnection]:
        """The connections that are open, or whose work goes on without their client."""
        return [edge for edge in self.connections if isinstance(edge, EdgeConnection)]


async def listen(server: EdgeServer, sock: socket.socket) -> asyncio.Server:
    """Accept connections on the bound TCP socket; accepted ones inherit its stall bound.

    Raises:
        NotAvailable: requests and answers do not pass through this aiohttp as they should.
    """
    await check_exchange()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(server.stall_seconds * 1000))
    loop = asyncio.get_running_loop()
    return await loop.create_server(server, sock=sock, backlog=BACKLOG)


async def drain(server: EdgeServer, seconds: float) -> int:
    """End every connection: idle ones now, busy ones after their answer, all after ``seconds``.

    The listener must be closed before. Answers say ``Connection: close`` from here on; streams end
    where they are. Returns how many connections still had work, which was then cancelled.
    """
    server.draining = True
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    leaving: set[asyncio.Task[None]] = set()
    while True:
        for edge in server.edges():
            if edge.streaming:
                edge.force_close()
            elif edge.idle():
                edge.close()
                leaving.add(loop.create_task(edge.leave()))
        left = deadline - loop.time()
        if left <= 0 or await server.settled(min(left, DRAIN_LOOK_SECONDS)):
            break
    cut = set(server.tasks)
    for edge in server.edges():
        edge.cut()
    for task in cut | leaving:
        task.cancel()
    if cut or leaving:
        await asyncio.wait(cut | leaving, timeout=HALF_CLOSE_SECONDS)
    return len(cut)


# --- the check at start ---------------------------------------------------------------------------


class _Memory(asyncio.Transport):
    """A transport that keeps what it is given; its socket is one end of a pair, never written."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__({"socket": sock})
        self.sent = b""
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self.sent += bytes(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def write_eof(self) -> None:
        self.sent += b"<FIN>"


class _Told:
    """What an exchange tells its observer."""

    def __init__(self) -> None:
        self.of: list[str] = []

    def malformed(self, reason: str, authenticated: bool) -> None:
        self.of.append("malformed")

    def crashed(self, exc: BaseException) -> None:
        self.of.append(f"crashed by {type(exc).__name__}")

    def overflow(self) -> None:
        self.of.append("overflow")


async def _answering(request: EdgeRequest) -> Reply | web.StreamResponse:
    if request.method == "PUT":
        raise LookupError
    if request.method == "GET":
        stream = web.StreamResponse()
        await stream.prepare(request)
        await stream.write(b"streamed")
        return stream
    body = await request.body(int(request.headers["Content-Length"]), 1.0)
    answer = request.raw_target.encode() + body
    return request.deliver(response_head(200, len(answer), close=False), answer)


_STREAMED: Final = WHOLE.replace(b"POST", b"GET", 1)
_FAILS: Final = WHOLE.replace(b"POST", b"PUT", 1)
_AUTHORITY: Final = WHOLE.replace(b"/c/", b"http://[::1]@/c/", 1)

# What a client sends in one exchange; in which order what comes back; what the observer is told.
EXCHANGES: Final[tuple[tuple[str, bytes, tuple[bytes, ...], list[str]], ...]] = (
    ("two requests are answered", WHOLE * 2, (b" 200 OK", b'/c/execute{"', b"/c/execute{"), []),
    ("a stream is sent", _STREAMED, (b" 200 OK", b"nosniff", b"streamed"), []),
    ("a fault is answered", b"\x16\x03\r\n", (b" 400 ", BAD_MESSAGE, b"<FIN>"), ["malformed"]),
    ("a bad target is answered", _AUTHORITY, (b" 400 ", BAD_MESSAGE, b"<FIN>"), ["malformed"]),
    ("a crash is answered", _FAILS, (b" 500 ", INTERNAL_ERROR), ["crashed by LookupError"]),
)


async def check_exchange() -> None:
    """Let requests pass through our own classes, without a network; about a millisecond.

    Raises:
        NotAvailable: an answer or a report is not what it must be.
    """
    told = _Told()
    server = EdgeServer(
        _answering,
        observer=told,
        capability_marker=b"/c/",
        keepalive_seconds=1.0,
        connections_max=1,
    )
    for promise, sent, parts, reports in EXCHANGES:
        told.of.clear()
        try:
            answered = await _exchange(server, sent)
        except errors.UsageError:
            raise
        except Exception as exc:  # noqa: BLE001 - classified: aiohttp is not what we lean on
            answered = f"{type(exc).__name__}: {exc}".encode()
        as_wanted = re.search(b".*".join(map(re.escape, parts)), answered, re.DOTALL)
        if not as_wanted or told.of != reports or server.open or server.tasks:
            found = f"{answered[-80:]!r}, reported: {', '.join(told.of) or 'nothing'}"
            raise untested(f"this does not hold: {promise} ({found})", aiohttp.__version__)


async def _exchange(server: EdgeServer, sent: bytes) -> bytes:
    """What a connection answers to these bytes, and its end."""
    ours, theirs = socket.socketpair()
    transport, connection = _Memory(ours), server()
    try:
        connection.connection_made(transport)
        if not connection.has_deadline():
            raise untested(
                "a new connection that stays silent is never closed", aiohttp.__version__
            )
        connection.data_received(sent)
        await _turns(lambda: connection.idle() or transport.closed)
    finally:
        connection.connection_lost(None)
        await _turns(lambda: not server.tasks)
        for task in server.tasks:
            task.cancel()
        ours.close()
        theirs.close()
    return transport.sent


async def _turns(condition: Callable[[], bool]) -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)
        if condition():
            return

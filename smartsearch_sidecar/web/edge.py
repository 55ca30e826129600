"""Bytes to requests, answers to bytes: the one file that leans on aiohttp's insides.

aiohttp parses and keeps connections. What it does with bytes that are no request, with handlers
that fail and with clients that leave is replaced here, because each of those becomes training text
on the other side. Three promises:

- What no handler answers, a constant does, and the observer hears of it. Nothing of a request is
  logged or echoed; aiohttp's own error pages and tracebacks never run.
- An answer that was handed over is reported lost if its client never took it, as far as the kernel
  can tell: POLLRDHUP before the write, POLLERR at the write, and afterwards a reset, which Linux
  sends where a socket is closed with unread bytes. What comes after an answer proves it was taken;
  with pipelining that proof is weaker, since the bytes may have been sent before. Never seen: a
  client that has given up but not closed, and a reset after the FINs of both sides.
- Every wait is bounded: the constants below, and ``keepalive_seconds`` for headers and idleness.

``TESTED_AIOHTTP`` and a test for each promise stand for the private names used: ``_ErrInfo``,
``RequestHandler._force_close _loop _messages _message_tail _request_count _waiter``, the attributes
that ``BaseRequest``'s constructor sets, and its ``_cancel`` and ``_prepare_hook``.
"""

from __future__ import annotations

import asyncio
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import aiohttp
from aiohttp import web
from aiohttp.http import HttpRequestParser, HttpVersion11
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import RequestHandler, RequestPayloadError, _ErrInfo
from yarl import URL

from smartsearch_sidecar import errors

if TYPE_CHECKING:
    from aiohttp.abc import AbstractStreamWriter
    from aiohttp.http_parser import RawRequestMessage

TESTED_AIOHTTP: Final = ("3.14.5",)
C_PARSER: Final = "aiohttp._http_parser"

BACKLOG: Final = 4096  # connections; at 1024 half of 2,000 newcomers wait a second for a SYN retry
LINGERING_SECONDS: Final = 2.0  # for the rest of a refused body, so that its sender reads why
DRAIN_LOOK_SECONDS: Final = 0.05  # how often a drain looks for connections that became idle
HALF_CLOSE_SECONDS: Final = (
    1.0  # for the client to close first: only that tells whether it has read
)
STALL_SECONDS: Final = 10.0  # TCP_USER_TIMEOUT: a peer that takes nothing for as long is dropped
ONE_WRITE_BYTES: Final = 65536  # up to here a copy is cheaper than a second packet

# The stages of a lost answer, as `on_lost` is told them.
BEFORE_WRITE: Final = "before_write"
AT_WRITE: Final = "at_write"
AFTER_WRITE: Final = "after_write"

BAD_MESSAGE: Final = (
    b'{"error":{"code":"bad_message",'
    b'"message":"The bytes received are not an HTTP/1.1 request that this server takes.",'
    b'"retryable":false}}'
)
INTERNAL_ERROR: Final = (
    b'{"error":{"code":"internal_error",'
    b'"message":"The sidecar failed while answering; its log names the place.",'
    b'"retryable":false}}'
)
_CLOSE: Final = b"Connection: close\r\n\r\n"
_HANDED_OVER: Final = "An answer has begun on this request; a second one cannot follow."
_ROOT: Final = URL("/")


class EdgeObserver(Protocol):
    """Who hears of what no handler sees; called on the loop, must neither raise nor block."""

    def malformed(self, reason: str, authenticated: bool) -> None:
        """A connection brought bytes that are no request, or left within one; once a connection.

        ``authenticated``: its bytes carried the execute capability. ``reason``: the name of the
        parser's error, ``cut_off`` (left within headers), ``abandoned`` (left with whole requests
        no handler has seen) or ``behind_upgrade`` (bytes after a request for another protocol).
        """

    def crashed(self, exc: BaseException) -> None:
        """A handler or a callback of its raised what it must not; the client got a 500 if any."""

    def overflow(self) -> None:
        """A connection over ``connections_max`` was closed unread: a call of ours was refused, for
        strangers' connections had made room before.
        """


class Reply:
    """What a handler returns once its answer is handed over; stands where a response would."""

    __slots__ = ("keep_alive",)

    def __init__(self, keep_alive: bool) -> None:
        self.keep_alive = keep_alive


_KEPT: Final = Reply(True)
_CLOSED: Final = Reply(False)


@lru_cache(maxsize=256)
def _opening(status: int, content_type: str) -> bytes:
    return (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {content_type}\r\n"
        "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nContent-Length: "
    ).encode("ascii")


@lru_cache(maxsize=1)
def _date(second: int) -> bytes:
    return f"\r\nDate: {formatdate(second, usegmt=True)}\r\n".encode("ascii")


def response_head(
    status: int,
    length: int,
    *,
    content_type: str = "application/json",
    close: bool,
    extra: Mapping[str, str] | None = None,
) -> bytes:
    """Status line and headers of an answer of ``length`` bytes.

    ``close`` must be true where the request's ``keep_alive`` is false; HTTP/1.0 is always closed.
    ``extra`` is made of our own constants, never of a caller's text; a control character in it
    raises InvariantBroken. Date is there because RFC 9110, 6.6.1, demands it of us.
    """
    more = "".join(f"{name}: {value}\r\n" for name, value in extra.items()) if extra else ""
    if more and not more.replace("\r\n", "", len(extra or ())).isprintable():
        raise errors.INTERNAL_ERROR("A header of an answer holds a control character.")
    return b"%b%d%b%b%b" % (
        _opening(status, content_type),
        length,
        _date(int(time.time())),
        more.encode("ascii"),
        _CLOSE if close else b"\r\n",
    )


class EdgeRequest(web.BaseRequest):
    """A request as it was sent, and the one place its answer goes.

    Built without aiohttp's constructor, which costs a quarter of a small request and dies of
    targets such as ``http://xn--a/``. ``remote`` is None: who asks is shown by the capability.
    """

    __slots__ = (
        *("_message", "_protocol", "_payload_writer", "_payload", "_headers", "_method"),
        *("_version", "_cache", "_state", "_task", "_edge", "began", "delivered"),
    )
    _client_max_size = 0  # `read()` and `post()` are not how bodies are taken here: see `body`
    _client_max_fields = 0
    _transport_sslcontext = _transport_peername = _transport_sockname = None

    def __init__(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: Edge,
        payload_writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> None:
        self._message = message
        self._protocol = self._edge = protocol
        self._payload_writer = payload_writer
        self._payload = payload
        self._headers = message.headers
        self._method = message.method
        self._version = message.version
        self._cache = {}
        self._state = {}
        self._task = task
        self.began = protocol.next_began()
        self.delivered = False

    @property
    def raw_target(self) -> str:
        """The target exactly as sent; bytes outside UTF-8 as lone surrogates."""
        return self._message.path

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:  # type: ignore[override]
        return self._edge.server.loop

    @property
    def _rel_url(self) -> URL:  # type: ignore[override]
        url = self._message.url
        return url if self._message.path[:1] == "/" else _ROOT

    @property
    def keep_alive(self) -> bool:
        """Whether the connection may serve another request after this one.

        Not after HTTP/1.0, not while draining, and not after a request for another protocol: the
        parser drops what came in the same segment behind it.
        """
        message = self._message
        return not (
            message.should_close
            or message.upgrade
            or self._version != HttpVersion11
            or self._edge.server.draining
        )

    def gone(self) -> bool:
        """Whether the client has left, as far as transport and kernel can tell; about 0.5 us."""
        edge = self._edge
        return edge.closing() or edge.polled() != 0

    async def body(self, length: int, seconds: float) -> bytes:
        """The body's ``length`` bytes, as sent; within ``seconds`` from now.

        Without a timer where the body is there already, which is the usual case. This is where a
        client that asked before sending is told to go on. Raises InvalidBody when late or short.
        """
        payload = self._payload
        try:
            if payload.is_eof():
                data = payload.read_nowait()
            elif self._edge.closing():
                data = b""
            else:
                if self._headers.get("Expect", "").lower() == "100-continue":
                    self._edge.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                async with asyncio.timeout(seconds):
                    data = await payload.read()
        except TimeoutError:
            raise errors.INVALID_BODY(
                f"The body did not arrive within {seconds:g} seconds."
            ) from None
        except (OSError, RequestPayloadError):
            raise errors.INVALID_BODY("The client left before its body was whole.") from None
        if len(data) != length:
            raise errors.INVALID_BODY(
                f"The body is {len(data)} bytes, its declared length is {length}."
            )
        return data

    def deliver(
        self, head: bytes, payload: bytes, on_lost: Callable[[str], None] | None = None
    ) -> Reply:
        """Hand the answer over, at once and whole; return what the handler returns.

        ``on_lost(stage)`` is called exactly once if the client had gone before the write, at it, or
        was reset later with the answer unread; None where nobody needs to know. The rest of an
        answer too large for the socket is sent while the handler's caller waits, not the handler.
        """
        if self.delivered:
            raise errors.INTERNAL_ERROR(_HANDED_OVER)
        self.delivered = True
        edge = self._edge
        if edge.closing() or (on_lost is not None and edge.polled()):
            if on_lost is not None:
                edge.tell(on_lost, BEFORE_WRITE)
            return _CLOSED
        if self._method == "HEAD":
            payload = b""
        if len(payload) <= ONE_WRITE_BYTES:
            edge.write(head + payload)
        else:
            edge.write(head)
            edge.write(payload)
        if on_lost is not None:
            # POLLRDHUP would say too much here: a client may have read everything and closed.
            if edge.closing() or edge.polled() & select.POLLERR:
                edge.tell(on_lost, AT_WRITE)
            else:
                edge.unread.append(on_lost)
        return _KEPT if self.keep_alive and not head.endswith(_CLOSE) else _CLOSED

    def refuse(
        self,
        status: int,
        payload: bytes,
        *,
        close: bool = False,
        extra: Mapping[str, str] | None = None,
        on_lost: Callable[[str], None] | None = None,
    ) -> Reply:
        """Hand an error answer over; closes where told to and where a body was left unread."""
        close = close or not self.keep_alive or not self._payload.is_eof()
        return self.deliver(
            response_head(status, len(payload), close=close, extra=extra), payload, on_lost
        )

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        self._edge.streaming = True
        response.headers.setdefault("Cache-Control", "no-store")
        response.headers.setdefault("X-Content-Type-Options", "nosniff")
        response.headers.popall("Server", None)

    def _cancel(self, exc: BaseException) -> None:
        # A body that was whole before its client left stays readable: it was not short.
        if not self._payload.is_eof():
            super()._cancel(exc)


class Edge(RequestHandler):
    """One connection."""

    __slots__ = (
        *("server", "authenticated", "streaming", "unread"),
        *("_arrived", "_began", "_bye", "_fault", "_first", "_poller", "_reported", "_tail"),
        *("_taking",),
    )

    def __init__(self, server: EdgeServer, **options: Any) -> None:
        super().__init__(server, **options)
        self.server = server
        self.authenticated = False  # sticky: the bytes so far carried the capability
        self.streaming = False  # a StreamResponse is under way
        self.unread: list[Callable[[str], None]] = []  # of answers nothing proves taken yet
        self._arrived = 0.0  # loop time of the latest segment
        self._began: deque[float] = deque()  # first bytes of the requests in `_messages`
        self._first: float | None = None  # first byte of a request whose headers are not whole
        self._taking: StreamReader | None = None  # the body that next bytes belong to
        self._fault: str | None = None  # why nothing more of this connection is parsed
        self._reported = False
        self._tail = b""
        self._bye: asyncio.Future[None] | None = None
        self._poller: select.poll | None = None

    # --- connection ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        server = self.server
        if server.open >= server.connections_max and not server.make_room():
            self._force_close = True
            server.observer.overflow()
            transport.close()
            return
        server.open += 1
        self._poller = select.poll()
        self._poller.register(transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        super().connection_made(transport)

    async def start(self) -> None:
        """Serve the connection's requests one after the other; counted until it has ended."""
        server, task = self.server, asyncio.current_task()
        if task is None:
            raise errors.INTERNAL_ERROR("A connection is served outside a task.")
        server.tasks.add(task)
        try:
            if not self._force_close:  # else it was lost before this first step
                await super().start()
        except Exception as exc:  # noqa: BLE001  # classified: the connection ends unanswered
            server.observer.crashed(exc)
            self.force_close()
        finally:
            server.tasks.discard(task)
            server.settle()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self.unread and exc is not None:
            self.lost(AFTER_WRITE)
        if self._fault is None and (self._first is not None or self._messages):
            self._fault = "cut_off" if self._first is not None else "abandoned"
        self._report()
        counted, self._poller = self._poller is not None, None
        super().connection_lost(exc)
        if self._bye is not None and not self._bye.done():
            self._bye.set_result(None)
        if counted:
            self.server.open -= 1
            self.server.settle()

    def eof_received(self) -> None:
        if self.unread and self.polled() & select.POLLERR:  # a reset behind the FIN
            self.lost(AFTER_WRITE)

    async def half_close(self) -> None:
        """Half-close and let the client close first, for then it shows whether it has read."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        self._bye = self._loop.create_future()
        try:
            transport.write_eof()
        except OSError:
            self.lost(AFTER_WRITE)  # reset, and closed by us before the loop would have read it
            return
        await asyncio.wait([self._bye], timeout=HALF_CLOSE_SECONDS)

    async def leave(self) -> None:
        """End an idle connection."""
        if self.unread:
            await self.half_close()
        self.force_close()

    def cut(self) -> None:
        """End the connection whatever it is doing; what is not sent yet is lost."""
        transport = self.transport
        if transport is not None:
            if transport.get_write_buffer_size():
                self.lost(AFTER_WRITE)
            transport.abort()

    def dispensable(self) -> bool:
        """Whether it is a stranger's that asks for nothing: idle, or still within its headers."""
        if self.authenticated or self._current_request is not None or self.closing():
            return False
        return self._first is not None or self.idle()

    def unanswered_since(self) -> float:
        """Loop time of the first byte of a rollout's request not yet answered; else infinite."""
        request = self._current_request
        if not self.authenticated or not isinstance(request, EdgeRequest) or request.delivered:
            return float("inf")
        target = request.raw_target.encode("utf-8", "surrogateescape")
        return request.began if target.startswith(self.server.capability_marker) else float("inf")

    def idle(self) -> bool:
        """Whether it waits for a request and no byte of one is here or in the kernel."""
        waiting = self._waiter is not None and not self._waiter.done()
        if not waiting or self._first is not None or self.transport is None or self.closing():
            return False
        pending = select.poll()
        pending.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not pending.poll(0)

    # --- bytes in --------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse a segment, or what the parser held back when ``data`` is empty."""
        if data:
            if self.unread:
                self.unread.clear()
            self._arrived = self._loop.time()
            if not self.authenticated:
                self._look(data)
            if self._first is None and (self._taking is None or self._taking.is_eof()):
                # Some clients end a body with a line end of its own; it begins nothing.
                self._first = self._arrived if data.lstrip(b"\r\n") else None
        if self._fault is not None:
            return
        count = self._request_count
        try:
            super().data_received(data)
        except Exception as exc:  # noqa: BLE001  # the parser's callbacks raise what yarl raises
            self._request_count += 1
            self._messages.append((_ErrInfo(400, exc, ""), EMPTY_PAYLOAD))
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
        if self._request_count != count:
            self._arrivals(self._request_count - count)
        if self._message_tail:
            self._message_tail = b""
            self._blame("behind_upgrade")

    def _look(self, data: bytes) -> None:
        capability_marker = self.server.capability_marker
        seen = self._tail + data
        if capability_marker in seen:
            self.authenticated, self._tail = True, b""
            self._report()
        else:
            self._tail = seen[1 - len(capability_marker) :]

    def _arrivals(self, count: int) -> None:
        self._began.append(self._arrived if self._first is None else self._first)
        self._began.extend([self._arrived] * (count - 1))
        self._first = None
        message, payload = self._messages[-1]
        # Here, not in handle_error: that runs only while the client stays.
        if type(message) is _ErrInfo:
            if self._taking is not None:
                self._taking.feed_eof()  # a bad chunk: the parser would let its reader wait
            self._blame(type(message.exc).__name__)
        self._taking = None if payload.is_eof() else payload

    def next_began(self) -> float:
        """Loop time of the first byte of the request taken next."""
        return self._began.popleft() if self._began else self._arrived

    def _blame(self, reason: str) -> None:
        if self._fault is None:
            self._fault = reason
        if self.authenticated:
            self._report()

    def _report(self) -> None:
        # A stranger is reported when the connection ends: the capability may still be on its way.
        if self._fault is not None and not self._reported:
            self._reported = True
            self.server.observer.malformed(self._fault, self.authenticated)

    # --- bytes out -------------------------------------------------------------------------------

    def closing(self) -> bool:
        """Whether the transport knows that nothing can be sent any more."""
        return self.transport is None or self.transport.is_closing()

    def polled(self) -> int:
        """What the kernel knows of the peer, as poll(2) bits; 0 while it is there."""
        if self._poller is None:
            return select.POLLHUP
        events = self._poller.poll(0)
        return events[0][1] if events else 0

    def write(self, data: bytes) -> None:
        """Send, or leave to the transport what the socket does not take at once."""
        if self.transport is not None:
            self.transport.write(data)

    def lost(self, stage: str) -> None:
        """Report the answers nothing proves taken as lost."""
        callbacks, self.unread = self.unread, []
        for on_lost in callbacks:
            self.tell(on_lost, stage)

    def tell(self, on_lost: Callable[[str], None], stage: str) -> None:
        """Call ``on_lost``; raised here, its failure would tear the connection's own accounting."""
        try:
            on_lost(stage)
        except Exception as exc:  # noqa: BLE001  # classified: the observer latches it
            self.server.observer.crashed(exc)

    async def finish_response(
        self, request: web.BaseRequest, resp: Any, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Wait until the answer is on its way; the slot it came from is long free."""
        edge_request = cast("EdgeRequest", request)
        try:
            if type(resp) is not Reply or not edge_request.delivered:
                resp, reset = await self._finish_stream(edge_request, resp, start_time)
                if reset:
                    return resp, True
            elif self.writing_paused:
                await request.writer.drain()
        except ConnectionError:
            return resp, True  # connection_lost has told whom it concerns
        if not resp.keep_alive and (self.unread or self._fault is not None):
            await self.half_close()
        return resp, False

    async def _finish_stream(
        self, request: EdgeRequest, resp: Any, start_time: float | None
    ) -> tuple[Any, bool]:
        try:
            stream = isinstance(resp, web.StreamResponse) and not isinstance(
                resp, web.HTTPException
            )
            if request.delivered or not stream:
                raise errors.INTERNAL_ERROR(
                    f"A handler ended with {type(resp).__name__}, no answer."
                )
            return await super().finish_response(request, resp, start_time)
        except ConnectionError:
            return resp, True
        except Exception as exc:  # noqa: BLE001  # as if the handler itself had raised it
            return self.handle_error(request, 500, exc), False
        finally:
            self.streaming = False

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer with a constant; raise ConnectionError where an answer has begun already."""
        edge_request = cast("EdgeRequest", request)
        begun = edge_request.delivered or request.writer.output_size > 0
        parsing = status == 400
        if not parsing:
            exc = (
                exc or sys.exc_info()[1] or errors.INTERNAL_ERROR(f"aiohttp gave up with {status}.")
            )
            viewer_left = begun and self.closing() and isinstance(exc, ConnectionError)
            if not viewer_left:
                self.server.observer.crashed(exc)
        if begun:
            raise ConnectionError(_HANDED_OVER)
        reply = (
            edge_request.refuse(400, BAD_MESSAGE, close=True)
            if parsing
            else edge_request.refuse(500, INTERNAL_ERROR, close=True)
        )
        return cast("web.StreamResponse", reply)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Hand to the observer what aiohttp would log."""
        exc = kw.get("exc_info")
        if not isinstance(exc, BaseException):
            exc = errors.INTERNAL_ERROR("aiohttp reported a failure without its exception.")
        self.server.observer.crashed(exc)


def check_runtime(
    version: str = aiohttp.__version__, parser: str = HttpRequestParser.__module__
) -> None:
    """Raise NotAvailable where what this file leans on is not what it was tested with."""
    if version not in TESTED_AIOHTTP:
        raise errors.NOT_AVAILABLE(
            f"aiohttp {version} is installed, this package was tested with "
            f"{', '.join(TESTED_AIOHTTP)}: install that version."
        )
    if parser != C_PARSER:
        raise errors.NOT_AVAILABLE(
            "aiohttp runs without its C parser, which takes fewer malformed requests: unset "
            "AIOHTTP_NO_EXTENSIONS, or install aiohttp from a wheel."
        )
    if not hasattr(select, "POLLRDHUP") or not hasattr(socket, "TCP_USER_TIMEOUT"):
        raise errors.NOT_AVAILABLE(
            "This system cannot tell that a client has left: serve on Linux."
        )


Handler = Callable[[EdgeRequest], Awaitable[Reply | web.StreamResponse]]


class EdgeServer(web.Server):
    """The factory of connections, and what they share; ``listen`` opens its door.

    Made on the running loop. ``capability_marker`` is ``b"/" + execute capability + b"/"``: a
    connection whose bytes hold it is no stranger. ``keepalive_seconds`` bounds idleness and
    headers. Raises NotAvailable where aiohttp is not the one that was tested, InvariantBroken for
    bounds of 0.
    """

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
        self.loop = self._loop
        self.draining = False
        self.open = 0  # connections
        self.tasks: set[asyncio.Task[Any]] = set()  # one a connection, until its work has ended
        self._settled = asyncio.Event()

    def __call__(self) -> RequestHandler:
        # Not the inherited one: at an option it does not know it drops all of them.
        return Edge(self, loop=self._loop, **self._kwargs)

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
        """Close the oldest connection that has shown no capability and awaits nothing of ours.

        So strangers can hold as many connections as they like and never cost a rollout its own.
        """
        for edge in self.edges():
            if edge.dispensable():
                edge.cut()
                return True
        return False

    def oldest_began(self) -> float:
        """Loop time of the first byte of the oldest request under the execute capability that is
        not answered; infinite where there is none.
        """
        return min((edge.unanswered_since() for edge in self.edges()), default=float("inf"))

    def edges(self) -> list[Edge]:
        """The connections that are open, or whose work goes on without their client."""
        return [edge for edge in self.connections if isinstance(edge, Edge)]


serve: Final = EdgeServer


async def listen(server: EdgeServer, sock: socket.socket) -> asyncio.Server:
    """Accept connections on the bound TCP socket; accepted ones inherit its stall bound."""
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

"""One request: what was sent, its body, the bytes of its answer and the one place they go; and what
is told where there is none.
"""

from __future__ import annotations

import asyncio
import select
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Protocol

from aiohttp import HttpVersion11, StreamReader, web
from yarl import URL

from smartsearch_sidecar import errors

if TYPE_CHECKING:
    from aiohttp.abc import AbstractStreamWriter
    from aiohttp.http_parser import RawRequestMessage

ONE_WRITE_BYTES: Final = 65536  # up to here a copy is cheaper than a second packet
_ROOT: Final = URL("/")
# Of Linux' tcp_info: where `tcpi_last_data_recv` stands, in milliseconds.
TCP_LAST_DATA: Final = slice(52, 56)
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
HANDED_OVER: Final = "An answer has begun on this request; a second one cannot follow."
CLOSE: Final = b"Connection: close\r\n\r\n"  # how the head of a connection's last answer ends


class EdgeObserver(Protocol):
    """Is told of what no handler sees; called on the loop, must neither raise nor block."""

    def malformed(self, reason: str, authenticated: bool) -> None:
        """A connection brought bytes that are no request, or left within one; once a connection.

        ``authenticated``: its bytes carried the execute capability. ``reason``: the name of the
        parser's error, ``cut_off`` (left within headers), ``abandoned`` (left with whole requests
        no handler has seen) or ``behind_upgrade`` (bytes after a request for another protocol).
        """

    def crashed(self, exc: BaseException) -> None:
        """A handler or a callback of its raised what it must not; the client got a 500 if any."""

    def overflow(self) -> None:
        """A connection that showed a capability was closed: ``connections_max`` others had."""

    def exhausted(self) -> None:
        """The process is at its last descriptors, and no stranger holds one of them."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a handler returns after it has handed its answer over.

    It stands where aiohttp expects a response, and tells it whether the connection goes on.
    """

    keep_alive: bool


KEPT: Final = Reply(True)
CLOSED: Final = Reply(False)


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
    """The status line and headers of an answer of ``length`` bytes.

    ``close`` must be true where the request's ``keep_alive`` is false; ``extra`` are further
    headers, made of our own constants and never of a caller's text.

    Raises:
        InvariantBroken: a header of ``extra`` holds a control character.
    """
    more = "".join(f"{name}: {value}\r\n" for name, value in extra.items()) if extra else ""
    if more and not more.replace("\r\n", "", len(extra or ())).isprintable():
        raise errors.INTERNAL_ERROR("A header of an answer holds a control character.")
    return b"%b%d%b%b%b" % (
        _opening(status, content_type),
        length,
        _date(int(time.time())),  # RFC 9110, 6.6.1, demands it of a server with a clock
        more.encode("ascii"),
        CLOSE if close else b"\r\n",
    )


class Connection(Protocol):
    """What a request asks of the connection it came on."""

    streaming: bool
    unread: list[Callable[[str], None]]

    @property
    def ending(self) -> bool: ...
    def next_began(self) -> float: ...
    def closing(self) -> bool: ...
    def left_at(self) -> float | None: ...
    def polled(self) -> int: ...
    def write(self, data: bytes) -> None: ...
    def tell(self, on_lost: Callable[[str], None], stage: str) -> None: ...


class EdgeRequest(web.BaseRequest):
    """A request as it was sent.

    ``began`` is the loop time of its first byte; ``delivered`` says whether its answer is handed
    over. ``remote`` is None: the capability shows who asks.

    It does not call aiohttp's constructor, which costs a quarter of a small request and raises for
    targets such as ``http://xn--a/`` outside every ``try``: the connection would hang unanswered.
    """

    __slots__ = (
        *("_message", "_protocol", "_payload_writer", "_payload", "_headers", "_method"),
        *("_version", "_cache", "_state", "_task", "_connection", "began", "delivered"),
    )
    _client_max_size = 0  # `read()` and `post()` are not how bodies are taken here: see `body`
    _client_max_fields = 0
    _transport_sslcontext = _transport_peername = _transport_sockname = None

    def __init__(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: Connection,
        payload_writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> None:
        self._message = message
        self._connection = protocol
        self._protocol = protocol  # type: ignore[assignment]
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
        return asyncio.get_running_loop()

    @property
    def _rel_url(self) -> URL:  # type: ignore[override]
        url = self._message.url
        return url if self._message.path[:1] == "/" else _ROOT

    @property
    def keep_alive(self) -> bool:
        """Whether the connection may serve another request after this one.

        Not after HTTP/1.0, not on a connection that is ending, and not after a request for another
        protocol: the parser drops what came in the same segment behind it.
        """
        message = self._message
        return not (
            message.should_close
            or message.upgrade
            or self._version != HttpVersion11
            or self._connection.ending
        )

    def gone(self) -> bool:
        """Whether the client has left, as far as transport and kernel can tell; about 0.5 us."""
        connection = self._connection
        return connection.closing() or connection.polled() != 0

    def left_at(self) -> float | None:
        """Loop time at which the client was first found to have left; ``None`` while it is here."""
        return self._connection.left_at()

    async def body(self, length: int, seconds: float) -> bytes:
        """The body's ``length`` bytes, as sent; a client that asked first is told to go on.

        Raises:
            InvalidBody: the body is not whole ``seconds`` from now, or has another length.
        """
        payload = self._payload
        try:
            if payload.is_eof():  # the usual case; a timer would cost more than the read
                data = payload.read_nowait()
            elif self._connection.closing():
                data = b""
            else:
                if self._headers.get("Expect", "").lower() == "100-continue":
                    self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                async with asyncio.timeout(seconds):
                    data = await payload.read()
        except TimeoutError:
            late = f"The body did not arrive within {seconds:g} seconds."
            raise errors.INVALID_BODY(late) from None
        except (OSError, web.RequestPayloadError):
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

        The rest of an answer too large for the socket is sent while the connection's task waits,
        not the handler.

        ``head`` is from `response_head`; ``payload`` is left out where the method is HEAD.
        ``on_lost`` is called exactly once, with the stage, if the client had left before the write
        or at it, or reset the connection later with the answer unread.

        Raises:
            InvariantBroken: the request has an answer already.
        """
        if self.delivered:
            raise errors.INTERNAL_ERROR(HANDED_OVER)
        self.delivered = True
        connection = self._connection
        if connection.closing() or (on_lost is not None and connection.polled()):
            if on_lost is not None:
                connection.tell(on_lost, BEFORE_WRITE)
            return CLOSED
        if self._method == "HEAD":
            payload = b""
        if len(payload) <= ONE_WRITE_BYTES:
            connection.write(head + payload)
        else:
            connection.write(head)
            connection.write(payload)
        if on_lost is not None:
            # POLLRDHUP would say too much here: a client may have read everything and closed.
            if connection.closing() or connection.polled() & select.POLLERR:
                connection.tell(on_lost, AT_WRITE)
            else:
                connection.unread.append(on_lost)
        return KEPT if self.keep_alive and not head.endswith(CLOSE) else CLOSED

    def refuse(self, status: int, payload: bytes, *, close: bool = False) -> Reply:
        """Hand an error answer over; closes where told to and where a body was left unread."""
        close = close or not self.keep_alive or not self._payload.is_eof()
        return self.deliver(response_head(status, len(payload), close=close), payload)

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        """aiohttp calls this before a stream's head is sent."""
        self._connection.streaming = True
        response.headers.setdefault("Cache-Control", "no-store")
        response.headers.setdefault("X-Content-Type-Options", "nosniff")
        response.headers.popall("Server", None)

    def _cancel(self, exc: BaseException) -> None:
        """aiohttp calls this when the client has left."""
        # A body that was whole before its client left stays readable: it was not short.
        if not self._payload.is_eof():
            super()._cancel(exc)


def unread_seconds(transport: asyncio.BaseTransport | None) -> float:
    """How long the kernel has had the latest bytes of a connection, for a loop that stood still."""
    if transport is None:
        return 0.0
    sock = transport.get_extra_info("socket")
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_LAST_DATA.stop)
    return int.from_bytes(info[TCP_LAST_DATA], sys.byteorder) / 1000

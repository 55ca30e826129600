"""Where bytes become requests and answers become bytes: the one file that leans on aiohttp's insides.

aiohttp parses and keeps connections; what it does with bytes that are no request, with handlers that
fail and with clients that leave is replaced here, because each of those turns into training text on
the other side. Three promises:

- whatever a handler does not answer, a constant does, and the observer hears of it; nothing of a
  request is logged or echoed, and stock error pages and tracebacks never run;
- an answer handed over is later reported lost if the client never took it, as far as the kernel can
  tell: before the write by POLLRDHUP, at the write by POLLERR, afterwards because Linux resets a
  connection whose socket is closed with unread bytes;
- every wait has a bound: headers and idle connections ``keepalive_seconds``, unread bodies
  ``LINGERING_SECONDS``, a client that is to close first ``FAREWELL_SECONDS``, a peer that takes
  nothing ``STALL_SECONDS``.

Private names used: ``RequestHandler._loop _waiter _messages _request_count _message_tail
_force_close``, ``_ErrInfo``, and the attributes of ``BaseRequest`` that its constructor sets. Hence
``TESTED_AIOHTTP``, and a test for each.
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
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, cast

import aiohttp
from aiohttp import web
from aiohttp.http import HttpRequestParser, HttpVersion11
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import RequestHandler, RequestPayloadError, _ErrInfo
from yarl import URL

from smartsearch_sidecar.errors import InvalidBody, InvariantBroken, NotAvailable

if TYPE_CHECKING:
    from aiohttp.abc import AbstractStreamWriter
    from aiohttp.http_parser import RawRequestMessage

TESTED_AIOHTTP: Final = ("3.14.5",)
C_PARSER: Final = "aiohttp._http_parser"

BACKLOG: Final = 4096  # connections; at 1024, half of 2,000 newcomers wait a second for a SYN retry
LINGERING_SECONDS: Final = 2.0  # for the rest of a refused body, so that its sender reads the refusal
FAREWELL_SECONDS: Final = 1.0  # for the client to close first: only that tells whether it has read
STALL_SECONDS: Final = 10.0  # TCP_USER_TIMEOUT: the client's own patience
ONE_WRITE_BYTES: Final = 65536  # up to here one copy is cheaper than a second packet

# Stages of a lost answer, as `on_lost` is told them.
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
_CLOSE: Final = b"\r\nConnection: close\r\n\r\n"
_ROOT: Final = URL("/")


class EdgeObserver(Protocol):
    """Who hears of what no handler sees. Called on the loop; must not raise or block."""

    def malformed(self, reason: str, authenticated: bool) -> None:
        """A connection brought bytes that are no request; once per connection.

        ``authenticated``: its bytes carried the execute capability. ``reason`` is the name of the
        parser's error, ``cut_off`` (left within the headers), ``abandoned`` (left with whole requests
        that no handler has seen) or ``behind_upgrade`` (bytes after a request for another protocol).
        """

    def crashed(self, exc: BaseException) -> None:
        """A handler, or a callback of its, raised something it must not; its client got a 500."""

    def overflow(self) -> None:
        """A connection over ``connections_max`` was closed unread: somebody's call was refused."""


class Reply:
    """What a handler returns once its answer is handed over; stands in for a response."""

    __slots__ = ("keep_alive",)

    def __init__(self, keep_alive: bool) -> None:
        self.keep_alive = keep_alive


_KEPT: Final = Reply(True)
_CLOSED: Final = Reply(False)

type_handler = Callable[["EdgeRequest"], Awaitable["Reply | web.StreamResponse"]]
Handler = type_handler


def response_head(
    status: int,
    length: int,
    *,
    content_type: str = "application/json",
    close: bool,
    extra: Mapping[str, str] | None = None,
) -> bytes:
    """Status line and headers of an answer of ``length`` bytes, ready to be written.

    ``close`` must be true where the request's ``keep_alive`` is false. ``extra`` holds constants of
    ours, never a caller's text; a control character in it raises InvariantBroken. Date is there
    because RFC 9110 (6.6.1) demands it of a server with a clock.
    """
    more = b"" if not extra else _lines(extra)
    end = _CLOSE if close else b"\r\n\r\n"
    return b"%b%b%b%d%b" % (_opening(status, content_type), _date(int(time.time())), more, length, end)

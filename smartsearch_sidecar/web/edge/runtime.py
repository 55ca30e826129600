"""The check at start: whether aiohttp and the system give what the edge leans on.

aiohttp promises nothing about most of these names, and a patch release may change any of them. So
the table below names each one that the other files of this room lean on, and a check at start looks
whether they are there, and lets exchanges pass through our own classes, without a network. A
release inside the range of versions that passes is served; one that does not is refused by a
sentence that names what is missing.

Apart from `server.py`, its one user, because it is a table and its own exchanges, no serving.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import select
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, cast

import aiohttp
from aiohttp import http, web, web_protocol

from smartsearch_sidecar import errors
from smartsearch_sidecar.web.capabilities import Capabilities
from smartsearch_sidecar.web.edge.connection import EdgeConnection, EdgeServer
from smartsearch_sidecar.web.edge.request import (
    BAD_MESSAGE,
    INTERNAL_ERROR,
    EdgeRequest,
    Reply,
    response_head,
)

# pyproject.toml allows the same range, and a test holds them together.
AIOHTTP_FROM: Final = (3, 14, 5)
AIOHTTP_BELOW: Final = (3, 15)
AIOHTTP_TESTED: Final = "3.14.5"  # the whole suite has run against it
C_PARSER: Final = "aiohttp._http_parser"
TURNS: Final = 20  # of the loop, that an exchange without a socket takes at most


async def check_runtime(version: str = aiohttp.__version__) -> None:
    """Look whether the system, and an aiohttp of this version, give what the edge leans on.

    It opens no connection, and takes a few milliseconds.

    Raises:
        NotAvailable: something is missing; the sentence names it and the remedy.
    """
    if not hasattr(select, "POLLRDHUP") or not hasattr(socket, "TCP_USER_TIMEOUT"):
        raise errors.NOT_AVAILABLE(
            "This system cannot tell that a client has left: serve on Linux."
        )
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if not AIOHTTP_FROM <= numbers < AIOHTTP_BELOW:
        first, below = (".".join(map(str, bound)) for bound in (AIOHTTP_FROM, AIOHTTP_BELOW))
        raise _untested(f"its range is {first} up to, not including, {below}", version)
    if hasattr(http, "HttpRequestParser") and http.HttpRequestParser.__module__ != C_PARSER:
        raise errors.NOT_AVAILABLE(
            "aiohttp runs without its C parser, which refuses more malformed requests: unset "
            "AIOHTTP_NO_EXTENSIONS, or install aiohttp from a wheel."
        )
    ours, theirs = socket.socketpair()
    try:
        with ours, theirs:
            fault = next(_missing(), None) or await _broken_promise(ours)
    except Exception as exc:  # noqa: BLE001 - classified: it is not what the check was written for
        fault = f"the check of it ended in {type(exc).__name__}: {exc}"
    if fault is not None:
        raise _untested(fault, version)


def _untested(fault: str, version: str) -> errors.UsageError:
    return errors.NOT_AVAILABLE(
        f"aiohttp {version} is installed, and the edge cannot serve with it: {fault}. "
        f"Install the version it was tested with: pip install aiohttp=={AIOHTTP_TESTED}"
    )


# --- names ----------------------------------------------------------------------------------------

# Whose each name is, and in which file we use it; the name, and why. "RequestHandler" is one before
# its connection is made, "BaseRequest" one as aiohttp's own constructor makes it.
LEANED_ON: Final[dict[tuple[str, str], dict[str, str]]] = {
    ("web_protocol", "connection"): {"_ErrInfo": "malformed bytes, as they stand in the queue"},
    ("http", "runtime"): {"HttpRequestParser": "the parser in C, which refuses more"},
    ("Server", "connection"): {
        "_loop": "the loop that connections are given",
        "_kwargs": "the options that connections are given",
        "connections": "the connections still served",
    },
    ("RequestHandler", "connection"): {
        "_loop": "time, futures",
        "_messages": "requests that wait: what is malformed, cut off",
        "_request_count": "how many requests a segment brought",
        "_message_tail": "bytes behind a request to upgrade",
        "_waiter": "whether it is idle; woken by a fault",
        "_current_request": "what is not answered yet",
        "_keepalive_handle": "the deadline of a silent connection",
        "_force_close": "one cut off may end before its first step",
        "transport": "None from the moment the connection is lost",
        "writing_paused": "whether an answer still waits to be sent",
        "start": "serves the connection; its task is counted",
        "close": "ends an idle connection",
        "force_close": "ends a connection at once",
        "eof_received": "a FIN; a reset may stand behind it",
        "connection_made": "a new one is counted",
        "connection_lost": "a reset: answers unread",
        "data_received": "the answer before was taken",
        "finish_response": "an answer handed over is not written again",
        "handle_error": "the stock one echoes and logs the request line",
        "log_exception": "the stock one logs a traceback",
    },
    ("RawRequestMessage", "request"): dict.fromkeys(
        ("method", "path", "version", "headers", "should_close", "upgrade", "url"),
        "a request as it was parsed",
    ),
    ("StreamReader", "request"): dict.fromkeys(
        ("is_eof", "read", "read_nowait", "feed_eof"), "a body, and whether it is whole"
    ),
    ("StreamWriter", "connection"): {
        "output_size": "whether an answer has begun",
        "drain": "until an answer is on its way",
    },
    ("BaseRequest", "request"): {
        "_prepare_hook": "the headers of a stream",
        "_cancel": "a body whole before its client left",
        **dict.fromkeys(
            (
                *("_message", "_protocol", "_payload_writer", "_payload", "_headers", "_method"),
                *("_version", "_cache", "_state", "_task", "_loop", "_rel_url"),
            ),
            "its constructor sets it, and ours instead",
        ),
    },
}
# What aiohttp's constructor sets as well. EdgeRequest gives each a constant that no route of ours
# reads, so a release may drop them.
GIVEN_CONSTANTS: Final = frozenset(
    {
        *("_client_max_size", "_client_max_fields"),
        *("_transport_sslcontext", "_transport_peername", "_transport_sockname"),
    }
)
# A function of ours that replaces one of aiohttp's must take the same parameters.
OURS: Final = {"RequestHandler": EdgeConnection, "BaseRequest": EdgeRequest}

_BODY: Final = b'{"env_str": "{}"}'
CAPABILITY: Final = "capability-of-the-exchanges-of-the-check"
_PATH: Final = f"/{CAPABILITY}/execute".encode()
_HEAD: Final = b"POST %b HTTP/1.1\r\nHost: x\r\n" % _PATH
WHOLE: Final = b"%bContent-Length: %d\r\n\r\n%b" % (_HEAD, len(_BODY), _BODY)


def _owners() -> Iterator[Any]:
    """An object for each owner, in the order of the table: some are made from earlier ones."""
    yield web_protocol
    yield http
    server = web.Server(cast("Any", _answering))
    yield server
    handler: Any = server()
    yield handler
    handler.data_received(WHOLE)
    message, payload = handler._messages[0]
    yield message
    yield payload
    loop = asyncio.get_running_loop()
    writer = http.StreamWriter(handler, loop)
    yield writer
    yield web.BaseRequest(message, payload, handler, writer, cast("Any", None), loop)


def _missing() -> Iterator[str]:
    """What of the table is not there, or takes other parameters."""
    for ((owner, place), names), found in zip(LEANED_ON.items(), _owners(), strict=True):
        for name, why in names.items():
            used = f"(web/edge/{place}.py: {why})"
            if not hasattr(found, name):
                yield f"{owner}.{name} is not there {used}"
            elif inspect.isfunction(replaced := vars(OURS.get(owner, object)).get(name)):
                takes = ", ".join(inspect.signature(getattr(found, name)).parameters)
                wanted = ", ".join([*inspect.signature(replaced).parameters][1:])
                if takes != wanted:
                    yield f"{owner}.{name} takes ({takes}), not ({wanted}) {used}"
        if owner == "BaseRequest":
            for name in sorted(set(vars(found)) - set(names) - GIVEN_CONSTANTS):
                yield f"{owner}.{name} is new, and web/edge/request.py does not set it"
    ended: Any = web.Server(cast("Any", _answering))()
    ended._force_close = True
    ended.data_received(WHOLE)
    if ended._messages:
        yield "this does not hold: RequestHandler._force_close stops the parsing"


# --- exchanges ------------------------------------------------------------------------------------


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


class _Told(list[str]):
    """What an exchange tells its observer."""

    def malformed(self, reason: str, authenticated: bool) -> None:
        self.append("malformed")

    def crashed(self, exc: BaseException) -> None:
        self.append(f"crashed by {type(exc).__name__}")

    def overflow(self) -> None:
        self.append("overflow")

    def exhausted(self) -> None:
        self.append("exhausted")


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


class Exchange(NamedTuple):
    """What must hold, and how it is seen.

    ``sent`` are the segments of a client; ``parts`` come back in this order; ``told`` is what the
    observer is told.
    """

    promise: str
    sent: tuple[bytes, ...]
    parts: tuple[bytes, ...]
    told: tuple[str, ...] = ()


def _refused(name: str, data: bytes) -> Exchange:
    parts = (b" 400 ", BAD_MESSAGE, b"<FIN>")
    return Exchange(f"{name}: the parser refuses it", (data,), parts, ("malformed",))


def _with(*lines: bytes, head: bytes = _HEAD) -> bytes:
    return b"".join((head, *(line + b"\r\n" for line in lines), b"\r\n"))


def _asking(line: bytes) -> bytes:
    return _with(head=line + b"\r\nHost: x\r\n")


_ANSWER: Final = (b" 200 OK", _PATH + _BODY)
_STREAM: Final = (b" 200 OK", b"nosniff", b"streamed")
_GET: Final = b"GET / HTTP/1.1\r\nHost: x\r\n"
_TAILED: Final = _with(b"Connection: upgrade", b"Upgrade: websocket", head=_GET) + b"tail"
_AUTHORITY: Final = WHOLE.replace(b" /", b" http://[::1]@/", 1)
_CRASH: Final = (b" 500 ", INTERNAL_ERROR)

EXCHANGES: Final = (
    Exchange("a request wakes a connection that waits for one", (WHOLE,), _ANSWER),
    Exchange("two requests in one segment are answered", (WHOLE * 2,), _ANSWER * 2),
    Exchange("a body in two segments is waited for", (WHOLE[:-1], WHOLE[-1:]), _ANSWER),
    Exchange("headers in two segments are waited for", (WHOLE[:1], WHOLE[1:]), _ANSWER),
    Exchange(
        *("a target is kept as sent", (WHOLE.replace(_PATH, b"/%63?x/"),)),
        (b" 200 OK", b"/%63?x/" + _BODY),
    ),
    Exchange("a stream is sent", (_with(head=_GET),), _STREAM),
    Exchange("bytes behind a request to upgrade are told", (_TAILED,), _STREAM, ("malformed",)),
    Exchange(
        *("a crash is answered", (WHOLE.replace(b"POST", b"PUT"),), _CRASH),
        ("crashed by LookupError",),
    ),
    _refused("a target that yarl refuses", _AUTHORITY),
    # Each alone in one segment. Most are framing that two readers could take for two different
    # requests: the handlers rely on the parser for it, and look at the length only.
    _refused("two lengths", _with(b"Content-Length: 2", b"Content-Length: 2")),
    _refused("a signed length", _with(b"Content-Length: +2")),
    _refused("a list of lengths", _with(b"Content-Length: 2, 2")),
    _refused("a length of 64 bits", _with(b"Content-Length: 18446744073709551616")),
    _refused("a length and chunks", _with(b"Content-Length: 2", b"Transfer-Encoding: chunked")),
    _refused("chunks and a length", _with(b"Transfer-Encoding: chunked", b"Content-Length: 2")),
    _refused("chunks twice", _with(b"Transfer-Encoding: chunked, chunked")),
    _refused("an unknown coding", _with(b"Transfer-Encoding: gzip")),
    _refused("a folded header", _with(b"A: b", b" c")),
    _refused("a blank before a colon", _with(b"A : b")),
    _refused("a bare line feed", _with(b"A: b\nB: c")),
    _refused("a bare carriage return", _with(b"A: b\rB: c")),
    _refused("a control character", _with(b"A: b\x00")),
    _refused("two hosts", _with(b"Host: y")),
    _refused("129 headers", _with(*[b"A: b"] * 129)),
    _refused("a header of 9000 bytes", _with(b"A: " + b"b" * 9000)),
    _refused("a target of 9000 bytes", _asking(b"GET /%b HTTP/1.1" % (b"a" * 9000))),
    _refused("a target outside ASCII", _asking(b"GET /\xc3\xa9 HTTP/1.1")),
    _refused("a target without an authority", _asking(b"GET http:///c HTTP/1.1")),
    _refused("a method in lower case", _asking(b"post / HTTP/1.1")),
    _refused("another version", _asking(b"GET / HTTP/1.2")),
    _refused("no host", b"GET / HTTP/1.1\r\n\r\n"),
    _refused("a TLS hello", b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03"),
)


async def _broken_promise(sock: socket.socket) -> str | None:
    """The first promise of an exchange that does not hold; the socket is of a silent pair."""
    told = _Told()
    server = EdgeServer(
        _answering,
        observer=told,
        capabilities=Capabilities(CAPABILITY, CAPABILITY[::-1]),
        keepalive_seconds=1.0,
        connections_max=1,
    )
    for promise, sent, parts, reports in EXCHANGES:
        told.clear()
        answered = await _exchange(server, sock, sent)
        if answered is None:
            return "a new connection that stays silent is never closed"
        as_wanted = re.search(b".*".join(map(re.escape, parts)), answered, re.DOTALL)
        if not as_wanted or tuple(told) != reports or server.open or server.tasks:
            found = f"{answered[-80:]!r}, reported: {', '.join(told) or 'nothing'}"
            return f"this does not hold: {promise} ({found})"
    return None


async def _exchange(
    server: EdgeServer, sock: socket.socket, sent: tuple[bytes, ...]
) -> bytes | None:
    """What a connection answers to these segments, and its end; None if it has no deadline."""
    transport, connection = _Memory(sock), server()
    try:
        connection.connection_made(transport)
        if not connection.has_deadline():
            return None
        for segment in sent:
            await _turns(connection.idle)
            connection.data_received(segment)
        await _turns(
            lambda: connection.idle() or transport.closed or transport.sent.endswith(b"<FIN>")
        )
    finally:
        connection.connection_lost(None)
        await _turns(lambda: not server.tasks)
        for task in server.tasks:
            task.cancel()
    return transport.sent


async def _turns(condition: Callable[[], bool]) -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)
        if condition():
            return

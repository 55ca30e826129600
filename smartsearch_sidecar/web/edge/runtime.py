"""What the edge needs of aiohttp and of the system, and whether it is there.

aiohttp promises nothing about most of these names, and a patch release may change any of them. So
the table below names each one that the other files of this room lean on, and a check at start looks
whether they are there and behave, with aiohttp's own parser and without a socket. A release inside
the range of versions that passes is served; one that does not is refused by a sentence that names
what is missing. ``server.py`` adds one exchange through our own classes.

Apart from ``server.py``, which runs it: it has to import without the names that it looks for.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import select
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import aiohttp
from aiohttp import http, web, web_protocol

from smartsearch_sidecar import errors

# pyproject.toml allows the same range, and a test holds them together.
AIOHTTP_FROM: Final = (3, 14, 5)
AIOHTTP_BELOW: Final = (3, 15)
AIOHTTP_TESTED: Final = "3.14.5"  # the whole suite has run against it
C_PARSER: Final = "aiohttp._http_parser"


class LeanedOn(NamedTuple):
    """One name of aiohttp's: whose it is, where we use it and why.

    ``parameters`` are those a function must take, where we replace it or are replaced by it.
    """

    owner: str
    name: str
    where: str
    why: str
    parameters: tuple[str, ...] = ()


_HANDLER = "RequestHandler"  # an object of it, before its connection is made
_BASE = "BaseRequest"  # an object of it, as aiohttp's own constructor makes it

LEANED_ON: Final = (
    LeanedOn(
        "web_protocol", "_ErrInfo", "connection", "malformed bytes, as they stand in the queue"
    ),
    LeanedOn("http", "HttpRequestParser", "runtime", "the parser in C, which refuses more"),
    LeanedOn("Server", "_loop", "server", "the loop that connections are given"),
    LeanedOn("Server", "_kwargs", "server", "the options that connections are given"),
    LeanedOn("Server", "connections", "server", "the connections still served"),
    LeanedOn(_HANDLER, "_loop", "connection", "time, futures"),
    LeanedOn(_HANDLER, "_messages", "connection", "requests that wait: what is malformed, cut off"),
    LeanedOn(_HANDLER, "_request_count", "connection", "how many requests a segment brought"),
    LeanedOn(_HANDLER, "_message_tail", "connection", "bytes behind a request to upgrade"),
    LeanedOn(_HANDLER, "_waiter", "connection", "whether it is idle; woken by a fault"),
    LeanedOn(_HANDLER, "_current_request", "connection", "what is not answered yet"),
    LeanedOn(_HANDLER, "_keepalive_handle", "connection", "the deadline of a silent connection"),
    LeanedOn(_HANDLER, "_force_close", "connection", "an overflow is closed before its first step"),
    LeanedOn(_HANDLER, "transport", "connection", "None from the moment the connection is lost"),
    LeanedOn(_HANDLER, "writing_paused", "connection", "whether an answer still waits to be sent"),
    LeanedOn(_HANDLER, "start", "connection", "serves the connection; its task is counted"),
    LeanedOn(_HANDLER, "close", "connection", "ends an idle connection"),
    LeanedOn(_HANDLER, "force_close", "connection", "ends a connection at once"),
    LeanedOn(_HANDLER, "eof_received", "connection", "a FIN; a reset may stand behind it"),
    LeanedOn(_HANDLER, "connection_made", "connection", "a new one is counted", ("transport",)),
    LeanedOn(_HANDLER, "connection_lost", "connection", "a reset: answers unread", ("exc",)),
    LeanedOn(_HANDLER, "data_received", "connection", "the answer before was taken", ("data",)),
    LeanedOn(
        *(_HANDLER, "finish_response", "connection", "an answer handed over is not written again"),
        ("request", "resp", "start_time"),
    ),
    LeanedOn(
        *(_HANDLER, "handle_error", "connection", "the stock one echoes and logs the request line"),
        ("request", "status", "exc", "message"),
    ),
    LeanedOn(
        _HANDLER, "log_exception", "connection", "the stock one logs a traceback", ("args", "kw")
    ),
    LeanedOn(_BASE, "_prepare_hook", "request", "the headers of a stream", ("response",)),
    LeanedOn(_BASE, "_cancel", "request", "a body whole before its client left", ("exc",)),
    *(
        LeanedOn(_BASE, name, "request", "its constructor sets it, and ours instead")
        for name in (
            *("_message", "_protocol", "_payload_writer", "_payload", "_headers", "_method"),
            *("_version", "_cache", "_state", "_task", "_loop", "_rel_url"),
        )
    ),
    *(
        LeanedOn("RawRequestMessage", name, "request", "a request as it was parsed")
        for name in ("method", "path", "version", "headers", "should_close", "upgrade", "url")
    ),
    *(
        LeanedOn("StreamReader", name, "request", "a body, and whether it is whole")
        for name in ("is_eof", "read", "read_nowait", "feed_eof")
    ),
    LeanedOn("StreamWriter", "output_size", "connection", "whether an answer has begun"),
    LeanedOn("StreamWriter", "drain", "connection", "until an answer is on its way"),
)

# What aiohttp's constructor sets as well. EdgeRequest gives each a constant that no route of ours
# reads, so a release may drop them.
GIVEN_CONSTANTS: Final = frozenset(
    {
        *("_client_max_size", "_client_max_fields"),
        *("_transport_sslcontext", "_transport_peername", "_transport_sockname"),
    }
)

_BODY: Final = b'{"env_str": "{}"}'
_HEAD: Final = b"POST /c/execute HTTP/1.1\r\nHost: x\r\n"
WHOLE: Final = b"%bContent-Length: %d\r\n\r\n%b" % (_HEAD, len(_BODY), _BODY)


def _with(*lines: bytes, head: bytes = _HEAD) -> bytes:
    return b"".join((head, *(line + b"\r\n" for line in lines), b"\r\n"))


# What the parser refuses, each alone in one segment. Most are framing that two readers could take
# for two different requests: the handlers rely on the parser for it, and look at the length only.
REFUSED: Final = (
    ("two lengths", _with(b"Content-Length: 2", b"Content-Length: 2")),
    ("a signed length", _with(b"Content-Length: +2")),
    ("a list of lengths", _with(b"Content-Length: 2, 2")),
    ("a length of 64 bits", _with(b"Content-Length: 18446744073709551616")),
    ("a length and chunks", _with(b"Content-Length: 2", b"Transfer-Encoding: chunked")),
    ("chunks and a length", _with(b"Transfer-Encoding: chunked", b"Content-Length: 2")),
    ("chunks twice", _with(b"Transfer-Encoding: chunked, chunked")),
    ("an unknown coding", _with(b"Transfer-Encoding: gzip")),
    ("a folded header", _with(b"A: b", b" c")),
    ("a blank before a colon", _with(b"A : b")),
    ("a bare line feed", _with(b"A: b\nB: c")),
    ("a bare carriage return", _with(b"A: b\rB: c")),
    ("a control character", _with(b"A: b\x00")),
    ("two hosts", _with(b"Host: y")),
    ("129 headers", _with(*[b"A: b"] * 129)),
    ("a header of 9000 bytes", _with(b"A: " + b"b" * 9000)),
    ("a target of 9000 bytes", _with(head=b"GET /%b HTTP/1.1\r\nHost: x\r\n" % (b"a" * 9000))),
    ("a target outside ASCII", _with(head=b"GET /\xc3\xa9 HTTP/1.1\r\nHost: x\r\n")),
    ("a target without an authority", _with(head=b"GET http:///c HTTP/1.1\r\nHost: x\r\n")),
    ("a method in lower case", _with(head=b"post / HTTP/1.1\r\nHost: x\r\n")),
    ("another version", _with(head=b"GET / HTTP/1.2\r\nHost: x\r\n")),
    ("no host", _with(head=b"GET / HTTP/1.1\r\n")),
    ("a TLS hello", b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03"),
)


async def _none(request: web.BaseRequest) -> web.StreamResponse:
    raise NotImplementedError


def _handler() -> web.RequestHandler:
    """A connection of aiohttp's own, with the options of ours, and not connected."""
    server = web.Server(_none)
    return web.RequestHandler(
        server,
        loop=asyncio.get_running_loop(),
        access_log=None,  # type: ignore[arg-type]
        auto_decompress=False,
        keepalive_timeout=75.0,
        lingering_time=1.0,
        tcp_keepalive=False,
    )


def _fed(*segments: bytes) -> Any:
    """A connection that has parsed these segments."""
    handler = _handler()
    for segment in segments:
        handler.data_received(segment)
    return handler


def _owners() -> Iterator[tuple[str, Any]]:
    """An object for each owner in the table, the ones first that the later ones are made from."""
    yield "web_protocol", web_protocol
    yield "http", http
    yield "Server", web.Server(_none)
    handler = _handler()
    yield _HANDLER, handler
    handler.data_received(WHOLE)
    message: Any
    message, payload = handler._messages[0]
    yield "RawRequestMessage", message
    yield "StreamReader", payload
    loop = asyncio.get_running_loop()
    writer = http.StreamWriter(handler, loop)
    yield "StreamWriter", writer
    task: Any = None
    yield _BASE, web.BaseRequest(message, payload, handler, writer, task, loop)


def _missing() -> Iterator[str]:
    """What of the table is not there, or takes other parameters."""
    for owner, found in _owners():
        rows = [row for row in LEANED_ON if row.owner == owner]
        for row in rows:
            place = f"(web/edge/{row.where}.py: {row.why})"
            if not hasattr(found, row.name):
                yield f"{owner}.{row.name} is not there {place}"
            elif row.parameters:
                takes = tuple(inspect.signature(getattr(found, row.name)).parameters)
                if takes != row.parameters:
                    wanted = ", ".join(row.parameters)
                    yield f"{owner}.{row.name} takes ({', '.join(takes)}), not ({wanted}) {place}"
        if owner == _BASE:
            for name in sorted(set(vars(found)) - {row.name for row in rows} - GIVEN_CONSTANTS):
                yield f"{owner}.{name} is new, and web/edge/request.py does not set it"


def _refuses(data: bytes) -> bool:
    """Whether the parser queues these bytes as a fault, and its cause with it."""
    (message, _), *rest = _fed(data)._messages
    fault = web_protocol._ErrInfo
    return type(message) is fault and isinstance(message.exc, Exception) and not rest


def _queues_whole() -> bool:
    handler = _fed(WHOLE + WHOLE)
    message, payload = handler._messages[0]
    return (
        (len(handler._messages), handler._request_count) == (2, 2)
        and (message.method, message.path) == ("POST", "/c/execute")
        and (message.version, message.headers["host"]) == (aiohttp.HttpVersion11, "x")
        and not (message.should_close or message.upgrade)
        and payload.is_eof()
        and payload.read_nowait() == _BODY
    )


def _waits_for_body() -> bool:
    handler = _fed(WHOLE[:-1])
    (_, payload), *_ = handler._messages
    before = payload.is_eof()
    handler.data_received(WHOLE[-1:])
    return not before and payload.is_eof() and payload.read_nowait() == _BODY


def _waits_for_headers() -> bool:
    handler = _fed(*(WHOLE[at : at + 1] for at in range(len(_HEAD))))
    return not handler._messages and not handler._request_count


def _keeps_target() -> bool:
    message, _ = _fed(WHOLE.replace(b"/c/", b"/%63?x/"))._messages[0]
    return bool(message.path == "/%63?x/execute")


def _wakes() -> bool:
    handler = _handler()
    handler._waiter = asyncio.get_running_loop().create_future()
    handler.data_received(WHOLE)
    return handler._waiter.done()


def _stops() -> bool:
    handler = _handler()
    handler._force_close = True
    handler.data_received(WHOLE)
    return not handler._messages


def _keeps_tail() -> bool:
    upgrade = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    handler = _fed(upgrade, b"tail")
    return bool(handler._messages[0][0].upgrade and handler._message_tail == b"tail")


# How the names behave: what must hold, and how it is seen.
BEHAVIOUR: Final[tuple[tuple[str, Callable[[], bool]], ...]] = (
    ("two requests in one segment stand whole in RequestHandler._messages", _queues_whole),
    ("a body that has not come leaves StreamReader.is_eof false until it has", _waits_for_body),
    ("headers that are not whole queue nothing in RequestHandler._messages", _waits_for_headers),
    ("RawRequestMessage.path is the target as sent", _keeps_target),
    ("a request wakes RequestHandler._waiter", _wakes),
    ("RequestHandler._force_close stops the parsing", _stops),
    ("bytes behind a request to upgrade stand in RequestHandler._message_tail", _keeps_tail),
    *(
        (f"{name}: the parser refuses it and queues web_protocol._ErrInfo", partial(_refuses, data))
        for name, data in REFUSED
    ),
)


def _faults() -> Iterator[str]:
    """What is missing or behaves otherwise."""
    yield from _missing()
    for promise, holds in BEHAVIOUR:
        if not holds():
            yield f"this does not hold: {promise}"


def untested(fault: str, version: str) -> errors.UsageError:
    """The refusal of an aiohttp that lacks what is leaned on, and the remedy."""
    return errors.NOT_AVAILABLE(
        f"aiohttp {version} is installed, and the edge cannot serve with it: {fault}. "
        f"Install the version it was tested with: pip install aiohttp=={AIOHTTP_TESTED}"
    )


def check_runtime(version: str = aiohttp.__version__) -> None:
    """Look whether the system, and an aiohttp of this version, give what the edge leans on.

    It runs on the loop, opens no socket, and takes a few milliseconds.

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
        raise untested(f"its range is {first} up to, not including, {below}", version)
    if hasattr(http, "HttpRequestParser") and http.HttpRequestParser.__module__ != C_PARSER:
        raise errors.NOT_AVAILABLE(
            "aiohttp runs without its C parser, which refuses more malformed requests: unset "
            "AIOHTTP_NO_EXTENSIONS, or install aiohttp from a wheel."
        )
    try:
        fault = next(_faults(), None)
    except Exception as exc:  # noqa: BLE001 - classified: it is not what the check was written for
        fault = f"the check of it ended in {type(exc).__name__}: {exc}"
    if fault is not None:
        raise untested(fault, version)

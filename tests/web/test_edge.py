"""The edge and clients that know HTTP: requests as sent, bodies, answers, lost clients, the end."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable

import pytest
from aiohttp import web

from smartsearch_sidecar import errors
from smartsearch_sidecar.web.edge.connection import Handler
from smartsearch_sidecar.web.edge.request import (
    AFTER_WRITE,
    BEFORE_WRITE,
    INTERNAL_ERROR,
    EdgeRequest,
    Reply,
    response_head,
)
from tests.fakes.until import until
from tests.web.rawclient import (
    PATIENCE,
    TARGET,
    RawClient,
    message,
    serving,
)

pytestmark = pytest.mark.both_loops

OK = b'{"ok":true}'
CLOSE = ("Connection: close",)


def answering(
    request: EdgeRequest,
    payload: bytes = OK,
    on_lost: Callable[[str], None] | None = None,
) -> Reply:
    head = response_head(200, len(payload), close=not request.keep_alive)
    return request.deliver(head, payload, on_lost)


# --- the request as it was sent -------------------------------------------------------------------

ORIGIN_FORMS = ["/a/b", "/%61/b", "//a/b", "/a//b", "/a/b?x=1", "/a/b#f", "/a/../b", "/a;b", "/%zz"]
OTHER_FORMS = [
    ("POST", "http://h/a/b"),
    ("POST", "HTTP://u:p@h:1/a?x#y"),
    ("POST", "ftp://h/a"),
    ("POST", "http://xn--a/c"),  # aiohttp's own request dies of this one, without any answer
    ("CONNECT", "h:1"),
    ("CONNECT", "/a/b"),
    ("OPTIONS", "*"),
    ("PATCH", "/a/b"),
]


async def test_target_and_method_reach_the_handler_as_sent() -> None:
    """Every form of target arrives byte for byte, so that a handler can compare it raw."""
    seen: list[tuple[str, str, str]] = []

    async def handler(request: EdgeRequest) -> Reply:
        seen.append((request.method, request.raw_target, str(request.rel_url)))
        return answering(request)

    async with serving(handler) as served:
        for method, target in [("POST", form) for form in ORIGIN_FORMS] + OTHER_FORMS:
            client = await served.connect()
            body = b"" if method == "CONNECT" else b"{}"
            await client.send(message(body, method=method, target=target, headers=CLOSE))
            assert (await client.answer()).status == 200
            assert await client.closed()
            client.close()
            assert seen[-1][:2] == (method, target)
        await served.emptied()
        assert served.seen.silent
    assert seen[0][2] == "/a/b"
    assert seen[len(ORIGIN_FORMS)][2] == "/"  # what no route of ours looks like is not taken apart


async def test_versions_before_and_after_ours_are_shown_to_the_handler_and_closed() -> None:
    """The parser takes HTTP/0.9, 1.0 and 2.0; the handler sees which, and none is kept."""
    seen: list[tuple[int, int]] = []

    async def handler(request: EdgeRequest) -> Reply:
        seen.append((request.version.major, request.version.minor))
        return answering(request)

    async with serving(handler) as served:
        for version in ("0.9", "1.0", "2.0"):
            client = await served.connect()
            await client.send(message(version=version, headers=("Connection: keep-alive",)))
            assert (await client.answer()).headers["connection"] == "close"
            client.close()
    assert seen == [(0, 9), (1, 0), (2, 0)]


async def test_began_is_the_first_byte_of_each_request() -> None:
    """The clock of a request starts with its first byte, not with its last or its neighbour's."""
    began: list[float] = []

    async def handler(request: EdgeRequest) -> Reply:
        began.append(request.began)
        await request.body(2, PATIENCE)
        return answering(request)

    async with serving(handler) as served:
        loop = asyncio.get_running_loop()
        client = await served.connect()
        for _ in range(2):
            before = loop.time()
            await client.send(message()[:9])
            await until(lambda: any(c._first is not None for c in served.server.edges()))
            after = loop.time()
            await until(lambda: loop.time() > after + 0.01)  # noqa: B023  # awaited at once
            await client.send(message()[9:-1])
            await client.send(message()[-1:])
            await client.answer()
            assert before - 0.002 <= began[-1] <= after  # uvloop's clock counts milliseconds
        client.close()


# --- bodies ---------------------------------------------------------------------------------------


async def test_body_is_taken_as_the_bytes_sent() -> None:
    """A declared content encoding changes nothing, and where the segments end changes nothing."""
    body = bytes(range(256)) * 40
    async with serving() as served:
        client = await served.connect()
        for encoding in ("gzip", "deflate", "br"):
            await client.drip(message(body, headers=(f"Content-Encoding: {encoding}",)), 3000)
            assert (await client.answer()).body == TARGET.encode() + b" " + body
        client.close()
        await served.emptied()
        assert served.seen.silent
        assert not served.lost


async def test_late_or_short_body_is_an_invalid_body() -> None:
    """A body that is late, cut off, or not as long as expected raises InvalidBody, nothing else."""
    raised: list[str] = []
    reading = asyncio.Event()

    async def handler(request: EdgeRequest) -> Reply:
        asyncio.get_running_loop().call_soon(reading.set)
        try:
            await request.body(4, 0.05 if request.raw_target == "/late" else PATIENCE)
        except errors.EdgeRefusal as exc:
            raised.append(exc.message)
            return request.refuse(400, b"{}")
        return answering(request)

    async with serving(handler) as served:
        late = await served.connect()
        await late.send(message(b"body", target="/late")[:-1])
        assert (await late.answer()).headers["connection"] == "close"
        await late.send(b"y")
        assert await late.closed()
        for leave in (RawClient.shut, RawClient.reset):
            client = await served.connect()
            reading.clear()
            count = len(raised)
            await client.send(message(b"body")[:-1])
            await reading.wait()
            leave(client)
            await until(lambda: len(raised) > count)  # noqa: B023  # awaited at once
            client.close()
        long = await served.connect()
        await long.send(message(b"bodies"))
        assert (await long.answer()).status == 400
        late.close()
        long.close()
        await served.emptied()
        assert served.seen.silent
    assert raised == [
        "The body did not arrive within 0.05 seconds.",
        "The client left before its body was whole.",
        "The client left before its body was whole.",
        "The body is 6 bytes, its declared length is 4.",
    ]


async def test_whole_body_of_a_client_that_left_is_not_short() -> None:
    """Leaving after the last byte is a lost client, not a broken body."""
    bodies: list[bytes] = []
    lost: list[str] = []
    gate = asyncio.Event()

    async def handler(request: EdgeRequest) -> Reply:
        await gate.wait()
        bodies.append(await request.body(4, PATIENCE))
        return answering(request, on_lost=lost.append)

    async with serving(handler) as served:
        client = await served.connect()
        await client.send(message(b"body"))
        await until(lambda: served.server.requests_count == 1)
        client.close()
        await until(lambda: not served.server.open)
        gate.set()
        await served.emptied()
        assert served.seen.silent
    assert bodies == [b"body"]
    assert lost == [BEFORE_WRITE]


async def test_client_that_asks_first_is_told_to_go_on_when_its_body_is_wanted() -> None:
    """`Expect: 100-continue` is answered by taking the body, and by a refusal not at all."""

    async def handler(request: EdgeRequest) -> Reply:
        if request.raw_target == "/refused":
            return request.refuse(413, b"{}")
        return answering(request, await request.body(5, PATIENCE))

    async with serving(handler) as served:
        client = await served.connect()
        await client.send(message(b"hello", headers=("Expect: 100-continue",))[:-5])
        assert (await client.answer()).status == 100
        await client.send(b"hello")
        assert (await client.answer()).body == b"hello"
        await client.send(message(b"hello", headers=("Expect: 100-continue",)))
        assert (await client.answer()).status == 200
        await client.send(message(b"h", target="/refused", headers=("Expect: 100-continue",))[:-1])
        assert (await client.answer()).status == 413
        await client.send(b"h")
        assert await client.closed()
        client.close()
        await served.emptied()
        assert served.seen.silent


async def test_refused_body_still_lets_its_sender_read_the_refusal() -> None:
    """A sender whose megabyte is refused unread gets the whole answer and a clean end, no reset."""

    async def handler(request: EdgeRequest) -> Reply:
        return request.refuse(413, b'{"error":{}}')

    async with serving(handler) as served:
        client = await served.connect()
        assert await client.send(message(b"x" * 1_000_000))
        refusal = await client.answer()
        assert (refusal.status, refusal.headers["connection"]) == (413, "close")
        assert await client.closed()
        client.close()


# --- answers --------------------------------------------------------------------------------------


def test_response_head_is_made_of_constants() -> None:
    """Every head carries type, length, date and both protections, and no name of a server."""
    kept = response_head(200, 12, close=False).split(b"\r\n")
    assert [line for line in kept if not line.startswith(b"Date: ")] == [
        b"HTTP/1.1 200 OK",
        b"Content-Type: application/json",
        b"Cache-Control: no-store",
        b"X-Content-Type-Options: nosniff",
        b"Content-Length: 12",
        b"",
        b"",
    ]
    assert len(kept) == 8
    closed = response_head(405, 0, content_type="text/plain", close=True, extra={"Allow": "POST"})
    assert closed.startswith(b"HTTP/1.1 405 Method Not Allowed\r\nContent-Type: text/plain\r\n")
    assert closed.endswith(b"\r\nAllow: POST\r\nConnection: close\r\n\r\n")
    for bad in ({"Allow": "POST\r\nX: y"}, {"A\n": "b"}, {"A": "b\0"}, {"A\r\nB": "c", "D": "e"}):
        with pytest.raises(errors.InvariantBroken):
            response_head(405, 0, close=True, extra=bad)


@pytest.mark.parametrize(
    ("version", "headers", "kept"),
    [
        ("1.1", (), True),
        ("1.1", ("Connection: keep-alive",), True),
        ("1.1", ("Connection: close",), False),
        ("1.1", ("Connection: Upgrade", "Upgrade: websocket"), False),
        ("1.1", ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c"), False),
        ("1.0", (), False),
        ("1.0", ("Connection: keep-alive",), False),
    ],
)
async def test_connection_is_kept_exactly_where_the_answer_says_so(
    version: str, headers: tuple[str, ...], kept: bool
) -> None:
    """An answer says `Connection: close` and is followed by the end, or neither."""
    async with serving() as served:
        client = await served.connect()
        for number in range(2 if kept else 1):
            await client.send(message(b"%d" % number, version=version, headers=headers))
            answer = await client.answer()
            assert answer.body == TARGET.encode() + b" %d" % number
            assert answer.headers.get("connection") == (None if kept else "close")
        if not kept:
            assert await client.closed()
        client.close()
        await served.emptied()
        assert served.seen.silent
        assert not served.lost


async def test_head_gets_no_body() -> None:
    """The answer to HEAD ends with its headers, so that the next one is not misread."""
    async with serving() as served:
        client = await served.connect()
        await client.send(message(b"", method="HEAD") + message(b"next"))
        assert int((await client.answer(bodiless=True)).headers["content-length"]) > 0
        assert (await client.answer()).body == TARGET.encode() + b" next"
        client.close()


async def test_pipelined_requests_are_answered_in_order_and_counted_once() -> None:
    """A hundred requests in one write get a hundred answers in order, and none counts as lost."""
    async with serving() as served:
        client = await served.connect()
        await client.send(b"".join(message(b"%d" % n) for n in range(100)))
        for number in range(100):
            assert (await client.answer()).body == TARGET.encode() + b" %d" % number
        client.close()
        await served.emptied()
        assert served.seen.silent
        assert not served.lost
        assert served.server.requests_count == 100


async def test_unhandled_pipelined_requests_are_reported_when_their_client_leaves() -> None:
    """Whole requests behind one at work are not forgotten when the connection ends."""
    gate = asyncio.Event()

    async def handler(request: EdgeRequest) -> Reply:
        await gate.wait()
        return answering(request)

    async with serving(handler) as served:
        client = await served.connect()
        await client.send(message() * 3)
        await until(lambda: served.server.requests_count == 1)
        client.close()
        await until(lambda: bool(served.seen.faults))
        gate.set()
        await served.emptied()
        assert served.seen.faults == [("abandoned", True)]
        assert served.server.requests_count == 1


async def test_big_answer_reaches_a_slow_reader_whole_and_holds_no_handler() -> None:
    """An answer of 4 MB leaves the handler at once and is sent as its reader takes it."""
    payload = bytes(range(256)) * 16384
    returned = asyncio.Event()
    lost: list[str] = []

    async def handler(request: EdgeRequest) -> Reply:
        reply = answering(request, payload, lost.append)
        asyncio.get_running_loop().call_soon(returned.set)
        return reply

    async with serving(handler) as served:
        client = await served.connect(65536)
        await client.send(message())
        await returned.wait()
        assert not client.received
        assert (await client.answer()).body == payload
        await client.send(message(headers=CLOSE))
        assert (await client.answer()).body == payload
        assert await client.closed()
        client.close()
        await served.emptied()
        assert served.seen.silent
        assert not lost


async def test_reader_that_takes_nothing_is_dropped_and_its_answer_lost() -> None:
    """A client that never reads a large answer does not hold its connection for ever."""
    lost: list[str] = []

    async def handler(request: EdgeRequest) -> Reply:
        return answering(request, b"x" * 8_000_000, lost.append)

    async with serving(handler, stall_seconds=0.5) as served:
        client = await served.connect(65536)
        await client.send(message())
        await until(lambda: bool(lost))
        await served.emptied()
        assert lost == [AFTER_WRITE]
        assert served.seen.silent
        client.close()


async def test_accepted_connections_inherit_the_stall_bound() -> None:
    """The kernel's bound for peers that take nothing is set on every connection."""
    async with serving(stall_seconds=7) as served:
        client = await served.connect()
        await until(lambda: served.server.open == 1)
        (connection,) = served.server.edges()
        assert connection.transport is not None
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000
        client.close()


# --- failing handlers -----------------------------------------------------------------------------


async def returns_nothing(request: EdgeRequest) -> Reply:
    return None  # type: ignore[return-value]


async def returns_a_reply_not_handed_over(request: EdgeRequest) -> Reply:
    return Reply(keep_alive=True)


async def returns_a_broken_response(request: EdgeRequest) -> web.StreamResponse:
    return web.Response(headers={"X": "a\r\nb"})


def raising(exc: BaseException) -> Handler:
    async def handler(request: EdgeRequest) -> Reply:
        raise exc

    return handler


@pytest.mark.parametrize(
    ("handler", "name"),
    [
        (raising(ValueError(TARGET)), "ValueError"),
        (raising(TimeoutError()), "TimeoutError"),
        (raising(ConnectionResetError()), "ConnectionResetError"),
        (raising(errors.INVALID_BODY(TARGET)), "EdgeRefusal"),
        (raising(web.HTTPNotFound(text=TARGET)), "InvariantBroken"),
        (returns_nothing, "InvariantBroken"),
        (returns_a_reply_not_handed_over, "InvariantBroken"),
        (returns_a_broken_response, "ValueError"),
    ],
)
async def test_failing_handler_is_answered_by_a_constant_and_reported(
    handler: Handler, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a handler raises or returns, its client gets our 500 and nothing is logged."""
    caplog.set_level(logging.DEBUG, logger="aiohttp")
    async with serving(handler) as served:
        client = await served.connect()
        await client.send(message())
        answer = await client.answer()
        assert (answer.status, answer.body) == (500, INTERNAL_ERROR)
        assert json.loads(answer.body)["error"]["code"] == "internal_error"
        assert await client.closed()
        client.close()
        assert [type(exc).__name__ for exc in served.seen.crashes] == [name]
        assert not served.seen.faults
    assert not caplog.records


async def test_second_answer_is_a_crash_and_the_first_stays_whole() -> None:
    """A handler that answers twice, or fails after its answer, adds no byte to it."""

    async def handler(request: EdgeRequest) -> Reply | web.StreamResponse:
        reply = answering(request)
        if request.raw_target == "/response":
            return web.Response(text="second")
        if request.raw_target == "/deliver":
            return answering(request)
        if request.raw_target == "/raise":
            raise ValueError
        return reply

    async with serving(handler) as served:
        for target in ("/response", "/deliver", "/raise"):
            client = await served.connect()
            await client.send(message(target=target))
            assert (await client.answer()).body == OK
            assert await client.closed()
            client.close()
        kinds = [type(exc).__name__ for exc in served.seen.crashes]
        assert kinds == ["InvariantBroken", "InvariantBroken", "ValueError"]


# --- streams --------------------------------------------------------------------------------------


async def test_ordinary_responses_and_streams_work_and_carry_the_protections(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A handler may return aiohttp's own responses; none is logged, stored, or names a server."""
    caplog.set_level(logging.DEBUG, logger="aiohttp")

    async def handler(request: EdgeRequest) -> web.StreamResponse:
        if request.raw_target == "/page":
            return web.Response(text="page", headers={"Cache-Control": "max-age=5"})
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        for number in range(3):
            await stream.write(b"data: %d\n\n" % number)
        await stream.write_eof()
        return stream

    async with serving(handler) as served:
        client = await served.connect()
        await client.send(message(b"", method="GET", target="/page"))
        page = await client.answer()
        assert (page.body, page.headers["cache-control"]) == (b"page", "max-age=5")
        await client.send(message(b"", method="GET", target="/events", headers=CLOSE))
        stream = await client.answer()
        for answer in (page, stream):
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "server" not in answer.headers
        assert stream.headers["cache-control"] == "no-store"
        assert b"data: 2\n\n" in await client.rest()
        client.close()
        await served.emptied()
        assert served.seen.silent
    assert not caplog.records


@pytest.mark.parametrize("leave", [RawClient.close, RawClient.reset, RawClient.shut])
async def test_viewer_who_hangs_up_is_no_fault(
    leave: Callable[[RawClient], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A stream whose viewer leaves ends silently: no report, no log."""
    caplog.set_level(logging.DEBUG, logger="aiohttp")
    watching = asyncio.Event()

    async def handler(request: EdgeRequest) -> web.StreamResponse:
        stream = web.StreamResponse()
        await stream.prepare(request)
        while True:
            await stream.write(b"data: tick\n\n")
            watching.set()
            await asyncio.sleep(0.001)

    async with serving(handler) as served:
        client = await served.connect()
        await client.send(message(b"", method="GET", target="/events"))
        await watching.wait()
        leave(client)
        await served.emptied()
        client.close()
        assert served.seen.silent
    assert not caplog.records


async def test_stream_that_fails_while_its_viewer_stays_is_a_crash() -> None:
    """A fault of ours in the middle of a stream is reported; its viewer sees the stream cut."""

    async def handler(request: EdgeRequest) -> web.StreamResponse:
        stream = web.StreamResponse()
        await stream.prepare(request)
        await stream.write(b"data: tick\n\n")
        raise ConnectionRefusedError  # of a dependency, say

    async with serving(handler) as served:
        client = await served.connect()
        await client.send(message(b"", method="GET", target="/events"))
        assert not (await client.rest()).endswith(b"0\r\n\r\n")
        client.close()
        assert [type(exc) for exc in served.seen.crashes] == [ConnectionRefusedError]

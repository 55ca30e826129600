"""The edge and bytes that are no request: answered, attributed, reported once, never shown."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import resource
import select
import socket
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from aiohttp import web

from smartsearch_sidecar import errors
from smartsearch_sidecar.web.edge import connection as edge_connection
from smartsearch_sidecar.web.edge.request import BAD_MESSAGE, EdgeRequest, Reply, response_head
from smartsearch_sidecar.web.edge.server import drain
from tests.fakes.until import until
from tests.web.rawclient import (
    CAPABILITY,
    MARKER,
    PATIENCE,
    TARGET,
    RawClient,
    Served,
    message,
    serving,
)

pytestmark = pytest.mark.both_loops


@pytest.fixture(autouse=True)
def long_half_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-close outlasts any pause of this machine: what is tested is what a stranger hears."""
    monkeypatch.setattr(edge_connection, "HALF_CLOSE_SECONDS", PATIENCE)


OURS = b"POST " + MARKER + b"execute HTTP/1.1\r\n"
STRANGE = CAPABILITY[:-1] + b"X"  # all but the last character is right
AFTER_CLOSE = "bytes after close"  # in a segment of their own they meet a closed connection

# What the parser refuses once it has the whole of it; `OURS` opens each, unless it must not.
MALFORMED: dict[str, bytes] = {
    "length twice": OURS + b"Host: x\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "length differs": OURS + b"Host: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    **{
        f"length {value!r}": OURS + b"Host: x\r\nContent-Length: " + value + b"\r\n\r\n{}"
        for value in (
            *(b"2, 2", b"+2", b"-2", b"0x2", b"2_0", b"", b"two", b"2.0"),
            *(b"\xb2", "\u0662".encode(), b"18446744073709551616", b"9" * 40),
        )
    },
    "coding then length": OURS
    + b"Host: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "length then coding": OURS
    + b"Host: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    **{
        f"coding {value!r}": OURS + b"Host: x\r\nTransfer-Encoding: " + value + b"\r\n\r\n"
        for value in (b"gzip", b"identity", b"xchunked", b"chunked, chunked", b"chunked, gzip")
    },
    "coding twice": OURS
    + b"Host: x\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunk size": OURS + b"Host: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "chunk end": OURS + b"Host: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}xx0\r\n\r\n",
    "host twice": OURS + b"Host: x\r\nHost: x\r\n\r\n",
    "type twice": OURS + b"Host: x\r\nContent-Type: a/b\r\nContent-Type: a/b\r\n\r\n",
    "agent twice": OURS + b"Host: x\r\nUser-Agent: a\r\nUser-Agent: a\r\n\r\n",
    "no host": OURS + b"Content-Length: 0\r\n\r\n",
    "folded": OURS + b"Host: x\r\nX: a\r\n b\r\n\r\n",
    "blank before colon": OURS + b"Host : x\r\n\r\n",
    "no colon": OURS + b"Host: x\r\nnothing\r\n\r\n",
    "no name": OURS + b"Host: x\r\n: y\r\n\r\n",
    "lone CR": OURS + b"Host: x\rX: y\r\n\r\n",
    "lone LF": OURS.replace(b"\r", b"") + b"Host: x\n\n",
    "NUL in a value": OURS + b"Host: x\r\nX: a\0b\r\n\r\n",
    "control in a value": OURS + b"Host: x\r\nX: a\x01b\r\n\r\n",
    "control in a name": OURS + b"Host: x\r\nX\x01Y: a\r\n\r\n",
    "long value": OURS + b"Host: x\r\nX: " + b"y" * 8200 + b"\r\n\r\n",
    "long name": OURS + b"Host: x\r\n" + b"y" * 8200 + b": x\r\n\r\n",
    "many headers": OURS + b"Host: x\r\n" + b"X: y\r\n" * 128 + b"\r\n",
    "two megabytes": OURS + b"Host: x\r\nX: " + b"y" * 2_000_000 + b"\r\n\r\n",
    "long target": b"POST " + MARKER + b"y" * 8200 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    **{
        f"target {value!r}": b"POST " + MARKER + value + b" HTTP/1.1\r\nHost: x\r\n\r\n"
        for value in (b"a b", b"a\0b", b"a\tb", b"a\xffb", "ä".encode(), b"a\x7f")
    },
    "method in lower case": b"post" + OURS[4:] + b"Host: x\r\n\r\n",
    "unknown method": b"FROB" + OURS[4:] + b"Host: x\r\n\r\n",
    "no method": OURS[4:] + b"Host: x\r\n\r\n",
    "HTTP/1.2": OURS.replace(b"1.1", b"1.2") + b"Host: x\r\n\r\n",
    "HTTP/1.10": OURS.replace(b"1.1", b"1.10") + b"Host: x\r\n\r\n",
    "no digit in the version": OURS.replace(b"1.1", b"1.") + b"Host: x\r\n\r\n",
    "another protocol": OURS.replace(b"HTTP", b"ICE") + b"Host: x\r\n\r\n",
    # yarl raises IndexError through the parser here: aiohttp closes without an answer.
    "broken authority": b"POST http://[::1]@" + OURS[5:] + b"Host: x\r\n\r\n",
    "no authority": b"POST http://" + OURS[5:] + b"Host: x\r\n\r\n",
    # Valid beginnings: alone, or in a segment of their own, they reach a handler.
    "body too long": message(b"{}{}{}{}{}").replace(b"Content-Length: 10", b"Content-Length: 2"),
    "second request bad": message() + b"nonsense\r\n\r\n",
    AFTER_CLOSE: message(headers=("Connection: close",)) + b"GET / HTTP/1.1\r\n\r\n",
}
# The capability proves whose bytes these are wherever it stands, once it is whole.
AS_A_WORD = re.compile(rb"(?<![\w-])" + CAPABILITY + rb"(?=[^\w-])")
TLS_HELLO = bytes.fromhex("16030100c8010000c403037d0a") + bytes(200)


async def answering(request: EdgeRequest) -> Reply:
    """As the real handlers: a coded body is refused unread, a plain one is taken whole."""
    length = request.headers.get("Content-Length", "0")
    if "Transfer-Encoding" in request.headers or not length.strip().isdigit():
        return request.refuse(400, b'{"error":{"code":"invalid_body"}}')
    if int(length) > 1_000_000:
        return request.refuse(413, b'{"error":{"code":"body_size"}}')
    await request.body(int(length), PATIENCE)
    return request.deliver(response_head(200, 2, close=not request.keep_alive), b"ok")


async def refused(served: Served, data: bytes, drip: int = 0) -> bytes:
    """Send it, whole or in pieces, and return all that came back until the server closed."""
    client = await served.connect()
    await (client.drip(data, drip) if drip else client.send(data))
    rest = await client.rest()
    client.close()
    await served.emptied()
    return rest


# --- malformed bytes ------------------------------------------------------------------------------


async def test_malformed_request_gets_the_constant_and_is_attributed(
    caplog: pytest.LogCaptureFixture, subtests: pytest.Subtests
) -> None:
    """Whole or in pieces, ours or a stranger's: one answer, one report, the right owner."""
    caplog.set_level(logging.DEBUG, logger="aiohttp")
    async with serving(answering) as served:
        for form in MALFORMED:
            with subtests.test(form):
                served.seen.faults.clear()  # of a form before it that has failed
                await attributed(served, form)
                assert served.seen.silent
                assert not caplog.records


async def attributed(served: Served, form: str) -> None:
    """One malformed request, from each owner, whole and in pieces; ours comes byte by byte."""
    data = MALFORMED[form]
    for owner, least in ((CAPABILITY, 1), (STRANGE, 5)):
        sent = data.replace(CAPABILITY, owner)
        pieces = () if form == AFTER_CLOSE else (least if len(data) < 1000 else len(data) // 40,)
        for drip in (0, *pieces):
            answer = await refused(served, sent, drip)
            assert CAPABILITY not in answer
            if not drip:
                assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
                assert b"\r\nConnection: close\r\n\r\n" in answer
                assert answer.endswith(BAD_MESSAGE)
                assert answer.count(b"HTTP/1.1 4") == 1
            [(reason, authenticated)] = served.seen.faults
            assert reason.isidentifier()
            assert authenticated is (owner == CAPABILITY)
            served.seen.faults.clear()


async def test_constant_is_an_error_of_ours() -> None:
    """The answer to malformed bytes reads like every other error."""
    async with serving(answering) as served:
        answer = await refused(served, MALFORMED["HTTP/1.2"])
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"] == {
        "code": "bad_message",
        "message": "The bytes received are not an HTTP/1.1 request that this server takes.",
        "retryable": False,
    }
    assert b"Server:" not in answer
    assert b"\r\nCache-Control: no-store\r\n" in answer


@pytest.mark.parametrize("data", [TLS_HELLO, b"\0" * 100, b"\xff" * 100, b"hello\r\n\r\n"])
async def test_bytes_of_another_protocol_are_a_strangers(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A TLS hello or noise is answered, reported as a stranger's fault, and not logged."""
    async with serving(answering) as served:
        assert (await refused(served, data)).endswith(BAD_MESSAGE)
        assert [owner for _, owner in served.seen.faults] == [False]
    assert not caplog.records


@pytest.mark.parametrize("leave", [RawClient.close, RawClient.reset])
async def test_malformed_request_of_a_client_that_left_is_still_reported(
    leave: Callable[[RawClient], None],
) -> None:
    """The report does not need the client to stay for its answer."""
    gate = asyncio.Event()

    async def handler(request: EdgeRequest) -> Reply:
        await gate.wait()
        return await answering(request)

    async with serving(handler) as served:
        client = await served.connect()
        await client.send(message())
        await until(lambda: served.server.requests_count == 1)
        await client.send(MALFORMED["HTTP/1.2"])
        await until(lambda: bool(served.seen.faults))
        leave(client)
        gate.set()
        await served.emptied()
        assert served.seen.faults == [("BadStatusLine", True)]


async def test_request_before_malformed_bytes_keeps_its_answer() -> None:
    """In segments of their own, the good request is answered and only then the bad one refused."""
    async with serving(answering) as served:
        client = await served.connect()
        await client.send(message())
        assert (await client.answer()).status == 200
        await client.send(MALFORMED["unknown method"])
        assert (await client.answer()).body == BAD_MESSAGE
        assert await client.closed()
        client.close()
        await served.emptied()
        assert len(served.seen.faults) == 1
        assert served.server.requests_count == 2


async def test_flood_behind_malformed_bytes_is_not_parsed() -> None:
    """What follows the first error on a connection is dropped: one report, bounded memory."""
    async with serving(answering) as served:
        client = await served.connect()
        await client.drip(b"FROB / HTTP/1.1\r\n\r\n" * 500, 190)
        answer = await client.rest()
        assert answer.count(b"HTTP/1.1 4") == 1
        client.close()
        await served.emptied()
        assert served.seen.faults == [("BadHttpMethod", False)]


async def test_bad_chunk_ends_the_body_for_its_reader() -> None:
    """A reader of a coded body is told of its error at once, not by its own deadline."""
    raised: list[errors.SidecarError] = []
    reading = asyncio.Event()

    async def handler(request: EdgeRequest) -> Reply:
        asyncio.get_running_loop().call_soon(reading.set)
        try:
            await request.body(4, 10 * PATIENCE)
        except errors.EdgeRefusal as exc:
            raised.append(exc)
        return request.refuse(400, b"{}")

    async with serving(handler) as served:
        client = await served.connect()
        await client.send(OURS + b"Host: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n")
        await reading.wait()
        await client.send(b"zz\r\n")
        await until(lambda: bool(raised))
        assert (await client.answer()).status == 400
        client.close()
        await served.emptied()
        assert [owner for _, owner in served.seen.faults] == [True]
        assert not served.seen.crashes


# --- every byte -----------------------------------------------------------------------------------


async def test_request_split_at_every_byte_is_one_request() -> None:
    """Wherever the segments end, the request is answered once and nothing is reported."""
    whole = message(b'{"env":"e"}', headers=("Content-Type: application/json",))
    async with serving(answering) as served:
        client = await served.connect()
        for cut in range(1, len(whole)):
            await client.drip(whole, cut)
            assert (await client.answer()).status == 200
        await client.drip(whole)
        assert (await client.answer()).status == 200
        client.close()
        await served.emptied()
        assert served.seen.silent
        assert served.server.requests_count == len(whole)


HEAD = message(b"")
PROVEN = HEAD.index(MARKER) + len(MARKER)
# Where something ends: a line, the proof whose call it is, the last byte but one.
ENDS = {PROVEN, len(HEAD) - 2, *(at + 1 for at, byte in enumerate(HEAD[:-3]) if byte == 10)}
NEAR_ENDS = sorted({1} | {end + off for end in ENDS for off in (-2, -1, 0, 1)})


@pytest.mark.parametrize("leave", [RawClient.close, RawClient.reset])
@pytest.mark.parametrize(
    "cuts",
    [NEAR_ENDS, pytest.param(range(1, len(HEAD)), marks=pytest.mark.soak)],
    ids=["near ends", "every byte"],
)
async def test_client_that_leaves_within_its_headers_is_seen(
    leave: Callable[[RawClient], None], cuts: Sequence[int]
) -> None:
    """A call cut within its headers is reported, as ours from the byte that proves it."""
    async with serving(answering) as served:
        for cut in cuts:
            client = await served.connect()
            await client.send(HEAD[:cut])
            await until(lambda: any(c._first is not None for c in served.server.edges()))
            leave(client)
            await served.emptied()
            assert served.seen.faults == [("cut_off", cut >= PROVEN)]
            served.seen.faults.clear()
        silent = await served.connect()
        await until(lambda: served.server.open == 1)
        leave(silent)
        await served.emptied()
        assert served.seen.silent


async def test_line_ends_between_requests_are_no_request() -> None:
    """Old clients end a body with a line end of its own; leaving after it cuts nothing off."""
    async with serving(answering) as served:
        for headers in ((), ("Connection: close",)):
            for ending in (b"\r\n", b"\n", b"\r\n\r\n"):
                for alone in (True, False):
                    client = await served.connect()
                    await client.send(message(headers=headers) + (b"" if alone else ending))
                    assert (await client.answer()).status == 200
                    if alone:
                        await client.send(ending)
                    client.close()
        await served.emptied()
        assert served.seen.silent


# --- attribution ----------------------------------------------------------------------------------


async def test_capability_counts_wherever_the_segments_end() -> None:
    """The capability is found across segments, and a near miss in many of them is not."""
    bad = b"GET / HTTP/1.1\r\nHost: x\r\nX: " + MARKER + b"\r\nBad Header: x\r\n\r\n"
    near = bad.replace(MARKER, b"/" + CAPABILITY[:-1] + b"/" + CAPABILITY[-1:] + b"/")
    async with serving(answering) as served:
        for data, owner in ((bad, True), (near, False)):
            for drip in range(1, len(MARKER) + 2):
                await refused(served, data, drip)
                assert [mine for _, mine in served.seen.faults] == [owner]
                served.seen.faults.clear()


async def test_capability_of_an_earlier_request_marks_the_connection() -> None:
    """A connection that was ours stays ours: its later malformed bytes are not a stranger's."""
    async with serving(answering) as served:
        client = await served.connect()
        await client.send(message())
        await client.answer()
        await client.send(TLS_HELLO)
        assert (await client.answer()).status == 400
        client.close()
        await served.emptied()
        assert [owner for _, owner in served.seen.faults] == [True]


async def test_capability_that_comes_after_the_error_still_counts() -> None:
    """A wrong method is refused at its first byte; the capability behind it is waited for."""
    async with serving(answering) as served:
        client = await served.connect()
        await client.send(b"p")
        assert (await client.answer()).status == 400
        assert not served.seen.faults
        assert await client.send(MALFORMED["method in lower case"][1:])
        await until(lambda: bool(served.seen.faults))
        assert served.server.open == 1
        client.close()
        await served.emptied()
        assert served.seen.faults == [("BadHttpMethod", True)]


# --- other protocols ------------------------------------------------------------------------------


@pytest.mark.parametrize("response", [True, False])
@pytest.mark.parametrize("later", [True, False])
@pytest.mark.parametrize("method", ["POST", "CONNECT"])
async def test_bytes_behind_an_upgrade_are_reported_and_never_served(
    method: str, later: bool, response: bool
) -> None:
    """A request for another protocol is answered as it stands; what is tunnelled is refused."""
    gate = asyncio.Event()

    async def handler(request: EdgeRequest) -> Reply | web.StreamResponse:
        await gate.wait()
        return web.Response(text="as it stands") if response else await answering(request)

    target = "h:1" if method == "CONNECT" else TARGET
    upgrade = ("Connection: Upgrade", "Upgrade: websocket")
    async with serving(handler) as served:
        client = await served.connect()
        first = message(b"", method=method, target=target, headers=upgrade)
        await client.send(first + (b"" if later else MALFORMED["broken authority"]))
        await until(lambda: served.server.requests_count == 1)
        if later:
            await client.send(MALFORMED["broken authority"])
        await until(lambda: bool(served.seen.faults))
        gate.set()
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await client.closed()
        client.close()
        await served.emptied()
        assert served.seen.faults == [("behind_upgrade", True)]
        assert not served.seen.crashes
        assert served.server.requests_count == 1


# --- many and random ------------------------------------------------------------------------------


def calling(address: tuple[str, int]) -> socket.socket:
    """A connection that is asked for: no turn of the loop goes by, so nothing is accepted yet."""
    caller = socket.socket()
    caller.setblocking(False)
    caller.connect_ex(address)
    return caller


async def test_two_thousand_idle_connections_disturb_no_request() -> None:
    """A rollout is answered beside 2,000 silent connections, and all end with the server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4500:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    try:
        async with serving(answering, connections_max=1901, strangers_max=100) as served:
            idle: list[RawClient] = []
            for come in range(500, 2001, 500):  # as many as the backlog takes in one turn
                idle += [RawClient(calling(served.address)) for _ in range(500)]
                await until(partial(lambda so_far: served.server.open == so_far, come))
            client = await served.connect()
            for _ in range(20):
                await client.send(message())
                assert (await client.answer()).status == 200
            newcomer = await served.connect()
            assert await idle[0].closed()
            assert served.seen.overflows == 0
            assert await drain(served.server, PATIENCE) == 0
            for one in (*idle, client, newcomer):
                one.close()
            assert not served.seen.faults
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_callers_that_come_while_the_loop_is_busy_are_let_in_at_once() -> None:
    """Eight ranks starting together meet no full backlog, which would cost them a second each."""
    async with serving(answering) as served:
        callers = [calling(served.address) for _ in range(600)]
        pending = select.poll()
        for caller in callers:
            pending.register(caller, select.POLLOUT)
        connected = {fd for fd, events in pending.poll(0) if events == select.POLLOUT}
        assert len(connected) == len(callers)
        for caller in callers:
            caller.close()
        await until(lambda: not served.server.open)


def mutated(rng: random.Random) -> bytes:
    """A request with a few bytes flipped, dropped, doubled, inserted, or pieces exchanged."""
    data = bytearray(
        message(b'{"env":"e","call":"c"}', headers=("Content-Type: application/json",))
    )
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        match rng.randrange(6):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                del data[at : at + rng.randint(1, 8)]
            case 2:
                data[at:at] = data[at : at + rng.randint(1, 40)]
            case 3:
                data[at:at] = rng.choice(
                    (b"\r\n", b"\n", b"\r", b" ", b"\t", b"\0", b"http://[::1]@", b"http://xn--a")
                )
            case 4:
                data[at:at] = rng.choice(tuple(MALFORMED.values()))[:300]
            case _:
                data = data[at:] + data[:at]
        data = data or bytearray(b"x")
    return bytes(data)


# 120 meet each of the six kinds of change dozens of times.
@pytest.mark.parametrize(
    ("seed", "count"), [(11, 120), pytest.param(12, 20_000, marks=pytest.mark.soak)]
)
async def test_no_bytes_pass_unseen(
    seed: int, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Any bytes reach a handler or a report; no failure, no log, no echo, no silent connection."""
    caplog.set_level(logging.DEBUG, logger="aiohttp")
    rng = random.Random(seed)
    handled = 0

    async def handler(request: EdgeRequest) -> Reply:
        nonlocal handled
        handled += 1
        try:
            return await answering(request)
        except errors.EdgeRefusal:
            return request.refuse(400, b'{"error":{"code":"invalid_body"}}')

    async with serving(handler) as served:

        def met(before: int) -> bool:
            return handled > before or bool(served.seen.faults)

        for _ in range(count):
            data, before = mutated(rng), handled
            client = await served.connect()
            await client.send(data)
            client.shut()
            answer = await client.rest()
            client.close()
            # A connection the server has not met yet is not one it has finished with.
            await until(partial(met, before))
            await served.emptied()
            assert CAPABILITY not in answer, data
            assert len(served.seen.faults) <= 1, data
            if BAD_MESSAGE in answer:
                assert served.seen.faults, data
            for _, authenticated in served.seen.faults:
                assert authenticated is bool(AS_A_WORD.search(data)), data
            served.seen.faults.clear()
        assert served.seen.silent
        # Both kinds are met: what a handler gets, and what is reported.
        assert 0 < handled < count
    assert not caplog.records

"""The edge and its connections: clients that leave, connections at the bound, and the end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest
from aiohttp import web

from smartsearch_sidecar import errors
from smartsearch_sidecar.web.edge import connection as edge_connection
from smartsearch_sidecar.web.edge.connection import EdgeServer
from smartsearch_sidecar.web.edge.request import (
    AFTER_WRITE,
    AT_WRITE,
    BEFORE_WRITE,
    EdgeRequest,
    Reply,
    response_head,
)
from smartsearch_sidecar.web.edge.server import drain
from tests.fakes.until import until
from tests.web.rawclient import (
    CAPABILITY,
    PATIENCE,
    TARGET,
    RawClient,
    Recorder,
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


# --- lost clients ---------------------------------------------------------------------------------


class Trapdoor(bytes):
    """A payload that springs when its length is asked, between the look and the write."""

    spring: Callable[[], None]

    def __len__(self) -> int:
        self.spring()
        return super().__len__()


@pytest.mark.parametrize("leave", [RawClient.close, RawClient.reset, RawClient.shut])
@pytest.mark.parametrize("noticed", [True, False])
async def test_client_gone_before_the_answer_is_told_exactly_once(
    leave: Callable[[RawClient], None], noticed: bool
) -> None:
    """FIN and reset count as gone, whether or not the loop has heard of them."""
    lost: list[str] = []
    gone: list[bool] = []

    async def handler(request: EdgeRequest) -> Reply:
        gone.append(request.gone())
        leave(client)
        if noticed:
            await until(lambda: not served.server.open)
        gone.append(request.gone())
        return answering(request, on_lost=lost.append)

    async with serving(handler) as served:
        client = await served.connect()
        await client.send(message())
        await until(lambda: bool(lost))
        await served.emptied()
        client.close()
        assert served.seen.silent
    assert gone == [False, True]
    assert lost == [BEFORE_WRITE]


async def test_client_whose_next_bytes_wait_in_the_kernel_is_not_gone() -> None:
    """Pipelined bytes are no sign of leaving."""
    gone: list[bool] = []

    async def handler(request: EdgeRequest) -> Reply:
        if not gone:
            client.sock.send(message())
        gone.append(request.gone())
        return answering(request)

    async with serving(handler) as served:
        client = await served.connect()
        await client.send(message())
        for _ in range(2):
            assert (await client.answer()).status == 200
        client.close()
    assert gone == [False, False]


async def test_client_gone_between_the_look_and_the_write_is_told_exactly_once() -> None:
    """A reset that arrives while the answer is being written is not missed."""
    lost: list[str] = []

    async def handler(request: EdgeRequest) -> Reply:
        payload = Trapdoor(OK)
        payload.spring = client.reset
        return request.deliver(response_head(200, 11, close=False), payload, lost.append)

    async with serving(handler) as served:
        client = await served.connect()
        await client.send(message())
        await until(lambda: bool(lost))
        await served.emptied()
        assert served.seen.silent
    assert lost == [AT_WRITE]


def half_close_then_reset(client: RawClient) -> None:
    client.shut()
    client.close()


@pytest.mark.parametrize(
    ("leave", "headers"),
    [
        *((RawClient.close, headers) for headers in ((), CLOSE)),
        *((RawClient.reset, headers) for headers in ((), CLOSE)),
        (half_close_then_reset, ()),  # after both sides' FIN the kernel keeps no error to show
    ],
)
async def test_answer_left_unread_is_told_exactly_once(
    leave: Callable[[RawClient], None], headers: tuple[str, ...]
) -> None:
    """A client that closes on the bytes of its answer never took it."""
    async with serving() as served:
        client = await served.connect()
        await client.send(message(headers=headers))
        await until(lambda: any(c.unread for c in served.server.edges()))
        leave(client)
        await served.emptied()
        assert served.lost == [AFTER_WRITE]
        assert served.seen.silent


@pytest.mark.parametrize("headers", [(), CLOSE])
async def test_client_that_resets_right_behind_the_write_is_told_exactly_once(
    headers: tuple[str, ...],
) -> None:
    """The loop may wait for the client's close when the client is already gone."""
    lost: list[str] = []

    async def handler(request: EdgeRequest) -> Reply:
        reply = answering(request, on_lost=lost.append)
        client.reset()
        return reply

    async with serving(handler) as served:
        client = await served.connect()
        await client.send(message(headers=headers))
        await until(lambda: bool(lost))
        await served.emptied()
        assert served.seen.silent
    assert lost == [AFTER_WRITE]


@pytest.mark.parametrize("headers", [(), CLOSE])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_answer_that_was_read_is_never_told_as_lost(
    headers: tuple[str, ...], version: str
) -> None:
    """Reading everything and closing, at once or later, is no loss."""
    async with serving() as served:
        for _ in range(20):
            client = await served.connect()
            await client.send(message(headers=headers, version=version))
            await client.answer()
            client.close()
        await served.emptied()
        assert not served.lost
        assert served.seen.silent


async def test_client_that_closes_the_moment_it_has_read_is_no_loss() -> None:
    """A client so quick that it has closed before the server looks again did take its answer."""

    def call(address: tuple[str, int]) -> bytes:
        with socket.create_connection(address, timeout=PATIENCE) as sock:
            sock.sendall(message())
            return sock.recv(65536)

    async with serving() as served:
        for _ in range(30):
            calls = [asyncio.to_thread(call, served.address) for _ in range(8)]
            assert all(answer.endswith(b"{}") for answer in await asyncio.gather(*calls))
        await served.emptied()
        assert not served.lost
        assert served.seen.silent


async def test_next_request_proves_the_last_answer_taken() -> None:
    """Of two answers only the second is lost by a reset after the second request."""
    async with serving() as served:
        client = await served.connect()
        await client.send(message(b"first"))
        await client.answer()
        await client.send(message(b"second"))
        await until(lambda: served.server.requests_count == 2)
        await until(lambda: any(c.unread for c in served.server.edges()))
        client.reset()
        await served.emptied()
        assert served.lost == [AFTER_WRITE]


async def test_answer_without_on_lost_is_written_and_forgotten() -> None:
    """Without `on_lost` a client that leaves changes nothing and is not looked at."""

    answered: list[Reply] = []

    async def handler(request: EdgeRequest) -> Reply:
        client.close()
        answered.append(answering(request))
        return answered[0]

    async with serving(handler) as served:
        client = await served.connect()
        await client.send(message())
        await until(lambda: bool(answered))
        await served.emptied()
        assert answered[0].keep_alive
        assert served.seen.silent


async def test_callback_that_raises_is_a_crash_and_the_connection_still_ends() -> None:
    """A failing `on_lost` is reported and tears nothing."""

    def on_lost(stage: str) -> None:
        raise ValueError(stage)

    async def handler(request: EdgeRequest) -> Reply:
        return answering(request, on_lost=on_lost)

    async with serving(handler) as served:
        client = await served.connect()
        await client.send(message())
        await until(lambda: any(c.unread for c in served.server.edges()))
        client.reset()
        await served.emptied()
        assert [str(exc) for exc in served.seen.crashes] == [AFTER_WRITE]


# --- connections ----------------------------------------------------------------------------------


async def test_connection_over_the_bound_is_closed_unread_and_reported() -> None:
    """The bound holds, a refused connection is visible, and a place that becomes free is used. It
    is refused once it has shown a capability: until then it may be a stranger's.
    """
    async with serving(connections_max=2) as served:
        first, second = await served.connect(), await served.connect()
        for client in (first, second):
            await client.send(message())
            assert (await client.answer()).status == 200
        third = await served.connect()
        await until(lambda: served.server.open == 3)
        assert served.seen.silent
        await third.send(message())
        assert await third.closed()
        third.close()
        await until(lambda: served.server.open == 2)
        assert served.seen == Recorder(overflows=1)
        second.close()
        await until(lambda: served.server.open == 1)
        fourth = await served.connect()
        for client in (first, fourth):
            await client.send(message())
            assert (await client.answer()).status == 200
            client.close()
        await served.emptied()
        assert served.seen == Recorder(overflows=1)


async def test_strangers_never_cost_a_rollout_its_connection() -> None:
    """A connection that has shown no capability makes room, the oldest first; ours never do."""
    async with serving(connections_max=3, strangers_max=1) as served:
        silent, dripping, other, ours = [await served.connect() for _ in range(4)]
        await until(lambda: served.server.open == 4)
        await dripping.send(b"POST /some")
        await ours.send(message())
        assert (await ours.answer()).status == 200
        kept = [ours]
        for gone in (silent, dripping):
            kept.append(await served.connect())
            assert await gone.closed()
            gone.close()
            await kept[-1].send(message())
            assert (await kept[-1].answer()).status == 200
        assert served.seen.overflows == 0
        newcomer = await served.connect()
        assert await other.closed()
        assert served.seen.overflows == 0
        await newcomer.send(message())
        assert await newcomer.closed()
        assert served.seen.overflows == 1
        await ours.send(message())
        assert (await ours.answer()).status == 200
        for client in (*kept, other, newcomer):
            client.close()


async def test_idle_and_silent_connections_are_closed() -> None:
    """No connection stays that sends nothing, whether or not it was served before."""
    async with serving(keepalive_seconds=0.1) as served:
        silent, served_once = await served.connect(), await served.connect()
        await served_once.send(message())
        await served_once.answer()
        assert await silent.closed()
        assert await served_once.closed()
        silent.close()
        served_once.close()
        await served.emptied()
        assert served.seen.silent
        assert not served.lost


async def test_dripped_headers_meet_the_deadline_and_are_reported() -> None:
    """Bytes do not prolong the header deadline; the call behind them did fail, so it shows."""
    async with serving(keepalive_seconds=0.2) as served:
        for prefix, authenticated in (
            (message()[:80], True),
            (b"GET /livez HTTP/1.1\r\nX: ", False),
        ):
            client = await served.connect()
            await client.send(prefix)
            await until(lambda: served.server.open == 1)
            while await client.send(b"x"):
                await asyncio.sleep(0.01)
                if not served.server.open:
                    break
            client.close()
            await served.emptied()
            assert served.seen.faults.pop() == ("cut_off", authenticated)


# --- the end --------------------------------------------------------------------------------------


async def test_drain_closes_idle_connections_and_lets_work_finish() -> None:
    """Idle connections end at once, a request at work gets its answer, with `Connection: close`."""
    gate = asyncio.Event()

    async def handler(request: EdgeRequest) -> Reply:
        await gate.wait()
        return answering(request)

    async with serving(handler) as served:
        idle, busy, half = [await served.connect() for _ in range(3)]
        await busy.send(message())
        await half.send(message()[:20])
        await until(lambda: served.server.requests_count == 1)
        draining = asyncio.create_task(drain(served.server, PATIENCE))
        assert await idle.closed()
        assert not draining.done()
        gate.set()
        await half.send(message()[20:])
        for client in (busy, half):
            assert (await client.answer()).headers["connection"] == "close"
            assert await client.closed()
            client.close()
        idle.close()
        assert await draining == 0
        assert served.seen.silent


async def test_drain_serves_what_has_arrived_but_was_not_read_yet() -> None:
    """A request in the kernel when the drain begins is a request, not an idle connection."""
    async with serving() as served:
        clients = [await served.connect() for _ in range(4)]
        await until(lambda: served.server.open == 4)
        await until(lambda: all(c.idle() for c in served.server.edges()))
        for client in clients:
            client.sock.send(message())
        draining = asyncio.create_task(drain(served.server, PATIENCE))
        for client in clients:
            assert (await client.answer()).headers["connection"] == "close"
            client.close()
        assert await draining == 0
        assert served.seen.silent
        assert not served.lost


async def test_drain_does_not_take_a_page_that_was_sent_for_one_under_way() -> None:
    """A connection that has shown a page still gets the answer to what it asks next."""
    gate = asyncio.Event()

    async def handler(request: EdgeRequest) -> Reply | web.StreamResponse:
        if request.raw_target == "/page":
            return web.Response(text="page")
        await gate.wait()
        return answering(request)

    async with serving(handler) as served:
        client = await served.connect()
        await client.send(message(b"", method="GET", target="/page"))
        await client.answer()
        await client.send(message())
        await until(lambda: served.server.requests_count == 2)
        draining = asyncio.create_task(drain(served.server, PATIENCE))
        await until(lambda: served.server.draining)
        gate.set()
        assert (await client.answer()).body == OK
        client.close()
        assert await draining == 0


async def test_request_that_meets_the_farewell_of_a_drain_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call that crosses our goodbye gets no answer, so it must not pass unseen."""
    monkeypatch.setattr(edge_connection, "HALF_CLOSE_SECONDS", PATIENCE)
    async with serving() as served:
        client = await served.connect()
        await client.send(message())
        await until(lambda: any(c.unread for c in served.server.edges()))
        draining = asyncio.create_task(drain(served.server, PATIENCE))
        await client.answer()
        assert await client.closed()
        assert await client.send(message())
        await until(lambda: any(c._first is not None for c in served.server.edges()))
        client.close()
        assert await draining == 0
        assert served.seen == Recorder(faults=[("cut_off", True)])


async def test_drain_cuts_what_does_not_end_and_counts_it() -> None:
    """Work that outlives the drain is cancelled, with or without a client, and counted."""
    cancelled: list[str] = []

    async def handler(request: EdgeRequest) -> Reply:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(request.raw_target)
            raise
        raise errors.INTERNAL_ERROR("an event that no code sets was set")

    async with serving(handler) as served:
        stays, leaves = await served.connect(), await served.connect()
        await stays.send(message(target="/stays"))
        await leaves.send(message(target="/leaves"))
        await until(lambda: served.server.requests_count == 2)
        leaves.close()
        await until(lambda: served.server.open == 1)
        assert await drain(served.server, 0.1) == 2
        assert await stays.closed()
        stays.close()
    assert sorted(cancelled) == ["/leaves", "/stays"]


async def test_drain_ends_streams_and_tells_unsent_answers_as_lost() -> None:
    """A page that is watched does not delay the end; bytes that were never sent are a loss."""
    lost: list[str] = []
    watching = asyncio.Event()

    async def handler(request: EdgeRequest) -> Reply | web.StreamResponse:
        if request.raw_target == "/big":
            return answering(request, b"x" * 8_000_000, lost.append)
        stream = web.StreamResponse()
        await stream.prepare(request)
        while True:
            await stream.write(b"data: tick\n\n")
            watching.set()
            await asyncio.sleep(0.001)

    async with serving(handler) as served:
        viewer = await served.connect()
        await viewer.send(message(b"", method="GET", target="/events"))
        await watching.wait()
        cut, _ = await asyncio.gather(drain(served.server, PATIENCE), viewer.rest())
        assert cut == 0
        viewer.close()
        assert served.seen.silent

    async with serving(handler) as served:
        reader = await served.connect(4096)
        await reader.send(message(target="/big"))
        await until(lambda: any(c.unread for c in served.server.edges()))
        assert await drain(served.server, 0.1) == 1
        reader.close()
        assert served.seen.silent
    assert lost == [AFTER_WRITE]


async def test_drain_waits_to_see_whether_the_last_answers_were_read() -> None:
    """An answer left unread when the server ends is told as lost, a read one is not."""
    async with serving() as served:
        reads, leaves = await served.connect(), await served.connect()
        for client in (reads, leaves):
            await client.send(message())
        await reads.answer()
        await until(lambda: sum(len(c.unread) for c in served.server.edges()) == 2)
        draining = asyncio.create_task(drain(served.server, PATIENCE))
        assert await reads.closed()
        reads.close()
        leaves.close()
        assert await draining == 0
        assert served.lost == [AFTER_WRITE]
        assert served.seen.silent


# --- what this file leans on ----------------------------------------------------------------------


async def test_edge_without_bounds_is_refused() -> None:
    """A bound of zero is a mistake of ours."""

    async def handler(request: EdgeRequest) -> Reply:
        return answering(request)

    for seconds, most, strangers in ((0.0, 1, 1), (75.0, 0, 1), (75.0, 1, 0)):
        with pytest.raises(errors.InvariantBroken):
            EdgeServer(
                handler,
                observer=Recorder(),
                capabilities=None,
                keepalive_seconds=seconds,
                connections_max=most,
                strangers_max=strangers,
            )


async def test_option_aiohttp_does_not_know_is_an_error() -> None:
    """aiohttp would drop every bound at an unknown option, with a warning; here it raises."""
    async with serving() as served:
        served.server._kwargs["typo"] = 1
        with pytest.raises(TypeError):
            served.server()
        del served.server._kwargs["typo"]


async def test_what_aiohttp_would_log_goes_to_the_observer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """aiohttp's last resort is a traceback in a log; ours is the observer."""
    async with serving() as served:
        connection = served.server()
        connection.log_exception("Unhandled exception", exc_info=ValueError(TARGET))
        connection.log_exception("Unhandled exception")
        kinds = [type(exc).__name__ for exc in served.seen.crashes]
        assert kinds == ["ValueError", "InvariantBroken"]
    assert not caplog.records


async def test_connection_lost_before_its_first_step_is_no_fault() -> None:
    """A connection may be over before its task has run at all."""
    async with serving() as served:
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
        connection = served.server()
        connection.connection_made(transport)
        connection.connection_lost(None)
        for _ in range(3):
            await asyncio.sleep(0)
        assert served.seen.silent
        transport.close()
        theirs.close()


async def test_client_lost_before_the_handlers_first_step_has_sent_a_short_body() -> None:
    """Between a request and its handler lies a turn of the loop; a client may leave in it."""
    raised: list[errors.SidecarError] = []

    async def handler(request: EdgeRequest) -> Reply:
        try:
            await request.body(2, PATIENCE)
        except errors.EdgeRefusal as exc:
            raised.append(exc)
            return request.refuse(400, b"{}")
        return answering(request)

    async with serving(handler) as served:
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
        connection = served.server()
        connection.connection_made(transport)
        connection.data_received(message()[:-1])
        loop.call_soon(connection.connection_lost, None)
        await until(lambda: bool(raised))
        await served.emptied()
        assert served.seen.silent
        transport.close()
        theirs.close()


async def test_capability_is_in_no_answer_but_the_handlers_own() -> None:
    """What a handler echoes is its own affair; head and constants never hold the capability."""
    async with serving() as served:
        client = await served.connect()
        await client.send(message())
        answer = await client.answer()
        assert CAPABILITY not in answer.raw[: -len(answer.body)]
        client.close()

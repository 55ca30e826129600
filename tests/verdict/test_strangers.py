"""Strangers, who hold no capability, and the descriptors of a process: neither may bend a verdict.

A stranger closes no latch and takes no rollout's place, in whatever state its connections are. A
connection that could not be accepted is a rollout without an answer, so it does close the latch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.process.daemon import Daemon
from smartsearch_sidecar.process.sockets import OTHER_DESCRIPTORS, take_descriptors
from smartsearch_sidecar.web.edge import connection as edge_connection
from smartsearch_sidecar.web.edge import server as edge_server
from smartsearch_sidecar.web.edge.request import EdgeRequest, Reply, response_head
from tests.fakes.process import DaemonProcess, running, start, wait_ready
from tests.fakes.provider import FakeProvider
from tests.fakes.raised import raises
from tests.fakes.served import configured, native_body, served
from tests.fakes.until import until, wait_until
from tests.web.rawclient import CAPABILITY, INTERNAL, PATIENCE, message, serving

STRANGER = "/" + "x" * 43 + "/execute"
HALF_A_BODY = message(b"x" * 100, target=STRANGER)[:-50]
PROBES = message(b"", method="GET", target="/livez") * 40
BIG = "/big"  # an answer that no socket takes whole

# What a stranger sends, and what its connection is then in the middle of.
STATES: dict[str, bytes] = {
    "new": b"",
    "half a head": message(target=STRANGER)[:40],
    "half a body": HALF_A_BODY,
    "half a body, answered": HALF_A_BODY[:-40],
    "answered, unread": message(b"", method="GET", target="/livez"),
    "pipelined, unread": PROBES,
    "stalled": message(b"", method="GET", target=BIG),
    "malformed, answered": b"nonsense\r\n\r\n",
    "between two requests": message(b"", target="/livez"),
}


async def answering(request: EdgeRequest) -> Reply:
    """A rollout is answered, a stranger refused with its body unread."""
    if request.raw_target == BIG:
        head = response_head(200, 8_000_000, close=False)
        return request.deliver(head, b"x" * 8_000_000)
    if "xxx" in request.raw_target:
        return request.refuse(401, b"{}")
    await request.body(int(request.headers.get("Content-Length", "0")), PATIENCE)
    return request.deliver(response_head(200, 2, close=not request.keep_alive), b"{}")


@pytest.mark.both_loops
@pytest.mark.parametrize("state", STATES)
async def test_strangers_make_room_in_every_state(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where strangers hold every place, rollouts that come get one each and are answered."""
    monkeypatch.setattr(edge_connection, "HALF_CLOSE_SECONDS", PATIENCE)
    monkeypatch.setattr(edge_connection, "LINGERING_SECONDS", PATIENCE)
    async with serving(answering, connections_max=8, strangers_max=4) as edge:
        strangers = [await edge.connect(4096) for _ in range(12)]
        await until(lambda: edge.server.open == 12)
        for one in strangers:
            await one.send(STATES[state])
        if STATES[state].endswith(b"\r\n\r\n"):
            await until(lambda: edge.server.requests_count >= 12)
        elif STATES[state]:
            await until(lambda: all(one._arrived for one in edge.server.edges()))
        ours = [await edge.connect() for _ in range(8)]
        for turn in range(2):
            for one in ours:
                await one.send(message())
            for one in ours:
                assert (await one.answer()).status == 200, turn
        assert edge.server.known == 8
        assert edge.server.open <= 12
        assert edge.seen.overflows == edge.seen.exhaustions == 0
        for one in (*strangers, *ours):
            one.close()
        await edge.emptied()
        assert edge.server.known == 0
        assert not edge.server.strangers
        assert not edge.lost
        assert all(not authenticated for _, authenticated in edge.seen.faults)


@pytest.mark.both_loops
async def test_strangers_keep_a_share_of_their_own() -> None:
    """Where every place is a rollout's, strangers have theirs beside, and close nothing."""
    async with serving(answering, connections_max=4, strangers_max=2) as edge:
        ours = [await edge.connect() for _ in range(4)]
        for one in ours:
            await one.send(message())
            assert (await one.answer()).status == 200
        strangers = []
        for _ in range(20):
            stranger = await edge.connect()
            strangers.append(stranger)
            await stranger.send(message(b"", method="GET", target="/livez"))
            assert (await stranger.answer()).status == 200
        await until(lambda: edge.server.open == 6)
        assert edge.seen.silent
        for one in ours:
            await one.send(message())
            assert (await one.answer()).status == 200
        for one in (*ours, *strangers):
            one.close()


@pytest.mark.both_loops
@pytest.mark.parametrize("secret", [CAPABILITY, INTERNAL])
async def test_what_has_arrived_is_looked_at_before_an_end(secret: bytes) -> None:
    """A rollout whose first bytes no code has read yet is not ended as a stranger."""
    asked = message(target=f"/{secret.decode()}/execute")
    async with serving(answering, connections_max=4, strangers_max=1) as edge:
        ours = [await edge.connect() for _ in range(4)]
        await until(lambda: edge.server.open == 4)
        last = await edge.connect()
        await until(lambda: edge.server.open == 5)
        for one in ours:
            one.sock.send(asked)  # not one turn of the loop: these lie in the kernel
        edge.server.make_room(0)
        assert edge.server.known == 4
        for one in ours:
            assert (await one.answer()).status == 200
            one.close()
        assert await last.closed()
        last.close()
        await edge.emptied()
        assert edge.seen.silent


@pytest.mark.both_loops
async def test_a_stranger_that_does_not_wait_gets_one_answer() -> None:
    """Who pipelines without a capability has one answer and the end; a rollout has all of them."""
    async with serving(answering) as edge:
        stranger, ours = await edge.connect(), await edge.connect()
        await stranger.send(PROBES * 50)
        answer = await stranger.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await stranger.closed()
        assert edge.server.requests_count == 1
        await ours.send(message() * 20)
        for _ in range(20):
            assert (await ours.answer()).status == 200
        again = await edge.connect()  # one after the other is no flood
        for _ in range(3):
            await again.send(message(b"", target="/livez"))
            assert (await again.answer()).status == 200
        for one in (stranger, ours, again):
            one.close()


@pytest.mark.both_loops
async def test_a_refused_body_is_not_waited_for_once_its_sender_has_left() -> None:
    """Strangers that come and go leave no task behind that reads their bodies."""
    async with serving(answering) as edge:
        for _ in range(20):
            client = await edge.connect()
            await client.send(HALF_A_BODY)
            assert (await client.answer()).status == 401
            client.close()
        async with asyncio.timeout(edge_connection.LINGERING_SECONDS / 2):
            await until(lambda: not edge.server.tasks)


# --- the rows, against real daemons ---------------------------------------------------------------


@contextlib.contextmanager
def many_sockets() -> Iterator[list[socket.socket]]:
    """Connections of this process; its soft limit holds thousands meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    opened: list[socket.socket] = []
    try:
        yield opened
    finally:
        for one in opened:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connected(port: int, data: bytes = b"") -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    if data:
        sock.sendall(data)
    return sock


def search(url: str) -> int | None:
    """The status of one search on a connection of its own; None where it is cut."""
    host, port, path = split(url)
    body = json.dumps(native_body("Ada")).encode()
    head = (
        f"POST /{path}/execute HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    try:
        with connected(port, head.encode() + body) as sock:
            answer = b""
            while more := sock.recv(65536):
                answer += more
    except ConnectionError:
        return None
    return int(answer.split()[1]) if answer else None


def split(url: str) -> tuple[str, int, str]:
    host, port, path = url.removeprefix("http://").replace("/", ":").split(":")
    return host, int(port), path


def gate(daemon: DaemonProcess) -> tuple[str, str | None]:
    """What health says now, and the cause."""
    value = daemon.internal().health().value
    return value["state"], value["cause"] and value["cause"]["cause"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("data", "probes", "connections_max", "count"),
    [
        pytest.param(PROBES, False, 1024, 1400, id="pipelined"),
        pytest.param(PROBES, False, 4096, 4300, id="pipelined, 4,300", marks=pytest.mark.soak),
        pytest.param(HALF_A_BODY, False, 4096, 4300, id="half, 4,300", marks=pytest.mark.soak),
        pytest.param(PROBES, False, 64, 500, id="pipelined, few places"),
        pytest.param(HALF_A_BODY, False, 64, 500, id="half a body"),
        pytest.param(b"POST /x", False, 64, 500, id="half a head"),
        pytest.param(b"", False, 64, 500, id="new"),
        pytest.param(HALF_A_BODY, True, 64, 500, id="half a body, probe listener"),
        pytest.param(PROBES, True, 64, 500, id="pipelined, probe listener"),
        pytest.param(b"", True, 64, 500, id="new, probe listener"),
    ],
)
def test_thousands_of_strangers(
    tmp_path: Path, data: bytes, probes: bool, connections_max: int, count: int
) -> None:
    """Strangers beyond every bound cost no rollout its answer, no probe its own, and no run."""
    probe_port = free_port()
    keys: dict[str, Any] = {
        "server__probe_host": "127.0.0.1",
        "server__probe_port": probe_port,
        "server__connections_max": connections_max,
    }
    with running(tmp_path, **keys) as daemon, many_sockets() as strangers:
        url = daemon.sandbox_url
        port = probe_port if probes else split(url)[1]
        statuses = []
        for number in range(count):
            with contextlib.suppress(ConnectionError):  # it has made room already
                strangers.append(connected(port, data))
            if number % 100 == 0:
                statuses.append(search(url))
        statuses += [search(url) for _ in range(20)]
        assert set(statuses) == {200}
        assert gate(daemon) == ("healthy", None)
        probe = connected(probe_port, b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert probe.recv(65536).startswith(b"HTTP/1.1 200 ")
        probe.close()
        assert daemon.stop() == 0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.mark.process
def test_connections_max_follows_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few descriptors as many rollouts are served as have a place; one more ends the run."""
    monkeypatch.setenv("DESCRIPTORS", str(OTHER_DESCRIPTORS + 100))
    daemon = start(tmp_path, module="tests.fakes.limited")
    try:
        wait_ready(daemon)
        assert "server.connections_max follows ulimit -n" in daemon.log.read_text()
        _, port, path = split(daemon.sandbox_url)
        with many_sockets() as ours:
            for _ in range(99):  # the gate has a place too
                ours.append(connected(port, f"POST /{path}/execute HTTP/1.1\r\n".encode()))
            assert gate(daemon) == ("healthy", None)
            ours.append(connected(port, f"POST /{path}/execute HTTP/1.1\r\n".encode()))
            ours.append(connected(port, f"POST /{path}/execute HTTP/1.1\r\n".encode()))
            wait_until(lambda: (daemon.directory / "latch.json").exists())
            cause = json.loads((daemon.directory / "latch.json").read_bytes())["cause"]
            assert cause == "http_busy"
        assert daemon.stop() == 4
    finally:
        if daemon.process.poll() is None:
            daemon.kill()


@pytest.mark.process
def test_a_limit_too_low_for_a_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start says how many descriptors it needs, and no run directory is left behind."""
    monkeypatch.setenv("DESCRIPTORS", str(OTHER_DESCRIPTORS + 63))
    daemon = start(tmp_path, module="tests.fakes.limited")
    assert daemon.process.wait(30) == 2
    said = daemon.log.read_text()
    assert f"ulimit -n allows {OTHER_DESCRIPTORS + 63} file descriptors" in said
    assert "Traceback" not in said
    assert not daemon.directory.exists()


@pytest.mark.process
def test_an_accept_without_a_descriptor_closes_the_latch(tmp_path: Path) -> None:
    """A connection that cannot be accepted for want of a descriptor ends the run by itself."""
    with running(tmp_path) as daemon:
        url = daemon.sandbox_url
        assert search(url) == 200
        _, hard = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (3, hard))
        with connected(split(url)[1]):
            wait_until(lambda: "no file descriptor is left" in daemon.log.read_text())
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (hard, hard))
        assert gate(daemon) == ("failed", "out_of_descriptors")
        assert search(url) == 502
        assert daemon.stop() == 4


@pytest.mark.both_loops
async def test_the_last_descriptors_are_rollouts() -> None:
    """Near the limit strangers make room first; without one the run has failed before an accept
    does: the event loop would drop that connection, and tell no code.
    """
    async with serving(answering, connections_max=8) as edge:
        ours, strangers = [await edge.connect()], [await edge.connect() for _ in range(3)]
        await until(lambda: edge.server.open == 4)
        await ours[0].send(message())
        assert (await ours[0].answer()).status == 200
        edge.server.descriptors_max = 0
        for stranger in strangers:
            ours.append(await edge.connect())
            assert await stranger.closed()
            await ours[-1].send(message())
            assert (await ours[-1].answer()).status == 200
        assert edge.seen.silent
        ours.append(await edge.connect())
        await until(lambda: edge.seen.exhaustions == 1)
        await ours[-1].send(message())
        assert (await ours[-1].answer()).status == 200
        for one in (*ours, *strangers):
            one.close()


async def test_the_gate_looks_for_a_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint is refused, and health says why, where none is left at that moment."""
    async with served(tmp_path / "run") as run:
        assert (await run.health())[0] == 200
        with no_descriptors():
            status, _ = await run.internal("POST", "/checkpoints", {"step": 1})
        assert status == 409
        _, health = await run.health()
        assert health["cause"]["cause"] == "out_of_descriptors"


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """No descriptor of this process is free; what is open stays."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# --- what a start takes, and what a refused start leaves ------------------------------------------


def test_the_soft_limit_is_raised_no_further_than_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many connections as are wanted, or as the hard limit has room for."""
    limits = {"soft": 1024, "hard": 100_000}
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limits["soft"], limits["hard"]))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.update(soft=pair[0]))
    assert take_descriptors(4096) == 4096
    assert limits["soft"] == 4096 + OTHER_DESCRIPTORS
    limits.update(soft=700, hard=OTHER_DESCRIPTORS + 300)
    assert take_descriptors(4096) == 300
    assert limits["soft"] == OTHER_DESCRIPTORS + 300
    limits.update(soft=OTHER_DESCRIPTORS + 2, hard=OTHER_DESCRIPTORS + 2)
    assert take_descriptors(2) == 2  # few are wanted, and there is room for them
    with raises(errors.USAGE, match="ulimit -n allows"):
        take_descriptors(3)
    limits.update(soft=resource.RLIM_INFINITY, hard=resource.RLIM_INFINITY)
    assert take_descriptors(4096) == 4096


async def test_a_refusal_to_listen_leaves_no_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the second listener cannot begin, the ports of both are free again."""
    begun: list[int] = []

    async def listen(server: Any, sock: socket.socket) -> asyncio.Server:
        begun.append(sock.getsockname()[1])
        if len(begun) == 2:
            raise errors.NOT_AVAILABLE("this system lacks what the edge leans on")
        return await edge_server.listen(server, sock)

    monkeypatch.setattr("smartsearch_sidecar.process.daemon.listen", listen)
    keys: dict[str, Any] = {"server__probe_host": "127.0.0.1", "server__probe_port": 0}
    daemon = Daemon(configured(tmp_path / "run", **keys), provider=FakeProvider())
    with raises(errors.NOT_AVAILABLE):
        await daemon.run()
    for port in begun:
        await until(partial(is_free, port))


def is_free(port: int) -> bool:
    """Whether another process could take it now."""
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True

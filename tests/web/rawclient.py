"""A client that sends exactly the bytes it is told, and a served edge to send them to."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from smartsearch_sidecar.web.capabilities import Capabilities
from smartsearch_sidecar.web.edge.connection import STRANGERS_MAX, EdgeServer, Handler
from smartsearch_sidecar.web.edge.request import EdgeRequest, Reply, response_head
from smartsearch_sidecar.web.edge.server import drain, listen
from tests.fakes.until import until

PATIENCE = 10.0  # seconds until a wait in a test is a finding
CAPABILITY = b"Zr4tT9-capability-of-the-edge-tests_0123456789"
INTERNAL = b"iN7ern4l-capability-of-the-edge-tests_98765432"
MARKER = b"/" + CAPABILITY + b"/"
TARGET = "/" + CAPABILITY.decode() + "/execute"


@dataclass
class Answer:
    """One response as it came: ``raw`` is all of its bytes, header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes
    raw: bytes


class RawClient:
    """One connection. Sending to a server that has closed is not an error here: it is the point."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.received = b""

    @classmethod
    async def connect(cls, address: tuple[str, int], receive_bytes: int = 0) -> RawClient:
        """Connect, with a receive buffer of about ``receive_bytes`` where that is given."""
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        try:
            async with asyncio.timeout(PATIENCE):
                await asyncio.get_running_loop().sock_connect(sock, address)
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    async def send(self, data: bytes) -> bool:
        """Send all of it; whether the other side took it."""
        try:
            async with asyncio.timeout(PATIENCE):
                await asyncio.get_running_loop().sock_sendall(self.sock, data)
        except ConnectionError:
            return False
        return True

    async def drip(self, data: bytes, size: int = 1) -> None:
        """Send it in pieces, with turns of the loop between them so that each arrives alone."""
        for start in range(0, len(data), size):
            if not await self.send(data[start : start + size]):
                return
            for _ in range(3):
                await asyncio.sleep(0)

    async def _more(self) -> bool:
        try:
            async with asyncio.timeout(PATIENCE):
                data = await asyncio.get_running_loop().sock_recv(self.sock, 1 << 20)
        except ConnectionError:
            return False
        self.received += data
        return bool(data)

    async def answer(self, *, bodiless: bool = False) -> Answer:
        """The next response; fails where the connection ends within it."""
        while b"\r\n\r\n" not in self.received:
            assert await self._more(), f"closed within an answer: {self.received!r}"
        head, _, _ = self.received.partition(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (x.partition(": ") for x in lines)}
        size = len(head) + 4 + (0 if bodiless else int(headers.get("content-length", "0")))
        while len(self.received) < size:
            assert await self._more(), f"closed within an answer: {self.received!r}"
        raw, self.received = self.received[:size], self.received[size:]
        return Answer(int(status.split(" ")[1]), headers, raw[len(head) + 4 :], raw)

    async def rest(self) -> bytes:
        """Everything until the other side has closed or reset."""
        while await self._more():
            pass
        rest, self.received = self.received, b""
        return rest

    async def closed(self) -> bool:
        """Wait for the end of the connection; whether it came without another byte."""
        return not await self.rest()

    def shut(self) -> None:
        """Half-close: the client sends no further bytes."""
        self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close; Linux makes that a reset where bytes are left unread."""
        self.sock.close()

    def reset(self) -> None:
        """Close with a reset."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


def message(
    body: bytes = b"{}",
    *,
    method: str = "POST",
    target: str = TARGET,
    version: str = "1.1",
    headers: tuple[str, ...] = (),
) -> bytes:
    """A request as a rollout would send it, with further header lines."""
    lines = [f"{method} {target} HTTP/{version}", "Host: x", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode("latin-1") + body


@dataclass
class Recorder:
    """An observer that remembers."""

    faults: list[tuple[str, bool]] = field(default_factory=list)
    crashes: list[BaseException] = field(default_factory=list)
    overflows: int = 0
    exhaustions: int = 0

    def malformed(self, reason: str, authenticated: bool) -> None:
        self.faults.append((reason, authenticated))

    def crashed(self, exc: BaseException) -> None:
        self.crashes.append(exc)

    def overflow(self) -> None:
        self.overflows += 1

    def exhausted(self) -> None:
        self.exhaustions += 1

    @property
    def silent(self) -> bool:
        return not (self.faults or self.crashes or self.overflows or self.exhaustions)


@dataclass
class Served:
    """A server under test; ``lost`` holds the stage of every answer its default handler lost."""

    server: EdgeServer
    listener: asyncio.Server
    address: tuple[str, int]
    seen: Recorder
    lost: list[str]
    loop_errors: list[str]

    async def connect(self, receive_bytes: int = 0) -> RawClient:
        return await RawClient.connect(self.address, receive_bytes)

    async def emptied(self) -> None:
        """Wait until no connection is open and no work goes on."""
        await until(lambda: not self.server.open and not self.server.tasks)


@contextlib.asynccontextmanager
async def serving(
    handler: Handler | None = None,
    *,
    keepalive_seconds: float = 75,
    connections_max: int = 4096,
    strangers_max: int = STRANGERS_MAX,
    descriptors_max: int = sys.maxsize,
    stall_seconds: float = 10,
) -> AsyncIterator[Served]:
    """A served edge; without a handler, one that answers what it was sent. Nothing may be left."""
    seen, lost, loop_errors = Recorder(), list[str](), list[str]()

    async def echo(request: EdgeRequest) -> Reply:
        body = await request.body(int(request.headers.get("Content-Length", "0")), PATIENCE)
        answer = request.raw_target.encode("utf-8", "surrogateescape") + b" " + body
        head = response_head(200, len(answer), close=not request.keep_alive)
        return request.deliver(head, answer, lost.append)

    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: loop_errors.append(repr(context))
    )
    server = EdgeServer(
        handler or echo,
        observer=seen,
        capabilities=Capabilities(CAPABILITY.decode(), INTERNAL.decode()),
        keepalive_seconds=keepalive_seconds,
        connections_max=connections_max,
        strangers_max=strangers_max,
        descriptors_max=descriptors_max,
        stall_seconds=stall_seconds,
    )
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    listener = await listen(server, sock)
    try:
        yield Served(server, listener, sock.getsockname(), seen, lost, loop_errors)
    finally:
        listener.close()
        await drain(server, PATIENCE)
        await listener.wait_closed()
        assert not server.open
        assert not server.tasks
        assert not loop_errors

"""What the hunter does on the wire: a rollout's client, a proxy on its way, and strangers.

The client is the pinned one: it never raises. Whatever its call comes to becomes text, and the
rollout goes on with that text.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.fakes.rollouts import client_text
from tests.fakes.served import native_body
from tests.web.rawclient import RawClient

HOST = "127.0.0.1"
PIECE_BYTES = 60
SLOW_READER_BYTES = 4096
TIMED_OUT = "error: execution timed out"
ABORTED = (
    "('Connection aborted.', RemoteDisconnected('Remote end closed connection without response'))"
)
REFUSED = (
    "HTTPConnectionPool(host='127.0.0.1'): Max retries exceeded (Caused by NewConnectionError('"
    "Failed to establish a new connection: [Errno 111] Connection refused'))"
)
BROKEN = "('Connection broken: IncompleteRead', IncompleteRead)"

Address = tuple[str, int]


@dataclass(frozen=True)
class Came:
    """What a call came to.

    ``text`` is what the client puts into its rollout. ``status`` and ``value`` are those of a whole
    answer; ``None`` where it got no whole answer.
    """

    text: str
    status: int | None = None
    value: Any = None


class Cut(Exception):
    """The connection ended within an answer, or before it."""

    def __init__(self, begun: bool) -> None:
        super().__init__()
        self.begun = begun


def request(
    path: str, value: Any = None, *, method: str = "POST", length: int | None = None
) -> bytes:
    """A request in bytes; ``length`` is what it declares where that is not its body's."""
    body = b"" if value is None else json.dumps(value).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body


async def _more(client: RawClient, begun: bool) -> None:
    if not await client._more():
        raise Cut(begun)


async def read_answer(client: RawClient) -> tuple[int, bytes]:
    """Status and body of the next answer. Raises ``Cut`` where it does not come whole."""
    while b"\r\n\r\n" not in client.received:
        await _more(client, bool(client.received))
    head, _, _ = client.received.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
    size = len(head) + 4 + length
    while len(client.received) < size:
        await _more(client, True)
    body, client.received = client.received[len(head) + 4 : size], client.received[size:]
    return int(head.split(b" ")[1]), body


async def call(address: Address, data: bytes, seconds: float) -> Came:
    """One request of the trainer, on a connection of its own."""
    return await _ask(lambda: RawClient.connect(address), _plain, data, seconds)


# --- the rollout's client -------------------------------------------------------------------------

Connect = Callable[[], Awaitable[RawClient]]
How = Callable[[RawClient, bytes], Awaitable[tuple[int, bytes]]]
"""Sends a request over a connection in one way, and reads its answer. Raises ``Cut`` or
``TimeoutError`` where the client does not wait for it.
"""


async def _plain(client: RawClient, data: bytes) -> tuple[int, bytes]:
    await client.send(data)
    return await read_answer(client)


async def _in_pieces(client: RawClient, data: bytes) -> tuple[int, bytes]:
    await client.drip(data, PIECE_BYTES)
    return await read_answer(client)


async def _slow_reader(client: RawClient, data: bytes) -> tuple[int, bytes]:
    await client.send(data)
    await asyncio.sleep(0.1)  # the answer waits in the kernel, which is what is tried
    return await read_answer(client)


async def _twice(client: RawClient, data: bytes) -> tuple[int, bytes]:
    """Both requests in one segment; both answers are read, and the first one is used."""
    await client.send(data + data)
    first = await read_answer(client)
    await read_answer(client)
    return first


async def _half(client: RawClient, data: bytes) -> tuple[int, bytes]:
    await client.send(data[: len(data) - 20])
    raise Cut(False)


async def _stalled(client: RawClient, data: bytes) -> tuple[int, bytes]:
    await client.send(data[: len(data) - 20])
    return await read_answer(client)


async def _leaves_at_once(client: RawClient, data: bytes) -> tuple[int, bytes]:
    await client.send(data)
    raise TimeoutError


async def _leaves_soon(client: RawClient, data: bytes) -> tuple[int, bytes]:
    await client.send(data)
    await asyncio.sleep(0.02)
    raise TimeoutError


async def _resets(client: RawClient, data: bytes) -> tuple[int, bytes]:
    await client.send(data)
    await asyncio.sleep(0.005)
    client.reset()
    raise TimeoutError


async def _shuts(client: RawClient, data: bytes) -> tuple[int, bytes]:
    """Half-closes behind its request, as some clients do, and reads on."""
    await client.send(data)
    client.shut()
    return await read_answer(client)


HOWS: dict[str, How] = {
    "plain": _plain,
    "in pieces": _in_pieces,
    "slow reader": _slow_reader,
    "twice": _twice,
    "half": _half,
    "stalled": _stalled,
    "leaves at once": _leaves_at_once,
    "leaves soon": _leaves_soon,
    "resets": _resets,
    "shuts": _shuts,
}


async def search(path: str, query: str, how: str, connect: Connect, seconds: float) -> Came:
    """One search of a rollout. ``how`` is a name of ``HOWS``, or ``repeats``, which leaves and asks
    again; or another spelling of the request: ``GET``, or a path that follows the capability.
    """
    data = request(f"{path}/execute", native_body(query))
    if how == "repeats":
        await _ask(connect, _leaves_soon, data, seconds)
    elif how == "GET":
        data = request(f"{path}/execute", method="GET")
    elif how.startswith("/"):
        data = request(path + how, native_body(query))
    return await _ask(connect, HOWS.get(how, _plain), data, seconds)


async def _ask(connect: Connect, how: How, data: bytes, seconds: float) -> Came:
    try:
        async with asyncio.timeout(seconds):
            client = await connect()
            try:
                status, body = await how(client, data)
            finally:
                client.close()
    except TimeoutError:
        return Came(TIMED_OUT)
    except ConnectionRefusedError:
        return Came(REFUSED)
    except Cut as cut:
        return Came(BROKEN if cut.begun else ABORTED)
    except OSError:
        return Came(ABORTED)
    try:
        value = json.loads(body)
    except ValueError:
        value = None
    if status != 200:
        return Came(f"error: {status}", status, value)
    fields = value if isinstance(value, dict) else {}
    return Came(client_text(str(fields.get("result", ""))), status, value)


# --- a proxy on its way ---------------------------------------------------------------------------


class Proxy:
    """A proxy that takes a request whole, asks the daemon, and answers: in one of many ways.

    Each connection has a fate, which its client names before it sends: ``pass``, ``delays``,
    ``cuts the request``, ``cuts the answer``, ``loses the answer``, ``gives up``, ``says 502``,
    ``asks twice`` or ``refuses``.
    """

    def __init__(self, daemon: Callable[[], Address]) -> None:
        self._daemon = daemon
        self._fates: dict[int, str] = {}
        self._address: Address = (HOST, 0)
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Proxy]:
        """Listens until the block ends."""
        # Bound and not listening: a connection to it is refused.
        with socket.socket() as refusing:
            refusing.bind((HOST, 0))
            self._refusing: Address = refusing.getsockname()
            server = await asyncio.start_server(self._accepted, HOST, 0)
            self._address = server.sockets[0].getsockname()
            try:
                yield self
            finally:
                server.close()
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    async def connect(self, fate: str) -> RawClient:
        """A connection of this fate."""
        if fate == "refuses":
            return await RawClient.connect(self._refusing)
        client = await RawClient.connect(self._address)
        self._fates[client.sock.getsockname()[1]] = fate
        return client

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._forward(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            writer.transport.abort()
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await _whole(reader)
        fate = self._fates.pop(writer.get_extra_info("peername")[1], "pass")
        if fate == "says 502":
            await self._answer(writer, b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
            return
        if fate == "delays":
            await asyncio.sleep(0.1)
        try:
            answer = await self._ask(asked, fate)
        except ConnectionRefusedError:
            answer = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n"
        if fate == "loses the answer":
            raise ConnectionAbortedError
        if fate == "gives up":
            answer = b"HTTP/1.1 504 Gateway Timeout\r\nContent-Length: 0\r\n\r\n"
        if fate == "cuts the answer":
            answer = answer[: len(answer) * 2 // 3]
        await self._answer(writer, answer)

    async def _ask(self, asked: bytes, fate: str) -> bytes:
        upstream, to_daemon = await asyncio.open_connection(*self._daemon())
        try:
            if fate == "cuts the request":
                to_daemon.write(asked[: len(asked) * 2 // 3])
                await to_daemon.drain()
                raise ConnectionAbortedError
            to_daemon.write(asked)
            if fate == "gives up":
                await asyncio.sleep(0.02)
                return b""
            if fate == "asks twice":
                answer, _ = await asyncio.gather(_whole(upstream), self._ask(asked, "pass"))
                return answer
            return await _whole(upstream)
        finally:
            to_daemon.close()

    async def _answer(self, writer: asyncio.StreamWriter, answer: bytes) -> None:
        writer.write(answer)
        await writer.drain()


async def _whole(reader: asyncio.StreamReader) -> bytes:
    """One message, its body as long as it declares."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
    return head + await reader.readexactly(length)


# --- strangers ------------------------------------------------------------------------------------

WRONG = "/" + "w" * 43
LONG_HEADER = b"GET /livez HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 20_000
STRANGERS: dict[str, tuple[int, bytes]] = {
    "says nothing": (10, b""),
    "says what is not HTTP": (4, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20),
    "has a wrong capability": (4, request(f"{WRONG}/execute", native_body("stranger"))),
    "sends half a header": (6, b"POST /somewhere HTTP/1.1\r\nHost: x\r\nContent-"),
    "sends half a body": (4, request("/somewhere", {"a": "b" * 50}, length=500)),
    "sends a long header": (2, LONG_HEADER),
    "asks for a probe": (4, request("/livez", method="GET")),
    "asks to upgrade": (2, b"GET /livez HTTP/1.1\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n"),
    "chunks": (2, b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
}
"""How many connections a stranger opens, and what it sends over each. It reads nothing."""
CROWDS: dict[str, tuple[int, bytes]] = {
    "a crowd with half a body": (80, request("/somewhere", {"a": "b" * 50}, length=500)),
    "a crowd that reads no probe": (4, request("/livez", method="GET") * 3000),
}


async def strangers(address: Address, kind: str) -> list[RawClient]:
    """Opens a stranger's connections, and leaves them open."""
    count, data = {**STRANGERS, **CROWDS}[kind]
    opened = []
    for _ in range(count):
        with contextlib.suppress(OSError, TimeoutError):
            client = await RawClient.connect(address)
            opened.append(client)
            async with asyncio.timeout(0.5):  # a server that reads no more is not waited for
                await client.send(data)
    return opened

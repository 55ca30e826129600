"""What the fault matrix does to a served run: clients that misbehave, providers, disks.

An act does its fault through real sockets and real files, and says what the client was answered.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from smartsearch_sidecar.ledger.disk import Disk
from tests.fakes.disk import FullDisk, ReadOnlyDisk
from tests.fakes.provider import FakeProvider
from tests.fakes.served import EXECUTE_CAPABILITY, Served, native_body
from tests.fakes.until import until
from tests.web.rawclient import RawClient

Answered = tuple[int | None, str | None]
"""The status and the error's code; no status where the client got no answer."""

Act = Callable[[Served], Awaitable[Answered]]

BODY = json.dumps(native_body("Ada")).encode()

# --- ways to ask ----------------------------------------------------------------------------------


async def ask(run: Served, query: str = "Ada") -> Answered:
    """One query as a rollout asks it."""
    status, value = await run.execute(query)
    return status, value["error"]["code"] if status != 200 else None


def asking(*queries: str) -> Act:
    """Asks one after the other; the last answer counts."""

    async def act(run: Served) -> Answered:
        answered: Answered = (None, None)
        for query in queries:
            answered = await ask(run, query)
        return answered

    return act


def request(
    body: bytes = BODY, *, length: int | None = None, more: str = "", of: str = EXECUTE_CAPABILITY
) -> bytes:
    """A rollout's request in bytes."""
    head = (
        f"POST /{of}/execute HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{more}"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body


async def connect(run: Served, receive_bytes: int = 0) -> RawClient:
    """A connection of which every byte is the test's."""
    return await RawClient.connect(("127.0.0.1", run.port), receive_bytes)


async def answer_of(client: RawClient) -> Answered:
    """The next answer on a connection, which is then closed."""
    answer = await client.answer()
    client.close()
    return answer.status, json.loads(answer.body)["error"]["code"] if answer.status != 200 else None


def sending(data: bytes) -> Act:
    """Sends bytes and waits for the answer."""

    async def act(run: Served) -> Answered:
        client = await connect(run)
        await client.send(data)
        return await answer_of(client)

    return act


def leaving_after(data: bytes) -> Act:
    """Sends bytes and closes the connection."""

    async def act(run: Served) -> Answered:
        client = await connect(run)
        await client.send(data)
        client.close()
        return None, None

    return act


def to(suffix: str, method: str = "POST") -> Act:
    """A request of ours to another place, or by another method."""
    target = f"{method} /{EXECUTE_CAPABILITY}{suffix} HTTP/1.1\r\n"
    return sending((target + "Host: x\r\nContent-Length: 0\r\n\r\n").encode())


# --- clients that do not wait, or do not read -----------------------------------------------------


async def leave_the_room(run: Served) -> Answered:
    """Hangs up while waiting for the only slot."""
    await run.service.slots.take(1e9)
    client = await connect(run)
    await client.send(request())
    await until(lambda: run.service.slots.waiting == 1)
    client.close()
    run.service.slots.give()
    return None, None


async def leave_the_search(run: Served) -> Answered:
    """Hangs up while its search runs."""
    gate = run.provider.gate = asyncio.Event()
    client = await connect(run)
    await client.send(request())
    await until(lambda: run.provider.under_way == 1)
    client.close()
    gate.set()
    return None, None


async def leave_the_sync(run: Served) -> Answered:
    """Hangs up while its record is being synced."""
    disk = run.daemon.files.disk
    assert isinstance(disk, HeldDisk)
    disk.let_through.clear()
    client = await connect(run)
    await client.send(request())
    await until(lambda: run.service.run.state.responses == 1)
    client.close()
    disk.let_through.set()
    return None, None


async def leave_the_answer(run: Served) -> Answered:
    """Closes with the answer in its own kernel's buffer, unread."""
    client = await connect(run)
    await client.send(request())
    await until(lambda: run.service.run.state.responses == 1 and run.service.slots.idle)
    await asyncio.get_running_loop().run_in_executor(None, client.sock.fileno)
    await until(lambda: _readable(client))
    client.close()
    return None, None


def _readable(client: RawClient) -> bool:
    """Whether bytes have come, without taking them."""
    try:
        return bool(client.sock.recv(1, 2))  # MSG_PEEK
    except BlockingIOError:
        return False


async def leave_a_pipeline(run: Served) -> Answered:
    """Leaves with one request in its search and another one that no handler has seen."""
    gate = run.provider.gate = asyncio.Event()
    client = await connect(run)
    await client.send(request() + request())
    await until(lambda: run.provider.under_way == 1)
    client.close()
    await until(lambda: run.service.run.state.closed)
    gate.set()
    await until(lambda: run.service.slots.idle)
    return None, None


async def pipeline(run: Served) -> Answered:
    """Two requests in one segment."""
    client = await connect(run)
    await client.send(request() + request())
    assert (await client.answer()).status == 200
    return await answer_of(client)


async def read_slowly(run: Served) -> Answered:
    """Takes megabytes through a small window while others are served."""
    run.provider.answer = [{"id": "1", "contents": "x" * 4_000_000}]
    client = await connect(run, receive_bytes=4096)
    await client.send(request())
    await until(lambda: run.service.run.state.responses == 1)
    run.provider.answer = None
    assert (await ask(run, "beside it"))[0] == 200
    return await answer_of(client)


async def send_slowly(run: Served) -> Answered:
    """Sends a byte at a time, in time."""
    client = await connect(run)
    await client.drip(request(), size=7)
    return await answer_of(client)


async def one_connection_too_many(run: Served) -> Answered:
    """Finds every connection taken by others of ours."""
    taken = [await connect(run) for _ in range(2)]
    for one in taken:
        await one.send(request())
        assert (await one.answer()).status == 200
    late = await connect(run)
    await late.send(request())
    assert await late.closed()
    for one in (*taken, late):
        one.close()
    return None, None


async def idle_connections(run: Served) -> Answered:
    """Two hundred silent strangers beside one rollout."""
    idle = [await connect(run) for _ in range(200)]
    answered = await ask(run)
    for one in idle:
        one.close()
    return answered


async def find_the_house_full(run: Served) -> Answered:
    """Comes as the second where one is served and none may wait."""
    gate = run.provider.gate = asyncio.Event()
    first = asyncio.create_task(ask(run, "first"))
    await until(lambda: run.provider.under_way == 1)
    answered = await ask(run, "second")
    gate.set()
    assert (await first)[0] == 502
    return answered


async def wait_too_long(run: Served) -> Answered:
    """Waits in the room until its deadline."""
    await run.service.slots.take(1e9)
    answered = await ask(run)
    run.service.slots.give()
    return answered


# --- providers ------------------------------------------------------------------------------------


def answering(value: Any) -> Callable[[], FakeProvider]:
    """A provider that answers this value, unchanged and unchecked."""

    def made() -> FakeProvider:
        provider = FakeProvider()
        provider.answer = lambda query: value
        return provider

    return made


def raising(fault: BaseException, times: int | None = None) -> Callable[[], FakeProvider]:
    """A provider whose searches raise."""

    def made() -> FakeProvider:
        provider = FakeProvider()
        provider.fault, provider.faults_left = fault, times
        return provider

    return made


def hanging() -> FakeProvider:
    """A provider whose searches never end."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    return provider


def drifting() -> FakeProvider:
    """A remote provider whose passages differ from one search to the next."""
    provider = FakeProvider(remote=True)
    provider.answer = lambda query: [{"id": "1", "contents": f"as of {len(provider.queries)}"}]
    return provider


def changing() -> FakeProvider:
    """A provider that is another one after its first search."""
    provider = FakeProvider()

    def change() -> None:
        provider.identity_values["index_sha256"] = "2" * 64

    provider.after_search = change
    return provider


class NamelessProvider(FakeProvider):
    """A provider that says who it is once, and then never again."""

    async def identity(self) -> Any:
        if self.gate is not None:
            await self.gate.wait()
        self.gate = asyncio.Event()
        return await super().identity()


async def change_and_ask(run: Served) -> Answered:
    """Asks a provider that has become another one meanwhile."""
    run.provider.identity_values["corpus_sha256"] = "d" * 64
    return await ask(run)


async def cannot_say_and_ask(run: Served) -> Answered:
    """Asks a provider that cannot say any more who it is."""
    run.provider.identity_fault = RuntimeError("down")
    return await ask(run)


async def share_a_failure(run: Served) -> Answered:
    """Three ask the same, and the one search for them fails."""
    gate = run.provider.gate = asyncio.Event()
    asked = [asyncio.create_task(ask(run)) for _ in range(3)]
    await until(lambda: len(run.service.run.state.searching) == 3)
    gate.set()
    answers = set(await asyncio.gather(*asked))
    assert len(answers) == 1
    return answers.pop()


# --- disks -----------------------------------------------------------------------------------


class StrickenDisk(Disk):
    """Fails one primitive (``open write sync directory``) on files whose name begins so."""

    def __init__(self, primitive: str, name: str) -> None:
        self._primitive = primitive
        self._name = name
        self._names: dict[int, str] = {}

    def _strike(self, primitive: str, name: str) -> None:
        if primitive == self._primitive and name.startswith(self._name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open(self, path: Path, flags: int) -> int:
        self._strike("open", path.name)
        fd = super().open(path, flags)
        self._names[fd] = path.name
        return fd

    def write(self, fd: int, data: bytes) -> None:
        self._strike("write", self._names[fd])
        super().write(fd, data)

    def sync(self, fd: int) -> None:
        self._strike("sync", self._names[fd])
        super().sync(fd)

    def point(self, name: str) -> None:
        self._at = name

    def sync_directory(self, path: Path) -> None:
        self._strike("directory", self._at)
        super().sync_directory(path)


def filling(left: int) -> Act:
    """The disk takes so many bytes more, and a rollout asks."""

    async def act(run: Served) -> Answered:
        disk = run.daemon.files.disk
        assert isinstance(disk, FullDisk)
        disk.left = left
        return await ask(run)

    return act


async def turn_read_only(run: Served) -> Answered:
    """The filesystem is remounted read-only, and a rollout asks."""
    disk = run.daemon.files.disk
    assert isinstance(disk, ReadOnlyDisk)
    disk.read_only = True
    return await ask(run)


async def close_by_hand(run: Served) -> Answered:
    """The operator closes the latch."""
    status, value = await run.internal("POST", "/latch", {"reason": "by hand"})
    return status, value["error"]["code"] if status != 200 else None


def disk_failing(primitive: str, name: str) -> Callable[[], Disk]:
    return lambda: StrickenDisk(primitive, name)


class HeldDisk(Disk):
    """A disk whose syncs wait until they are let through."""

    def __init__(self) -> None:
        self.let_through = threading.Event()
        self.let_through.set()

    def sync(self, fd: int) -> None:
        self.let_through.wait(10)
        super().sync(fd)

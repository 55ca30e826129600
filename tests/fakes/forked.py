"""Modules run in processes of their own that begin within milliseconds.

A fresh interpreter spends two thirds of a second of CPU on imports before a command begins. Here
one process, ``python -m tests.fakes.forked FD``, imports the package once and forks for each order.
The forked process runs its module as ``python -m MODULE`` does: with arguments, variables, folder
and standard streams of its own, as ``__main__``, to the end of its threads and exit functions. What
an interpreter frees behind those is left to the kernel: taking all modules apart would cost each
process more than its whole start.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from smartsearch_sidecar.errors import SidecarError
from tests.fakes.until import wait_until

ORDER_BYTES = 128 * 1024
POLL_SECONDS = 0.005
# What `serve`, the fake retriever and the pinned client import. No module that is itself run: it
# begins as ``__main__``, and runpy warns where it was imported before.
IMPORTED = (
    "smartsearch_sidecar.commands",
    "smartsearch_sidecar.commands.serve",
    "smartsearch_sidecar.retrieval.plugin",
    "smartsearch_sidecar.process.daemon",
    "smartsearch_sidecar.cluster.nats.bus",
    "smartsearch_sidecar.retrieval.bm25.provider",
    "smartsearch_sidecar.retrieval.flashrag.provider",
    "smartsearch_sidecar.scoring.build",
    "tests.fakes.plugin",
    "tests.fakes.retriever",
    "tests.fakes.served",
    "requests",
    "uvloop",
)


class Forked:
    """A process of the launcher's, as far as tests use ``Popen``."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        environ: Mapping[str, str],
        folder: Path,
        streams: tuple[int, int, int],
    ) -> None:
        """``streams``: descriptors of standard input, output and error. They stay the caller's."""
        order = {
            "module": module,
            "arguments": list(arguments),
            "environ": dict(environ),
            "folder": str(folder),
        }
        self.pid: int = launcher().ask(order, streams)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code (minus the signal that ended it), ``None`` while it runs."""
        if self.returncode is None:
            self.returncode = launcher().ask({"ended": self.pid})
        return self.returncode

    def wait(self, seconds: float) -> int:
        """The exit code of a process that ends within ``seconds``."""
        wait_until(lambda: self.poll() is not None, seconds=seconds, pause=POLL_SECONDS)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing where it has ended: its id may be another's."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """``kill -9``."""
        self.send_signal(signal.SIGKILL)


class Launcher:
    """The process that forks; it ends with the one that started it."""

    def __init__(self) -> None:
        # Threads of a test start and look at once; a message is a whole order or a whole answer.
        self._lock = threading.Lock()
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fakes.forked", str(number)],
                stdin=subprocess.DEVNULL,
                pass_fds=(number,),
                cwd=Path(__file__).resolve().parents[2],
            )

    def ask(self, order: dict[str, Any], streams: Sequence[int] = ()) -> Any:
        with self._lock:
            socket.send_fds(self._orders, [json.dumps(order).encode()], streams)
            answer = self._orders.recv(ORDER_BYTES)
        assert answer, "the launcher has ended"
        return json.loads(answer)

    def close(self) -> None:
        self._orders.close()
        self._process.wait(10)


@functools.cache
def launcher() -> Launcher:
    """One for all tests of this process."""
    started = Launcher()
    atexit.register(started.close)
    return started


# --- the launcher's process: everything below runs there ------------------------------------------


def take(orders: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Answers orders until there are no more. In a forked process: its order, and its streams."""
    while True:
        data, streams, _, _ = socket.recv_fds(orders, ORDER_BYTES, 3)
        if not data:
            return None
        order = json.loads(data)
        if "ended" in order:
            done, status = os.waitpid(order["ended"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if done else None
        elif answer := os.fork():
            for stream in streams:
                os.close(stream)
        else:
            return order, streams
        orders.send(json.dumps(answer).encode())


def become(order: dict[str, Any], streams: Sequence[int]) -> None:
    """Runs the order's module to its end."""
    for standard, stream in enumerate(streams):
        os.dup2(stream, standard)
        os.close(stream)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environ"])
    sys.argv = [order["module"], *order["arguments"]]
    code: object = None
    try:
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
    if code is not None and not isinstance(code, int):
        sys.exit(str(code))
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def warm() -> None:
    """Serves a run and reads a command line: what a process looks up, compiles or checks the first
    time that it does either is done by then.
    """
    from smartsearch_sidecar.commands import app
    from tests.fakes.served import served

    async def once(folder: Path) -> None:
        async with served(folder / "run") as run:
            await run.execute("first")
            await run.health()

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w") as nothing,
        contextlib.redirect_stdout(nothing),
        contextlib.redirect_stderr(nothing),
    ):
        uvloop.run(once(Path(folder)))
        with contextlib.suppress(SidecarError):
            app(["serve", "--config", f"{folder}/none.toml"], standalone_mode=False)
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def main() -> None:
    """Imports, then forks for each order."""
    for name in IMPORTED:
        importlib.import_module(name)
    warm()
    # The collector of a forked process need not look at what all of them share.
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as orders:
        taken = take(orders)
    if taken is not None:
        become(*taken)


if __name__ == "__main__":
    main()

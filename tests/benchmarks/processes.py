"""Servers under load, each in a process of its own: ours, the peers, what stands behind them."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smartsearch_sidecar.client import Client
from tests.benchmarks.machine import cpu_seconds, resident_bytes
from tests.benchmarks.settings import Unmeasured
from tests.fakes.process import DaemonProcess, environment, start, wait_ready
from tests.fakes.until import wait_until

START_SECONDS = 60.0
# A load generator leaves with requests in flight, which would close the latch.
UNDER_LOAD: dict[str, Any] = {
    "execute__max_calls": 1_000_000_000,
    "execute__on_undelivered": "record",
}


@dataclass(frozen=True)
class Target:
    """Something that listens: where rollouts ask it, its process, and ours its inner side."""

    url: str
    pid: int
    run: DaemonProcess | None = None

    def status(self) -> dict[str, Any]:
        """``GET /status`` of ours; nothing of a peer."""
        if self.run is None:
            return {}
        value: dict[str, Any] = self.internal().call("GET", "/status").value
        return value

    def internal(self) -> Client:
        """Our internal routes."""
        if self.run is None:
            raise Unmeasured("a peer has no internal routes")
        return self.run.internal()

    def cpu(self) -> tuple[float, float]:
        """User and system seconds so far."""
        return cpu_seconds(self.pid)

    def resident(self) -> int:
        """Resident bytes now."""
        return resident_bytes(self.pid)


@contextmanager
def ours(folder: Path, *arguments: str, module: str = "", **keys: Any) -> Iterator[Target]:
    """The sidecar by its own command ``serve``, or by a ``module`` that takes the same words."""
    name = module or "smartsearch_sidecar"
    daemon = start(folder, *arguments, module=name, fresh=True, **keys)
    try:
        wait_ready(daemon)
        yield Target(daemon.sandbox_url + "/execute", daemon.process.pid, daemon)
        if daemon.process.poll() is None:
            daemon.stop()
    finally:
        if daemon.process.poll() is None:
            daemon.kill()


@contextmanager
def made_up(folder: Path, milliseconds: int, **keys: Any) -> Iterator[Target]:
    """The sidecar with a provider that answers at once, or after so many milliseconds."""
    words = ("--milliseconds", str(milliseconds))
    with ours(folder, *words, module="tests.benchmarks.instant", **UNDER_LOAD, **keys) as target:
        yield target


@contextmanager
def peer(folder: Path, kind: str, *words: str) -> Iterator[Target]:
    """A server of ``servers.py``; it says where it listens in a file."""
    if kind == "reference":
        require_reference()
    ready = folder / f"{kind}.json"
    command = [sys.executable, "-m", "tests.benchmarks.servers", kind, str(ready), *words]
    # The reference prints a traceback for every connection the load leaves.
    with (folder / f"{kind}.log").open("ab") as log:
        process = subprocess.Popen(command, env=environment(), cwd=folder, stdout=log, stderr=log)
    try:
        wait_started(ready.exists, process, kind)
        yield Target(json.loads(ready.read_text())["url"], process.pid)
    finally:
        end(process)


def require_reference() -> None:
    """Raises ``Unmeasured`` where the reference is not installed."""
    if importlib.util.find_spec("agentinputlab") is None:
        raise Unmeasured("the reference is not installed (the extra `parity`)")


def wait_started(done: Callable[[], bool], process: subprocess.Popen[bytes], name: str) -> None:
    """Waits for ``done()``; fails where the process ends first."""
    wait_until(lambda: done() or process.poll() is not None, seconds=START_SECONDS)
    if process.poll() is not None:
        raise Unmeasured(f"{name} did not start (exit code {process.poll()})")


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL for who does not hear it."""
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(15)


def free_port() -> int:
    """A port on which no process listens now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def listens(port: int) -> bool:
    """Whether something accepts connections there."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def probe(folder: Path, *words: str) -> dict[str, Any]:
    """What a measurement of ``probes.py`` printed, made in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.probes", *words]
    done = subprocess.run(
        command, env=environment(), cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Unmeasured(f"{words[0]} failed: {done.stderr.strip().splitlines()[-1:]}")
    value: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return value

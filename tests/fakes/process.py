"""A daemon in a process of its own, run as an operator runs it, by ``serve``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from smartsearch_sidecar.client import Client
from tests.fakes.forked import Forked
from tests.fakes.until import wait_until

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 30.0
POLL_SECONDS = 0.01


def toml(values: dict[str, Any]) -> str:
    """A TOML document of dotted keys."""
    lines = ((key, tomli_w.dumps({"value": value})) for key, value in values.items())
    return "".join(line.replace("value", key, 1) for key, line in lines)


@dataclass
class DaemonProcess:
    """A served run in another process."""

    process: subprocess.Popen[bytes] | Forked
    directory: Path
    log: Path

    def endpoints(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.directory / "endpoints.json").read_bytes())
        return value

    @property
    def sandbox_url(self) -> str:
        return str(self.endpoints()["sandbox_url"])

    def internal(self) -> Client:
        return Client(str(self.endpoints()["internal_url"]))

    def kill(self) -> None:
        """``kill -9``."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


def environment() -> dict[str, str]:
    """This process's environment, with the repository importable and nothing of ours configured."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SMARTSEARCH_SIDECAR")}
    return {**clean, "PYTHONPATH": str(ROOT)}


def command(module: str, *arguments: str, folder: Path, out: Path) -> Forked:
    """Starts a module that reads no input; what it prints is added to the file ``out``."""
    with out.open("ab") as said, open(os.devnull, "rb") as nothing:
        streams = (nothing.fileno(), said.fileno(), said.fileno())
        return Forked(module, arguments, environ=environment(), folder=folder, streams=streams)


def start(
    tmp_path: Path,
    *arguments: str,
    name: str = "run",
    module: str = "smartsearch_sidecar",
    fresh: bool = False,
    **keys: Any,
) -> DaemonProcess:
    """Starts ``serve`` and returns without waiting; keys with ``__`` for the dot. The process is
    forked from one that has imported the package, or ``fresh``: an interpreter of its own.
    """
    values = {"server.port": 0, "retrieval.provider": "tests.fakes.plugin:instant"}
    values.update({key.replace("__", "."): value for key, value in keys.items()})
    config = tmp_path / f"{name}.toml"
    config.write_text(toml(values))
    directory = tmp_path / name
    log = tmp_path / f"{name}.log"
    words = ["serve", "--config", str(config), "--run-dir", str(directory), *arguments]
    if not fresh:
        return DaemonProcess(command(module, *words, folder=tmp_path, out=log), directory, log)
    with log.open("ab") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            stdout=stream,
            stderr=stream,
            env=environment(),
            cwd=tmp_path,
        )
    return DaemonProcess(process, directory, log)


def is_ready(daemon: DaemonProcess) -> bool:
    """Whether this very process has written its endpoints; a killed one leaves its own behind."""
    try:
        return bool(daemon.endpoints()["pid"] == daemon.process.pid)
    except FileNotFoundError:
        return False


def wait_ready(daemon: DaemonProcess) -> None:
    """Returns once ``endpoints.json`` is there; fails with the log where the process ended."""

    def ready() -> bool:
        true = is_ready(daemon)
        assert true or daemon.process.poll() is None, daemon.log.read_text()
        return true

    wait_until(ready, seconds=START_SECONDS, pause=POLL_SECONDS, found=daemon.log.read_text)


@contextmanager
def running(tmp_path: Path, *arguments: str, **keys: Any) -> Iterator[DaemonProcess]:
    """A ready daemon, killed at the end if the test has not stopped it."""
    daemon = start(tmp_path, *arguments, **keys)
    try:
        wait_ready(daemon)
        yield daemon
    finally:
        if daemon.process.poll() is None:
            daemon.kill()

"""The processes of a load test: a scratch sidecar and the ranks that call it; all ended at the end.

Standard streams are pipes. Both URLs stay in this process and on those pipes. Apart from the
command so that it knows no terminal.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import tomli_w

from smartsearch_sidecar import errors
from smartsearch_sidecar.client import Endpoints, read_endpoints
from smartsearch_sidecar.config import Config
from smartsearch_sidecar.config.loading import ENV_PREFIX
from smartsearch_sidecar.load_test.client_worker import CLIENT_SECONDS, Workload
from smartsearch_sidecar.load_test.report import CallStats

MAX_CALLS = 1_000_000_000
"""The scratch copy's allowance: no load test uses it up."""
_LEFT_OUT = ("reward", "cluster", "run")
_POLL_SECONDS = 0.05
_STOP_SECONDS = 30.0
_LOG_LINES = 5  # of a sidecar that did not start


# --- the scratch sidecar --------------------------------------------------------------------------


def scratch_text(config: Config) -> str:
    """TOML of a copy of ``config`` that can run beside the run it is meant for.

    Same provider, slots, deadline and ledger. Another port and other capabilities; no rewards,
    because they cost GPU time; an allowance that no load test uses up; one node, because
    coordination would make it part of the real run. ``serve`` gets the directory by ``--run-dir``.
    """
    value = {name: part for name, part in config.public().items() if name not in _LEFT_OUT}
    value["execute"]["max_calls"] = MAX_CALLS
    server = value["server"]
    server["port"] = 0
    server["probe_host"] = server["probe_port"] = None
    return tomli_w.dumps(_without_none(value))


def _without_none(value: dict[str, Any]) -> dict[str, Any]:
    """TOML has no null: a key that is not set is left out."""
    return {
        name: _without_none(item) if isinstance(item, dict) else item
        for name, item in value.items()
        if item is not None
    }


def _environ() -> dict[str, str]:
    """This process's environment without keys of the configuration: the scratch copy holds them."""
    return {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}


def _end(process: subprocess.Popen[str], how: signal.Signals) -> None:
    """Sends ``how``, waits, then kills: no process stays behind."""
    if process.poll() is None:
        process.send_signal(how)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def scratch_sidecar(config: Path, run: Path) -> Iterator[Endpoints]:
    """A ready sidecar with its ledger in ``run``; stopped at the end.

    Waits as long as verifying the index takes.

    Raises:
        errors.UsageError: it does not start; the message holds the sidecar's own sentence.
    """
    process = subprocess.Popen(  # noqa: S603 - this very program, with paths of our own
        [
            *(sys.executable, "-m", "smartsearch_sidecar", "serve"),
            *("--config", str(config), "--run-dir", str(run)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_environ(),
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches this process alone, which then stops the sidecar
    )
    log: deque[str] = deque(maxlen=_LOG_LINES)
    reader = threading.Thread(target=_read_log, args=(process, log), daemon=True)
    reader.start()
    try:
        while not (run / "endpoints.json").exists():
            if process.poll() is not None:
                reader.join()
                words = " ".join(log).removeprefix("smartsearch-sidecar: ") or "it printed nothing"
                raise errors.USAGE(f"the scratch sidecar did not start: {words}")
            time.sleep(_POLL_SECONDS)
        yield read_endpoints(run / "endpoints.json")
    finally:
        _end(process, signal.SIGTERM)
        reader.join()


def _read_log(process: subprocess.Popen[str], log: deque[str]) -> None:
    if process.stdout is not None:
        with process.stdout as lines:
            log.extend(line.strip() for line in lines)


# --- the ranks ------------------------------------------------------------------------------------


class ClientWorkers:
    """The ranks, each a process. ``stats`` grows while they call."""

    def __init__(self) -> None:
        self.stats = CallStats()
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            _end(process, signal.SIGKILL)
        for reader in self._readers:
            reader.join()
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def start(self, workloads: list[Workload]) -> None:
        """Starts a process for each workload, and lets them begin together.

        Raises:
            errors.UsageError: a process did not start.
        """
        for workload in workloads:
            process = subprocess.Popen(
                [sys.executable, "-m", "smartsearch_sidecar.load_test.client_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=_environ(),
                text=True,
                bufsize=1,
                start_new_session=True,
            )
            self._processes.append(process)
            _send(process, workload.to_line())
        for process in self._processes:
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise errors.USAGE("a client process of the load test did not start")
        for process in self._processes:
            reader = threading.Thread(target=self._read, args=(process,), daemon=True)
            reader.start()
            self._readers.append(reader)
            _send(process, "\n")

    def _read(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            seconds, _, outcome = line.rstrip("\n").partition(" ")
            with self._lock:
                self.stats.add(outcome, float(seconds))

    def wait(self, seconds: float, look: Callable[[], None], *, every: float) -> None:
        """Waits until every rank is done.

        Args:
            seconds: for how long the ranks make new calls.
            look: called again and again while they do.
            every: seconds between two of those calls.

        Raises:
            errors.UsageError: a rank failed, or needs longer than ``seconds`` and the timeout of
                its last calls.
        """
        until = time.monotonic() + seconds + 2 * CLIENT_SECONDS
        while any(reader.is_alive() for reader in self._readers):
            if time.monotonic() > until:
                raise errors.USAGE(
                    "the client processes of the load test did not end: is this host busy?"
                )
            look()
            time.sleep(every)
        for process in self._processes:
            if process.wait() != 0:
                raise errors.USAGE("a client process of the load test failed: see its error above")


def _send(process: subprocess.Popen[str], line: str) -> None:
    if process.stdin is None:
        raise errors.INTERNAL_ERROR("a client process has no standard input")
    try:
        process.stdin.write(line)
        process.stdin.flush()
    except BrokenPipeError:
        raise errors.USAGE("a client process of the load test ended before it began") from None

"""The processes of a rehearsal: a scratch sidecar and its ranks, started together and all ended.

Standard streams are pipes; both URLs stay in this process and on them.
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
from typing import Self

from smartsearch_sidecar import errors
from smartsearch_sidecar.client import Endpoints, read_endpoints
from smartsearch_sidecar.config.messages import ENV_PREFIX
from smartsearch_sidecar.load_test.client_worker import Part
from smartsearch_sidecar.load_test.report import Tally
from smartsearch_sidecar.load_test.shape import CLIENT_SECONDS

_POLL_SECONDS = 0.05
_STOP_SECONDS = 30.0
_LOG_LINES = 5  # of a sidecar that did not start


def _environ() -> dict[str, str]:
    """Ours, without keys of the configuration: the scratch copy holds them already."""
    return {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}


def _end(process: subprocess.Popen[str], how: signal.Signals) -> None:
    """Asks once, waits, then makes an end; a process of ours never stays behind."""
    if process.poll() is None:
        process.send_signal(how)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def scratch_sidecar(config: Path, run: Path) -> Iterator[Endpoints]:
    """A ready sidecar with the ledger in ``run``; stopped at the end.

    Raises ``UsageError`` with its own sentence where it does not start. Waits as long as verifying
    the index takes.
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
        start_new_session=True,  # Ctrl-C is for us: the sidecar is stopped in order
    )
    said: deque[str] = deque(maxlen=_LOG_LINES)
    listening = threading.Thread(target=_listen, args=(process, said), daemon=True)
    listening.start()
    try:
        while not (run / "endpoints.json").exists():
            if process.poll() is not None:
                listening.join()
                words = " ".join(said).removeprefix("smartsearch-sidecar: ") or "it said nothing"
                raise errors.USAGE(f"the scratch sidecar did not start: {words}")
            time.sleep(_POLL_SECONDS)
        yield read_endpoints(run / "endpoints.json")
    finally:
        _end(process, signal.SIGTERM)
        listening.join()


def _listen(process: subprocess.Popen[str], said: deque[str]) -> None:
    if process.stdout is not None:
        with process.stdout as lines:
            said.extend(line.strip() for line in lines)


class Cast:
    """The ranks, each a process; ``tally`` grows while they play."""

    def __init__(self) -> None:
        self.tally = Tally()
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

    def rehearse(self, parts: list[Part]) -> None:
        """Starts every rank and lets them begin together; returns then."""
        for part in parts:
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
            _say(process, part.line())
        for process in self._processes:
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise errors.USAGE("a rank of the rehearsal did not start")
        for process in self._processes:
            reader = threading.Thread(target=self._read, args=(process,), daemon=True)
            reader.start()
            self._readers.append(reader)
            _say(process, "\n")

    def _read(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            seconds, _, outcome = line.rstrip("\n").partition(" ")
            with self._lock:
                self.tally.add(outcome, float(seconds))

    def wait(self, seconds: float, look: Callable[[], None], *, every: float) -> None:
        """Until every rank is done, ``look`` called ``every`` so many seconds.

        Raises ``UsageError`` where they outlast ``seconds`` and the patience of their last calls.
        """
        until = time.monotonic() + seconds + 2 * CLIENT_SECONDS
        while any(reader.is_alive() for reader in self._readers):
            if time.monotonic() > until:
                raise errors.USAGE("the ranks of the rehearsal did not end: is this host busy?")
            look()
            time.sleep(every)
        for process in self._processes:
            if process.wait() != 0:
                raise errors.USAGE("a rank of the rehearsal broke off; its error is above")


def _say(process: subprocess.Popen[str], line: str) -> None:
    if process.stdin is None:
        raise errors.INTERNAL_ERROR("a rank has no standard input")
    try:
        process.stdin.write(line)
        process.stdin.flush()
    except BrokenPipeError:
        raise errors.USAGE("a rank of the rehearsal ended before it began") from None

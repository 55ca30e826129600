"""The processes of a load test: a scratch sidecar and the ranks that call it; all ended at the end.

Standard streams are pipes. Both URLs stay in this process and on those pipes. Apart from the
command so that it knows no terminal.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

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
_LOOK_SECONDS = 0.5
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
    value["server"] |= {"port": 0, "probe_host": None, "probe_port": None}
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


@contextmanager
def scratch_sidecar(config: Path, run: Path) -> Iterator[Endpoints]:
    """A ready sidecar with its ledger in ``run``; stopped at the end.

    Waits as long as verifying the index takes.

    Raises:
        errors.UsageError: it does not start; the message holds the sidecar's own sentence.
    """
    log: deque[str] = deque(maxlen=_LOG_LINES)
    with subprocess.Popen(  # noqa: S603 - this very program, with paths of our own
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
    ) as process:
        reader = threading.Thread(target=lambda: log.extend(process.stdout or ()), daemon=True)
        reader.start()
        try:
            while not (run / "endpoints.json").exists():
                if process.poll() is not None:
                    reader.join()
                    words = " ".join(line.strip() for line in log) or "it printed nothing"
                    raise errors.USAGE(
                        "the scratch sidecar did not start: "
                        + words.removeprefix("smartsearch-sidecar: ")
                    )
                time.sleep(_POLL_SECONDS)
            yield read_endpoints(run / "endpoints.json")
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(_STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()  # no process stays behind
            reader.join()


# --- the ranks ------------------------------------------------------------------------------------


def play(workloads: list[Workload], stats: CallStats, look: Callable[[float], None]) -> None:
    """Runs each workload in a process of its own; all begin together, and no process stays behind.

    Args:
        workloads: one a rank; all have the same ``seconds``.
        stats: grows while the ranks call.
        look: called again and again while they call, with the seconds since they began.

    Raises:
        errors.UsageError: a rank did not start, failed, or needs longer than its ``seconds`` and
            the timeout of its last calls.
    """
    lock = threading.Lock()

    def read(process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            seconds, _, outcome = line.rstrip("\n").partition(" ")
            with lock:
                stats.add(outcome, float(seconds))

    processes: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    try:
        for workload in workloads:
            processes.append(_start_rank())
            print(json.dumps(asdict(workload)), file=processes[-1].stdin, flush=True)
        for process in processes:
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise errors.USAGE("a client process of the load test did not start")
        for process in processes:
            readers.append(threading.Thread(target=read, args=(process,), daemon=True))
            readers[-1].start()
            print(file=process.stdin, flush=True)
        _wait(readers, workloads[0].seconds, look)
        if any(process.wait() for process in processes):
            raise errors.USAGE("a client process of the load test failed: see its error above")
    except BrokenPipeError:
        raise errors.USAGE("a client process of the load test ended before it began") from None
    finally:
        for process in processes:
            process.kill()
        for reader in readers:
            reader.join()
        for process in processes:
            with process:  # closes its pipes and waits for it
                pass


def _start_rank() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "smartsearch_sidecar.load_test.client_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_environ(),
        text=True,
        bufsize=1,
        start_new_session=True,
    )


def _wait(readers: list[threading.Thread], seconds: float, look: Callable[[float], None]) -> None:
    began = time.monotonic()
    while any(reader.is_alive() for reader in readers):
        took = time.monotonic() - began
        if took > seconds + 2 * CLIENT_SECONDS:
            raise errors.USAGE(
                "the client processes of the load test did not end: is this host busy?"
            )
        look(took)
        time.sleep(_LOOK_SECONDS)

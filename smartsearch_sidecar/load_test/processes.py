"""A load test: a scratch sidecar, the ranks that call it, and what their calls say of the node.

All processes are ended at the end. Standard streams are pipes. Both URLs stay in this process and
on those pipes. Apart from the command so that it knows no terminal.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import tomli_w

from smartsearch_sidecar import errors
from smartsearch_sidecar.client import Endpoints, read_endpoints
from smartsearch_sidecar.config import Config
from smartsearch_sidecar.config.loading import ENV_PREFIX
from smartsearch_sidecar.load_test.client_worker import (
    ANSWERED,
    CLIENT_SECONDS,
    DECLINED,
    THREADS_PER_RANK,
    Workload,
)

MARGIN: Final = 0.75
"""Share of the deadline that the slowest call of a load test may take: a run is a thousand times
longer, and meets slower calls."""
SCALING: Final = 0.6
"""Measured rate divided by the rate of searches that do not slow each other. Above it, more slots
help; below it, cores or the retriever are the limit, and slots add neither."""

BUCKETS_MS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
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

    Waits as long as verifying the index takes. Raises ``UsageError`` with the sidecar's own
    sentence where it does not start.
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


@dataclass(slots=True)
class CallStats:
    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    def add(self, outcome: str, seconds: float) -> None:
        self.outcomes[outcome] += 1
        self.seconds.append(seconds)

    @property
    def calls(self) -> int:
        return len(self.seconds)

    @property
    def usable(self) -> int:
        """How many calls gave an answer that a rollout can use."""
        return self.outcomes[ANSWERED] + self.outcomes[DECLINED]

    @property
    def failures(self) -> dict[str, int]:
        """Calls of every other outcome, the most frequent outcome first."""
        return {
            outcome: count
            for outcome, count in self.outcomes.most_common()
            if outcome not in (ANSWERED, DECLINED)
        }

    def percentile(self, share: float) -> float:
        """Seconds within which ``share`` of the calls ended; 0 without calls."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

    def percentiles(self) -> dict[str, float]:
        """Milliseconds within which half of the calls ended, nine of ten, 99 %, and all."""
        shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "slowest": 1.0}
        return {name: self.percentile(share) * 1000 for name, share in shares.items()}

    def histogram(self) -> list[tuple[str, int]]:
        """Calls per bucket, from the first that has some to the last."""
        names = [f"under {bound} ms" for bound in BUCKETS_MS] + ["longer"]
        counts = Counter(bisect_right(BUCKETS_MS, seconds * 1000) for seconds in self.seconds)
        used = range(min(counts), max(counts) + 1) if counts else ()
        return [(names[i], counts[i]) for i in used]


# --- the ranks ------------------------------------------------------------------------------------


def play(workloads: list[Workload], stats: CallStats, look: Callable[[float], None]) -> None:
    """Runs each workload in a process of its own; all begin together, and no process stays behind.

    ``stats`` grows, and ``look`` is called again and again with the seconds since the ranks began.
    Raises ``UsageError`` where a rank did not start, failed, or needs longer than its ``seconds``
    (the same for all) and the timeout of its last calls.
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


# --- the result: no I/O, no clock -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadTestResult:
    """A load test that ended.

    ``unloaded_seconds`` is the median of searches one at a time, connection included; ``state`` is
    what ``/health`` says at the end, and ``cause`` the code and detail of a failure.
    """

    ranks: int
    took_seconds: float
    unloaded_seconds: float
    stats: CallStats
    most_waiting: int
    state: str
    cause: str | None
    cache: dict[str, int]
    journal_bytes: int

    @property
    def calls_at_once(self) -> int:
        return self.ranks * THREADS_PER_RANK

    @property
    def rate(self) -> float:
        return self.stats.calls / self.took_seconds


def reasons(result: LoadTestResult, config: Config) -> list[str]:
    """Why this node would not hold, one sentence each; empty where it would."""
    found = []
    stats = result.stats
    if not stats.usable:
        found.append("no call was answered")
    if stats.failures:
        listed = ", ".join(f"{count:,} {outcome}" for outcome, count in stats.failures.items())
        found.append(f"{sum(stats.failures.values()):,} calls failed: {listed}")
    if result.state != "healthy":
        found.append(f"the sidecar ended {result.state}: {result.cause or 'work did not settle'}")
    deadline = min(config.execute.deadline_seconds, CLIENT_SECONDS)
    slowest = stats.percentile(1.0)
    if not stats.failures and slowest > MARGIN * deadline:
        found.append(
            f"the slowest call took {slowest:.1f} s of the {deadline:g} s there are; a run is "
            "longer and meets slower calls"
        )
    return found


def suggestions(result: LoadTestResult, config: Config) -> list[str]:
    """What to set, a line each: slots, waiting room and deadline."""
    execute, at_once = config.execute, result.calls_at_once
    slots, why = _slots(result, execute.slots)
    room, why_room = execute.waiting_max, f"enough for {at_once}"
    if room < at_once - slots:
        room, why_room = at_once - slots, f"now {room}; {at_once} calls at once"
    slowest = result.stats.percentile(1.0)
    deadline = execute.deadline_seconds
    if deadline >= CLIENT_SECONDS or slowest > MARGIN * deadline:
        deadline = min(CLIENT_SECONDS - 1, max(deadline, math.ceil(slowest / MARGIN)))
    why_deadline = f"slowest call {slowest:.2f} s; the client leaves after {CLIENT_SECONDS:g} s"
    return [
        f"execute.slots = {slots}  # {why}",
        f"execute.waiting_max = {room}  # {why_room}",
        f"execute.deadline_seconds = {deadline:g}  # {why_deadline}",
    ]


def _slots(result: LoadTestResult, slots: int) -> tuple[int, str]:
    if result.stats.failures:
        return slots, "unchanged: with failed calls the speed of searches is not known"
    if result.most_waiting == 0:
        return slots, "no call had to wait for a slot"
    share = result.rate * result.unloaded_seconds / slots
    more = min(result.calls_at_once, slots * 2)
    if share >= SCALING and more > slots:
        return more, (
            f"now {slots}, and up to {result.most_waiting} waited: searches side by side keep "
            f"{share:.0%} of their speed alone, so more slots help"
        )
    return slots, (
        f"up to {result.most_waiting} waited, but searches side by side keep {share:.0%} of their "
        "speed alone: more cores or a faster retriever help, more slots do not"
    )


def as_json(result: LoadTestResult, config: Config) -> dict[str, Any]:
    stats = result.stats
    why = reasons(result, config)
    return {
        "holds": not why,
        "reasons": why,
        "suggestions": suggestions(result, config),
        "ranks": result.ranks,
        "calls_at_once": result.calls_at_once,
        "seconds": result.took_seconds,
        "calls": stats.calls,
        "calls_per_second": result.rate,
        "outcomes": dict(stats.outcomes),
        "declined": stats.outcomes[DECLINED],
        "milliseconds": {"alone": result.unloaded_seconds * 1000, **stats.percentiles()},
        "histogram": dict(stats.histogram()),
        "most_waiting": result.most_waiting,
        "state": result.state,
        "cause": result.cause,
        "cache": result.cache,
        "journal_bytes": result.journal_bytes,
    }

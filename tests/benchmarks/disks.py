"""Scenarios of what lies on disk: a history that grows, its verification, indexes, start-up."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from tests.benchmarks import corpora, load
from tests.benchmarks.processes import Target, free_port, made_up, peer, probe
from tests.benchmarks.results import Case, Goal, Metrics, Scenario
from tests.benchmarks.settings import Settings, Unmeasured
from tests.fakes.process import environment, start

STEPS = (10_000, 100_000, 1_000_000)
QUICK_STEPS = (500, 2_000)
GROWTH_CLIENTS = 8
CACHE_MIB = 8  # full after 2,000 requests, so that what grows afterwards is the history
LAST = 5_000  # requests at the end of a step whose latency is shown
ALLOWED_FACTOR, ALLOWED_BYTES_A_CALL = 1.2, 32
VERIFIED, QUICK_VERIFIED = 60_000, 1_000
LONG_SECONDS = 7_200
LOOK_SECONDS = 0.002


# --- growth ---------------------------------------------------------------------------------------


class History:
    """One run that goes on from case to case; each brings it to a number of requests."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._open = contextlib.ExitStack()
        self._target: Target | None = None
        self._folder = Path()
        self._first: tuple[int, int] | None = None

    def to(self, count: int) -> Metrics:
        """Grows to ``count`` requests; latency of the last of them, then memory at rest."""
        if self._target is None:
            self._folder = self._open.enter_context(self._settings.scratch())
            keys = {"retrieval__cache_mib": CACHE_MIB}
            self._target = self._open.enter_context(made_up(self._folder, 0, **keys))
        target = self._target
        last = min(LAST, count // 4)
        have = int(load.seen_by_ours(target)["recorded"])
        self._ask(target, max(1, count - have - last))
        found = self._ask(target, last)
        target.internal().health(settle_seconds=10)
        resident = target.resident()
        if self._first is None:
            self._first = (count, resident)
        calls, at_first = count - self._first[0], self._first[1]
        allowed = ALLOWED_FACTOR * at_first + ALLOWED_BYTES_A_CALL * calls
        seen = load.seen_by_ours(target)
        journal = sum(path.stat().st_size for path in (self._folder / "run/journal").iterdir())
        return {
            **found,
            "answers": seen["recorded"],
            "latched": seen["latched"],
            "resident_mib": resident / 2**20,
            "resident_share": resident / allowed,
            "journal_mb": journal / 1e6,
            "journal_bytes": journal / seen["recorded"],
        }

    def _ask(self, target: Target, count: int) -> Metrics:
        bodies = corpora.plain_bodies(self._folder)
        return load.wrk(target, bodies, clients=GROWTH_CLIENTS, seconds=LONG_SECONDS, limit=count)

    def close(self) -> None:
        """Ends the run and removes it."""
        self._open.close()


def growth(settings: Settings) -> Scenario:
    """Latency, memory and journal as the history grows."""
    history = History(settings)
    steps = QUICK_STEPS if settings.quick else [one for one in STEPS if one <= settings.growth]
    steps = steps or [settings.growth]
    cases = tuple(Case(f"{step:,} requests", partial(history.to, step)) for step in steps)
    names = [case.name for case in cases]
    return Scenario(
        "growth",
        f"a history that grows: {GROWTH_CLIENTS} clients, instant provider, {CACHE_MIB} MiB cache",
        ("answers", "per_second", "p50_ms", "p99_ms", "resident_mib", "resident_share",
         "journal_mb", "journal_bytes"),
        cases,
        (
            Goal(f"memory at {names[-1]}, of 1.2 x that at {names[0]} + 32 bytes a call",
                 names[-1], "resident_share", most=1.0),
            Goal(f"p99 at {names[-1]}, over that at {names[0]}", names[-1], "p99_ms", names[0]),
        ),
        once=True,
        finish=history.close,
    )  # fmt: skip


# --- verification ---------------------------------------------------------------------------------


class Written:
    """A run written once and verified as often as asked."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._open = contextlib.ExitStack()
        self._folder: Path | None = None

    def verified(self) -> Metrics:
        """One verification in a process of its own."""
        if self._folder is None:
            self._folder = self._open.enter_context(self._settings.scratch())
            count = QUICK_VERIFIED if self._settings.quick else VERIFIED
            bodies = corpora.plain_bodies(self._folder)
            with made_up(self._folder, 0) as target:
                load.wrk(target, bodies, clients=64, seconds=LONG_SECONDS, limit=count)
        return probe(self._folder, "verify", str(self._folder / "run"))

    def close(self) -> None:
        """Removes the run."""
        self._open.close()


def verify(settings: Settings) -> Scenario:
    """Every sum, the chain, the counts."""
    written = Written(settings)
    name = "ledger verify"
    return Scenario(
        "verify",
        "ledger verify, a closed run",
        ("mb_per_second", "seconds", "journal_mb", "peak_mib"),
        (Case(name, written.verified),),
        (Goal("ledger verify: MB/s", name, "mb_per_second", least=150),),
        finish=written.close,
    )


# --- index build ----------------------------------------------------------------------------------


def build(settings: Settings) -> Scenario:
    """By the command, in a process of its own, each into a new folder."""
    small, large = settings.passages // 5, settings.passages
    digests: dict[str, set[str]] = {}
    cases = tuple(
        Case(f"{count:,} passages", partial(_build, settings, count, digests))
        for count in (small, large)
    )
    first, last = cases[0].name, cases[-1].name
    return Scenario(
        "build",
        "index build, synthetic corpus, reading and hashing included",
        ("passages_per_second", "seconds", "peak_mib", "index_mib", "same_index"),
        cases,
        (
            Goal(f"index build, {last}: passages/s", last, "passages_per_second", least=15_000),
            Goal(f"index build: peak memory, {last} over {first}", last, "peak_mib", first),
            Goal(f"index build, {last}: the same index every time", last, "same_index", least=1),
        ),
    )


def _build(settings: Settings, count: int, digests: dict[str, set[str]]) -> Metrics:
    corpus = corpora.synthetic_corpus(count)
    with settings.scratch() as folder:
        out = folder / "index"
        command = [sys.executable, "-m", "smartsearch_sidecar", "index", "build"]
        process = subprocess.Popen(
            [*command, str(corpus), str(out)],
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise Unmeasured(f"the build ended with exit code {process.returncode}")
        manifest = corpora.manifest(out)
        digests.setdefault(str(count), set()).add(manifest["index_sha256"])
        seconds = float(manifest["built"]["seconds"])
        return {
            "passages_per_second": manifest["passages"] / seconds,
            "seconds": seconds,
            "peak_mib": used.ru_maxrss / 1024,
            "index_mib": sum(file["bytes"] for file in manifest["files"].values()) / 2**20,
            "same_index": float(len(digests[str(count)]) == 1),
        }


# --- start-up -------------------------------------------------------------------------------------


def startup(settings: Settings) -> Scenario:
    """From the command to the first ``200`` of ``/readyz``."""
    small, large = corpora.vital_index(), corpora.synthetic_index(settings.passages)
    names = (f"ours, {settings.passages:,} passages", "ours, 10,033 articles")
    return Scenario(
        "start",
        "start-up, the index verified in full, until /readyz says 200",
        ("seconds", "resident_mib"),
        (
            Case(names[1], partial(_start, settings, small)),
            Case(names[0], partial(_start, settings, large)),
            Case("reference, no index", partial(_start_reference, settings)),
        ),
        (Goal("start-up, large index over small", names[0], "seconds", names[1]),),
    )


def _start(settings: Settings, index: Path) -> Metrics:
    with settings.scratch() as folder:
        keys = {"retrieval__provider": "bm25", "retrieval__bm25__index": str(index)}
        port = free_port()
        began = time.monotonic()
        daemon = start(folder, server__port=port, fresh=True, **keys)
        try:
            while not _ready(port):
                if daemon.process.poll() is not None or time.monotonic() - began > 300:
                    raise Unmeasured(f"not ready: {daemon.log.read_text()[-200:]}")
                time.sleep(LOOK_SECONDS)
            took = time.monotonic() - began
            target = Target("", daemon.process.pid, daemon)
            found = {"seconds": took, "resident_mib": target.resident() / 2**20}
            daemon.stop()
            return found
        finally:
            if daemon.process.poll() is None:
                daemon.kill()


def _ready(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _start_reference(settings: Settings) -> Metrics:
    with settings.scratch() as folder:
        began = time.monotonic()
        with peer(folder, "reference", "0") as target:
            took = time.monotonic() - began
            return {"seconds": took, "resident_mib": target.resident() / 2**20}

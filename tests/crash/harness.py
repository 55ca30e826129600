"""Daemons to be killed, the load they are killed under, and what must hold afterwards."""

from __future__ import annotations

import json
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smartsearch_sidecar import errors
from smartsearch_sidecar.client import Client, Endpoints, read_endpoints
from smartsearch_sidecar.ledger.file import CLAIM, JOURNAL, LATCH
from smartsearch_sidecar.ledger.reader import History, RunReader, Scan
from smartsearch_sidecar.ledger.recovery import Ending
from smartsearch_sidecar.ledger.verify import Verification, verify
from tests.fakes.forked import Forked
from tests.fakes.process import ROOT, command
from tests.fakes.served import ENVIRONMENT
from tests.fakes.until import wait_until

PATIENCE = 30.0  # seconds until a wait is a finding
KILLED = -signal.SIGKILL

Told = tuple[str, str]
"""A query and the text its 200 answer gave."""


class Launcher:
    """Starts daemons that die where they are told to (``dying.py``)."""

    def __init__(self) -> None:
        self._daemons: list[Daemon] = []

    def start(
        self,
        directory: Path,
        *,
        point: str | None = None,
        nth: int = 1,
        resume: bool = False,
        passage_bytes: int = 100,
        **keys: Any,
    ) -> Daemon:
        """A daemon on ``directory``, which dies the ``nth`` time it reaches ``point``."""
        log = directory.with_suffix(".log")
        order = {
            "directory": str(directory),
            "point": point,
            "nth": nth,
            "resume": resume,
            "passage_bytes": passage_bytes,
            "keys": keys,
        }
        process = command("tests.crash.dying", json.dumps(order), folder=ROOT, out=log)
        daemon = Daemon(process, directory, log)
        self._daemons.append(daemon)
        return daemon

    def close(self) -> None:
        """Ends what a failed test has left running."""
        for daemon in self._daemons:
            daemon.process.kill()


@dataclass
class Daemon:
    """One served run in a process of its own."""

    process: Forked
    directory: Path
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def endpoints(self) -> Endpoints | None:
        """Its endpoints once it is ready; ``None`` where it has died before."""
        path = self.directory / "endpoints.json"

        def written() -> bool:
            try:
                return bool(json.loads(path.read_bytes())["pid"] == self.pid)
            except FileNotFoundError:
                return False  # not yet

        wait_until(
            lambda: written() or self.process.poll() is not None,
            seconds=PATIENCE,
            found=self.log.read_text,
        )
        return read_endpoints(path) if written() else None

    def ready(self) -> Endpoints:
        """Its endpoints; fails with its log where it ended before it was ready."""
        found = self.endpoints()
        assert found is not None, self.log.read_text()
        return found

    def internal(self) -> Client:
        """A client of its trainer's routes."""
        return Client(self.ready().internal_url)

    def kill(self) -> int:
        """``kill -9``, and the exit code."""
        self.process.kill()
        return self.wait()

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """The exit code once it has ended by itself."""
        return self.process.wait(PATIENCE)


@dataclass
class Load:
    """Client threads that each ask until an answer is not 200, and keep the results they got.

    Every second query is a repeat, so that cached answers are among them.
    """

    told: list[Told] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    stopping: bool = False
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self, endpoints: Endpoints, threads: int, name: str = "q") -> None:
        for number in range(threads):
            thread = threading.Thread(target=self._ask, args=(endpoints, f"{name}{number}"))
            thread.start()
            self._threads.append(thread)

    def _ask(self, endpoints: Endpoints, name: str) -> None:
        client = Client(endpoints.sandbox_url)
        count = 0
        while not self.stopping:
            query = f"{name} {count // 2}"
            count += 1
            try:
                answer = client.execute(query, ENVIRONMENT)
            except errors.Unreachable:
                self.refused["unreachable"] += 1
                return
            if answer.status != 200:
                self.refused[answer.value["error"]["code"]] += 1
                return
            self.told.append((query, answer.value["result"]))

    def until(self, condition: Callable[[Load], bool]) -> None:
        """Returns once ``condition`` holds, or every thread has ended."""
        wait_until(
            lambda: condition(self) or not any(thread.is_alive() for thread in self._threads),
            seconds=PATIENCE,
            pause=0.0005,
        )

    def join(self) -> list[Told]:
        """Everything that was told, once all threads have ended."""
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a client still waits for its answer"
        return self.told


@contextmanager
def load(endpoints: Endpoints, threads: int = 4) -> Iterator[Load]:
    """A load that has ended when the block has, however it ended."""
    running = Load()
    running.start(endpoints, threads)
    try:
        yield running
    finally:
        running.stopping = True
        running.join()


# --- what must hold -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Journal:
    """What a directory's journal says, read with documents."""

    kinds: tuple[str, ...]
    answers: Counter[Told]
    unsettled: frozenset[int]
    cause: str | None

    @classmethod
    def of(cls, directory: Path) -> Journal:
        """Reads every whole record; what is torn at the end is no record."""
        reader = RunReader(directory)
        kinds: list[str] = []
        queries: dict[int, str] = {}
        answers: Counter[Told] = Counter()
        settled: set[int] = set()
        cause = None
        for line in Scan(reader, History(reader.read(CLAIM), documents=True)):
            kind, number, data = line.record.kind, line.record.number, line.data
            kinds.append(kind)
            if kind == "retrieval.requested" and number is not None:
                queries[number] = data["call"].split("'")[1]
                assert data["query"] == queries[number]
            elif kind == "retrieval.answered" and number is not None:
                text = "\n\n".join(document["contents"] for document in data["documents"])
                answers[queries[number], text] += 1
                settled.add(number)
            elif kind == "retrieval.failed" and number is not None:
                settled.add(number)
            elif kind == "latch.closed":
                cause = data["cause"]
        return cls(tuple(kinds), answers, frozenset(queries.keys() - settled), cause)


def expected_cause(directory: Path) -> str | None:
    """Why a restart may not be healthy, worked out without the package's own table."""
    journal, latch = Journal.of(directory), directory / LATCH
    if journal.cause is not None:
        return journal.cause
    if latch.exists():
        try:
            return str(json.loads(latch.read_bytes())["cause"])
        except ValueError:
            return "ledger_failed"
    if not journal.kinds:
        return None
    if journal.unsettled:
        return "unresolved_after_restart"
    return None if journal.kinds[-1] == "run.closed" else "unclean_restart"


def check_history(directory: Path, told: list[Told]) -> Verification:
    """Verify passes (or says torn), and everything a client was told is in the journal."""
    (directory / JOURNAL).mkdir(mode=0o700, exist_ok=True)  # a run that died before it had one
    found = verify(directory, documents=True)
    if found.seq:
        assert found.problem is None or found.ending is Ending.TORN, found.problem
    missing = Counter(told) - Journal.of(directory).answers
    assert not missing, f"told and not in the journal: {sorted({query for query, _ in missing})}"
    return found


def check_restart(launcher: Launcher, directory: Path, told: list[Told], **keys: Any) -> str | None:
    """Checks the history, resumes it in a new process, and checks that too.

    Returns the latch cause the resumed run gives, ``None`` where it is healthy. Either must be what
    the journal asks for.
    """
    before = check_history(directory, told)
    expected = expected_cause(directory)
    daemon = launcher.start(directory, resume=True, **keys)
    health = daemon.internal().health()
    cause = health.value["cause"]
    assert health.value["state"] == ("healthy" if expected is None else "failed")
    assert health.status == (200 if expected is None else 503)
    assert (cause and cause["cause"]) == expected
    refused = Client(daemon.ready().sandbox_url).execute("after the restart", ENVIRONMENT)
    assert refused.status == (200 if expected is None else 502)
    assert daemon.stop() == (0 if expected is None else 4)
    after = check_history(directory, told)
    assert after.problem is None, after.problem
    assert after.seq > before.seq
    assert (directory / LATCH).exists() == (expected is not None)
    kept = sum(path.stat().st_size for path in directory.glob("torn-*"))
    assert kept >= before.torn_bytes
    return expected

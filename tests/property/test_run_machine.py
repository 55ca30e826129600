"""A run driven by chance: requests, providers, clients, disks and restarts in any order.

State, recorder, writer and latch are the real ones, behind the real service, on real files. Time is
the machine's: the loop's clock moves where a rule says so. The ledger's thread runs for real, but
after every step it has either nothing to do or is held at a point of the disk, so a step has one
outcome. After each step the invariants of the package's README are held against what is on the disk
(by number: 1 to 9, 12 and 13 below; 10 and 11 are the edge's, 14 the fault matrix's).

The seed is in the test's name, and Hypothesis prints the steps of a failing run.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from smartsearch_sidecar import errors
from smartsearch_sidecar.contract.execute import ExecuteRules
from smartsearch_sidecar.gate.checkpoints import CheckpointRequest, take_checkpoint
from smartsearch_sidecar.gate.health import check
from smartsearch_sidecar.ledger import start
from smartsearch_sidecar.ledger.disk import Disk
from smartsearch_sidecar.ledger.file import CLAIM, JOURNAL, LATCH, RunFiles
from smartsearch_sidecar.ledger.reader import History, RunReader, Scan
from smartsearch_sidecar.ledger.recovery import reopen
from smartsearch_sidecar.ledger.start import begin, take_directory
from smartsearch_sidecar.retrieval.guard import CachedSearch, Guard
from smartsearch_sidecar.run.line import Line
from smartsearch_sidecar.run.record import Record, RunClosed
from smartsearch_sidecar.run.slots import Slots
from smartsearch_sidecar.search.service import Service, ServicePolicy
from tests.crash.harness import expected_cause
from tests.fakes.provider import CORPUS_SHA256, INDEX_SHA256, documents_for
from tests.fakes.raised import raises
from tests.fakes.served import ENVIRONMENT, configured, native_body

SEEDS = range(4)
SOAK_SEEDS = range(100, 140)

SLOTS, ROOM, DEADLINE_SECONDS, MAX_CALLS = 2, 4, 9.0, 14
CALM_TURNS = 25  # of the loop; a search's end takes about ten to reach the ledger's thread
SEGMENT_BYTES = 4096
QUERIES = ("Ada", "Bob", "Cleo", "", "</search>")
HELD_AT = frozenset({"write:before", "sync:before", "sync:after", "latch.json:before"})
REFUSALS = {
    *("busy", "deadline", "invalid_request", "ledger_failed", "quota_exhausted"),
    *("response_undelivered", "retrieval_failed"),
}
PRIMITIVES = ("open", "write", "half write", "sync", "sync_directory")
CONFIG = configured(Path("never-made"), execute__max_calls=MAX_CALLS, ledger__segment_mib=1)

T = TypeVar("T")

pytestmark = pytest.mark.may_block(reason="runs are begun without a daemon, which is excused")


class Clockwork(asyncio.SelectorEventLoop):
    """An event loop whose time stands still until it is moved."""

    now = 0.0

    def time(self) -> float:
        return self.now


class MachineDisk(Disk):
    """Holds the ledger's thread where told to, fails where told to, and knows what is synced."""

    def __init__(self) -> None:
        self.blocked = False
        self.fails: str | None = None
        self.lasting = False
        self.failed = False
        self.calls_after_failure: Counter[str] = Counter()
        self.synced: dict[Path, int] = {}
        self._let = threading.Event()
        self._let.set()
        self._paths: dict[int, Path] = {}

    @property
    def held(self) -> bool:
        return not self._let.is_set()

    def hold(self) -> None:
        self._let.clear()

    def release(self) -> None:
        self.blocked = False
        self._let.set()

    def point(self, name: str) -> None:
        if name in HELD_AT and self.held:
            self.blocked = True
            self._let.wait(30)

    def _call(self, primitive: str, name: str) -> None:
        if self.failed:
            self.calls_after_failure[f"{primitive} {name}"] += 1
        if primitive == self.fails or (self.failed and self.lasting):
            self._fail()

    def _fail(self) -> None:
        self.failed = True
        self.fails = None
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def open(self, path: Path, flags: int) -> int:
        self._call("open", path.name)
        fd = super().open(path, flags)
        self._paths[fd] = path
        return fd

    def write(self, fd: int, data: bytes) -> None:
        path = self._paths[fd]
        self._call("write", path.name)
        if self.fails == "half write":
            super().write(fd, data[: len(data) // 2])
            self._fail()
        super().write(fd, data)

    def sync(self, fd: int) -> None:
        path = self._paths[fd]
        self._call("sync", path.name)
        super().sync(fd)
        self.synced[path] = os.fstat(fd).st_size

    def sync_directory(self, path: Path) -> None:
        self._call("sync_directory", path.name)
        super().sync_directory(path)


class MachineProvider:
    """Every search waits until the machine decides its outcome."""

    name = "machine"
    remote = False

    def __init__(self) -> None:
        self.searches: list[tuple[str, asyncio.Future[Any]]] = []
        self.edition = 1

    async def identity(self) -> Mapping[str, Any]:
        index = INDEX_SHA256 if self.edition == 1 else str(self.edition % 10) * 64
        return {"corpus_sha256": CORPUS_SHA256, "index_sha256": index}

    async def search(self, query: str, top_n: int) -> Sequence[Mapping[str, Any]]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.searches.append((query, future))
        found: Sequence[Mapping[str, Any]] = await future
        return found

    async def close(self) -> None:
        for _, future in self.searches:
            future.cancel()


@dataclass
class Asked:
    """One request, as the edge would hand it to the service."""

    query: str
    task: asyncio.Task[None] | None = None
    gone: bool = False
    refused: str | None = None


class RunMachine(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Path(tempfile.mkdtemp(prefix="run-machine-"))
        self.loop = Clockwork()
        self.directories = 0
        self.asked: list[Asked] = []
        self.told: list[tuple[int | None, str, bytes]] = []  # number, query, payload
        self.receipts: list[tuple[int, str]] = []  # seq and head of accepted checkpoints
        self.cause: str | None = None
        self.admitted_when_closed: tuple[int, int] | None = None

    # --- the run --------------------------------------------------------------------------------

    @initialize(decline=st.booleans(), latch=st.booleans(), cache=st.booleans())
    def begin_run(self, decline: bool, latch: bool, cache: bool) -> None:
        self.keys = (decline, latch, cache)
        self.open(self.next_directory(), resume=False)
        assert not self.service.run.state.closed

    def next_directory(self) -> Path:
        self.directories += 1
        return self.base / f"run-{self.directories}"

    def open(self, directory: Path, *, resume: bool) -> None:
        """Begins or resumes a run as the daemon does."""
        decline, latch, cache = self.keys
        self.disk, self.provider = MachineDisk(), MachineProvider()
        self.files = RunFiles(directory, disk=self.disk)
        found = take_directory(self.files, resume=resume, trainer_stopped=resume)
        self.disk.synced.update(self._sizes(synced=False))  # all of it, once it was reopened
        guard = Guard(
            self.provider, top_n=5, retries=1, drop_tagged=True, watch_drift=False
        )  # fmt: skip
        self.loop.run_until_complete(guard.claim_identity())
        facts = {"retrieval": guard.identity, "retrieval_identity_sha256": guard.identity_sha256}
        run = self.loop.run_until_complete(begin(self.files, CONFIG, found, facts))
        self.service = Service(
            run=run,
            slots=Slots(SLOTS, ROOM),
            retrieval=CachedSearch(guard, cache_bytes=2**20 if cache else 0),
            policy=ServicePolicy(
                rules=ExecuteRules(ENVIRONMENT, frozenset()),
                deadline_seconds=DEADLINE_SECONDS,
                decline=decline,
                latch_undelivered=latch,
                emptied_share_max=1.0,
            ),
        )
        self.cause = None
        self.admitted_when_closed = None
        self.lost_before = self.service.run.state.lost
        self.settle()

    def settle(self) -> None:
        """Turns the loop until every task waits for time, a decision, or the disk."""
        self.loop.run_until_complete(self._settle())

    async def _settle(self) -> None:
        calm = 0
        while calm < CALM_TURNS:
            await asyncio.sleep(0)
            calm += 1
            if self._thread_at_work():
                calm = 0
                time.sleep(0.0001)  # noqa: ASYNC251 - the thread's turn, not the loop's

    def _thread_at_work(self) -> bool:
        writer = self.service.run.writer
        ending = writer.failure is not None and writer._task is not None and not writer._task.done()
        at_work = writer.busy_since is not None or writer.looking > 0 or writer._reading.locked()
        return (at_work or ending) and not self.disk.blocked

    def do(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts it, settles, and returns its task, done or not."""
        task = self.loop.create_task(coroutine)
        self.settle()
        return task

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T | errors.LedgerFailed:
        """The result of what does not wait for a client or a provider."""
        task = self.do(coroutine)
        assert task.done()
        try:
            return task.result()
        except errors.LedgerFailed as failure:
            return failure

    @property
    def live(self) -> list[Asked]:
        """Requests without an answer."""
        return [one for one in self.asked if one.task is not None and not one.task.done()]

    # --- clients --------------------------------------------------------------------------------

    @rule(queries=st.lists(st.sampled_from(QUERIES), min_size=1, max_size=4))
    def ask(self, queries: list[str]) -> None:
        for query in queries:
            self._ask(query, json.dumps(native_body(query)).encode())
        self.settle()

    @rule(body=st.sampled_from([b"{", b'{"env":"","call":""}']))
    @precondition(lambda self: len(self.asked) > 20)
    def ask_wrongly(self, body: bytes) -> None:
        self._ask("", body)
        self.settle()

    def _ask(self, query: str, body: bytes) -> None:
        one = Asked(query)
        self.asked.append(one)
        one.task = self.loop.create_task(self._request(one, body))

    async def _request(self, one: Asked, body: bytes) -> None:
        """What the edge does around the service."""
        service = self.service
        try:
            answer = await service.execute(body, began=self.loop.time(), gone=lambda: one.gone)
        except errors.SidecarError as exc:
            one.refused = exc.code
            return
        assert not service.run.state.closed, "answered after the latch was closed"
        if one.gone:
            service.undelivered(answer.number, "before_write")
            one.refused = "response_undelivered"
        else:
            self.told.append((answer.number, one.query, answer.payload))

    @rule(which=st.integers(0, 9))
    @precondition(lambda self: self.live)
    def leave(self, which: int) -> None:
        self.live[which % len(self.live)].gone = True

    @rule(which=st.integers(0, 9))
    @precondition(lambda self: self.live and len(self.asked) > 5)
    def cancel(self, which: int) -> None:
        task = self.live[which % len(self.live)].task
        assert task is not None
        task.cancel()
        self.settle()

    # --- provider -------------------------------------------------------------------------------

    def _take_search(self, which: int) -> tuple[str, asyncio.Future[Any]] | None:
        searches = self.provider.searches
        return searches.pop(which % len(searches)) if searches else None

    @rule(which=st.integers(0, 9))
    @precondition(lambda self: self.provider.searches)
    def answer(self, which: int) -> None:
        taken = self._take_search(which)
        if taken is not None and not taken[1].done():
            taken[1].set_result(documents_for(taken[0]))
        self.settle()

    @rule()
    @precondition(lambda self: self.provider.searches)
    def answer_all(self) -> None:
        while self.provider.searches:
            self.answer(0)

    @rule(
        which=st.integers(0, 9),
        fault=st.sampled_from(["crash", "transport", "cancelled", "documents"]),
    )
    @precondition(lambda self: self.provider.searches and len(self.asked) > 5)
    def fail(self, which: int, fault: str) -> None:
        taken = self._take_search(which)
        if taken is not None and not taken[1].done():
            future = taken[1]
            if fault == "documents":
                future.set_result([{"id": ""}])
            elif fault == "cancelled":
                future.cancel()
            else:
                kind = errors.PROVIDER_TRANSPORT if fault == "transport" else RuntimeError
                future.set_exception(kind("boom"))
        self.settle()

    @rule()
    @precondition(lambda self: len(self.asked) > 20)
    def change_identity(self) -> None:
        self.provider.edition += 1

    # --- time, disk, operator -------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.001, 0.001, 0.01, 0.5, 4.0]))
    def pass_time(self, seconds: float) -> None:
        self.loop.now += seconds
        self.settle()

    @rule()
    @precondition(lambda self: not self.disk.held)
    def hold_disk(self) -> None:
        self.disk.hold()

    @rule()
    @precondition(lambda self: self.disk.held)
    def release_disk(self) -> None:
        self.disk.release()
        self.settle()

    @rule(primitive=st.sampled_from(PRIMITIVES), lasting=st.booleans())
    @precondition(lambda self: not self.disk.fails and not self.disk.failed and len(self.asked) > 3)
    def break_disk(self, primitive: str, lasting: bool) -> None:
        self.disk.fails, self.disk.lasting = primitive, lasting

    @rule()
    @precondition(lambda self: len(self.asked) > 8)
    def close_by_hand(self) -> None:
        async def close() -> None:
            self.service.run.recorder.close_latch("operator", detail="by hand")

        self.run(close())

    @rule()
    @precondition(lambda self: not self.disk.held)
    def ask_for_health(self) -> None:
        word = self.run(check(self.service, 0.0))
        state = self.service.run.state
        assert word == "failed" if state.closed else word in ("healthy", "pending")
        if word == "healthy":
            assert state.settled
            assert self.service.slots.idle
            assert self.service.run.writer.idle
            assert not self.live

    @rule(step=st.integers(0, 2))
    @precondition(lambda self: not self.disk.held)
    def save_checkpoint(self, step: int) -> None:
        settled = self.service.run.state.settled and not self.live
        wanted = CheckpointRequest(step, None, None, allow_idle=True)
        taken = self.run(take_checkpoint(self.service, wanted, settle_seconds=0.0))
        if not isinstance(taken, errors.LedgerFailed):
            accepted, receipt = taken
            if accepted:
                assert settled
                assert receipt["step"] == step
                self.receipts.append((receipt["seq"], receipt["head"]))

    # --- ends and restarts ----------------------------------------------------------------------

    def _end(self) -> int:
        """An orderly end as the daemon's; the exit code."""
        self.disk.release()
        service = self.service
        for one in self.live:
            assert one.task is not None
            one.task.cancel()
        self.settle()
        self.loop.run_until_complete(service.retrieval.close())
        end = RunClosed(service.run.state.closed, service.run.state.usage())
        self.run(self._recorded(end))
        self.loop.run_until_complete(service.run.writer.close())
        self.files.close()
        return 4 if service.run.state.closed else 0

    async def _recorded(self, record: Record) -> None:
        await self.service.run.recorder.post_for_receipt(record)

    @rule()
    @precondition(lambda self: len(self.asked) > 5)
    def end_and_resume(self) -> None:
        code = self._end()
        state, failure = self.service.run.state, self.service.run.writer.failure
        expected = expected_cause(self.files.directory)
        assert (expected is None) == (code == 0) or failure is not None
        before = state
        self.open(self.files.directory, resume=True)
        self._check_restart(expected)
        if failure is None:
            assert self.service.run.state.attempts == before.attempts
            assert self.service.run.state.cause == before.cause

    @rule(lost=st.none() | st.integers(0, 2**16), seconds=st.sampled_from([0.0, 0.001]))
    @precondition(lambda self: len(self.asked) > 5)
    def kill_and_resume(self, lost: int | None, seconds: float) -> None:
        """``lost`` of None: the process dies; else the machine, and chance keeps unsynced bytes."""
        self.pass_time(seconds)
        image = self.next_directory()
        shutil.copytree(self.files.directory, image)
        if lost is not None:
            rng = random.Random(lost)
            for path, synced in self._sizes().items():
                left = image / path.relative_to(self.files.directory)
                size = left.stat().st_size
                os.truncate(left, rng.randint(min(synced, size), size))
        self._end()
        expected = expected_cause(image)
        self.open(image, resume=True)
        self._check_restart(expected)
        assert expected is not None

    @rule()
    @precondition(lambda self: self.service.run.state.closed)
    def begin_another(self) -> None:
        """A failed run is over; how to go on is a new directory."""
        self._end()
        self.told.clear()
        self.receipts.clear()
        self.asked.clear()
        self.open(self.next_directory(), resume=False)
        assert not self.service.run.state.closed

    def _sizes(self, *, synced: bool = True) -> dict[Path, int]:
        """Every file that the ledger has written, and how much of it is synced, or there at all."""
        journal = sorted((self.files.directory / JOURNAL).iterdir())
        latch = self.files.directory / LATCH
        paths = [*journal, *([latch] if latch.exists() else [])]
        if synced:
            return {path: self.disk.synced.get(path, 0) for path in paths}
        return {path: path.stat().st_size for path in paths}

    def _check_restart(self, expected: str | None) -> None:
        """4: no restart opens the latch; 6: numbers go on."""
        state = self.service.run.state
        assert (state.cause and state.cause.cause) == expected
        assert state.settled or state.closed
        self.asked.clear()

    @rule(at=st.integers(0, 2**16), bit=st.integers(0, 7), cut=st.booleans())
    @precondition(lambda self: self.service.run.writer.idle and not self.disk.held)
    def damage_a_copy(self, at: int, bit: int, cut: bool) -> None:
        """12: a cut or flipped byte is refused or trimmed as torn, never another history."""
        copy = self.base / "damaged"
        shutil.copytree(self.files.directory, copy)
        segments = sorted((copy / JOURNAL).iterdir())
        place = at % sum(path.stat().st_size for path in segments)
        for path in segments:
            raw = bytearray(path.read_bytes())
            if place >= len(raw):
                place -= len(raw)
                continue
            if cut:
                del raw[place:]
            else:
                raw[place] ^= 1 << bit
            path.write_bytes(raw)
            break
        whole = self.lines()
        files = RunFiles(copy)
        try:
            files.resume()
            found = reopen(files)
        except errors.LedgerCorrupt:
            pass
        else:
            left = read_lines(copy)
            assert left == whole[: len(left)]
            assert found.seq == len(left)
        finally:
            files.close()
            shutil.rmtree(copy)

    # --- what holds after every step ------------------------------------------------------------

    def lines(self) -> list[Line]:
        """Every whole record of the journal, as it lies on the disk."""
        return read_lines(self.files.directory)

    def durable_seq(self) -> int:
        """How many records are on the medium."""
        sizes = [(path, size) for path, size in self._sizes().items() if path.name != LATCH]
        return sum(path.read_bytes()[:size].count(b"\n") for path, size in sizes)

    @invariant()
    def one_answers_are_on_the_medium(self) -> None:
        """1: every answer and receipt that was sent is a durable record."""
        durable = self.lines()[: self.durable_seq()]
        answered = {
            line.record.number: line for line in durable if line.record.kind == "retrieval.answered"
        }
        for number, query, payload in self.told:
            if number is not None:
                texts = [d["contents"] for d in answered[number].data["documents"]]
                assert json.loads(payload)["result"] == "\n\n".join(texts)
                assert texts[0].endswith(f"about {query}.")
        declined = sum(line.record.kind == "retrieval.declined" for line in durable)
        assert sum(number is None for number, _, _ in self.told) <= declined
        sums = {line.seq: line.sum for line in durable}
        assert all(sums[seq] == head for seq, head in self.receipts)

    @invariant()
    def two_and_three_state_is_the_fold(self) -> None:
        """2, 3, 6: the journal folds, in its order, to the state of the running process."""
        history = History(RunReader(self.files.directory).read(CLAIM))
        for line in Scan(RunReader(self.files.directory), history):
            assert line.seq == history.seq
        writer, state = self.service.run.writer, self.service.run.state
        if writer.failure is None and writer.idle:
            assert history.state == state
            assert (history.seq, history.head) == (writer.seq, writer.head)
        assert history.state.attempts <= state.attempts or writer.failure is not None

    @invariant()
    def every_refusal_has_its_name(self) -> None:
        """Whatever happens, a request ends in an answer or in a refusal of the edge's table."""
        for one in self.asked:
            if one.task is not None and one.task.done() and not one.task.cancelled():
                assert one.task.exception() is None
                assert one.refused is None or one.refused in REFUSALS

    @invariant()
    def four_and_five_the_latch_stays(self) -> None:
        """4, 5: the first cause stays, and nothing is admitted after it."""
        state = self.service.run.state
        admitted = (state.attempts, state.declined)
        if state.cause is None:
            assert self.cause is None
            return
        if self.cause is None:
            self.cause, self.admitted_when_closed = state.cause.cause, admitted
        assert state.closed
        assert state.cause.cause == self.cause
        assert admitted == self.admitted_when_closed
        with raises(errors.LATCH_CLOSED):
            state.admit_search()

    @invariant()
    def seven_and_eight_nothing_is_held(self) -> None:
        """7, 8: without requests nothing is unsettled and every slot is free."""
        slots = self.service.slots
        assert 0 <= slots.in_service <= SLOTS
        assert 0 <= slots.waiting <= ROOM
        state = self.service.run.state
        # What an earlier process left unsettled stays so, in a run that is over.
        inherited = state.restarts > 0 and state.closed
        assert inherited or len(state.searching) <= slots.in_service
        if not self.live:
            assert slots.idle
            assert inherited or state.settled

    @invariant()
    def thirteen_no_loss_is_forgotten(self) -> None:
        """13: every client that left without an answer is recorded, and closes the latch or not.

        Once the run is over a request may also end while it waits for its refusal to be recorded.
        """
        state, (_, latch, _) = self.service.run.state, self.keys
        left = sum(
            one.refused == "response_undelivered"
            or (one.task is not None and one.task.done() and one.task.cancelled())
            for one in self.asked
        )
        recorded = state.lost - self.lost_before
        assert recorded == left if not state.closed else recorded <= left
        assert state.closed or not (latch and left)

    @invariant()
    def nine_a_failed_disk_is_left_alone(self) -> None:
        """9: after a failed write or sync the journal is not touched, and the run is over."""
        failure = self.service.run.writer.failure
        assert self.disk.failed == (failure is not None)
        if failure is not None:
            assert self.service.run.state.closed
            touched = {call for call in self.disk.calls_after_failure if ".jsonl" in call}
            assert not touched
            assert self.disk.calls_after_failure[f"open {LATCH}"] <= 1

    def teardown(self) -> None:
        if hasattr(self, "service"):
            self._end()
        self.loop.close()
        shutil.rmtree(self.base)


def read_lines(directory: Path) -> list[Line]:
    """Every whole record of a run, with its documents."""
    reader = RunReader(directory)
    return list(Scan(reader, History(reader.read(CLAIM), documents=True)))


def drive(
    seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch, *, runs: int, steps: int
) -> None:
    """So many runs of so many steps, below the folder."""
    print(f"seed {seed}")
    monkeypatch.setattr(start, "MIB", SEGMENT_BYTES)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    run_state_machine_as_test(
        hypothesis.seed(seed)(RunMachine),
        settings=settings(
            max_examples=runs,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_run(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any events in any order, the invariants of a run hold after every step."""
    drive(seed, tmp_path, monkeypatch, runs=6, steps=30)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", SOAK_SEEDS)
def test_many_runs(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, for longer."""
    drive(seed, tmp_path, monkeypatch, runs=150, steps=60)

"""Any sequence of decisions folds alike live and read back, also if a crash cut its end.

A failing example prints how to repeat it: hypothesis keeps the seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.reader import History, RunReader, Scan, Segment
from smartsearch_sidecar.ledger.recovery import Ending, judge, observe
from smartsearch_sidecar.run.json_values import encode_json
from smartsearch_sidecar.run.line import Draft, claim_digest, draft, encode_line
from smartsearch_sidecar.run.record import (
    KINDS,
    Cause,
    CheckpointAccepted,
    LatchClosed,
    NativeCall,
    RetrievalAnswered,
    RetrievalDeclined,
    RetrievalFailed,
    RetrievalRequested,
    RunClaimed,
    RunClosed,
    RunResumed,
    record_of,
)
from smartsearch_sidecar.run.state import RunState
from tests.fakes.journals import AT, claim_bytes

CLAIM = claim_bytes()
HEAD = claim_digest(CLAIM)
MAX_CALLS = 12


def claimed() -> Draft:
    """The first record."""
    return draft(RunClaimed(MAX_CALLS, HEAD))


ASKED = NativeCall("e", "c", "q")
RESUMED = RunResumed(clean=False, ending="clean", torn_bytes=0, set_aside=None, unsettled=())


class Journal:
    """Lines in memory, written as the writer writes them."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.head = HEAD

    def write(self, item: Draft) -> None:
        """Appends a record."""
        self.append(item.record.kind, item.record.number, item.data_json)

    def append(self, kind: str, number: int | None, data_json: bytes) -> None:
        """Appends what need not be one."""
        seq = len(self.lines) + 1
        line, self.head = encode_line(kind, number, data_json, seq=seq, at=AT, prev=self.head)
        self.lines.append(line)


class Held(RunReader):
    """Segments that lie in memory."""

    def __init__(self, parts: list[bytes]) -> None:
        self.parts = parts

    def segments(self) -> tuple[Segment, ...]:
        return tuple(Segment(index, len(part)) for index, part in enumerate(self.parts, 1))

    def chunks(self, segment: Segment, offset: int = 0) -> Iterator[bytes]:
        data = self.parts[segment.index - 1]
        for at in range(offset, len(data), 97):
            yield data[at : at + 97]


def read_back(parts: list[bytes]) -> Scan:
    """Reads segments as a resume does."""
    scan = Scan(Held(parts), History(CLAIM))
    scan.drain()
    return scan


def split(lines: list[bytes], sizes: list[int]) -> list[bytes]:
    """The lines in segments of so many; the last one may be empty."""
    parts, at = [], 0
    for size in sizes:
        if at >= len(lines):
            break
        parts.append(b"".join(lines[at : at + size]))
        at += size
    return [*parts, b"".join(lines[at:])]


# --- any records at all ---------------------------------------------------------------------------

small_numbers = st.none() | st.integers(0, 4)
counts = st.integers(-1, 3)
some_data: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "cache": st.sampled_from(["miss", "hit", "shared"]) | counts,
        "reason": st.sampled_from(["empty", "too_long"]),
        "cause": st.sampled_from(["http_busy", "operator"]),
        "loss": counts | st.text(max_size=1),
        "tries": counts | st.text(max_size=1),
        "number": small_numbers,
        "step": st.integers(0, 3) | st.text(max_size=2),
        "split": st.sampled_from(["train", "validation"]),
        "usage": st.none() | st.dictionaries(st.just("retrieval_attempts"), st.integers(0, 3)),
        "retrieval_attempts": st.integers(0, 3),
        "dropped": st.lists(st.just({"id": "1"}), max_size=2) | st.integers(0, 2),
        "max_calls": st.integers(0, 5),
        "reward": st.lists(counts, max_size=1) | st.dictionaries(st.text("abc"), counts),
    },
)
ACCEPTED = CheckpointAccepted(1, 1, None, None, 1, {}).to_data()
likely = st.sampled_from(
    [
        ("retrieval.requested", 1, {"env": "e", "call": "c"}),
        ("retrieval.requested", 2, {"env": "e", "call": "c"}),
        ("retrieval.answered", 1, {"cache": "miss", "took_us": 1}),
        ("retrieval.answered", 2, {"cache": "hit", "took_us": 1}),
        ("retrieval.failed", 1, {"code": "c", "cause": "c", "detail": "d"}),
        ("retrieval.declined", 1, {"reason": "empty", "env": "e", "call": "c"}),
        ("delivery.lost", 1, {"stage": "s"}),
        ("delivery.lost", None, {"stage": "s", "awaits_repeat": True}),
        ("delivery.repeated", 1, {"loss": 1}),
        ("latch.closed", None, {"cause": "operator"}),
        ("run.resumed", None, RESUMED.to_data()),
        ("run.closed", None, {"latched": False}),
        ("checkpoint.accepted", 1, ACCEPTED),
        ("checkpoint.accepted", 1, {**ACCEPTED, "usage": {"retrieval_attempts": 1}}),
        ("checkpoint.refused", 1, {"state": "pending", **ACCEPTED}),
    ]
)
anything = st.tuples(st.sampled_from(sorted(KINDS)), small_numbers, some_data)


@given(st.lists(likely | anything, max_size=12))
@example([("retrieval.declined", 2, {"reason": "empty", "env": "e", "call": "c"})])
@example([("delivery.lost", 1, {"stage": "s"})])
@example([("delivery.lost", None, {"stage": "s"})])
@example([("checkpoint.accepted", 1, {**ACCEPTED, "usage": {"retrieval_attempts": 1}})])
@example([("checkpoint.refused", 1, {"state": "pending", **ACCEPTED})])
def test_any_sequence_is_taken_or_refused_alike(
    events: list[tuple[str, int | None, dict[str, Any]]],
) -> None:
    """Live and read back, the fold takes the same records and refuses the same one, by name."""
    live, journal = RunState(), Journal()
    live.fold(claimed().record)
    journal.write(claimed())
    refusal: str | None = None
    for kind, number, data in events:
        if kind == "run.claimed":
            continue  # never decided twice; a journal that says so is refused by the chain's rules
        journal.append(kind, number, encode_json(data))
        try:
            live.fold(record_of(kind, number, data))
        except errors.LedgerCorrupt as exc:
            refusal = exc.message
            break
    scan = read_back([b"".join(journal.lines)])
    if refusal is None:
        assert scan.problem is None
        assert scan.history.state == live
        assert scan.history.head == journal.head
    else:
        assert scan.problem is not None
        assert (scan.problem.reason, scan.problem.place.line) == (refusal, len(journal.lines))


# --- a run as it is lived -------------------------------------------------------------------------


class Lived(RuleBasedStateMachine):
    """A run that decides, is cut off at any byte, and goes on: the state stays the fold."""

    def __init__(self) -> None:
        super().__init__()
        self.state = RunState()
        self.journal = Journal()
        self.numbers: set[int] = set()
        self.record(claimed())

    def record(self, item: Draft) -> None:
        """Encodes, folds and writes, as the recorder does."""
        self.state.fold(item.record)
        self.journal.write(item)

    @rule()
    def search(self) -> None:
        """Admission gives the next number, or says why not."""
        try:
            number = self.state.admit_search()
        except errors.SidecarError as exc:
            refused = exc.failure
            if self.state.closed:
                assert refused is errors.LATCH_CLOSED
            else:
                assert refused is errors.QUOTA_EXHAUSTED
                assert self.state.attempts == MAX_CALLS
        else:
            assert number not in self.numbers  # never twice, also not across a restart
            self.numbers.add(number)
            self.record(draft(RetrievalRequested(number, ASKED)))

    @precondition(lambda self: self.state.searching)
    @rule(choice=st.randoms(), good=st.booleans())
    def settle(self, choice: Any, good: bool) -> None:
        """Any search that is under way ends."""
        number = choice.choice(sorted(self.state.searching))
        if good:
            documents = b'[{"id":"1","contents":"],\\"cache\\":","score":null}]'
            item = draft(RetrievalAnswered(number, documents, "miss", 1))
        else:
            item = draft(RetrievalFailed(number, "c", "c", "d"))
        self.record(item)

    @precondition(lambda self: not self.state.closed)
    @rule()
    def decline(self) -> None:
        """A query that is not searched."""
        self.record(draft(RetrievalDeclined(self.state.declined + 1, "empty", ASKED)))

    @precondition(lambda self: not self.state.closed)
    @rule()
    def latch(self) -> None:
        """The first failure."""
        cause = Cause("operator", None, attempt_consumed=False, detail="d")
        self.record(draft(LatchClosed(cause)))

    @precondition(lambda self: not self.state.closed and self.state.settled)
    @rule(step=st.integers(0, 3))
    def checkpoint(self, step: int) -> None:
        """Accepted while healthy, with the usage of this moment."""
        number = self.state.checkpoints_accepted + 1
        usage = self.state.usage()
        self.record(draft(CheckpointAccepted(number, step, None, None, 1, usage)))

    @rule()
    def end_and_resume(self) -> None:
        """An orderly end, and a restart."""
        self.record(draft(RunClosed(self.state.closed, self.state.usage())))
        assert self.state.closed_cleanly
        self.record(draft(RESUMED))

    @rule(lost=st.integers(1, 600), nuls=st.integers(0, 40))
    def crash_and_resume(self, lost: int, nuls: int) -> None:
        """The journal is cut at any byte of its end, and read again as a resume reads it."""
        whole = b"".join(self.journal.lines)
        data = whole[: max(len(self.journal.lines[0]), len(whole) - lost)]
        scan = read_back([data + bytes(nuls)])
        verdict = judge(observe(scan, None, begun=False))
        assert verdict.ending is not Ending.CORRUPT
        seq = scan.history.seq
        torn = nuls or not (data.endswith(b"\n") or scan.end is None or scan.end.newline)
        assert (verdict.ending is Ending.TORN) == bool(torn)
        self.journal.lines = self.journal.lines[:seq]
        self.journal.head = scan.history.head
        self.state = scan.history.state
        # No answer was sent from the lost records, so their numbers may be given again.
        self.numbers = set(range(1, self.state.attempts + 1))
        self.record(draft(RESUMED))

    @invariant()
    def state_is_the_fold_of_the_journal(self) -> None:
        """Principle 7, after every step."""
        scan = read_back([b"".join(self.journal.lines)])
        assert scan.problem is None
        assert scan.history.state == self.state
        assert scan.history.head == self.journal.head

    @invariant()
    def every_attempt_is_accounted_for(self) -> None:
        """Answered, failed or under way: nothing is lost between."""
        state = self.state
        assert state.attempts == state.responses + state.failed + len(state.searching)
        assert state.attempts <= MAX_CALLS


TestLived = Lived.TestCase
TestLived.settings = settings(max_examples=settings().max_examples // 2, stateful_step_count=25)


# --- where the segments are cut -------------------------------------------------------------------


@given(st.integers(1, 8), st.lists(st.integers(1, 5), max_size=8))
def test_segments_make_no_difference(count: int, sizes: list[int]) -> None:
    """However a journal was rotated, it tells the same history."""
    journal = Journal()
    journal.write(claimed())
    for number in range(1, count + 1):
        journal.write(draft(RetrievalRequested(number, ASKED)))
        journal.write(draft(RetrievalAnswered(number, None, "miss", 1)))
    scan = read_back(split(journal.lines, sizes))
    assert scan.problem is None
    assert (scan.history.seq, scan.history.head) == (len(journal.lines), journal.head)


@pytest.mark.parametrize("chunk", [1, 2, 63, 64, 65])
def test_chunks_make_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """A line may begin and end anywhere in what is read at once."""
    from tests.fakes.journals import closed, searches, write_run

    run = write_run(tmp_path / "run", [*searches(3), closed(3)], per_segment=3)
    monkeypatch.setattr("smartsearch_sidecar.ledger.reader.CHUNK_BYTES", chunk)
    scan = Scan(RunReader(run.directory), History(run.claim))
    lines = list(scan)
    assert scan.problem is None
    assert [line.seq for line in lines] == list(range(1, 9))
    assert scan.history.state == run.state()


# --- bytes that are no journal --------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.binary(max_size=300), max_size=4), st.booleans())
def test_any_bytes_are_refused_or_torn(parts: list[bytes], first: bool) -> None:
    """No bytes end in a traceback, and none that we did not write are read as a record."""
    journal = Journal()
    journal.write(claimed())
    if first:
        parts = [journal.lines[0] + b"".join(parts[:1]), *parts[1:]]
    scan = read_back(parts)
    verdict = judge(observe(scan, None, begun=False))
    assert scan.history.seq <= 1
    if verdict.ending is Ending.CLEAN:
        assert b"".join(parts) in (b"", journal.lines[0])

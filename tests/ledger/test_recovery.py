"""A run found on the disk: the tables over every cell, and reopening after every kind of end."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.disk import Disk
from smartsearch_sidecar.ledger.file import CLAIM, ENDPOINTS, JOURNAL, LATCH, RunFiles
from smartsearch_sidecar.ledger.lock import is_locked
from smartsearch_sidecar.ledger.reader import RunReader, Tail
from smartsearch_sidecar.ledger.recovery import (
    Body,
    Ending,
    Facts,
    LatchFile,
    Reopened,
    judge,
    reopen,
    restart_cause,
)
from smartsearch_sidecar.run.line import encode_line
from smartsearch_sidecar.run.record import Cause
from tests.fakes import journals
from tests.fakes.disk import Crash, CrashingDisk
from tests.fakes.each import each
from tests.fakes.journals import (
    AT,
    Written,
    answered,
    closed,
    contents,
    latched,
    requested,
    searches,
    write_latch,
    write_run,
)
from tests.fakes.raised import raises

# --- the table, over every cell -------------------------------------------------------------------

CELLS = [
    Facts(*cell) for cell in itertools.product(Body, Tail, LatchFile, (False, True), (False, True))
]


@each("facts", CELLS, ids=lambda facts: "-".join(map(str, vars_of(facts))))
def test_every_cell_of_the_table(facts: Facts) -> None:
    """Refused exactly where no crash could have left it; trimmed exactly where it is torn."""
    verdict = judge(facts)
    impossible = (
        facts.body is Body.BROKEN
        or facts.latch_file is LatchFile.DISAGREES
        or (facts.body is Body.EMPTY and facts.begun)
    )
    if impossible:
        assert verdict.ending is Ending.CORRUPT
        assert verdict.reason
        assert not verdict.write_latch
    elif facts.tail is Tail.TORN:
        assert verdict.ending is Ending.TORN
    else:
        assert verdict.ending is Ending.CLEAN
    # One of the two places is enough to keep the latch closed, and the record restores the file.
    assert verdict.closed == (facts.latch_record or facts.latch_file is not LatchFile.ABSENT)
    if not impossible:
        assert verdict.reason is None
        wanted = facts.latch_record and facts.latch_file is LatchFile.ABSENT
        assert verdict.write_latch == wanted


def vars_of(facts: Facts) -> list[Any]:
    """The cell's coordinates."""
    return [facts.body, facts.tail, facts.latch_file, facts.latch_record, facts.begun]


RESTARTS = list(itertools.product((False, True), repeat=4))
EXCUSES = list(itertools.product((False, True), repeat=3))


@each("on_unclean", ["latch", "report"])
@each(("begun", "was_closed", "settled", "clean"), RESTARTS)
def test_every_cell_of_a_restart(
    begun: bool, was_closed: bool, settled: bool, clean: bool, on_unclean: Any
) -> None:
    """Unsettled work always closes the latch, an end without ``run.closed`` unless reported, and an
    orderly one where the run was heard and nothing excuses the gap.
    """
    for heard, judged, told in EXCUSES:
        cause = restart_cause(
            begun=begun,
            closed=was_closed,
            settled=settled,
            clean=clean,
            on_unclean=on_unclean,
            heard=heard,
            judged=judged,
            trainer_stopped=told,
        )
        if not begun or was_closed:
            assert cause is None
        elif not settled:
            assert cause == "unresolved_after_restart"
        elif not clean:
            assert cause == (None if on_unclean == "report" else "unclean_restart")
        else:
            unjudged = (heard, judged, told) == (True, False, False)
            assert cause == ("unjudged_restart" if unjudged else None)


# --- reopening ------------------------------------------------------------------------------------


def resumed(directory: Path, disk: Disk | None = None) -> Reopened:
    """Locks, reopens and lets go."""
    files = RunFiles(directory, disk=disk)
    files.resume()
    try:
        return reopen(files, trainer_stopped=True)
    finally:
        files.close()


def cause_of(found: Reopened, on_unclean: Any) -> Cause | None:
    """Why the restart closes the latch; ``resumed`` says that the trainer stood still."""
    return found.cause(on_unclean, judged=False)


def refused(run: Written, match: str) -> None:
    """Reopening is refused for this reason, and no byte in the directory has changed."""
    before = contents(run.directory)
    with pytest.raises(errors.LedgerCorrupt, match=match):
        resumed(run.directory)
    assert contents(run.directory) == before
    assert not is_locked(run.directory / "lock")


@pytest.fixture
def run(tmp_path: Path) -> Written:
    """Three searches and an orderly end: eight records in one segment."""
    return write_run(tmp_path / "run", [*searches(3), closed(3)])


def test_clean_end_is_found_as_it_was(run: Written) -> None:
    """State, numbers and head go on where the last process left them; nothing is touched."""
    before = contents(run.directory)
    found = resumed(run.directory)
    assert (found.seq, found.head, found.claim) == (8, run.heads[-1], run.claim)
    assert found.state == run.state()
    assert (found.ending, found.clean, found.unsettled) == (Ending.CLEAN, True, ())
    assert (found.torn_bytes, found.set_aside, found.latch_missing) == (0, None, False)
    assert found.begun
    assert cause_of(found, "latch") is None
    assert contents(run.directory) == before


def test_writer_goes_on_where_the_journal_ends(run: Written) -> None:
    """The next record lands behind the last one, in the same segment."""
    files = RunFiles(run.directory)
    files.resume()
    reopen(files)
    assert (files.segment, files.segment_bytes) == (1, run.segment.stat().st_size)
    files.append(b"next\n", sync=True)
    files.close()
    assert run.segment.read_bytes().endswith(run.lines[-1] + b"next\n")


def test_end_without_run_closed_is_unclean(tmp_path: Path) -> None:
    """Without run.closed a rollout may hold an error text that the journal does not record."""
    run = write_run(tmp_path / "run", searches(3))
    found = resumed(run.directory)
    assert not found.clean
    cause = cause_of(found, "latch")
    assert cause is not None
    assert (cause.cause, cause.number) == ("unclean_restart", None)
    assert cause_of(found, "report") is None
    assert found.resumed().clean is False


def test_unsettled_searches_are_named(tmp_path: Path) -> None:
    """A search that no answer settles closes the latch under every configured policy."""
    run = write_run(
        tmp_path / "run",
        [*searches(1), requested(2, "two"), requested(3, "three"), answered(2, "2")],
    )
    found = resumed(run.directory)
    assert found.unsettled == (3,)
    for policy in ("latch", "report"):
        cause = cause_of(found, policy)
        assert cause is not None
        assert cause.cause == "unresolved_after_restart"
        assert "searches 3 were admitted" in cause.detail


def test_second_restart_still_knows(tmp_path: Path) -> None:
    """A crash between ``run.resumed`` and the latch it asks for does not lose the cause."""
    run = write_run(
        tmp_path / "run",
        [requested(1, "one"), journals.resumed()],
    )
    cause = cause_of(resumed(run.directory), "report")
    assert cause is not None
    assert cause.cause == "unresolved_after_restart"


# --- torn -----------------------------------------------------------------------------------------


def test_torn_line_is_set_aside_and_trimmed(run: Written) -> None:
    """Nobody was answered from it: it is kept for a person, and the journal ends before it."""
    whole = run.segment.read_bytes()
    torn = b'{"seq":9,"at":"2026-12-02'
    run.segment.write_bytes(whole + torn)
    found = resumed(run.directory)
    assert (found.ending, found.torn_bytes, found.seq) == (Ending.TORN, len(torn), 8)
    assert found.set_aside == run.directory / f"torn-000001-{len(whole)}.bin"
    assert found.set_aside.read_bytes() == torn
    assert run.segment.read_bytes() == whole
    assert found.resumed().set_aside == found.set_aside.name
    assert resumed(run.directory).ending is Ending.CLEAN


@pytest.mark.parametrize("nuls", [1, 511, 4096, 200_000])
def test_nul_tail_is_torn(run: Written, nuls: int) -> None:
    """A length that reached the disk before its data reads as NUL bytes."""
    whole = run.segment.read_bytes()
    run.segment.write_bytes(whole + bytes(nuls))
    found = resumed(run.directory)
    assert (found.ending, found.torn_bytes, found.head) == (Ending.TORN, nuls, run.heads[-1])
    assert run.segment.read_bytes() == whole


def test_torn_line_with_nuls_is_torn(run: Written) -> None:
    """Both at once."""
    whole = run.segment.read_bytes()
    run.segment.write_bytes(whole + b'{"seq":9,' + bytes(100))
    assert resumed(run.directory).torn_bytes == 109
    assert run.segment.read_bytes() == whole


def test_whole_line_without_newline_is_kept(run: Written) -> None:
    """A record that is whole by its sum was written: only its newline is missing."""
    whole = run.segment.read_bytes()
    run.segment.write_bytes(whole[:-1])
    found = resumed(run.directory)
    assert (found.seq, found.ending, found.torn_bytes) == (8, Ending.CLEAN, 0)
    assert run.segment.read_bytes() == whole


def test_whole_line_before_nuls_is_kept(run: Written) -> None:
    """The NULs go, the record stays and gets its newline."""
    whole = run.segment.read_bytes()
    run.segment.write_bytes(whole[:-1] + bytes(50))
    found = resumed(run.directory)
    assert (found.seq, found.ending, found.torn_bytes) == (8, Ending.TORN, 50)
    assert run.segment.read_bytes() == whole


def test_torn_first_record_means_that_nothing_began(tmp_path: Path) -> None:
    """A run killed while it wrote ``run.claimed`` begins again, under the claim it made."""
    run = write_run(tmp_path / "run", [])
    run.segment.write_bytes(run.lines[0][:50])
    found = resumed(run.directory)
    assert (found.begun, found.seq, found.head) == (False, 0, run.heads[0])
    assert (found.claim, cause_of(found, "latch")) == (run.claim, None)
    assert run.segment.read_bytes() == b""


# --- runs that never began, and rotations that did not end ----------------------------------------


def test_run_killed_before_its_claim_begins(tmp_path: Path) -> None:
    """A directory with a lock and nothing else is a run that begins now."""
    directory = tmp_path / "run"
    files = RunFiles(directory)
    files.create()
    files.close()
    found = resumed(directory)
    assert (found.begun, found.claim, found.head) == (False, b"", "")


@pytest.mark.parametrize("written", [b"", b"{", b'{"format": 1, "run'])
def test_claim_that_was_cut_short_is_made_again(tmp_path: Path, written: bytes) -> None:
    """Nothing was recorded under it, so the next start may write it whole."""
    run = write_run(tmp_path / "run", [])
    run.segment.unlink()
    (run.directory / CLAIM).write_bytes(written)
    assert resumed(run.directory).claim == b""
    assert not (run.directory / CLAIM).exists()


@pytest.mark.parametrize("segment", [None, b""])
def test_run_killed_before_its_first_record_begins(tmp_path: Path, segment: bytes | None) -> None:
    """The claim stands, the journal is empty or missing: the first record is still to come."""
    run = write_run(tmp_path / "run", [])
    run.segment.unlink()
    if segment is not None:
        run.segment.write_bytes(segment)
    files = RunFiles(run.directory)
    files.resume()
    found = reopen(files)
    assert (found.begun, found.claim, found.head) == (False, run.claim, run.heads[0])
    assert files.segment == (0 if segment is None else 1)
    files.close()


def test_served_run_without_a_record_is_refused(tmp_path: Path) -> None:
    """``endpoints.json`` is written after the first record is durable: the journal is gone."""
    run = write_run(tmp_path / "run", [])
    run.segment.write_bytes(b"")
    (run.directory / ENDPOINTS).write_bytes(b"{}")
    refused(run, "its journal holds no record")


def test_empty_last_segment_is_an_interrupted_rotation(tmp_path: Path) -> None:
    """The rotation goes on where it stopped."""
    run = write_run(tmp_path / "run", searches(3), per_segment=7)
    (run.directory / JOURNAL / "000002.jsonl").write_bytes(b"")
    files = RunFiles(run.directory)
    files.resume()
    assert reopen(files).seq == 7
    assert (files.segment, files.segment_bytes) == (2, 0)
    files.close()


def test_history_runs_through_all_segments(tmp_path: Path) -> None:
    """Where the segments are cut makes no difference to what they say."""
    whole = write_run(tmp_path / "whole", [*searches(5), closed(5)])
    for size in (1, 2, 5):
        run = write_run(tmp_path / f"by-{size}", [*searches(5), closed(5)], per_segment=size)
        found = resumed(run.directory)
        assert (found.seq, found.head, found.state) == (12, whole.heads[-1], whole.state())


# --- corrupt --------------------------------------------------------------------------------------


def test_bad_line_in_the_middle_is_refused(run: Written) -> None:
    """No crash damages a line that others follow; file, line and byte are named."""
    data = bytearray(run.segment.read_bytes())
    data[len(run.lines[0]) + 30] ^= 1
    run.segment.write_bytes(bytes(data))
    place = rf"journal/000001.jsonl line 2 \(byte {len(run.lines[0])}\)"
    refused(run, f"{place}: the line does not end in a sum")


def test_line_taken_out_is_refused(run: Written) -> None:
    """A record is missing from the middle."""
    run.segment.write_bytes(b"".join(run.lines[:3] + run.lines[4:]))
    refused(run, "record 5 comes after record 3")


def test_line_of_another_history_is_refused(tmp_path: Path, run: Written) -> None:
    """A line with the right number and a right sum of its own does not chain."""
    other = write_run(tmp_path / "other", [*searches(3), closed(3)], run_id="cd" * 16)
    run.segment.write_bytes(b"".join([*run.lines[:4], other.lines[4], *run.lines[5:]]))
    refused(run, "line 5 .*does not chain to the one before it")


def test_last_line_of_another_history_is_refused(tmp_path: Path, run: Written) -> None:
    """Whole by its sum, it is not torn; and it is not the next record either."""
    other = write_run(tmp_path / "other", [*searches(3), closed(3)], run_id="cd" * 16)
    for ending in (b"\n", b""):
        last = other.lines[-1].rstrip(b"\n") + ending
        run.segment.write_bytes(b"".join([*run.lines[:-1], last]))
        refused(run, "line 8 .*does not chain")


def test_last_line_that_the_fold_refuses_is_refused(tmp_path: Path) -> None:
    """A whole line that no process of ours wrote is no torn tail either."""
    run = write_run(tmp_path / "run", [requested(1, "one"), answered(2, "two")])
    refused(run, "search 2 was settled without being open")


def test_newline_that_was_overwritten_is_refused(run: Written) -> None:
    """Two records run into one: the first is whole, so trimming both would lose an answer."""
    for offset in (len(b"".join(run.lines[:7])) - 1, len(b"".join(run.lines)) - 1):
        data = bytearray(b"".join(run.lines))
        data[offset] = ord("x")
        run.segment.write_bytes(bytes(data))
        refused(run, "followed by bytes that are no newline")


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_missing_segment_is_refused(tmp_path: Path, missing: int) -> None:
    """A gap in the names is named."""
    run = write_run(tmp_path / "run", [*searches(3), closed(3)], per_segment=2)
    (run.directory / JOURNAL / f"{missing:06d}.jsonl").unlink()
    refused(run, rf"journal/00000{missing}.jsonl: the segment is missing")


def test_empty_segment_before_others_is_refused(tmp_path: Path) -> None:
    """A rotation begins no segment behind an empty one."""
    run = write_run(tmp_path / "run", [*searches(3), closed(3)], per_segment=8)
    for index in (2, 3):
        (run.directory / JOURNAL / f"{index:06d}.jsonl").write_bytes(b"")
    refused(run, "000002.jsonl.* the segment is empty, and another one follows")


@pytest.mark.parametrize("cut", [1, 40])
def test_torn_segment_before_others_is_refused(tmp_path: Path, cut: int) -> None:
    """It was on the medium before the next one began, so no crash tore it."""
    run = write_run(tmp_path / "run", [*searches(3), closed(3)], per_segment=4)
    data = run.segment.read_bytes()
    run.segment.write_bytes(data[:-cut])
    refused(run, "ends within a line, and another one follows")
    (run.directory / JOURNAL / "000002.jsonl").write_bytes(b"")
    refused(run, "ends within a line, and another one follows")


def test_changed_claim_is_refused(run: Written) -> None:
    """The first record names the very bytes of the claim."""
    (run.directory / CLAIM).write_bytes(run.claim + b" ")
    refused(run, r"claim.json is not the one the first record chains to")
    (run.directory / CLAIM).unlink()
    refused(run, r"claim.json is missing")


def test_first_record_names_the_claim_it_chains_to(tmp_path: Path) -> None:
    """It says so twice: by its place in the chain, and in its data."""
    run = write_run(tmp_path / "run", [])
    data = {"max_calls": 1, "claim_sha256": "0" * 64}
    encoded = json.dumps(data).encode()
    line, _ = encode_line("run.claimed", None, encoded, seq=1, at=AT, prev=run.heads[0])
    run.segment.write_bytes(line)
    refused(run, "the first record names another claim.json")
    closed = b'{"latched":false}'
    line, _ = encode_line("run.closed", None, closed, seq=1, at=AT, prev=run.heads[0])
    run.segment.write_bytes(line)
    refused(run, "the first record is run.closed, not run.claimed")


def test_journal_that_does_not_begin_with_the_claim_is_refused(tmp_path: Path) -> None:
    """The first record is ``run.claimed``, once."""
    run = write_run(tmp_path / "run", [*searches(1)])
    run.segment.write_bytes(b"".join(run.lines[1:]))
    refused(run, "record 2 comes after record 0")
    data = json.loads(run.lines[0])["data"]
    twice = write_run(tmp_path / "twice", [("run.claimed", None, data)])
    refused(twice, "claimed twice")


def test_more_damage_than_one_line_may_be_is_refused(
    run: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line has a bound, so that damage cannot fill the memory."""
    monkeypatch.setattr("smartsearch_sidecar.ledger.reader.LINE_BYTES_MAX", 100_000)
    run.segment.write_bytes(run.segment.read_bytes() + b"x" * 300_000)
    refused(run, "longer than 100000 bytes")


# --- the latch ------------------------------------------------------------------------------------


@pytest.fixture
def failed_run(tmp_path: Path) -> Written:
    """A run that failed and ended in order."""
    return write_run(
        tmp_path / "failed", [*searches(1), latched("http_busy"), closed(1, latch=True)]
    )


def test_latch_stays_closed(failed_run: Written) -> None:
    """Both places agree: closed, with nothing to write."""
    write_latch(failed_run, 4)
    before = contents(failed_run.directory)
    found = resumed(failed_run.directory)
    assert found.state.closed
    assert (found.latch_missing, found.latched, cause_of(found, "latch")) == (False, None, None)
    assert contents(failed_run.directory) == before


def test_missing_latch_file_is_written_from_the_record(failed_run: Written) -> None:
    """A crash between the record and its file; the file is what the writer would have written."""
    assert resumed(failed_run.directory).latch_missing
    repaired = (failed_run.directory / LATCH).read_bytes()
    write_latch(failed_run, 4)
    assert repaired == (failed_run.directory / LATCH).read_bytes()
    assert not resumed(failed_run.directory).latch_missing


@pytest.mark.parametrize(
    ("raw", "cause"),
    [
        (b'{"cause": "ledger_failed", "detail": "disk full"}', "ledger_failed"),
        (b'{"cause": "operator", "number": null}', "operator"),
        (b"", "ledger_failed"),
        (b'{"cau', "ledger_failed"),
        (b"[]", "ledger_failed"),
    ],
)
def test_latch_file_without_a_record_closes(run: Written, raw: bytes, cause: str) -> None:
    """Present means failed, whether or not the disk took its cause."""
    (run.directory / LATCH).write_bytes(raw)
    found = resumed(run.directory)
    assert not found.state.closed  # the journal does not say so yet: the caller records it
    for policy in ("latch", "report"):
        told = cause_of(found, policy)
        assert told is not None
        assert told.cause == cause
    assert (run.directory / LATCH).read_bytes() == raw


@pytest.mark.parametrize(
    "changes", [{"seq": 9}, {"sum": "0" * 64}, {"cause": "operator"}, {"number": 1}]
)
def test_latch_file_that_says_otherwise_is_refused(
    failed_run: Written, changes: dict[str, Any]
) -> None:
    """One of the two was changed."""
    write_latch(failed_run, 4, **changes)
    refused(failed_run, "latch.json says what no record of the journal says")


def test_journal_cut_before_the_latch_is_refused(failed_run: Written) -> None:
    """Cut at a line boundary it is an earlier valid history: here ``latch.json`` shows it."""
    write_latch(failed_run, 4)
    failed_run.segment.write_bytes(b"".join(failed_run.lines[:3]))
    refused(failed_run, "the journal's end is missing")
    failed_run.segment.write_bytes(b"".join(failed_run.lines[:3]) + failed_run.lines[3][:40])
    refused(failed_run, "the journal's end is missing")


def test_failed_start_stays_failed(tmp_path: Path) -> None:
    """A disk that could not take the first record left its latch: the run begins closed."""
    run = write_run(tmp_path / "run", [])
    run.segment.write_bytes(b"")
    (run.directory / LATCH).write_bytes(b"")
    found = resumed(run.directory)
    assert not found.begun
    assert found.latched == cause_of(found, "report")
    assert found.latched is not None


# --- crashes in resume ----------------------------------------------------------------------------


def torn_run(directory: Path) -> Written:
    """A run whose reopening has every step to take: trim, newline and latch."""
    run = write_run(directory, [*searches(1), latched("http_busy")])
    run.segment.write_bytes(run.segment.read_bytes()[:-1] + bytes(30))
    return run


def points(tmp_path: Path) -> list[str]:
    """Every point that reopening such a run passes."""
    passed: list[str] = []

    class Listening(Disk):
        def point(self, name: str) -> None:
            passed.append(name)

    resumed(torn_run(tmp_path / "listened").directory, Listening())
    return passed


@pytest.mark.parametrize("lose", [False, True])
def test_crash_at_any_point_of_resume_can_be_resumed(tmp_path: Path, lose: bool) -> None:
    """Each step is durable before the next and looks at what is there: any may be the last."""
    names = points(tmp_path)
    assert len(names) >= 8
    for position, name in enumerate(names):
        base = tmp_path / f"{position}"
        base.mkdir()
        run = torn_run(base / "run")
        nth = names[: position + 1].count(name)
        disk = CrashingDisk(base, name, nth)
        with pytest.raises(Crash):
            resumed(run.directory, disk)
        if lose:
            disk.power_loss()
        found = resumed(run.directory)
        assert (found.seq, found.head) == (4, run.heads[4]), name
        assert run.segment.read_bytes() == b"".join(run.lines), name
        value = json.loads((run.directory / LATCH).read_bytes() or b"{}")
        assert value.get("cause", "http_busy") == "http_busy", name
        assert found.state.closed
        for aside in run.directory.glob("torn-*"):
            assert bytes(30).startswith(aside.read_bytes()), name


def test_half_a_copy_is_not_the_copy(tmp_path: Path) -> None:
    """A crash while the tail was copied leaves part of it: the next resume keeps all of it."""
    run = write_run(tmp_path / "run", searches(1))
    offset = run.segment.stat().st_size
    run.segment.write_bytes(run.segment.read_bytes() + b"torn tail")
    (run.directory / f"torn-000001-{offset}.bin").write_bytes(b"torn")
    found = resumed(run.directory)
    assert found.set_aside is not None
    assert found.set_aside.read_bytes() == b"torn tail"
    assert found.set_aside.name == f"torn-000001-{offset}-2.bin"


# --- reading --------------------------------------------------------------------------------------


def test_reader_opens_no_link(run: Written, tmp_path: Path) -> None:
    """A segment that is a link is refused, not followed."""
    run.segment.rename(tmp_path / "elsewhere")
    run.segment.symlink_to(tmp_path / "elsewhere")
    with raises(errors.RUN_DIRECTORY, match="cannot be read"):
        list(RunReader(run.directory).chunks(RunReader(run.directory).segments()[0]))


def test_cause_of_a_latch_file_is_read_in_full(run: Written) -> None:
    """What the ledger could not record is taken from the file as it stands."""
    value = {"cause": "ledger_failed", "number": None, "attempt_consumed": False, "detail": "full"}
    (run.directory / LATCH).write_text(json.dumps(value))
    assert resumed(run.directory).latched == Cause("ledger_failed", None, False, "full")

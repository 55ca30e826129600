"""``ledger verify``: whole or not, of which history, and for a live run as well."""

from __future__ import annotations

import asyncio
import itertools
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from smartsearch_sidecar import errors
from smartsearch_sidecar.commands import ledger
from smartsearch_sidecar.ledger.file import JOURNAL, LATCH, RunFiles
from smartsearch_sidecar.ledger.receipt import CheckpointReceipt
from smartsearch_sidecar.ledger.recovery import Ending
from smartsearch_sidecar.ledger.verify import Verification, describe_previous, verify
from tests.fakes.each import each
from tests.fakes.journals import (
    Event,
    Written,
    closed,
    contents,
    latched,
    requested,
    searches,
    write_latch,
    write_run,
)
from tests.fakes.provider import FakeProvider
from tests.fakes.raised import raises
from tests.fakes.served import served


def checkpoint(count: int, step: int = 100, **data: Any) -> Event:
    """A checkpoint accepted after ``count`` answered searches."""
    usage = {"retrieval_attempts": count, "retrieval_responses": count}
    values = {"step": step, "path": "ckpt", "manifest_sha256": None, "occurrence": 1, **data}
    return "checkpoint.accepted", 1, {**values, "usage": usage}


def receipt_of(run: Written, seq: int, /, **changes: Any) -> bytes:
    """The receipt that ``/checkpoints`` gave for record ``seq``."""
    line = json.loads(run.lines[seq - 1])
    value = {
        "format": 1,
        "accepted": True,
        "number": line["number"],
        **line["data"],
        "seq": seq,
        "head": line["sum"],
        "claim_sha256": run.heads[0],
        **changes,
    }
    return json.dumps(value).encode()


@pytest.fixture
def run(tmp_path: Path) -> Written:
    """Two searches, a checkpoint (record 6), another search and an orderly end, in segments."""
    events = [*searches(2), checkpoint(2), *searches(1, first=3), closed(3)]
    return write_run(tmp_path / "run", events, per_segment=4)


def checked(run: Written, receipt: bytes | None = None) -> Verification:
    """Verifies, and holds that nothing was written."""
    before = contents(run.directory)
    found = verify(
        run.directory, receipt=None if receipt is None else CheckpointReceipt.parse(receipt)
    )
    assert contents(run.directory) == before
    return found


# --- whole ----------------------------------------------------------------------------------------


def test_whole_run_is_told_with_its_counts(run: Written) -> None:
    """Everything a report says is read off the journal."""
    found = checked(run)
    assert found.ok
    assert (found.seq, found.head, found.segments) == (9, run.heads[-1], 3)
    assert found.bytes == sum(map(len, run.lines))
    assert found.state == run.state()
    assert found.kinds["retrieval.answered"] == 3
    assert found.notes == ()
    assert (found.live, found.ending, found.claim_sha256) == (False, Ending.CLEAN, run.heads[0])
    assert found.checkpoint is not None
    assert (found.checkpoint["step"], found.checkpoint["seq"]) == (100, 6)


def test_documents_can_be_read_as_well(run: Written) -> None:
    """The slower reading, with documents, has the same result."""
    assert verify(run.directory, documents=True).as_json() == verify(run.directory).as_json()


def test_progress_ends_at_all_bytes(run: Written) -> None:
    """A bar that is fed by it fills."""
    told: list[tuple[int, int]] = []
    verify(run.directory, progress=lambda done, total: told.append((done, total)))
    total = sum(map(len, run.lines))
    assert told[-1] == (total, total)
    assert told == sorted(told)


def test_memory_does_not_grow_with_the_journal(tmp_path: Path) -> None:
    """Eight megabytes are verified in a fraction of one."""
    documents = [{"id": str(rank), "contents": "x" * 4000, "score": 1.0} for rank in range(5)]
    events: list[Event] = []
    for number in range(1, 401):
        answer = {"documents": documents, "cache": "miss", "took_us": 1}
        events += [requested(number, "q"), ("retrieval.answered", number, answer)]
    run = write_run(tmp_path / "run", events)
    size = run.segment.stat().st_size
    assert size > 8_000_000
    tracemalloc.start()
    try:
        found = verify(run.directory)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.ok
    assert peak < size / 8


# --- not whole ------------------------------------------------------------------------------------


def test_damage_is_named_by_file_line_and_byte(run: Written) -> None:
    """Where to look, and why."""
    second = run.directory / JOURNAL / "000002.jsonl"
    data = bytearray(second.read_bytes())
    data[len(run.lines[4]) + 100] ^= 4
    second.write_bytes(bytes(data))
    found = checked(run)
    assert found.problem is not None
    assert (found.problem.place.file, found.problem.place.line) == ("journal/000002.jsonl", 2)
    assert found.problem.place.offset == len(run.lines[4])
    assert "sum" in found.problem.reason
    assert (found.ok, found.seq, found.ending) == (False, 5, Ending.CORRUPT)


def test_flipped_bytes_are_noticed(tmp_path: Path) -> None:
    """No byte of a finished run can change unseen, the last line's included."""
    small = write_run(tmp_path / "run", [requested(1, "a"), latched("operator")])
    write_latch(small, 3)
    data = small.segment.read_bytes()
    for offset in (*range(0, len(data), 5), *range(len(data) - 3, len(data))):
        changed = bytes([data[offset] ^ 0x10])
        small.segment.write_bytes(data[:offset] + changed + data[offset + 1 :])
        assert not verify(small.directory).ok, offset


def test_cuts_but_at_a_line_are_noticed(tmp_path: Path) -> None:
    """A cut at a line's end is an earlier valid history; a receipt shows that one."""
    small = write_run(tmp_path / "run", [*searches(1), checkpoint(1)])
    receipt = receipt_of(small, 4)
    data = small.segment.read_bytes()
    ends = list(itertools.accumulate(map(len, small.lines)))
    near_ends = {end + off for end in ends for off in (-2, -1, 0, 1)}
    for size in sorted({*range(1, len(data), 17), *near_ends} - {len(data) + 1}):
        small.segment.write_bytes(data[:size])
        found = verify(small.directory, receipt=CheckpointReceipt.parse(receipt))
        whole = size in ends or size + 1 in ends
        assert (found.problem is None) == whole, size
        assert (found.receipt_problem is None) == (size >= ends[-1] - 1), size


def test_torn_end_of_a_dead_run_is_not_whole(run: Written) -> None:
    """It is told as what it is, with what mends it."""
    last = run.directory / JOURNAL / "000003.jsonl"
    last.write_bytes(last.read_bytes() + b'{"seq":10,')
    found = checked(run)
    assert found.problem is not None
    assert "torn (10 bytes)" in found.problem.reason
    assert "--resume" in found.problem.reason
    assert (found.ending, found.torn_bytes, found.seq) == (Ending.TORN, 10, 9)


def test_whole_line_without_newline_is_whole(run: Written) -> None:
    """Noted, not refused."""
    last = run.directory / JOURNAL / "000003.jsonl"
    last.write_bytes(last.read_bytes()[:-1])
    found = checked(run)
    assert found.ok
    assert found.notes == ("the last line is whole and lacks its newline",)


def test_run_that_never_began_is_not_whole(tmp_path: Path) -> None:
    """There is no history to vouch for."""
    empty = write_run(tmp_path / "run", [])
    empty.segment.unlink()
    found = checked(empty)
    assert found.problem is not None
    assert "never began" in found.problem.reason


def test_other_folder_is_wrong_use(tmp_path: Path) -> None:
    """Nothing there to verify is not the answer no."""
    for place in (tmp_path, tmp_path / "missing"):
        with raises(errors.RUN_DIRECTORY):
            verify(place)


# --- the latch ------------------------------------------------------------------------------------


@pytest.fixture
def failed(tmp_path: Path) -> Written:
    """A run that failed."""
    run = write_run(tmp_path / "failed", [*searches(1), latched("http_busy")])
    write_latch(run, 4)
    return run


def test_failed_run_is_whole(failed: Written) -> None:
    """A history may end badly and be true: the cause is part of the report."""
    found = checked(failed)
    assert found.ok
    assert found.state.cause is not None
    assert found.as_json()["cause"]["cause"] == "http_busy"


@pytest.mark.parametrize("changes", [{"cause": "operator"}, {"sum": "0" * 64}, {"seq": 3}])
def test_latch_file_that_says_otherwise_is_noticed(
    failed: Written, changes: dict[str, Any]
) -> None:
    """``latch.json`` is held against ``latch.closed``."""
    write_latch(failed, 4, **changes)
    found = checked(failed)
    assert found.problem is not None
    assert (found.problem.place.file, found.problem.place.line) == (LATCH, 0)


def test_latch_file_shows_a_journal_that_was_cut(failed: Written) -> None:
    """Cut at a line's end, the journal alone would look like a run that never failed."""
    failed.segment.write_bytes(b"".join(failed.lines[:3]))
    assert not checked(failed).ok


def test_what_a_crash_left_is_noted(failed: Written) -> None:
    """Neither half of the latch is lost with the other."""
    (failed.directory / LATCH).unlink()
    (failed.directory / "endpoints.json").touch()
    found = checked(failed)
    assert found.ok
    assert len(found.notes) == 2
    assert "latch.json is missing" in found.notes[0]


@pytest.mark.parametrize("raw", [b"", b'{"cause":"ledger_failed"}'])
def test_latch_file_alone_is_noted(run: Written, raw: bytes) -> None:
    """The ledger could not record why: the run has failed all the same."""
    (run.directory / LATCH).write_bytes(raw)
    found = checked(run)
    assert found.ok
    assert len(found.notes) == 1
    assert "has failed" in found.notes[0]


# --- receipts -------------------------------------------------------------------------------------


def test_receipt_of_this_history_holds(run: Written) -> None:
    """The checkpoint was trained on exactly this history, which may have gone on."""
    assert checked(run, receipt_of(run, 6)).ok


def test_receipt_from_another_run_is_refused(run: Written, tmp_path: Path) -> None:
    """Another claim, however alike the records are."""
    events = [*searches(2), checkpoint(2), *searches(1, first=3), closed(3)]
    other = write_run(tmp_path / "other", events, run_id="cd" * 16)
    found = checked(run, receipt_of(other, 6))
    assert found.problem is None
    assert found.receipt_problem is not None
    assert "of another run" in found.receipt_problem
    assert not found.ok


def test_receipt_of_another_history_is_refused(run: Written, tmp_path: Path) -> None:
    """The same claim and number, other records before it."""
    events = [*searches(1), requested(2, "other"), *searches(2)[-1:], checkpoint(2)]
    other = write_run(tmp_path / "other", events)
    found = checked(run, receipt_of(other, 6))
    assert found.receipt_problem is not None
    assert "of another history" in found.receipt_problem


def test_receipt_beyond_the_end_is_refused(run: Written) -> None:
    """The journal's end is missing: at a line's end nothing else would show it."""
    receipt = receipt_of(run, 6)
    run.segment.write_bytes(b"".join(run.lines[:4]))
    for index in (2, 3):
        (run.directory / JOURNAL / f"{index:06d}.jsonl").unlink()
    found = checked(run, receipt)
    assert found.problem is None
    assert found.receipt_problem is not None
    assert "ends at 4" in found.receipt_problem


@pytest.mark.parametrize(
    "changes",
    [
        {"step": 101},
        {"path": "other"},
        {"manifest_sha256": "0" * 64},
        {"number": 2},
        {"occurrence": 2},
        {"usage": {"retrieval_attempts": 1, "retrieval_responses": 1}},
    ],
)
def test_receipt_that_says_otherwise_is_refused(run: Written, changes: dict[str, Any]) -> None:
    """Where and when are not enough: what it says has to be what was recorded."""
    found = checked(run, receipt_of(run, 6, **changes))
    assert found.receipt_problem == f"the receipt says another {next(iter(changes))} than record 6"


def test_receipt_of_another_record_is_refused(run: Written) -> None:
    """A head of the history at which no checkpoint was accepted."""
    found = checked(run, receipt_of(run, 6, seq=5, head=run.heads[5]))
    assert found.receipt_problem is not None
    assert "accepts no checkpoint" in found.receipt_problem


def other(place: dict[str, Any]) -> bytes:
    """All that a receipt holds, but for where its record lies."""
    _, number, data = checkpoint(2)
    return json.dumps({"format": 1, "accepted": True, "number": number, **data, **place}).encode()


@each(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        other({"claim_sha256": "x", "seq": 1, "head": "y"}),
        other({"claim_sha256": "a" * 64, "seq": 0, "head": "b" * 64}),
        other({"claim_sha256": "a" * 64, "seq": True, "head": "b" * 64}),
        other({"claim_sha256": "A" * 64, "seq": 1, "head": "b" * 64}),
        other({"claim_sha256": "a" * 64, "seq": 1}),
        other({"claim_sha256": "a" * 64, "seq": 1, "head": "b" * 64, "nodes": []}),
        other({"claim_sha256": "a" * 64, "seq": 1, "head": "b" * 64, "nodes": {"a": 1}}),
        other({"claim_sha256": "a" * 64, "seq": 1, "head": "b" * 64, "nodes": {"a": {"seq": 1}}}),
    ],
)
def test_other_file_is_no_receipt(raw: bytes) -> None:
    """A refusal's body, or any other file, is wrong use and says what to keep."""
    with pytest.raises(errors.UsageError, match="the body of /checkpoints"):
        CheckpointReceipt.parse(raw)


# --- live -----------------------------------------------------------------------------------------


def test_live_run_may_be_writing_its_last_line(run: Written) -> None:
    """While the lock is held, and only then, an incomplete last line is no problem."""
    last = run.directory / JOURNAL / "000003.jsonl"
    last.write_bytes(last.read_bytes() + b'{"seq":10,')
    files = RunFiles(run.directory)
    files.lock()
    found = checked(run)
    assert (found.ok, found.live, found.ending) == (True, True, Ending.TORN)
    files.close()
    assert not checked(run).ok


def test_live_run_is_still_held_to_the_rest(run: Written) -> None:
    """Damage before the last line is damage."""
    data = bytearray(run.segment.read_bytes())
    data[40] ^= 1
    run.segment.write_bytes(bytes(data))
    files = RunFiles(run.directory)
    files.lock()
    assert not checked(run).ok
    files.close()


def test_segments_that_appear_meanwhile_are_not_read(run: Written) -> None:
    """What is read is what was there when the reading began: a prefix of a history that goes on."""
    last = run.directory / JOURNAL / "000003.jsonl"
    whole = last.read_bytes()
    last.write_bytes(b"")

    def grow(done: int, total: int) -> None:
        last.write_bytes(whole)

    found = verify(run.directory, progress=grow)
    assert (found.ok, found.seq) == (True, 8)


async def test_daemon_is_verified_while_it_serves(tmp_path: Path) -> None:
    """A real run, a real receipt: verified live, and after its end."""
    directory = tmp_path / "run"
    async with served(directory, provider=FakeProvider()) as running:
        for query in ("one", "two"):
            assert (await running.execute(query))[0] == 200
        status, body = await running.internal("POST", "/checkpoints", {"step": 7})
        assert status == 201
        receipt = CheckpointReceipt.parse(json.dumps(body).encode())
        live = await asyncio.to_thread(verify, directory, receipt=receipt)
        assert (live.ok, live.live, live.notes) == (True, True, ())
        await running.stop()
    after = await asyncio.to_thread(verify, directory, receipt=receipt)
    assert (after.ok, after.live, after.state.closed_cleanly) == (True, False, True)
    assert after.state.responses == 2


# --- the run before -------------------------------------------------------------------------------


def test_previous_run_is_described(run: Written) -> None:
    """A new claim names the old claim, its head, its end and its last checkpoint."""
    told = describe_previous(run.directory)
    assert told == {
        "run_id": "ab" * 16,
        "claim_sha256": run.heads[0],
        "seq": 9,
        "head": run.heads[-1],
        "closed_cleanly": True,
        "cause": None,
        "usage": run.state().usage(),
        "last_checkpoint": {
            "number": 1,
            "step": 100,
            "seq": 6,
            "head": run.heads[6],
            "at": "2026-12-02T04:13:00.000000Z",
        },
    }
    json.dumps(told)


def test_previous_run_may_have_failed_or_died(failed: Written) -> None:
    """That is why another run follows it; a torn end is left out."""
    failed.segment.write_bytes(failed.segment.read_bytes() + b"{")
    told = describe_previous(failed.directory)
    assert (told["cause"], told["seq"], told["closed_cleanly"]) == ("http_busy", 4, False)


def test_previous_run_has_to_be_a_whole_and_finished_history(run: Written) -> None:
    """Damage is refused, and so is a run that is still going on."""
    files = RunFiles(run.directory)
    files.lock()
    with raises(errors.RUN_DIRECTORY, match="still being served"):
        describe_previous(run.directory)
    files.close()
    run.segment.write_bytes(b"x" + run.segment.read_bytes()[1:])
    with pytest.raises(errors.LedgerCorrupt, match="no whole history"):
        describe_previous(run.directory)


# --- from a shell ---------------------------------------------------------------------------------


def shell(*words: object) -> Result:
    """Runs ``ledger …`` as typed."""
    return CliRunner().invoke(ledger.app, [str(word) for word in words])


def test_shell_says_whole_with_exit_zero(run: Written, tmp_path: Path) -> None:
    """Words, and JSON that agrees with them."""
    receipt = tmp_path / "receipt.json"
    receipt.write_bytes(receipt_of(run, 6))
    told = shell("verify", run.directory, "--receipt", receipt)
    assert told.exit_code == 0
    for words in ("whole: 9 records", run.heads[-1], "3 answered of 3", "in order", "record 6"):
        assert words in told.stdout
    value = json.loads(shell("verify", run.directory, "--json").stdout)
    assert (value["ok"], value["seq"], value["usage"]["retrieval_responses"]) == (True, 9, 3)


def test_shell_says_not_whole_with_exit_one(run: Written, tmp_path: Path) -> None:
    """Damage, and a receipt of something else, are the answer no."""
    receipt = tmp_path / "receipt.json"
    receipt.write_bytes(receipt_of(run, 6, head="0" * 64))
    told = shell("verify", run.directory, "--receipt", receipt)
    assert told.exit_code == 1
    assert "another history" in told.stdout
    run.segment.write_bytes(run.segment.read_bytes()[:-2] + b"x\n")
    told = shell("verify", run.directory)
    assert told.exit_code == 1
    assert "not whole: journal/000001.jsonl line 4" in told.stdout


def test_shell_leaves_wrong_use_to_the_console_script(run: Written, tmp_path: Path) -> None:
    """Nothing to read is exit 2, which the console script makes of a ``UsageError``."""
    for words in (("verify", tmp_path / "no"), ("verify", run.directory, "--receipt", "no")):
        assert isinstance(shell(*words).exception, errors.UsageError)


def test_shell_tells_a_failed_run(failed: Written) -> None:
    """Cause and sentence, in letters a terminal does not obey."""
    write_run(failed.directory / "x", [])  # a stray folder inside is not the run's
    told = shell("verify", failed.directory)
    assert told.exit_code == 0
    assert "closed: http_busy: for a test" in told.stdout
    assert "without run.closed" in told.stdout

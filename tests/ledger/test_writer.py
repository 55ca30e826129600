"""The one task that owns a run's files: order, durability, and what it does when a disk fails."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger import writer as writer_module
from smartsearch_sidecar.ledger.disk import Disk
from smartsearch_sidecar.ledger.file import CLAIM, JOURNAL, LATCH, RunFiles
from smartsearch_sidecar.ledger.writer import Receipt, Writer
from smartsearch_sidecar.run.line import Draft, claim_digest, decode_line, draft
from smartsearch_sidecar.run.record import Cause, DeliveryLost, LatchClosed
from tests.fakes.disk import (
    CountingDisk,
    CrashingDisk,
    FailingSync,
    ForgetfulDisk,
    FullDisk,
    ReadOnlyDisk,
)
from tests.fakes.until import until

CLAIM_BYTES = b'{"claim": true}\n'
SMALL = 10**6


def record(number: int, text: str = "") -> Draft:
    """Any record."""
    return draft(DeliveryLost(number, text or f"number {number}"))


def latch_record(cause: str) -> Draft:
    """A ``latch.closed`` record."""
    return draft(LatchClosed(Cause(cause, None, attempt_consumed=False, detail="for a test")))


@dataclass
class Run:
    """A writer on a fresh run directory, and what it told."""

    files: RunFiles
    writer: Writer
    failures: list[errors.LedgerFailed] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)

    def lines(self) -> list[dict[str, Any]]:
        """Every whole line of the journal, checked by its sum and chain."""
        head = claim_digest(CLAIM_BYTES)
        found: list[dict[str, Any]] = []
        for segment in sorted((self.files.directory / JOURNAL).iterdir()):
            for raw in segment.read_bytes().splitlines(keepends=True):
                if not raw.endswith(b"\n"):
                    continue
                line = decode_line(raw)
                assert (line.seq, line.prev) == (len(found) + 1, head)
                head = line.sum
                found.append(json.loads(raw))
        return found

    def numbers(self) -> list[int]:
        """The numbers of the records, in order."""
        return [line["number"] for line in self.lines()]

    def latch(self) -> dict[str, Any] | None:
        """``latch.json``, where it is whole."""
        path = self.files.directory / LATCH
        value: dict[str, Any] | None = json.loads(path.read_bytes()) if path.exists() else None
        return value


@asynccontextmanager
async def writing(
    directory: Path,
    *,
    disk: Disk | None = None,
    segment_bytes_max: int = SMALL,
    start: bool = True,
    clock: Any = None,
) -> AsyncIterator[Run]:
    """A run being written until the block ends."""
    files = RunFiles(directory, disk=disk)
    await asyncio.to_thread(files.create)
    faulty, files.disk = files.disk, Disk()  # faults are for the writer, not for the claim
    await asyncio.to_thread(files.create_only, CLAIM, CLAIM_BYTES)
    files.disk = faulty
    if isinstance(faulty, ForgetfulDisk):
        faulty.remember()
    run: Run
    keys = {} if clock is None else {"clock": clock}
    writer = Writer(
        files,
        seq=0,
        head=claim_digest(CLAIM_BYTES),
        segment_bytes_max=segment_bytes_max,
        stall_seconds=5.0,
        on_failure=lambda failure: run.failures.append(failure),
        on_batch=lambda records, size, seconds: run.batches.append(len(records)),
        **keys,
    )
    run = Run(files, writer)
    if start:
        writer.start()
    try:
        yield run
    finally:
        await writer.close()
        await asyncio.to_thread(files.close)


# --- order and durability -------------------------------------------------------------------------


@pytest.mark.both_loops
async def test_receipt_names_where_the_record_lies(tmp_path: Path) -> None:
    """A receipt's seq and head are those of the line on the disk."""
    async with writing(tmp_path / "run") as run:
        receipts = [await run.writer.post_for_receipt(record(number)) for number in (1, 2, 3)]
        lines = run.lines()
        assert receipts == [Receipt(line["seq"], line["sum"]) for line in lines]
        assert (run.writer.seq, run.writer.head) == (3, lines[-1]["sum"])
        assert run.writer.idle


@pytest.mark.both_loops
async def test_order_of_posting_is_the_order_of_the_journal(tmp_path: Path) -> None:
    """Whoever posts first is written first, with or without a receipt."""
    async with writing(tmp_path / "run") as run:
        waiting = []
        for number in range(1, 2001):
            if number % 3:
                run.writer.post(record(number))
            else:
                waiting.append(run.writer.post_for_receipt(record(number)))
            if number % 100 == 0:
                await asyncio.sleep(0)
        receipts = await asyncio.gather(*waiting)
        assert [receipt.seq for receipt in receipts] == sorted(r.seq for r in receipts)
        await run.writer.post_for_receipt(record(2001))
        assert run.numbers() == list(range(1, 2002))


async def test_what_has_queued_costs_one_write_and_one_sync(tmp_path: Path) -> None:
    """The cost per answer falls as load rises."""
    disk = CountingDisk()
    async with writing(tmp_path / "run", disk=disk, start=False) as run:
        waiting = [run.writer.post_for_receipt(record(number)) for number in range(1, 101)]
        run.writer.start()
        await asyncio.gather(*waiting)
        assert run.batches == [100]
        assert disk.calls == {"write": 1, "sync": 1}


async def test_batches_are_bounded(tmp_path: Path) -> None:
    """No receipt waits for a whole backlog."""
    most = writer_module.BATCH_RECORDS_MAX
    async with writing(tmp_path / "run", start=False) as run:
        waiting = [run.writer.post_for_receipt(record(number)) for number in range(most + 10)]
        run.writer.start()
        await asyncio.gather(*waiting)
        assert run.batches == [most, 10]


async def test_record_without_a_receipt_rides_the_next_sync(tmp_path: Path) -> None:
    """``retrieval.requested`` costs no sync of its own, and is durable with what follows it."""
    disk = ForgetfulDisk(tmp_path)
    async with writing(tmp_path / "run", disk=disk) as run:
        run.writer.post(record(1))
        await run.writer.post_for_receipt(record(2))
        run.writer.post(record(3))
        await run.writer.close()
        run.files.close()
        assert run.numbers() == [1, 2, 3]
        disk.power_loss()
        assert run.numbers() == [1, 2]


async def test_record_without_a_receipt_shares_the_next_write(tmp_path: Path) -> None:
    """A quick search costs one write and one sync: its request waits a moment for its answer."""
    disk = CountingDisk()
    async with writing(tmp_path / "run", disk=disk) as run:
        run.writer.post(record(1))
        await run.writer.post_for_receipt(record(2))
        assert run.batches == [2]
        assert disk.calls == {"write": 1, "sync": 1}


@pytest.mark.both_loops
async def test_record_without_a_receipt_is_written_by_itself(tmp_path: Path) -> None:
    """Where nothing follows, it is on its way to the disk within a moment."""
    async with writing(tmp_path / "run") as run:
        run.writer.post(record(1))
        assert not run.writer.idle
        await until(lambda: run.writer.idle)
        assert run.numbers() == [1]


async def test_segments_rotate_by_size_and_lose_nothing(tmp_path: Path) -> None:
    """The chain runs through all segments, and each but the last has reached its size."""
    async with writing(tmp_path / "run", segment_bytes_max=1000) as run:
        for number in range(1, 31):
            await run.writer.post_for_receipt(record(number))
        segments = sorted((tmp_path / "run" / JOURNAL).iterdir())
        assert [path.name for path in segments] == [
            f"{index:06d}.jsonl" for index in range(1, len(segments) + 1)
        ]
        assert len(segments) > 3
        assert all(path.stat().st_size >= 1000 for path in segments[:-1])
        assert run.numbers() == list(range(1, 31))


@pytest.mark.both_loops
@pytest.mark.parametrize("seed", range(6))
async def test_receipts_survive_the_machine(tmp_path: Path, seed: int) -> None:
    """After a power cut at any moment, every record that had a receipt is in the journal."""
    rng = random.Random(seed)
    disk = CrashingDisk(
        tmp_path,
        rng.choice(["write:before", "write:after", "sync:before", "sync:after", "rotate:before"]),
        rng.randint(2, 12),
        torn=rng.choice([None, rng.randint(0, 400)]),
    )
    async with writing(tmp_path / "run", disk=disk, segment_bytes_max=2000) as run:
        told: list[int] = []

        async def one(number: int) -> None:
            await run.writer.post_for_receipt(record(number))
            told.append(number)

        for number in range(1, 200):
            try:
                if rng.random() < 0.3:
                    run.writer.post(record(number))
                else:
                    await one(number)
            except errors.LedgerFailed:
                break
        await run.writer.close()
        run.files.close()
        disk.power_loss(rng)
        assert set(told) <= set(run.numbers()), f"seed {seed}"
        assert disk.dead == bool(run.failures), f"seed {seed}"


async def test_close_writes_what_is_queued(tmp_path: Path) -> None:
    """An orderly end loses nothing, and nothing can be posted behind it."""
    async with writing(tmp_path / "run") as run:
        for number in range(1, 1001):
            run.writer.post(record(number))
        await run.writer.close()
        assert len(run.numbers()) == 1000
        with pytest.raises(errors.LedgerFailed, match="closed"):
            run.writer.post(record(1001))
        assert run.failures == []


# --- cancellation ---------------------------------------------------------------------------------


@pytest.mark.both_loops
async def test_cancelled_wait_changes_no_other_receipt(tmp_path: Path) -> None:
    """A cancelled wait for a receipt neither removes the record nor delays the others."""
    async with writing(tmp_path / "run", start=False) as run:

        async def receipt(number: int) -> Receipt:
            return await run.writer.post_for_receipt(record(number))

        waits = [asyncio.create_task(receipt(number)) for number in (1, 2, 3)]
        await asyncio.sleep(0)
        waits[1].cancel()
        run.writer.start()
        done = await asyncio.gather(*waits, return_exceptions=True)
        assert isinstance(done[1], asyncio.CancelledError)
        assert [done[0].seq, done[2].seq] == [1, 3]  # type: ignore[union-attr]
        assert run.numbers() == [1, 2, 3]
        assert run.failures == []


@pytest.mark.both_loops
async def test_cancelled_close_leaves_the_writer_to_finish(tmp_path: Path) -> None:
    """Records already decided are written, although no task awaits the end of the writer."""
    async with writing(tmp_path / "run") as run:
        waiting = [run.writer.post_for_receipt(record(number)) for number in range(1, 50)]
        closing = asyncio.create_task(run.writer.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(*waiting)
        assert len(run.numbers()) == 49


@pytest.mark.both_loops
async def test_cancelled_writer_fails_and_tells(tmp_path: Path) -> None:
    """If the task itself is cancelled, open receipts fail and further records are refused."""
    async with writing(tmp_path / "run") as run:
        await run.writer.post_for_receipt(record(1))
        receipt = run.writer.post_for_receipt(record(2))
        task = run.writer._task
        assert task is not None
        task.cancel()
        with pytest.raises(errors.LedgerFailed):
            await receipt
        assert len(run.failures) == 1
        with pytest.raises(errors.LedgerFailed):
            run.writer.post(record(3))
        await run.writer.close()
        latch = run.latch()
        assert latch is not None
        assert latch["cause"] == "ledger_failed"


# --- failures -------------------------------------------------------------------------------------


async def expect_failure(run: Run, first_lost: int, posted: int = 40) -> None:
    """Posts until the ledger fails: every open receipt fails, once, and no write is tried again."""
    waiting = [run.writer.post_for_receipt(record(number)) for number in range(1, posted + 1)]
    done = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(item) for item in done[first_lost - 1 :]] == [errors.LedgerFailed] * (
        posted - first_lost + 1
    )
    assert len(run.failures) == 1
    for _ in range(2):
        with pytest.raises(errors.LedgerFailed):
            run.writer.post(record(posted + 1))
    assert run.writer.queued == 0
    await run.writer.close()
    assert len(run.failures) == 1


@pytest.mark.both_loops
async def test_full_disk_closes_the_door(tmp_path: Path) -> None:
    """A disk that fills in the middle of a write leaves a torn line, and is not written again."""
    disk = FullDisk(1500)
    async with writing(tmp_path / "run", disk=disk) as run:
        await expect_failure(run, 1)
        assert "No space left" in run.failures[0].message
        journal = (tmp_path / "run" / JOURNAL / "000001.jsonl").read_bytes()
        assert len(journal) == 1500
        assert run.numbers() == list(range(1, len(run.lines()) + 1))
        assert (tmp_path / "run" / LATCH).read_bytes() == b""  # its name is all the disk took


async def test_full_disk_without_names_still_refuses(tmp_path: Path) -> None:
    """Where not even a name can be made, the process refuses all the same."""
    async with writing(tmp_path / "run", disk=FullDisk(1500, names=False)) as run:
        await expect_failure(run, 1)
        assert run.latch() is None


@pytest.mark.both_loops
@pytest.mark.parametrize("fails_at", [1, 2, 3])
async def test_failed_sync_is_never_tried_again(tmp_path: Path, fails_at: int) -> None:
    """The pages are gone although the next sync would succeed: no receipt after it."""
    disk = FailingSync(fails_at)
    async with writing(tmp_path / "run", disk=disk) as run:
        for number in range(1, fails_at):
            await run.writer.post_for_receipt(record(number))
        with pytest.raises(errors.LedgerFailed, match="Input/output error"):
            await run.writer.post_for_receipt(record(fails_at))
        assert run.writer.seq == fails_at - 1
        await run.writer.close()
        assert len(run.failures) == 1
        latch = run.latch()
        assert latch is not None
        assert latch["cause"] == "ledger_failed"
        assert "seq" not in latch


async def test_failed_sync_of_rotation_fails_the_batch(tmp_path: Path) -> None:
    """The old segment is synced before a new one begins; if it cannot be, nothing goes on."""
    disk = FailingSync(6)
    async with writing(tmp_path / "run", disk=disk, segment_bytes_max=1) as run:
        receipts = [await run.writer.post_for_receipt(record(number)) for number in (1, 2, 3)]
        for number in (4, 5):
            with pytest.raises(errors.LedgerFailed):
                await run.writer.post_for_receipt(record(number))
        assert run.numbers() == [receipt.seq for receipt in receipts] == [1, 2, 3]


async def test_read_only_disk_leaves_nothing_and_refuses(tmp_path: Path) -> None:
    """A filesystem remounted read-only in the middle of a run."""
    disk = ReadOnlyDisk()
    async with writing(tmp_path / "run", disk=disk) as run:
        await run.writer.post_for_receipt(record(1))
        disk.read_only = True
        with pytest.raises(errors.LedgerFailed, match="Read-only"):
            await run.writer.post_for_receipt(record(2))
        await run.writer.close()
        assert run.numbers() == [1]
        assert run.latch() is None


async def test_failed_latch_write_is_a_failure(tmp_path: Path) -> None:
    """A cause that is in the journal and not beside it is not told as durable."""

    class NoLatch(Disk):
        def open(self, path: Path, flags: int) -> int:
            if path.name == LATCH:
                raise PermissionError(13, "Permission denied")
            return super().open(path, flags)

    async with writing(tmp_path / "run", disk=NoLatch()) as run:
        with pytest.raises(errors.LedgerFailed, match="Permission denied"):
            await run.writer.post_for_receipt(latch_record("http_busy"))
        await run.writer.close()
        assert [line["kind"] for line in run.lines()] == ["latch.closed"]
        assert run.latch() is None
        assert len(run.failures) == 1


async def test_fault_in_the_writer_itself_fails_every_receipt(tmp_path: Path) -> None:
    """An error in the task itself fails the open receipts, so no caller waits for ever."""

    def broken() -> str:
        raise ValueError("no time")

    async with writing(tmp_path / "run", clock=broken) as run:
        with pytest.raises(errors.LedgerFailed, match="no time"):
            await run.writer.post_for_receipt(record(1))
        assert (run.writer.seq, run.writer.head) == (0, claim_digest(CLAIM_BYTES))
        assert not list((tmp_path / "run" / JOURNAL).iterdir())


async def test_record_that_cannot_be_taken_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was folded already: without it, what follows could not be read back."""
    monkeypatch.setattr(writer_module, "QUEUE_RECORDS_MAX", 5)
    async with writing(tmp_path / "run", start=False) as run:
        receipt = run.writer.post_for_receipt(record(1))
        for number in range(2, 6):
            run.writer.post(record(number))
        with pytest.raises(errors.LedgerFailed, match="more than 5 records"):
            run.writer.post(record(6))
        with pytest.raises(errors.LedgerFailed):
            await receipt
        assert len(run.failures) == 1
        run.writer.start()
        await run.writer.close()
        assert run.lines() == []
        latch = run.latch()
        assert latch is not None
        assert latch["cause"] == "ledger_failed"


class HeldDisk(FullDisk):
    """Holds the first write until it is let go; then it has room for ``left`` bytes."""

    def __init__(self, left: int) -> None:
        super().__init__(left)
        self.at_write = threading.Event()
        self.go_on = threading.Event()

    def write(self, fd: int, data: bytes) -> None:
        self.at_write.set()
        self.go_on.wait(10)
        super().write(fd, data)


async def overflow(run: Run, disk: HeldDisk) -> asyncio.Future[Receipt]:
    """Posts more than the queue takes while the first record is being written."""
    first = run.writer.post_for_receipt(record(1))
    await asyncio.to_thread(disk.at_write.wait, 10)
    run.writer.post(record(2))
    run.writer.post(record(3))
    with pytest.raises(errors.LedgerFailed):
        run.writer.post(record(4))
    disk.go_on.set()
    return first


async def test_overflow_while_writing_stops_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch under way is told of its write; nothing is written after it."""
    monkeypatch.setattr(writer_module, "QUEUE_RECORDS_MAX", 2)
    disk = HeldDisk(10_000)
    async with writing(tmp_path / "run", disk=disk) as run:
        first = await overflow(run, disk)
        assert (await first).seq == 1
        assert run.writer._task is not None
        await asyncio.wait_for(run.writer._task, 10)  # by itself, without a close
        assert run.numbers() == [1]
        latch = run.latch()
        assert latch is not None
        assert latch["cause"] == "ledger_failed"


async def test_overflow_while_a_batch_gathers_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure in the moment before a batch is taken leaves the journal as it was."""
    monkeypatch.setattr(writer_module, "QUEUE_RECORDS_MAX", 2)
    disk = CountingDisk()
    async with writing(tmp_path / "run", disk=disk) as run:
        await asyncio.sleep(0)
        first = run.writer.post_for_receipt(record(1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # the task has seen it, and waits for what follows
        run.writer.post(record(2))
        with pytest.raises(errors.LedgerFailed):
            run.writer.post(record(3))
        with pytest.raises(errors.LedgerFailed):
            await first
        await run.writer.close()
        assert not {"rotate:before", "write:before"}.intersection(disk.points)
        assert run.latch() is not None
        assert len(run.failures) == 1


async def test_second_failure_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails after the ledger has failed changes no cause, and frees who waits."""
    monkeypatch.setattr(writer_module, "QUEUE_RECORDS_MAX", 2)
    disk = HeldDisk(0)
    async with writing(tmp_path / "run", disk=disk) as run:
        first = await overflow(run, disk)
        with pytest.raises(errors.LedgerFailed, match="No space"):
            await first
        await run.writer.close()
        assert len(run.failures) == 1
        assert "wait to be written" in run.failures[0].message


async def test_failures_raised_again_are_new(tmp_path: Path) -> None:
    """One exception raised for every later caller would carry all their tracebacks along."""
    async with writing(tmp_path / "run", disk=FullDisk(0)) as run:
        with pytest.raises(errors.LedgerFailed) as first:
            await run.writer.post_for_receipt(record(1))
        raised = {id(first.value): first.value}
        for number in (2, 3):
            with pytest.raises(errors.LedgerFailed) as later:
                run.writer.post(record(number))
            raised[id(later.value)] = later.value
        assert len(raised) == 3
        assert {failure.message for failure in raised.values()} == {first.value.message}


# --- the latch ------------------------------------------------------------------------------------


async def test_latch_file_says_what_the_record_says(tmp_path: Path) -> None:
    """``latch.json`` names the record it repeats, and is there when the receipt is."""
    async with writing(tmp_path / "run") as run:
        await run.writer.post_for_receipt(record(1))
        receipt = await run.writer.post_for_receipt(latch_record("http_busy"))
        line, latch = run.lines()[-1], run.latch()
        assert latch == {"seq": 2, "at": line["at"], "sum": receipt.head, **line["data"]}


async def test_latch_is_durable_without_a_receipt(tmp_path: Path) -> None:
    """Nobody has to wait for a latch: its record is synced, and its file, by themselves."""
    disk = ForgetfulDisk(tmp_path)
    async with writing(tmp_path / "run", disk=disk) as run:
        run.writer.post(latch_record("http_busy"))
        await run.writer.close()
        run.files.close()
        disk.power_loss()
        latch = run.latch()
        assert latch is not None
        assert (latch["cause"], run.lines()[0]["kind"]) == ("http_busy", "latch.closed")


async def test_record_comes_before_the_latch_file(tmp_path: Path) -> None:
    """A ``latch.json`` that names a record the journal lacks would be a lie: it is written last."""
    disk = CrashingDisk(tmp_path, f"{LATCH}:before")
    async with writing(tmp_path / "run", disk=disk) as run:
        with pytest.raises(errors.LedgerFailed):
            await run.writer.post_for_receipt(latch_record("http_busy"))
        await run.writer.close()
        run.files.close()
        disk.power_loss()
        assert [line["kind"] for line in run.lines()] == ["latch.closed"]
        assert run.latch() is None


async def test_first_cause_wins(tmp_path: Path) -> None:
    """A ``latch.json`` that is there already stays as it is, and is no failure of the ledger."""
    async with writing(tmp_path / "run") as run:
        (tmp_path / "run" / LATCH).write_bytes(b'{"cause": "earlier"}')
        await run.writer.post_for_receipt(latch_record("later"))
        assert run.latch() == {"cause": "earlier"}
        assert run.failures == []


async def test_ledger_failure_does_not_replace_the_first_cause(tmp_path: Path) -> None:
    """The latch of a run that had failed already keeps its cause when the disk fails too."""
    disk = FullDisk(2000)
    async with writing(tmp_path / "run", disk=disk) as run:
        await run.writer.post_for_receipt(latch_record("http_busy"))
        with pytest.raises(errors.LedgerFailed):
            await run.writer.post_for_receipt(record(1, "x" * 2000))
        await run.writer.close()
        latch = run.latch()
        assert latch is not None
        assert latch["cause"] == "http_busy"

"""The one task that owns a run's files: it drains, numbers, chains, writes once, syncs once.

All other code posts a ``Draft`` (a decision already folded into the run's state) and may await its
receipt. What has queued while a sync was under way is written by the next one, so the cost per
answer falls as load rises. A failed write or sync is never tried again: every receipt fails, and
``on_failure`` is called once. A record that cannot be taken is such a failure too: a decision that
was folded and never written leaves a history that cannot be read back.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.file import RunFiles
from smartsearch_sidecar.ledger.reader import ReadBack
from smartsearch_sidecar.run.json_values import encode_json
from smartsearch_sidecar.run.line import Draft, encode_line
from smartsearch_sidecar.run.record import Cause, LatchClosed, Record

_Job = tuple["asyncio.Future[None]", Callable[..., None], tuple[Any, ...]]


class DiskThread:
    """The writer's thread: it blocks on the disk so that the loop does not, job after job.

    An executor costs more than a write and its sync: two futures, a lock and a condition a job.
    Here are one queue in and one call back.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # A daemon thread: a process that ends without `stop` must not hang on it.
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[..., None], *values: Any) -> asyncio.Future[None]:
        """Has ``work(*values)`` done; the future has its outcome. Called on the loop."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._jobs.put((done, work, values))
        return done

    def stop(self) -> None:
        """Returns once everything given is done; blocking, and safe to call twice."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            done, work, values = job
            fault: BaseException | None = None
            try:
                work(*values)
            except BaseException as exc:  # noqa: BLE001 - raised where the future is awaited
                fault = exc
            with contextlib.suppress(RuntimeError):  # the loop is closed: no task awaits it
                done.get_loop().call_soon_threadsafe(_end, done, fault)
            del job, done, work, values, fault  # what a batch held is not kept while waiting


def _end(done: asyncio.Future[None], fault: BaseException | None) -> None:
    if done.done():  # the task that awaited it was cancelled
        return
    if fault is None:
        done.set_result(None)
    else:
        done.set_exception(fault)


# Bounds one write to a few MB, so that no receipt waits for a whole backlog.
BATCH_RECORDS_MAX = 512
# A record whose receipt is not awaited (`retrieval.requested`) is written with the next answer's,
# or after this time: a quick search saves a trip to the thread.
UNAWAITED_SECONDS = 0.001
# A sync costs the same for one record as for many, and a request takes some turns of the loop from
# its arrival to its record. So a batch is written after 4 turns that brought no record (some 10 us
# on an idle loop), and after 32 turns in all.
QUIET_TURNS = 4
GATHERING_TURNS_MAX = 32
LOOK_SECONDS = 1.0
LATCH_DETAIL_CHARACTERS = 500  # at most 6 bytes each: they fit the room set aside for the latch
STALL_BIT_SECONDS = 0.25
# Admission bounds the queue far below; reaching this is a bug.
QUEUE_RECORDS_MAX = 65_536


class Receipt(NamedTuple):
    """Where a record lies: its sequence number and its sum, the head after it."""

    seq: int
    head: str


def wall_clock() -> str:
    """UTC with microseconds, e.g. ``2026-12-02T04:13:00.123456Z``."""
    return datetime.now(UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


def latch_file(*, seq: int, at: str, total: str, cause: Cause) -> bytes:
    """The bytes of ``latch.json`` for a ``latch.closed`` record: where it lies, and its cause."""
    return encode_json({"seq": seq, "at": at, "sum": total, **cause.to_data()}) + b"\n"


def _failure(exc: BaseException) -> errors.LedgerFailed:
    if isinstance(exc, errors.LedgerFailed):
        return exc
    reason = getattr(exc, "strerror", None) or f"{type(exc).__name__}: {exc}"
    return errors.LEDGER_FAILED(f"the ledger cannot be written: {reason}")


OnBatch = Callable[[Sequence[Record], int, float], None]
"""Called with each batch once it is on the medium: its records, bytes, seconds."""

# A posted decision, and the receipt that is awaited, if any.
Posted = tuple[Draft, "asyncio.Future[Receipt] | None"]


class Writer:
    """Serializes every record and the failure latch of one run."""

    def __init__(
        self,
        files: RunFiles,
        *,
        seq: int,
        head: str,
        segment_bytes_max: int,
        stall_seconds: float,
        on_failure: Callable[[errors.LedgerFailed], None],
        on_batch: OnBatch | None = None,
        clock: Callable[[], str] = wall_clock,
    ) -> None:
        """``seq`` and ``head`` are those of the last record that is on disk (0 and the claim's
        digest for a new run), and stay so: they follow each batch. A disk that has not ended a
        write after ``stall_seconds`` has failed. ``on_batch`` must not raise.
        """
        self._files = files
        self.seq = seq
        self.head = head
        self._segment_bytes_max = segment_bytes_max
        self.stall_seconds = stall_seconds
        self._on_failure = on_failure
        self._on_batch = on_batch
        self._wanted = 0  # queued records whose receipt is awaited
        self._overdue = False
        self._timer: asyncio.TimerHandle | None = None
        self._clock = clock
        self._queue: deque[Posted] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._closing = False
        self.busy_since: float | None = None  # loop time at which the batch under way began
        self.failure: errors.LedgerFailed | None = None
        self._cause: Cause | None = None  # why the run has failed, once the ledger has
        self._disk_thread = DiskThread()
        self._task: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._reading = asyncio.Lock()
        self._read_back = ReadBack(
            files.directory,
            segment=max(1, files.segment),
            offset=files.segment_bytes,
            seq=seq,
            head=head,
        )
        self._batch: list[Posted] = []  # what is under way
        self.looking = 0  # looks and readings under way: tests wait until the threads are at rest

    # --- what all other code calls, on the loop ---------------------------------------------------

    def start(self) -> None:
        """Starts the task; drafts posted before wait in the queue."""
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._run(), name="ledger-writer")
        self._watch = loop.create_task(self._look_often(), name="ledger-watch")

    @property
    def queued(self) -> int:
        """Records posted and not yet taken into a batch."""
        return len(self._queue)

    def post(self, item: Draft) -> None:
        """Written in the order of posting, synced with a later one. Raises ``LedgerFailed``."""
        self._put(item, None)

    def post_for_receipt(self, item: Draft) -> asyncio.Future[Receipt]:
        """Like ``post``; the future resolves once the record is on the medium."""
        future: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        self._put(item, future)
        return future

    def _put(self, item: Draft, future: asyncio.Future[Receipt] | None) -> None:
        if self.failure is not None:
            raise self.failure.failure(self.failure.message)
        if self._closing:
            raise errors.LEDGER_FAILED("the ledger is closed and takes no more records")
        if len(self._queue) >= QUEUE_RECORDS_MAX:
            failure = errors.LEDGER_FAILED(
                f"more than {QUEUE_RECORDS_MAX} records wait to be written"
            )
            self._fail(failure)
            self._wake_up()
            raise failure
        self._queue.append((item, future))
        if future is not None:
            self._wanted += 1
            self._wake_up()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(UNAWAITED_SECONDS, self._due)

    def _due(self) -> None:
        """Records without a receipt have waited long enough for an answer to be written with."""
        self._timer = None
        self._overdue = True
        self._wake_up()

    def _take(self, batch: list[Posted]) -> None:
        """Moves what is queued into ``batch``, at most so much."""
        while self._queue and len(batch) < BATCH_RECORDS_MAX:
            posted = self._queue.popleft()
            self._wanted -= posted[1] is not None
            batch.append(posted)
        self._overdue = bool(self._queue)
        if self._timer is not None and not self._queue:
            self._timer.cancel()
            self._timer = None

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    @property
    def idle(self) -> bool:
        return not self._queue and self.busy_since is None

    async def close(self) -> None:
        """Writes what is queued, stops the task, and frees the thread. The files stay open."""
        self._closing = True
        if self._watch is not None:
            self._watch.cancel()
        self._wake_up()
        if self._task is not None:
            # A cancelled close must not cancel the task, and its failure has reached `on_failure`.
            await asyncio.wait({self._task})
            if not self._task.cancelled():
                self._task.exception()  # read here: otherwise it is logged at collection
        await asyncio.to_thread(self._disk_thread.stop)  # joins the thread: not for the loop to do

    # --- whether files and disk are still there ---------------------------------------------------

    async def look(self) -> None:
        """Looks at the run's files in the writer's turn; the run has failed where they are gone or
        changed, or where the disk does not come to it in time.
        """
        if self.failure is not None:
            return
        looked = self._disk_thread.submit(self._files.look)
        self.looking += 1
        try:
            # Bit by bit, so that a loop that stands still uses up one bit of a disk's time.
            for _ in range(math.ceil(self.stall_seconds / STALL_BIT_SECONDS)):
                await asyncio.wait({looked}, timeout=STALL_BIT_SECONDS)
                if looked.done():
                    break
        finally:
            self.looking -= 1
        if not looked.done():
            looked.cancel()
            why = f"a write did not end within {self.stall_seconds:g} s (ledger.stall_seconds)"
            # The batch under way may still reach the medium: what asked for it waits no longer.
            self._fail(errors.LEDGER_STALLED(why), self._batch)
            self._wake_up()
        elif (exc := looked.exception()) is not None:
            self._fail_for(exc)

    async def read_back(self) -> int:
        """Reads from the medium what was written since the last time; returns how many bytes.

        Beside the writer's thread: it takes as long as ``ledger verify`` for as much. The run has
        failed where anything else lies there.
        """
        async with self._reading:
            if self.failure is not None or not self.seq:
                return 0
            self.looking += 1
            try:
                return await asyncio.to_thread(self._read_back.to, self.seq, self.head)
            except (errors.SidecarError, OSError) as exc:
                self._fail_for(exc)
                return 0
            finally:
                self.looking -= 1

    async def _look_often(self) -> None:
        try:
            while self.failure is None:
                await asyncio.sleep(LOOK_SECONDS)
                await self.look()
        except Exception as exc:  # noqa: BLE001 - the run must not go on without a look
            self._fail_for(exc)

    def _fail_for(self, exc: BaseException) -> None:
        """For what was found beside the task, which then leaves the latch's file."""
        self._fail(_failure(exc))
        self._wake_up()

    def in_turn(self, work: Callable[[], None]) -> asyncio.Future[None]:
        """Has ``work`` done between two batches, where the disk may block."""
        return self._disk_thread.submit(work)

    # --- the task ---------------------------------------------------------------------------------

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await self._drain(loop, self._batch)
        except BaseException as exc:
            # The writer has stopped, so every receipt has to fail now: it cannot come any more.
            self._fail(_failure(exc), self._batch)
            if not isinstance(exc, Exception):
                self._disk_thread.submit(self._leave_latch)
                raise
        finally:
            self.busy_since = None
        if self.failure is not None:
            await self._disk_thread.submit(self._leave_latch)

    async def _drain(self, loop: asyncio.AbstractEventLoop, batch: list[Posted]) -> None:
        """Writes until closed or failed; ``batch`` is what is under way, for the caller to fail."""
        while self.failure is None and (self._queue or not self._closing):
            if not (self._wanted or self._overdue or self._closing):
                self._wake = loop.create_future()
                await self._wake
                self._wake = None
                continue
            await self._gather()
            self._take(batch)
            if not batch:
                continue  # a failure while it gathered has emptied the queue: nothing is written
            self.busy_since = loop.time()
            await self._write_batch(loop, batch)
            self.busy_since = None
            batch.clear()

    async def _gather(self) -> None:
        """Lets a batch grow while it does, as long as that is a moment."""
        seen = quiet = 0
        for _ in range(GATHERING_TURNS_MAX):
            quiet = quiet + 1 if len(self._queue) == seen else 0
            if quiet == QUIET_TURNS or len(self._queue) >= BATCH_RECORDS_MAX:
                break
            seen = len(self._queue)
            await asyncio.sleep(0)

    async def _write_batch(self, loop: asyncio.AbstractEventLoop, batch: list[Posted]) -> None:
        lines, receipts, latch = self._encode(batch)
        wanted = latch is not None or any(future is not None for _, future in batch)
        blob = b"".join(lines)
        began = loop.time()
        await self._disk_thread.submit(self._commit, blob, wanted, latch)
        took = loop.time() - began
        self.seq, self.head = receipts[-1].seq, receipts[-1].head
        if self._on_batch is not None:
            self._on_batch([item.record for item, _ in batch], len(blob), took)
        for (_, future), receipt in zip(batch, receipts, strict=True):
            if future is not None and not future.done():
                future.set_result(receipt)

    def _encode(self, batch: list[Posted]) -> tuple[list[bytes], list[Receipt], bytes | None]:
        at = self._clock()
        seq, head = self.seq, self.head
        lines: list[bytes] = []
        receipts: list[Receipt] = []
        latch: bytes | None = None
        for item, _ in batch:
            seq += 1
            record = item.record
            line, head = encode_line(
                record.kind, record.number, item.data_json, seq=seq, at=at, prev=head
            )
            lines.append(line)
            receipts.append(Receipt(seq, head))
            if isinstance(record, LatchClosed):
                latch = latch_file(seq=seq, at=at, total=head, cause=record.cause)
        return lines, receipts, latch

    def _commit(self, blob: bytes, sync: bool, latch: bytes | None) -> None:
        """In the writer's thread: rotate if full, write once, sync once, then the latch's file."""
        files = self._files
        if files.segment == 0 or files.segment_bytes >= self._segment_bytes_max:
            files.start_segment(files.segment + 1)
        files.append(blob, sync=sync)
        if latch is not None:
            with contextlib.suppress(FileExistsError):  # an earlier cause: the first one wins
                files.leave_latch(latch)

    def _fail(self, failure: errors.LedgerFailed, batch: Sequence[Posted] = ()) -> None:
        """Fails every receipt at once, and then the run."""
        first = self.failure is None
        self.failure = self.failure or failure
        for item, future in (*batch, *self._queue):
            if self._cause is None and isinstance(item.record, LatchClosed):
                self._cause = item.record.cause  # the run had failed before its ledger did
            if future is not None and not future.done():
                future.set_exception(failure.failure(failure.message))
                future.exception()  # an abandoned receipt must not warn at collection
        self._queue.clear()
        if first:
            self._on_failure(failure)

    def _leave_latch(self) -> None:
        """One try to leave the cause beside the journal, which is not touched again."""
        failure, cause = self.failure, self._cause
        if cause is None:
            word = errors.LEDGER_FAILED.closes_as if failure is None else failure.closes_as
            detail = "" if failure is None else failure.message
            cause = Cause(word, None, attempt_consumed=False, detail=detail)
        # The room set aside is small, and a text that is cut short there would name no cause.
        shortened = replace(cause, detail=cause.detail[:LATCH_DETAIL_CHARACTERS])
        # The file exists: an earlier cause, and the first one wins. The disk refuses the write: the
        # process refuses all requests without it, and exits 4.
        with contextlib.suppress(OSError):
            value = {"at": self._clock(), **shortened.to_data()}
            self._files.leave_latch(encode_json(value) + b"\n", alone=True)

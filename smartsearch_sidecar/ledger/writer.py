"""The one task that owns a run's files: it drains, numbers, chains, writes once, syncs once.

Everyone else posts a ``Draft`` (a decision already folded into the run's state) and may await its
receipt. What has queued while a sync was under way is written by the next one, so the cost per
answer falls as load rises. A failed write or sync is never tried again: every receipt fails, and
``on_failure`` is told once.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.file import LATCH, RunFiles
from smartsearch_sidecar.ledger.record import Draft, Kind, encode_json, encode_line

BATCH_RECORDS_MAX = 512  # bounds one write to a few MB, so that no receipt waits for a whole backlog
QUEUE_RECORDS_MAX = 65_536  # admission bounds the queue far below; reaching this is a fault of ours


@dataclass(frozen=True, slots=True)
class Receipt:
    """Where a record lies: its sequence number and its sum, the head after it."""

    seq: int
    head: str


def wall_clock() -> str:
    """UTC with microseconds, e.g. ``2026-12-02T04:13:00.123456Z``."""
    return datetime.fromtimestamp(time.time(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")



# A posted decision, and who waits for it.
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
        on_failure: Callable[[errors.LedgerFailed], None],
        observe: Callable[[int, int, float], None] | None = None,
        clock: Callable[[], str] = wall_clock,
    ) -> None:
        """``seq`` and ``head`` are those of the last record that is on disk (0 and the claim's
        digest for a new run); ``observe(records, bytes, seconds)`` is told of each batch.
        """
        self._files = files
        self.seq = seq
        self.head = head
        self._segment_bytes_max = segment_bytes_max
        self._on_failure = on_failure
        self._observe = observe
        self._clock = clock
        self._queue: deque[Posted] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._closing = False
        self._busy = False
        self.failure: errors.LedgerFailed | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._task: asyncio.Task[None] | None = None

    # --- what everyone else calls, on the loop ------------------------------------------------------

    def start(self) -> None:
        """Starts the task; drafts posted before wait in the queue."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="ledger-writer")

    @property
    def queued(self) -> int:
        """Records posted and not yet taken into a batch."""
        return len(self._queue)

    def post(self, item: Draft) -> None:
        """Hands a decision over; it is written in the order of posting, synced with a later one.

        Raises ``LedgerFailed`` after a failure: nothing more will ever be written.
        """
        self._put(item, None)

    def post_for_receipt(self, item: Draft) -> asyncio.Future[Receipt]:
        """Like ``post``; the future resolves once the record is on the medium."""
        future: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        self._put(item, future)
        return future

    def _put(self, item: Draft, future: asyncio.Future[Receipt] | None) -> None:
        if self.failure is not None:
            raise self.failure
        if self._closing or len(self._queue) >= QUEUE_RECORDS_MAX:
            raise errors.LedgerFailed("the ledger takes no more records")
        self._queue.append((item, future))
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def flush(self, record: Draft) -> Receipt:
        """Posts one record and waits until it and everything before it is durable."""
        return await self.post_for_receipt(record)

    @property
    def idle(self) -> bool:
        """Nothing queued and nothing being written."""
        return not self._queue and not self._busy

    async def close(self) -> None:
        """Writes what is queued, stops the task, and frees the thread. The files stay open."""
        self._closing = True
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
        if self._task is not None:
            await self._task
        self._pool.shutdown(wait=True)

    # --- the task -------------------------------------------------------------------------------------

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        batch: list[Posted] = []
        try:
            while self._queue or not self._closing:
                if not self._queue:
                    self._wake = loop.create_future()
                    await self._wake
                    self._wake = None
                    continue
                batch = [self._queue.popleft() for _ in range(min(len(self._queue), BATCH_RECORDS_MAX))]
                self._busy = True
                await self._write_batch(loop, batch)
                self._busy = False
        except Exception as exc:  # whatever stopped the writer, nobody may wait for it any longer
            self._busy = False
            reason = getattr(exc, "strerror", None) or f"{type(exc).__name__}: {exc}"
            self._fail(errors.LedgerFailed(f"the ledger cannot be written: {reason}"), batch)
            await loop.run_in_executor(self._pool, self._leave_latch)

    async def _write_batch(self, loop: asyncio.AbstractEventLoop, batch: list[Posted]) -> None:
        lines, receipts, latch = self._encode(batch)
        wanted = latch is not None or any(future is not None for _, future in batch)
        blob = b"".join(lines)
        began = loop.time()
        await loop.run_in_executor(self._pool, self._commit, blob, wanted, latch)
        took = loop.time() - began
        if self._observe is not None:
            self._observe(len(batch), len(blob), took)
        for (_, future), receipt in zip(batch, receipts, strict=True):
            if future is not None and not future.done():
                future.set_result(receipt)

    def _encode(self, batch: list[Posted]) -> tuple[list[bytes], list[Receipt], bytes | None]:
        at = self._clock()
        lines: list[bytes] = []
        receipts: list[Receipt] = []
        latch: bytes | None = None
        for item, _ in batch:
            self.seq += 1
            line, self.head = encode_line(item, seq=self.seq, at=at, prev=self.head)
            lines.append(line)
            receipts.append(Receipt(self.seq, self.head))
            if item.record.kind == Kind.LATCH_CLOSED:
                latch = encode_json(
                    {"seq": self.seq, "at": at, "sum": self.head, **item.record.data}
                )
        return lines, receipts, latch

    def _commit(self, blob: bytes, sync: bool, latch: bytes | None) -> None:
        """In the writer's thread: rotate if full, write once, sync once, then the latch's file."""
        files = self._files
        if files.segment == 0 or files.segment_bytes >= self._segment_bytes_max:
            files.start_segment(files.segment + 1)
        files.append(blob, sync=sync)
        if latch is not None:
            files.create_only(LATCH, latch + b"\n")

    def _fail(self, failure: errors.LedgerFailed, batch: list[Posted]) -> None:
        """Closes the door at once: everybody who waits is told, and so is the run's state."""
        self.failure = failure
        for _, future in (*batch, *self._queue):
            if future is not None and not future.done():
                future.set_exception(failure)
                future.exception()  # an abandoned receipt must not warn at collection
        self._queue.clear()
        self._on_failure(failure)

    def _leave_latch(self) -> None:
        """One try to leave the cause beside the journal, which is not touched again."""
        failure = self.failure
        if failure is None:
            return
        value = {
            "at": self._clock(),
            "cause": failure.cause,
            "number": None,
            "attempt_consumed": False,
            "detail": failure.message,
        }
        try:
            self._files.create_only(LATCH, encode_json(value) + b"\n")
        except FileExistsError:
            return  # an earlier cause is there already, and the first one wins
        except OSError:
            return  # a disk that takes nothing: the process still refuses, and exits 4

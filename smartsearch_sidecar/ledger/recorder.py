"""Decisions to records: encode, fold and post in one step of the loop; the latch; and the ``Run``.

The state is read and written on the loop only. A decision is encoded first (so that nothing that
cannot be recorded is ever folded), folded at once, and handed to the writer before anything else
can run: the order of folding is the order of the journal.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.writer import Receipt, Writer
from smartsearch_sidecar.metrics import Observer
from smartsearch_sidecar.run.line import Draft
from smartsearch_sidecar.run.record import Cause, LatchClosed, Record
from smartsearch_sidecar.run.state import RunState
from smartsearch_sidecar.stalls import Stalls


def utf8_safe(sentence: str) -> str:
    """A sentence as it can be recorded: what has no UTF-8 form is spelled out. A provider's own
    words may hold a lone surrogate, and must not keep their cause from the ledger.
    """
    return sentence.encode("utf-8", "backslashreplace").decode()


class Recorder:
    """The run's state and its writer, kept in step. Everything here is called on the loop.

    ``refused`` counts refusals by cause (or code) in memory, also those after the latch closed;
    ``latched`` is set once the latch is closed.
    """

    def __init__(self, state: RunState, writer: Writer) -> None:
        self._state = state
        self._writer = writer
        self.refused: Counter[str] = Counter()
        self.latched = asyncio.Event()
        self._latch_receipt: asyncio.Future[Receipt] | None = None
        if state.closed:
            self.latched.set()

    def fold(self, record: Record) -> Draft:
        """Encodes and folds a decision, which the caller posts in the same step."""
        item = Draft(record, record.to_json())
        self._state.fold(record)
        return item

    def post(self, record: Record) -> None:
        """Folds a decision and hands it to the writer. Raises ``LedgerFailed`` after a failure."""
        self._writer.post(self.fold(record))

    def post_all(self, records: Sequence[Record]) -> None:
        """``post`` for decisions that were made together: all of them are encoded, or none."""
        for item in self._fold_all(records):
            self._writer.post(item)

    def post_all_for_receipt(self, records: Sequence[Record]) -> asyncio.Future[Receipt]:
        """Like ``post_all``, for at least one decision; the future resolves once all of them are
        on the medium: the writer syncs in the order of posting, and fails for good.
        """
        *before, last = self._fold_all(records)
        for item in before:
            self._writer.post(item)
        return self._writer.post_for_receipt(last)

    def _fold_all(self, records: Sequence[Record]) -> list[Draft]:
        items = [Draft(record, record.to_json()) for record in records]
        self._state.fold_all(records)
        return items

    def post_for_receipt(self, record: Record) -> asyncio.Future[Receipt]:
        """Like ``post``; the future resolves once the record is on the medium."""
        return self._writer.post_for_receipt(self.fold(record))

    def close_latch(
        self, cause: str, *, number: int | None = None, consumed: bool = False, detail: str = ""
    ) -> None:
        """Closes the latch with its first cause; a later one changes nothing. Never raises."""
        if self._state.closed:
            return
        item = self.fold(LatchClosed(Cause(cause, number, consumed, utf8_safe(detail))))
        self.latched.set()
        try:
            self._latch_receipt = self._writer.post_for_receipt(item)
        except errors.LedgerFailed:
            return  # the ledger takes no record any more; the state refuses all the same

    def ledger_failed(self, failure: errors.LedgerFailed) -> None:
        """Called once by the writer: from now on the run refuses every request."""
        if not self._state.closed:
            cause = Cause(failure.closes_as, None, attempt_consumed=False, detail=failure.message)
            self._state.fold(LatchClosed(cause))
        self.latched.set()

    async def refuse(self, exc: errors.SidecarError) -> None:
        """Counts a refusal, closes the latch where it must, and returns once that is durable.

        Called once a request, by what answers it. A lost client is not counted here: it is counted
        where the loss is noticed, which is often after the answer.
        """
        if not errors.CLIENT_GONE.matches(exc):
            self.refused[exc.closes_as] += 1
        await self.latch_for(exc)

    async def latch_for(self, exc: errors.SidecarError) -> None:
        """Closes the latch where a failure has to, and returns once that is durable."""
        if exc.cause is not None:
            self.close_latch(exc.cause, detail=exc.message)
            await self.latch_durable()

    async def latch_durable(self) -> None:
        """Returns once a closed latch is on disk; raises ``LedgerFailed`` where it cannot be."""
        receipt = self._latch_receipt
        if receipt is not None and not receipt.done():
            await asyncio.shield(receipt)
        failure = self._writer.failure
        if failure is not None:
            raise failure.failure(failure.message)


class SharedQuota(Protocol):
    """What the nodes of one run share: room within what this node has leased.

    A node asks before each number it gives; what it holds was leased, so asking costs a comparison.
    Each method returns in the very step of the loop in which it found room, so that its caller can
    number and fold before any other task runs.
    """

    async def room_to_search(self, deadline: float) -> None:
        """Waits until one more search may be numbered; ``deadline`` is loop time.

        Raises ``LatchClosed``, ``QuotaExhausted`` where all of the run's is leased, or
        ``ClusterUnreachable`` where the servers between the nodes do not answer.
        """

    async def room_to_score(self, wanted: Callable[[], Mapping[str, int]], deadline: float) -> None:
        """The same for the scores that ``wanted()`` counts per split, all of them or none."""

    def room_to_call(self, split: str, wanted: int) -> int:
        """How many of ``wanted`` helper calls fit; if none does, more is asked for, and ``woken``
        are called then.
        Raises as the others do, where waiting cannot help.
        """

    def woken(self, wake: Callable[[], None]) -> None:
        """``wake`` is called, on the loop, whenever ``room_to_call`` may have another answer."""

    async def answers_known(self, deadline: float) -> None:
        """Returns once every answer that any node had handed over by now is known here. Raises
        ``ClusterUnreachable`` where that cannot be said.
        """


@dataclass(frozen=True, slots=True)
class Run:
    """What the services, the gate and the page of one run share.

    ``state`` is read to decide; ``recorder`` folds and records what was decided, through
    ``writer``; ``quota`` is ``None`` in a run of one node; ``observer`` hears of every record that
    is on the medium; ``stalls`` holds what is under way.
    """

    state: RunState
    recorder: Recorder
    writer: Writer
    quota: SharedQuota | None
    observer: Observer
    stalls: Stalls

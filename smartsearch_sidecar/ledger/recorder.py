"""Decisions to records: encode, fold and post in one step of the loop; and the latch.

The state is read and written on the loop only. A decision is encoded first (so that nothing that
cannot be recorded is ever folded), folded at once, and handed to the writer before anything else
can run: the order of folding is the order of the journal.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.writer import Receipt, Writer
from smartsearch_sidecar.run.record import Draft, Kind, Record, draft
from smartsearch_sidecar.run.state import Cause, RunState


def utf8_safe(sentence: str) -> str:
    """A sentence as it can be recorded: what has no UTF-8 form is spelled out.

    A provider's own words may hold a lone surrogate, and must not keep their cause from the ledger.
    """
    return sentence.encode("utf-8", "backslashreplace").decode()


Told = Callable[[Kind, int | None, Mapping[str, Any], bytes | None], None]
"""Told of each decision once it is folded: kind, number, data, documents. Must not raise."""


class Recorder:
    """The run's state and its writer, kept in step. Everything here is called on the loop.

    ``refused`` counts refusals by cause (or code) in memory, also those after the latch closed;
    ``latched`` is set once the latch is closed.
    """

    def __init__(self, state: RunState, writer: Writer, *, told: Told | None = None) -> None:
        self.state = state
        self._told = told
        self.writer = writer
        self.refused: Counter[str] = Counter()
        self.latched = asyncio.Event()
        self._latch_receipt: asyncio.Future[Receipt] | None = None
        if state.closed:
            self.latched.set()

    def fold(
        self,
        kind: Kind,
        number: int | None,
        data: Mapping[str, Any],
        documents_json: bytes | None = None,
    ) -> Draft:
        """Encodes and folds a decision, which the caller posts in the same step."""
        item = draft(kind, number, data, documents_json=documents_json)
        self.state.fold(item.record)
        if self._told is not None:
            self._told(kind, number, data, documents_json)
        return item

    def post(self, kind: Kind, number: int | None, data: Mapping[str, Any]) -> None:
        """Folds a decision and hands it to the writer. Raises ``LedgerFailed`` after a failure."""
        self.writer.post(self.fold(kind, number, data))

    async def record(self, kind: Kind, number: int | None, data: Mapping[str, Any]) -> Receipt:
        """Folds a decision and returns once it is on the medium."""
        return await self.writer.post_for_receipt(self.fold(kind, number, data))

    # --- the latch --------------------------------------------------------------------------------

    def close_latch(
        self, cause: str, *, number: int | None = None, consumed: bool = False, detail: str = ""
    ) -> None:
        """Closes the latch with its first cause; a later one changes nothing. Never raises."""
        if self.state.closed:
            return
        value = Cause(cause, number, consumed, utf8_safe(detail))
        item = self.fold(Kind.LATCH_CLOSED, number, value.as_data())
        self.latched.set()
        try:
            self._latch_receipt = self.writer.post_for_receipt(item)
        except errors.LedgerFailed:
            return  # the ledger is beyond saying so; the state refuses all the same

    def ledger_failed(self, failure: errors.LedgerFailed) -> None:
        """Told once by the writer: the door closes at once, whatever the disk can still take."""
        if not self.state.closed:
            value = Cause("ledger_failed", None, False, failure.message)
            self.state.fold(Record(Kind.LATCH_CLOSED.value, None, value.as_data()))
        self.latched.set()

    async def refuse(self, exc: errors.SidecarError) -> None:
        """Counts a refusal, closes the latch where it must, and returns once that is durable."""
        if not exc.counted:
            self.refused[exc.cause or exc.code] += 1
            exc.counted = True
        if exc.cause is not None:
            self.close_latch(exc.cause, detail=exc.message)
            await self.latch_durable()

    async def latch_durable(self) -> None:
        """Returns once a closed latch is on disk; raises ``LedgerFailed`` where it cannot be."""
        receipt = self._latch_receipt
        if receipt is not None and not receipt.done():
            await asyncio.shield(receipt)
        if self.writer.failure is not None:
            raise errors.LEDGER_FAILED(self.writer.failure.message)

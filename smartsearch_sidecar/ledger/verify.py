"""Whether a run directory is one unbroken history: read-only, streaming, in constant memory.

Checked: the sum of every line, the chain, the order, that the fold takes every record and that the
counts which records state are the fold's own, ``claim.json`` against the first record,
``latch.json`` against ``latch.closed``, and a receipt against all of it. The passages of answers
are covered by the sums; ``documents=True`` reads them as JSON too.

A run that is being served may be verified: its last line may still be under way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.file import CLAIM, LATCH
from smartsearch_sidecar.ledger.reader import History, Place, Problem, Progress, RunReader, Scan
from smartsearch_sidecar.ledger.receipt import CheckpointReceipt, ReceiptCheck
from smartsearch_sidecar.ledger.recovery import (
    Ending,
    Verdict,
    judge,
    observe,
    read_object,
    unrecorded,
)
from smartsearch_sidecar.run.record import Cause, CheckpointAccepted
from smartsearch_sidecar.run.state import RunState

# Of a verification, what its JSON states as it is.
_REPORTED = (
    *("receipt_problem", "live", "torn_bytes", "segments", "bytes"),
    *("seq", "head", "claim_sha256", "first_at", "last_at"),
)


@dataclass(frozen=True, slots=True)
class Verification:
    """What a verification came to. ``problem`` is ``None`` where everything holds.

    ``live`` says that the run is being served; then the last line may be incomplete, and ``ending``
    says so. ``torn_bytes`` are at the end of the journal without being a record. ``cause`` closed
    the latch, also where only ``latch.json`` says so. ``notes`` are sentences on what a crash left
    behind without harming the history.
    """

    directory: Path
    problem: Problem | None
    receipt_problem: str | None
    notes: tuple[str, ...]
    live: bool
    ending: Ending
    torn_bytes: int
    segments: int
    bytes: int
    seq: int
    head: str
    claim_sha256: str | None
    first_at: str | None
    last_at: str | None
    kinds: Mapping[str, int]
    state: RunState
    cause: Cause | None
    checkpoint: Mapping[str, Any] | None

    @property
    def ok(self) -> bool:
        """The history is whole, and so is what the receipt says of it."""
        return self.problem is None and self.receipt_problem is None

    def as_json(self) -> dict[str, Any]:
        state = self.state
        return {
            "ok": self.ok,
            "problem": None if self.problem is None else str(self.problem),
            "notes": list(self.notes),
            "ending": self.ending.value,
            **{name: getattr(self, name) for name in _REPORTED},
            "records": dict(self.kinds),
            "usage": state.usage(),
            "unsettled": len(state.searching),
            "restarts": state.restarts,
            "closed_cleanly": state.closed_cleanly,
            "cause": None if self.cause is None else self.cause.to_data(),
            "last_checkpoint": None if self.checkpoint is None else dict(self.checkpoint),
        }


def verify(
    directory: Path,
    *,
    receipt: CheckpointReceipt | None = None,
    documents: bool = False,
    progress: Progress | None = None,
) -> Verification:
    """Verifies a run directory. Raises ``RunDirectoryError`` where it cannot be read."""
    reader = RunReader(directory)
    # In this order: a latch.json that is there has its record in what is read after it.
    live = reader.live()
    served, begun = reader.served(), reader.begun()
    latch = reader.latch()
    claim = reader.read(CLAIM)
    history = History(claim, documents=documents)
    scan = Scan(reader, history, progress=progress)
    held = None if receipt is None else ReceiptCheck(receipt, history)
    checkpoint: dict[str, Any] | None = None
    for line in scan:
        if isinstance(line.record, CheckpointAccepted):
            record = line.record
            checkpoint = {"number": record.number, "step": record.step}
            checkpoint |= {"seq": line.seq, "head": line.sum, "at": line.at}
        if held is not None:
            held.see(line)
    verdict = judge(observe(scan, latch, begun=begun))
    return Verification(
        directory=directory,
        problem=_problem(scan, latch, verdict, live=live),
        receipt_problem=None if held is None else held.problem(),
        notes=() if live else tuple(_notes(scan, latch, verdict, served=served)),
        live=live,
        ending=verdict.ending,
        torn_bytes=scan.torn_bytes,
        segments=len(scan.segments),
        bytes=scan.bytes,
        seq=history.seq,
        head=history.head,
        claim_sha256=history.claim_sha256,
        first_at=history.first_at,
        last_at=None if history.last is None else history.last.at,
        kinds=history.kinds,
        state=history.state,
        cause=history.state.cause or (None if latch is None else unrecorded(latch)),
        checkpoint=checkpoint,
    )


def _problem(scan: Scan, latch: bytes | None, verdict: Verdict, *, live: bool) -> Problem | None:
    if scan.problem is not None:
        return scan.problem
    if verdict.ending is Ending.CORRUPT:
        return Problem(Place(LATCH if latch is not None else "journal"), verdict.reason or "")
    if scan.torn_bytes and not live:
        return Problem(
            scan.place,
            f"the last line is torn ({scan.torn_bytes} bytes): the process was killed while it "
            "wrote, and no answer was given from them; `serve --resume` sets them aside",
        )
    if not scan.history.seq and not live:
        return Problem(Place("journal"), "it holds no record: the run never began")
    return None


def _notes(scan: Scan, latch: bytes | None, verdict: Verdict, *, served: bool) -> Iterator[str]:
    """What a crash left behind, and a resume mends."""
    if verdict.write_latch:
        yield "latch.json is missing; the journal says that the latch is closed"
    elif latch is not None and not read_object(latch):
        yield "latch.json is there and cut short: the run has failed"
    elif verdict.closed and scan.history.latch is None:
        yield "latch.json says that the run has failed; the journal could not record it"
    if scan.end is not None and scan.end.newline and not scan.torn_bytes:
        yield "the last line is whole and lacks its newline"
    if served:
        yield "endpoints.json is still there: the process did not end in order"


def describe_previous(directory: Path) -> dict[str, Any]:
    """What a new run's claim says of the run it follows (``run.previous``), verified, read-only.

    Name and claim, the last record's ``seq`` and ``head``, how the run ended, and the last
    checkpoint it accepted. Raises ``RunDirectoryError`` where the old run is still served,
    ``LedgerCorrupt`` where its history is damaged; one with a torn end is taken.
    """
    found = verify(directory)
    if found.live:
        raise errors.RUN_DIRECTORY(
            f"run.previous = {directory} is still being served: stop it before a run follows it"
        )
    if found.problem is not None and not (found.ending is Ending.TORN and found.seq):
        raise errors.LEDGER_CORRUPT(
            f"run.previous = {directory} is no whole history: {found.problem}"
        )
    claim = RunReader(directory).read(CLAIM) or b"{}"
    cause = found.cause
    return {
        "run_id": orjson.loads(claim).get("run_id"),
        "claim_sha256": found.claim_sha256,
        "seq": found.seq,
        "head": found.head,
        "closed_cleanly": found.state.closed_cleanly,
        "cause": None if cause is None else cause.cause,
        "usage": found.state.usage(),
        "last_checkpoint": None if found.checkpoint is None else dict(found.checkpoint),
    }

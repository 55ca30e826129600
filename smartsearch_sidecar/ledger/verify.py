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
from smartsearch_sidecar.ledger.disk import CLAIM, LATCH
from smartsearch_sidecar.ledger.history import History, Tail
from smartsearch_sidecar.ledger.reader import Problem, Progress, RunReader, Scan
from smartsearch_sidecar.ledger.receipts import CheckpointReceipt, hold
from smartsearch_sidecar.ledger.recovery import Action, Ending, Verdict, judge, read_latch
from smartsearch_sidecar.ledger.resume import observe
from smartsearch_sidecar.run.line import Line, claim_digest
from smartsearch_sidecar.run.record import CheckpointAccepted
from smartsearch_sidecar.run.state import RunState

__all__ = ["CheckpointReceipt", "Verification", "describe_previous", "verify"]


@dataclass(frozen=True, slots=True)
class Verification:
    """What a verification came to. ``problem`` is ``None`` where everything holds.

    ``live`` says that the run is being served; then the last line may be incomplete, and ``ending``
    says so. ``torn_bytes`` are at the end of the journal without being a record. ``notes`` are
    sentences on what a crash left behind without harming the history.
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
    checkpoint: Mapping[str, Any] | None

    @property
    def ok(self) -> bool:
        """The history is whole, and so is what the receipt says of it."""
        return self.problem is None and self.receipt_problem is None

    def as_json(self) -> dict[str, Any]:
        """The JSON value of a report."""
        state = self.state
        return {
            "ok": self.ok,
            "problem": None if self.problem is None else str(self.problem),
            "receipt_problem": self.receipt_problem,
            "notes": list(self.notes),
            "live": self.live,
            "ending": self.ending.value,
            "torn_bytes": self.torn_bytes,
            "segments": self.segments,
            "bytes": self.bytes,
            "seq": self.seq,
            "head": self.head,
            "claim_sha256": self.claim_sha256,
            "first_at": self.first_at,
            "last_at": self.last_at,
            "records": dict(self.kinds),
            "usage": state.usage(),
            "unsettled": len(state.searching),
            "restarts": state.restarts,
            "closed_cleanly": state.closed_cleanly,
            "cause": None if state.cause is None else state.cause.to_data(),
            "last_checkpoint": None if self.checkpoint is None else dict(self.checkpoint),
        }


def verify(
    directory: Path,
    *,
    receipt: CheckpointReceipt | None = None,
    documents: bool = False,
    progress: Progress | None = None,
) -> Verification:
    """Verifies a run directory. Raises ``RunDirectoryError`` where there is none to be read."""
    reader = RunReader(directory)
    # In this order: a latch.json that is there has its record in what is read after it.
    live = reader.live()
    served = reader.served()
    latch = reader.read(LATCH)
    claim = reader.read(CLAIM)
    history = History(claim, documents=documents)
    scan = Scan(reader, history, progress=progress)
    at_receipt: Line | None = None
    healthy = False
    asked = 0
    if receipt is not None:
        asked = receipt.place(None if claim is None else claim_digest(claim)).seq
    checkpoint: dict[str, Any] | None = None
    for line in scan:
        if isinstance(line.record, CheckpointAccepted):
            checkpoint = _checkpoint(line, line.record)
        if line.seq == asked:
            at_receipt = line
            healthy = history.state.settled and not history.state.closed
    verdict = judge(observe(scan, latch, served=served))
    problem = scan.problem
    if problem is None and verdict.action is Action.REFUSE:
        problem = Problem(LATCH if latch is not None else "journal", 0, 0, verdict.reason or "")
    torn = len(scan.tail) - scan.end.keep if scan.end and scan.end.tail is Tail.TORN else 0
    if problem is None and torn and not live:
        place = scan.place
        problem = Problem(place.file, place.line, place.offset, _torn_reason(torn))
    if problem is None and not history.seq and not live:
        problem = Problem("journal", 0, 0, "it holds no record: the run never began")
    return Verification(
        directory=directory,
        problem=problem,
        receipt_problem=None
        if receipt is None
        else hold(receipt, at_receipt, history, healthy=healthy),
        notes=() if live else tuple(_notes(scan, latch, verdict, served=served)),
        live=live,
        ending=verdict.ending,
        torn_bytes=torn,
        segments=len(scan.segments),
        bytes=scan.bytes,
        seq=history.seq,
        head=history.head,
        claim_sha256=history.claim_sha256,
        first_at=history.first_at,
        last_at=None if history.last is None else history.last.at,
        kinds=history.kinds,
        state=history.state,
        checkpoint=checkpoint,
    )


def _notes(scan: Scan, latch: bytes | None, verdict: Verdict, *, served: bool) -> Iterator[str]:
    """What a crash left behind, and a resume mends."""
    if verdict.write_latch:
        yield "latch.json is missing; the journal says that the latch is closed"
    elif latch is not None and not read_latch(latch):
        yield "latch.json is there and cut short: the run has failed"
    elif verdict.closed and scan.history.latch is None:
        yield "latch.json says that the run has failed; the journal could not record it"
    if scan.end is not None and scan.end.tail is Tail.UNTERMINATED:
        yield "the last line is whole and lacks its newline"
    if served:
        yield "endpoints.json is still there: the process did not end in order"


def _torn_reason(torn: int) -> str:
    return (
        f"the last line is torn ({torn} bytes): the process was killed while it wrote, and nothing "
        "was answered from them; `serve --resume` sets them aside"
    )


def _checkpoint(line: Line, record: CheckpointAccepted) -> dict[str, Any]:
    return {
        "number": record.number,
        "step": record.step,
        "seq": line.seq,
        "head": line.sum,
        "at": line.at,
    }


def describe_previous(directory: Path, *, progress: Progress | None = None) -> dict[str, Any]:
    """What a new run's claim says of the run it follows (``run.previous``), verified, read-only.

    Name and claim, the last record's ``seq`` and ``head``, how the run ended, and the last
    checkpoint it accepted. Raises ``RunDirectoryError`` where the old run is still served,
    ``LedgerCorrupt`` where it is no history; a torn end is one.
    """
    found = verify(directory, progress=progress)
    if found.live:
        raise errors.RUN_DIRECTORY(
            f"run.previous = {directory} is still being served: stop it before a run follows it"
        )
    if found.problem is not None and not (found.ending is Ending.TORN and found.seq):
        raise errors.LEDGER_CORRUPT(
            f"run.previous = {directory} is no whole history: {found.problem}"
        )
    claim = RunReader(directory).read(CLAIM) or b"{}"
    cause = found.state.cause
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

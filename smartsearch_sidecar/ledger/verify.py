"""Whether a run directory is one unbroken history: read-only, streaming, in constant memory.

Checked: the sum of every line, the chain, the order, that the fold takes every record and that the
counts which records state are the fold's own, ``claim.json`` against the first record,
``latch.json`` against ``latch.closed``, and a receipt against all of it. The passages of answers
are covered by the sums; ``documents=True`` reads them as JSON too.

The receipt of a run of many nodes names a record of every node's journal. It is proven whole where
each of them is found in the directory with that node's claim.

A run that is being served may be verified: its last line may still be under way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.file import CLAIM, LATCH
from smartsearch_sidecar.ledger.reader import History, Place, Problem, Progress, RunReader, Scan
from smartsearch_sidecar.ledger.recovery import Ending, Verdict, judge, observe, read_object
from smartsearch_sidecar.run.json_values import is_sha256
from smartsearch_sidecar.run.line import Line, claim_digest, newer_format
from smartsearch_sidecar.run.record import CheckpointAccepted
from smartsearch_sidecar.run.state import RunState

RECEIPT_FORMAT = 1
"""Of a receipt, stated in it. It grows when an older version would read a receipt wrongly."""

# What the receipt of a checkpoint and its record both say.
_RECEIPT_KEYS = (
    *("step", "path", "manifest_sha256", "occurrence", "usage", "nodes"),
    *("gaps", "searches", "idle", "result_blocks"),
)


@dataclass(frozen=True, slots=True)
class ReceiptPlace:
    """A record of a journal: which claim it is under, its number and its sum."""

    claim_sha256: str
    seq: int
    head: str

    @classmethod
    def parse(cls, value: Mapping[str, Any], whose: str) -> ReceiptPlace:
        """Reads the three keys. Raises ``UsageError``; ``whose`` names the owner for it."""
        claim, seq, head = (value.get(key) for key in ("claim_sha256", "seq", "head"))
        for name, digest in (("claim_sha256", claim), ("head", head)):
            if not is_sha256(digest):
                raise errors.USAGE(f"{whose} names no {name}: keep the body of /checkpoints")
        if type(seq) is not int or seq < 1:
            raise errors.USAGE(f"{whose} names no seq: keep the body of /checkpoints")
        return cls(str(claim), seq, str(head))


@dataclass(frozen=True, slots=True)
class CheckpointReceipt:
    """The receipt of ``POST /checkpoints``, as far as it can be held against a journal.

    ``own`` is the place of its record, ``value`` the JSON. ``nodes`` are the places of all nodes at
    the moment of the checkpoint, by name; empty for a run of one.
    """

    own: ReceiptPlace
    value: Mapping[str, Any]
    nodes: Mapping[str, ReceiptPlace] = field(default_factory=dict)

    @classmethod
    def parse(cls, raw: bytes) -> CheckpointReceipt:
        """Reads a receipt. Raises ``UsageError`` for anything else."""
        try:
            value = orjson.loads(raw)
        except orjson.JSONDecodeError:
            raise errors.USAGE("the receipt is not JSON: keep the body of /checkpoints") from None
        if type(value) is not dict:
            raise errors.USAGE("the receipt is not an object: keep the body of /checkpoints")
        newer = newer_format("the receipt", value, RECEIPT_FORMAT)
        if newer is not None:
            raise errors.USAGE(newer)
        own = ReceiptPlace.parse(value, "the receipt")
        nodes = value.get("nodes", {})
        if type(nodes) is not dict or any(type(node) is not dict for node in nodes.values()):
            raise errors.USAGE("the receipt names no nodes: keep the body of /checkpoints")
        places = {
            name: ReceiptPlace.parse(node, f"the receipt, of node {name:.64},")
            for name, node in nodes.items()
        }
        return cls(own, value, places)

    def place(self, claim_sha256: str | None) -> ReceiptPlace:
        """The record of the history under this claim: the receipt's own, or a node's."""
        for place in self.nodes.values():
            if place.claim_sha256 == claim_sha256 != self.own.claim_sha256:
                return place
        return self.own

    def missing(self, claims: set[str | None]) -> list[str]:
        """The nodes whose directory is not among those with these claims."""
        return sorted(
            name for name, place in self.nodes.items() if place.claim_sha256 not in claims
        )


def _hold(
    receipt: CheckpointReceipt, line: Line | None, history: History, *, healthy: bool
) -> str | None:
    """Why a receipt is not of this history, or ``None``; ``line``, ``healthy``: of its place."""
    place = receipt.place(history.claim_sha256)
    if place.claim_sha256 != history.claim_sha256:
        return "the receipt is of another run: it names another claim.json"
    if line is None:
        return (
            f"the receipt names record {place.seq}, and this history ends at {history.seq}: its "
            "end is missing"
        )
    if line.sum != place.head:
        return f"the receipt is of another history: record {place.seq} has another sum"
    if place is not receipt.own:
        return None if healthy else f"at record {place.seq} this node was not healthy"
    if not isinstance(line.record, CheckpointAccepted):
        return f"record {place.seq} accepts no checkpoint: it is {line.record.kind}"
    value, stated = receipt.value, {**line.data, "number": line.record.number}
    for key in ("number", *_RECEIPT_KEYS):
        if key in value and value[key] != stated.get(key):
            return f"the receipt says another {key} than record {place.seq}"
    return None


# Of a verification, what its JSON states as it is.
_REPORTED = (
    *("receipt_problem", "live", "torn_bytes", "segments", "bytes"),
    *("seq", "head", "claim_sha256", "first_at", "last_at"),
)


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
    """Verifies a run directory. Raises ``RunDirectoryError`` where it cannot be read."""
    reader = RunReader(directory)
    # In this order: a latch.json that is there has its record in what is read after it.
    live = reader.live()
    served, begun = reader.served(), reader.begun()
    latch = reader.latch()
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
            record = line.record
            checkpoint = {"number": record.number, "step": record.step}
            checkpoint |= {"seq": line.seq, "head": line.sum, "at": line.at}
        if line.seq == asked:
            at_receipt = line
            healthy = history.state.settled and not history.state.closed
    verdict = judge(observe(scan, latch, begun=begun))
    refused = None if receipt is None else _hold(receipt, at_receipt, history, healthy=healthy)
    return Verification(
        directory=directory,
        problem=_problem(scan, latch, verdict, live=live),
        receipt_problem=refused,
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

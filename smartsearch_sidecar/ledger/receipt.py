"""The receipt of a checkpoint: read from a file, and held against a history.

A receipt is what its record says, between ``format``, ``accepted`` and ``number`` and where the
record lies. It holds where the history has that very record: each key, each value, no key more.

The receipt of a run of many nodes also names a record of every node's journal. It is proven whole
where each of them is found, with that node's claim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.reader import History
from smartsearch_sidecar.run.json_values import is_sha256, same
from smartsearch_sidecar.run.line import Line, newer_format
from smartsearch_sidecar.run.record import CheckpointAccepted

RECEIPT_FORMAT = 1
"""Of a receipt, stated in it. It grows when an older version would read a receipt wrongly."""

# What each receipt holds; it has the further keys of its record as well.
_ABOUT = ("format", "accepted", "number")
_RECORDED = ("step", "path", "manifest_sha256", "occurrence", "usage")
_PLACE = ("seq", "head", "claim_sha256")

KEEP = "keep the body of /checkpoints"


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
                raise errors.USAGE(f"{whose} names no {name}: {KEEP}")
        if type(seq) is not int or seq < 1:
            raise errors.USAGE(f"{whose} names no seq: {KEEP}")
        return cls(str(claim), seq, str(head))


@dataclass(frozen=True, slots=True)
class CheckpointReceipt:
    """The receipt of ``POST /checkpoints``.

    ``own`` is the place of its record, ``value`` the JSON. ``nodes`` are the places of all nodes at
    the moment of the checkpoint, by name; empty for a run of one.
    """

    own: ReceiptPlace
    value: Mapping[str, Any]
    nodes: Mapping[str, ReceiptPlace] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> CheckpointReceipt:
        """Reads a file. Raises ``UsageError`` where it holds no receipt, or cannot be read."""
        try:
            return cls.parse(path.read_bytes())
        except OSError as exc:
            raise errors.USAGE(f"receipt {path} cannot be read: {exc.strerror or exc}") from None

    @classmethod
    def parse(cls, raw: bytes) -> CheckpointReceipt:
        """Reads a receipt. Raises ``UsageError`` for anything else, which names the key."""
        try:
            value = orjson.loads(raw)
        except orjson.JSONDecodeError:
            raise errors.USAGE(f"the receipt is not JSON: {KEEP}") from None
        if type(value) is not dict:
            raise errors.USAGE(f"the receipt is not an object: {KEEP}")
        if "format" in value:  # before anything else in it is judged by the rules of this version
            newer = newer_format("the receipt", value, RECEIPT_FORMAT)
            if newer is not None:
                raise errors.USAGE(newer)
        for key in (*_ABOUT, *_RECORDED, *_PLACE):
            if key not in value:
                raise errors.USAGE(f"the receipt lacks {key}: {KEEP}")
        if value["accepted"] is not True:
            raise errors.USAGE(
                "the receipt does not say accepted: true: it is of no accepted checkpoint"
            )
        own = ReceiptPlace.parse(value, "the receipt")
        nodes = value.get("nodes", {})
        if type(nodes) is not dict or any(type(node) is not dict for node in nodes.values()):
            raise errors.USAGE(f"the receipt names no nodes: {KEEP}")
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
        """The nodes whose directory is not among those with these claims. Only the one that
        accepted the checkpoint has a record that tells which nodes there were.
        """
        missing = {name for name, place in self.nodes.items() if place.claim_sha256 not in claims}
        if self.nodes and self.own.claim_sha256 not in claims:
            named = {
                name
                for name, place in self.nodes.items()
                if place.claim_sha256 == self.own.claim_sha256
            }
            missing |= named or {"that accepted the checkpoint"}
        return sorted(missing)


class ReceiptCheck:
    """A receipt held against a history while that is read: tell it of every line, then ask it."""

    def __init__(self, receipt: CheckpointReceipt, history: History) -> None:
        self._receipt = receipt
        self._history = history
        self._place = receipt.place(history.claim_sha256)
        self._line: Line | None = None
        self._healthy = False

    def see(self, line: Line) -> None:
        """Called with each line once it is folded."""
        if line.seq == self._place.seq:
            self._line = line
            self._healthy = self._history.state.settled and not self._history.state.closed

    def problem(self) -> str | None:
        """Why the receipt is not of this history, or ``None``."""
        place, line = self._place, self._line
        if place.claim_sha256 != self._history.claim_sha256:
            return "the receipt is of another run: it names another claim.json"
        if line is None:
            return (
                f"the receipt names record {place.seq}, and this history ends at "
                f"{self._history.seq}: its end is missing"
            )
        if line.sum != place.head:
            return f"the receipt is of another history: record {place.seq} has another sum"
        if place is not self._receipt.own:
            return None if self._healthy else f"at record {place.seq} this node was not healthy"
        if not isinstance(line.record, CheckpointAccepted):
            return f"record {place.seq} accepts no checkpoint: it is {line.record.kind}"
        return self._compared(line, line.record.number)

    def _compared(self, line: Line, number: int) -> str | None:
        value, stated = self._receipt.value, {"number": number, **line.data}
        for key in sorted(value.keys() | stated.keys()):
            if key in stated:
                if key not in value:
                    return f"the receipt lacks {key}, which record {line.seq} states"
                if not same(value[key], stated[key]):
                    return f"the receipt says another {key} than record {line.seq}"
            elif key not in _ABOUT and key not in _PLACE:
                return f"the receipt says {key:.64}, and record {line.seq} does not"
        return None

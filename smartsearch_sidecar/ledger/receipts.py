"""A checkpoint's receipt, and whether a history is the one it names.

The receipt of a run of many nodes names a record of every node's journal. It is proven whole where
each of them is found in the directory with that node's claim.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.history import History
from smartsearch_sidecar.run.line import Line, newer_format
from smartsearch_sidecar.run.record import CheckpointAccepted

FORMAT = 1
"""Of a receipt, stated in it. It grows when an older version would read a receipt wrongly."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
# What the receipt of a checkpoint and its record both say.
_RECEIPT_KEYS = ("step", "path", "manifest_sha256", "occurrence", "usage", "nodes")


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
            if type(digest) is not str or not _SHA256.fullmatch(digest):
                raise errors.USAGE(f"{whose} names no {name}: keep the body of /checkpoints")
        if type(seq) is not int or seq < 1:
            raise errors.USAGE(f"{whose} names no seq: keep the body of /checkpoints")
        return cls(str(claim), seq, str(head))


@dataclass(frozen=True, slots=True)
class CheckpointReceipt:
    """The receipt of ``POST /checkpoints``, as far as it can be held against a journal.

    ``nodes`` are the places of all nodes at the moment of the checkpoint, by name; empty for a run
    of one.
    """

    claim_sha256: str
    seq: int
    head: str
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
        newer = newer_format("the receipt", value, FORMAT)
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
        return cls(own.claim_sha256, own.seq, own.head, value, places)

    def place(self, claim_sha256: str | None) -> ReceiptPlace:
        """The record of the history under this claim: the receipt's own, or a node's."""
        for place in self.nodes.values():
            if place.claim_sha256 == claim_sha256 != self.claim_sha256:
                return place
        return ReceiptPlace(self.claim_sha256, self.seq, self.head)

    def missing(self, claims: set[str | None]) -> list[str]:
        """The nodes whose directory is not among those with these claims."""
        return sorted(
            name for name, place in self.nodes.items() if place.claim_sha256 not in claims
        )


def hold(
    receipt: CheckpointReceipt, line: Line | None, history: History, *, healthy: bool
) -> str | None:
    """Why a receipt is not of this history, or ``None`` where it is.

    ``line`` is the record at the receipt's place; ``healthy`` whether the run was open and settled
    there.
    """
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
    if place.claim_sha256 != receipt.claim_sha256:
        return None if healthy else f"at record {place.seq} this node was not healthy"
    if not isinstance(line.record, CheckpointAccepted):
        return f"record {receipt.seq} accepts no checkpoint: it is {line.record.kind}"
    value, stated = receipt.value, {**line.data, "number": line.record.number}
    for key in ("number", *_RECEIPT_KEYS):
        if key in value and value[key] != stated.get(key):
            return f"the receipt says another {key} than record {receipt.seq}"
    return None

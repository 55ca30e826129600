"""One record of the journal: its kinds, its canonical bytes, its sum and its place in the chain.

A line is ``{"seq","at","prev","kind","number","data","sum"}`` followed by a newline. ``sum`` is the
sha256 of the line up to the comma before it, ``prev`` the ``sum`` of the line before (for the first
line: the sha256 of ``claim.json``), so the last ``sum`` names the claim and the whole history.

Nothing here opens a file, reads a clock or awaits.
"""

from __future__ import annotations

import enum
import hashlib
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from smartsearch_sidecar import errors


class Kind(enum.StrEnum):
    """Every kind of record a journal may hold. Names are read by other people's scripts."""

    RUN_CLAIMED = "run.claimed"
    RUN_RESUMED = "run.resumed"
    RUN_CLOSED = "run.closed"
    RETRIEVAL_REQUESTED = "retrieval.requested"
    RETRIEVAL_ANSWERED = "retrieval.answered"
    RETRIEVAL_FAILED = "retrieval.failed"
    RETRIEVAL_DECLINED = "retrieval.declined"
    DELIVERY_LOST = "delivery.lost"
    REWARD_REQUESTED = "reward.requested"
    HELPER_REQUESTED = "helper.requested"
    HELPER_ANSWERED = "helper.answered"
    HELPER_FAILED = "helper.failed"
    REWARD_ANSWERED = "reward.answered"
    REWARD_FAILED = "reward.failed"
    REWARD_REUSED = "reward.reused"
    LATCH_CLOSED = "latch.closed"
    CHECKPOINT_ACCEPTED = "checkpoint.accepted"
    CHECKPOINT_REFUSED = "checkpoint.refused"


KINDS: frozenset[str] = frozenset(kind.value for kind in Kind)

_SUM_BYTES = 64
_SUM_OPEN = b',"sum":"'
_SUM_CLOSE = b'"}'
# The end of every line, at a fixed distance from it: comma, key, 64 hex digits, quote, brace.
_TAIL_BYTES = len(_SUM_OPEN) + _SUM_BYTES + len(_SUM_CLOSE)
_A_SUM = re.compile(_SUM_OPEN + b"[0-9a-f]{64}" + _SUM_CLOSE)
# Where `draft` splices the documents in: first in the data, before what is said of the answer.
_DATA_OPEN = b',"data":{'
_DOCUMENTS_OPEN = _DATA_OPEN + b'"documents":['
_DOCUMENTS_CLOSE = b'],"cache":'
_HEAD_BYTES = 512
_KEYS = ("seq", "at", "prev", "kind", "number", "data", "sum")


class Record(NamedTuple):
    """A record as it is read back, or as the fold sees it.

    ``number`` counts within the record's own series (searches, scores, helper calls, checkpoints);
    ``data`` holds JSON values only.
    """

    kind: str
    number: int | None
    data: Mapping[str, Any]


class Line(NamedTuple):
    """A line of a journal, checked by its own sum; the chain is the caller's to check."""

    seq: int
    at: str
    prev: str
    sum: str
    record: Record


class Draft(NamedTuple):
    """A decision on its way to the writer: the record, and its data already encoded."""

    record: Record
    data_json: bytes


def refuse_non_finite(value: Any, where: str = "data") -> None:
    """Raises where a NaN or infinity hides: orjson would write it as ``null`` without a word."""
    kind = type(value)
    if kind is float:
        if not math.isfinite(value):
            raise errors.INTERNAL_ERROR(f"{where} is not a finite number and cannot be recorded")
    elif kind is dict:
        for key, item in value.items():
            refuse_non_finite(item, f"{where}.{key}")
    elif kind is list or kind is tuple:
        for item in value:
            refuse_non_finite(item, where)


def encode_json(value: Any) -> bytes:
    """Compact JSON in UTF-8; raises ``InvariantBroken`` for what JSON cannot hold."""
    try:
        encoded = orjson.dumps(value)
    except TypeError as exc:  # orjson's only refusal: not a JSON value, or text with no UTF-8 form
        raise errors.INTERNAL_ERROR(f"a value cannot be recorded as JSON: {exc}") from None
    if b"null" in encoded:  # what is not finite is written so: most values are spared the walk
        refuse_non_finite(value)
    return encoded


def draft(
    kind: Kind,
    number: int | None,
    data: Mapping[str, Any],
    *,
    documents_json: bytes | None = None,
) -> Draft:
    """Encodes a decision. ``documents_json`` is spliced in as ``data["documents"]`` unread: the
    passages of a cached search are encoded once and recorded many times.
    """
    encoded = encode_json(dict(data))
    if documents_json is not None:
        comma = b"," if len(encoded) > 2 else b""
        encoded = b'{"documents":' + documents_json + comma + encoded[1:]
    return Draft(Record(kind.value, number, data), encoded)


def encode_line(item: Draft, *, seq: int, at: str, prev: str) -> tuple[bytes, str]:
    """The line, newline included, and its sum. ``at`` is ASCII without quotes."""
    number = item.record.number
    body = b'{"seq":%d,"at":"%s","prev":"%s","kind":"%s","number":%s,"data":%s' % (
        seq,
        at.encode(),
        prev.encode(),
        item.record.kind.encode(),
        b"null" if number is None else b"%d" % number,
        item.data_json,
    )
    total = hashlib.sha256(body).hexdigest()
    return b'%s,"sum":"%s"}\n' % (body, total.encode()), total


def line_sum(line: bytes) -> str | None:
    """The sum a line ends in, where it matches the bytes before it; ``line`` has no newline."""
    cut = len(line) - _TAIL_BYTES
    if cut < 0 or line[cut : cut + len(_SUM_OPEN)] != _SUM_OPEN or line[-2:] != _SUM_CLOSE:
        return None
    total = hashlib.sha256(line[:cut]).hexdigest()
    return total if line[cut + len(_SUM_OPEN) : -2] == total.encode() else None


def begins_with_record(tail: bytes) -> bool:
    """Whether bytes that are no record begin with a whole one: its newline was overwritten.

    No write that was cut short leaves that, so such bytes are no torn tail.
    """
    return any(line_sum(tail[: match.end()]) is not None for match in _A_SUM.finditer(tail))


def decode_line(line: bytes, *, documents: bool = True) -> Line:
    """Reads one line, with or without its newline.

    Without ``documents`` the passages of an answer are covered by the sum and otherwise left
    unread: the fold has no use for them, and they are most of a journal.

    Raises ``LedgerCorrupt`` with the reason: no sum, a sum that differs, or a shape no writer of
    ours leaves.
    """
    body = line.removesuffix(b"\n")
    total = line_sum(body)
    if total is None:
        raise errors.LEDGER_CORRUPT("the line does not end in a sum that matches its bytes")
    try:
        value = orjson.loads(body if documents else _without_documents(body))
    except orjson.JSONDecodeError:
        raise errors.LEDGER_CORRUPT("the line is not JSON") from None
    if type(value) is not dict or tuple(value) != _KEYS:
        raise errors.LEDGER_CORRUPT("the line does not hold exactly the keys of a record")
    seq, at, prev, kind, number, data, _ = value.values()
    if type(seq) is not int or type(at) is not str or type(prev) is not str:
        raise errors.LEDGER_CORRUPT("seq, at or prev is of the wrong type")
    if type(kind) is not str or kind not in KINDS:
        raise errors.LEDGER_CORRUPT(f"unknown kind of record {kind!r:.80}")
    if not (number is None or type(number) is int) or type(data) is not dict:
        raise errors.LEDGER_CORRUPT("number or data is of the wrong type")
    return Line(seq, at, prev, total, Record(kind, number, data))


def _without_documents(body: bytes) -> bytes:
    """The line without the documents of an answer. Quotes within a string are escaped, so neither
    mark can stand in one.
    """
    start = body.find(_DOCUMENTS_OPEN, 0, _HEAD_BYTES)
    end = body.rfind(_DOCUMENTS_CLOSE)
    if not 0 < start < end:
        return body
    return body[:start] + _DATA_OPEN + body[end + 2 :]


def claim_digest(claim: bytes) -> str:
    """What the first record chains to: the sha256 of ``claim.json`` as it lies on disk."""
    return hashlib.sha256(claim).hexdigest()

"""One line of the journal: a record's canonical bytes, its sum and its place in the chain.

A line is ``{"seq","at","prev","kind","number","data","sum"}`` followed by a newline. ``sum`` is the
sha256 of the line up to the comma before it, ``prev`` the ``sum`` of the line before (for the first
line: the sha256 of ``claim.json``), so the last ``sum`` names the claim and the whole history.

Nothing here opens a file, reads a clock or awaits.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.run.record import Record, record_of

FORMAT: Final = 1
"""Of ``claim.json`` and of the journal that chains to it, stated in the claim. It grows when a
version writes what an older one would read wrongly; a further key is read rightly."""

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


class Line(NamedTuple):
    """A line of a journal, checked by its own sum; the chain is the caller's to check.

    ``data`` is the record's JSON value as it was read, with the keys that its class does not know.
    """

    seq: int
    at: str
    prev: str
    sum: str
    record: Record
    data: Mapping[str, Any]


class Draft(NamedTuple):
    """A decision on its way to the writer: the record, and its data already encoded."""

    record: Record
    data_json: bytes


def draft(record: Record) -> Draft:
    """Encodes a decision. Raises ``InvariantBroken`` for what cannot be recorded."""
    return Draft(record, record.to_json())


def encode_line(
    kind: str, number: int | None, data_json: bytes, *, seq: int, at: str, prev: str
) -> tuple[bytes, str]:
    """The line, newline included, and its sum. ``at`` is ASCII without quotes."""
    number_json = b"null" if number is None else b"%d" % number
    values = (seq, at.encode(), prev.encode(), kind.encode(), number_json, data_json)
    body = b'{"seq":%d,"at":"%s","prev":"%s","kind":"%s","number":%s,"data":%s' % values
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
    """Whether bytes that are not a record begin with a whole one: its newline was overwritten. A
    write that was cut short does not leave that, so such bytes are not a torn tail.
    """
    return any(line_sum(tail[: match.end()]) is not None for match in _A_SUM.finditer(tail))


def decode_line(line: bytes, *, documents: bool = True) -> Line:
    """Reads one line, with or without its newline.

    Without ``documents`` the passages of an answer are covered by the sum and otherwise left
    unread: the fold has no use for them, and they are most of a journal. Raises ``LedgerCorrupt``
    with the reason: a sum that is missing or differs, or a shape that our writer does not leave.
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
    if type(kind) is not str or type(data) is not dict:
        raise errors.LEDGER_CORRUPT("kind or data is of the wrong type")
    if not (number is None or type(number) is int):
        raise errors.LEDGER_CORRUPT("number is of the wrong type")
    return Line(seq, at, prev, total, record_of(kind, number, data), data)


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


def newer_format(name: str, value: Any, known: int) -> str | None:
    """Why a file of another format is not read; ``known`` is the highest this version reads."""
    stated = value.get("format", known) if type(value) is dict else known
    if type(stated) is int and 0 < stated <= known:
        return None
    if type(stated) is int and stated <= known:
        return f"{name} states format {stated!r:.20}, which no version has written"
    return (
        f"{name} was written by a newer version (format {stated!r:.20}; this version reads up to "
        f"{known})"
    )

"""Records: canonical bytes, sums, chain, and nothing read that was not written."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartsearch_sidecar import errors
from smartsearch_sidecar.run.record import (
    KINDS,
    Kind,
    Record,
    begins_with_record,
    claim_digest,
    decode_line,
    draft,
    encode_json,
    encode_line,
    line_sum,
)

AT = "2026-12-02T04:13:00.123456Z"
PREV = "0" * 64


def line_of(data: dict[str, Any], documents: Any = None, number: int | None = 3) -> bytes:
    """A line with its newline."""
    spliced = None if documents is None else orjson.dumps(documents)
    item = draft(Kind.RETRIEVAL_ANSWERED, number, data, documents_json=spliced)
    return encode_line(item, seq=7, at=AT, prev=PREV)[0]


def summed(body: bytes) -> bytes:
    """Any bytes with a sum that is right for them."""
    return b'%s,"sum":"%s"}' % (body, hashlib.sha256(body).hexdigest().encode())


def test_line_is_json_with_the_keys_in_order() -> None:
    """A line is one JSON object of exactly seven keys, ends in a newline, and holds none inside."""
    line = line_of({"cache": "miss", "text": "two\nlines"})
    assert line.count(b"\n") == 1
    value = json.loads(line)
    assert list(value) == ["seq", "at", "prev", "kind", "number", "data", "sum"]
    assert (value["seq"], value["number"], value["data"]["text"]) == (7, 3, "two\nlines")


def test_sum_is_the_digest_of_the_line_before_it() -> None:
    """The sum can be checked with sha256sum: it covers every byte up to the comma before it."""
    line = line_of({"cache": "miss"})
    covered, _, tail = line.rpartition(b',"sum":')
    assert json.loads(tail[:-2]) == hashlib.sha256(covered).hexdigest()
    assert decode_line(line).sum == json.loads(tail[:-2])


@pytest.mark.parametrize("ending", [b"\n", b""])
def test_line_reads_back(ending: bytes) -> None:
    """What was written is what is read, with or without the newline."""
    read = decode_line(line_of({"cache": "hit", "took_us": 9}).rstrip(b"\n") + ending)
    assert (read.seq, read.at, read.prev) == (7, AT, PREV)
    assert read.record == Record("retrieval.answered", 3, {"cache": "hit", "took_us": 9})


def test_sum_is_the_next_lines_prev() -> None:
    """``encode_line`` hands back the sum that the next line chains to."""
    line, total = encode_line(draft(Kind.RUN_CLOSED, None, {}), seq=1, at=AT, prev=PREV)
    assert decode_line(line).sum == total
    assert decode_line(line).record.number is None


def test_every_flipped_bit_of_a_line_is_refused() -> None:
    """No byte of a line can change without its sum telling."""
    line = line_of({"cache": "miss"}).rstrip(b"\n")
    for at in range(len(line)):
        for bit in (0x01, 0x20, 0x80):
            flipped = line[:at] + bytes([line[at] ^ bit]) + line[at + 1 :]
            with pytest.raises(errors.LedgerCorrupt):
                decode_line(flipped)


def test_every_cut_of_a_line_is_refused() -> None:
    """No part of a line passes for a line."""
    line = line_of({"cache": "miss"}).rstrip(b"\n")
    for size in range(len(line)):
        with pytest.raises(errors.LedgerCorrupt):
            decode_line(line[:size])


def _with(**changes: Any) -> bytes:
    value: dict[str, Any] = {
        "seq": 7, "at": AT, "prev": PREV, "kind": "run.closed", "number": None, "data": {},
    }  # fmt: skip
    value.update(changes)
    return summed(orjson.dumps(value)[:-1])


@pytest.mark.parametrize(
    "line",
    [
        _with(seq="7"),
        _with(seq=True),
        _with(seq=7.0),
        _with(at=7),
        _with(prev=None),
        _with(kind="run.dreamt"),
        _with(kind=["run.closed"]),
        _with(kind=None),
        _with(number="3"),
        _with(number=True),
        _with(data=[]),
        _with(data=None),
        _with(extra=1),
        summed(b'{"at":"x","seq":7,"prev":"","kind":"run.closed","number":null,"data":{}'),
        summed(b'{"seq":7'),
        summed(b'{"seq":7,"data":nonsense'),
        summed(b'{"seq":7,"at":"\xff"'),
        summed(b"[1"),
        summed(b""),
    ],
)
def test_right_sum_over_another_shape_is_refused(line: bytes) -> None:
    """A sum proves who wrote a line, not that it is a record: the shape is checked too."""
    assert line_sum(line) is not None
    with pytest.raises(errors.LedgerCorrupt):
        decode_line(line)


def test_sum_in_upper_case_is_refused() -> None:
    """There is one spelling of every line."""
    line = line_of({"cache": "miss"}).rstrip(b"\n")
    with pytest.raises(errors.LedgerCorrupt):
        decode_line(line[:-66] + line[-66:-2].upper() + b'"}')


# --- documents ------------------------------------------------------------------------------------

HOSTILE = [
    {"id": "1", "contents": '],"cache":"hit"} \\ "data":{"documents":[', "score": 1.5},
    {"id": "2", "contents": ',"sum":"' + "0" * 64 + '"}\n', "score": None},
]


def test_documents_are_spliced_in_as_they_are() -> None:
    """Documents encoded once stand in the data of every record that repeats them."""
    line = line_of({"cache": "miss", "dropped": [{"id": "9"}]}, HOSTILE)
    data = decode_line(line).record.data
    assert data == {"documents": HOSTILE, "cache": "miss", "dropped": [{"id": "9"}]}


def test_documents_alone_make_sound_json() -> None:
    """A record with nothing but documents has no stray comma."""
    assert decode_line(line_of({}, [])).record.data == {"documents": []}


def test_documents_can_be_left_unread() -> None:
    """Without documents a line reads as the fold saw it live, whatever the passages hold."""
    line = line_of({"cache": "miss", "took_us": 7}, HOSTILE)
    read = decode_line(line, documents=False)
    assert read.record.data == {"cache": "miss", "took_us": 7}
    assert read == decode_line(line)._replace(record=read.record)


def test_other_kinds_are_read_whole_without_documents() -> None:
    """Text that looks like an answer's marks, in a query, is left alone."""
    call = 'wikipedia_search(query=\'"data":{"documents":[],"cache":\', top_n=5)'
    item = draft(Kind.RETRIEVAL_REQUESTED, 1, {"env": "e", "call": call})
    line, _ = encode_line(item, seq=1, at=AT, prev=PREV)
    assert decode_line(line, documents=False) == decode_line(line)
    assert decode_line(line).record.data["call"] == call


# --- what may be recorded -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        {"deep": [1, {"er": float("inf")}]},
        {"pair": (0.5, -float("inf"))},
        [[float("nan")]],
    ],
)
def test_non_finite_numbers_are_refused(value: Any) -> None:
    """NaN and the infinities would become ``null`` without a word."""
    with pytest.raises(errors.InvariantBroken):
        encode_json(value)


@pytest.mark.parametrize("value", [{1: 2}, {"x": object()}, {"x": "\ud800"}, {"x": {1, 2}}, 2**64])
def test_what_json_cannot_hold_is_refused(value: Any) -> None:
    """A value without a JSON form ends in a named error, before anything is written."""
    with pytest.raises(errors.InvariantBroken):
        encode_json(value)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", max_size=3), inner),
    max_leaves=12,
)


@given(
    kind=st.sampled_from(sorted(KINDS)),
    number=st.none() | st.integers(1, 2**53),
    data=st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), json_values),
)
def test_any_record_reads_back(kind: str, number: int | None, data: dict[str, Any]) -> None:
    """Any record of JSON values is read back as it was decided."""
    item = draft(Kind(kind), number, data)
    line, total = encode_line(item, seq=1, at=AT, prev=PREV)
    assert decode_line(line) == (1, AT, PREV, total, Record(kind, number, data))
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1


# --- what is no torn tail -------------------------------------------------------------------------


def test_whole_record_before_other_bytes_is_noticed() -> None:
    """A record whose newline was overwritten is whole: no write that was cut short leaves that."""
    line = line_of({"cache": "miss"}, HOSTILE).rstrip(b"\n")
    assert begins_with_record(line + b"\x00rest")
    assert begins_with_record(line)
    assert not begins_with_record(line[:-1])
    assert not begins_with_record(b"x" + line)
    assert not begins_with_record(b"")


def test_claim_digest_is_that_of_the_file() -> None:
    """The first record chains to the very bytes of ``claim.json``."""
    assert claim_digest(b"{}\n") == hashlib.sha256(b"{}\n").hexdigest()

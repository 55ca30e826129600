"""Records: canonical bytes, sums, chain, and nothing read that was not written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartsearch_sidecar import errors
from smartsearch_sidecar.run.json_values import encode_json
from smartsearch_sidecar.run.line import (
    Draft,
    begins_with_record,
    claim_digest,
    decode_line,
    draft,
    encode_line,
    line_sum,
)
from smartsearch_sidecar.run.record import (
    CLASSES,
    NativeCall,
    Record,
    RetrievalAnswered,
    RetrievalRequested,
    RunClosed,
)
from tests.fakes.each import each

AT = "2026-12-02T04:13:00.123456Z"
PREV = "0" * 64


def encoded(item: Draft, *, seq: int = 7) -> tuple[bytes, str]:
    """A decision as a line."""
    record = item.record
    return encode_line(record.kind, record.number, item.data_json, seq=seq, at=AT, prev=PREV)


def line_of(documents: Any = None, dropped: tuple[dict[str, str], ...] | None = None) -> bytes:
    """The line of an answer, with its newline."""
    spliced = None if documents is None else orjson.dumps(documents)
    return encoded(draft(RetrievalAnswered(3, spliced, "miss", 9, dropped)))[0]


def summed(body: bytes) -> bytes:
    """Any bytes with a sum that is right for them."""
    return b'%s,"sum":"%s"}' % (body, hashlib.sha256(body).hexdigest().encode())


def test_line_is_json_with_the_keys_in_order() -> None:
    """A line is one JSON object of exactly seven keys, ends in a newline, and holds none inside."""
    line, _ = encoded(draft(RetrievalRequested(3, NativeCall("e", "two\nlines", "q"))))
    assert line.count(b"\n") == 1
    value = json.loads(line)
    assert list(value) == ["seq", "at", "prev", "kind", "number", "data", "sum"]
    assert (value["seq"], value["number"], value["data"]["call"]) == (7, 3, "two\nlines")


def test_sum_is_the_digest_of_the_line_before_it() -> None:
    """The sum can be checked with sha256sum: it covers every byte up to the comma before it."""
    line = line_of()
    covered, _, tail = line.rpartition(b',"sum":')
    assert json.loads(tail[:-2]) == hashlib.sha256(covered).hexdigest()
    assert decode_line(line).sum == json.loads(tail[:-2])


@pytest.mark.parametrize("ending", [b"\n", b""])
def test_line_reads_back(ending: bytes) -> None:
    """What was written is what is read, with or without the newline."""
    read = decode_line(line_of().rstrip(b"\n") + ending)
    assert (read.seq, read.at, read.prev) == (7, AT, PREV)
    assert read.record == RetrievalAnswered(3, None, "miss", 9)
    assert read.data == {"cache": "miss", "took_us": 9}


def test_sum_is_the_next_lines_prev() -> None:
    """``encode_line`` hands back the sum that the next line chains to."""
    line, total = encoded(draft(RunClosed(latched=False, usage={})))
    assert decode_line(line).sum == total
    assert decode_line(line).record.number is None


def test_every_flipped_bit_of_a_line_is_refused() -> None:
    """No byte of a line can change without its sum telling."""
    line = line_of().rstrip(b"\n")
    for at in range(len(line)):
        for bit in (0x01, 0x20, 0x80):
            flipped = line[:at] + bytes([line[at] ^ bit]) + line[at + 1 :]
            with pytest.raises(errors.LedgerCorrupt):
                decode_line(flipped)


def test_every_cut_of_a_line_is_refused() -> None:
    """No part of a line passes for a line."""
    line = line_of().rstrip(b"\n")
    for size in range(len(line)):
        with pytest.raises(errors.LedgerCorrupt):
            decode_line(line[:size])


def _with(**changes: Any) -> bytes:
    value: dict[str, Any] = {
        "seq": 7, "at": AT, "prev": PREV, "kind": "run.closed", "number": None,
        "data": {"latched": False},
    }  # fmt: skip
    value.update(changes)
    return summed(orjson.dumps(value)[:-1])


@each(
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
    line = line_of().rstrip(b"\n")
    with pytest.raises(errors.LedgerCorrupt):
        decode_line(line[:-66] + line[-66:-2].upper() + b'"}')


# --- documents ------------------------------------------------------------------------------------

HOSTILE = [
    {"id": "1", "contents": '],"cache":"hit"} \\ "data":{"documents":[', "score": 1.5},
    {"id": "2", "contents": ',"sum":"' + "0" * 64 + '"}\n', "score": None},
]


def test_documents_are_spliced_in_as_they_are() -> None:
    """Documents encoded once stand in the data of every record that repeats them."""
    read = decode_line(line_of(HOSTILE, ({"id": "9"},)))
    assert list(read.data.items()) == [
        ("documents", HOSTILE),
        ("cache", "miss"),
        ("took_us", 9),
        ("dropped", [{"id": "9"}]),
    ]
    assert isinstance(read.record, RetrievalAnswered)
    assert read.record.documents() == HOSTILE


def test_documents_can_be_left_unread() -> None:
    """Without documents a line reads as the fold saw it live, also with hostile passages."""
    line = line_of(HOSTILE)
    read = decode_line(line, documents=False)
    assert read.data == {"cache": "miss", "took_us": 9}
    assert read.record == RetrievalAnswered(3, None, "miss", 9)
    assert read == decode_line(line)._replace(record=read.record, data=read.data)


def test_other_kinds_are_read_whole_without_documents() -> None:
    """Text that looks like an answer's marks, in a query, is left alone."""
    call = 'wikipedia_search(query=\'"data":{"documents":[],"cache":\', top_n=5)'
    line, _ = encoded(draft(RetrievalRequested(1, NativeCall("e", call, "q"))))
    assert decode_line(line, documents=False) == decode_line(line)
    assert decode_line(line).data["call"] == call


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


text = st.text(st.characters(exclude_categories=["Cs"]))
counts = st.integers(-(2**53), 2**53)
numbers = st.integers(1, 2**53)
json_values = st.recursive(
    st.none() | st.booleans() | counts | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", max_size=3), inner),
    max_leaves=12,
)
objects = st.dictionaries(text, json_values, max_size=4)
# Some kinds write a mapping's keys beside their own: no usage is ever named as a field is.
FIELDS = {name for shape in CLASSES.values() for name in shape.__match_args__}  # type: ignore[attr-defined]
keys = text.filter(lambda name: name not in FIELDS)


def any_of(shape: type[Record]) -> st.SearchStrategy[Record]:
    """Any record of a kind: every field any value of its type."""
    given_types: dict[type, st.SearchStrategy[Any]] = {
        str: text,
        int: counts,
        bytes: st.lists(objects, max_size=2).map(orjson.dumps),
        float: st.floats(allow_nan=False, allow_infinity=False),
    }
    hints = get_type_hints(shape, localns={"Mapping": Mapping, "Any": Any})
    fields = {name: hints[name] for name in shape.__match_args__}  # type: ignore[attr-defined]
    return st.builds(shape, **{name: _any(hint, given_types) for name, hint in fields.items()})


def _any(hint: Any, plain: dict[type, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    if hint in plain:
        return plain[hint]
    if hint is bool or hint is type(None):
        return st.from_type(hint)
    inner = get_args(hint)
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return st.one_of([_any(one, plain) for one in inner])
    if origin is tuple and inner[-1] is Ellipsis:
        return st.lists(_any(inner[0], plain), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*(_any(one, plain) for one in inner))
    if origin is Mapping and inner[1] in (Any, str):
        return st.dictionaries(keys, json_values if inner[1] is Any else text, max_size=3)
    if origin is Mapping:
        return st.dictionaries(keys, _any(inner[1], plain), max_size=2)
    return any_of(hint)


@pytest.mark.parametrize("shape", CLASSES.values(), ids=str)
@given(data=st.data())
def test_any_record_reads_back(shape: type[Record], data: st.DataObject) -> None:
    """Any record of any kind is read back as it was decided, and encoded to the same bytes."""
    record = data.draw(any_of(shape))
    item = draft(record)
    line, total = encoded(item, seq=1)
    read = decode_line(line)
    assert (read.seq, read.at, read.prev, read.sum) == (1, AT, PREV, total)
    assert draft(read.record) == item
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1


# --- what is no torn tail -------------------------------------------------------------------------


def test_whole_record_before_other_bytes_is_noticed() -> None:
    """A record whose newline was overwritten is whole: no write that was cut short leaves that."""
    line = line_of(HOSTILE).rstrip(b"\n")
    assert begins_with_record(line + b"\x00rest")
    assert begins_with_record(line)
    assert not begins_with_record(line[:-1])
    assert not begins_with_record(b"x" + line)
    assert not begins_with_record(b"")


def test_claim_digest_is_that_of_the_file() -> None:
    """The first record chains to the very bytes of ``claim.json``."""
    assert claim_digest(b"{}\n") == hashlib.sha256(b"{}\n").hexdigest()

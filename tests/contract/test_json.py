"""The strict JSON every route reads with (contract/json.py); generated bodies are in property/."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.contract.json import strict_json
from tests.fakes.each import each

LONE = "\ud83d"


@each(
    "body",
    [
        b"",
        b" ",
        b"{",
        b'{"a": 1,}',
        b"{'a': 1}",
        b'{"a": 1} x',
        b'"\x00"',
        b'"a\nb"',
        b"01",
        b"nul",
        b"\x00",
        b'"\\u12"',
        b'"\\q"',
        b"[}",
        b"]",
        # not UTF-8, or marked
        b'"\xff"',
        b'"\xed\xa0\x80"',
        b'"\xc0\xaf"',
        b"\xef\xbb\xbf{}",
        '{"a": "b"}'.encode("utf-16"),
        '{"a": "b"}'.encode("utf-16-le"),
        '{"a": "b"}'.encode("utf-32-be"),
        # a key twice
        b'{"a": "1", "a": "1"}',
        b'{"a": "1", "\\u0061": "2"}',
        b'{"a": "1", "a": {"b": ["c"]}}',
        b'{"x": [{"a": 1, "b": 2, "a": 3}]}',
        b'{"\\u0022": "1", "\\"": "2"}',
        b'{"\\\\": "1", "\\u005c": "2"}',
        b'{"a": "", "a": "\\u0022\\u0022\\u0022\\u0022"}',
        b'{"": "", "": ""}',
        # constants and numbers
        b"NaN",
        b"[Infinity]",
        b'{"a": -Infinity}',
        b"9" * 4_301,
        b"-" + b"9" * 4_301,
        b"[" + b"9" * 200_000 + b"]",
    ],
)
def test_strict_json_refuses(body: bytes) -> None:
    """What is not strict JSON in UTF-8 is one kind of fault, whichever it is."""
    with pytest.raises(errors.InvalidRequest) as caught:
        strict_json(body)
    assert caught.value.cause == "http_invalid_request"


@each(
    ("body", "value"),
    [
        (b" null\n", None),
        (b'{"a": "b", "c": ""}', {"a": "b", "c": ""}),
        (b'{"a": "\\u0022", "b": "\\""}', {"a": '"', "b": '"'}),
        (b'{"a": {"a": {"a": 1}}, "b": [true, -0.5]}', {"a": {"a": {"a": 1}}, "b": [True, -0.5]}),
        (b'["\\ud83d\\ude00", "\\ud83d"]', ["\U0001f600", LONE]),
        (b'{"\\udc00": "x"}', {"\udc00": "x"}),
        ('"東京\u2028"'.encode(), "東京\u2028"),
        (b"9" * 4_300, int("9" * 4_300)),
        (b"-" + b"9" * 4_300, -int("9" * 4_300)),
        (b"123456789012345678901234567890", 123456789012345678901234567890),
        (b"[1e999]", [float("inf")]),
    ],
)
def test_strict_json_takes(body: bytes, value: Any) -> None:
    """Everything else is read exactly as the standard library reads it."""
    assert strict_json(body) == value == json.loads(body)


@each("opening", [b"[", b'{"a":'])
@each("depth", [1, 63, 64, 65, 66, 128, 130, 5_000, 100_000])
def test_depth_is_bounded_by_us(opening: bytes, depth: int) -> None:
    """Sixty-four levels are read and sixty-five refused, by our bound, not the interpreter's."""
    closing = b"]" if opening == b"[" else b"}"
    body = opening * depth + b"1" + closing * depth
    if depth <= 64:
        strict_json(body)
    else:
        with pytest.raises(errors.InvalidRequest, match="64 levels") as caught:
            strict_json(body)
        assert caught.value.cause == "http_invalid_request"


def test_mixed_levels_count_alike() -> None:
    """An object inside an array is a level as any other."""
    strict_json(b'[{"a":' * 32 + b"1" + b"}]" * 32)
    with pytest.raises(errors.InvalidRequest, match="64 levels"):
        strict_json(b'[{"a":' * 32 + b"[]" + b"}]" * 32)


@pytest.mark.parametrize("text", ["[" * 500, '\\"' + "{" * 500, "]}" * 300, "\\\\", '"[' * 90])
def test_brackets_inside_strings_do_not_nest(text: str) -> None:
    """A query may hold any number of brackets, escaped quotes before them or not."""
    value = {"a": [text, {"b": text}]}
    assert strict_json(json.dumps(value).encode()) == value


@each(
    "body",
    [
        b"[" * 262_144,
        b'"' + b'\\"' * 131_000,
        b'["' * 131_000,
        b'{"a":' * 50_000,
        b"[" * 70 + b'"' + b'\\"' * 130_000,
        b"[" * 64 + b"]" * 64 + b"[" * 200_000,
        (b"[" * 64 + b"]" * 64) * 2_000,
        b"[]" * 131_000,
        b"]" * 200_000,
    ],
)
def test_hostile_json_of_the_largest_size_is_refused(body: bytes) -> None:
    """No body of the size the edge lets through can make the reader recurse or go quadratic."""
    with pytest.raises(errors.InvalidRequest):
        strict_json(body)


def test_an_interpreter_with_a_lower_digit_limit_still_refuses_by_name() -> None:
    """The process-wide limit on digits makes a number a refusal, never a ValueError."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)
    try:
        with pytest.raises(errors.InvalidRequest):
            strict_json(b"9" * 700)
    finally:
        sys.set_int_max_str_digits(before)

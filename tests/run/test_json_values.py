"""Text, the canonical form, and what differs between two claims, identities or nodes."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from smartsearch_sidecar.run.json_values import (
    canonical,
    canonical_digest,
    differences,
    flat,
    has_utf8_form,
    is_filled_text,
    is_sha256,
    is_text,
    same,
)
from tests.fakes.each import each

LONE = "\ud83d"


# --- text -----------------------------------------------------------------------------------------


@each(
    ("value", "text", "filled"),
    [
        ("a", True, True),
        ("é 🎻", True, True),
        ("", True, False),
        (" \t\n", True, False),
        (LONE, False, False),
        (f"a{LONE}", False, False),
        (b"a", False, False),
        (1, False, False),
        (None, False, False),
        (["a"], False, False),
    ],
)
def test_text_is_what_can_be_written_down(value: object, text: bool, filled: bool) -> None:
    """Half a surrogate pair is not text, and white space alone is not filled text."""
    assert is_text(value) is text
    assert is_filled_text(value) is filled
    if isinstance(value, str):
        assert has_utf8_form(value) is text


@each(
    ("value", "expected"),
    [
        ("0" * 64, True),
        ("0123456789abcdef" * 4, True),
        ("0" * 63, False),
        ("0" * 65, False),
        ("A" * 64, False),
        ("0" * 64 + "\n", False),
        ("g" * 64, False),
        (b"0" * 64, False),
        (None, False),
    ],
)
def test_a_digest_is_64_lower_case_hex_digits(value: object, expected: bool) -> None:
    """What names a corpus has one spelling."""
    assert is_sha256(value) is expected


# --- the canonical form ---------------------------------------------------------------------------


def test_canonical_digest_is_the_references() -> None:
    """Sorted keys, no spaces, UTF-8: a value worked out by hand."""
    value = {"b": "é", "a": [1, None, 1e16]}
    written = '{"a":[1,null,1e+16],"b":"é"}'.encode()
    assert canonical(value) == written
    assert canonical_digest(value) == hashlib.sha256(written).hexdigest()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": [-float("inf")]}, LONE])
def test_what_has_no_canonical_form_is_refused(value: object) -> None:
    """NaN, infinities and half a surrogate pair have no bytes to hash."""
    with pytest.raises(ValueError, match=r"JSON|surrogates"):
        canonical(value)


# --- comparing ------------------------------------------------------------------------------------


@each(
    ("one", "other"),
    [
        (1, True),
        (0, False),
        (1, 1.0),
        (None, False),
        ([1], [True]),
        ([1], [1, 1]),
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": 1, "b": None}),
        ({}, None),
        ({}, []),
        ("1", 1),
    ],
)
def test_values_of_two_kinds_are_not_the_same(one: Any, other: Any) -> None:
    """Python's equality takes a number for a boolean; as JSON they are two values."""
    assert not same(one, other)
    assert not same(other, one)
    assert differences({"x": one}, {"x": other}) != ()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, "a"), [1, "a"]),
        ({"a": (1,), "b": {}}, {"b": {}, "a": [1]}),
        (None, None),
        (1.5, 1.5),
    ],
)
def test_equal_values_are_the_same(one: Any, other: Any) -> None:
    """The order of keys, and a tuple in a list's place, make no other value."""
    assert same(one, other)
    assert differences({"x": one}, {"x": other}) == ()


@each(
    ("one", "other", "names"),
    [
        ({}, {"x": None}, ("x",)),
        ({}, {"x": {}}, ("x",)),
        ({"x": {}}, {"x": {"y": 1}}, ("x.y",)),
        ({"x": {"y": 1, "z": 2}}, {"x": {"y": 1}}, ("x.z",)),
        ({"x": {"y": {}}}, {"x": {}}, ("x.y",)),
        ({"x": {"y": 1}}, {"x": 1}, ("x",)),
        ({"x.y": 1}, {"x": {"y": 1}}, ("x.y", "x.y")),
        ({"b": 1, "a": 1}, {}, ("a", "b")),
    ],
)
def test_absent_differs_from_empty(
    one: dict[str, Any], other: dict[str, Any], names: tuple[str, ...]
) -> None:
    """A key that one side lacks is named, for any value on the other side, both ways alike."""
    assert differences(one, other) == names
    assert differences(other, one) == names


def test_values_are_found_by_the_names_of_their_differences() -> None:
    """A sentence about a difference shows what stands on each side."""
    assert flat({"x": {"y": 1, "z": {}}, "w": [1]}) == {"x.y": 1, "x.z": {}, "w": [1]}

"""The strict JSON that every route, helper answer and reference file is read with.

The standard library keeps the last of two equal keys and takes NaN: a request could then mean one
thing to its sender and another to us. Both are refused here, and so is what could exhaust a parser.
"""

from __future__ import annotations

import json
import re
from itertools import accumulate
from typing import Any, Final

import orjson

from smartsearch_sidecar import errors

JSON_DEPTH_MAX: Final = 64
"""Arrays and objects open at once in one value."""
JSON_INT_DIGITS_MAX: Final = 4_300
"""Digits of an integer: CPython's default, held even where the process was started with another."""

# A string to its end, or to the end of the body: matching always, it cannot be made quadratic.
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_STEPS: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # as signed bytes: 1 and -1
_NO_BRACKETS: Final = bytes(sorted(set(range(256)) - set(b"[]{}")))


def compact(value: Any) -> bytes:
    """The body of an answer, in UTF-8."""
    try:
        return orjson.dumps(value)
    except TypeError:
        raise errors.INTERNAL_ERROR(
            "An answer has no UTF-8 form; its documents went unchecked."
        ) from None


class NotStrictJson(ValueError):
    """Why bytes are not one strict JSON value. The text continues "it ..."."""


def strict_json(body: bytes) -> Any:
    """Reads the body of a request. Raises ``InvalidRequest``, cause ``http_invalid_request``."""
    try:
        return parse_strict(body)
    except NotStrictJson as error:
        raise errors.INVALID_JSON(f"The body {error}.") from None


def parse_strict(raw: bytes) -> Any:
    """Reads ``raw`` as one JSON value in UTF-8.

    Refuses a byte-order mark, a key given twice in one object at any depth, NaN and the infinities,
    more than 64 levels, and integers of more than 4,300 digits. Lone surrogate escapes come back as
    text, and floats too large come back infinite, as from the standard library.

    Raises: ``NotStrictJson``. Its text quotes nothing of ``raw``.
    """
    if (flat := _flat_object(raw)) is not None:
        return flat
    if raw.count(b"[") + raw.count(b"{") > JSON_DEPTH_MAX and _too_deep(raw):
        raise NotStrictJson(f"is nested deeper than {JSON_DEPTH_MAX} levels")
    try:
        return _DECODER.decode(raw.decode("utf-8"))
    except UnicodeDecodeError:
        raise NotStrictJson("is not UTF-8") from None
    except NotStrictJson:
        raise
    except ValueError:  # JSONDecodeError, or an interpreter told to take even fewer digits
        raise NotStrictJson("is not one JSON value") from None


def _flat_object(raw: bytes) -> dict[str, str] | None:
    """Reads the usual body, one object of strings, by the fast parser; ``None`` for any other.

    That parser keeps the last of two equal keys, so the result stands only with a proof that none
    was dropped: each string takes two quotes, a quote inside a string takes one (none when spelled
    ``\\u0022``: then there is no proof), and a dropped pair would take two more at least. With an
    environment of 6 KB this takes 34 microseconds, the exact reader 111.
    """
    try:
        value = orjson.loads(raw)
        if type(value) is not dict:
            return None
        text = "".join(value) + "".join(value.values())
    except (orjson.JSONDecodeError, TypeError):  # the exact reader decides, and says why
        return None
    quotes = 4 * len(value) + text.count('"')
    return value if raw.count(b'"') == quotes and b"\\u0022" not in raw else None


def _too_deep(raw: bytes) -> bool:
    """Whether brackets outside strings nest beyond the bound; unbalanced ones count as too deep."""
    steps = _STRING.sub(b"", raw).translate(_STEPS, _NO_BRACKETS)
    depth = 0
    for depth in accumulate(memoryview(steps).cast("b")):
        if not 0 <= depth <= JSON_DEPTH_MAX:
            return True
    return depth != 0


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise NotStrictJson("has an object with a key twice")
    return value


def _no_constant(_name: str) -> Any:
    raise NotStrictJson("holds NaN or Infinity, which are not JSON")


def _bounded_int(digits: str) -> int:
    if len(digits.lstrip("-")) > JSON_INT_DIGITS_MAX:
        raise NotStrictJson(f"has an integer of more than {JSON_INT_DIGITS_MAX} digits")
    return int(digits)


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_unique_pairs, parse_constant=_no_constant, parse_int=_bounded_int
)

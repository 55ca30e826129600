"""JSON values: text that can be written down, one canonical form, what differs, frozen objects.

Claims, identities and indexes are JSON values that are hashed, recorded and compared. The rules
stand here once, because two copies of a comparison that drift apart accept different runs.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, ClassVar, Final, NamedTuple, TypeGuard

import orjson

from smartsearch_sidecar import errors

_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


def has_utf8_form(text: str) -> bool:
    """Whether it has no lone surrogate, which JSON lets in as an escape (``\\ud83d``)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_text(value: object) -> TypeGuard[str]:
    """Whether ``value`` is text with a UTF-8 form; it may be empty."""
    return isinstance(value, str) and has_utf8_form(value)


def is_filled_text(value: object) -> TypeGuard[str]:
    """Whether ``value`` is text with a UTF-8 form and more than white space in it."""
    return isinstance(value, str) and bool(value.strip()) and has_utf8_form(value)


def is_sha256(value: object) -> TypeGuard[str]:
    """Whether ``value`` is 64 lower-case hex digits."""
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def canonical(value: Any) -> bytes:
    """Canonical JSON as the reference writes it: sorted keys, no spaces, UTF-8.

    The standard library's encoder, because it spells floats as the reference does. Raises
    ``ValueError`` for NaN, an infinity, and text without a UTF-8 form; ``TypeError`` for what is
    not a JSON value.
    """
    return json.dumps(
        value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False
    ).encode()


def canonical_digest(value: Any) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()


def same(one: Any, other: Any) -> bool:
    """Equal as JSON: ``1``, ``1.0`` and ``true`` are three values, a tuple and a list are one.
    Python's ``==`` takes ``1 == True``, so a flag that becomes a number would pass unseen.
    """
    kind = type(one)
    if kind in _SCALARS:  # first, because an identity is compared after every search
        return kind is type(other) and bool(one == other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(map(same, one.values(), map(other.get, one)))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return kind is type(other) and bool(one == other)


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    """The dotted names of everything that is not the same on both sides, sorted.

    Two objects are compared key by key. A key that one side lacks differs from any value, ``null``
    and an empty object included.
    """
    return tuple(sorted(_differing(one, other, "")))


def flat(value: Mapping[str, Any]) -> dict[str, Any]:
    """The values by the dotted names that ``differences`` gives; for a sentence that shows them."""
    return dict(_leaves(value, ""))


def _differing(one: Mapping[str, Any], other: Mapping[str, Any], before: str) -> Iterator[str]:
    for key in one.keys() | other.keys():
        if key not in one or key not in other:
            lone = one if key in one else other
            yield from (name for name, _ in _leaves({key: lone[key]}, before))
        elif isinstance(one[key], Mapping) and isinstance(other[key], Mapping):
            yield from _differing(one[key], other[key], f"{before}{key}.")
        elif not same(one[key], other[key]):
            yield f"{before}{key}"


def _leaves(value: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        # An object without keys is a value of its own: it has no leaf that would show it is there.
        if isinstance(item, Mapping) and item:
            yield from _leaves(item, f"{before}{key}.")
        else:
            yield f"{before}{key}", item


_PLAIN: Final = {"int": int, "str": str, "bool": bool}


class _Key(NamedTuple):
    """A field that is a key; ``optional`` where it is left out while it is ``None``."""

    name: str
    optional: bool
    plain: type | None

    def read(self, data: Mapping[str, Any]) -> Any:
        value = data.get(self.name) if self.optional else data[self.name]
        if self.plain is not None and type(value) is not self.plain:
            raise TypeError(f"{self.name} is no {self.plain.__name__}")
        return tuple(value) if type(value) is list else value


@cache
def _keys(shape: type[Data]) -> tuple[_Key, ...]:
    return tuple(
        _Key(one.name, one.default is None, _PLAIN.get(str(one.type)))
        for one in fields(shape)  # type: ignore[arg-type] # each of them is a dataclass
        if one.name not in shape.BESIDE
    )


class Data:
    """A frozen dataclass that is recorded as a JSON object."""

    __slots__ = ()
    BESIDE: ClassVar[frozenset[str]] = frozenset()
    """Fields that are left out of the object."""

    def to_data(self) -> dict[str, Any]:
        """The JSON value, its keys in the order in which they are written."""
        return {
            name: value
            for name, optional, _ in _keys(type(self))  # type: ignore[arg-type] # classes have hashes
            if (value := getattr(self, name)) is not None or not optional
        }

    def to_json(self) -> bytes:
        return encode_json(self.to_data())

    @classmethod
    def values_of(cls, data: Mapping[str, Any]) -> list[Any]:
        """The fields' values without ``number``. Raises ``LookupError`` or ``TypeError``."""
        return [key.read(data) for key in _keys(cls)]  # type: ignore[arg-type] # the same


def _refuse_non_finite(value: Any, where: str = "data") -> None:
    """Raises where a NaN or infinity hides: orjson would write it as ``null`` without a word."""
    kind = type(value)
    if kind is float:
        if not math.isfinite(value):
            raise errors.INTERNAL_ERROR(f"{where} is not a finite number and cannot be recorded")
    elif kind is dict:
        for key, item in value.items():
            _refuse_non_finite(item, f"{where}.{key}")
    elif kind is list or kind is tuple:
        for item in value:
            _refuse_non_finite(item, where)


def encode_json(value: Any) -> bytes:
    """Compact JSON in UTF-8; raises ``InvariantBroken`` for what JSON cannot hold."""
    try:
        encoded = orjson.dumps(value)
    except TypeError as exc:  # orjson's only refusal: not a JSON value, or text with no UTF-8 form
        raise errors.INTERNAL_ERROR(f"a value cannot be recorded as JSON: {exc}") from None
    if b"null" in encoded:  # what is not finite is written so: most values are spared the walk
        _refuse_non_finite(value)
    return encoded

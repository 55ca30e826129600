"""Frozen values as JSON objects: a field is a key.

The keys of a value are its fields, in the order in which they are declared. A field whose default
is ``None`` is left out while it is ``None``. Keys that are no field are ignored when it is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Final, NamedTuple

import orjson

from smartsearch_sidecar import errors

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


_KEYS: Final[dict[type[Data], tuple[_Key, ...]]] = {}


def _keys(shape: type[Data]) -> tuple[_Key, ...]:
    found = _KEYS.get(shape)
    if found is None:
        found = _KEYS[shape] = tuple(
            _Key(one.name, one.default is None, _PLAIN.get(str(one.type)))
            for one in fields(shape)  # type: ignore[arg-type] # each of them is a dataclass
            if one.name not in shape.BESIDE
        )
    return found


class Data:
    """A frozen dataclass that is recorded as a JSON object. ``BESIDE`` are fields that are none of
    its keys.
    """

    __slots__ = ()

    BESIDE: ClassVar[frozenset[str]] = frozenset()

    def to_data(self) -> dict[str, Any]:
        """The JSON value, its keys in the order in which they are written."""
        return {
            name: value
            for name, optional, _ in _keys(type(self))
            if (value := getattr(self, name)) is not None or not optional
        }

    def to_json(self) -> bytes:
        """The JSON text. Raises ``InvariantBroken`` for what JSON cannot hold."""
        return encode_json(self.to_data())

    @classmethod
    def values_of(cls, data: Mapping[str, Any]) -> list[Any]:
        """The values of the fields in order. Raises ``LookupError`` or ``TypeError``."""
        return [key.read(data) for key in _keys(cls)]


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

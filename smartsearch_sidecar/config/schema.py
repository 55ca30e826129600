"""The models read back as one flat table: dotted key to its field."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from smartsearch_sidecar.config import keys
from smartsearch_sidecar.config.keys import Allowed, Preset, Section, parts
from smartsearch_sidecar.config.model import FILE_KEY, Config


def section_of(field: FieldInfo) -> type[Section] | None:
    """The model of a field that is a section, or ``None`` for a key."""
    for part in parts(field.annotation):
        if isinstance(part, type) and issubclass(part, Section):
            return part
    return None


def _walk(model: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        yield prefix + name, field
        section = section_of(field)
        if section is not None:
            yield from _walk(section, f"{prefix}{name}.")


_ALL: Final[dict[str, FieldInfo]] = dict(_walk(Config, ""))
SECTIONS: Final[dict[str, type[Section]]] = {
    name: section for name, field in _ALL.items() if (section := section_of(field)) is not None
}
FIELDS: Final[dict[str, FieldInfo]] = {
    name: field for name, field in _ALL.items() if name not in SECTIONS
}
PRESETS: Final[dict[str, Preset]] = {
    name: preset for name, field in FIELDS.items() if (preset := keys.preset_of(field)) is not None
}
"""The keys that a profile presets. After loading each of them has a value."""


def kind_of(key: str) -> Any:
    """The plain type behind a key: ``int``, ``Path``, ``SecretStr``, ``tuple``, a ``Literal``, …"""
    return keys.kind_of(FIELDS[key])


def is_path(key: str) -> bool:
    """Whether a key holds a path."""
    return kind_of(key) is Path


def is_secret(key: str) -> bool:
    """Whether the value of a key must never be shown."""
    return kind_of(key) is SecretStr


SECRETS_WITH_FILES: Final = tuple(
    name for name in FIELDS if is_secret(name) and f"{name}{FILE_KEY}" in FIELDS
)
"""The secrets that may also be read from a file, named by the key with ``_file`` behind it."""


def allowed(key: str) -> str:
    """The values a key may hold, in words that complete "use …"."""
    field = FIELDS[key]
    for part in (*field.metadata, *parts(field.annotation)):
        if isinstance(part, Allowed):
            return part.words
        if get_origin(part) is Literal:
            *rest, last = (f'"{word}"' for word in get_args(part))
            return f"{', '.join(rest)} or {last}"
    if kind_of(key) is bool:
        return "true or false"
    bounds = {
        name: getattr(mark, name)
        for mark in field.metadata
        for name in ("gt", "ge", "le")
        if hasattr(mark, name)
    }
    number = "a whole number" if kind_of(key) is int else "a number"
    low = f"from {bounds['ge']}" if "ge" in bounds else f"above {bounds['gt']}"
    joint = "to" if "ge" in bounds else "and up to"
    return f"{number} {low} {joint} {bounds['le']}{unit(key)}"


def unit(key: str) -> str:
    """The unit of a number as `` (unit)``, or an empty text where the key has no unit."""
    return keys.unit_of(FIELDS[key])

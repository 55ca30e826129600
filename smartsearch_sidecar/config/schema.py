"""The models read back as one flat table: dotted key to its field."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from smartsearch_sidecar.config.keys import Section
from smartsearch_sidecar.config.model import Config
from smartsearch_sidecar.config.values import Allowed


def _parts(annotation: Any) -> Iterator[Any]:
    """An annotation and what it is made of: unions and ``Annotated`` opened, ``None`` left out."""
    if get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            if part is not types.NoneType:
                yield from _parts(part)
        return
    if get_origin(annotation) is Annotated:
        yield from annotation.__metadata__
        yield from _parts(get_args(annotation)[0])
    else:
        yield annotation


def section_of(field: FieldInfo) -> type[Section] | None:
    """The model of a field that is a section, or ``None`` for a key."""
    for part in _parts(field.annotation):
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


def kind_of(key: str) -> Any:
    """The plain type behind a key: ``int``, ``Path``, ``SecretStr``, ``tuple``, a ``Literal``, …"""
    for part in _parts(FIELDS[key].annotation):
        origin = get_origin(part)
        if isinstance(part, type):
            return part
        if origin is Literal:
            return Literal
        if isinstance(origin, type):
            return origin
    raise TypeError(f"{key} has an annotation of no known kind")


def is_path(key: str) -> bool:
    return kind_of(key) is Path


def is_secret(key: str) -> bool:
    return kind_of(key) is SecretStr


def allowed(key: str) -> str:
    """What a key may hold, in words that complete "use …"."""
    field = FIELDS[key]
    for part in (*field.metadata, *_parts(field.annotation)):
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
    """The unit of a number as `` (unit)``, or nothing where the key has none."""
    extra = FIELDS[key].json_schema_extra
    return f" ({extra['unit']})" if isinstance(extra, dict) and extra.get("unit") else ""

"""Parts of a declaration: the frozen, strict section; ways to declare a key; kinds of value.

A key says everything about itself where it is declared: type and bounds, unit, default or presets,
and what it is for. Loading, messages and ``config/README.md`` read it from there.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

MIB: Final = 1024 * 1024


class Section(BaseModel):
    """A section: frozen, strict, without unknown keys, and silent about values in errors."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", hide_input_in_errors=True)


# --- ways to declare a key ------------------------------------------------------------------------


@dataclass(frozen=True)
class Preset:
    """A default that depends on the profile. The key can still be set by itself.

    Attributes:
        training: the default of the profile ``training``.
        reference: the default of the profile ``reference``.
        many_nodes: what ``training`` presets where ``run.nodes`` is above 1; ``None`` for the same.
    """

    training: Any
    reference: Any
    many_nodes: Any = None

    def value(self, profile: object, nodes: object) -> Any:
        """The default in ``profile`` and a run of ``nodes`` trainer nodes.

        An invalid profile or number presets as ``training`` on one node does: validation refuses
        it with everything else that is wrong.
        """
        if profile == "reference":
            return self.reference
        many = isinstance(nodes, int) and nodes > 1
        return self.many_nodes if many and self.many_nodes is not None else self.training


def key(default: Any, why: str) -> Any:
    """A key whose type says what is allowed. ``default`` is ``...`` for a key that must be set."""
    return _declared(default, why, "")


def whole(default: int | Preset | None, low: int, high: int, unit: str, why: str) -> Any:
    """A whole number with both bounds and a unit, which is empty for a port or a seed."""
    return _declared(default, why, unit, ge=low, le=high)


def seconds(default: float, high: float, why: str) -> Any:
    """A duration: above zero, fractions allowed."""
    return _declared(default, why, "seconds", gt=0, le=high)


def share(default: float | Preset, why: str) -> Any:
    """A share, from 0 to 1."""
    return _declared(default, why, "share", ge=0, le=1)


def _declared(default: Any, why: str, unit: str, **bounds: float) -> Any:
    extra: dict[str, Any] = {"unit": unit}
    if isinstance(default, Preset):
        extra["preset"] = asdict(default)
        default = default.training
    return Field(default, description=why, json_schema_extra=extra, **bounds)  # type: ignore[call-overload]


# --- reading a declaration ------------------------------------------------------------------------


def parts(annotation: Any) -> Iterator[Any]:
    """An annotation and what it is made of: unions and ``Annotated`` opened, ``None`` left out."""
    if get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            if part is not types.NoneType:
                yield from parts(part)
        return
    if get_origin(annotation) is Annotated:
        yield from annotation.__metadata__
        yield from parts(get_args(annotation)[0])
    else:
        yield annotation


def kind_of(field: FieldInfo) -> Any:
    """The plain type behind a key: ``int``, ``Path``, ``SecretStr``, ``tuple``, a ``Literal``, …"""
    for part in parts(field.annotation):
        origin = get_origin(part)
        if isinstance(part, type):
            return part
        if origin is Literal:
            return Literal
        if isinstance(origin, type):
            return origin
    raise TypeError(f"a key has an annotation of no known kind: {field.annotation}")


def preset_of(field: FieldInfo) -> Preset | None:
    """The preset of a key, or ``None`` where every profile has one default."""
    extra = field.json_schema_extra
    found = extra.get("preset") if isinstance(extra, dict) else None
    return Preset(**found) if isinstance(found, dict) else None


def unit_of(field: FieldInfo) -> str:
    """The unit of a number as `` (unit)``, or an empty text where the key has no unit."""
    extra = field.json_schema_extra
    return f" ({extra['unit']})" if isinstance(extra, dict) and extra.get("unit") else ""


# --- kinds of value -------------------------------------------------------------------------------
#
# No message made here ever repeats a value: some of the values are secrets.


@dataclass(frozen=True)
class Allowed:
    """Rides in ``Annotated``: the words that complete "use …" in a message and in the key table."""

    words: str


def _refused() -> PydanticCustomError:
    # The words that reach a person come from ``Allowed``, not from here.
    return PydanticCustomError("not_allowed", "not allowed")


def _fitting(fits: Callable[[Any], bool]) -> AfterValidator:
    def check(value: Any) -> Any:
        if not fits(value):
            raise _refused()
        return value

    return AfterValidator(check)


def _matching(pattern: str) -> AfterValidator:
    return _fitting(lambda value: re.fullmatch(pattern, value) is not None)


def _secret_matching(pattern: str) -> AfterValidator:
    return _fitting(lambda value: re.fullmatch(pattern, value.get_secret_value()) is not None)


def _is_http_url(value: str) -> bool:
    try:
        parts = urlsplit(value)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, a bracket that does not close
        return False
    plain = re.fullmatch(r"[\x21-\x7e]+", value) is not None
    return usable and plain and "@" not in parts.netloc and not parts.query and not parts.fragment


FilePath = Annotated[Path, Allowed("a path")]

Capability = Annotated[
    SecretStr,
    _secret_matching(r"[A-Za-z0-9_-]{32,128}"),
    Allowed("32 to 128 characters of A-Z, a-z, 0-9, _ and -"),
]

NatsServers = Annotated[
    SecretStr,
    _secret_matching(r"(nats|tls)://[\x21-\x2b\x2d-\x7e]+(,(nats|tls)://[\x21-\x2b\x2d-\x7e]+)*"),
    Allowed("nats:// or tls:// addresses, separated by commas"),
]

Sha256 = Annotated[
    str, _matching(r"[0-9a-f]{64}"), Allowed("a sha256: 64 digits of 0-9 and a-f, lower case")
]

Sha256List = Annotated[
    tuple[Sha256, ...],
    _fitting(lambda values: len(set(values)) == len(values)),
    Allowed("a list of different sha256 digests, 64 digits of 0-9 and a-f each"),
]

HttpUrl = Annotated[
    str,
    _fitting(_is_http_url),
    Allowed("an http:// or https:// address without user, password, query or fragment"),
]

Host = Annotated[str, _matching(r"[A-Za-z0-9._:-]{1,253}"), Allowed("an IP address or a host name")]

Name = Annotated[
    str, _matching(r"[A-Za-z0-9_-]{1,64}"), Allowed("1 to 64 characters of A-Z, a-z, 0-9, _ and -")
]

Words = Annotated[
    str, _fitting(lambda value: 0 < len(value) <= 1024), Allowed("1 to 1024 characters")
]

PROVIDERS: Final = ("bm25", "flashrag")
"""Every backend of this package, by the name of its folder in ``retrieval/``."""

ProviderName = Annotated[
    str,
    _matching("|".join((*PROVIDERS, r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"))),
    Allowed(f"{', '.join(PROVIDERS)} or package.module:factory"),
]

Route = Literal["execute", "search", "retrieve"]

Routes = Annotated[
    tuple[Route, ...],
    _fitting(lambda values: 0 < len(values) == len(set(values))),
    Allowed("a list of at least one of execute, search and retrieve, each once"),
]

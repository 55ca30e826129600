"""Parts of a declaration: the frozen, strict section; ways to declare a key; kinds of value.

A key says everything about itself where it is declared: type and bounds, unit, default or presets,
and below it what it is for. Loading, messages and ``config/README.md`` read it from there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr

MIB: Final = 1024 * 1024


class Section(BaseModel):
    """A section: frozen, strict, without unknown keys, and silent about values in errors.

    The text below a key is its ``description``.
    """

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )


# --- ways to declare a key ------------------------------------------------------------------------


@dataclass(frozen=True)
class Preset:
    """A default that depends on the profile. The key can still be set by itself.

    ``many_nodes`` is what ``training`` presets where ``run.nodes`` is above 1; ``None``: the same.
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


def preset(training: Any, reference: Any, many_nodes: Any = None) -> Any:
    """A key that the profile presets, and whose type says what is allowed."""
    return _declared(Preset(training, reference, many_nodes))


def hidden(default: Any = ...) -> Any:
    """A secret, or the key that names its file: left out where a configuration is shown."""
    return Field(default, exclude=True)


def whole(default: int | Preset | None, low: int, high: int, unit: str = "") -> Any:
    """A whole number with both bounds and a unit, which is empty for a port or a seed."""
    allowed = f"a whole number from {low} to {high}" + (f" ({unit})" if unit else "")
    return _declared(default, allowed, ge=low, le=high)


def seconds(default: float, high: int) -> Any:
    """A duration: above zero, fractions allowed."""
    return _declared(default, f"a number above 0 and up to {high} (seconds)", gt=0, le=high)


def share(default: float | Preset) -> Any:
    """A share, from 0 to 1."""
    return _declared(default, "a number from 0 to 1 (share)", ge=0, le=1)


def _declared(default: Any, allowed: str = "", **bounds: float) -> Any:
    extra: dict[str, Any] = {"allowed": allowed}
    if isinstance(default, Preset):
        extra["preset"] = default
        default = default.training
    return Field(default, json_schema_extra=extra, **bounds)  # type: ignore[call-overload]


# --- kinds of value -------------------------------------------------------------------------------
#
# No message made here ever repeats a value: some of the values are secrets.


@dataclass(frozen=True)
class Allowed:
    """Rides in ``Annotated``: the words that complete "use …" in a message and in the key table."""

    words: str


def _fitting(fits: Callable[[Any], bool]) -> AfterValidator:
    def check(value: Any) -> Any:
        if not fits(value.get_secret_value() if isinstance(value, SecretStr) else value):
            raise ValueError  # ``Allowed`` has the words that reach a person
        return value

    return AfterValidator(check)


def _matching(pattern: str) -> AfterValidator:
    return _fitting(lambda text: re.fullmatch(pattern, text) is not None)


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
    _matching(r"[A-Za-z0-9_-]{32,128}"),
    Allowed("32 to 128 characters of A-Z, a-z, 0-9, _ and -"),
]

NatsServers = Annotated[
    SecretStr,
    _matching(r"(nats|tls)://[\x21-\x2b\x2d-\x7e]+(,(nats|tls)://[\x21-\x2b\x2d-\x7e]+)*"),
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

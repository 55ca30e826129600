"""The kinds of value a key may hold, each with the words that say what is allowed.

No message made here ever repeats a value: some of the values are secrets.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, SecretStr
from pydantic_core import PydanticCustomError


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

ProviderName = Annotated[
    str,
    _matching(r"bm25|flashrag|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"),
    Allowed("bm25, flashrag or package.module:factory"),
]

Route = Literal["execute", "search", "retrieve"]

Routes = Annotated[
    tuple[Route, ...],
    _fitting(lambda values: 0 < len(values) == len(set(values))),
    Allowed("a list of at least one of execute, search and retrieve, each once"),
]

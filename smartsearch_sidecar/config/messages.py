"""The one sentence a person gets for each thing that is wrong with a configuration.

Each names the key, the value and what is allowed. The value of a secret is never shown, nor the
user or password inside an address.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from smartsearch_sidecar.config import schema

ENV_PREFIX = "SMARTSEARCH_SIDECAR__"
_SHOWN_MAX = 200  # characters: a path fits, a corpus does not


def env_name(key: str) -> str:
    """The environment variable that sets a key."""
    return ENV_PREFIX + key.upper().replace(".", "__")


def nearest(key: str) -> str:
    """The known key or section a person most likely meant.

    A slip of a letter inside the section first, then the same word in another section, then
    the closest of all names.
    """
    section, _, leaf = key.rpartition(".")
    everything = [*schema.FIELDS, *schema.SECTIONS]
    siblings = {_leaf(known): known for known in everything if _section(known) == section}
    if slip := difflib.get_close_matches(leaf, siblings, 1, cutoff=0.75):
        return siblings[slip[0]]
    if elsewhere := [known for known in everything if _leaf(known) == leaf]:
        return max(elsewhere, key=lambda known: _alike(section, _section(known)))
    return max(everything, key=lambda known: _alike(leaf, _leaf(known)) + _alike(key, known))


def _section(key: str) -> str:
    return key.rpartition(".")[0]


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]


def _alike(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def unknown(key: str, source: str, *, as_env: bool = False) -> str:
    close = nearest(key)
    if close in schema.SECTIONS:
        close = f"the section [{close}]"
    elif as_env:
        close = env_name(close)
    name = env_name(key) if as_env else key
    return f"{name}{_at(source)} is not a known key: the nearest is {close}."


def not_a_key(section: str, source: str) -> str:
    example = next(key for key in schema.FIELDS if key.startswith(f"{section}."))
    return f"{section}{_at(source)} is a section, not a key: set its keys, as {example}."


def not_a_section(key: str, source: str) -> str:
    return f"{key}{_at(source)} is a key, not a section: use {schema.allowed(key)}."


def not_allowed(key: str, value: Any, source: str) -> str:
    if schema.is_secret(key):
        return f"{key}{_at(source)} is not allowed: use {schema.allowed(key)}."
    return f"{key} = {shown(value)}{_at(source)} is not allowed: use {schema.allowed(key)}."


def missing(key: str) -> str:
    return f"{key} is missing: use {schema.allowed(key)}."


def shown(value: Any) -> str:
    """A value as a person wrote it, cut short, without the user and password of an address."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list | tuple):
        text = "[" + ", ".join(shown(item) for item in value[:8]) + (", …]" if value[8:] else "]")
    elif isinstance(value, bool | int | float | str):
        text = json.dumps(value, ensure_ascii=False)
    else:
        text = f'"{value}"'
    text = re.sub(r"//[^/@\s]*@", "//***@", text)
    return text if len(text) <= _SHOWN_MAX else text[: _SHOWN_MAX - 1] + "…"


def validation(failure: ValidationError, sources: Mapping[str, str]) -> list[str]:
    """A sentence for each problem pydantic found, in its order, each key once."""
    sentences: dict[str, None] = {}
    for problem in failure.errors(include_url=False):
        if problem["type"] == "rules":
            sentences.update(dict.fromkeys(problem["ctx"]["sentences"]))
            continue
        key = ".".join(part for part in problem["loc"] if isinstance(part, str))
        if problem["type"] == "missing":
            sentences[missing(key)] = None
        else:
            sentences[not_allowed(key, problem["input"], sources.get(key, ""))] = None
    return list(sentences)


def joined(sentences: list[str]) -> str:
    """One sentence as it is; several as a list, each on its own line."""
    if len(sentences) == 1:
        return sentences[0]
    lines = "".join(f"\n  {sentence}" for sentence in sentences)
    return f"The configuration has {len(sentences)} problems:{lines}"


def _at(source: str) -> str:
    return f" ({source})" if source else ""

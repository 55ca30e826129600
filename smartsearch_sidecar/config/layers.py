"""Where values come from: a TOML file, the environment, the command line; read into flat keys.

Each reader collects what it can and a sentence for each thing it cannot take, so that a person
sees all of them at once. What wins over what is decided in ``loading``.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smartsearch_sidecar import errors
from smartsearch_sidecar.config import messages, schema

FILE_BYTES_MAX = 1024 * 1024  # a configuration is a few KiB; a corpus named by mistake is not read


@dataclass(frozen=True)
class Setting:
    """A value, where it came from, and the folder its relative paths start at."""

    value: Any
    source: str
    base: Path


@dataclass
class Layer:
    """What one place says: keys, sections named there, and what could not be taken."""

    settings: dict[str, Setting] = field(default_factory=dict)
    sections: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


def from_file(path: Path) -> Layer:
    """The layer of a TOML file; ``ConfigError`` names the file, and the line where there is one."""
    layer = Layer()
    _flatten(_parsed(path), "", layer, str(path), path.absolute().parent)
    return layer


def from_environ(environ: Mapping[str, str], base: Path) -> Layer:
    """The layer of ``SMARTSEARCH_SIDECAR__SECTION__KEY`` variables."""
    layer = Layer()
    for name in sorted(environ):
        if not name.upper().startswith(messages.ENV_PREFIX):
            continue
        key = name[len(messages.ENV_PREFIX) :].lower().replace("__", ".")
        if key in schema.SECTIONS:
            layer.problems.append(messages.not_a_key(key, name))
        elif key not in schema.FIELDS:
            layer.problems.append(messages.unknown(key, "", as_env=True))
        else:
            layer.settings[key] = Setting(_read_words(key, environ[name]), name, base)
    return layer


def from_overrides(overrides: Mapping[str, Any], base: Path) -> Layer:
    """The layer of dotted keys from command line flags; ``None`` is a flag that was not given."""
    layer = Layer()
    for key, value in overrides.items():
        if value is None:
            continue
        if key in schema.SECTIONS:
            layer.problems.append(messages.not_a_key(key, "command line"))
        elif key not in schema.FIELDS:
            layer.problems.append(messages.unknown(key, "command line"))
        else:
            layer.settings[key] = Setting(value, "command line", base)
    return layer


def _parsed(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as exc:
        raise errors.CONFIG_INVALID(
            f"{path} cannot be read as a configuration ({exc.strerror or exc}): name a TOML file "
            "with --config."
        ) from None
    if len(data) > FILE_BYTES_MAX:
        raise errors.CONFIG_INVALID(
            f"{path} is over {FILE_BYTES_MAX} bytes: that is no configuration."
        )
    try:
        return tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        raise errors.CONFIG_INVALID(f"{path}, line {line}: this is not UTF-8 text.") from None
    except tomllib.TOMLDecodeError as exc:
        reason, line = _reason(str(exc), data)
        raise errors.CONFIG_INVALID(f"{path}, line {line}: this is not TOML: {reason}.") from None
    except RecursionError:
        raise errors.CONFIG_INVALID(f"{path} is nested too deeply to be a configuration.") from None


def _reason(message: str, data: bytes) -> tuple[str, int]:
    """The parser's words and the line they are about; an unfinished file breaks off on its last."""
    position = re.search(r" \(at line (\d+), column \d+\)$", message)
    if position is None:
        lines = data.rstrip().count(b"\n") + 1
        return message.removesuffix(" (at end of document)"), lines
    return message[: position.start()], int(position[1])


def _flatten(table: dict[str, Any], prefix: str, layer: Layer, source: str, base: Path) -> None:
    for name, value in table.items():
        key = prefix + name
        if key in schema.SECTIONS:
            if isinstance(value, dict):
                layer.sections.add(key)
                _flatten(value, f"{key}.", layer, source, base)
            else:
                layer.problems.append(messages.not_a_key(key, source))
        elif key not in schema.FIELDS:
            layer.problems.append(messages.unknown(key, source))
        elif isinstance(value, dict):
            layer.problems.append(messages.not_a_section(key, source))
        else:
            layer.settings[key] = Setting(value, source, base)


def _read_words(key: str, words: str) -> Any:
    """A variable's text as the kind of value its key holds; text it is not stays text, and is
    refused with everything else that is not allowed."""
    kind = schema.kind_of(key)
    try:
        if kind is int:
            return int(words)
        if kind is float:
            return float(words)
        if kind is tuple and words.lstrip().startswith("["):
            return json.loads(words)
    except (ValueError, RecursionError):
        return words
    if kind is bool:
        return {"true": True, "false": False}.get(words.lower(), words)
    if kind is tuple:
        return [word.strip() for word in words.split(",")] if words.strip() else []
    return words

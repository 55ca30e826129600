"""``load``: the one way to a ``Config``.

Later wins: profile presets, file, environment, command line. Each source is read into flat keys
with the place they came from; each collects what it can and a sentence for each thing it cannot
take, so that a person sees all of them at once. Secrets are read from their files here, and no
message or exception carries one. docs/adr/0005-configuration.md says why pydantic-settings does
not do this. ``__init__`` re-exports ``load``.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import SecretStr, ValidationError

from smartsearch_sidecar import errors
from smartsearch_sidecar.config import messages, schema
from smartsearch_sidecar.config.model import Config
from smartsearch_sidecar.run.json_values import has_utf8_form

FILE_BYTES_MAX = 1024 * 1024  # a configuration is a few KiB; a corpus named by mistake is not read
SECRET_FILE_BYTES_MAX = 4096  # a capability is 128 characters at most


def load(
    path: Path | None,
    *,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Reads, completes and checks a configuration.

    Relative paths start at the file's folder where the file says them, else at the working
    directory.

    Args:
        path: a TOML file, or ``None`` for a configuration without a file.
        overrides: dotted keys from the command line (``{"server.port": 0}``); the value ``None``
            means that the flag was not given.
        environ: ``os.environ`` unless given.

    Raises:
        errors.ConfigError: one sentence for each thing that is wrong.
    """
    here = Path.cwd()
    layers = [
        *([_from_file(path)] if path is not None else []),
        _from_environ(os.environ if environ is None else environ, here),
        _from_overrides(overrides or {}, here),
    ]
    settings: dict[str, Setting] = {}
    for layer in layers:
        settings.update(layer.settings)
    problems = [problem for layer in layers for problem in layer.problems]
    problems += _read_secrets(settings)
    values, unreadable = _values(settings)
    problems += unreadable
    config, refused = _validated(
        _nested(values, {section for layer in layers for section in layer.sections}),
        {key: setting.source for key, setting in settings.items()},
    )
    problems += refused
    if problems or config is None:
        raise errors.CONFIG_INVALID(messages.joined(problems))
    return config


def _read_secrets(settings: dict[str, Setting]) -> list[str]:
    """Adds the secrets of the files that ``…_file`` keys name; a sentence for each that fails."""
    problems: list[str] = []
    for key in schema.SECRETS_WITH_FILES:
        setting = settings.get(f"{key}_file")
        path = None if setting is None else _path(setting)
        if setting is None or not isinstance(path, Path):
            continue
        if key in settings:
            problems.append(f"{key} and {key}_file are both set: use one of them.")
            continue
        try:
            with path.open("rb") as file:
                words = file.read(SECRET_FILE_BYTES_MAX).decode("ascii", "replace").strip()
        except OSError as exc:
            problems.append(
                f"{key}_file = {messages.shown(setting.value)} ({setting.source}) cannot be read "
                f"({exc.strerror or exc}): name a file this user may read."
            )
        else:
            settings[key] = Setting(SecretStr(words), str(path), setting.base)
    return problems


def _values(settings: Mapping[str, Setting]) -> tuple[dict[str, Any], list[str]]:
    """Every key's value as the models take it, presets filled in; a sentence for each failure."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    for key, setting in settings.items():
        if not _is_text(setting.value):
            problems.append(f"{key} ({setting.source}) is not valid text: use UTF-8.")
        elif schema.is_path(key):
            values[key] = _path(setting)
        elif schema.kind_of(key) is tuple and isinstance(setting.value, list):
            values[key] = tuple(setting.value)
        else:
            values[key] = setting.value
    for key, preset in schema.PRESETS.items():
        if key not in settings:
            values[key] = preset.value(values.get("profile"), values.get("run.nodes"))
    return values, problems


def _is_text(value: Any) -> bool:
    """Whether all text in a value is valid: bytes that are not UTF-8 arrive as lone surrogates."""
    if isinstance(value, list | tuple):
        return all(_is_text(item) for item in value)
    return has_utf8_form(str(value))


def _path(setting: Setting) -> Any:
    """The absolute path a setting means. Another value stays as it is: validation refuses it."""
    value = setting.value
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        return value
    try:
        path = setting.base / Path(value).expanduser()
    except RuntimeError:  # ~name, and no user has this name
        return value
    return Path(os.path.normpath(path))


def _nested(values: Mapping[str, Any], named: set[str]) -> dict[str, Any]:
    """Dotted keys as the nested tables they stand for, sections without keys included."""
    nested: dict[str, Any] = {}
    for section in named:
        _table(nested, section.split("."))
    for key, value in values.items():
        *sections, name = key.split(".")
        _table(nested, sections)[name] = value
    return nested


def _table(nested: dict[str, Any], sections: list[str]) -> dict[str, Any]:
    for section in sections:
        nested = nested.setdefault(section, {})
    return nested


def _validated(
    nested: dict[str, Any], sources: Mapping[str, str]
) -> tuple[Config | None, list[str]]:
    """The configuration, or sentences; pydantic's error ends here, as it holds the values."""
    try:
        return Config.model_validate(nested), []
    except ValidationError as exc:
        return None, messages.validation(exc, sources)


# --- where values come from -----------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A value, where it came from, and the folder its relative paths start at."""

    value: Any
    source: str
    base: Path


@dataclass
class Layer:
    """One source: its keys, the sections named there, and a sentence for each problem."""

    settings: dict[str, Setting] = field(default_factory=dict)
    sections: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


def _from_file(path: Path) -> Layer:
    """The layer of a TOML file; ``ConfigError`` names the file, and the line where there is one."""
    layer = Layer()
    _flatten(_parsed(path), "", layer, str(path), path.absolute().parent)
    return layer


def _from_environ(environ: Mapping[str, str], base: Path) -> Layer:
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


def _from_overrides(overrides: Mapping[str, Any], base: Path) -> Layer:
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
            f"{path} is over {FILE_BYTES_MAX} bytes: that is not a configuration."
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
    """A variable's text as the kind of value its key holds.

    Text of another kind stays text: validation refuses it with everything else that is wrong.
    """
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

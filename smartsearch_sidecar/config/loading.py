"""``load``: the one way to a ``Config``.

Later wins: profile presets, file, environment, command line. Secrets are read from their files
here, and no message or exception carries one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import SecretStr, ValidationError

from smartsearch_sidecar import errors
from smartsearch_sidecar.config import messages, schema
from smartsearch_sidecar.config.layers import (
    Setting,
    from_environ,
    from_file,
    from_overrides,
)
from smartsearch_sidecar.config.model import Config
from smartsearch_sidecar.config.profiles import PRESETS, preset
from smartsearch_sidecar.run.json_values import has_utf8_form

SECRETS_WITH_FILES = ("server.execute_capability", "server.internal_capability")
SECRET_FILE_BYTES_MAX = 4096  # a capability is 128 characters at most


def load(
    path: Path | None,
    *,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Reads, completes and checks a configuration.

    ``path`` is a TOML file or ``None``; ``overrides`` are dotted keys from the command line
    (``{"server.port": 0}``; ``None`` means not given); ``environ`` is ``os.environ`` unless given.
    Relative paths start at the file's folder where the file says them, else at the working
    directory. Raises ``errors.ConfigError``: one sentence for each thing that is wrong.
    """
    here = Path.cwd()
    layers = [
        *([from_file(path)] if path is not None else []),
        from_environ(os.environ if environ is None else environ, here),
        from_overrides(overrides or {}, here),
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
    """Puts what the ``…_file`` keys point to beside them; a sentence for each it cannot read."""
    problems: list[str] = []
    for key in SECRETS_WITH_FILES:
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
    """Every key's value as the models take it, presets filled in; a sentence for each without."""
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
    nodes = values.get("run.nodes")
    for key in PRESETS:
        if key not in settings:
            values[key] = preset(
                key, values.get("profile"), nodes=nodes if isinstance(nodes, int) else 1
            )
    return values, problems


def _is_text(value: Any) -> bool:
    """Whether all text in it has a UTF-8 form: bytes that were none arrive as lone surrogates."""
    if isinstance(value, list | tuple):
        return all(_is_text(item) for item in value)
    return has_utf8_form(str(value))


def _path(setting: Setting) -> Any:
    """The absolute path a setting means; what cannot be a path stays as it is and is refused."""
    value = setting.value
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        return value
    try:
        path = setting.base / Path(value).expanduser()
    except RuntimeError:  # ~name of nobody
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

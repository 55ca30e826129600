"""``load``: the one way to a ``Config``, and the one sentence for each thing that is wrong with it.

Later wins: profile presets, file, environment, command line. Each source is read into flat keys
with the place they came from, and what cannot be taken is collected, so that a person sees all of
it at once. Secrets are read from their files here. No message or exception carries one, nor the
user or password inside an address. docs/adr/0005-configuration.md says why pydantic-settings does
not do this.
"""

from __future__ import annotations

import difflib
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
from smartsearch_sidecar.config.model import (
    FIELDS,
    KINDS,
    PRESETS,
    SECRETS_WITH_FILES,
    SECTIONS,
    Config,
    allowed,
)
from smartsearch_sidecar.run.json_values import has_utf8_form

ENV_PREFIX = "SMARTSEARCH_SIDECAR__"
FILE_BYTES_MAX = 1024 * 1024  # a configuration is a few KiB; a corpus named by mistake is not read
SECRET_FILE_BYTES_MAX = 4096  # a capability is 128 characters at most
SHOWN_MAX = 200  # characters of a value in a message: a path fits, a corpus does not


@dataclass(frozen=True)
class Setting:
    """A value, where it came from, and the folder its relative paths start at."""

    value: Any
    source: str
    base: Path

    def path(self) -> Any:
        """The absolute path it means. Another value stays as it is: validation refuses it."""
        value = self.value
        if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
            return value
        try:
            path = self.base / Path(value).expanduser()
        except RuntimeError:  # ~name, and no user has this name
            return value
        return Path(os.path.normpath(path))


@dataclass
class Given:
    """What the sources say: keys, the sections named there, and a sentence for each problem."""

    settings: dict[str, Setting] = field(default_factory=dict)
    sections: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def add(self, key: str, setting: Setting) -> None:
        """Takes one key; the setting of an earlier source gives way."""
        if key in SECTIONS:
            example = next(known for known in FIELDS if known.startswith(f"{key}."))
            self.problems.append(
                f"{key} ({setting.source}) is a section, not a key: set its keys, as {example}."
            )
        elif key not in FIELDS:
            self.problems.append(unknown(key, setting.source))
        else:
            self.settings[key] = setting

    def add_table(self, table: dict[str, Any], prefix: str, source: str, base: Path) -> None:
        for name, value in table.items():
            key = prefix + name
            if key in SECTIONS and isinstance(value, dict):
                self.sections.add(key)
                self.add_table(value, f"{key}.", source, base)
            elif key in FIELDS and isinstance(value, dict):
                self.problems.append(
                    f"{key} ({source}) is a key, not a section: use {allowed(key)}."
                )
            else:
                self.add(key, Setting(value, source, base))

    def add_variable(self, name: str, words: str, base: Path) -> None:
        key = name[len(ENV_PREFIX) :].lower().replace("__", ".")
        if key in FIELDS or key in SECTIONS:
            self.add(key, Setting(_read_words(KINDS.get(key), words), name, base))
        else:
            self.problems.append(unknown(key, "", as_env=True))


def load(
    path: Path | None,
    *,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Reads, completes and checks a configuration.

    Relative paths start at the folder of ``path`` where that file says them, else at the working
    directory. ``overrides`` are dotted keys from the command line (``{"server.port": 0}``); the
    value ``None`` means that the flag was not given. ``environ`` is ``os.environ`` unless given.

    Raises ``ConfigError`` with one sentence for each thing that is wrong.
    """
    here = Path.cwd()
    given = Given()
    if path is not None:
        given.add_table(_parsed(path), "", str(path), path.absolute().parent)
    for name, words in sorted((os.environ if environ is None else environ).items()):
        if name.upper().startswith(ENV_PREFIX):
            given.add_variable(name, words, here)
    for key, value in (overrides or {}).items():
        if value is not None:
            given.add(key, Setting(value, "command line", here))
    _read_secrets(given)
    values = _values(given)
    try:
        config = Config.model_validate(_nested(values, given.sections))
    except ValidationError as exc:  # it ends here, as it holds the values
        given.problems += _refusals(exc, given.settings)
    else:
        if not given.problems:
            return config
    sentences = given.problems
    if len(sentences) == 1:
        raise errors.CONFIG_INVALID(sentences[0])
    lines = "".join(f"\n  {sentence}" for sentence in sentences)
    raise errors.CONFIG_INVALID(f"The configuration has {len(sentences)} problems:{lines}")


def _read_secrets(given: Given) -> None:
    for key in SECRETS_WITH_FILES:
        setting = given.settings.get(f"{key}_file")
        if setting is None or not isinstance(path := setting.path(), Path):
            continue
        if key in given.settings:
            given.problems.append(f"{key} and {key}_file are both set: use one of them.")
            continue
        try:
            with path.open("rb") as file:
                words = file.read(SECRET_FILE_BYTES_MAX).decode("ascii", "replace").strip()
        except OSError as exc:
            given.problems.append(
                f"{key}_file = {shown(setting.value)} ({setting.source}) cannot be read "
                f"({exc.strerror or exc}): name a file this user may read."
            )
        else:
            given.settings[key] = Setting(SecretStr(words), str(path), setting.base)


def _values(given: Given) -> dict[str, Any]:
    """Every key's value as the models take it, presets filled in."""
    values: dict[str, Any] = {}
    for key, setting in given.settings.items():
        if not _is_text(setting.value):
            given.problems.append(f"{key} ({setting.source}) is not valid text: use UTF-8.")
        elif KINDS[key] is Path:
            values[key] = setting.path()
        elif KINDS[key] is tuple and isinstance(setting.value, list):
            values[key] = tuple(setting.value)
        else:
            values[key] = setting.value
    for key, preset in PRESETS.items():
        if key not in given.settings:
            values[key] = preset.value(values.get("profile"), values.get("run.nodes"))
    return values


def _is_text(value: Any) -> bool:
    """Whether all text in a value is valid: bytes that are not UTF-8 arrive as lone surrogates."""
    if isinstance(value, list | tuple):
        return all(map(_is_text, value))
    return has_utf8_form(str(value))


def _nested(values: Mapping[str, Any], named: set[str]) -> dict[str, Any]:
    """Dotted keys as the nested tables they stand for, sections without keys included."""
    nested: dict[str, Any] = {}
    for key in (*(f"{section}." for section in named), *values):
        *sections, name = key.split(".")
        table = nested
        for section in sections:
            table = table.setdefault(section, {})
        if name:
            table[name] = values[key]
    return nested


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


def _read_words(kind: Any, words: str) -> Any:
    """A variable's text as a value of the kind its key holds. Text of another kind stays text:
    validation refuses it with everything else that is wrong.
    """
    try:
        if kind in (int, float):
            return kind(words)
        if kind is tuple and words.lstrip().startswith("["):
            return json.loads(words)
    except (ValueError, RecursionError):
        return words
    if kind is bool:
        return {"true": True, "false": False}.get(words.lower(), words)
    if kind is tuple:
        return [word.strip() for word in words.split(",")] if words.strip() else []
    return words


def env_name(key: str) -> str:
    return ENV_PREFIX + key.upper().replace(".", "__")


def nearest(key: str) -> str:
    """The known key or section a person most likely meant: a slip of a letter inside the section
    first, then the same word in another section, then the closest of all names.
    """
    section, _, leaf = key.rpartition(".")
    known = {name: name.rpartition(".")[::2] for name in (*FIELDS, *SECTIONS)}
    siblings = {word: name for name, (at, word) in known.items() if at == section}
    if slip := difflib.get_close_matches(leaf, siblings, 1, cutoff=0.75):
        return siblings[slip[0]]
    if elsewhere := [name for name, (_, word) in known.items() if word == leaf]:
        return max(elsewhere, key=lambda name: _alike(section, known[name][0]))
    return max(known, key=lambda name: _alike(leaf, known[name][1]) + _alike(key, name))


def _alike(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def unknown(key: str, source: str, *, as_env: bool = False) -> str:
    close = nearest(key)
    if close in SECTIONS:
        close = f"the section [{close}]"
    elif as_env:
        close = env_name(close)
    name = env_name(key) if as_env else key
    return f"{name}{_at(source)} is not a known key: the nearest is {close}."


def not_allowed(key: str, value: Any, source: str) -> str:
    written = "" if KINDS[key] is SecretStr else f" = {shown(value)}"
    return f"{key}{written}{_at(source)} is not allowed: use {allowed(key)}."


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
    return text if len(text) <= SHOWN_MAX else text[: SHOWN_MAX - 1] + "…"


def _refusals(failure: ValidationError, settings: Mapping[str, Setting]) -> list[str]:
    """A sentence for each problem pydantic found, in its order, each key once."""
    sentences: dict[str, None] = {}
    for problem in failure.errors(include_url=False):
        if problem["type"] == "rules":
            sentences.update(dict.fromkeys(problem["ctx"]["sentences"]))
            continue
        key = ".".join(part for part in problem["loc"] if isinstance(part, str))
        source = settings[key].source if key in settings else ""
        missing = problem["type"] == "missing"
        sentence = f"{key} is missing: use {allowed(key)}."
        sentences[sentence if missing else not_allowed(key, problem["input"], source)] = None
    return list(sentences)


def _at(source: str) -> str:
    return f" ({source})" if source else ""

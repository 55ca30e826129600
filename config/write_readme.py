"""Writes config/README.md, the table of every key, from the models: `make readme`."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path

from smartsearch_sidecar.config import Config, loading, model

INTRODUCTION = """\
# Configuration

<!-- Written by `make readme` from the models in smartsearch_sidecar/config: change those. -->

TOML, given with `--config`. Each key may also be set by an environment variable,
`SMARTSEARCH_SIDECAR__SECTION__KEY` (`SMARTSEARCH_SIDECAR__RETRIEVAL__BM25__INDEX=/data/index`; a
list as JSON, or its words separated by commas), and some by a flag of the command. Later wins:
profile, file, environment, flag. Relative paths start at the file's folder where the file says
them, otherwise at the working directory.

An unknown key is refused with the nearest known one, and a value that is not allowed with the
allowed ones. All problems are listed at once, and no message shows a secret.

| file | for |
|---|---|
| `training.toml` | a training node |
| `reference.toml` | the reference implementation's behaviour, for parity runs |
| `demo.toml` | `make run` |

A profile only presets: each key with two defaults below can still be set by itself.
"""


def document() -> str:
    """The whole file."""
    parts = [INTRODUCTION, _table("Top level", [key for key in model.FIELDS if "." not in key])]
    for name, section in model.SECTIONS.items():
        keys = [key for key in model.FIELDS if key.rpartition(".")[0] == name]
        if keys:
            parts.append(_table(f"`[{name}]`", keys, (section.__doc__ or "").strip()))
    rules = "\n".join(f"- {_sentence(rule)}" for rule in model.RULES)
    return "\n".join([*parts, f"## Between keys\n\n{rules}\n"])


def _sentence(rule: Callable[..., object]) -> str:
    """A rule's docstring, wrapped as one item of a list."""
    words = " ".join((rule.__doc__ or "").split())
    return textwrap.fill(words, 98, subsequent_indent="  ", break_on_hyphens=False)


def _table(title: str, keys: list[str], about: str = "") -> str:
    lines = [f"## {title}", ""]
    if about:
        lines += [about, ""]
    lines += ["| key | default | allowed | meaning |", "|---|---|---|---|"]
    for key in keys:
        name = key.rpartition(".")[2]
        lines.append(f"| `{name}` | {_default(key)} | {model.allowed(key)} | {meaning(key)} |")
    return "\n".join(lines) + "\n"


def meaning(key: str) -> str:
    """The text that stands below a key in its section's source, on one line."""
    section, _, name = key.rpartition(".")
    for kind in (model.SECTIONS[section] if section else Config).__mro__:
        if name in vars(kind).get("__annotations__", {}) and name in _texts(kind):
            return _texts(kind)[name]
    raise LookupError(f"no text stands below {key}")


@functools.cache
def _texts(kind: type) -> dict[str, str]:
    """By the name of each field of a class, the text below it."""
    source = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(source, ast.ClassDef)
    return {
        ast.unparse(declared.target): " ".join(str(text.value.value).split())
        for declared, text in zip(source.body, source.body[1:], strict=False)
        if isinstance(declared, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def _default(key: str) -> str:
    preset = model.PRESETS.get(key)
    if preset is not None and preset.training != preset.reference:
        return f"{_code(preset.training)}; reference: {_code(preset.reference)}"
    field = model.FIELDS[key]
    if field.is_required():
        return "required"
    return "-" if field.default is None else _code(field.default)


def _code(value: object) -> str:
    return f"`{loading.shown(value)}`"


def main() -> None:
    path = Path(__file__).with_name("README.md")
    path.write_text(document(), encoding="utf-8")
    print(f"{path} has {len(model.FIELDS)} keys.")


if __name__ == "__main__":
    main()

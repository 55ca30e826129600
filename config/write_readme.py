"""Writes config/README.md, the table of every key, from the models: `make readme`."""

from __future__ import annotations

from pathlib import Path

from smartsearch_sidecar.config import messages, schema
from smartsearch_sidecar.config.profiles import PRESETS

INTRODUCTION = """\
# Configuration

<!-- Written by `make readme` from the models in smartsearch_sidecar/config: change those. -->

TOML, given with `--config`. Each key may also be set by an environment variable,
`SMARTSEARCH_SIDECAR__SECTION__KEY` (`SMARTSEARCH_SIDECAR__RETRIEVAL__BM25__INDEX=/data/index`; a
list as JSON, or its words separated by commas), and some by a flag of the command. Later wins:
profile, file, environment, flag. Relative paths start at the file's folder where the file says
them, otherwise at the working directory.

An unknown key is refused with the nearest known one; a value that is not allowed is refused with
what is. All problems are listed at once, and none of the messages shows a secret.

| file | for |
|---|---|
| `training.toml` | a training node |
| `reference.toml` | the reference implementation's behaviour, for parity runs |
| `demo.toml` | `make run` |

A profile only presets: the keys with two defaults below can each be set by themselves.
"""

RULES = """
## Between keys

- `retrieval.provider = "bm25"` needs `retrieval.bm25.index`; `"flashrag"` needs `url`,
  `corpus_sha256` and `index_sha256` of `[retrieval.flashrag]`.
- `server.host` must be loopback unless `server.allow_remote` is true. `probe_host` and `probe_port`
  go together. The two capabilities differ; each comes from its key or its file, not both.
- `reward.enabled` needs `reward.checkout`, or `reward.source` with `reward.source_sha256`; the
  references of at least one split; and the helper's `url`, `model` and `model_sha256`.
- `run.nodes` above 1 presets `reward.provenance` to `record`; `enforce` then needs `[cluster]`.
- `run.on_unclean_restart = "report"` needs rewards with `reward.provenance = "enforce"`.
- `[cluster]` needs `run.nodes` of 2 or more.
"""


def document() -> str:
    """The whole file."""
    parts = [INTRODUCTION, _table("Top level", [key for key in schema.FIELDS if "." not in key])]
    for name, section in schema.SECTIONS.items():
        keys = [key for key in schema.FIELDS if key.rpartition(".")[0] == name]
        if keys:
            parts.append(_table(f"`[{name}]`", keys, (section.__doc__ or "").strip()))
    return "\n".join(parts) + RULES


def _table(title: str, keys: list[str], about: str = "") -> str:
    lines = [f"## {title}", ""]
    if about:
        lines += [about, ""]
    lines += ["| key | default | allowed | meaning |", "|---|---|---|---|"]
    for key in keys:
        name = key.rpartition(".")[2]
        field = schema.FIELDS[key]
        lines.append(
            f"| `{name}` | {_default(key)} | {schema.allowed(key)} | {field.description} |"
        )
    return "\n".join(lines) + "\n"


def _default(key: str) -> str:
    if key in PRESETS:
        training, reference = PRESETS[key]
        if training != reference:
            return f"{_code(training)}; reference: {_code(reference)}"
    field = schema.FIELDS[key]
    if field.is_required():
        return "required"
    return "-" if field.default is None else _code(field.default)


def _code(value: object) -> str:
    return f"`{messages.shown(value)}`"


def main() -> None:
    path = Path(__file__).with_name("README.md")
    path.write_text(document(), encoding="utf-8")
    print(f"{path} has {len(schema.FIELDS)} keys.")


if __name__ == "__main__":
    main()

"""``env digest``: which environments a dataset holds, and the line that accepts them.

An unmodified dataset carries its environment as Python source, in ``extra_info.env`` or in a column
``env``. Here it is read, counted and shown; nothing of it is ever compiled or run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer import Argument, Option

from smartsearch_sidecar import errors
from smartsearch_sidecar.commands.dataset import is_parquet, parquet_rows
from smartsearch_sidecar.contract.execute import environment_digest
from smartsearch_sidecar.ledger.describe import printable

app = typer.Typer(name="env", help="The environments of a dataset.", no_args_is_help=True)

COLUMNS: Final = ["extra_info.env", "env"]
ENVIRONMENTS_MAX: Final = 10_000
"""Different ones. A dataset with more has one per row: no list of digests is meant for that."""
SHOWN: Final = 20
"""Texts shown without ``--all``."""

_DEFINES: Final = re.compile(r"^(?:async )?def wikipedia_search\(", re.MULTILINE)


@dataclass(slots=True)
class Environment:
    """One environment: the rows that carry it, and its text with the first search URL met."""

    sha256: str
    text: str
    rows: int = 0

    @property
    def serves(self) -> bool:
        """Whether its text defines ``wikipedia_search``, the function the sidecar serves."""
        return _DEFINES.search(self.text) is not None


@dataclass(slots=True)
class Census:
    """Counts of a dataset: all rows, rows without an environment, environments by digest."""

    rows: int = 0
    without: int = 0
    found: dict[str, Environment] = field(default_factory=dict)
    _digests: dict[str, str] = field(default_factory=dict)  # by text: most rows repeat one

    def add(self, text: str | None) -> None:
        """Counts one row. Raises ``UsageError`` over ``ENVIRONMENTS_MAX``."""
        self.rows += 1
        if text is None:
            self.without += 1
            return
        digest = self._digests.get(text)
        if digest is None:
            digest = self._digests[text] = _digest(text, self.rows)
            if len(self._digests) > ENVIRONMENTS_MAX:
                raise errors.USAGE(
                    f"more than {ENVIRONMENTS_MAX:,} different environments in {self.rows:,} rows: "
                    "this dataset has one per row, and the sidecar serves wikipedia_search alone"
                )
        self.found.setdefault(digest, Environment(digest, text)).rows += 1

    def ordered(self) -> list[Environment]:
        """The most frequent first."""
        return sorted(self.found.values(), key=lambda one: (-one.rows, one.sha256))


def _digest(text: str, row: int) -> str:
    try:
        return environment_digest(text)
    except UnicodeEncodeError:
        raise errors.USAGE(f"row {row}: its environment has no UTF-8 form") from None


@app.command("digest")
def digest(
    dataset: Annotated[
        Path, Argument(metavar="FILE", help="The trainer's dataset: Parquet or JSONL.")
    ],
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
    everything: Annotated[
        bool, Option("--all", help=f"Show every text, not the first {SHOWN}.")
    ] = False,
) -> None:
    """List the environments a dataset holds: rows, text, digest, and the line for [execute].

    The digest leaves the search URL out, so that it holds on every node. A text is shown as it is
    written, with control characters spelled out, and is never compiled or run. Exit 1: the dataset
    holds no environment.
    """
    census = take(dataset)
    environments = census.ordered()
    if as_json:
        typer.echo(json.dumps(_json(census), indent=2))
    else:
        for line in _words(census, len(environments) if everything else SHOWN):
            typer.echo(line)
    raise typer.Exit(0 if environments else 1)


def take(dataset: Path) -> Census:
    """Counts a file's environments. Raises ``UsageError`` with the row where it cannot be read."""
    census = Census()
    try:
        for row in parquet_rows(dataset, COLUMNS) if is_parquet(dataset) else _jsonl(dataset):
            census.add(_environment(row))
    except OSError as error:
        raise errors.USAGE(f"{dataset} cannot be read: {error.strerror or error}") from None
    return census


def _environment(row: Mapping[str, Any]) -> str | None:
    """The environment of a row: the trainer takes ``extra_info.env`` first."""
    extra = row.get("extra_info")
    for text in (extra.get("env") if isinstance(extra, Mapping) else None, row.get("env")):
        if isinstance(text, str) and text:
            return text
    return None


def _jsonl(dataset: Path) -> Iterator[Mapping[str, Any]]:
    with dataset.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode())
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, Mapping):
                raise errors.USAGE(
                    f"{dataset}: line {number} is not a JSON object in UTF-8; a dataset is Parquet "
                    "or has one object a line"
                )
            yield row


# --- words ----------------------------------------------------------------------------------------


def _accepted(census: Census) -> list[str]:
    return [one.sha256 for one in census.ordered() if one.serves]


def _json(census: Census) -> dict[str, Any]:
    return {
        "rows": census.rows,
        "rows_without": census.without,
        "environments": [
            {
                "sha256": one.sha256,
                "rows": one.rows,
                "defines_wikipedia_search": one.serves,
                "text": one.text,
            }
            for one in census.ordered()
        ],
        "accepted_environment_sha256": _accepted(census),
    }


def _words(census: Census, shown: int) -> Iterator[str]:
    environments = census.ordered()
    yield f"{_count(census.rows, 'row')}, {_count(len(environments), 'environment')}"
    if census.without:
        yield f"{_count(census.without, 'row')} without one (no extra_info.env, no env)"
    for one in environments[:shown]:
        yield f"\n{one.sha256}  {_count(one.rows, 'row')}"
        if not one.serves:
            yield "left out of the line below: it defines no wikipedia_search"
        for line in one.text.split("\n"):
            yield f"    {printable(line, len(line))}".rstrip()
    if len(environments) > shown:
        yield f"\n... and {_count(len(environments) - shown, 'environment')} more: use --all"
    if digests := _accepted(census):
        yield "\nRead the text, then put this under [execute] of the configuration:\n"
        yield f"accepted_environment_sha256 = {json.dumps(digests)}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

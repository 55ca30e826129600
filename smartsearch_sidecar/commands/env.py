"""``env digest``: which environments a dataset holds, and the line that accepts them.

An unmodified dataset carries its environment as Python source, in ``extra_info.env`` or in a column
``env``. Here it is read, counted and shown; nothing of it is ever compiled or run.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer import Argument, Option

from smartsearch_sidecar import errors
from smartsearch_sidecar.contract.execute import environment_digest
from smartsearch_sidecar.ledger.describe import printable

app = typer.Typer(name="env", help="The environments of a dataset.", no_args_is_help=True)

COLUMNS: Final = ["extra_info.env", "env"]
ENVIRONMENTS_MAX: Final = 10_000
"""Different ones. A dataset with more has one per row: no list of digests is meant for that."""
SHOWN: Final = 20
"""Texts shown without ``--all``."""

_MAGIC: Final = b"PAR1"
_BATCH_ROWS: Final = 1024
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


@dataclass(frozen=True, slots=True)
class Census:
    """Counts of a dataset: all rows, rows without an environment; the most frequent one first."""

    rows: int
    without: int
    environments: list[Environment]

    @property
    def accepted(self) -> list[str]:
        return [one.sha256 for one in self.environments if one.serves]


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
    if as_json:
        typer.echo(json.dumps(_json(census), indent=2))
    else:
        for line in _words(census, len(census.environments) if everything else SHOWN):
            typer.echo(line)
    raise typer.Exit(0 if census.environments else 1)


def take(dataset: Path) -> Census:
    """Counts a file's environments. Raises ``UsageError`` with the row where it cannot be read."""
    rows = without = 0
    by_text: dict[str, Environment] = {}  # most rows repeat one text: each is digested once
    by_digest: dict[str, Environment] = {}
    try:
        for row in parquet_rows(dataset, COLUMNS) if is_parquet(dataset) else _jsonl(dataset):
            rows += 1
            text = _environment(row)
            if text is None:
                without += 1
                continue
            if text not in by_text:
                digest = environment_digest(text)
                by_text[text] = by_digest.setdefault(digest, Environment(digest, text))
            if len(by_text) > ENVIRONMENTS_MAX:
                raise errors.USAGE(
                    f"more than {ENVIRONMENTS_MAX:,} different environments in {rows:,} rows: "
                    "this dataset has one per row, and the sidecar serves wikipedia_search alone"
                )
            by_text[text].rows += 1
    except UnicodeEncodeError:
        raise errors.USAGE(f"row {rows}: its environment has no UTF-8 form") from None
    except OSError as error:
        raise errors.USAGE(f"{dataset} cannot be read: {error.strerror or error}") from None
    ordered = sorted(by_digest.values(), key=lambda one: (-one.rows, one.sha256))
    return Census(rows, without, ordered)


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


# --- rows of the trainer's Parquet files ----------------------------------------------------------


def is_parquet(path: Path) -> bool:
    """Whether a file begins as Parquet does. Raises ``OSError`` where it cannot be read."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def parquet_rows(path: Path, columns: list[str]) -> Iterator[Mapping[str, Any]]:
    """The rows of a Parquet file, batch by batch, so that memory does not grow with the file.

    A row lacks the ``columns`` that the file does not have. Raises ``NotAvailable`` without
    pyarrow, ``UsageError`` for a damaged file.
    """
    try:
        arrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise errors.NOT_AVAILABLE(
            f"{path} is a Parquet file and pyarrow is not installed: install "
            "smartsearch-sidecar[parquet], or name a JSONL file"
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH_ROWS, columns=columns):
                yield from batch.to_pylist()
    except (ValueError, arrow.ArrowException) as exc:
        raise errors.USAGE(f"{path} is a damaged Parquet file ({type(exc).__name__})") from None


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
            for one in census.environments
        ],
        "accepted_environment_sha256": census.accepted,
    }


def _words(census: Census, shown: int) -> Iterator[str]:
    environments = census.environments
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
    if digests := census.accepted:
        yield "\nRead the text, then put this under [execute] of the configuration:\n"
        yield f"accepted_environment_sha256 = {json.dumps(digests)}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

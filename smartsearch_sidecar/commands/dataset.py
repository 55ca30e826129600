"""Rows of the trainer's Parquet files, for the commands that read a dataset."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from smartsearch_sidecar import errors

_MAGIC: Final = b"PAR1"
_BATCH_ROWS: Final = 1024


def is_parquet(path: Path) -> bool:
    """Whether a file begins as Parquet does. Raises ``OSError`` where it cannot be read."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def parquet_rows(path: Path, columns: list[str]) -> Iterator[Mapping[str, Any]]:
    """The rows of a Parquet file, batch by batch, so that memory does not grow with the file.

    Args:
        path: the file.
        columns: what is read of each row; a row lacks the columns that the file does not have.

    Raises:
        errors.NotAvailable: pyarrow is not installed.
        errors.UsageError: the file is damaged.
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

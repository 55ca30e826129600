"""What a benchmark run was asked for, and where it puts things."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

CLIENTS = (1, 8, 64, 256, 512)


class Unmeasured(Exception):
    """A case that could not be measured here; its sentence goes into the table's notes."""


@dataclass(frozen=True)
class Settings:
    """One run's wishes.

    ``seconds`` is one load; ``native_seconds`` that of the native client; ``passages`` the size of
    the large synthetic corpus; ``growth`` how many requests the longest history has. ``out`` gets
    the figures, and under it the ledgers while they are measured: its disk is the one measured.
    ``checkout`` is the pinned trainer's, run by ``sandbox_python``.
    """

    out: Path
    runs: int = 3
    seconds: float = 3.0
    native_seconds: float = 60.0
    passages: int = 300_000
    growth: int = 100_000
    clients: tuple[int, ...] = CLIENTS
    checkout: Path | None = None
    sandbox_python: str = ""
    quick: bool = False
    _names: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A new folder on the disk that is measured, gone afterwards."""
        folder = Path(tempfile.mkdtemp(prefix=f"run-{next(self._names)}-", dir=self.out)).resolve()
        try:
            yield folder
        finally:
            shutil.rmtree(folder)

    @property
    def few(self) -> int:
        """The number of clients at which peers are compared."""
        return 8 if 8 in self.clients else max(self.clients)

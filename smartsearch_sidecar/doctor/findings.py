"""One line of an examination: the thing, its level, and the remedy."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Level(enum.StrEnum):
    """How good a thing is. Only an error keeps a run from being good."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


class Finding(NamedTuple):
    """``remedy`` is a command, a key or a sentence; ``None`` where nothing is to be done."""

    name: str
    level: Level
    text: str
    remedy: str | None = None


def ok(name: str, text: str) -> Finding:
    """Nothing to do."""
    return Finding(name, Level.OK, text)


def warning(name: str, text: str, remedy: str) -> Finding:
    """A run may begin; ``remedy`` says what would be better."""
    return Finding(name, Level.WARNING, text, remedy)


def error(name: str, text: str, remedy: str | None = None) -> Finding:
    """A run would not begin, or not stay good. Named errors carry their remedy in their text."""
    return Finding(name, Level.ERROR, text, remedy)

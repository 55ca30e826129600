"""Records for a person: which ones, and each in one readable line.

Apart from the command, its one user: it knows no terminal.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.describe import Tone, printable, sentence, tone
from smartsearch_sidecar.run.line import Line
from smartsearch_sidecar.run.record import KINDS

# --- which ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Filter:
    """Which records are wanted; an empty collection or ``None`` wants all.

    ``since`` is inclusive, ``until`` exclusive; both are written as records write their time.
    """

    kinds: frozenset[str] = frozenset()
    numbers: frozenset[int] = frozenset()
    since: str | None = None
    until: str | None = None

    @classmethod
    def of(
        cls,
        *,
        kinds: Collection[str] = (),
        numbers: Collection[int] = (),
        since: str | None = None,
        until: str | None = None,
    ) -> Filter:
        """Reads a person's words. Raises ``UsageError`` that says what is allowed."""
        wanted = frozenset(kind for word in kinds for kind in _kinds_of(word))
        return cls(wanted, frozenset(numbers), _moment(since), _moment(until))

    def wants(self, line: Line) -> bool:
        """Whether a record is to be shown."""
        record = line.record
        return (
            (not self.kinds or record.kind in self.kinds)
            and (not self.numbers or record.number in self.numbers)
            and (self.since is None or line.at >= self.since)
            and (self.until is None or line.at < self.until)
        )


def _kinds_of(word: str) -> list[str]:
    found = [kind for kind in KINDS if kind == word or kind.startswith(f"{word}.")]
    if not found:
        raise errors.USAGE(
            f"no kind of record is called {word!r}: use one of {', '.join(sorted(KINDS))}, or what "
            "stands before the dot"
        )
    return found


def _moment(text: str | None) -> str | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise errors.USAGE(
            f"{text!r} is no time: use a date or a time as in 2026-12-02T04:13:00Z (UTC without a "
            "zone)"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


# --- how ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shown:
    """One record as it is shown; every text in it is printable."""

    seq: int
    at: str
    kind: str
    number: int | None
    tone: Tone
    text: str


def shown(line: Line) -> Shown:
    """A record in one readable line."""
    record = line.record
    at = printable(line.at.replace("T", " ").removesuffix("Z"))
    return Shown(line.seq, at, record.kind, record.number, tone(record), sentence(line))


def json_line(line: Line) -> str:
    """A record as one line of JSON: the recorded value, in characters no terminal obeys."""
    seq, at, prev, total, record, data = line
    value = {
        "seq": seq,
        "at": at,
        "prev": prev,
        "kind": record.kind,
        "number": record.number,
        "data": data,
        "sum": total,
    }
    text = orjson.dumps(value).decode()
    return text if text.isprintable() else "".join(map(_json_escaped, text))


def _json_escaped(character: str) -> str:
    if character.isprintable():
        return character
    units = character.encode("utf-16-be").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))

"""Records for a person: which ones, and each in one readable line.

What stands in a record was written by a policy or stands in a corpus. Nothing of it reaches a
terminal as anything but letters: ``printable`` writes out control characters, the marks that turn
the direction of a line, and what has no form in UTF-8.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.queries import readable_query
from smartsearch_sidecar.ledger.record import KINDS, Kind, Line
from smartsearch_sidecar.runstate import Cause

TEXT_CHARACTERS_MAX: Final = 160
TITLE_CHARACTERS_MAX: Final = 40


def printable(text: str, limit: int = TEXT_CHARACTERS_MAX) -> str:
    """``text`` in one line of letters, cut to about ``limit`` characters."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return cut if cut.isprintable() else "".join(map(_escaped, cut))


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    code = ord(character)
    if character in "\n\r\t":
        return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}[character]
    return (
        f"\\x{code:02x}"
        if code < 0x100
        else f"\\u{code:04x}"
        if code < 0x10000
        else f"\\U{code:08x}"
    )


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
        raise errors.UsageError(
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
        raise errors.UsageError(
            f"{text!r} is no time: use a date or a time as in 2026-12-02T04:13:00Z (UTC without a "
            "zone)"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


# --- how ------------------------------------------------------------------------------------------


class Tone(enum.StrEnum):
    """What a line is about, for its colour."""

    PLAIN = enum.auto()
    GOOD = enum.auto()
    WARN = enum.auto()
    BAD = enum.auto()
    RUN = enum.auto()


@dataclass(frozen=True, slots=True)
class Shown:
    """One record as it is shown; every text in it is printable."""

    seq: int
    at: str
    kind: str
    number: int | None
    tone: Tone
    text: str


_TONES: Final[Mapping[str, Tone]] = {
    Kind.RETRIEVAL_ANSWERED: Tone.GOOD,
    Kind.RETRIEVAL_DECLINED: Tone.WARN,
    Kind.RETRIEVAL_FAILED: Tone.BAD,
    Kind.DELIVERY_LOST: Tone.BAD,
    Kind.HELPER_ANSWERED: Tone.GOOD,
    Kind.HELPER_FAILED: Tone.BAD,
    Kind.REWARD_ANSWERED: Tone.GOOD,
    Kind.REWARD_REUSED: Tone.GOOD,
    Kind.REWARD_FAILED: Tone.BAD,
    Kind.LATCH_CLOSED: Tone.BAD,
    Kind.CHECKPOINT_ACCEPTED: Tone.GOOD,
    Kind.CHECKPOINT_REFUSED: Tone.WARN,
    Kind.RUN_CLAIMED: Tone.RUN,
    Kind.RUN_RESUMED: Tone.RUN,
    Kind.RUN_CLOSED: Tone.RUN,
}


def shown(line: Line) -> Shown:
    """A record in one readable line."""
    record = line.record
    say = _SENTENCES.get(record.kind)
    try:
        text = _as_json(record.data) if say is None else say(record.data)
    except (KeyError, TypeError, ValueError):  # a record the fold takes and these words do not know
        text = _as_json(record.data)
    tone = _TONES.get(record.kind, Tone.PLAIN)
    at = printable(line.at.replace("T", " ").removesuffix("Z"))
    return Shown(line.seq, at, record.kind, record.number, tone, text)


def json_line(line: Line) -> str:
    """A record as one line of JSON: the recorded value, in characters no terminal obeys."""
    seq, at, prev, total, record = line
    value = {
        "seq": seq,
        "at": at,
        "prev": prev,
        "kind": record.kind,
        "number": record.number,
        "data": record.data,
        "sum": total,
    }
    text = orjson.dumps(value).decode()
    return text if text.isprintable() else "".join(map(_json_escaped, text))


def _json_escaped(character: str) -> str:
    if character.isprintable():
        return character
    units = character.encode("utf-16-be").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def _as_json(data: Mapping[str, Any]) -> str:
    return printable(orjson.dumps(data).decode())


def _quoted(text: str) -> str:
    return f"“{printable(text)}”"


def _requested(data: Mapping[str, Any]) -> str:
    return _quoted(readable_query(data))


def _answered(data: Mapping[str, Any]) -> str:
    documents = data["documents"]
    titles = [
        printable(str(document["contents"]).partition("\n")[0].strip('"'), TITLE_CHARACTERS_MAX)
        for document in documents
    ]
    dropped = len(data.get("dropped", ()))
    parts = [" · ".join(titles) if titles else "no passage"]
    if dropped:
        parts.append(f"{dropped} dropped")
    parts.append(f"{printable(str(data['cache']))}, {data['took_us'] / 1000:.1f} ms")
    return "  ".join(parts)


def _failed(data: Mapping[str, Any]) -> str:
    return printable(f"{data['cause']}: {data['detail']}")


def _declined(data: Mapping[str, Any]) -> str:
    return f"{printable(str(data['reason']))} {_quoted(readable_query(data))}"


def _latched(data: Mapping[str, Any]) -> str:
    cause = Cause.from_data(data)
    attempt = "" if cause.number is None else f" (search {cause.number})"
    return printable(f"{cause.cause}: {cause.detail}{attempt}")


def _claimed(data: Mapping[str, Any]) -> str:
    return f"up to {data['max_calls']:,} searches; claim {printable(str(data['claim_sha256']), 16)}"


def _resumed(data: Mapping[str, Any]) -> str:
    parts = ["after run.closed" if data["clean"] else "after an end that was not orderly"]
    if data["torn_bytes"]:
        parts.append(f"{data['torn_bytes']} torn bytes in {printable(str(data['set_aside']))}")
    if data["unsettled"]:
        parts.append(f"{len(data['unsettled'])} searches unsettled")
    return ", ".join(parts)


def _closed(data: Mapping[str, Any]) -> str:
    verdict = "latched" if data["latched"] else "healthy"
    asked, answered = data["retrieval_attempts"], data["retrieval_responses"]
    return f"{verdict}, {answered:,} of {asked:,} searches answered"


def _checkpoint(data: Mapping[str, Any]) -> str:
    place = data.get("path")
    state = data.get("state")
    text = f"step {data['step']:,}"
    if place is not None:
        text += f" {printable(str(place))}"
    return text if state is None else f"{text}: the run is {printable(str(state))}"


_SENTENCES: Final = {
    Kind.RUN_CLAIMED.value: _claimed,
    Kind.RUN_RESUMED.value: _resumed,
    Kind.RUN_CLOSED.value: _closed,
    Kind.RETRIEVAL_REQUESTED.value: _requested,
    Kind.RETRIEVAL_ANSWERED.value: _answered,
    Kind.RETRIEVAL_FAILED.value: _failed,
    Kind.RETRIEVAL_DECLINED.value: _declined,
    Kind.LATCH_CLOSED.value: _latched,
    Kind.CHECKPOINT_ACCEPTED.value: _checkpoint,
    Kind.CHECKPOINT_REFUSED.value: _checkpoint,
}

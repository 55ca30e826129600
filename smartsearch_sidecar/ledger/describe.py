"""Records for a person: which ones, and each in one readable line.

The text in a record is a policy's or a corpus's. It reaches a terminal only as letters:
``printable`` writes out control characters, the marks that turn the direction of a line, and what
has no form in UTF-8.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.contract.execute import parse_call
from smartsearch_sidecar.run import record as kinds
from smartsearch_sidecar.run.line import Line
from smartsearch_sidecar.run.record import Asked, ClientQuery, Record

TEXT_CHARACTERS_MAX: Final = 160
TITLE_CHARACTERS_MAX: Final = 40


def printable(text: str, limit: int = TEXT_CHARACTERS_MAX) -> str:
    """``text`` in one line of letters, cut to about ``limit`` characters."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return cut if cut.isprintable() else "".join(map(_escaped, cut))


def _escaped(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]


def readable_query(asked: Asked) -> str:
    """The query for a person; the call where it is unreadable, or the query has no UTF-8 form."""
    if isinstance(asked, ClientQuery) or asked.query:
        return asked.query or ""
    try:
        return parse_call(asked.call)[0]
    except errors.InvalidRequest:
        return asked.call


# --- which records --------------------------------------------------------------------------------


class Filter:
    """Which records are wanted; an empty collection or ``None`` wants all."""

    def __init__(
        self,
        *,
        kinds: Collection[str] = (),
        numbers: Collection[int] = (),
        since: str | None = None,
        until: str | None = None,
    ) -> None:
        """``since`` is inclusive, ``until`` exclusive. Raises ``UsageError``."""
        self._kinds = frozenset(kind for word in kinds for kind in _kinds_of(word))
        self._numbers = frozenset(numbers)
        self._since, self._until = _moment(since), _moment(until)

    def wants(self, line: Line) -> bool:
        record = line.record
        return (
            (not self._kinds or record.kind in self._kinds)
            and (not self._numbers or record.number in self._numbers)
            and (self._since is None or line.at >= self._since)
            and (self._until is None or line.at < self._until)
        )


def _kinds_of(word: str) -> list[str]:
    found = [kind for kind in kinds.KINDS if kind == word or kind.startswith(f"{word}.")]
    if not found:
        raise errors.USAGE(
            f"no kind of record is called {word!r}: use one of {', '.join(sorted(kinds.KINDS))}, "
            "or what stands before the dot"
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


# --- each in a line -------------------------------------------------------------------------------


class Tone(enum.StrEnum):
    """What a line is about, for its colour."""

    PLAIN = enum.auto()
    GOOD = enum.auto()
    WARN = enum.auto()
    BAD = enum.auto()
    RUN = enum.auto()


_TONES: Final[dict[type[Record], Tone]] = {
    kind: tone
    for tone, group in {
        Tone.GOOD: (
            *(kinds.RetrievalAnswered, kinds.HelperAnswered, kinds.RewardAnswered),
            *(kinds.RewardReused, kinds.CheckpointAccepted),
        ),
        Tone.WARN: (kinds.RetrievalDeclined, kinds.DeliveryRepeated, kinds.CheckpointRefused),
        Tone.BAD: (
            *(kinds.RetrievalFailed, kinds.DeliveryLost, kinds.HelperFailed),
            *(kinds.RewardFailed, kinds.LatchClosed),
        ),
        Tone.RUN: (kinds.RunClaimed, kinds.RunResumed, kinds.RunClosed),
    }.items()
    for kind in group
}


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
    """A record in one readable line; its data as JSON where its shape is not known here."""
    record = line.record
    try:
        text = _of_search(record)
    except (errors.LedgerCorrupt, *kinds.MISREAD):
        text = printable(orjson.dumps(line.data).decode())
    at = printable(line.at.replace("T", " ").removesuffix("Z"))
    tone = _TONES.get(type(record), Tone.PLAIN)
    return Shown(line.seq, at, record.kind, record.number, tone, text)


def json_line(line: Line) -> str:
    """A record as one line of JSON: the recorded value, in characters no terminal obeys."""
    value = line._asdict()
    record, data, total = value.pop("record"), value.pop("data"), value.pop("sum")
    value |= {"kind": record.kind, "number": record.number, "data": data, "sum": total}
    text = orjson.dumps(value).decode()
    return text if text.isprintable() else "".join(map(_json_escaped, text))


def _json_escaped(character: str) -> str:
    if character.isprintable():
        return character
    units = character.encode("utf-16-be").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def _of_search(record: Record) -> str:
    """What a record says of a search; the others by what follows."""
    match record:
        case kinds.RetrievalRequested(asked=asked):
            return "  ".join(_requested(asked))
        case kinds.RetrievalAnswered():
            return "  ".join(_answered(record))
        case kinds.RetrievalFailed():
            return printable(f"{record.cause}: {record.detail}")
        case kinds.RetrievalDeclined():
            return f"{printable(record.reason)} {_quoted(readable_query(record.asked))}"
        case kinds.DeliveryLost(others=others):
            more = f"; {len(others):,} more searches of its batch" if others else ""
            return printable(f"the client had gone: {record.stage}{more}")
        case kinds.DeliveryRepeated():
            return printable(f"the client of loss {record.loss} asked again")
    return _of_reward(record)


def _of_reward(record: Record) -> str:
    match record:
        case kinds.RewardRequested():
            return printable(
                f"{record.split}: a rollout of {len(record.solution_str):,} characters"
            )
        case kinds.RewardAnswered():
            verdicts = ", ".join(map(str, record.verdicts)) or "none"
            return printable(f"{record.split}: reward {record.reward}, verdicts {verdicts}")
        case kinds.RewardReused():
            return printable(f"{record.split}: the reward of score {record.of} again")
        case kinds.RewardFailed():
            return printable(f"{record.split}: {record.code}: {record.detail}")
        case kinds.HelperRequested():
            return printable(f"{record.split} score {record.score}: {record.prompt_bytes:,} bytes")
        case kinds.HelperAnswered(input_tokens=read, output_tokens=wrote):
            spent = f"{record.split} score {record.score}: {read:,} tokens read, {wrote:,} written"
            return f"{printable(spent)}  {_quoted(record.text)}"
        case kinds.HelperFailed():
            return printable(f"{record.split} score {record.score}: {record.code}: {record.detail}")
    return _of_run(record)


def _of_run(record: Record) -> str:
    match record:
        case kinds.RunClaimed():
            claim = printable(record.claim_sha256, 16)
            return f"up to {record.max_calls:,} searches; claim {claim}"
        case kinds.RunResumed():
            return ", ".join(_resumed(record))
        case kinds.RunClosed(usage=usage):
            asked, answered = usage["retrieval_attempts"], usage["retrieval_responses"]
            health = "latched" if record.latched else "healthy"
            return f"{health}, {answered:,} of {asked:,} searches answered"
        case kinds.LatchClosed(cause):
            attempt = "" if cause.number is None else f" (search {cause.number})"
            return printable(f"{cause.cause}: {cause.detail}{attempt}")
        case kinds.CheckpointAccepted(gaps=gaps, idle=idle):
            found = ["no search since the last one"] if idle else []
            found += [f"{len(gaps)} gaps since the last one"] if gaps else []
            return ", ".join([_step(record.step, record.path), *found])
        case kinds.CheckpointRefused():
            return f"{_step(record.step, record.path)}: the run is {printable(record.state)}"
    raise TypeError(f"no sentence for {record.kind}")


def _quoted(text: str) -> str:
    return f"“{printable(text)}”"


def _requested(asked: Asked) -> list[str]:
    parts = [_quoted(readable_query(asked))]
    if isinstance(asked, ClientQuery):
        parts.append(printable(f"/{asked.route}, {asked.top_n} passages"))
        if asked.items is not None:
            parts.append(f"{asked.item:,} of {asked.items:,}")
    return parts


def _answered(record: kinds.RetrievalAnswered) -> list[str]:
    titles = [
        printable(str(document["contents"]).partition("\n")[0].strip('"'), TITLE_CHARACTERS_MAX)
        for document in record.documents()
    ]
    parts = [" · ".join(titles) if titles else "no passage"]
    if record.dropped:
        parts.append(f"{len(record.dropped)} dropped" + (", all" if record.emptied else ""))
    if record.tries:
        parts.append(f"try {record.tries:,}")
    parts.append(f"{printable(record.cache)}, {record.took_us / 1000:.1f} ms")
    return parts


def _resumed(record: kinds.RunResumed) -> list[str]:
    parts = ["after run.closed" if record.clean else "after an end that was not orderly"]
    if record.gap_to is not None:
        parts.append(printable(f"not served from {record.gap_from} to {record.gap_to}"))
    if record.trainer_stopped:
        parts.append("told that the trainer stood still")
    if record.torn_bytes:
        parts.append(f"{record.torn_bytes} torn bytes in {printable(str(record.set_aside))}")
    if record.unsettled:
        parts.append(f"{len(record.unsettled)} searches unsettled")
    return parts


def _step(step: int, path: str | None) -> str:
    return f"step {step:,}" if path is None else f"step {step:,} {printable(path)}"

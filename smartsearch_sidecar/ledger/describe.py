"""What a record says, as a sentence of letters.

What stands in a record was written by a policy or stands in a corpus. Nothing of it reaches a
terminal as anything but letters: ``printable`` writes out control characters, the marks that turn
the direction of a line, and what has no form in UTF-8.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.recorded_queries import readable_query
from smartsearch_sidecar.run.line import Line
from smartsearch_sidecar.run.record import (
    CheckpointAccepted,
    CheckpointRefused,
    ClientQuery,
    DeliveryLost,
    HelperAnswered,
    HelperFailed,
    HelperRequested,
    LatchClosed,
    Record,
    RetrievalAnswered,
    RetrievalDeclined,
    RetrievalFailed,
    RetrievalRequested,
    RewardAnswered,
    RewardFailed,
    RewardRequested,
    RewardReused,
    RunClaimed,
    RunClosed,
    RunResumed,
)

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


class Tone(enum.StrEnum):
    """What a line is about, for its colour."""

    PLAIN = enum.auto()
    GOOD = enum.auto()
    WARN = enum.auto()
    BAD = enum.auto()
    RUN = enum.auto()


_TONES: Final[Mapping[type[Record], Tone]] = {
    RetrievalAnswered: Tone.GOOD,
    RetrievalDeclined: Tone.WARN,
    RetrievalFailed: Tone.BAD,
    DeliveryLost: Tone.BAD,
    HelperAnswered: Tone.GOOD,
    HelperFailed: Tone.BAD,
    RewardAnswered: Tone.GOOD,
    RewardReused: Tone.GOOD,
    RewardFailed: Tone.BAD,
    LatchClosed: Tone.BAD,
    CheckpointAccepted: Tone.GOOD,
    CheckpointRefused: Tone.WARN,
    RunClaimed: Tone.RUN,
    RunResumed: Tone.RUN,
    RunClosed: Tone.RUN,
}


def tone(record: Record) -> Tone:
    """What a record is about."""
    return _TONES.get(type(record), Tone.PLAIN)


def sentence(line: Line) -> str:
    """What a record says; its data as JSON where it has not the shape that is known here."""
    try:
        return _SENTENCES[type(line.record)](line.record)
    except (
        errors.LedgerCorrupt,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ):
        return printable(orjson.dumps(line.data).decode())


def _quoted(text: str) -> str:
    return f"“{printable(text)}”"


def _requested(record: RetrievalRequested) -> str:
    asked = record.asked
    parts = [_quoted(readable_query(asked))]
    if isinstance(asked, ClientQuery):
        parts.append(printable(f"/{asked.route}, {asked.top_n} passages"))
        if asked.items is not None:
            parts.append(f"{asked.item:,} of {asked.items:,}")
    return "  ".join(parts)


def _answered(record: RetrievalAnswered) -> str:
    titles = [
        printable(str(document["contents"]).partition("\n")[0].strip('"'), TITLE_CHARACTERS_MAX)
        for document in record.documents()
    ]
    parts = [" · ".join(titles) if titles else "no passage"]
    if record.dropped:
        parts.append(f"{len(record.dropped)} dropped")
    parts.append(f"{printable(record.cache)}, {record.took_us / 1000:.1f} ms")
    return "  ".join(parts)


def _failed(record: RetrievalFailed) -> str:
    return printable(f"{record.cause}: {record.detail}")


def _declined(record: RetrievalDeclined) -> str:
    return f"{printable(record.reason)} {_quoted(readable_query(record.asked))}"


def _latched(record: LatchClosed) -> str:
    cause = record.cause
    attempt = "" if cause.number is None else f" (search {cause.number})"
    return printable(f"{cause.cause}: {cause.detail}{attempt}")


def _claimed(record: RunClaimed) -> str:
    return f"up to {record.max_calls:,} searches; claim {printable(record.claim_sha256, 16)}"


def _resumed(record: RunResumed) -> str:
    parts = ["after run.closed" if record.clean else "after an end that was not orderly"]
    if record.torn_bytes:
        parts.append(f"{record.torn_bytes} torn bytes in {printable(str(record.set_aside))}")
    if record.unsettled:
        parts.append(f"{len(record.unsettled)} searches unsettled")
    return ", ".join(parts)


def _closed(record: RunClosed) -> str:
    verdict = "latched" if record.latched else "healthy"
    asked, answered = record.usage["retrieval_attempts"], record.usage["retrieval_responses"]
    return f"{verdict}, {answered:,} of {asked:,} searches answered"


def _accepted(record: CheckpointAccepted) -> str:
    return _step(record.step, record.path)


def _refused(record: CheckpointRefused) -> str:
    return f"{_step(record.step, record.path)}: the run is {printable(record.state)}"


def _step(step: int, path: str | None) -> str:
    return f"step {step:,}" if path is None else f"step {step:,} {printable(path)}"


def _lost(record: DeliveryLost) -> str:
    more = f"; {len(record.others):,} more searches of its batch" if record.others else ""
    return printable(f"the client had gone: {record.stage}{more}")


def _score_requested(record: RewardRequested) -> str:
    return printable(f"{record.split}: a rollout of {len(record.solution_str):,} characters")


def _score_answered(record: RewardAnswered) -> str:
    verdicts = ", ".join(map(str, record.verdicts))
    return printable(f"{record.split}: reward {record.reward}, verdicts {verdicts or 'none'}")


def _score_reused(record: RewardReused) -> str:
    return printable(f"{record.split}: the reward of score {record.of} again")


def _score_failed(record: RewardFailed) -> str:
    return printable(f"{record.split}: {record.code}: {record.detail}")


def _call_requested(record: HelperRequested) -> str:
    return printable(f"{record.split} score {record.score}: {record.prompt_bytes:,} bytes")


def _call_answered(record: HelperAnswered) -> str:
    read, wrote = record.input_tokens, record.output_tokens
    spent = f"{record.split} score {record.score}: {read:,} tokens read, {wrote:,} written"
    return f"{printable(spent)}  {_quoted(record.text)}"


def _call_failed(record: HelperFailed) -> str:
    return printable(f"{record.split} score {record.score}: {record.code}: {record.detail}")


_SENTENCES: Final[Mapping[type[Record], Callable[[Any], str]]] = {
    RunClaimed: _claimed,
    RunResumed: _resumed,
    RunClosed: _closed,
    RetrievalRequested: _requested,
    RetrievalAnswered: _answered,
    RetrievalFailed: _failed,
    RetrievalDeclined: _declined,
    DeliveryLost: _lost,
    RewardRequested: _score_requested,
    RewardAnswered: _score_answered,
    RewardReused: _score_reused,
    RewardFailed: _score_failed,
    HelperRequested: _call_requested,
    HelperAnswered: _call_answered,
    HelperFailed: _call_failed,
    LatchClosed: _latched,
    CheckpointAccepted: _accepted,
    CheckpointRefused: _refused,
}

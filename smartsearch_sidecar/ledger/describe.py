"""What a record says, as a sentence of letters.

What stands in a record was written by a policy or stands in a corpus. Nothing of it reaches a
terminal as anything but letters: ``printable`` writes out control characters, the marks that turn
the direction of a line, and what has no form in UTF-8.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final

import orjson

from smartsearch_sidecar.ledger.recorded_queries import readable_query
from smartsearch_sidecar.run.record import Kind, Record
from smartsearch_sidecar.run.state import Cause

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


def tone(record: Record) -> Tone:
    """What a record is about."""
    return _TONES.get(record.kind, Tone.PLAIN)


def sentence(record: Record) -> str:
    """What a record says; the data itself where it has none of the shape that is known here."""
    say = _SENTENCES.get(record.kind, _as_json)
    try:
        return say(record.data)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return _as_json(record.data)


def _as_json(data: Mapping[str, Any]) -> str:
    return printable(orjson.dumps(data).decode())


def _quoted(text: str) -> str:
    return f"“{printable(text)}”"


def _requested(data: Mapping[str, Any]) -> str:
    parts = [_quoted(readable_query(data))]
    if "route" in data:  # another trainer's client
        parts.append(printable(f"/{data['route']}, {data['top_n']} passages"))
    if "items" in data:
        parts.append(f"{data['item']:,} of {data['items']:,}")
    return "  ".join(parts)


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


def _lost(data: Mapping[str, Any]) -> str:
    others = len(data.get("others", ()))
    more = f"; {others:,} more searches of its batch" if others else ""
    return printable(f"the client had gone: {data['stage']}{more}")


def _score_requested(data: Mapping[str, Any]) -> str:
    return printable(f"{data['split']}: a rollout of {len(data['solution_str']):,} characters")


def _score_answered(data: Mapping[str, Any]) -> str:
    verdicts = ", ".join(map(str, data["verdicts"]))
    return printable(f"{data['split']}: reward {data['reward']}, verdicts {verdicts or 'none'}")


def _score_reused(data: Mapping[str, Any]) -> str:
    return printable(f"{data['split']}: the reward of score {data['of']} again")


def _score_failed(data: Mapping[str, Any]) -> str:
    return printable(f"{data['split']}: {data['code']}: {data['detail']}")


def _call_requested(data: Mapping[str, Any]) -> str:
    return printable(f"{data['split']} score {data['score']}: {data['prompt_bytes']:,} bytes")


def _call_answered(data: Mapping[str, Any]) -> str:
    read, wrote = data["input_tokens"], data["output_tokens"]
    told = f"{data['split']} score {data['score']}: {read:,} tokens read, {wrote:,} written"
    return f"{printable(told)}  {_quoted(data['text'])}"


def _call_failed(data: Mapping[str, Any]) -> str:
    where = f"{data['split']} score {data['score']}"
    return printable(f"{where}: {data['code']}: {data['detail']}")


_SENTENCES: Final = {
    Kind.RUN_CLAIMED.value: _claimed,
    Kind.RUN_RESUMED.value: _resumed,
    Kind.RUN_CLOSED.value: _closed,
    Kind.RETRIEVAL_REQUESTED.value: _requested,
    Kind.RETRIEVAL_ANSWERED.value: _answered,
    Kind.RETRIEVAL_FAILED.value: _failed,
    Kind.RETRIEVAL_DECLINED.value: _declined,
    Kind.DELIVERY_LOST.value: _lost,
    Kind.REWARD_REQUESTED.value: _score_requested,
    Kind.REWARD_ANSWERED.value: _score_answered,
    Kind.REWARD_REUSED.value: _score_reused,
    Kind.REWARD_FAILED.value: _score_failed,
    Kind.HELPER_REQUESTED.value: _call_requested,
    Kind.HELPER_ANSWERED.value: _call_answered,
    Kind.HELPER_FAILED.value: _call_failed,
    Kind.LATCH_CLOSED.value: _latched,
    Kind.CHECKPOINT_ACCEPTED.value: _checkpoint,
    Kind.CHECKPOINT_REFUSED.value: _checkpoint,
}

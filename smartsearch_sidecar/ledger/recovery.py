"""What is done with a run found on the disk: one table from facts to accept, trim or refuse.

Theory. A process can die between any two bytes it writes, and a machine can forget what was not
synced. Neither can do more than shorten the journal's end, because records are appended by one
writer, an answer waits for the sync that covers it, and a new segment begins only after the old one
is on the medium. So:

- *clean*: every line is whole. Nothing is touched; a last line that lacks only its newline gets it.
- *torn*: the last segment ends in bytes without a valid sum, or in NUL bytes. No answer was given
  from them. They are copied aside and trimmed.
- *corrupt*: anything else. No crash leaves it, so nothing is touched and nothing is served.

The latch is in two places, so that losing one cannot open it: a ``latch.closed`` record, and then
``latch.json``, written once the record is on the medium. A ``latch.json`` that names a record the
journal lacks therefore shows that the journal's end was cut off. One that names no record was left
by a ledger that could take none, or was itself cut short: the run has failed all the same.

A second table says whether the restart itself closes the latch. Nothing here opens a file.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import orjson

from smartsearch_sidecar.ledger.history import History, Tail
from smartsearch_sidecar.run.json_values import differences, flat

# --- the facts ------------------------------------------------------------------------------------


class Body(enum.StrEnum):
    """The lines before the last piece of the journal, and the last one where it is whole."""

    EMPTY = enum.auto()
    SOUND = enum.auto()
    BROKEN = enum.auto()


class LatchFile(enum.StrEnum):
    """``latch.json`` beside the journal's ``latch.closed`` record."""

    ABSENT = enum.auto()
    NAMES_NONE = enum.auto()
    AGREES = enum.auto()
    DISAGREES = enum.auto()


@dataclass(frozen=True, slots=True)
class Facts:
    """What was observed. ``served`` is an ``endpoints.json`` that no end has removed: it is written
    after the first record is on the medium.
    """

    body: Body
    tail: Tail
    latch_file: LatchFile
    latch_record: bool
    served: bool


# --- the table ------------------------------------------------------------------------------------


class Action(enum.StrEnum):
    """What is to be done with the directory."""

    ACCEPT = enum.auto()
    TRIM = enum.auto()
    REFUSE = enum.auto()


class Ending(enum.StrEnum):
    """The three endings."""

    CLEAN = enum.auto()
    TORN = enum.auto()
    CORRUPT = enum.auto()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the facts come to.

    ``closed`` says that the latch is closed already; ``write_latch`` that ``latch.json`` has to be
    written from the record; ``reason`` is why a directory is refused.
    """

    action: Action
    ending: Ending
    closed: bool
    write_latch: bool
    reason: str | None


@dataclass(frozen=True, slots=True)
class _Row:
    """Facts that match (``None``: any), and what they come to."""

    action: Action
    ending: Ending
    reason: str | None = None
    body: Body | None = None
    tail: Tail | None = None
    latch_file: LatchFile | None = None
    served: bool | None = None

    def matches(self, facts: Facts) -> bool:
        return (
            self.body in (None, facts.body)
            and self.tail in (None, facts.tail)
            and self.latch_file in (None, facts.latch_file)
            and self.served in (None, facts.served)
        )


# Read from the top; the first row that matches decides, and the last one matches everything.
_ROWS: Final = (
    _Row(Action.REFUSE, Ending.CORRUPT, "the journal is damaged", body=Body.BROKEN),
    _Row(
        Action.REFUSE,
        Ending.CORRUPT,
        "latch.json says what no record of the journal says: the journal's end is missing, or one "
        "of the two was changed",
        latch_file=LatchFile.DISAGREES,
    ),
    _Row(
        Action.REFUSE,
        Ending.CORRUPT,
        "the run was served (endpoints.json), and its journal holds no record",
        body=Body.EMPTY,
        served=True,
    ),
    _Row(Action.TRIM, Ending.TORN, tail=Tail.TORN),
    _Row(Action.ACCEPT, Ending.CLEAN),
)


def judge(facts: Facts) -> Verdict:
    """The one table: what these facts come to."""
    row = next(row for row in _ROWS if row.matches(facts))
    refused = row.action is Action.REFUSE
    return Verdict(
        action=row.action,
        ending=row.ending,
        closed=facts.latch_record or facts.latch_file is not LatchFile.ABSENT,
        write_latch=not refused and facts.latch_record and facts.latch_file is LatchFile.ABSENT,
        reason=row.reason,
    )


def observe_latch(raw: bytes | None, history: History) -> LatchFile:
    """Holds the bytes of ``latch.json`` against the journal."""
    if raw is None:
        return LatchFile.ABSENT
    value = read_latch(raw)
    if "seq" not in value and "sum" not in value:
        return LatchFile.NAMES_NONE
    line = history.latch
    if line is None or (value.get("seq"), value.get("sum")) != (line.seq, line.sum):
        return LatchFile.DISAGREES
    said = line.data
    same = all(value.get(key) == said.get(key) for key in ("cause", "number", "attempt_consumed"))
    return LatchFile.AGREES if same else LatchFile.DISAGREES


def read_latch(raw: bytes) -> Mapping[str, Any]:
    """``latch.json`` as a mapping; empty where the file was cut short while it was written."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return {}
    return value if type(value) is dict else {}


# --- what the restart itself means ----------------------------------------------------------------

OnUnclean = Literal["latch", "report"]

UNRESOLVED: Final = "unresolved_after_restart"
UNCLEAN: Final = "unclean_restart"


def restart_cause(
    *, begun: bool, closed: bool, settled: bool, clean: bool, on_unclean: OnUnclean
) -> str | None:
    """The latch cause of a restart, or ``None`` where the run goes on.

    ``begun`` is whether anything was recorded; ``closed`` whether the latch is closed already;
    ``settled`` whether everything admitted was settled; ``clean`` whether ``run.closed`` is the
    last record. While a process is down, calls that waited or are refused become rollout text, and
    only the reward's provenance can see that: hence ``on_unclean``.
    """
    if not begun or closed:
        return None
    if not settled:
        return UNRESOLVED
    return UNCLEAN if not clean and on_unclean == "latch" else None


# --- the same claim -------------------------------------------------------------------------------

# What differs from one start to the next without making another run of it.
_MAY_DIFFER: Final = frozenset(
    {
        "run_id",
        "created_at",
        "versions",
        "config_sha256",
        "config.run.directory",
        "config.server.port",
    }
)


def compare_claims(old: bytes | Mapping[str, Any], new: bytes | Mapping[str, Any]) -> list[str]:
    """What keeps a configuration from continuing a run, each ``key: old -> new``; empty if nothing.

    Both are claims as ``claim.json`` holds them. Name, time, versions, directory and port of a run
    may differ; the configuration's digest is compared where no single key tells the difference.
    """
    was, now = _claim_values(old), _claim_values(new)
    if was is None:
        return ["claim.json: it is not readable as a claim"]
    if now is None:
        return ["the new claim: it is not readable as a claim"]
    was_compared, now_compared = _compared(was), _compared(now)
    before, after = flat(was_compared), flat(now_compared)
    differing = [
        f"{name.removeprefix('config.')}: {_shown(before, name)} -> {_shown(after, name)}"
        for name in differences(was_compared, now_compared)
    ]
    if not differing and was.get("config_sha256") != now.get("config_sha256"):
        return ["config_sha256: the configuration differs in a key that the claim does not show"]
    return list(dict.fromkeys(differing))


def _compared(claim: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """A claim without what may differ."""
    return {
        key: _compared(item, f"{before}{key}.") if isinstance(item, Mapping) else item
        for key, item in claim.items()
        if f"{before}{key}" not in _MAY_DIFFER
    }


def _claim_values(claim: bytes | Mapping[str, Any]) -> Mapping[str, Any] | None:
    if not isinstance(claim, bytes):
        return claim
    try:
        value = orjson.loads(claim)
    except orjson.JSONDecodeError:
        return None
    return value if type(value) is dict else None


def _shown(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return "absent"
    text = orjson.dumps(values[name]).decode()
    return text if len(text) <= 80 else f"{text[:77]}..."


def numbers(found: Collection[int], limit: int = 20) -> str:
    """``1, 2 and 5 more``: numbers for a sentence."""
    shown = sorted(found)[:limit]
    rest = len(found) - len(shown)
    return ", ".join(map(str, shown)) + (f" and {rest} more" if rest else "")

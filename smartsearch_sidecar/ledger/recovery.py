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

A second table says whether the restart itself closes the latch. The tables are without I/O;
``reopen`` gathers the facts and does what they come to. Every step of it may be the last one of
this process, so each is durable before the next begins, and begins by looking at what is there:
copy the torn tail aside, trim, end the last line, write ``latch.json``.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.file import CLAIM, LATCH, RunFiles
from smartsearch_sidecar.ledger.reader import History, Progress, RunReader, Scan, Tail
from smartsearch_sidecar.ledger.receipt import CheckpointReceipt, ReceiptCheck
from smartsearch_sidecar.ledger.writer import latch_file, wall_clock
from smartsearch_sidecar.run.json_values import differences, flat, same
from smartsearch_sidecar.run.record import Cause, LatchClosed, RunClosed, RunResumed
from smartsearch_sidecar.run.state import RunState


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
    """What was observed. ``begun``: there is an ``endpoints.json`` that no end has removed, or the
    room for the latch. Both are written after the first record is on the medium.
    """

    body: Body
    tail: Tail
    latch_file: LatchFile
    latch_record: bool
    begun: bool


# --- the table ------------------------------------------------------------------------------------


class Ending(enum.StrEnum):
    """The three endings: the directory is accepted, trimmed, or refused."""

    CLEAN = enum.auto()
    TORN = enum.auto()
    CORRUPT = enum.auto()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the facts come to.

    ``closed`` says that the latch is closed already; ``write_latch`` that ``latch.json`` has to be
    written from the record; ``reason`` is why a directory is refused.
    """

    ending: Ending
    closed: bool
    write_latch: bool
    reason: str | None


def judge(facts: Facts) -> Verdict:
    """The one table: what these facts come to. The first row that matches decides."""
    ending, reason = Ending.CORRUPT, None
    match facts:
        case Facts(body=Body.BROKEN):
            reason = "the journal is damaged"
        case Facts(latch_file=LatchFile.DISAGREES):
            reason = (
                "latch.json says what no record of the journal says: the journal's end is missing, "
                "or one of the two was changed"
            )
        case Facts(body=Body.EMPTY, begun=True):
            reason = "the run had begun, and its journal holds no record: its history is lost"
        case Facts(tail=Tail.TORN):
            ending = Ending.TORN
        case _:
            ending = Ending.CLEAN
    closed = facts.latch_record or facts.latch_file is not LatchFile.ABSENT
    missing = facts.latch_record and facts.latch_file is LatchFile.ABSENT
    return Verdict(ending, closed, missing and ending is not Ending.CORRUPT, reason)


def _observe_latch(raw: bytes | None, history: History) -> LatchFile:
    """Holds the bytes of ``latch.json`` against the journal."""
    if raw is None:
        return LatchFile.ABSENT
    value = read_object(raw)
    if "seq" not in value and "sum" not in value:
        return LatchFile.NAMES_NONE
    line = history.latch
    if line is None or not isinstance(line.record, LatchClosed):
        return LatchFile.DISAGREES
    wanted = latch_file(seq=line.seq, at=line.at, total=line.sum, cause=line.record.cause)
    found = {key: value[key] for key in read_object(wanted) if key in value}
    return LatchFile.AGREES if same(found, read_object(wanted)) else LatchFile.DISAGREES


def read_object(raw: bytes) -> dict[str, Any]:
    """A JSON object; empty where the file was cut short while it was written."""
    with contextlib.suppress(orjson.JSONDecodeError):
        value = orjson.loads(raw)
        if type(value) is dict:
            return value
    return {}


# --- what the restart itself means ----------------------------------------------------------------

OnUnclean = Literal["latch", "report"]

UNRESOLVED: Final = "unresolved_after_restart"
UNCLEAN: Final = "unclean_restart"
UNJUDGED: Final = "unjudged_restart"


def restart_cause(
    *,
    begun: bool,
    closed: bool,
    settled: bool,
    clean: bool,
    on_unclean: OnUnclean,
    heard: bool,
    judged: bool,
    trainer_stopped: bool,
) -> str | None:
    """The latch cause of a restart, or ``None`` where the run goes on.

    ``begun`` is whether anything was recorded; ``closed`` whether the latch is closed already;
    ``settled`` whether everything admitted was settled; ``clean`` whether ``run.closed`` is the
    last record; ``heard`` whether a rollout, a trainer or its gate had asked this run anything.

    While a process is down, calls that waited or are refused become rollout text. Only the reward's
    provenance can see that (``judged``), or the operator knows that no trainer was at work
    (``trainer_stopped``). That word excuses an orderly stop alone: the moment of a crash was not
    chosen, and a trainer that was stopped after it had met it. A run that was never asked is as one
    that has not begun: its trainer's gate has let nothing begin.
    """
    if not begun or closed:
        return None
    if not settled:
        return UNRESOLVED
    if not clean:
        return UNCLEAN if on_unclean == "latch" else None
    return UNJUDGED if heard and not judged and not trainer_stopped else None


# --- the same claim -------------------------------------------------------------------------------

# What differs from one start to the next without making another run of it. The run before is
# described once, by the start that claims: `config.run.previous` is compared, and names it.
_MAY_DIFFER: Final = frozenset(
    {
        *("run_id", "created_at", "versions", "config_sha256", "previous"),
        *("config.run.directory", "config.server.port"),
    }
)


def compare_claims(old: bytes, new: bytes) -> list[str]:
    """What keeps a configuration from continuing a run, each ``key: old -> new``; empty if nothing.

    Name, time, versions, directory and port of a run may differ; the configuration's digest is
    compared where no single key tells the difference.
    """
    was, now = read_object(old), read_object(new)
    if not was:
        return ["claim.json: it is not readable as a claim"]
    if not now:
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


@dataclass(frozen=True, slots=True)
class Reopened:
    """A run as it was found, its files open for the writer.

    ``seq`` and ``head`` are the last record's, or 0 and the claim's digest before the first record;
    then ``claim`` may be empty: it was never written, or was cut short and removed. ``clean`` says
    that ``run.closed`` is the last record; ``unsettled`` are searches without settlement.
    ``latch_missing`` says that ``latch.json`` had to be written; ``latched`` is the cause that it
    named while the journal named no cause. ``torn_bytes`` were trimmed, and are in ``set_aside``.
    ``deaf_from`` is when the process before this one took no connection any more, or wrote last;
    ``trainer_stopped`` is ``serve --trainer-stopped``.
    """

    state: RunState
    seq: int
    head: str
    claim: bytes
    ending: Ending
    torn_bytes: int
    set_aside: Path | None
    latch_missing: bool
    latched: Cause | None
    clean: bool
    unsettled: tuple[int, ...]
    deaf_from: str | None
    trainer_stopped: bool

    @property
    def begun(self) -> bool:
        """Whether anything was recorded: otherwise the run begins now, with ``run.claimed``."""
        return self.seq > 0

    def resumed(self) -> RunResumed:
        """The record of going on, now."""
        aside = None if self.set_aside is None else self.set_aside.name
        found = (self.clean, self.ending.value, self.torn_bytes, aside, self.unsettled)
        return RunResumed(*found, self.deaf_from, wall_clock(), self.trainer_stopped)

    def cause(self, on_unclean: OnUnclean, *, judged: bool) -> Cause | None:
        """Why the restart closes the latch, ``None`` where it does not, or it is closed already."""
        if self.state.closed or self.latched is not None:
            return self.latched
        cause = restart_cause(
            begun=self.begun,
            closed=False,
            settled=self.state.settled,
            clean=self.clean,
            on_unclean=on_unclean,
            heard=self.state.coverage.heard,
            judged=judged,
            trainer_stopped=self.trainer_stopped,
        )
        if cause is None:
            return None
        detail = "the process ended without run.closed: what was asked meanwhile is unknown"
        if cause == UNRESOLVED:
            detail = "lost answers had not been asked for again when the process ended"
            if self.unsettled or not self.state.scores.settled:
                searches = f"searches {numbers(self.unsettled)}" if self.unsettled else ""
                what = searches or "scores or calls"
                detail = f"{what} were admitted and not settled when the process ended"
        if cause == UNJUDGED:
            detail = (
                f"no process served the run since {self.deaf_from}; the resume was not told that "
                "the trainer stood still meanwhile (--trainer-stopped), and no enforced provenance "
                "finds the rollouts that were refused"
            )
        return Cause(cause, None, False, detail)


def reopen(
    files: RunFiles,
    *,
    receipt: CheckpointReceipt | None = None,
    trainer_stopped: bool = False,
    progress: Progress | None = None,
) -> Reopened:
    """Reads a locked run directory (``RunFiles.resume``) and makes it ready for the writer.

    ``receipt`` has to be of the history that is found. Blocking; constant memory. Raises
    ``LedgerCorrupt`` where the directory holds no sound history, or not the receipt's, with nothing
    touched, and ``RunDirectoryError`` where it cannot be read.
    """
    reader = RunReader(files.directory)
    claim = reader.read(CLAIM)
    history = History(claim)
    scan = Scan(reader, history, progress=progress)
    held = None if receipt is None else ReceiptCheck(receipt, history)
    for each in scan:
        if held is not None:
            held.see(each)
    latch = reader.latch()
    verdict = judge(observe(scan, latch, begun=reader.begun()))
    if verdict.ending is Ending.CORRUPT:
        why = scan.problem if scan.problem is not None else verdict.reason
        raise errors.LEDGER_CORRUPT(
            f"{files.directory} cannot be resumed, and was left as it is: {why}; look with `ledger "
            "verify`, and begin a new run directory"
        )
    if held is not None and (problem := held.problem()) is not None:
        raise errors.LEDGER_CORRUPT(
            f"{files.directory} is not resumed, and was left as it is: {problem}; put back the "
            "directory that the trainer's last receipt is of, or begin a new one"
        )
    torn, aside = _mend(files, scan)
    line = history.latch
    if verdict.write_latch and line is not None and isinstance(line.record, LatchClosed):
        cause = line.record.cause
        files.create_only(LATCH, latch_file(seq=line.seq, at=line.at, total=line.sum, cause=cause))
    # A claim that a record chains to is whole; before that, its JSON has to show it.
    if claim is not None and not history.seq and not read_object(claim):
        files.remove(CLAIM)
        claim = None
    state = history.state
    return Reopened(
        state=state,
        seq=history.seq,
        head=history.head,
        claim=claim or b"",
        ending=verdict.ending,
        torn_bytes=torn,
        set_aside=aside,
        latch_missing=verdict.write_latch,
        latched=None if latch is None or state.closed else unrecorded(latch),
        clean=state.closed_cleanly,
        unsettled=tuple(sorted(state.searching)),
        deaf_from=_deaf_from(history),
        trainer_stopped=trainer_stopped,
    )


def _deaf_from(history: History) -> str | None:
    """Since when a call may have been refused: an unclean end was not before the last record."""
    line = history.last
    if line is None:
        return None
    stated = line.record.deaf_from if isinstance(line.record, RunClosed) else None
    return line.at if stated is None else stated


def require_same_claim(directory: Path, old: bytes, new: bytes) -> None:
    """Raises ``RunDirectoryError`` that names what keeps ``new`` from continuing the run."""
    differing = compare_claims(old, new)
    if differing:
        raise errors.RUN_DIRECTORY(
            f"{directory} was claimed with another configuration ({'; '.join(differing)}): "
            "resume it with that one, or begin a new run directory"
        )


def observe(scan: Scan, latch: bytes | None, *, begun: bool) -> Facts:
    """The facts of a journal that was read to its end, or to its first problem."""
    history = scan.history
    if scan.problem is not None or scan.end is None:
        body, tail = Body.BROKEN, Tail.CLEAN
    else:
        body, tail = Body.SOUND if history.seq else Body.EMPTY, scan.end.tail
    return Facts(body, tail, _observe_latch(latch, history), history.latch is not None, begun)


def _mend(files: RunFiles, scan: Scan) -> tuple[int, Path | None]:
    """Opens the last segment for appending, its torn tail trimmed; bytes trimmed and where kept."""
    end = scan.end
    if end is None:
        raise errors.INTERNAL_ERROR("a journal that was not read to its end was accepted")
    if not scan.segments:
        return 0, None
    segment, place = scan.segments[-1], scan.place
    keep, aside = segment.size, None
    if scan.torn_bytes:
        keep = place.offset + end.keep
        aside = files.set_aside(segment.index, keep, scan.tail[end.keep :])
    files.continue_segment(segment.index, segment.size, keep=keep, newline=end.newline)
    return segment.size - keep, aside


def unrecorded(latch: bytes) -> Cause:
    """The cause of a ``latch.json`` whose record never reached the journal."""
    value = read_object(latch)
    if "cause" in value:
        return Cause.from_data(value)
    detail = "latch.json is there and cut short: the ledger failed while the cause was written"
    return Cause("ledger_failed", None, False, detail)

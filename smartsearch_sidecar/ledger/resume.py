"""A run that was, made ready to go on: facts from the disk, the table's verdict, and what it asks.

Every step may be the last one of this process. Each is durable before the next begins, and begins
by looking at what is there: copy the torn tail aside, trim, end the last line, write
``latch.json``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.disk import CLAIM, LATCH
from smartsearch_sidecar.ledger.file import RunFiles
from smartsearch_sidecar.ledger.history import History, Tail
from smartsearch_sidecar.ledger.reader import Progress, RunReader, Scan
from smartsearch_sidecar.ledger.recovery import (
    UNRESOLVED,
    Action,
    Body,
    Ending,
    Facts,
    OnUnclean,
    Verdict,
    compare_claims,
    judge,
    numbers,
    observe_latch,
    read_latch,
    restart_cause,
)
from smartsearch_sidecar.ledger.writer import latch_file
from smartsearch_sidecar.run.record import Cause, LatchClosed, RunResumed
from smartsearch_sidecar.run.state import RunState


@dataclass(frozen=True, slots=True)
class Reopened:
    """A run as it was found, its files open for the writer.

    ``seq`` and ``head`` are the last record's, or 0 and the claim's digest where nothing was ever
    recorded; then ``claim`` may be empty: none was written, or one cut short, which was removed.
    ``clean`` says that ``run.closed`` is the last record; ``unsettled`` are searches without
    settlement. ``latch_missing`` says that ``latch.json`` had to be written; ``latched`` is the
    cause that it named while the journal named none. ``torn_bytes`` were trimmed, and are in
    ``set_aside``.
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

    @property
    def begun(self) -> bool:
        """Whether anything was recorded: otherwise the run begins now, with ``run.claimed``."""
        return self.seq > 0

    def resumed(self) -> RunResumed:
        """What the journal says of the restart."""
        return RunResumed(
            clean=self.clean,
            ending=self.ending.value,
            torn_bytes=self.torn_bytes,
            set_aside=None if self.set_aside is None else self.set_aside.name,
            unsettled=self.unsettled,
        )

    def cause(self, on_unclean: OnUnclean) -> Cause | None:
        """Why the latch is to be closed first of all, if it is to be and is not already."""
        if self.state.closed or self.latched is not None:
            return self.latched
        cause = restart_cause(
            begun=self.begun,
            closed=False,
            settled=self.state.settled,
            clean=self.clean,
            on_unclean=on_unclean,
        )
        if cause is None:
            return None
        if cause == UNRESOLVED:
            what = f"searches {numbers(self.unsettled)}" if self.unsettled else "scores or calls"
            detail = f"{what} were admitted and not settled when the process ended"
        else:
            detail = "the process ended without run.closed: what was asked meanwhile is unknown"
        return Cause(cause, None, False, detail)


def reopen(files: RunFiles, *, progress: Progress | None = None) -> Reopened:
    """Reads a locked run directory (``RunFiles.resume``) and makes it ready for the writer.

    Blocking; constant memory. Raises ``LedgerCorrupt`` where it is no history of ours, with nothing
    touched, and ``RunDirectoryError`` where it cannot be read.
    """
    reader = RunReader(files.directory)
    claim = reader.read(CLAIM)
    history = History(claim)
    scan = Scan(reader, history, progress=progress)
    scan.drain()
    latch = reader.read(LATCH)
    verdict = judge(observe(scan, latch, served=reader.served()))
    if verdict.action is Action.REFUSE:
        raise errors.LEDGER_CORRUPT(_refusal(files.directory, scan, verdict))
    torn, aside = _mend(files, scan)
    line = history.latch
    if verdict.write_latch and line is not None and isinstance(line.record, LatchClosed):
        cause = line.record.cause
        files.create_only(LATCH, latch_file(seq=line.seq, at=line.at, total=line.sum, cause=cause))
    if claim is not None and not _is_whole(claim, history):
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
        latched=None if latch is None or state.closed else _unrecorded(latch),
        clean=state.closed_cleanly,
        unsettled=tuple(sorted(state.searching)),
    )


def require_same_claim(directory: Path, old: bytes, new: bytes) -> None:
    """Raises ``RunDirectoryError`` that names what keeps ``new`` from continuing the run."""
    differing = compare_claims(old, new)
    if differing:
        raise errors.RUN_DIRECTORY(
            f"{directory} was claimed with another configuration ({'; '.join(differing)}): "
            "resume it with that one, or begin a new run directory"
        )


def observe(scan: Scan, latch: bytes | None, *, served: bool) -> Facts:
    """The facts of a journal that was read to its end, or to its first problem."""
    if scan.problem is not None or scan.end is None:
        body, tail = Body.BROKEN, Tail.CLEAN
    else:
        body = Body.SOUND if scan.history.seq else Body.EMPTY
        tail = scan.end.tail
    return Facts(
        body=body,
        tail=tail,
        latch_file=observe_latch(latch, scan.history),
        latch_record=scan.history.latch is not None,
        served=served,
    )


def _mend(files: RunFiles, scan: Scan) -> tuple[int, Path | None]:
    """Opens the last segment for appending, its torn tail trimmed; bytes trimmed and where kept."""
    end = scan.end
    if end is None:
        raise errors.INTERNAL_ERROR("a journal that was not read to its end was accepted")
    if not scan.segments:
        return 0, None
    segment, place = scan.segments[-1], scan.place
    keep, aside = segment.size, None
    if end.tail is Tail.TORN:
        keep = place.offset + end.keep
        aside = files.set_aside(segment.index, keep, scan.tail[end.keep :])
    files.continue_segment(segment.index, segment.size, keep=keep, newline=end.newline)
    return segment.size - keep, aside


def _refusal(directory: Path, scan: Scan, verdict: Verdict) -> str:
    why = scan.problem if scan.problem is not None else verdict.reason
    return (
        f"{directory} cannot be resumed, and was left as it is: {why}; look with `ledger verify`, "
        "and begin a new run directory"
    )


def _is_whole(claim: bytes, history: History) -> bool:
    """A claim that a record chains to is whole; before that, its JSON has to show it."""
    return history.seq > 0 or bool(read_latch(claim))


def _unrecorded(latch: bytes) -> Cause:
    """The cause of a ``latch.json`` whose record never reached the journal."""
    value = read_latch(latch)
    if "cause" in value:
        return Cause.from_data(value)
    detail = "latch.json is there and cut short: the ledger failed while the cause was written"
    return Cause("ledger_failed", None, False, detail)

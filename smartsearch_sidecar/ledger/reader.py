"""A run read: its files, and the history that its journal tells. Nothing here changes a file.

``RunReader`` is the only way to a run's files beside ``file.py``: names and bytes. ``History`` has
the rules of reading, without I/O: all code that reads a whole journal goes through it, so what one
caller refuses the others refuse too. ``Scan`` feeds a whole journal to a ``History`` and stops at
its end or its first problem. It reads what was there when the reading began: a live run may go on
writing behind it.

A record follows another when its ``seq`` is the next and its ``prev`` the other's ``sum``. The
first one is ``run.claimed``, and its ``prev`` is the digest of ``claim.json``. A record that the
fold refuses ends the history too.
"""

from __future__ import annotations

import contextlib
import enum
import os
import stat
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.file import (
    CLAIM,
    ENDPOINTS,
    JOURNAL,
    LATCH,
    LOCK,
    ROOM,
    is_locked,
    segment_index,
    segment_name,
)
from smartsearch_sidecar.run.line import (
    FORMAT,
    Line,
    begins_with_record,
    claim_digest,
    decode_line,
    line_sum,
    newer_format,
)
from smartsearch_sidecar.run.record import LatchClosed, RunClaimed
from smartsearch_sidecar.run.state import RunState

LINE_BYTES_MAX = 256 * 1024 * 1024
"""Bytes of one line: five documents of 8 Mi characters, escaped and in UTF-8, still fit."""


class Tail(enum.StrEnum):
    """How the last segment ends."""

    CLEAN = enum.auto()
    UNTERMINATED = enum.auto()
    TORN = enum.auto()


@dataclass(frozen=True, slots=True)
class End:
    """What is to be done with the last piece of a journal, in bytes of that piece.

    ``keep`` bytes are a record (or nothing); no answer was given from the rest. ``newline`` says
    that the record lacks its newline.
    """

    tail: Tail
    keep: int
    newline: bool


class History:
    """Everything a journal says so far. Feed it every line in order."""

    def __init__(self, claim: bytes | None, *, documents: bool = False) -> None:
        """``claim`` is ``claim.json`` as it lies on disk, ``None`` where it is missing;
        ``documents`` whether the lines it gives back hold the passages of answers.
        """
        self._documents = documents
        self.claim_sha256 = None if claim is None else claim_digest(claim)
        self._newer: str | None = None
        if claim is not None:
            with contextlib.suppress(orjson.JSONDecodeError):  # cut short: it states no format
                self._newer = newer_format(CLAIM, orjson.loads(claim), FORMAT)
        self.state = RunState()
        self.seq = 0
        self.head = self.claim_sha256 or ""
        self.kinds: Counter[str] = Counter()
        self.first_at: str | None = None
        self.last: Line | None = None
        self.latch: Line | None = None

    def read(self, raw: bytes) -> Line:
        """Takes one line without its newline. Raises ``LedgerCorrupt``, without the place."""
        if self._newer is not None:  # before anything of it is judged by the rules of this version
            raise errors.LEDGER_CORRUPT(self._newer)
        line = decode_line(raw, documents=self._documents)
        seq, _, prev, total, record, _ = line
        if seq != self.seq + 1:
            raise errors.LEDGER_CORRUPT(f"record {seq} comes after record {self.seq}")
        if prev != self.head and seq > 1:
            raise errors.LEDGER_CORRUPT("the line does not chain to the one before it")
        if seq == 1:
            self._first(line)
        elif type(record) is RunClaimed:
            raise errors.LEDGER_CORRUPT("the run was claimed twice")
        self.state.fold(record)
        self.seq, self.head, self.last = seq, total, line
        self.kinds[record.kind] += 1
        if type(record) is LatchClosed:
            self.latch = line
        return line

    def end(self, piece: bytes, *, terminated: bool) -> End:
        """Takes the last piece of the last segment, which alone may be torn.

        ``piece`` comes without its newline; ``terminated`` says whether it had one. An empty,
        unterminated piece is what follows the newline of a sound line.
        """
        if terminated and line_sum(piece) is not None:
            self.read(piece)
            return End(Tail.CLEAN, len(piece), newline=False)
        if not terminated and not piece:
            return End(Tail.CLEAN, 0, newline=False)
        body = piece if terminated else piece.rstrip(b"\0")
        if not terminated and line_sum(body) is not None:
            self.read(body)
            tail = Tail.UNTERMINATED if len(body) == len(piece) else Tail.TORN
            return End(tail, len(body), newline=True)
        if begins_with_record(body):
            raise errors.LEDGER_CORRUPT("a whole record is followed by bytes that are no newline")
        return End(Tail.TORN, 0, newline=False)

    def _first(self, line: Line) -> None:
        if self.claim_sha256 is None:
            raise errors.LEDGER_CORRUPT("claim.json is missing, and the first record chains to it")
        if line.prev != self.claim_sha256:
            raise errors.LEDGER_CORRUPT("claim.json is not the one the first record chains to")
        if not isinstance(line.record, RunClaimed):
            raise errors.LEDGER_CORRUPT(f"the first record is {line.record.kind}, not run.claimed")
        if line.record.claim_sha256 != self.claim_sha256:
            raise errors.LEDGER_CORRUPT("the first record names another claim.json")
        self.first_at = line.at


CHUNK_BYTES = 64 * 1024  # a chunk and its lines fit the processor's cache
FILE_BYTES_MAX = 64 * 1024 * 1024  # of claim.json, latch.json or a receipt: KB in any real run

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of the journal, and how much of it there was to read, in bytes."""

    index: int
    size: int

    @property
    def name(self) -> str:
        return segment_name(self.index)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a line begins: file, line (from 1) and byte (from 0); both are 0 for a whole file."""

    file: str
    line: int = 0
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.file} line {self.line} (byte {self.offset})" if self.line else self.file


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a run is not the history it should be."""

    place: Place
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


class RunReader:
    """A run directory, read-only. Raises ``RunDirectoryError`` where it cannot be read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if not directory.is_dir():
            raise errors.RUN_DIRECTORY(f"{directory} is not a directory: name a run's")
        if not (directory / JOURNAL).is_dir() and not (directory / CLAIM).exists():
            raise errors.RUN_DIRECTORY(
                f"{directory} is not a run directory: it holds neither claim.json nor journal/"
            )

    def live(self) -> bool:
        try:
            return is_locked(self.directory) or is_locked(self.directory / LOCK)
        except OSError as exc:
            raise self._unreadable(LOCK, exc) from None

    def served(self) -> bool:
        """Whether the run says where it is reached: it is served, or its end was not orderly."""
        return (self.directory / ENDPOINTS).exists()

    def begun(self) -> bool:
        """Whether the run was ready once: its first record was on the medium by then."""
        return self.served() or (self.directory / ROOM).exists()

    def latch(self) -> bytes | None:
        """The bytes of ``latch.json``, or of the room set aside for it where that was needed."""
        found = self.read(LATCH)
        if found is None:
            found = (self.read(ROOM) or b"").strip() or None
        return found

    def read(self, name: str) -> bytes | None:
        """The bytes of a file beside the journal, ``None`` where it does not exist."""
        try:
            fd = self._open(self.directory / name)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise self._unreadable(name, exc) from None
        with os.fdopen(fd, "rb") as stream:
            if os.fstat(fd).st_size > FILE_BYTES_MAX:
                raise errors.RUN_DIRECTORY(f"{self.directory / name} is too large to be a run's")
            return stream.read()

    def segments(self) -> tuple[Segment, ...]:
        """The journal's files in the order they were written, as large as they are now."""
        folder = self.directory / JOURNAL
        try:
            names = sorted(map(segment_index, os.listdir(folder)), key=lambda index: index or 0)
            # Sizes only once all names are known: a segment that another follows grows no more.
            found = [
                Segment(index, (folder / segment_name(index)).lstat().st_size)
                for index in names
                if index is not None
            ]
        except FileNotFoundError:
            return ()
        except OSError as exc:
            raise self._unreadable(JOURNAL, exc) from None
        return tuple(found)

    def chunks(self, segment: Segment, offset: int = 0) -> Iterator[bytes]:
        """The bytes of a segment from ``offset`` on, no more than its size, in chunks."""
        try:
            fd = self._open(self.directory / JOURNAL / segment.name)
        except OSError as exc:
            raise self._unreadable(f"{JOURNAL}/{segment.name}", exc) from None
        with os.fdopen(fd, "rb", buffering=0) as stream:
            stream.seek(offset)
            left = segment.size - offset
            while left > 0:
                chunk = stream.read(min(CHUNK_BYTES, left))
                if not chunk:
                    return
                left -= len(chunk)
                yield chunk

    def _open(self, path: Path) -> int:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        raise errors.RUN_DIRECTORY(f"{path} is not a regular file")

    def _unreadable(self, name: str, exc: OSError) -> errors.UsageError:
        return errors.RUN_DIRECTORY(
            f"{self.directory / name} cannot be read: {exc.strerror or exc}"
        )


class ReadBack:
    """What was written is read again from the medium, from where the last reading ended.

    Every line has to end in its sum and to chain to the one before, so the last sum covers each
    byte that was read. Blocking; one caller at a time.
    """

    def __init__(self, directory: Path, *, segment: int, offset: int, seq: int, head: str) -> None:
        """``seq`` and ``head`` are those of the record that ends at ``offset`` of ``segment``."""
        self._directory = directory
        self._segment, self._offset = segment, offset
        self.seq, self.head = seq, head

    def to(self, seq: int, head: str) -> int:
        """Reads up to the record ``seq``, whose sum is ``head``; returns the bytes read.

        Raises ``LEDGER_LOST`` where the medium holds anything else.
        """
        read = 0
        reader = RunReader(self._directory)
        for segment in reader.segments():
            if segment.index < self._segment:
                continue
            if segment.index > self._segment:
                self._segment, self._offset = segment.index, 0
            for raw in self._lines(reader, segment):
                if self.seq == seq:
                    break
                try:
                    line = decode_line(raw, documents=False)
                except errors.LedgerCorrupt as exc:
                    raise self._lost(exc.message) from None
                if (line.seq, line.prev) != (self.seq + 1, self.head):
                    raise self._lost("the line does not chain to the one before it")
                self.seq, self.head = line.seq, line.sum
                self._offset += len(raw)
                read += len(raw)
        if (self.seq, self.head) != (seq, head):
            raise self._lost(f"it ends at record {self.seq}, and {seq} was written last")
        return read

    def _lines(self, reader: RunReader, segment: Segment) -> Iterator[bytes]:
        parts: list[bytes] = []
        for chunk in reader.chunks(segment, self._offset):
            *lines, rest = chunk.split(b"\n")
            for line in lines:
                yield b"".join((*parts, line, b"\n"))
                parts = []
            parts.append(rest)

    def _lost(self, why: str) -> errors.LedgerFailed:
        place = f"{JOURNAL}/{segment_name(self._segment)} byte {self._offset:,}"
        return errors.LEDGER_LOST(
            f"the journal was read back and is not what was written: {place}: {why}"
        )


class Scan:
    """One pass over a journal. Iterate it; then see ``problem`` and ``end``.

    ``history`` holds all that was read before the end or the problem, ``place`` where the line read
    last begins, or the piece that is not a line. ``end`` is set once the whole journal was read;
    ``tail`` are the bytes of its last piece, from ``place`` on.
    """

    def __init__(
        self, reader: RunReader, history: History, *, progress: Progress | None = None
    ) -> None:
        """``progress`` is told bytes read and bytes in all."""
        self._reader = reader
        self._progress = progress
        self.history = history
        self.segments = reader.segments()
        self.bytes = sum(segment.size for segment in self.segments)
        self.problem: Problem | None = None
        self.end: End | None = None
        self.tail = b""
        self._done = 0
        self._file = f"{JOURNAL}/{segment_name(1)}"
        self._line = 1
        self._offset = 0

    @property
    def place(self) -> Place:
        return Place(self._file, self._line, self._offset)

    @property
    def torn_bytes(self) -> int:
        """Bytes at the journal's end that are not a record: the last line is incomplete."""
        if self.end is None or self.end.tail is not Tail.TORN:
            return 0
        return len(self.tail) - self.end.keep

    def drain(self) -> Scan:
        """Reads everything, for a caller that needs no line; returns itself."""
        deque(self, maxlen=0)
        return self

    def require_whole(self) -> None:
        """Raises ``LedgerCorrupt`` where the journal was not read to its end."""
        if self.problem is not None:
            raise errors.LEDGER_CORRUPT(str(self.problem))

    def __iter__(self) -> Iterator[Line]:
        """Every whole record in order."""
        for position, segment in enumerate(self.segments, 1):
            self._file = f"{JOURNAL}/{segment_name(position)}"
            if segment.index != position:
                self.problem = Problem(Place(self._file), "the segment is missing")
                return
            self._line, self._offset = 1, 0
            try:
                yield from self._segment(segment, last=position == len(self.segments))
            except errors.LedgerCorrupt as exc:
                self.problem = Problem(self.place, exc.message)
                return
        if self.end is None:
            self.end = End(Tail.CLEAN, 0, newline=False)

    def _segment(self, segment: Segment, *, last: bool) -> Iterator[Line]:
        """One line is held back: the last piece of the last segment is read by rules of its own."""
        read = self.history.read
        held: bytes | None = None
        batch: tuple[list[bytes], bytes] = ([], b"")
        for batch in self._batches(segment):
            for raw in batch[0]:
                if held is not None:
                    yield read(held)
                    self._line += 1
                    self._offset += len(held) + 1
                held = raw
        open_end = batch[1]
        if held is not None and (open_end or not last):
            yield read(held)
            self._line += 1
            self._offset += len(held) + 1
            held = None
        if last:
            yield from self._last(open_end if held is None else held, terminated=held is not None)
        elif open_end:
            raise errors.LEDGER_CORRUPT("the segment ends within a line, and another one follows")
        elif segment.size == 0:
            raise errors.LEDGER_CORRUPT("the segment is empty, and another one follows")

    def _last(self, piece: bytes, *, terminated: bool) -> Iterator[Line]:
        before = self.history.seq
        self.end = self.history.end(piece, terminated=terminated)
        self.tail = piece + b"\n" if terminated else piece
        if self.history.seq != before and self.history.last is not None:
            yield self.history.last

    def _batches(self, segment: Segment) -> Iterator[tuple[list[bytes], bytes]]:
        """Whole lines without their newlines, and what follows the last newline so far."""
        parts: list[bytes] = []
        held = 0
        for chunk in self._reader.chunks(segment):
            lines = chunk.split(b"\n")
            open_end = lines.pop()
            if lines and parts:
                lines[0] = b"".join((*parts, lines[0]))
            if lines:
                parts, held = [], 0
            parts.append(open_end)
            held += len(open_end)
            if held > LINE_BYTES_MAX:
                raise errors.LEDGER_CORRUPT(f"a line is longer than {LINE_BYTES_MAX} bytes")
            if lines:
                yield lines, b""
            self._done += len(chunk)
            if self._progress is not None:
                self._progress(self._done, self.bytes)
        yield [], b"".join(parts)

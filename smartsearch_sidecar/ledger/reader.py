"""The files of a run, read: the only door beside ``file.py``, and it changes nothing.

``RunReader`` knows names and bytes; ``Scan`` feeds a whole journal to a ``History`` and stops at
the first thing that is no history. What is read is what was there when the reading began: a live
run may go on writing behind it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.disk import (
    CLAIM,
    ENDPOINTS,
    JOURNAL,
    LOCK,
    is_locked,
    segment_index,
    segment_name,
)
from smartsearch_sidecar.ledger.history import LINE_BYTES_MAX, End, History, Tail
from smartsearch_sidecar.run.line import Line

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
        """``000001.jsonl``."""
        return segment_name(self.index)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a line begins: file, line (from 1) and byte (from 0)."""

    file: str
    line: int
    offset: int

    def __str__(self) -> str:
        return f"{self.file} line {self.line} (byte {self.offset})"


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a run is not the history it should be. ``line`` and ``offset`` are 0 for a whole file."""

    file: str
    line: int
    offset: int
    reason: str

    def __str__(self) -> str:
        place = f"{self.file} line {self.line} (byte {self.offset})" if self.line else self.file
        return f"{place}: {self.reason}"


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
        """Whether a process serves the run right now."""
        try:
            return is_locked(self.directory / LOCK)
        except OSError as exc:
            raise self._unreadable(LOCK, exc) from None

    def served(self) -> bool:
        """Whether the run says where it is reached: it is served, or its end was not orderly."""
        return (self.directory / ENDPOINTS).exists()

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

    def chunks(self, segment: Segment) -> Iterator[bytes]:
        """The bytes of a segment, no more than its size, in chunks."""
        try:
            fd = self._open(self.directory / JOURNAL / segment.name)
        except OSError as exc:
            raise self._unreadable(f"{JOURNAL}/{segment.name}", exc) from None
        with os.fdopen(fd, "rb", buffering=0) as stream:
            left = segment.size
            while left:
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


class Scan:
    """One pass over a journal. Iterate it; then ask what it came to.

    ``history`` holds all that was read before the end or the problem, ``place`` where the line read
    last begins. ``end`` is set once the whole journal was read; ``tail`` are the bytes of its last
    piece, from ``place`` on.
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
        """Where the line that was read last begins, or the one that is no line."""
        return Place(self._file, self._line, self._offset)

    def drain(self) -> None:
        """Reads everything, for a caller that only asks what it came to."""
        for _ in self:
            pass

    def __iter__(self) -> Iterator[Line]:
        """Every whole record in order."""
        for position, segment in enumerate(self.segments, 1):
            self._file = f"{JOURNAL}/{segment_name(position)}"
            if segment.index != position:
                self.problem = Problem(self._file, 0, 0, "the segment is missing")
                return
            self._line, self._offset = 1, 0
            try:
                yield from self._segment(segment, last=position == len(self.segments))
            except errors.LedgerCorrupt as exc:
                self.problem = Problem(self._file, self._line, self._offset, exc.message)
                return
        if self.end is None:
            self.end = End(Tail.CLEAN, 0, newline=False)

    def _segment(self, segment: Segment, *, last: bool) -> Iterator[Line]:
        """The records of one segment. The last piece of the last one is read by rules of its own:
        so one line is always held back.
        """
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

"""The files of one run, written: create-only files, append, sync. Blocking.

This module, ``lock.py`` and ``reader.py`` are the only ones that open a file of a run. They know
names and modes, not what a record means.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.disk import Disk, OneCallDisk
from smartsearch_sidecar.ledger.lock import LOCK, RunLock, is_locked

DIRECTORY_MODE = 0o700

CLAIM = "claim.json"
LATCH = "latch.json"
ENDPOINTS = "endpoints.json"
ROOM = "latch.room"
JOURNAL = "journal"

_LOOKED_AT = (LOCK, CLAIM, LATCH, ROOM)

_SEGMENT = re.compile(r"[0-9]{6,12}\.jsonl", re.ASCII)
_OURS = re.compile(
    r"claim\.json|latch\.json|latch\.room|\.?endpoints\.json(?:\.new)?|lock|journal|torn-[0-9-]+\.bin",
    re.ASCII,
)


def segment_name(index: int) -> str:
    """``000001.jsonl`` for 1: sorts by name as it was written."""
    return f"{index:06d}.jsonl"


def segment_index(name: str) -> int | None:
    """The inverse of ``segment_name``; ``None`` for any other name."""
    if _SEGMENT.fullmatch(name) is None:
        return None
    index = int(name.partition(".")[0])
    return index if segment_name(index) == name else None


def is_ours(name: str) -> bool:
    """Whether a name may stand in a run directory."""
    return _OURS.fullmatch(name) is not None


ROOM_BYTES = 4096
"""Set aside on the medium for the latch: one block, so that it can be written in place."""
BLANK = b" "


def unblanked(room: bytes) -> bytes:
    """What was left in the room for the latch; empty where nothing was. NUL bytes are what a power
    cut leaves of a file whose length came before its bytes.
    """
    return room.strip(BLANK + b"\0\n")


@contextmanager
def named(directory: Path) -> Iterator[None]:
    """Turns an ``OSError`` into a ``RunDirectoryError`` that names the directory."""
    try:
        yield
    except OSError as exc:
        raise errors.RUN_DIRECTORY(
            f"run directory {directory} cannot be opened: {exc.strerror or exc}"
        ) from None


def check_owned(path: Path, wanted: Callable[[int], bool]) -> None:
    """Raises ``RunDirectoryError`` unless ``path`` is as ``wanted``, no link, and ours alone."""
    with named(path):
        found = os.lstat(path)
    if not wanted(found.st_mode):
        raise errors.RUN_DIRECTORY(f"{path} is a link, or no part of a run directory")
    if os.geteuid() not in (0, found.st_uid):
        raise errors.RUN_DIRECTORY(f"{path} belongs to another user: serve as that user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise errors.RUN_DIRECTORY(
            f"{path} can be written by others: its records could not be trusted (chmod go-w)"
        )


_Identity = tuple[int, int, int]


def _identity(found: os.stat_result) -> _Identity:
    return found.st_dev, found.st_ino, 0 if stat.S_ISDIR(found.st_mode) else found.st_size


class RunFiles:
    """The open files of a run. Every method blocks; one thread at a time.

    Raises ``RunDirectoryError`` where a person has to act, ``OSError`` where the disk failed.
    """

    def __init__(self, directory: Path, *, disk: Disk | None = None, sync: bool = True) -> None:
        self.directory = directory
        self.disk = disk or OneCallDisk()
        self._sync = sync
        self._lock = RunLock(directory)
        self._room_fd: int | None = None
        self._room_taken = False
        self._journal_fd: int | None = None
        # What must stand under each name beside the current segment: device, inode, size.
        self._kept: dict[Path, _Identity] = {}
        self._claim = b""
        self._unsynced = False  # something of the journal was written and not synced
        self.segment = 0
        self.segment_bytes = 0

    # --- opening ----------------------------------------------------------------------------------

    def create(self) -> None:
        """Makes the directory (it must not exist) and takes its lock."""
        try:
            places = (self.directory, *self.directory.parents)
            missing = [place for place in places if not place.exists()]
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            self.directory.mkdir(mode=DIRECTORY_MODE)
        except OSError as exc:
            raise (self._exists() or self._not_made(exc)) from None
        self.disk.point("directory:made")
        try:
            self.lock()
            self._make_journal()
            for place in missing:
                self._sync_directory(place.parent)
            self._keep_all()
        except OSError as exc:
            self.abandon()
            raise self._not_made(exc) from None

    def _not_made(self, exc: OSError) -> errors.UsageError:
        return errors.RUN_DIRECTORY(
            f"run directory {self.directory} cannot be made: {exc.strerror or exc}; name a "
            "place this user may write to (run.directory, --run-dir)"
        )

    def _exists(self) -> errors.UsageError | None:
        if not os.path.lexists(self.directory):
            return None
        served = False
        with contextlib.suppress(OSError):  # a directory we may not look into is there all the same
            served = is_locked(self.directory / LOCK)
        return errors.RUN_DIRECTORY(
            f"run directory {self.directory} exists already"
            f"{' and is being served by another process' if served else ''}: name a new one, "
            "or continue it with --resume"
        )

    def resume(self) -> None:
        """Takes the lock of a directory that exists; nothing else in it is changed.

        Raises ``RunDirectoryError`` where it is not a run directory, is served, or where another
        user could write into it.
        """
        check_owned(self.directory, stat.S_ISDIR)
        with named(self.directory):
            names = sorted(entry.name for entry in self.directory.iterdir())
        strange = [name for name in names if not is_ours(name)]
        if strange and CLAIM not in names:
            raise errors.RUN_DIRECTORY(
                f"{self.directory} is not a run directory (it holds {strange[0]!r}): name the "
                "directory of a run, or one that does not exist"
            )
        try:
            with named(self.directory):
                self.lock()
                if CLAIM not in names:  # with a claim, a journal that is not there was lost
                    self._make_journal()
                for name in {CLAIM, LATCH, ROOM, JOURNAL}.intersection(names):
                    wanted = stat.S_ISDIR if name == JOURNAL else stat.S_ISREG
                    check_owned(self.directory / name, wanted)
                if JOURNAL in names:
                    for segment in (self.directory / JOURNAL).iterdir():
                        check_owned(segment, stat.S_ISREG)
                self._keep_all()
        except BaseException:
            self.close()
            raise

    def _keep_all(self) -> None:
        """Folders, lock, claim and latch, as far as they are there."""
        for path in (self.directory, *(self.directory / name for name in (JOURNAL, *_LOOKED_AT))):
            if path.exists():
                self._keep(path)

    def _make_journal(self) -> None:
        (self.directory / JOURNAL).mkdir(mode=DIRECTORY_MODE, exist_ok=True)

    def lock(self) -> None:
        """Takes the locks of the directory, held until ``close`` or the process's end."""
        self._lock.take(self.disk)

    def lock_run(self, claim_sha256: str) -> None:
        """Takes the lock of the run itself, which every copy of the directory shares."""
        self._lock.take_run(claim_sha256)

    def abandon(self) -> None:
        """Undoes ``create`` for a run that never began: a directory with a claim is left alone."""
        if not (self.directory / CLAIM).exists():
            with contextlib.suppress(OSError):  # a disk that has gone keeps what it has
                (self.directory / LOCK).unlink(missing_ok=True)
            for empty in (self.directory / JOURNAL, self.directory):
                with contextlib.suppress(OSError):  # not empty: another program's files, left alone
                    empty.rmdir()
        self.close()

    # --- files beside the journal -----------------------------------------------------------------

    def create_only(self, name: str, data: bytes) -> None:
        """A new file of the run, durable with its name when this returns."""
        self.disk.point(f"{name}:before")
        fd = self.disk.open(self.directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            self.disk.write(fd, data)
            self.disk.point(f"{name}:written")
            if self._sync:
                self.disk.sync(fd)
        finally:
            self.disk.close(fd)
        self._sync_directory(self.directory)
        if name in _LOOKED_AT:
            self._keep(self.directory / name)
        self.disk.point(f"{name}:after")

    def set_room_aside(self) -> None:
        """Makes room on the medium for the latch, once, and keeps it open.

        It is also the mark of a run that has begun: a directory that has it and no journal has lost
        its history.
        """
        path = self.directory / ROOM
        if not path.exists():
            self.create_only(ROOM, BLANK * ROOM_BYTES)
        self._room_fd = fd = self.disk.open(path, os.O_RDWR)
        held = os.pread(fd, ROOM_BYTES, 0)
        self._room_taken = bool(unblanked(held))
        if len(held) < ROOM_BYTES:  # a start that was cut short
            self.disk.overwrite(fd, held.ljust(ROOM_BYTES, BLANK))
        self._keep(path)

    def leave_latch(self, data: bytes, *, alone: bool = False) -> None:
        """Writes ``latch.json``, or in place into the room set aside for it where no new file can
        be made. ``alone``: no record says the same, so it is written in both places, and a person
        who removes the file forgets no failure. Raises ``FileExistsError`` where either holds a
        cause: the first one wins.
        """
        try:
            self.create_only(LATCH, data)
        except FileExistsError:
            raise
        except OSError:
            if os.path.lexists(self.directory / LATCH):
                self._keep(self.directory / LATCH)
            if self._room_fd is None:
                raise
            if self._room_taken:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), ROOM) from None
            self._fill_room(self._room_fd, data)
        else:
            if alone and self._room_fd is not None and not self._room_taken:
                self._fill_room(self._room_fd, data)

    def _fill_room(self, fd: int, data: bytes) -> None:
        self._room_taken = True
        self.disk.overwrite(fd, data[:ROOM_BYTES].ljust(ROOM_BYTES, BLANK))

    def replace(self, name: str, data: bytes) -> None:
        """A file that may be rewritten whole (``endpoints.json``): written beside, then renamed."""
        beside = self.directory / f".{name}.new"
        self.disk.point(f"{name}:before")
        fd = self.disk.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            self.disk.write(fd, data)
        finally:
            self.disk.close(fd)
        self.disk.point(f"{name}:written")
        beside.rename(self.directory / name)
        self.disk.point(f"{name}:after")

    def remove(self, name: str) -> None:
        (self.directory / name).unlink(missing_ok=True)
        self._kept.pop(self.directory / name, None)
        self.disk.point(f"{name}:removed")

    def set_aside(self, segment: int, offset: int, data: bytes) -> Path:
        """Keeps a torn tail in a file of its own, named by segment and byte, durable when this
        returns. A copy that an earlier try left whole is used again; one left in part stays.
        """
        for nth in range(1, 1000):
            name = f"torn-{segment:06d}-{offset}{f'-{nth}' if nth > 1 else ''}.bin"
            try:
                self.create_only(name, data)
            except FileExistsError:
                if (self.directory / name).read_bytes() != data:
                    continue
                self._sync_directory(self.directory)
            return self.directory / name
        raise errors.RUN_DIRECTORY(f"{self.directory} holds too many torn tails of one place")

    # --- the journal ------------------------------------------------------------------------------

    def start_segment(self, index: int) -> None:
        """Closes the current segment and opens a new, empty one (create-only)."""
        if self._journal_fd is not None:
            if self._sync:
                self.disk.sync(self._journal_fd)
            self._kept[self._segment_path] = self._current
            self.disk.close(self._journal_fd)
            self._journal_fd, self._unsynced = None, False
        self.disk.point("rotate:before")
        path = self.directory / JOURNAL / segment_name(index)
        self._journal_fd = self.disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        self._sync_directory(path.parent)
        self._begin_at(index, 0)
        self.disk.point("rotate:after")

    def continue_segment(self, index: int, size: int, *, keep: int, newline: bool) -> None:
        """Opens the last segment of an existing journal for appending.

        ``size`` is what was read of it, ``keep`` what stays; ``newline`` ends the last line. All of
        it is durable when this returns, also what an earlier process had left unsynced.
        """
        path = self.directory / JOURNAL / segment_name(index)
        fd = self.disk.open(path, os.O_WRONLY | os.O_APPEND)
        self._journal_fd = fd
        if os.fstat(fd).st_size != size:
            raise errors.RUN_DIRECTORY(f"{path} changed while it was read: stop what writes it")
        if keep != size:
            self.disk.point("trim:before")
            self.disk.truncate(fd, keep)
            self.disk.point("trim:after")
        if newline:
            self.disk.write(fd, b"\n")
            self.disk.point("newline:after")
        if self._sync:
            self.disk.sync(fd)
        self._sync_directory(path.parent)
        self._begin_at(index, keep + newline)
        for before in sorted(path.parent.iterdir()):
            if before != path:
                self._keep(before)

    def _begin_at(self, index: int, size: int) -> None:
        """Where the next line goes, and what names that file."""
        if self._journal_fd is None:
            raise errors.INTERNAL_ERROR("the journal is not open")
        self.segment, self.segment_bytes = index, size
        self._segment_path = self.directory / JOURNAL / segment_name(index)
        found = os.fstat(self._journal_fd)
        self._segment_inode = found.st_dev, found.st_ino

    @property
    def _current(self) -> _Identity:
        return *self._segment_inode, self.segment_bytes

    def append(self, data: bytes, *, sync: bool) -> None:
        """Appends whole lines; with ``sync`` they are on the medium when this returns."""
        fd = self._journal_fd
        if fd is None:
            raise errors.INTERNAL_ERROR("the journal is not open")
        sync = sync and self._sync
        self._look_at(self._segment_path, self._current)
        self.disk.point("write:before")
        if sync and not self._unsynced:
            self.disk.write_synced(fd, data)
        else:
            self.disk.write(fd, data)
            self.disk.point("write:after")
            if sync:
                self.disk.point("sync:before")
                self.disk.sync(fd)
        self._unsynced = not sync
        self.segment_bytes += len(data)
        if sync:
            self.disk.point("sync:after")

    # --- whether it is still there ----------------------------------------------------------------

    def _keep(self, path: Path) -> None:
        """From now on ``path`` has to stay what it is."""
        self._kept[path] = _identity(os.lstat(path))
        if path.name == CLAIM:
            self._claim = path.read_bytes()

    def look(self) -> None:
        """Raises ``LEDGER_LOST`` unless each file of the run stands under its name, as large as
        this process left it, and the claim is what it was. A file that was removed or replaced goes
        on taking what is written.
        """
        for path, identity in self._kept.items():
            self._look_at(path, identity)
        claim = self.directory / CLAIM
        if claim in self._kept and claim.read_bytes() != self._claim:
            raise errors.LEDGER_LOST(f"{CLAIM} was changed")
        if self._journal_fd is not None:
            self._look_at(self._segment_path, self._current)
        latch = self.directory / LATCH
        if latch not in self._kept and os.path.lexists(latch):
            raise errors.LEDGER_LOST(f"{LATCH} is there, and another program made it")

    def _look_at(self, path: Path, identity: _Identity) -> None:
        name = path.relative_to(self.directory.parent)
        try:
            found = _identity(os.lstat(path))
        except OSError as exc:
            raise errors.LEDGER_LOST(f"{name} is not there: {exc.strerror or exc}") from None
        if found[:2] != identity[:2]:
            raise errors.LEDGER_LOST(f"{name} was replaced by another")
        if found[2] != identity[2]:
            raise errors.LEDGER_LOST(
                f"{name} has {found[2]:,} bytes, and this process left {identity[2]:,}"
            )

    def _sync_directory(self, path: Path) -> None:
        if self._sync:
            self.disk.sync_directory(path)

    def close(self) -> None:
        """Closes the journal and gives the lock back."""
        for fd in (self._journal_fd, self._room_fd):
            if fd is not None:
                self.disk.close(fd)
        self._journal_fd = self._room_fd = None
        self._lock.release()

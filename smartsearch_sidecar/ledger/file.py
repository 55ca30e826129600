"""The files of one run: lock, create-only writes, append, sync. Blocking, small, and alone.

This is the only module that opens a file of a run. It knows names and modes, not what a record
means. ``Disk`` holds the five primitives a fault can strike, so that tests can strike them without
touching anything of ours.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from smartsearch_sidecar import errors

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600

CLAIM = "claim.json"
LATCH = "latch.json"
ENDPOINTS = "endpoints.json"
LOCK = "lock"
JOURNAL = "journal"


def segment_name(index: int) -> str:
    """``000001.jsonl`` for 1: sorts by name as it was written."""
    return f"{index:06d}.jsonl"


class Disk:
    """The primitives under a run directory; a subclass may fail, forget or crash in any of them.

    ``point`` names where we are, for the crash harness; it does nothing here.
    """

    def point(self, name: str) -> None:
        """Called with a name right before or after an effect."""

    def open(self, path: Path, flags: int) -> int:
        """``os.open`` with our mode and close-on-exec."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)

    def write(self, fd: int, data: bytes) -> None:
        """Writes all of ``data``; a short write is continued, an error is the caller's."""
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]

    def sync(self, fd: int) -> None:
        """Data, and the metadata needed to read it, to the medium."""
        os.fdatasync(fd)

    def sync_directory(self, path: Path) -> None:
        """Makes names in ``path`` durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self, fd: int) -> None:
        """``os.close``."""
        os.close(fd)


class RunFiles:
    """The open files of a run. Every method blocks; one thread at a time.

    Raises ``RunDirectoryError`` where a person has to act, ``OSError`` where the disk failed.
    """

    def __init__(self, directory: Path, *, disk: Disk | None = None, sync: bool = True) -> None:
        self.directory = directory
        self.disk = disk or Disk()
        self._sync = sync
        self._lock_fd: int | None = None
        self._journal_fd: int | None = None
        self.segment = 0
        self.segment_bytes = 0

    # --- opening ---------------------------------------------------------------------------------

    def create(self) -> None:
        """Makes the directory (it must not exist) and takes its lock."""
        try:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            self.directory.mkdir(mode=DIRECTORY_MODE)
        except FileExistsError:
            raise errors.RunDirectoryError(
                f"run directory {self.directory} exists already{self._holder()}: name a new one, "
                "or continue it with --resume"
            ) from None
        except OSError as exc:
            raise errors.RunDirectoryError(
                f"run directory {self.directory} cannot be made: {exc.strerror}"
            ) from None
        self.lock()
        (self.directory / JOURNAL).mkdir(mode=DIRECTORY_MODE)
        self.disk.sync_directory(self.directory.parent)

    def _holder(self) -> str:
        """`` and is being served`` where another process holds the lock."""
        try:
            fd = os.open(self.directory / LOCK, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return ""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return " and is being served by another process"
        finally:
            os.close(fd)
        return ""

    def lock(self) -> None:
        """Takes the run's lock, held until ``close`` or the process's end."""
        fd = self.disk.open(self.directory / LOCK, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            self.disk.close(fd)
            if exc.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise errors.RunDirectoryError(
                f"run directory {self.directory} is being served by another process: stop it first, "
                "or name another directory"
            ) from None
        self._lock_fd = fd

    def abandon(self) -> None:
        """Undoes ``create`` for a run that never began: a directory with a claim is left alone."""
        self.close()
        if (self.directory / CLAIM).exists():
            return
        (self.directory / LOCK).unlink(missing_ok=True)
        for empty in (self.directory / JOURNAL, self.directory):
            with contextlib.suppress(OSError):  # not empty: somebody else's files, left alone
                empty.rmdir()

    # --- create-only files -------------------------------------------------------------------------

    def create_only(self, name: str, data: bytes) -> None:
        """A new file of the run, durable with its name when this returns."""
        path = self.directory / name
        self.disk.point(f"{name}:before")
        fd = self.disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            self.disk.write(fd, data)
            self.disk.point(f"{name}:written")
            if self._sync:
                self.disk.sync(fd)
        finally:
            self.disk.close(fd)
        if self._sync:
            self.disk.sync_directory(path.parent)
        self.disk.point(f"{name}:after")

    def replace(self, name: str, data: bytes) -> None:
        """A file that may be rewritten whole (``endpoints.json``): written beside, then renamed."""
        path = self.directory / name
        beside = path.with_name(f".{name}.new")
        fd = self.disk.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            self.disk.write(fd, data)
        finally:
            self.disk.close(fd)
        beside.rename(path)

    def remove(self, name: str) -> None:
        """Removes a file that may be absent."""
        (self.directory / name).unlink(missing_ok=True)

    def read(self, name: str) -> bytes | None:
        """The bytes of a file of the run, or ``None`` where it does not exist."""
        try:
            return (self.directory / name).read_bytes()
        except FileNotFoundError:
            return None

    # --- the journal ---------------------------------------------------------------------------------

    def segments(self) -> list[Path]:
        """The journal's segments in the order they were written."""
        return sorted((self.directory / JOURNAL).glob("[0-9]*.jsonl"))

    def start_segment(self, index: int) -> None:
        """Closes the current segment and opens a new, empty one (create-only)."""
        if self._journal_fd is not None:
            if self._sync:
                self.disk.sync(self._journal_fd)
            self.disk.close(self._journal_fd)
            self._journal_fd = None
        self.disk.point("rotate:before")
        path = self.directory / JOURNAL / segment_name(index)
        self._journal_fd = self.disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        if self._sync:
            self.disk.sync_directory(path.parent)
        self.segment, self.segment_bytes = index, 0
        self.disk.point("rotate:after")

    def continue_segment(self, index: int, size: int) -> None:
        """Opens the last segment of an existing journal for appending; ``size`` in bytes."""
        path = self.directory / JOURNAL / segment_name(index)
        self._journal_fd = self.disk.open(path, os.O_WRONLY | os.O_APPEND)
        self.segment, self.segment_bytes = index, size

    def append(self, data: bytes, *, sync: bool) -> None:
        """Appends whole lines; with ``sync`` they are on the medium when this returns."""
        fd = self._journal_fd
        if fd is None:
            raise errors.InvariantBroken("the journal is not open")
        self.disk.point("write:before")
        self.disk.write(fd, data)
        self.segment_bytes += len(data)
        self.disk.point("write:after")
        if sync and self._sync:
            self.disk.point("sync:before")
            self.disk.sync(fd)
            self.disk.point("sync:after")

    def close(self) -> None:
        """Closes the journal and gives the lock back."""
        for fd in (self._journal_fd, self._lock_fd):
            if fd is not None:
                self.disk.close(fd)
        self._journal_fd = self._lock_fd = None

"""The names in a run directory, and the few primitives a fault can strike there.

``Disk`` holds them so that tests can fail, forget or crash in any of them without touching anything
of ours. ``file.py`` writes through it; ``reader.py`` only reads.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from smartsearch_sidecar import errors

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600

CLAIM = "claim.json"
LATCH = "latch.json"
ENDPOINTS = "endpoints.json"
LOCK = "lock"
JOURNAL = "journal"

_SEGMENT = re.compile(r"[0-9]{6,12}\.jsonl", re.ASCII)
_OURS = re.compile(
    r"claim\.json|latch\.json|\.?endpoints\.json(?:\.new)?|lock|journal|torn-[0-9-]+\.bin", re.ASCII
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


def torn_name(segment: int, offset: int, nth: int) -> str:
    """Where a torn tail is kept: by segment and byte, and the how-manieth one of that place."""
    again = f"-{nth}" if nth > 1 else ""
    return f"torn-{segment:06d}-{offset}{again}.bin"


def is_ours(name: str) -> bool:
    """Whether a name may stand in a run directory."""
    return _OURS.fullmatch(name) is not None


def is_locked(path: Path) -> bool:
    """Whether another open file holds the lock; a missing file is free.

    Looks with a shared lock: a process that takes the lock at the same moment waits for it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@contextmanager
def named(directory: Path) -> Iterator[None]:
    """An ``OSError`` while a directory is opened is a sentence for the person who named it."""
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
            f"{path} can be written by others: nobody could vouch for it (chmod go-w)"
        )


class Disk:
    """The primitives under a run directory; a subclass may fail, forget or crash in any of them.

    ``point`` names where we are, for the crash harness; it does nothing here.
    """

    def point(self, name: str) -> None:
        """Called with a name right before or after an effect."""

    def open(self, path: Path, flags: int) -> int:
        """``os.open`` with our mode and close-on-exec; never follows a link."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)

    def write(self, fd: int, data: bytes) -> None:
        """Writes all of ``data``; a short write is continued, an error is the caller's."""
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]

    def write_synced(self, fd: int, data: bytes) -> None:
        """Appends all of ``data``; it is on the medium when this returns.

        Only for a file of which nothing else waits for its sync.
        """
        self.write(fd, data)
        self.point("write:after")
        self.point("sync:before")
        self.sync(fd)

    def truncate(self, fd: int, size: int) -> None:
        """Cuts an open file to ``size`` bytes."""
        os.ftruncate(fd, size)

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


class OneCallDisk(Disk):
    """Writes and syncs in one system call, where kernel and filesystem have it.

    A thread that leaves the interpreter once a batch instead of twice hinders the loop half as
    often. Where it is refused (before anything is written), the two calls do the same.
    """

    def __init__(self) -> None:
        self._one_call = hasattr(os, "RWF_DSYNC")

    def write_synced(self, fd: int, data: bytes) -> None:
        """As ``Disk.write_synced``; ``fd`` was opened to append."""
        view = memoryview(data)
        while self._one_call and view:
            try:
                # The place named is ignored by a file that is appended to.
                view = view[os.pwritev(fd, (view,), 0, os.RWF_DSYNC) :]
            except OSError as exc:
                if exc.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                    raise
                self._one_call = False
        if view:
            super().write_synced(fd, bytes(view))

"""The few primitives under a run directory that a fault can strike: a test fails any of them.

Apart from ``file.py``, its one user: that one says which files, this one how bytes reach a medium.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

FILE_MODE = 0o600


class Disk:
    """The primitives under a run directory."""

    def point(self, name: str) -> None:
        """Called with a name right before or after an effect, for the crash tests: does nothing."""

    def open(self, path: Path, flags: int) -> int:
        """``os.open`` with our mode and close-on-exec; never follows a link."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)

    def write(self, fd: int, data: bytes) -> None:
        """Writes all of ``data``; a short write is continued, an error is the caller's."""
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]

    def write_synced(self, fd: int, data: bytes) -> None:
        """Appends all of ``data``, durably. Only where the file has no earlier unsynced bytes."""
        self.write(fd, data)
        self.point("write:after")
        self.point("sync:before")
        self.sync(fd)

    def overwrite(self, fd: int, data: bytes) -> None:
        """Writes over the beginning of a file, durably: takes no room and no name."""
        if os.pwrite(fd, data, 0) != len(data):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.fsync(fd)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """Data, and the metadata needed to read it, to the medium."""
        os.fdatasync(fd)

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self, fd: int) -> None:
        os.close(fd)


class OneCallDisk(Disk):
    """Writes and syncs in one system call, where kernel and filesystem have it.

    A thread that leaves the interpreter once a batch instead of twice hinders the loop half as
    often. Where the call is refused (before anything is written), two calls do the same.
    """

    def __init__(self) -> None:
        self._one_call = hasattr(os, "RWF_DSYNC")

    def write_synced(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        while self._one_call and view:
            try:
                # A file that was opened to append ignores the offset.
                view = view[os.pwritev(fd, (view,), 0, os.RWF_DSYNC) :]
            except OSError as exc:
                if exc.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                    raise
                self._one_call = False
        if view:
            super().write_synced(fd, bytes(view))

"""What keeps a run with one process: two locks in its directory, and one on its name. Blocking.

The folder is locked, which cannot be unlinked while it holds the journal, and the lock file, for a
network filesystem that locks no folder. A copy of a run directory has locks of its own, so the run
itself is locked as well, by the digest of its claim, on this machine: two copies of one run are
never served at once. Copies on two machines, or served one after the other, are told apart only by
a receipt (``receipt.py``).
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.disk import Disk

LOCK = "lock"

# A process that only looks whether a run is served holds the lock for microseconds.
LOCK_TRIES = 3
LOCK_WAIT_SECONDS = 0.02


def is_locked(path: Path) -> bool:
    """Whether another open file holds the lock on a file or folder; a missing one is free. Looks
    with a shared lock: a process that takes the lock at the same moment waits for it.
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


class RunLock:
    """The locks of one run, held until ``release`` or the process's end."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._held = ExitStack()

    def take(self, disk: Disk) -> None:
        """Locks the folder and the lock file in it. Raises ``RunDirectoryError``."""
        for _ in range(LOCK_TRIES):
            with ExitStack() as opened:
                folder = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                opened.callback(os.close, folder)
                fd = disk.open(self._directory / LOCK, os.O_RDWR | os.O_CREAT)
                opened.callback(disk.close, fd)
                # A lock file without a name is one that `RunFiles.abandon` has just removed.
                if _try_lock(folder) and _try_lock(fd) and os.fstat(fd).st_nlink:
                    self._held.push(opened.pop_all())
                    return
            time.sleep(LOCK_WAIT_SECONDS)
        raise errors.RUN_DIRECTORY(
            f"run directory {self._directory} is being served by another process: stop it first, "
            "or name another directory"
        )

    def take_run(self, claim_sha256: str) -> None:
        """Locks the run itself, where the system has names of sockets that are in no folder: the
        kernel drops such a name with its process. Raises ``RunDirectoryError``.
        """
        if sys.platform != "linux":
            return
        with ExitStack() as opened:
            try:
                name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            except OSError:  # a sandbox without sockets of this family: the directory's locks hold
                return
            opened.callback(name.close)
            try:
                name.bind(f"\0smartsearch-sidecar/{claim_sha256}")
            except OSError:
                raise errors.RUN_DIRECTORY(
                    f"the run of {self._directory} is being served from another directory: a copy "
                    "of a run is the same run, and one of them alone goes on"
                ) from None
            self._held.push(opened.pop_all())

    def release(self) -> None:
        self._held.close()


def _try_lock(fd: int) -> bool:
    """Whether the lock was taken; a folder of a network filesystem counts as locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as exc:
        if exc.errno in (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP) and _is_directory(fd):
            return True
        if exc.errno != errno.EACCES:
            raise
        return False
    return True


def _is_directory(fd: int) -> bool:
    return stat.S_ISDIR(os.fstat(fd).st_mode)

"""Disks that fill, fail, forget and die, on real files: each strikes at ``Disk``'s primitives.

A write that fails part-way leaves its part behind, as a real one does. ``CrashingDisk`` stands for
a process that dies at a named point: from then on nothing it does has an effect.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections import Counter
from pathlib import Path

from smartsearch_sidecar.ledger.disk import Disk


class FullDisk(Disk):
    """Takes ``left`` more bytes, the last write in part, and then none (``ENOSPC``).

    ``names`` says whether a new, empty file can still be made: often it can.
    """

    def __init__(self, left: int, *, names: bool = True) -> None:
        self.left = left
        self.names = names

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_CREAT and not self.names and self.left <= 0 and not path.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().open(path, flags)

    def write(self, fd: int, data: bytes) -> None:
        super().write(fd, data[: self.left])
        written = min(len(data), self.left)
        self.left -= written
        if written < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class ReadOnlyDisk(Disk):
    """A filesystem that turns read-only once ``read_only`` is set (``EROFS``)."""

    def __init__(self, *, read_only: bool = False) -> None:
        self.read_only = read_only

    def open(self, path: Path, flags: int) -> int:
        self._check(bool(flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR)))
        return super().open(path, flags)

    def write(self, fd: int, data: bytes) -> None:
        self._check(True)
        super().write(fd, data)

    def overwrite(self, fd: int, data: bytes) -> None:
        self._check(True)
        super().overwrite(fd, data)

    def truncate(self, fd: int, size: int) -> None:
        self._check(True)
        super().truncate(fd, size)

    def _check(self, writes: bool) -> None:
        if writes and self.read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))


class FailingSync(Disk):
    """The ``fails_at``-th sync of a file fails (``EIO``), counted from 1; later ones succeed, as on
    a kernel that has dropped the dirty pages and forgotten that they were lost.
    """

    def __init__(self, fails_at: int) -> None:
        self.fails_at = fails_at
        self.syncs = 0

    def sync(self, fd: int) -> None:
        self.syncs += 1
        if self.syncs == self.fails_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(fd)


class CountingDisk(Disk):
    """Counts the primitives by name, and keeps the named points in order."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.points: list[str] = []

    def point(self, name: str) -> None:
        self.points.append(name)

    def write(self, fd: int, data: bytes) -> None:
        self.calls["write"] += 1
        super().write(fd, data)

    def sync(self, fd: int) -> None:
        self.calls["sync"] += 1
        super().sync(fd)


class ForgetfulDisk(Disk):
    """Remembers what was synced; ``power_loss`` throws the rest away.

    Files under ``base`` go back to the bytes of their last sync, or keep a random part of what came
    after it (``rng``), now and then as NUL bytes: a length that was written before its data. A name
    whose directory was not synced since is gone, with everything under it.
    """

    def __init__(self, base: Path) -> None:
        self.base = base
        self._paths: dict[int, Path] = {}
        self._bytes: dict[int, bytes] = {}  # by inode, as of its last sync
        self._names: set[Path] = set()
        self.remember()

    def remember(self) -> None:
        """Everything under ``base`` is on the medium as it is now."""
        self._names = set(self.base.rglob("*"))
        for path in self._names:
            if path.is_file():
                self._bytes[path.stat().st_ino] = path.read_bytes()

    def open(self, path: Path, flags: int) -> int:
        fresh = bool(flags & os.O_CREAT) and not path.exists()
        fd = super().open(path, flags)
        self._paths[fd] = path
        if fresh:  # its inode may have been another file's
            self._bytes[os.fstat(fd).st_ino] = b""
        return fd

    def close(self, fd: int) -> None:
        self._paths.pop(fd, None)
        super().close(fd)

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self._bytes[os.fstat(fd).st_ino] = self._paths[fd].read_bytes()

    def overwrite(self, fd: int, data: bytes) -> None:
        super().overwrite(fd, data)
        self._bytes[os.fstat(fd).st_ino] = self._paths[fd].read_bytes()

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self._names.update(path.iterdir())

    def power_loss(self, rng: random.Random | None = None) -> None:
        """What a machine finds after its power was cut; nothing may be open for writing."""
        for path in sorted(self.base.rglob("*"), reverse=True):
            if path.is_file():
                if path in self._names:
                    path.write_bytes(self._remains(path, rng))
                else:
                    path.unlink()
        for path in sorted(self.base.rglob("*"), reverse=True):
            if path.is_dir() and path not in self._names:
                shutil.rmtree(path)

    def _remains(self, path: Path, rng: random.Random | None) -> bytes:
        synced = self._bytes.get(path.stat().st_ino, b"")
        now = path.read_bytes()
        if rng is None or not now.startswith(synced):
            return synced
        kept = now[len(synced) :][: rng.randint(0, len(now) - len(synced))]
        if rng.random() < 0.3:
            solid = rng.randint(0, len(kept))
            kept = kept[:solid] + bytes(len(kept) - solid)
        return synced + kept


class Crash(OSError):
    """The process is gone; code that catches this can no longer change the disk."""


class CrashingDisk(ForgetfulDisk):
    """Dies at the ``nth`` time a point is passed (counted from 1), or within a write before it.

    ``torn`` bytes of the write that follows a ``…:before`` point still reach the file. After the
    death every primitive raises ``Crash``; only ``close`` still gives descriptors back.
    """

    def __init__(self, base: Path, name: str, nth: int = 1, *, torn: int | None = None) -> None:
        super().__init__(base)
        self.name = name
        self.left = nth
        self.torn = torn
        self.armed = False
        self.dead = False

    def point(self, name: str) -> None:
        self._alive()
        if name != self.name or self.left <= 0:
            return
        self.left -= 1
        if self.left:
            return
        if self.torn is None:
            self._die()
        self.armed = True

    def open(self, path: Path, flags: int) -> int:
        self._alive()
        return super().open(path, flags)

    def write(self, fd: int, data: bytes) -> None:
        self._alive()
        if self.armed and self.torn is not None:
            super().write(fd, data[: self.torn])
            self._die()
        super().write(fd, data)

    def overwrite(self, fd: int, data: bytes) -> None:
        self._alive()
        super().overwrite(fd, data)

    def truncate(self, fd: int, size: int) -> None:
        self._alive()
        super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        self._alive()
        super().sync(fd)

    def sync_directory(self, path: Path) -> None:
        self._alive()
        super().sync_directory(path)

    def _alive(self) -> None:
        if self.dead:
            raise Crash(errno.EIO, "the process is dead")

    def _die(self) -> None:
        self.dead = True
        raise Crash(errno.EIO, f"the process died at {self.name}")

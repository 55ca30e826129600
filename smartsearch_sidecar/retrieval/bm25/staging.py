"""The folder an index is made in: hidden, locked, gone if the build fails, renamed when whole."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from smartsearch_sidecar import errors
from smartsearch_sidecar.retrieval.bm25.manifest import FileFacts

_HASH_BYTES: Final = 1024 * 1024
_REMOVE_TRIES: Final = 100
_REMOVE_PAUSE_SECONDS: Final = 0.02


@contextmanager
def workshop(out: Path) -> Iterator[Path]:
    """A hidden folder beside ``out`` that is gone afterwards, or has become ``out``.

    Its lock tells a build that still runs from one that was killed, whose leavings are removed.
    """
    folder = out.parent / f".{out.name}.building"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileExistsError, NotADirectoryError):
        raise errors.USAGE(f"{out.parent} is not a folder; name another place") from None
    except OSError as error:
        raise _cannot_write(out, error) from None
    try:
        _lock(handle, folder, out)
        try:
            for name in os.listdir(folder):
                (folder / name).unlink()
            yield folder
        except BaseException:
            remove(folder)
            raise
    except OSError as error:
        raise _cannot_write(out, error) from error
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path, out: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise errors.USAGE(
            f"another build is writing {out}; wait for it, or name another"
        ) from None
    ours = os.fstat(handle)
    try:
        there = os.stat(folder)
    except FileNotFoundError:
        there = None
    if there is None or (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
        raise errors.USAGE(f"another build of {out} ended just now; look at what it left")


def remove(folder: Path) -> None:
    """Removes a folder until it stays away: threads of tantivy may still be making files in it."""
    for _ in range(_REMOVE_TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(_REMOVE_PAUSE_SECONDS)


def seal(folder: Path, hashed: Callable[[int, int], None]) -> dict[str, FileFacts]:
    """Hashes, syncs and write-protects every file of the finished index."""
    for lock in folder.glob(".*.lock"):
        lock.unlink()
    paths = sorted(folder.iterdir())
    total = sum(path.stat().st_size for path in paths)
    done = 0
    files: dict[str, FileFacts] = {}
    for path in paths:
        digest = hashlib.sha256()
        size = 0
        with path.open("rb", buffering=0) as file:
            while part := file.read(_HASH_BYTES):
                digest.update(part)
                size += len(part)
                hashed(done + size, total)
            os.fsync(file.fileno())
        done += size
        path.chmod(0o444)
        files[path.name] = FileFacts(sha256=digest.hexdigest(), bytes=size)
    return files


def write_once(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    path.chmod(0o444)


def publish(folder: Path, out: Path) -> None:
    """The one moment at which the index comes into being."""
    folder.chmod(0o755)
    _sync(folder)
    folder.rename(out)
    _sync(out.parent)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cannot_write(out: Path, error: OSError) -> errors.UsageError:
    return errors.USAGE(
        f"the index cannot be written at {out}: {error.strerror or error}; make room or name "
        "another place"
    )

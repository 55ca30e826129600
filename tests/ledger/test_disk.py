"""The disk in one call where it can, in two where it cannot; and the thread that waits for it."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smartsearch_sidecar.ledger.disk import OneCallDisk
from smartsearch_sidecar.ledger.file import RunFiles
from smartsearch_sidecar.ledger.writer import DiskThread
from tests.fakes.disk import CountingDisk


class Watched(OneCallDisk):
    """Counts the second way."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.syncs = 0

    def write(self, fd: int, data: bytes) -> None:
        self.writes.append(data)
        super().write(fd, data)

    def sync(self, fd: int) -> None:
        self.syncs += 1
        super().sync(fd)


@pytest.fixture
def appended(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """A file that holds a line and is open to append."""
    path = tmp_path / "journal"
    path.write_bytes(b"one\n")
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    yield fd, path
    os.close(fd)


def test_one_call_appends(appended: tuple[int, Path]) -> None:
    """What is written goes behind what was there, and costs neither of the two calls."""
    fd, path = appended
    disk = Watched()
    disk.write_synced(fd, b"two\n")
    disk.write_synced(fd, b"three\n")
    assert path.read_bytes() == b"one\ntwo\nthree\n"
    assert (disk.writes, disk.syncs) == ([], 0)


def test_a_short_write_is_continued(
    appended: tuple[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that takes a part is handed the rest, each part synced."""
    fd, path = appended
    whole = os.pwritev
    parts: list[int] = []

    def few(fd: int, views: Any, offset: int, flags: int) -> int:
        parts.append(flags)
        return whole(fd, [views[0][:3]], offset, flags)

    monkeypatch.setattr(os, "pwritev", few)
    Watched().write_synced(fd, b"two and three\n")
    assert path.read_bytes() == b"one\ntwo and three\n"
    assert parts == [os.RWF_DSYNC] * 5


@pytest.mark.parametrize("refusal", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_where_one_call_is_refused_two_do_the_same(
    appended: tuple[int, Path], monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    """A filesystem without the flag is written and synced, and not asked again."""
    fd, path = appended
    asked = []

    def refuse(*words: Any) -> int:
        asked.append(words)
        raise OSError(refusal, "no such flag")

    monkeypatch.setattr(os, "pwritev", refuse)
    disk = Watched()
    disk.write_synced(fd, b"two\n")
    disk.write_synced(fd, b"three\n")
    assert path.read_bytes() == b"one\ntwo\nthree\n"
    assert (disk.writes, disk.syncs, len(asked)) == ([b"two\n", b"three\n"], 2, 1)


def test_a_failed_call_is_not_tried_again(
    appended: tuple[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails is not asked the other way: what it holds is unknown."""
    fd, path = appended

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(os, "pwritev", fail)
    disk = Watched()
    with pytest.raises(OSError, match="the disk is gone"):
        disk.write_synced(fd, b"two\n")
    assert (path.read_bytes(), disk.writes) == (b"one\n", [])


def test_what_was_not_synced_is_with_what_follows(tmp_path: Path) -> None:
    """One call covers its own bytes alone: after an unsynced write the file is synced whole."""
    disk = CountingDisk()
    files = RunFiles(tmp_path / "run", disk=disk)
    files.create()
    files.start_segment(1)
    disk.calls.clear()

    def one_call(fd: int, data: bytes) -> None:
        disk.calls["one call"] += 1
        os.write(fd, data)

    disk.write_synced = one_call  # type: ignore[method-assign]
    files.append(b"a\n", sync=True)
    files.append(b"b\n", sync=False)
    files.append(b"c\n", sync=True)
    files.append(b"d\n", sync=True)
    files.close()
    assert disk.calls == {"one call": 2, "write": 2, "sync": 1}


@pytest.mark.both_loops
async def test_a_hand_works_in_order_and_off_the_loop() -> None:
    """Jobs are done one after the other, in a thread of their own, as they were given."""
    thread = DiskThread()
    done: list[tuple[int, bool]] = []
    loops = threading.get_ident()

    def work(n: int) -> None:
        done.append((n, threading.get_ident() == loops))

    try:
        await asyncio.gather(*(thread.submit(work, n) for n in range(50)))
    finally:
        await asyncio.to_thread(thread.stop)
    assert done == [(n, False) for n in range(50)]


@pytest.mark.both_loops
async def test_a_hand_reports_what_was_raised_and_goes_on() -> None:
    """A job's failure is its own."""
    thread = DiskThread()

    def fail() -> None:
        raise OSError(errno.ENOSPC, "full")

    try:
        with pytest.raises(OSError, match="full"):
            await thread.submit(fail)
        await thread.submit(lambda: None)
    finally:
        await asyncio.to_thread(thread.stop)


async def test_a_job_that_is_no_longer_awaited_is_done() -> None:
    """A caller that is cancelled while its job runs neither stops the job nor gets its result."""
    thread = DiskThread()
    held, begun, ended = threading.Event(), threading.Event(), []

    def work() -> None:
        begun.set()
        held.wait(10)
        ended.append(True)

    given = thread.submit(work)
    await asyncio.to_thread(begun.wait, 10)
    given.cancel()
    held.set()
    await asyncio.to_thread(thread.stop)
    await asyncio.to_thread(thread.stop)
    assert ended == [True]

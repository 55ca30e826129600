"""Disks that are really full, really read-only, or that go at any one call: beside the matrix.

Invariants 1, 4, 9 and 12 of the package's README, whichever call to the disk it is that fails.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.disk import Disk
from smartsearch_sidecar.ledger.recovery import Ending
from smartsearch_sidecar.ledger.verify import verify
from tests.crash.harness import expected_cause
from tests.fakes.provider import FakeProvider
from tests.fakes.served import served

CALLS_MAX = 60  # a start, a few answers and a latch make far fewer

# --- a real filesystem that is full ---------------------------------------------------------------


@pytest.fixture
def small_filesystem() -> Iterator[Path]:
    """One megabyte of a real filesystem.

    Not under pytest's own folder: a mount that a killed session leaves there makes every later
    session fail at its end, when it clears that folder.
    """
    place = Path(tempfile.mkdtemp(prefix="smartsearch-disk-"))
    try:
        if _mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)):
            pytest.skip("this user may not mount a filesystem")
        try:
            yield place
        finally:
            subprocess.run(["umount", str(place)], check=True)
    finally:
        place.rmdir()


def _mount(*arguments: str) -> int:
    return subprocess.run(["mount", *arguments], check=False, capture_output=True).returncode


@pytest.mark.process
@pytest.mark.may_skip(reason="mounting needs root; the file layer fills up everywhere")
async def test_real_disk_full(small_filesystem: Path) -> None:
    """Answers stop at the first that does not fit; all before it are on the disk; exit code 4."""
    directory = small_filesystem / "run"
    provider = FakeProvider()
    provider.answer = lambda query: [{"id": query, "contents": query.ljust(50_000, "x")}]
    told: list[str] = []
    async with served(directory, provider=provider) as run:
        status, value = await run.execute("query 0")
        while status == 200 and len(told) < 100:
            told.append(f"query {len(told)}")
            status, value = await run.execute(f"query {len(told)}")
        assert (status, value["error"]["code"]) == (503, "ledger_failed")
        assert (await run.health())[1]["cause"]["cause"] == "ledger_failed"
        assert await run.stop() == 4
    found = await asyncio.to_thread(verify, directory)
    assert found.problem is None or found.ending is Ending.TORN
    answers = [data["documents"][0]["id"] for data in answered(directory)]
    assert answers[: len(told)] == told
    assert len(told) > 10


@pytest.mark.process
@pytest.mark.may_skip(reason="mounting needs root; the file layer is read-only everywhere")
async def test_real_read_only_filesystem(small_filesystem: Path) -> None:
    """A place that cannot be written to is told in a sentence before anything is served."""
    (small_filesystem / "old").mkdir(mode=0o700)
    assert not _mount("-o", "remount,ro", str(small_filesystem))
    for name, resume in (("new", False), ("old", True)):
        with pytest.raises(errors.UsageError, match="Read-only file system"):
            async with served(small_filesystem / name, resume=resume):
                pass


def answered(directory: Path) -> list[dict[str, Any]]:
    """The data of every answer whose line is whole."""
    records = [
        json.loads(line)
        for segment in sorted((directory / "journal").iterdir())
        for line in segment.read_bytes().splitlines(keepends=True)
        if line.endswith(b"\n")
    ]
    return [record["data"] for record in records if record["kind"] == "retrieval.answered"]


# --- every call to the disk -----------------------------------------------------------------------


class NthCallFails(Disk):
    """The ``nth`` call fails, and every one after it as well: a disk that has gone.

    Not the calls for ``endpoints.json``, which is no part of the ledger.
    """

    def __init__(self, nth: int) -> None:
        self.left = nth
        self._apart: set[int] = set()

    @property
    def struck(self) -> bool:
        """Whether any call has failed."""
        return self.left <= 0

    def _count(self, fd: int = -1) -> None:
        if fd in self._apart:
            return
        self.left -= 1
        if self.struck:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def open(self, path: Path, flags: int) -> int:
        if "endpoints" in path.name:
            fd = super().open(path, flags)
            self._apart.add(fd)
            return fd
        self._count()
        fd = super().open(path, flags)
        self._apart.discard(fd)
        return fd

    def write(self, fd: int, data: bytes) -> None:
        self._count(fd)
        super().write(fd, data)

    def overwrite(self, fd: int, data: bytes) -> None:
        self._count()
        super().overwrite(fd, data)

    def truncate(self, fd: int, size: int) -> None:
        self._count()
        super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        self._count()
        super().sync(fd)

    def sync_directory(self, path: Path) -> None:
        self._count()
        super().sync_directory(path)


async def served_and_stopped(directory: Path, **how: Any) -> dict[str, Any] | str:
    """What health says of a run, which is then stopped; or why it could not begin."""
    try:
        async with served(directory, **how) as run:
            status, health = await run.health()
            assert status == (200 if health["cause"] is None else 503)
            code = await run.stop()
    except errors.SidecarError as exc:
        return exc.message
    assert code == (0 if run.service.run.state.cause is None else 4)
    return dict(health)


def found_cause(directory: Path) -> str | None:
    """What a restart has to give as its cause, where the run was begun at all."""
    return expected_cause(directory) if (directory / "journal").exists() else None


async def test_disk_that_goes_while_a_run_begins(tmp_path: Path) -> None:
    """Whichever call it is, the start ends in a named error, and a later one goes on from there."""
    for nth in range(1, CALLS_MAX):
        directory, disk = tmp_path / str(nth), NthCallFails(nth)
        begun = await served_and_stopped(directory, disk=disk)
        assert isinstance(begun, dict) or "Input/output error" in begun
        expected = await asyncio.to_thread(found_cause, directory)
        after = await served_and_stopped(directory, resume=True, trainer_stopped=True)
        assert isinstance(after, dict), after
        assert (after["cause"] and after["cause"]["cause"]) == expected
        if not disk.struck:
            break
    assert 12 < nth < CALLS_MAX - 1


async def test_disk_that_goes_while_a_run_is_served(tmp_path: Path) -> None:
    """Whichever call it is: every answer of 200 is recorded, the end is 4, and stays so."""
    queries = [f"q {number}" for number in range(3)]
    for nth in range(1, CALLS_MAX):
        directory, disk = tmp_path / str(nth), NthCallFails(10**9)
        async with served(directory, disk=disk) as run:
            disk.left = nth
            told = [query for query in queries if (await run.execute(query))[0] == 200]
            await run.internal("POST", "/latch", {"reason": "by hand"})
            assert await run.stop() == 4
        recorded = [data["documents"][0]["id"].partition("#")[0] for data in answered(directory)]
        assert recorded[: len(told)] == told
        after = await served_and_stopped(directory, resume=True, trainer_stopped=True)
        assert isinstance(after, dict), after
        assert after["cause"] is not None
        if not disk.struck:
            break
    assert 10 < nth < CALLS_MAX - 1


async def test_disk_that_goes_while_a_run_is_resumed(tmp_path: Path) -> None:
    """Whichever call it is, nothing of the history is lost, and the run is never healthy again."""
    # A copy of a run is the same run: no key may name where it lies.
    keys: dict[str, Any] = {"retrieval__bm25__index": "never-opened"}
    torn = tmp_path / "torn"
    async with served(torn, **keys) as run:
        await run.execute("q")
        await run.stop()
    segment = torn / "journal" / "000001.jsonl"
    lines = b"".join(segment.read_bytes().splitlines(keepends=True)[:-1])
    segment.write_bytes(lines + b'{"seq":')
    for nth in range(1, CALLS_MAX):
        directory, disk = tmp_path / str(nth), NthCallFails(nth)
        shutil.copytree(torn, directory)
        segment = directory / "journal" / "000001.jsonl"
        begun = await served_and_stopped(
            directory, disk=disk, resume=True, trainer_stopped=True, **keys
        )
        assert isinstance(begun, dict) or "Input/output error" in begun
        assert segment.read_bytes().startswith(lines)
        after = await served_and_stopped(directory, resume=True, trainer_stopped=True, **keys)
        assert isinstance(after, dict), after
        assert after["cause"]["cause"] in ("unclean_restart", "ledger_failed")
        if not disk.struck:
            break
    assert 15 < nth < CALLS_MAX - 1


# --- what is not the ledger's ---------------------------------------------------------------------


class NoEndpoints(Disk):
    """A disk that takes everything but ``endpoints.json``."""

    def open(self, path: Path, flags: int) -> int:
        if "endpoints" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().open(path, flags)


async def test_endpoints_that_cannot_be_written(tmp_path: Path) -> None:
    """A run whose endpoints cannot be written is not served: a named error, and a free lock."""
    message = await served_and_stopped(tmp_path / "run", disk=NoEndpoints())
    assert isinstance(message, str)
    assert "No space left" in message
    after = await served_and_stopped(tmp_path / "run", resume=True, trainer_stopped=True)
    assert isinstance(after, dict), after


async def test_endpoints_that_cannot_be_removed(tmp_path: Path) -> None:
    """A leftover address does not cost a run its end or its exit code."""
    async with served(tmp_path / "run") as run:
        (run.directory / "endpoints.json").unlink()
        (run.directory / "endpoints.json").mkdir()  # what root cannot unlink either
        assert await run.stop() == 0


class CannotClose(FakeProvider):
    """A provider whose end is no better than its life."""

    async def close(self) -> None:
        raise RuntimeError("still busy")


async def test_provider_that_cannot_be_closed(tmp_path: Path) -> None:
    """Every answer was recorded by then: so is the end, and the exit code is the run's."""
    async with served(tmp_path / "run", provider=CannotClose()) as run:
        assert (await run.execute("q"))[0] == 200
        assert await run.stop() == 0
    after = await served_and_stopped(tmp_path / "run", resume=True, trainer_stopped=True)
    assert isinstance(after, dict), after
    assert after["cause"] is None

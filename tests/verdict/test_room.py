"""A disk and its inodes are used up at the moment of a failure, and the failure is not forgotten.

On a real filesystem of a few pages where this process may mount one, and on a disk of the tests'
elsewhere. Whatever still fits then: the file for the latch, the record, either or neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.file import LATCH, ROOM, ROOM_BYTES, RunFiles
from smartsearch_sidecar.ledger.verify import verify
from tests.fakes.disk import FailingSync, FullDisk
from tests.fakes.helper import FakeHelper
from tests.fakes.provider import FakeProvider
from tests.fakes.rewarded import Rewarded, rewarded

LIBC = ctypes.CDLL(None, use_errno=True)
DETACH = 2
BYTES, INODES = 4 << 20, 40
LONG = "a reason that no page has room for " * 300


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A filesystem of its own, not under the folder that pytest removes."""
    place = Path(tempfile.mkdtemp(prefix="small-disk-"))
    options = f"size={BYTES},nr_inodes={INODES},mode=700".encode()
    try:
        if LIBC.mount(b"tmpfs", os.fsencode(place), b"tmpfs", 0, options):
            pytest.skip("no filesystem can be mounted here")
        try:
            yield place
        finally:
            LIBC.umount2(os.fsencode(place), DETACH)
    finally:
        place.rmdir()


def use_up(disk: Path, *, pages: bool = True) -> None:
    """Takes every page, where wanted, and every inode."""
    with (disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while pages:
            filler.write(bytes(4096))
    with contextlib.suppress(OSError):
        for number in range(INODES):
            (disk / f"inode-{number}").touch()
    with pytest.raises(OSError, match="No space left"):
        (disk / "one-more").touch()


def make_free(disk: Path) -> None:
    """Gives back what ``use_up`` took."""
    for path in (disk / "filler", *disk.glob("inode-*")):
        path.unlink()


@pytest.fixture
async def helper() -> AsyncIterator[FakeHelper]:
    """One helper for a run and its resumption: its address is part of the claim."""
    fake = FakeHelper()
    await fake.start()
    yield fake
    await fake.stop()


async def search(scored: Rewarded) -> None:
    """A record that does not fit."""
    assert (await scored.run.execute("x" * 6000))[0] == 503


async def close_by_hand(scored: Rewarded) -> None:
    """The latch's own record does not fit."""
    await scored.run.internal("POST", "/latch", {"reason": LONG})


async def close_briefly(scored: Rewarded) -> None:
    """The latch's record fits, and its file does not."""
    await scored.run.internal("POST", "/latch", {"reason": "by hand"})


Moment = Callable[[Rewarded], Awaitable[None]]
MOMENTS: dict[str, tuple[Moment, bool, str]] = {
    "a batch": (search, True, "ledger_failed"),
    "the latch's record": (close_by_hand, True, "operator"),
    "the latch's file": (close_briefly, False, "operator"),
}


async def outcome(tmp_path: Path, **keys: Any) -> tuple[str, str | None]:
    """What a restart comes to: the state and the cause, or that it was refused."""
    try:
        async with rewarded(tmp_path, resume=True, **keys) as scored:
            _, health = await scored.run.health()
            status, _ = await scored.run.internal("POST", "/checkpoints", {"step": 1})
            assert status != 201
            return health["state"], health["cause"]["cause"]
    except errors.SidecarError:
        return "refused", None


@pytest.mark.may_skip("mounting a filesystem takes root")
@pytest.mark.parametrize("on_unclean", ["latch", "report"])
@pytest.mark.parametrize("moment", sorted(MOMENTS))
async def test_nothing_left_forgets_no_latch(
    tmp_path: Path, small_disk: Path, helper: FakeHelper, moment: str, on_unclean: str
) -> None:
    """Started again on the full disk and on one with room, the run is as failed as it was."""
    fail, pages, cause = MOMENTS[moment]
    keys: dict[str, Any] = {"name": str(small_disk / "run"), "helper": helper}
    keys["run__on_unclean_restart"] = on_unclean
    async with rewarded(tmp_path, **keys) as scored:
        assert (await scored.run.execute("before"))[0] == 200
        await asyncio.to_thread(use_up, small_disk, pages=pages)
        await fail(scored)
        _, health = await scored.run.health()
        assert (health["state"], health["cause"]["cause"]) == ("failed", cause)
        await scored.run.stop()
    assert await outcome(tmp_path, **keys) in (("refused", None), ("failed", cause))
    await asyncio.to_thread(make_free, small_disk)
    for _ in range(2):
        assert await outcome(tmp_path, **keys) == ("failed", cause)


@pytest.mark.may_skip("mounting a filesystem takes root")
@pytest.mark.parametrize("on_unclean", ["latch", "report"])
async def test_no_inode_for_the_next_segment(
    tmp_path: Path, small_disk: Path, helper: FakeHelper, on_unclean: str
) -> None:
    """The journal's next file cannot be made: room for the latch is there after each change."""
    provider = FakeProvider()
    provider.answer = lambda query: [{"id": "1", "contents": "x" * 400_000}]
    keys: dict[str, Any] = {"name": str(small_disk / "run"), "helper": helper}
    keys |= {"run__on_unclean_restart": on_unclean, "ledger__segment_mib": 1, "provider": provider}
    async with rewarded(tmp_path, **keys) as scored:
        for number in range(4):  # one change behind it, and none to come but the next one
            assert (await scored.run.execute(str(number)))[0] == 200
        while scored.run.daemon.files.segment_bytes < 1 << 20:
            assert (await scored.run.execute(os.urandom(4).hex()))[0] == 200
        await asyncio.to_thread(use_up, small_disk, pages=False)
        assert (await scored.run.execute("one more"))[0] == 503
        await scored.run.stop()
        assert scored.run.daemon.files.segment == 2
    await asyncio.to_thread(make_free, small_disk)
    assert await outcome(tmp_path, **keys) == ("failed", "ledger_failed")


@pytest.mark.parametrize("names", [True, False])
@pytest.mark.parametrize("on_unclean", ["latch", "report"])
async def test_the_first_cause_is_kept(
    tmp_path: Path, helper: FakeHelper, on_unclean: str, names: bool
) -> None:
    """Where the record of the failure is what does not fit, its cause is in the room all the same,
    also beside a ``latch.json`` that has a name and no byte.
    """
    disk = FullDisk(10**9, names=names)
    keys: dict[str, Any] = {"run__on_unclean_restart": on_unclean, "helper": helper}
    async with rewarded(tmp_path, disk=disk, **keys) as scored:
        disk.left = 0
        await scored.run.internal("POST", "/latch", {"reason": LONG})
        await scored.run.stop()
        run = scored.run.directory
    assert (run / LATCH).exists() == names
    found = await asyncio.to_thread(verify, run)
    assert found.as_json()["cause"]["cause"] == "operator"
    async with rewarded(tmp_path, resume=True, **keys) as scored:
        _, health = await scored.run.health()
        assert health["cause"]["cause"] == "operator"
        assert health["cause"]["detail"] == LONG[:500]
        (record,) = [one for one in scored.run.records() if one["kind"] == "latch.closed"]
        assert record["data"]["cause"] == "operator"


async def test_a_latch_that_no_record_has_outlives_its_file(
    tmp_path: Path, helper: FakeHelper
) -> None:
    """The ledger failed and its disk takes files again: ``latch.json``, which a person removes, and
    the room say it both.
    """
    disk = FailingSync(10**9)
    keys: dict[str, Any] = {"run__on_unclean_restart": "report", "helper": helper}
    async with rewarded(tmp_path, disk=disk, **keys) as scored:
        assert (await scored.run.execute("before"))[0] == 200
        disk.fails_at = disk.syncs + 1
        await search(scored)
        await scored.run.stop()
        run = scored.run.directory
    assert b"ledger_failed" in (run / LATCH).read_bytes()
    (run / LATCH).unlink()
    async with rewarded(tmp_path, resume=True, **keys) as scored:
        _, health = await scored.run.health()
        assert (health["state"], health["cause"]["cause"]) == ("failed", "ledger_failed")


def test_the_room_is_written_once(tmp_path: Path) -> None:
    """The first cause stays, over a later one and over a restart, and the room keeps its size."""
    first = json.dumps({"cause": "first"}).encode() + b"\n"
    files = RunFiles(tmp_path / "run", disk=FullDisk(10**9, names=False))
    files.create()
    files.create_only("claim.json", b"{}")
    files.set_room_aside()
    assert isinstance(files.disk, FullDisk)
    files.disk.left = 0
    files.leave_latch(first)
    with pytest.raises(FileExistsError):
        files.leave_latch(b'{"cause":"second"}\n')
    files.close()
    again = RunFiles(tmp_path / "run", disk=FullDisk(0, names=False))
    again.resume()
    again.set_room_aside()
    with pytest.raises(FileExistsError):
        again.leave_latch(b'{"cause":"third"}\n')
    again.close()
    assert (tmp_path / "run" / ROOM).read_bytes() == first.ljust(ROOM_BYTES)


def test_a_room_that_was_cut_short_is_made_whole(tmp_path: Path) -> None:
    """A start that ended while it was written leaves bytes that mean nothing, or too few."""
    files = RunFiles(tmp_path / "run")
    files.create()
    (tmp_path / "run" / ROOM).write_bytes(b"  " + bytes(40))
    files.set_room_aside()
    assert (tmp_path / "run" / ROOM).stat().st_size == ROOM_BYTES
    files.leave_latch(b"{}\n")
    files.close()


async def test_a_run_without_the_room_goes_on(tmp_path: Path, helper: FakeHelper) -> None:
    """A run of a version that set no room aside is resumed, and has it from then on."""
    async with rewarded(tmp_path, helper=helper) as scored:
        assert (await scored.run.execute("before"))[0] == 200
    room = tmp_path / "run" / ROOM
    room.unlink()
    async with rewarded(tmp_path, helper=helper, resume=True) as scored:
        status, health = await scored.run.health()
        assert (status, health["retrieval_attempts"]) == (200, 1)
        assert room.stat().st_size == ROOM_BYTES

"""Files of a run that are removed, replaced or changed while it is served, and disks that stall.

Each row is done to the files of a real daemon between two searches. The run is failed a second
later without another request, at the next batch, and at the gate, each tried in a run of its own.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger import writer
from smartsearch_sidecar.process.daemon import Daemon
from tests.fakes.disk import FullDisk
from tests.fakes.faults import HeldDisk
from tests.fakes.helper import FakeHelper
from tests.fakes.provider import FakeProvider
from tests.fakes.rewarded import rewarded
from tests.fakes.served import Served, configured, served
from tests.fakes.until import until

Act = Callable[[Path], object]


def segment(run: Path) -> Path:
    return run / "journal" / "000001.jsonl"


def replaced(path: Path) -> None:
    """The same bytes in another file, as a copy tool leaves them."""
    beside = path.with_name("beside")
    shutil.copy2(path, beside)
    beside.rename(path)


def cut(path: Path, to: int) -> None:
    os.truncate(path, to)


ACTS: dict[str, Act] = {
    "directory removed": shutil.rmtree,
    "directory renamed": lambda run: run.rename(run.with_name("elsewhere")),
    "journal removed": lambda run: shutil.rmtree(run / "journal"),
    "segment unlinked": lambda run: segment(run).unlink(),
    "segment replaced": lambda run: replaced(segment(run)),
    "segment truncated": lambda run: cut(segment(run), segment(run).stat().st_size - 10),
    "segment appended to": lambda run: segment(run).write_bytes(segment(run).read_bytes() + b"x"),
    "claim removed": lambda run: (run / "claim.json").unlink(),
    "claim changed": lambda run: (run / "claim.json").write_bytes(b"{}"),
    "claim overwritten": lambda run: flip(run / "claim.json", 100),
    "claim replaced": lambda run: replaced(run / "claim.json"),
    "lock removed": lambda run: (run / "lock").unlink(),
    "room removed": lambda run: (run / "latch.room").unlink(),
    "room replaced": lambda run: replaced(run / "latch.room"),
    "latch written by another": lambda run: (run / "latch.json").write_bytes(b"{}"),
}
AT_ITS_OWN_PACE = "segment unlinked"
SEEN_AT_THE_NEXT_BATCH = {name for name in ACTS if name.split()[0] in ("directory", "segment")} | {
    "journal removed"
}


@pytest.fixture
async def helper() -> AsyncIterator[FakeHelper]:
    """One helper for a run and its resumption: its address is part of the claim."""
    fake = FakeHelper()
    await fake.start()
    yield fake
    await fake.stop()


def lost(run: Served) -> bool:
    cause = run.service.run.state.cause
    return cause is not None and cause.cause == "ledger_lost"


@pytest.mark.parametrize("name", sorted(ACTS))
async def test_gate_looks_itself(tmp_path: Path, name: str) -> None:
    """The first checkpoint after it is refused, and health says why."""
    async with served(tmp_path / "run") as run:
        assert (await run.execute("before"))[0] == 200
        await asyncio.to_thread(ACTS[name], run.directory)
        status, _ = await run.internal("POST", "/checkpoints", {"step": 1})
        assert status == 503
        assert lost(run)
        _, health = await run.health()
        assert (health["state"], health["cause"]["cause"]) == ("failed", "ledger_lost")
        assert str(tmp_path) not in health["cause"]["detail"]


@pytest.mark.parametrize("name", sorted(ACTS))
async def test_run_looks_by_itself(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any request the run has failed soon after."""
    if name != AT_ITS_OWN_PACE:  # what it finds does not depend on how often it looks
        monkeypatch.setattr(writer, "LOOK_SECONDS", 0.02)
    async with served(tmp_path / "run") as run:
        await asyncio.to_thread(ACTS[name], run.directory)
        await until(lambda: lost(run))


def flip(path: Path, at: int) -> None:
    """One byte is another, and size and file are the same."""
    with path.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 1]))


async def test_a_checkpoint_reads_back_what_was_written(tmp_path: Path) -> None:
    """Bytes that were overwritten in place are found before a checkpoint covers them."""
    async with served(tmp_path / "run") as run:
        assert (await run.execute("one"))[0] == 200
        status, first = await run.internal("POST", "/checkpoints", {"step": 1})
        assert status == 201
        assert 0 < first["read_back_bytes"] < segment(run.directory).stat().st_size
        size = segment(run.directory).stat().st_size
        assert (await run.execute("two"))[0] == 200
        flip(segment(run.directory), size + 200)
        status, _ = await run.internal("POST", "/checkpoints", {"step": 2})
        assert status == 503
        assert lost(run)


async def test_segments_are_read_back_each_once(tmp_path: Path) -> None:
    """Over many segments each checkpoint reads what came since the one before, and no more."""
    provider = FakeProvider()
    provider.answer = lambda query: [{"id": "1", "contents": "x" * 400_000}]
    keys: dict[str, Any] = {"ledger__segment_mib": 1}
    async with served(tmp_path / "run", provider=provider, **keys) as run:
        read = 0
        for step in range(4):
            for number in range(2):
                assert (await run.execute(f"{step} {number}"))[0] == 200
            status, receipt = await run.internal("POST", "/checkpoints", {"step": step})
            assert status == 201
            read += receipt["read_back_bytes"]
        written = [path.stat().st_size for path in (run.directory / "journal").iterdir()]
        assert len(written) > 2
        assert sum(written) - 5_000 < read < sum(written)
    keys |= {"resume": True, "trainer_stopped": True}
    async with served(tmp_path / "run", provider=provider, **keys) as run:
        wanted = {"step": 9, "allow_idle": True}
        status, receipt = await run.internal("POST", "/checkpoints", wanted)
        assert status == 201
        assert 0 < receipt["read_back_bytes"] < 5_000


@pytest.mark.parametrize("name", sorted(SEEN_AT_THE_NEXT_BATCH))
async def test_next_batch_is_not_answered(tmp_path: Path, name: str) -> None:
    """A search after it gets no answer, and nothing more is written."""
    async with served(tmp_path / "run") as run:
        assert (await run.execute("before"))[0] == 200
        await asyncio.to_thread(ACTS[name], run.directory)
        assert (await run.execute("after"))[0] != 200
        assert lost(run)


async def test_a_renamed_directory_keeps_its_latch(tmp_path: Path, helper: FakeHelper) -> None:
    """Renamed back and resumed, the run is still failed: the latch was left where the files are."""
    directory = tmp_path / "run"
    keys: dict[str, Any] = {"run__on_unclean_restart": "report"}
    async with rewarded(tmp_path, helper=helper, **keys) as scored:
        directory.rename(tmp_path / "elsewhere")
        assert (await scored.run.execute("after"))[0] != 200
        await scored.run.stop()
    (tmp_path / "elsewhere").rename(directory)
    async with rewarded(tmp_path, helper=helper, resume=True, **keys) as scored:
        assert lost(scored.run)


async def test_a_second_process_is_refused_without_the_lock_file(tmp_path: Path) -> None:
    """The folder itself is locked: a lock file that was removed lets no second process in."""
    async with served(tmp_path / "run") as run:
        (run.directory / "lock").unlink()
        second = Daemon(configured(run.directory), provider=FakeProvider(), resume=True)
        with pytest.raises(errors.UsageError, match="is being served by another process"):
            await second.run()


@pytest.mark.parametrize(
    ("what", "room"), [("journal", True), ("journal", False), ("journal/000001.jsonl", True)]
)
async def test_a_history_that_was_lost_is_no_new_run(tmp_path: Path, what: str, room: bool) -> None:
    """After a clean stop the journal is removed: the directory says that a history existed. Of an
    older version's run, which set no room aside, the claim says it where the folder is gone.
    """
    directory = tmp_path / "run"
    async with served(directory) as run:
        assert (await run.execute("before"))[0] == 200
    if not room:
        (directory / "latch.room").unlink()
    gone = directory / what
    await asyncio.to_thread(shutil.rmtree if gone.is_dir() else os.unlink, gone)
    with pytest.raises(errors.LedgerCorrupt, match="its history is lost"):
        async with served(directory, resume=True):
            pass


@pytest.mark.parametrize("on_unclean", ["latch", "report"])
async def test_a_full_disk_forgets_no_latch(
    tmp_path: Path, helper: FakeHelper, on_unclean: str
) -> None:
    """Neither a byte nor a new file fits when the run fails; after a restart it is failed still."""
    disk = FullDisk(10**9, names=False)
    keys: dict[str, Any] = {"run__on_unclean_restart": on_unclean}
    async with rewarded(tmp_path, helper=helper, disk=disk, **keys) as scored:
        run = scored.run
        assert (await run.execute("before"))[0] == 200
        disk.left = 0
        assert (await run.execute("full"))[0] == 503
        assert run.service.run.state.closed
        await run.stop()
        assert not (run.directory / "latch.json").exists()
    async with rewarded(tmp_path, helper=helper, resume=True, **keys) as scored:
        cause = scored.run.service.run.state.cause
        assert cause is not None
        assert cause.cause == "ledger_failed"
        status, _ = await scored.run.internal("POST", "/checkpoints", {"step": 1})
        assert status == 409
        assert "latch.closed" in [record["kind"] for record in scored.run.records()]


async def test_a_disk_that_stands_still_is_a_failure(tmp_path: Path) -> None:
    """A write that does not end in time fails what waits for it, and the run; later, too."""
    disk = HeldDisk()
    async with served(tmp_path / "run", disk=disk, ledger__stall_seconds=1) as run:
        disk.let_through.clear()
        status, answer = await run.execute("held")
        assert (status, answer["error"]["code"]) == (503, "ledger_stalled")
        disk.let_through.set()
        _, health = await run.health(settle=1.0)
        assert (health["state"], health["cause"]["cause"]) == ("failed", "ledger_stalled")


async def test_an_answer_recorded_after_its_deadline_is_a_failure(tmp_path: Path) -> None:
    """The search was in time and its record was not: the rollout has left by then."""
    disk = HeldDisk()
    keys: dict[str, Any] = {"ledger__stall_seconds": 60, "execute__deadline_seconds": 0.2}
    async with served(tmp_path / "run", disk=disk, **keys) as run:
        disk.let_through.clear()
        asked = asyncio.create_task(run.execute("held"))
        await until(lambda: not run.service.run.writer.idle)
        await asyncio.sleep(0.3)  # past the deadline, which is what is tested
        disk.let_through.set()
        status, answer = await asked
        assert (status, answer["error"]["code"]) == (504, "deadline")
        _, health = await run.health()
        assert health["cause"]["cause"] == "deadline"

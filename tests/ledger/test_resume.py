"""A run that goes on: from a clean end as if nothing had been, from any other end closed."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.process.daemon import Daemon
from tests.fakes.process import running, start
from tests.fakes.provider import FakeProvider
from tests.fakes.raised import raises
from tests.fakes.served import configured, read_records, served
from tests.fakes.until import until


def journal(directory: Path) -> Path:
    """The only segment of a small run."""
    (segment,) = (directory / "journal").iterdir()
    return segment


def drop_lines(directory: Path, count: int) -> None:
    """Takes the last lines off a journal: an earlier valid history, as after a power cut."""
    segment = journal(directory)
    lines = segment.read_bytes().splitlines(keepends=True)
    segment.write_bytes(b"".join(lines[: len(lines) - count]))


async def test_clean_end_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    """After ``run.closed`` a resumed run is healthy, and its numbers continue."""
    directory = tmp_path / "run"
    async with served(directory) as run:
        await run.execute("one")
        assert await run.stop() == 0
    async with served(directory, resume=True, trainer_stopped=True) as run:
        status, health = await run.health()
        assert (status, health["restarts"], health["retrieval_attempts"]) == (200, 1, 1)
        assert (await run.execute("two"))[0] == 200
        assert await run.stop() == 0
    records = read_records(directory)
    numbers = [r["number"] for r in records if r["kind"] == "retrieval.requested"]
    assert numbers == [1, 2]
    assert [record["seq"] for record in records] == list(range(1, len(records) + 1))
    for before, after in itertools.pairwise(records):
        assert after["prev"] == before["sum"]


async def test_missing_directory_is_started(tmp_path: Path) -> None:
    """``--resume`` on nothing begins the run: a supervisor needs one command."""
    async with served(tmp_path / "run", resume=True) as run:
        assert (await run.health())[1]["restarts"] == 0
        assert [record["kind"] for record in run.records()] == ["run.claimed"]


async def test_end_without_run_closed_closes_the_latch(tmp_path: Path) -> None:
    """What was asked while the process was down became rollout text: ``unclean_restart``."""
    directory = tmp_path / "run"
    async with served(directory) as run:
        await run.execute("one")
        await run.stop()
    drop_lines(directory, 1)
    async with served(directory, resume=True) as run:
        status, health = await run.health()
        assert (status, health["cause"]["cause"]) == (503, "unclean_restart")
        assert (await run.execute("two"))[0] == 502
        assert await run.stop() == 4
    assert json.loads((directory / "latch.json").read_bytes())["cause"] == "unclean_restart"


async def test_unsettled_search_closes_the_latch(tmp_path: Path) -> None:
    """A search admitted and never settled is named: ``unresolved_after_restart``."""
    directory = tmp_path / "run"
    async with served(directory) as run:
        await run.execute("one")
        await run.stop()
    drop_lines(directory, 2)
    async with served(directory, resume=True) as run:
        _, health = await run.health()
        assert health["cause"]["cause"] == "unresolved_after_restart"
        assert "1" in health["cause"]["detail"]
        assert await run.stop() == 4


async def test_failed_run_stays_failed(tmp_path: Path) -> None:
    """The latch survives every restart with its first cause."""
    directory = tmp_path / "run"
    async with served(directory) as run:
        await run.internal("POST", "/latch", {"reason": "by hand"})
        assert await run.stop() == 4
    for _ in range(2):
        async with served(directory, resume=True) as run:
            _, health = await run.health()
            assert (health["cause"]["cause"], health["cause"]["detail"]) == ("operator", "by hand")
            assert (await run.execute("q"))[0] == 502
            assert await run.stop() == 4
    kinds = [record["kind"] for record in read_records(directory)]
    assert kinds.count("latch.closed") == 1


async def test_torn_tail_is_set_aside_and_trimmed(tmp_path: Path) -> None:
    """Half a line, from which no answer was sent, is kept beside the journal and cut from it."""
    directory = tmp_path / "run"
    async with served(directory) as run:
        await run.execute("one")
        await run.stop()
    whole = journal(directory).read_bytes()
    journal(directory).write_bytes(whole + b'{"seq":5,"at":"')
    async with served(directory, resume=True) as run:
        assert await run.stop() in (0, 4)
    (kept,) = directory.glob("torn-*")
    assert kept.read_bytes() == b'{"seq":5,"at":"'
    assert journal(directory).read_bytes().startswith(whole)
    resumed = [r for r in read_records(directory) if r["kind"] == "run.resumed"]
    assert resumed[0]["data"]["torn_bytes"] == 15


async def test_damage_is_refused_and_nothing_touched(tmp_path: Path) -> None:
    """A flipped byte in the middle is no history of ours: exit 2, not a byte changed."""
    directory = tmp_path / "run"
    async with served(directory) as run:
        await run.execute("one")
        await run.stop()
    raw = bytearray(journal(directory).read_bytes())
    raw[len(raw) // 2] ^= 1
    journal(directory).write_bytes(raw)
    with pytest.raises(errors.LedgerCorrupt, match="cannot be resumed"):
        async with served(directory, resume=True):
            pass
    assert journal(directory).read_bytes() == bytes(raw)


@pytest.mark.parametrize(
    "keys, named",
    [
        ({"execute__max_calls": 7}, "max_calls"),
        ({"profile": "reference"}, "profile"),
        ({"execute__environment": "another"}, "environment"),
    ],
)
async def test_another_claim_is_refused(tmp_path: Path, keys: dict[str, Any], named: str) -> None:
    """A run is resumed with the configuration it was claimed with; what differs is named."""
    directory = tmp_path / "run"
    async with served(directory) as run:
        await run.stop()
    before = journal(directory).read_bytes()
    with raises(errors.RUN_DIRECTORY, match=named):
        async with served(directory, resume=True, **keys):
            pass
    assert journal(directory).read_bytes() == before
    assert (directory / "claim.json").exists()


async def test_another_corpus_is_refused(tmp_path: Path) -> None:
    """The corpus is part of the claim."""
    directory = tmp_path / "run"
    async with served(directory) as run:
        await run.stop()
    provider = FakeProvider()
    provider.identity_values["corpus_sha256"] = "d" * 64
    with raises(errors.RUN_DIRECTORY, match="corpus_sha256"):
        async with served(directory, provider=provider, resume=True):
            pass


async def test_new_run_names_the_one_it_follows(tmp_path: Path) -> None:
    """``run.previous`` puts the old head and last receipt into the new claim."""
    async with served(tmp_path / "old") as run:
        await run.execute("one")
        _, receipt = await run.internal("POST", "/checkpoints", {"step": 5})
        await run.internal("POST", "/latch", {"reason": "wrong learning rate"})
        await run.stop()
    last = read_records(tmp_path / "old")[-1]
    async with served(tmp_path / "new", run__previous=str(tmp_path / "old")) as run:
        claim = json.loads((run.directory / "claim.json").read_bytes())
        previous = claim["previous"]
        assert (previous["seq"], previous["head"]) == (last["seq"], last["sum"])
        assert previous["cause"] == "operator"
        assert previous["last_checkpoint"]["step"] == 5
        assert previous["last_checkpoint"]["head"] == receipt["head"]
        assert (await run.health())[0] == 200
    # What the claim says of the old run stays, whether or not that is still there.
    await asyncio.to_thread(shutil.rmtree, tmp_path / "old")
    keys: dict[str, Any] = {"run__previous": str(tmp_path / "old")}
    async with served(tmp_path / "new", resume=True, trainer_stopped=True, **keys) as run:
        assert (await run.health())[0] == 200
        assert json.loads((run.directory / "claim.json").read_bytes())["previous"] == previous


async def test_served_directory_is_refused(tmp_path: Path) -> None:
    """A second ``serve`` on a directory in use is told so, with or without ``--resume``."""
    async with served(tmp_path / "run"):
        for resume in (True, False):
            daemon = Daemon(configured(tmp_path / "run"), provider=FakeProvider(), resume=resume)
            with raises(errors.RUN_DIRECTORY, match="served by another process"):
                await daemon.run()


async def test_loading_failure_of_a_resumed_run_leaves_it_alone(tmp_path: Path) -> None:
    """A provider that cannot be opened does not cost the run its history."""
    directory = tmp_path / "run"
    async with served(directory) as run:
        await run.stop()
    before = journal(directory).read_bytes()
    provider = FakeProvider()
    provider.identity_fault = RuntimeError("down")
    with pytest.raises(errors.ProviderFault):
        async with served(directory, provider=provider, resume=True):
            pass
    assert journal(directory).read_bytes() == before
    async with served(directory, resume=True, trainer_stopped=True) as run:
        assert (await run.health())[0] == 200


async def test_drain_that_cannot_finish_says_so(tmp_path: Path) -> None:
    """A search that outlives the drain is settled as cancelled, and the run ends failed."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    keys: dict[str, Any] = {"execute__deadline_seconds": 0.2}
    async with served(tmp_path / "run", provider=provider, **keys) as run:
        asking = asyncio.create_task(run.execute("q"))
        await until(lambda: provider.under_way == 1)
        assert await run.stop() == 4
        assert (await asking)[0] == 504
    async with served(tmp_path / "run", resume=True, **keys) as run:
        assert (await run.health())[1]["cause"]["cause"] == "deadline"


@pytest.mark.process
def test_killed_daemon_resumes_closed_and_exits_four(tmp_path: Path) -> None:
    """``kill -9``, then ``serve --resume``: not healthy, says why, and its exit code is 4."""
    with running(tmp_path) as daemon:
        daemon.kill()
    with running(tmp_path, "--resume") as daemon:
        health = daemon.internal().health()
        assert (health.status, health.value["cause"]["cause"]) == (503, "unclean_restart")
        assert daemon.stop() == 4


@pytest.mark.process
def test_existing_directory_without_resume_is_exit_two(tmp_path: Path) -> None:
    """Without ``--resume`` an existing directory is refused in one sentence."""
    with running(tmp_path) as daemon:
        assert daemon.stop() == 0
    again = start(tmp_path)
    assert again.process.wait(30) == 2
    said = again.log.read_text().strip().splitlines()[-1]
    assert "exists already" in said
    assert "--resume" in said
    assert "Traceback" not in again.log.read_text()

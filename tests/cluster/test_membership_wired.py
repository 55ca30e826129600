"""Nodes and servers that go away: the run's status meanwhile, and its verdict at the end."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.fakes.bus import Ground
from tests.fakes.cluster_run import bus_of, cause_on_disk, cluster, joined
from tests.fakes.provider import FakeProvider
from tests.fakes.served import Served
from tests.fakes.until import until

LOST = 1.0


def reason(report: dict[str, dict[str, str]]) -> str:
    return report["cluster"]["reason"]


async def ended_with(run: Served) -> tuple[str, str]:
    """Cause and detail of a run, once its latch has closed on disk."""
    await until(lambda: run.service.run.state.closed)
    await run.service.run.recorder.latch_durable()
    return cause_on_disk(run)


async def test_a_silent_node_is_lost(tmp_path: Path) -> None:
    """A node cut off makes the run pending, then failed: on its own side too, each by its cause."""
    ground = Ground()
    async with cluster(tmp_path, 3, ground=ground, cluster__lost_seconds=LOST) as runs:
        first, second, third = runs
        assert (await first.health(5))[0] == 200
        bus_of(ground, "node-2").cut()
        status, report = await third.health()
        assert (status, reason(report)) == (503, "cluster_unreachable")
        ends = [await ended_with(first), await ended_with(second)]
        assert [cause for cause, _ in ends] == ["node_lost", "node_lost"]
        # Either finds it first and names it; the other may hear it from that one before.
        assert any("node-2" in detail for _, detail in ends)
        assert (await ended_with(third))[0] == "cluster_unreachable"
        for run in runs:
            assert (await run.health())[1]["state"] == "failed"


async def test_servers_back_in_time(tmp_path: Path) -> None:
    """Servers gone for less than lost_seconds leave nothing but a while of not being healthy."""
    ground = Ground()
    async with cluster(tmp_path, 2, ground=ground, cluster__lost_seconds=LOST) as (first, second):
        assert (await second.execute("leases"))[0] == 200
        assert (await first.health(5))[0] == 200
        for _ in range(2):
            ground.stop()
            for run in (first, second):
                status, report = await run.health()
                assert (status, report["state"]) == (503, "pending")
                assert reason(report) == "cluster_unreachable"
            assert (await second.execute("within the lease"))[0] == 200
            await asyncio.sleep(LOST / 2)
            ground.start()
            for run in (first, second):
                assert (await run.health(5))[0] == 200


async def test_servers_gone_for_good(tmp_path: Path) -> None:
    """Servers gone for longer close the latch of each node; back again, they open none."""
    ground = Ground()
    async with cluster(tmp_path, 2, ground=ground, cluster__lost_seconds=LOST) as runs:
        ground.stop()
        for run in runs:
            assert (await ended_with(run))[0] == "cluster_unreachable"
        ground.start()
        for run in runs:
            assert (await run.health())[0] == 503


async def test_a_node_that_never_joins_ends_the_run(tmp_path: Path) -> None:
    """A node that never joins leaves the run pending until it has answered, and then fails it."""
    ground = Ground()
    async with joined(tmp_path, ground, "a", 2, cluster__lost_seconds=LOST) as run:
        await asyncio.sleep(1.5 * LOST)
        status, report = await run.health()
        assert (status, report["state"], reason(report)) == (503, "pending", "node_absent")
        assert (await run.execute("a question"))[0] == 200
        cause, detail = await ended_with(run)
        assert cause == "node_lost"
        assert "never joined" in detail


async def test_a_node_that_ended_in_order_is_not_lost(tmp_path: Path) -> None:
    """A node that ended cleanly may be silent for ever."""
    ground = Ground()
    async with cluster(tmp_path, 2, ground=ground, cluster__lost_seconds=LOST) as (first, second):
        assert (await first.execute("a question"))[0] == 200
        assert await second.stop() == 0
        await asyncio.sleep(1.5 * LOST)
        assert (await first.health(5))[0] == 200


async def test_a_node_that_does_not_answer_is_not_healthy(tmp_path: Path) -> None:
    """A node heard of a moment ago that does not answer when asked leaves the run pending."""
    ground = Ground()
    async with cluster(tmp_path, 2, ground=ground) as (first, _):
        assert (await first.health(5))[0] == 200
        bus_of(ground, "node-1").cut()
        status, report = await first.health()
        assert (status, report["state"], reason(report)) == (503, "pending", "node_quiet")
        bus_of(ground, "node-1").mend()
        assert (await first.health(5))[0] == 200


async def test_an_identity_that_changed_elsewhere_shows_when_asked(tmp_path: Path) -> None:
    """The gate has every node ask its provider who it is, and fails where one is another."""
    ground = Ground()
    changed = FakeProvider()
    async with (
        joined(tmp_path, ground, "a", 2) as first,
        joined(tmp_path, ground, "b", 2, provider=changed),
    ):
        assert (await first.health(5))[0] == 200
        changed.identity_values["index_sha256"] = "2" * 64
        status, report = await first.health()
        assert (status, report["state"]) == (503, "failed")
        assert report["cause"]["cause"] == "identity_changed"
        assert "on node b" in report["cause"]["detail"]

"""Several nodes in one process: one latch, one quota, one verdict."""

from __future__ import annotations

import asyncio
from pathlib import Path

from smartsearch_sidecar.ledger.verify import verify
from tests.fakes.bus import Ground
from tests.fakes.cluster_run import bus_of, cause_on_disk, cluster, joined, until

# --- the latch ------------------------------------------------------------------------------------


async def test_a_latch_closes_every_node(tmp_path: Path) -> None:
    """The first cause of any node closes the latch of each, durably, and no node answers more."""
    async with cluster(tmp_path, 3) as (first, second, third):
        assert (await first.execute("before"))[0] == 200
        await second.internal("POST", "/latch", {"reason": "enough"})
        await until(lambda: first.service.state.closed and third.service.state.closed)
        for run in (first, third):
            assert (await run.execute("after"))[0] == 502
            await run.service.recorder.latch_durable()
            assert cause_on_disk(run) == ("operator", "on node node-1: enough")
        assert cause_on_disk(second) == ("operator", "enough")
        assert [await run.stop() for run in (first, second, third)] == [4, 4, 4]
    for name in ("node-0", "node-1", "node-2"):
        assert (await asyncio.to_thread(verify, tmp_path / name)).ok


async def test_who_joins_late_finds_the_latch_closed(tmp_path: Path) -> None:
    """A node that joins a run that has failed has failed before it answers anything."""
    ground = Ground()
    async with joined(tmp_path, ground, "a", 2) as first:
        await first.internal("POST", "/latch", {"reason": "enough"})
        await until(lambda: "latch" in ground.keys)
        async with joined(tmp_path, ground, "b", 2) as late:
            assert cause_on_disk(late) == ("operator", "on node a: enough")
            assert (await late.execute("anything"))[0] == 502
            assert (await late.health())[0] == 503


async def test_a_resumed_node_tells_of_its_old_latch(tmp_path: Path) -> None:
    """A cause that a node could not tell before it ended reaches the others when it is resumed."""
    ground = Ground()
    async with joined(tmp_path, ground, "a", 2) as first:
        async with joined(tmp_path, ground, "b", 2) as second:
            bus_of(ground, "b").cut()
            await second.internal("POST", "/latch", {"reason": "alone"})
        assert not first.service.state.closed
        async with joined(tmp_path, ground, "b", 2, resume=True):
            await until(lambda: first.service.state.closed)
            await first.service.recorder.latch_durable()
            assert cause_on_disk(first) == ("operator", "on node b: alone")

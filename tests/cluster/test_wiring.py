"""Several nodes in one process: one latch, one quota, one verdict (invariants 15 to 17)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.values import NodeState
from smartsearch_sidecar.commands import app
from smartsearch_sidecar.gate.cluster import ClusterRun
from smartsearch_sidecar.ledger.verify import verify
from tests.fakes.bus import Ground, MemoryBus
from tests.fakes.cluster_run import bus_of, cause_on_disk, cluster, joined, leases
from tests.fakes.disk import FullDisk, ReadOnlyDisk
from tests.fakes.provider import FakeProvider
from tests.fakes.served import native_body
from tests.fakes.until import until

# --- the latch ------------------------------------------------------------------------------------


async def test_a_latch_closes_every_node(tmp_path: Path) -> None:
    """The first cause of any node closes the latch of each, durably, and no node answers more."""
    async with cluster(tmp_path, 3) as (first, second, third):
        assert (await first.execute("before"))[0] == 200
        await second.internal("POST", "/latch", {"reason": "enough"})
        await until(lambda: first.service.run.state.closed and third.service.run.state.closed)
        for run in (first, third):
            assert (await run.execute("after"))[0] == 502
            await run.service.run.recorder.latch_durable()
            assert cause_on_disk(run) == ("operator", "on node node-1: enough")
        assert cause_on_disk(second) == ("operator", "enough")
        assert [await run.stop() for run in (first, second, third)] == [4, 4, 4]
    for name in ("node-0", "node-1", "node-2"):
        assert (await asyncio.to_thread(verify, tmp_path / name)).ok


async def test_a_late_node_finds_the_latch_closed(tmp_path: Path) -> None:
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
        assert not first.service.run.state.closed
        async with joined(tmp_path, ground, "b", 2, resume=True):
            await until(lambda: first.service.run.state.closed)
            await first.service.run.recorder.latch_durable()
            assert cause_on_disk(first) == ("operator", "on node b: alone")


async def test_a_ledger_that_fails_ends_the_run(tmp_path: Path) -> None:
    """Where a node's disk takes no more, all have failed, though that one cannot record it."""
    ground = Ground()
    disk = ReadOnlyDisk()
    async with (
        joined(tmp_path, ground, "a", 2) as first,
        joined(tmp_path, ground, "b", 2, disk=disk) as second,
    ):
        disk.read_only = True
        assert (await second.execute("a question"))[0] == 503
        await until(lambda: first.service.run.state.closed)
        await first.service.run.recorder.latch_durable()
        cause, detail = cause_on_disk(first)
        assert cause == "ledger_failed"
        assert detail.startswith("on node b: ")
        assert (await first.health())[1]["cluster"]["nodes"]["b"]["cause"] == "ledger_failed"


class Slow(Ground):
    """A ground on which keys that begin with ``prefix`` cannot be set until ``let`` is set; a call
    that cannot raises where ``refuses``, and waits otherwise. ``tried`` counts such calls.
    """

    def __init__(self, prefix: str, *, refuses: bool) -> None:
        super().__init__()
        self.prefix, self.refuses = prefix, refuses
        self.let = asyncio.Event()
        self.tried = 0

    def bus(self, *words: Any, **more: Any) -> MemoryBus:
        bus = super().bus(*words, **more)
        for name in ("put", "update"):
            setattr(bus, name, self._slowed(getattr(bus, name)))
        return bus

    def _slowed(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def slowed(key: str, *words: Any) -> Any:
            if key.startswith(self.prefix) and not self.let.is_set():
                self.tried += 1
                if self.refuses:
                    raise errors.CLUSTER_UNREACHABLE("the servers do not take it")
                await self.let.wait()
            return await call(key, *words)

        return slowed


async def test_a_failed_state_says_what_the_latch_says(tmp_path: Path) -> None:
    """A heartbeat between a node's failure and the run's latch key tells the cause in full, and who
    hears of it by a third node is told of the first one.
    """
    ground = Slow("latch", refuses=False)
    keys: dict[str, Any] = {"cluster__lost_seconds": 2.0}
    async with cluster(tmp_path, 3, ground=ground, **keys) as runs:
        await runs[1].internal("POST", "/latch", {"reason": "enough"})
        await until(lambda: all(run.service.run.state.closed for run in runs))
        assert "latch" not in ground.keys
        for run in (runs[0], runs[2]):
            await run.service.run.recorder.latch_durable()
            assert cause_on_disk(run) == ("operator", "on node node-1: enough")
        ground.let.set()


async def test_a_node_serves_only_once_the_others_can_know(tmp_path: Path) -> None:
    """While its first state is not taken, the others hold its last one, by which it has ended: a
    node that comes back is not served before.
    """
    ground = Slow("state.b", refuses=True)
    ground.let.set()
    again: dict[str, Any] = {"resume": True, "trainer_stopped": True}
    async with joined(tmp_path, ground, "a", 2):
        async with joined(tmp_path, ground, "b", 2) as second:
            assert await second.stop() == 0
        assert NodeState.decode(ground.keys["state.b"].value).ended
        ground.let.clear()

        async def come_back() -> None:
            async with joined(tmp_path, ground, "b", 2, **again) as second:
                assert not NodeState.decode(ground.keys["state.b"].value).ended
                assert (await second.execute("one"))[0] == 200

        coming = asyncio.create_task(come_back())
        await until(lambda: ground.tried > 3)
        assert not coming.done()
        assert not (tmp_path / "b" / "endpoints.json").exists()
        ground.let.set()
        await coming


async def test_a_node_that_cannot_be_known_fails(tmp_path: Path) -> None:
    """Where its first state is never taken, it comes up as failed, within ``lost_seconds``."""
    ground = Slow("state.a", refuses=True)
    async with joined(tmp_path, ground, "a", 2, cluster__lost_seconds=0.5) as first:
        assert (await first.execute("one"))[0] == 502
        assert cause_on_disk(first)[0] == "cluster_unreachable"
        ground.let.set()


# --- joining --------------------------------------------------------------------------------------


async def refused(tmp_path: Path, ground: Ground, name: str, **keys: Any) -> str:
    """Why a node may not join; nothing of it is left behind."""
    directory = f"refused-{name}"
    with pytest.raises(errors.ClusterRefused) as info:
        async with joined(tmp_path, ground, name, 2, directory=directory, **keys):
            pass
    assert not (tmp_path / directory).exists()
    return info.value.message


async def test_a_node_that_differs_is_refused(tmp_path: Path) -> None:
    """A node with another index, quota, capability or key is refused by the name of it."""
    ground = Ground()
    async with joined(tmp_path, ground, "a", 2):
        other = FakeProvider()
        other.identity_values["index_sha256"] = "2" * 64
        assert "index_sha256" in await refused(tmp_path, ground, "b", provider=other)
        assert "max_calls" in await refused(tmp_path, ground, "b", execute__max_calls=9)
        assert "deadline" in await refused(tmp_path, ground, "b", execute__deadline_seconds=8.5)
        secret = "another-capability-0123456789-0123456789-01"
        sentence = await refused(tmp_path, ground, "b", server__execute_capability=secret)
        assert "execute_capability" in sentence
        assert secret not in sentence
        assert secret not in str(ground.keys)
        # A node that was refused has taken no place: the run still has one for its second node.
        async with joined(tmp_path, ground, "b", 2) as second:
            assert (await second.health(5))[0] == 200


async def test_a_capability_of_its_own_serves_no_cluster(tmp_path: Path) -> None:
    """A node that would make its own execute capability is refused: one URL serves all nodes."""
    with pytest.raises(errors.ConfigError, match="execute_capability"):
        async with joined(tmp_path, Ground(), "a", 2, server__execute_capability=None):
            pass
    assert not (tmp_path / "a").exists()


async def test_places_may_differ(tmp_path: Path) -> None:
    """Where a node keeps its index is its own affair."""
    async with (
        joined(tmp_path, (ground := Ground()), "a", 2, retrieval__bm25__index="/data/one"),
        joined(tmp_path, ground, "b", 2, retrieval__bm25__index="/data/two") as second,
    ):
        assert (await second.health(5))[0] == 200


async def test_names_and_places_are_taken_once(tmp_path: Path) -> None:
    """A second directory under a name, or one node more than the run has, is refused by name."""
    ground = Ground()
    async with joined(tmp_path, ground, "a", 2), joined(tmp_path, ground, "b", 2) as second:
        assert "as node b" in await refused(tmp_path, ground, "b")
        assert "node c is one too many" in await refused(tmp_path, ground, "c")
        assert (await second.health(5))[0] == 200
    async with joined(tmp_path, ground, "b", 2, resume=True, trainer_stopped=True) as again:
        assert again.service.run.state.restarts == 1


async def test_keys_of_something_else_are_refused(tmp_path: Path) -> None:
    """What no node of this version wrote under the run's name refuses the start, by a sentence."""
    for key in ("agreement", "quota", "node.a"):
        ground = Ground()
        ground.keep(key, b"something else")
        with pytest.raises(errors.ClusterRefused, match="cannot be read"):
            async with joined(tmp_path, ground, "a", 2):
                pass
        assert not (tmp_path / "a").exists()


async def test_a_run_that_cannot_begin_gives_its_name_back(tmp_path: Path) -> None:
    """A node refused by its disk once it had its place can be started again under its name."""
    ground = Ground()
    disk = FullDisk(0)
    with pytest.raises(errors.SidecarError):
        async with joined(tmp_path, ground, "a", 2, disk=disk):
            pass
    async with joined(tmp_path, ground, "a", 2, directory="again") as run:
        assert (await run.execute("a question"))[0] == 200


async def test_what_is_heard_at_the_end_changes_no_record(tmp_path: Path) -> None:
    """A latch that closes elsewhere while this node ends is for its next start."""
    ground = Ground()
    async with cluster(tmp_path, 2, ground=ground) as (first, second):
        cluster_run = second.service.run.quota
        assert isinstance(cluster_run, ClusterRun)
        cluster_run.ending(None)
        await first.internal("POST", "/latch", {"reason": "enough"})
        await until(lambda: "latch" in ground.keys)
        await asyncio.sleep(0.05)
        assert await second.stop() == 0
    assert second.records()[-1]["kind"] == "run.closed"
    async with joined(tmp_path, ground, "node-1", 2, resume=True) as again:
        assert cause_on_disk(again) == ("operator", "on node node-0: enough")


# --- quotas ---------------------------------------------------------------------------------------


async def test_the_quota_is_the_runs(tmp_path: Path) -> None:
    """All nodes together answer what the run is allowed, and the next search latches all."""
    ground = Ground()
    async with cluster(
        tmp_path, 3, ground=ground, execute__max_calls=60, cluster__lease_block=4
    ) as runs:
        asked = [run.execute(f"query {number}") for number in range(10) for run in runs]
        assert {status for status, _ in await asyncio.gather(*asked)} == {200}
        while (await runs[0].execute(f"more {runs[0].service.run.state.attempts}"))[0] == 200:
            pass
        attempts = [run.service.run.state.attempts for run in runs]
        # The two others hold at most a block each that they did not use.
        assert 60 - 2 * 4 <= sum(attempts) <= 60
        assert leases(ground).taken("searches") == 60
        await until(lambda: all(run.service.run.state.closed for run in runs))
        causes = [run.service.run.state.cause for run in runs]
        assert [cause and cause.cause for cause in causes] == ["quota_exhausted"] * 3


async def test_a_clean_end_returns_what_was_not_used(tmp_path: Path) -> None:
    """What a node had leased and not used can be used by the others once it has ended."""
    ground = Ground()
    async with joined(tmp_path, ground, "a", 2, execute__max_calls=16) as first:
        async with joined(tmp_path, ground, "b", 2, execute__max_calls=16) as second:
            assert (await second.execute("one"))[0] == 200
            assert leases(ground).of("b")["searches"] == 2
            assert await second.stop() == 0
        assert leases(ground).of("b")["searches"] == 1
        answers = [await first.execute(f"query {number}") for number in range(15)]
        assert {status for status, _ in answers} == {200}
        assert (await first.execute("over"))[0] == 429


async def test_a_resumed_node_goes_on_with_its_lease(tmp_path: Path) -> None:
    """What a killed node had leased stays leased, and is its own again when it comes back."""
    ground = Ground()
    keys: dict[str, Any] = {"execute__max_calls": 16, "cluster__lease_block": 2}
    async with joined(tmp_path, ground, "a", 2, **keys):
        async with joined(tmp_path, ground, "b", 2, **keys) as second:
            assert (await second.execute("one"))[0] == 200
            bus_of(ground, "b").cut()  # nothing is given back
        held = leases(ground).of("b")["searches"]
        assert held == 2
        async with joined(
            tmp_path, ground, "b", 2, resume=True, trainer_stopped=True, **keys
        ) as again:
            assert (await again.execute("two"))[0] == 200
            assert again.service.run.state.attempts == 2
            assert leases(ground).taken("searches") <= 4


async def test_without_the_servers_the_lease_is_all(tmp_path: Path) -> None:
    """A node that cannot reach the others answers what it has leased, and then names the cause."""
    ground = Ground()
    keys: dict[str, Any] = {
        "execute__max_calls": 80,
        "execute__deadline_seconds": 0.5,
        "cluster__lease_block": 4,
    }
    async with cluster(tmp_path, 2, ground=ground, **keys) as (first, second):
        assert (await first.execute("one"))[0] == 200
        ground.stop()
        status, report = await first.health()
        assert (status, report["state"]) == (503, "pending")
        assert report["cluster"]["reason"] == "cluster_unreachable"
        used = 1
        while (status := (await first.execute(f"more {used}"))[0]) == 200:
            used += 1
        assert status == 503
        assert used == leases(ground).of("node-0")["searches"]
        cause = first.service.run.state.cause
        assert cause is not None
        assert cause.cause == "cluster_unreachable"
        ground.start()
        await until(lambda: second.service.run.state.closed)


async def test_a_search_waits_for_its_lease(tmp_path: Path) -> None:
    """A search that finds the lease used up waits, and is answered once the servers are back."""
    ground = Ground()
    async with cluster(tmp_path, 2, ground=ground, cluster__lease_block=1) as (first, _):
        assert (await first.execute("one"))[0] == 200
        ground.stop()
        left = leases(ground).of("node-0")["searches"] - 1
        for number in range(left):
            assert (await first.execute(f"leased {number}"))[0] == 200
        waiting = asyncio.create_task(first.execute("waits"))
        await until(lambda: first.service.slots.in_service == 1)
        ground.start()
        assert (await waiting)[0] == 200
        assert (await first.health(5))[0] == 200


async def test_a_search_that_waits_for_a_lease_may_leave(tmp_path: Path) -> None:
    """A search cancelled while it waits for a lease is recorded as lost, and consumes nothing."""
    ground = Ground()
    async with cluster(tmp_path, 2, ground=ground) as (first, _):
        ground.stop()
        task = asyncio.create_task(
            first.service.execute(
                json.dumps(native_body("gone")).encode(),
                began=asyncio.get_running_loop().time(),
                gone=lambda: False,
            )
        )
        await until(lambda: first.service.slots.in_service == 1)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert first.service.run.state.attempts == 0
        assert first.service.run.state.lost == 1
        assert first.service.slots.in_service == 0
        ground.start()


# --- the gate -------------------------------------------------------------------------------------


async def test_the_gate_asks_every_node(tmp_path: Path) -> None:
    """Work in flight on one node keeps the run pending wherever it is asked; then it is healthy."""
    held = FakeProvider()
    held.gate = asyncio.Event()
    ground = Ground()
    async with (
        joined(tmp_path, ground, "a", 2) as first,
        joined(tmp_path, ground, "b", 2, provider=held) as second,
    ):
        searching = asyncio.create_task(second.execute("slow"))
        await until(lambda: held.under_way == 1)
        status, report = await first.health()
        assert (status, report["state"]) == (503, "pending")
        assert report["cluster"]["reason"] == "node_pending"
        status, value = await first.internal("POST", "/checkpoints?settle=0", {"step": 1})
        assert (status, value["state"]) == (409, "pending")
        waiting = asyncio.create_task(first.health(5))
        held.gate.set()
        assert (await searching)[0] == 200
        status, report = await waiting
        assert (status, report["state"]) == (200, "healthy")
        nodes = report["cluster"]["nodes"]
        assert {name: row["counts"]["answered"] for name, row in nodes.items()} == {"a": 0, "b": 1}
        assert report["cluster"]["counts"]["answered"] == 1


async def test_a_run_waits_for_all_its_nodes(tmp_path: Path) -> None:
    """While a node has not joined the run is pending, and names how many it lacks."""
    ground = Ground()
    async with joined(tmp_path, ground, "a", 2) as first:
        status, report = await first.health()
        assert (status, report["state"]) == (503, "pending")
        assert report["cluster"]["reason"] == "node_absent"
        async with joined(tmp_path, ground, "b", 2) as second:
            assert (await first.health(5))[0] == 200
            assert await second.stop() == 0
        # An ended node counts by its last state.
        status, report = await first.health(5)
        assert (status, report["cluster"]["nodes"]["b"]["state"]) == (200, "ended")


async def test_a_receipt_names_every_node(tmp_path: Path) -> None:
    """A checkpoint's record and receipt name claim, number and head of each node's journal."""
    async with cluster(tmp_path, 2) as (first, second):
        assert (await second.execute("a question"))[0] == 200
        status, receipt = await first.internal("POST", "/checkpoints", {"step": 3})
        assert status == 201
        assert set(receipt["nodes"]) == {"node-0", "node-1"}
        other = receipt["nodes"]["node-1"]
        assert other["claim_sha256"] == second.service.run.state.claim_sha256
        last = second.records()[-1]
        assert (other["seq"], other["head"]) == (last["seq"], last["sum"])
        accepted = first.records()[-1]
        assert accepted["data"]["nodes"] == receipt["nodes"]
        own = receipt["nodes"]["node-0"]
        assert (own["seq"], own["head"]) == (receipt["seq"] - 1, accepted["prev"])


async def test_check_tells_of_every_node(tmp_path: Path) -> None:
    """The gate from a shell speaks for the run, with a line for each node."""
    async with cluster(tmp_path, 2) as (first, second):
        assert (await second.execute("a question"))[0] == 200
        words = ["check", "--run-dir", str(first.directory), "--settle", "5"]
        told = await asyncio.to_thread(CliRunner().invoke, app, words)
        assert told.exit_code == 0
        assert told.output.startswith("healthy: 1 of 1 searches answered, 2 of 2 nodes joined\n")
        assert "  node-1: healthy, 1 of 1 answered" in told.output
    async with joined(tmp_path, Ground(), "alone", 2) as run:
        words = ["check", "--run-dir", str(run.directory)]
        told = await asyncio.to_thread(CliRunner().invoke, app, words)
        assert told.exit_code == 1
        assert "1 of the run's 2 nodes have not joined yet" in told.output

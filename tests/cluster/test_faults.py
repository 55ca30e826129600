"""Sidecars in processes of their own over real NATS servers: traffic, and what may break.

Times are scaled: ``lost_seconds`` is a few seconds. Each fault is followed to its verdict, its
cause and the sum of the quotas, and to no node being healthy that should not be.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from smartsearch_sidecar.cluster.bus import Bus
from smartsearch_sidecar.cluster.nats.bus import connect
from smartsearch_sidecar.cluster.quota_leases import Leases
from smartsearch_sidecar.config import ClusterSection
from smartsearch_sidecar.ledger.receipt import CheckpointReceipt
from smartsearch_sidecar.ledger.verify import Verification, verify
from tests.fakes import native_client, native_ranks, rollouts
from tests.fakes.forked import Forked
from tests.fakes.helper import FakeHelper
from tests.fakes.nats_cluster import NatsCluster, Way, nats_cluster
from tests.fakes.process import DaemonProcess, start, wait_ready
from tests.fakes.rewarded import QUESTION, item, reward_keys
from tests.fakes.served import EXECUTE_CAPABILITY, read_records
from tests.fakes.until import until
from tests.test_native_rollout import expected_text

# Whole processes, several of them, and servers that elect a leader, on a machine that is shared.
pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

TURNS = 20
MAX_CALLS = 4000
WAIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsCluster]:
    """Three servers for all tests; a test that kills one starts it again."""
    with nats_cluster(tmp_path_factory.mktemp("nats"), 3) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def all_run(servers: NatsCluster) -> Iterator[None]:
    """Each test finds all servers, after any other test and any end of it."""
    yield
    servers.start()


class Nodes:
    """The sidecars of one run."""

    def __init__(self, tmp_path: Path, url: str, count: int, lost_seconds: float) -> None:
        self.tmp_path = tmp_path
        self.url = url
        self.count = count
        self.lost_seconds = lost_seconds
        self.run_id = f"run-{uuid4().hex[:12]}"
        self.started: dict[str, DaemonProcess] = {}
        self._all: list[DaemonProcess] = []

    def start(
        self, name: str, *arguments: str, directory: str = "", url: str = "", **keys: Any
    ) -> DaemonProcess:
        """Starts one and returns at once; ``module`` among the keys is who starts it."""
        settings: dict[str, Any] = {
            "run__nodes": self.count,
            "server__execute_capability": EXECUTE_CAPABILITY,
            "execute__max_calls": MAX_CALLS,
            "cluster__nats_url": url or self.url,
            "cluster__run_id": self.run_id,
            "cluster__node": name,
            "cluster__lease_block": 16,
            "cluster__lost_seconds": self.lost_seconds,
            **keys,
        }
        daemon = start(self.tmp_path, *arguments, name=directory or name, **settings)
        self._all.append(daemon)
        self.started.setdefault(name, daemon)
        return daemon

    def start_all(self, *names: str, **keys: Any) -> list[DaemonProcess]:
        """Starts several side by side; returns once all of them serve."""
        daemons = [self.start(name, **keys) for name in names]
        for daemon in daemons:
            wait_ready(daemon)
        return daemons

    def kill(self) -> None:
        for daemon in self._all:
            if daemon.process.poll() is None:
                daemon.kill()

    async def leases(self, url: str = "") -> Leases:
        """What the servers hold of the run's quotas."""
        cluster = ClusterSection.model_validate(
            {"nats_url": url or self.url, "run_id": self.run_id, "node": "looker-on"}
        )
        bus: Bus = await connect(cluster, self.run_id, on_link=lambda _: None)
        try:
            entry = await bus.get("quota")
        finally:
            await bus.close()
        assert entry is not None
        return Leases.decode(entry.value)


@contextmanager
def run_of(tmp_path: Path, url: str, *, count: int, lost_seconds: float = 3.0) -> Iterator[Nodes]:
    """A run whose processes do not outlive the test."""
    nodes = Nodes(tmp_path, url, count, lost_seconds)
    try:
        yield nodes
    finally:
        nodes.kill()


def health(daemon: DaemonProcess, settle: float = 0.0) -> dict[str, Any]:
    """The body of ``/health``, with the status in it."""
    answer = daemon.internal().health(settle)
    return {**answer.value, "status": answer.status}


async def health_when(
    daemon: DaemonProcess, holds: Callable[[dict[str, Any]], bool], seconds: float = WAIT_SECONDS
) -> dict[str, Any]:
    """The first answer of ``/health`` of which it holds."""
    report: dict[str, Any] = {}

    def told() -> str:
        return json.dumps({key: report.get(key) for key in ("state", "cause", "cluster")})

    async def asked() -> bool:
        nonlocal report
        report = await asyncio.to_thread(health, daemon)
        true = holds(report)
        assert true or report["state"] != "failed", told()  # for good: nothing will come of it
        return true

    await until(asked, seconds=seconds, pause=0.05, found=told)
    return report


async def still_open(*daemons: DaemonProcess) -> None:
    """No node has failed."""
    for daemon in daemons:
        report = await asyncio.to_thread(health, daemon)
        assert report["cause"] is None, json.dumps(report)


async def failed(daemon: DaemonProcess) -> tuple[str, str]:
    """Cause and detail, once the latch has closed; on disk as well."""
    report = await health_when(daemon, lambda report: report["state"] == "failed")
    assert report["status"] == 503
    on_disk = json.loads((daemon.directory / "latch.json").read_bytes())
    assert on_disk["cause"] == report["cause"]["cause"]
    return report["cause"]["cause"], report["cause"]["detail"]


def traffic(daemons: Sequence[DaemonProcess]) -> list[tuple[Forked, Path]]:
    """One rank of the native client beside each node."""
    urls = [daemon.sandbox_url for daemon in daemons]
    return native_ranks.begin(daemons[0].directory.parent, urls, TURNS)


def ask(daemon: DaemonProcess, query: str) -> str:
    return native_client.ask(daemon.sandbox_url, query)


def refusal(daemon: DaemonProcess) -> str:
    """Why a node did not start: exit code 2, a sentence, and nothing left behind."""
    assert daemon.process.wait(30) == 2
    assert not daemon.directory.exists()
    return daemon.log.read_text()


def searches(daemon: DaemonProcess) -> int:
    """How many its journal has admitted."""
    kinds = [record["kind"] for record in read_records(daemon.directory)]
    return kinds.count("retrieval.requested")


async def whole(daemon: DaemonProcess, receipt: CheckpointReceipt | None = None) -> Verification:
    """The verification of the daemon's ledger."""
    return await asyncio.to_thread(lambda: verify(daemon.directory, receipt=receipt))


def scoring(tmp_path: Path, helper: FakeHelper) -> dict[str, Any]:
    return reward_keys(tmp_path, helper.url, reward__provenance="enforce")


def reward(scorer: DaemonProcess, searched: Sequence[tuple[str, str]]) -> int:
    """Scores one rollout made of these queries and the texts they were answered with."""
    turns = [rollouts.Turn(query, text) for query, text in searched]
    solution = rollouts.rollout(QUESTION, turns, rollouts.final("Paris"))
    return scorer.internal().call("POST", "/reward", item(solution)).status


async def test_one_run_from_first_node_to_receipt(tmp_path: Path, servers: NatsCluster) -> None:
    """Four nodes, one of them late and one with a wrong clock, are one run: strangers are refused,
    a server of three may die unnoticed, and the receipt is proven by the ledgers of all.
    """
    async with FakeHelper() as helper:
        keys = scoring(tmp_path, helper)
        with run_of(tmp_path, servers.url, count=4, lost_seconds=20.0) as nodes:
            nodes.start("node-2", module="tests.fakes.wrong_clock", **keys)
            await asyncio.to_thread(nodes.start_all, "node-0", "node-1", **keys)
            first, behind = nodes.started["node-0"], nodes.started["node-2"]
            await asyncio.to_thread(wait_ready, behind)
            report = await asyncio.to_thread(health, first)
            assert (report["state"], report["cluster"]["reason"]) == ("pending", "node_absent")
            # Strangers: another index, a name that is taken.
            other = {**keys, "retrieval__provider": "tests.fakes.other_index:retriever"}
            stranger = nodes.start("node-3", directory="stranger", **other)
            twin = nodes.start("node-0", directory="twin", **keys)
            assert "index_sha256" in await asyncio.to_thread(refusal, stranger)
            assert "as node node-0" in await asyncio.to_thread(refusal, twin)
            nodes.started["node-3"] = nodes.start("node-3", **keys)
            await asyncio.to_thread(wait_ready, nodes.started["node-3"])
            daemons = [nodes.started[f"node-{number}"] for number in range(4)]
            # Traffic on all of them, while a server dies.
            ranks = traffic(daemons)
            servers.servers[0].kill()
            said = await asyncio.to_thread(native_ranks.texts, ranks)
            await still_open(*daemons)
            assert [(query, text) for query, text in said if text != expected_text(query)] == []
            # Rewards on one, of rollouts that were searched on all.
            searched = [pair for pair in said if pair[1] != "result: \ninvalid query"]
            for start_at in range(0, len(searched), 16):
                rollout = searched[start_at : start_at + 16]
                assert await asyncio.to_thread(reward, daemons[1], rollout) == 200
            await health_when(first, lambda report: report["state"] == "healthy")
            answer = await asyncio.to_thread(
                daemons[3].internal().call, "POST", "/checkpoints?settle=5", {"step": 1}
            )
            assert answer.status == 201
            codes = [await asyncio.to_thread(daemon.stop) for daemon in daemons]
            assert codes == [0, 0, 0, 0]
            value = await nodes.leases()
    used = [
        sum(r["kind"] == "retrieval.requested" for r in read_records(d.directory)) for d in daemons
    ]
    assert [value.of(f"node-{n}")["searches"] for n in range(4)] == used
    receipt = CheckpointReceipt.parse(json.dumps(answer.value).encode())
    for daemon in daemons:
        assert (await whole(daemon, receipt)).ok
    claims = {(await whole(daemon)).claim_sha256 for daemon in daemons}
    assert receipt.missing(claims) == []


async def test_a_sidecar_killed(tmp_path: Path, servers: NatsCluster) -> None:
    """A node that dies takes the run with it, by name; its lease stays spent, none is healthy."""
    with run_of(tmp_path, servers.url, count=3) as nodes:
        daemons = await asyncio.to_thread(nodes.start_all, "a", "b", "c")
        await health_when(daemons[0], lambda report: report["state"] == "healthy")
        said = await asyncio.to_thread(lambda: native_ranks.texts(traffic(daemons)))
        assert [(query, text) for query, text in said if text != expected_text(query)] == []
        daemons[2].kill()
        report = await health_when(daemons[0], lambda report: report["state"] != "healthy")
        for daemon in daemons[:2]:
            cause, detail = await failed(daemon)
            assert cause == "node_lost"
            assert "node c" in detail
            assert await asyncio.to_thread(ask, daemon, "after") == "error: 502"
            assert daemon.stop() == 4
        value = await nodes.leases()
        asked = [
            sum(r["kind"] == "retrieval.requested" for r in read_records(d.directory))
            for d in daemons
        ]
        assert value.of("c")["searches"] >= asked[2]
        assert value.taken("searches") <= MAX_CALLS
        # Resumed by hand, it is as failed as the run.
        again = nodes.start("c", "--resume")
        await asyncio.to_thread(wait_ready, again)
        assert (await failed(again))[0] in {"unclean_restart", "node_lost"}
    for daemon in daemons:
        assert (await whole(daemon)).ok
    assert report["status"] == 503


async def test_servers_gone_and_one_node_parted(tmp_path: Path) -> None:
    """The only server gone and back in time leaves nothing behind. A node that
    neither receives nor reaches the others fails; so do the others, by its name.
    """
    with (
        nats_cluster(tmp_path / "nats") as alone,
        run_of(tmp_path, alone.url, count=2, lost_seconds=5.0) as nodes,
    ):
        async with Way(alone.servers[0]) as way:
            near = nodes.start("near")
            far = nodes.start("far", url=way.url)
            for daemon in (near, far):
                await asyncio.to_thread(wait_ready, daemon)
            await health_when(far, lambda report: report["state"] == "healthy")
            assert (await asyncio.to_thread(ask, far, "before")).startswith("result")
            # All servers gone, and back in time: not healthy, answering within the lease.
            alone.kill()
            # Both at once: an answer may take three of the five seconds that a node has.
            reports = await asyncio.gather(
                *(
                    health_when(daemon, lambda report: not report["cluster"]["connected"])
                    for daemon in (near, far)
                )
            )
            for report in reports:
                assert (report["state"], report["status"]) == ("pending", 503)
            assert (await asyncio.to_thread(ask, far, "meanwhile")).startswith("result")
            alone.start()
            for daemon in (near, far):
                await health_when(daemon, lambda report: report["state"] == "healthy")
            way.part()
            report = await health_when(far, lambda report: report["state"] != "healthy")
            assert report["status"] == 503
            assert (await failed(near))[0] == "node_lost"
            assert (await failed(far))[0] in {"cluster_unreachable", "node_lost"}
            way.mend()
            for daemon in (near, far):
                assert (await asyncio.to_thread(health, daemon))["state"] == "failed"
                assert await asyncio.to_thread(ask, daemon, "after") == "error: 502"
            assert (await nodes.leases()).taken("searches") <= MAX_CALLS


async def test_all_servers_gone_for_good(tmp_path: Path, servers: NatsCluster) -> None:
    """Without the servers a node answers within its lease; after lost_seconds every node fails."""
    with run_of(tmp_path, servers.url, count=2) as nodes:
        daemons = await asyncio.to_thread(nodes.start_all, "a", "b")
        assert (await asyncio.to_thread(ask, daemons[0], "leases")).startswith("result")
        await health_when(daemons[0], lambda report: report["state"] == "healthy")
        servers.freeze()
        try:
            assert (await asyncio.to_thread(ask, daemons[0], "within")).startswith("result")
            for daemon in daemons:
                assert (await failed(daemon))[0] == "cluster_unreachable"
        finally:
            servers.thaw()
        for daemon in daemons:
            assert await asyncio.to_thread(ask, daemon, "after") == "error: 502"
            assert (await asyncio.to_thread(health, daemon))["status"] == 503
        assert (await nodes.leases()).taken("searches") <= 2 * 16
    for daemon in daemons:
        assert (await whole(daemon)).ok

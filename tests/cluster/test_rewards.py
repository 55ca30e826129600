"""Rewards of a run of many nodes: an answer of any node is known where it is judged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from smartsearch_sidecar.cluster.answer_digests import AnswerStream, decode_batch
from smartsearch_sidecar.cluster.bus import OnLink, OnMessage
from smartsearch_sidecar.cluster.quota_leases import Leases
from smartsearch_sidecar.gate.cluster import ClusterRun
from tests.fakes import rollouts
from tests.fakes.bus import Ground, MemoryBus
from tests.fakes.cluster_run import bus_of, joined, leases
from tests.fakes.helper import FakeHelper
from tests.fakes.rewarded import QUESTION, item, reward_keys
from tests.fakes.served import Served
from tests.fakes.until import until


@asynccontextmanager
async def scoring(
    tmp_path: Path, ground: Ground, helper: FakeHelper, name: str, **keys: Any
) -> AsyncIterator[Served]:
    """A node of two that scores; each has its own copy of source and references."""
    folder = tmp_path / f"files-{name}"
    folder.mkdir(exist_ok=True)
    settings = reward_keys(folder, helper.url, reward__provenance="enforce", **keys)
    async with joined(tmp_path, ground, name, 2, **settings) as run:
        yield run


@asynccontextmanager
async def pair(tmp_path: Path, ground: Ground, **keys: Any) -> AsyncIterator[tuple[Served, Served]]:
    """Two nodes that score, and a helper behind both."""
    helper = FakeHelper()
    await helper.start()
    try:
        async with (
            scoring(tmp_path, ground, helper, "a", **keys) as first,
            scoring(tmp_path, ground, helper, "b", **keys) as second,
        ):
            yield first, second
    finally:
        await helper.stop()


async def rollout(run: Served, *queries: str, answer: str = "Paris") -> str:
    """A rollout whose searches ``run`` answered."""
    turns = []
    for query in queries:
        status, value = await run.execute(query)
        assert status == 200, value
        turns.append(rollouts.answered(query, value["result"]))
    return rollouts.rollout(QUESTION, turns, rollouts.final(answer))


async def reward(run: Served, *solutions: str) -> tuple[int, Any]:
    return await run.internal(
        "POST", "/reward/batch", {"items": [item(solution) for solution in solutions]}
    )


def stream_of(cluster_run: ClusterRun) -> AnswerStream:
    """What a node publishes its answers to."""
    stream = cluster_run.node.answers
    assert stream is not None
    return stream


class LateBus(MemoryBus):
    """A node that reads the stream later than the others."""

    async def read(self, on_message: OnMessage) -> None:
        loop = asyncio.get_running_loop()
        await super().read(
            lambda sequence, data: ignored(loop.call_later(0.2, on_message, sequence, data))
        )


def ignored(_: object) -> None:
    """Takes a result that is not needed."""


class LateGround(Ground):
    """One where node ``a`` is late."""

    def bus(self, on_link: OnLink = ignored, *, name: str = "") -> MemoryBus:
        bus = LateBus(self, on_link, name) if name == "a" else MemoryBus(self, on_link, name)
        self.buses.append(bus)
        return bus


async def test_a_late_reader_judges_when_it_has_read(tmp_path: Path) -> None:
    """An answer published and not yet read where it is judged is waited for."""
    async with pair(tmp_path, LateGround()) as (first, second):
        solution = await rollout(second, "one", "two")
        assert (await reward(first, solution))[0] == 200
        assert (await first.health(5))[0] == 200


async def test_no_score_beyond_the_lease(tmp_path: Path) -> None:
    """A node without contact scores nothing it has not leased, and names the cause."""
    ground = Ground()
    async with pair(tmp_path, ground, reward__deadline_seconds=0.5) as (first, _):
        solution = await rollout(first, "one")
        ground.stop()
        status, value = await reward(first, solution)
        assert (status, value["error"]["code"]) == (503, "cluster_unreachable")
        assert first.service.run.state.scores.splits["train"].score_attempts == 0


async def test_an_answer_of_another_node_is_known(tmp_path: Path) -> None:
    """A rollout searched on one node is scored on another at once, and the run stays healthy."""
    async with pair(tmp_path, Ground()) as (first, second):
        solution = await rollout(second, "one", "two")
        status, value = await reward(first, solution)
        assert (status, value["rewards"][0]["split"]) == (200, "train")
        assert (await first.health(5))[0] == 200
        assert (await second.health(5))[0] == 200


async def test_an_answer_of_no_node_is_refused(tmp_path: Path) -> None:
    """A block that no node of the run gave closes the latch of every node."""
    async with pair(tmp_path, Ground()) as (first, second):
        turn = rollouts.answered("one", "no node said so")
        solution = rollouts.rollout(QUESTION, [turn], rollouts.final("Paris"))
        status, value = await reward(first, solution)
        assert (status, value["error"]["code"]) == (409, "provenance_broken")
        await until(lambda: second.service.run.state.closed)
        cause = second.service.run.state.cause
        assert cause is not None
        assert cause.cause == "provenance_broken"


async def test_an_answer_of_another_node_is_bound_to_its_query(tmp_path: Path) -> None:
    """What one node answered is judged by its query, and by its beginning where it was cut, on the
    other.
    """
    async with pair(tmp_path, Ground()) as (first, second):
        solution = await rollout(second, "one", "two")
        cut = solution[: solution.rindex("</result>") - 30]
        assert (await reward(first, solution, cut))[0] == 200
        status, value = await reward(first, cut.replace("<search>two<", "<search>one<"))
        assert (status, value["error"]["code"]) == (409, "provenance_broken")


async def test_what_cannot_be_known_is_not_called_broken(tmp_path: Path) -> None:
    """Where the other node cannot be asked what it answered, the cause is that, not the rollout."""
    ground = Ground()
    async with pair(tmp_path, ground, reward__deadline_seconds=0.5) as (first, second):
        assert (await second.execute("leases"))[0] == 200
        bus_of(ground, "b").cut()
        status, value = await reward(first, await rollout(second, "unpublished"))
        assert (status, value["error"]["code"]) == (503, "cluster_unreachable")
        cause = first.service.run.state.cause
        assert cause is not None
        assert "node b" in cause.detail


async def test_a_resumed_node_publishes_what_the_stream_lacks(tmp_path: Path) -> None:
    """Answers that a node gave and could not publish are published once it is back, each once."""
    ground = Ground()
    helper = FakeHelper()

    def published() -> list[bytes]:
        return [digest for message in ground.messages for digest in decode_batch(message)]

    await helper.start()
    try:
        async with scoring(tmp_path, ground, helper, "a") as first:
            async with scoring(tmp_path, ground, helper, "b") as second:
                assert (await second.execute("leases"))[0] == 200
                await until(lambda: len(published()) == 1)
                bus_of(ground, "b").cut()
                solution = await rollout(second, "unpublished")
                await rollout(second, "another", "unpublished", "leases")
            before = published()
            async with scoring(tmp_path, ground, helper, "b", resume=True):
                await until(lambda: len(published()) >= len(before) + 2)
                assert (await reward(first, solution))[0] == 200
            missing = published()[len(before) :]
            assert len(missing) == len(set(missing)) == 2
            assert not set(missing) & set(before)
    finally:
        await helper.stop()


async def test_scores_and_calls_are_leased(tmp_path: Path) -> None:
    """Scores and helper calls of all nodes come out of the run's quotas, and end with them."""
    ground = Ground()
    keys = {
        "reward__max_scores": 8,
        "reward__max_helper_calls": 8,
        "reward__max_output_tokens": 8 * 2048,
        "reward__reuse_identical": False,
        "execute__max_calls": 400,
        "cluster__lease_block": 2,
    }
    async with pair(tmp_path, ground, **keys) as (first, second):
        codes = []
        for run in (first, second, first, second, first):
            _, value = await reward(run, await rollout(run, "one", "two"))
            codes.append(value.get("error", {}).get("code"))
            if codes[-1] is not None:
                break
        assert codes[-1] == "quota_exhausted"
        value_now: Leases = leases(ground)
        used = sum(
            run.service.run.state.scores.splits["train"].model_attempts for run in (first, second)
        )
        assert used <= 8
        assert value_now.taken("train.helper_calls") <= 8
        await until(lambda: first.service.run.state.closed and second.service.run.state.closed)


async def test_a_batch_waits_for_its_lease(tmp_path: Path) -> None:
    """A batch larger than a block is leased whole, and scored whole."""
    ground = Ground()
    async with pair(tmp_path, ground, cluster__lease_block=2) as (first, second):
        solutions = [await rollout(second, f"query {number}") for number in range(9)]
        status, value = await reward(first, *solutions)
        assert status == 200
        assert len(value["rewards"]) == 9
        assert leases(ground).of("a")["train.scores"] >= 9


async def test_an_answer_is_published_once(tmp_path: Path) -> None:
    """The same answer again, from any node, is no further message; a declined query's is none."""
    ground = Ground()

    def published() -> int:
        return sum(len(decode_batch(message)) for message in ground.messages)

    async with pair(tmp_path, ground) as (first, second):
        streams = []
        for run in (first, second):
            cluster_run = run.service.run.quota
            assert isinstance(cluster_run, ClusterRun)
            streams.append(stream_of(cluster_run))
        await rollout(first, "one", " ", "two")
        await streams[0].published()
        assert published() == 2
        await streams[1].read_up()
        await rollout(second, "one", "one", "", "two", "three")
        await streams[1].published()
        assert published() == 3

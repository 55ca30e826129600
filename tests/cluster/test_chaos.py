"""Connections that come and go while nodes answer: the sums that must hold (invariant 15)."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from smartsearch_sidecar.ledger.verify import verify
from tests.fakes.bus import Ground
from tests.fakes.cluster_run import joined, leases, names
from tests.fakes.served import Served, read_records

TOTAL = 240


async def cuts(ground: Ground, chance: random.Random) -> None:
    """Connections that are lost and found again, one or all, for ever."""
    while True:
        await asyncio.sleep(chance.uniform(0.005, 0.05))
        chosen = [chance.choice(ground.buses)] if chance.random() < 0.7 else list(ground.buses)
        for bus in chosen:
            bus.cut()
        await asyncio.sleep(chance.uniform(0.0, 0.1))
        for bus in chosen:
            bus.mend()


async def asks(run: Served, count: int) -> list[int]:
    """Searches of one node, four at a time; their statuses."""
    todo = iter(range(count))

    async def worker() -> list[int]:
        return [(await run.execute(f"query {number}"))[0] for number in todo]

    found = await asyncio.gather(*(worker() for _ in range(4)))
    return [status for statuses in found for status in statuses]


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_no_more_than_the_run_has(tmp_path: Path, seed: int) -> None:
    """However connections come and go, the nodes together admit no more than the run may, none is
    told that it is over before it nearly is, and every ledger is whole.
    """
    chance = random.Random(seed)
    ground = Ground(patience=0.05)
    keys: dict[str, Any] = {"execute__max_calls": TOTAL, "cluster__lease_block": 8}
    async with AsyncExitStack() as stack:
        runs = [
            await stack.enter_async_context(joined(tmp_path, ground, name, 4, **keys))
            for name in names(4)
        ]
        cutting = asyncio.create_task(cuts(ground, chance))
        statuses = await asyncio.gather(*(asks(run, TOTAL // 2) for run in runs))
        cutting.cancel()
        await asyncio.wait([cutting])
        ground.start()
        causes = {run.service.run.state.cause.cause for run in runs if run.service.run.state.cause}
    assert causes == {"quota_exhausted"}, seed
    answered = sum(status == 200 for each in statuses for status in each)
    admitted = [
        sum(record["kind"] == "retrieval.requested" for record in read_records(tmp_path / name))
        for name in names(4)
    ]
    # Three others hold at most a block each when the first one finds nothing left.
    assert TOTAL - 3 * 8 - 4 <= sum(admitted) <= TOTAL, seed
    assert answered <= sum(admitted), seed
    value = leases(ground)
    assert value.taken("searches") <= TOTAL
    assert all(
        value.of(name)["searches"] >= used for name, used in zip(names(4), admitted, strict=True)
    )
    for name in names(4):
        assert (await asyncio.to_thread(verify, tmp_path / name)).ok, seed

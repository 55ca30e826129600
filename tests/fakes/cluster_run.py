"""Several daemons of one run in this process, over one ``Ground``."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from smartsearch_sidecar.cluster.quota_leases import Leases
from tests.fakes.bus import Ground, MemoryBus
from tests.fakes.served import Served, served


def names(count: int) -> list[str]:
    """``node-0`` and on."""
    return [f"node-{number}" for number in range(count)]


@asynccontextmanager
async def joined(
    tmp_path: Path, ground: Ground, name: str, nodes: int, *, resume: bool = False, **keys: Any
) -> AsyncIterator[Served]:
    """One node of a run of ``nodes``; its directory is named for it."""
    settings: dict[str, Any] = {
        "run__nodes": nodes,
        "cluster__nats_url": "nats://127.0.0.1:4222",
        "cluster__run_id": "run-1",
        "cluster__node": name,
        "cluster__lost_seconds": 5.0,
        **keys,
    }
    async with served(
        tmp_path / settings.pop("directory", name),
        connect=ground.connect,
        resume=resume,
        **settings,
    ) as run:
        yield run


@asynccontextmanager
async def cluster(
    tmp_path: Path, count: int = 2, *, ground: Ground | None = None, **keys: Any
) -> AsyncIterator[list[Served]]:
    """A run of ``count`` nodes, all serving."""
    shared = ground or Ground()
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(joined(tmp_path, shared, name, count, **keys))
            for name in names(count)
        ]


def bus_of(ground: Ground, name: str) -> MemoryBus:
    """A node's own connection, to cut it."""
    return next(bus for bus in ground.buses if bus.name == name)


def leases(ground: Ground) -> Leases:
    """What the nodes have leased."""
    return Leases.decode(ground.keys["quota"].value)


def cause_on_disk(run: Served) -> tuple[str, str]:
    """Cause and detail, as ``latch.json`` holds them."""
    value = json.loads((run.directory / "latch.json").read_bytes())
    return value["cause"], value["detail"]

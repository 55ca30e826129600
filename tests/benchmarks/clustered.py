"""``/execute`` of one node with and without other nodes, and a failure's way to all of them.

The servers between the nodes (three, real, on this machine) and the other sidecars take their share
of its cores: on a machine of two that share is in the figures.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks.execute import served
from tests.benchmarks.processes import Target, made_up
from tests.benchmarks.results import Case, Goal, Metrics, Scenario
from tests.benchmarks.settings import Settings
from tests.fakes import native_client
from tests.fakes.nats_cluster import nats_cluster
from tests.fakes.served import EXECUTE_CAPABILITY

SERVERS = 3
NODES = 4
SHOWN = ("per_second", "p50_ms", "p99_ms", "cpu_us", "seconds", "refused", "broken")


@contextmanager
def nodes(folder: Path, count: int) -> Iterator[list[Target]]:
    """A run of so many nodes, each a process, over three servers."""
    with ExitStack() as stack:
        servers = stack.enter_context(nats_cluster(folder / "nats", SERVERS))
        keys: dict[str, Any] = {
            "run__nodes": count,
            "server__execute_capability": EXECUTE_CAPABILITY,
            "cluster__nats_url": servers.url,
            "cluster__run_id": "bench",
        }
        targets = []
        for number in range(count):
            own = folder / f"node-{number}"
            own.mkdir()
            node = made_up(own, 0, cluster__node=f"node-{number}", **keys)
            targets.append(stack.enter_context(node))
        yield targets


@contextmanager
def one_of(folder: Path, count: int) -> Iterator[Target]:
    """The first node of so many; the others have nothing to do."""
    with nodes(folder, count) as targets:
        yield targets[0]


def spread(settings: Settings) -> Metrics:
    """Seconds from one node's failure to the last node's first refusal, under a slow trickle."""

    def refused(target: Target) -> float:
        while not native_client.ask(target.url.removesuffix("/execute"), "who?").startswith("err"):
            pass
        return time.monotonic()

    with (
        settings.scratch() as folder,
        nodes(folder, NODES) as targets,
        ThreadPoolExecutor(NODES) as pool,
    ):
        waiting = [pool.submit(refused, target) for target in targets[1:]]
        time.sleep(settings.seconds)
        began = time.monotonic()
        targets[0].internal().call("POST", "/latch", {"reason": "measured"})
        return {"seconds": max(one.result() for one in waiting) - began}


def clustered(settings: Settings) -> Scenario:
    """One node alone, and the same as one of four."""
    cases = []
    for clients in (few := settings.few, max(settings.clients)):
        alone = partial(served, settings, lambda folder: made_up(folder, 0), clients)
        among = partial(served, settings, lambda folder: one_of(folder, NODES), clients)
        cases.append(Case(f"alone, {clients}", alone, "alone", clients))
        cases.append(Case(f"one of {NODES}, {clients}", among, f"one of {NODES}", clients))
    cases.append(Case("to the last node", partial(spread, settings)))
    return Scenario(
        "clustered",
        f"/execute of one node, alone and as one of {NODES} over {SERVERS} NATS servers",
        SHOWN,
        tuple(cases),
        (
            Goal(f"one of {NODES} over alone, {few}", f"one of {NODES}, {few}", "per_second",
                 f"alone, {few}"),
            Goal("from a node's failure to the last refusal: seconds", "to the last node",
                 "seconds", most=1.0),
        ),
    )  # fmt: skip

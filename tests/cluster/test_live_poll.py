"""An unknown block on one node: what is proven about it once the other nodes were asked.

The same table as at ``Node.answers_known``, walked cell by cell over two nodes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.answer_digests import encode_batch
from smartsearch_sidecar.cluster.bus import OnMessage
from smartsearch_sidecar.cluster.node import LocalRun, Node
from smartsearch_sidecar.config import ClusterSection
from smartsearch_sidecar.run.state import RunState
from tests.fakes.bus import Ground, MemoryBus
from tests.fakes.until import until

FIRST, SECOND, WANTED = b"1" * 28, b"2" * 28, b"3" * 28
ENOUGH_SECONDS = 30.0
SHORT_SECONDS = 0.1
"""For cells in which the time has to run out."""


class Reader(MemoryBus):
    """The bus of the node that asks; its stream may stand still, or lack the first message."""

    late = False
    gap = False

    async def read(self, on_message: OnMessage) -> None:
        def deliver(sequence: int, data: bytes) -> None:
            if not self.late and not (self.gap and sequence == 1):
                on_message(sequence, data)

        await super().read(deliver)


@dataclass
class Pair:
    """Two nodes of one run that read each other's answers."""

    ground: Ground = field(default_factory=lambda: Ground(patience=0.05))
    known: set[bytes] = field(default_factory=set)

    async def start(self, name: str, bus: MemoryBus) -> Node:
        """A node that has begun."""
        section = {"nats_url": "nats://h", "run_id": "r", "node": name}
        node = Node(ClusterSection.model_validate(section), 2)
        self.ground.buses.append(bus)

        async def connect(*_: object, **__: object) -> MemoryBus:
            return bus

        await node.connect(connect, {"searches": 100})
        await node.follow_answers(self.known.add if name == "asker" else lambda _: None)
        await node.join({}, f"run of {name}", "0" * 64, fresh=True)

        async def settled(*_: object) -> None:
            """Nothing is in flight, and nothing has to be written."""

        local = LocalRun(
            state=RunState(),
            busy=lambda: False,
            journal=lambda: (1, "ab"),
            settle=settled,
            close=lambda cause, *, detail: None,
            latched=asyncio.Event(),
            latch_durable=settled,
        )
        await node.begin(local)
        return node


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Pair, Node, Reader, Node]]:
    """The run, the node that asks with its bus, and the other one."""
    run = Pair()
    bus = Reader(run.ground, lambda _: None, "asker")
    asker = await run.start("asker", bus)
    other = await run.start("other", MemoryBus(run.ground, lambda _: None, "other"))
    try:
        await until(
            lambda: (
                {
                    name: row.state is not None
                    for name, row in asker.membership.rows(asker.now()).items()
                }
                == {"asker": True, "other": True}
            )
        )
        yield run, asker, bus, other
    finally:
        for node in (asker, other):
            await node.close()


@pytest.mark.parametrize(
    "published, late, gap, given",
    list(itertools.product(("all", "other silent", "asker cut off"), *[(False, True)] * 3)),
)
async def test_every_cell_of_an_unknown_block(
    published: str, late: bool, gap: bool, given: bool
) -> None:
    """A block is refused only where no node can have given the answer; else nothing is proven."""
    async with pair() as (run, asker, bus, other):
        bus.late, bus.gap = late, gap
        for digest in (FIRST, SECOND):  # a later message is what shows that one is missing
            run.ground.append(encode_batch([digest]))
        assert other.answers is not None
        if given:
            other.answers.add(WANTED)
        if published == "other silent":
            run.ground.buses[1].cut()
        elif published == "asker cut off":
            bus.cut()
        runs_out = published != "all" or late
        deadline = asker.now() + (SHORT_SECONDS if runs_out else ENOUGH_SECONDS)
        asking = asker.answers_known(deadline)
        if runs_out:
            with pytest.raises(errors.ClusterUnreachable):
                await asking
        elif gap:
            with pytest.raises(errors.ClusterUnreadable, match="1 messages of answers"):
                await asking
        else:
            await asking
            assert run.known == {FIRST, SECOND, *([WANTED] if given else [])}


async def test_the_silent_node_is_named() -> None:
    """The refusal names the node that did not publish, and no other."""
    async with pair() as (run, asker, _, _):
        run.ground.buses[1].cut()
        with pytest.raises(errors.ClusterUnreachable, match=r"^node other did not publish"):
            await asker.answers_known(asker.now() + SHORT_SECONDS)

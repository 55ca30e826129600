"""The nodes' common ground in memory: as many nodes of one process as a test wants, one ``Ground``.

What it promises is what ``cluster/nats.py`` promises over real servers, and the same tests hold
both to it: values are told later on the loop and never from inside the call that set them, a value
that was replaced before it was told may be skipped, and what was missed while a node was cut off
is told once it is mended, before ``linked(True)``. A prefix is a key and all keys below it, by
whole words between dots: ``state`` and ``state.`` both watch ``state.a`` and not ``states``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.bus import Asked, Entry, Heard, Linked, Read
from smartsearch_sidecar.config import ClusterSection


def below(prefix: str, key: str) -> bool:
    """Whether a watch of ``prefix`` hears of ``key``; an empty prefix hears of every key."""
    word = prefix.rstrip(".")
    return not word or key == word or key.startswith(f"{word}.")


@dataclass
class Ground:
    """Keys, stream and nodes of one run.

    Attributes:
        patience: seconds a call of a node that is cut off waits to be mended before it raises.
        writes: how many values and messages were ever kept: the traffic of a test.
    """

    patience: float = 0.2
    keys: dict[str, Entry] = field(default_factory=dict)
    messages: list[bytes] = field(default_factory=list)
    buses: list[MemoryBus] = field(default_factory=list)
    writes: int = 0

    async def connect(
        self, cluster: ClusterSection, run_id: str, *, linked: Linked, replicas: int | None = None
    ) -> MemoryBus:
        """What ``cluster.nats.connect`` does, by the same signature; the run is this ground's."""
        del run_id, replicas
        return self.bus(linked, name=cluster.node)

    def bus(self, linked: Linked = lambda _: None, *, name: str = "") -> MemoryBus:
        """One node's bus, connected."""
        bus = MemoryBus(self, linked, name)
        self.buses.append(bus)
        return bus

    def stop(self) -> None:
        """Every node loses its connection, as when all servers are gone."""
        for bus in self.buses:
            bus.cut()

    def start(self) -> None:
        """Every node has it back; nothing that was kept is lost."""
        for bus in self.buses:
            bus.mend()

    def keep(self, key: str, value: bytes) -> None:
        """Sets a key and lets everyone hear of it."""
        self.writes += 1
        self.keys[key] = Entry(value, self.writes)
        self.spread()

    def append(self, data: bytes) -> int:
        """Appends to the stream and lets everyone read it."""
        self.writes += 1
        self.messages.append(data)
        self.spread()
        return len(self.messages)

    def spread(self) -> None:
        """Tells every node of what is new, in a later turn of the loop."""
        loop = asyncio.get_running_loop()
        for bus in self.buses:
            loop.call_soon(bus.tell)


class MemoryBus:
    """One node's ``Bus``; ``cut`` and ``mend`` are what a test does to it."""

    def __init__(self, ground: Ground, linked: Linked, name: str) -> None:
        self.name = name
        self._ground = ground
        self._linked = linked
        self._up = asyncio.Event()
        self._up.set()
        self._closed = False
        self._followings: list[Callable[[], None]] = []
        self._asked: Asked | None = None

    @property
    def connected(self) -> bool:
        return self._up.is_set() and not self._closed

    def cut(self) -> None:
        """This node loses its connection; told at once, as ``linked(False)``."""
        if self.connected:
            self._up.clear()
            self._linked(False)

    def mend(self) -> None:
        """It has it back: what was missed is told first, then ``linked(True)``."""
        if not self._closed and not self._up.is_set():
            self._up.set()
            self.tell()
            self._linked(True)

    def tell(self) -> None:
        """Tells what is new here."""
        for tell in tuple(self._followings) if self.connected else ():
            tell()

    async def get(self, key: str) -> Entry | None:
        await self._reached()
        return self._ground.keys.get(key)

    async def create(self, key: str, value: bytes) -> bool:
        return await self.update(key, value, 0)

    async def update(self, key: str, value: bytes, revision: int) -> bool:
        await self._reached()
        now = self._ground.keys.get(key)
        if (now.revision if now else 0) != revision:
            return False
        self._ground.keep(key, value)
        return True

    async def put(self, key: str, value: bytes) -> None:
        await self._reached()
        self._ground.keep(key, value)

    async def watch(self, prefix: str, heard: Heard) -> None:
        await self._reached()
        told = 0

        def tell() -> None:
            nonlocal told
            for key, entry in sorted(self._ground.keys.items(), key=lambda item: item[1].revision):
                if entry.revision > told and below(prefix, key):
                    told = entry.revision
                    heard(key, entry.value)

        self._follow(tell)

    async def publish(self, data: bytes) -> int:
        await self._reached()
        return self._ground.append(data)

    async def read(self, read: Read) -> None:
        told = 0

        def tell() -> None:
            nonlocal told
            while told < len(self._ground.messages):
                told += 1
                read(told, self._ground.messages[told - 1])

        asyncio.get_running_loop().call_soon(self._follow, tell)

    async def last(self) -> int:
        await self._reached()
        return len(self._ground.messages)

    async def ask(self, question: bytes, *, answers: int, seconds: float) -> Sequence[bytes]:
        await self._reached()
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        heard: list[bytes] = []
        waiting = {
            asyncio.ensure_future(bus.asked(question)) for bus in self._ground.buses if bus.answers
        }
        try:
            while waiting and len(heard) < answers:
                done, waiting = await asyncio.wait(
                    waiting,
                    timeout=max(0.0, end - loop.time()),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not done:
                    break
                heard += [task.result() for task in done]
            if len(heard) < answers:
                # Who is silent may yet speak: a real bus cannot tell, and waits.
                await asyncio.sleep(max(0.0, end - loop.time()))
            return heard[:answers]
        finally:
            for task in waiting:
                task.cancel()

    async def answer(self, asked: Asked) -> None:
        await self._reached()
        self._asked = asked

    @property
    def answers(self) -> bool:
        """Whether a question reaches this node."""
        return self.connected and self._asked is not None

    async def asked(self, question: bytes) -> bytes:
        """This node's answer; one that is cut off meanwhile is never heard."""
        if self._asked is None:
            raise errors.CLUSTER_UNREACHABLE(f"the node {self.name} does not answer questions")
        answer = await self._asked(question)
        await self._up.wait()
        return answer

    async def close(self) -> None:
        self._closed = True
        self._followings.clear()
        self._asked = None
        if self in self._ground.buses:
            self._ground.buses.remove(self)

    def _follow(self, tell: Callable[[], None]) -> None:
        if self._closed:
            return
        self._followings.append(tell)
        if self.connected:
            tell()

    async def _reached(self) -> None:
        # Never answered in the same turn of the loop: a caller that leans on it would break.
        await asyncio.sleep(0)
        if self._closed:
            raise errors.CLUSTER_UNREACHABLE("the connection to the nodes' common ground is closed")
        try:
            async with asyncio.timeout(self._ground.patience):
                await self._up.wait()
        except TimeoutError:
            raise errors.CLUSTER_UNREACHABLE("the nodes' common ground does not answer") from None

"""The ``Bus`` in memory: as many nodes of one process as a test wants, over one ``Ground``.

What it promises is what ``cluster/nats/bus.py`` promises over real servers, and the same tests hold
both to it. Values are delivered later on the loop and never from inside the call that set them. A
value that was replaced before it was delivered may be skipped. What was missed while a node was cut
off is delivered once it is mended, before ``on_link(True)``. A prefix is a key and all keys below
it, by whole words between dots: ``state`` and ``state.`` both watch ``state.a`` and not ``states``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.bus import Entry, OnLink, OnMessage, OnQuestion, OnValue
from smartsearch_sidecar.config import ClusterSection


def below(prefix: str, key: str) -> bool:
    """Whether a watch of ``prefix`` includes ``key``; an empty prefix includes every key."""
    name = prefix.rstrip(".")
    return not name or key == name or key.startswith(f"{name}.")


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
        self, cluster: ClusterSection, run_id: str, *, on_link: OnLink, replicas: int | None = None
    ) -> MemoryBus:
        """As ``cluster.nats.bus.connect``, by the same signature; the run is this ground's."""
        del run_id, replicas
        return self.bus(on_link, name=cluster.node)

    def bus(self, on_link: OnLink = lambda _: None, *, name: str = "") -> MemoryBus:
        """One node's bus, connected."""
        bus = MemoryBus(self, on_link, name)
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
        """Sets a key and delivers it to every watch."""
        self.writes += 1
        self.keys[key] = Entry(value, self.writes)
        self.spread()

    def append(self, data: bytes) -> int:
        """Appends to the stream and delivers it to every reader."""
        self.writes += 1
        self.messages.append(data)
        self.spread()
        return len(self.messages)

    def spread(self) -> None:
        """Delivers what is new to every node, in a later turn of the loop."""
        loop = asyncio.get_running_loop()
        for bus in self.buses:
            loop.call_soon(bus.deliver)


class MemoryBus:
    """One node's ``Bus``; ``cut`` and ``mend`` are what a test does to it."""

    def __init__(self, ground: Ground, on_link: OnLink, name: str) -> None:
        self.name = name
        self._ground = ground
        self._on_link = on_link
        self._up = asyncio.Event()
        self._up.set()
        self._closed = False
        self._followers: list[Callable[[], None]] = []
        self._on_question: OnQuestion | None = None

    @property
    def connected(self) -> bool:
        return self._up.is_set() and not self._closed

    def cut(self) -> None:
        """This node loses its connection; reported at once, as ``on_link(False)``."""
        if self.connected:
            self._up.clear()
            self._on_link(False)

    def mend(self) -> None:
        """It has it back: what was missed is delivered first, then ``on_link(True)``."""
        if not self._closed and not self._up.is_set():
            self._up.set()
            self.deliver()
            self._on_link(True)

    def deliver(self) -> None:
        """Delivers what is new here."""
        for deliver in tuple(self._followers) if self.connected else ():
            deliver()

    async def get(self, key: str) -> Entry | None:
        await self._reached()
        return self._ground.keys.get(key)

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

    async def watch(self, prefix: str, on_value: OnValue) -> None:
        await self._reached()
        done = 0

        def deliver() -> None:
            nonlocal done
            for key, entry in sorted(self._ground.keys.items(), key=lambda item: item[1].revision):
                if entry.revision > done and below(prefix, key):
                    done = entry.revision
                    on_value(key, entry.value)

        self._follow(deliver)

    async def publish(self, data: bytes) -> int:
        await self._reached()
        return self._ground.append(data)

    async def read(self, on_message: OnMessage) -> None:
        done = 0

        def deliver() -> None:
            nonlocal done
            while done < len(self._ground.messages):
                done += 1
                on_message(done, self._ground.messages[done - 1])

        asyncio.get_running_loop().call_soon(self._follow, deliver)

    async def last(self) -> int:
        await self._reached()
        return len(self._ground.messages)

    async def ask(self, question: bytes, *, answers: int, seconds: float) -> Sequence[bytes]:
        await self._reached()
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        found: list[bytes] = []
        waiting = {
            asyncio.ensure_future(bus.asked(question)) for bus in self._ground.buses if bus.answers
        }
        try:
            while waiting and len(found) < answers:
                done, waiting = await asyncio.wait(
                    waiting,
                    timeout=max(0.0, end - loop.time()),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not done:
                    break
                found += [task.result() for task in done]
            if len(found) < answers:
                # A silent node may answer yet: a real bus cannot know, and waits.
                await asyncio.sleep(max(0.0, end - loop.time()))
            return found[:answers]
        finally:
            for task in waiting:
                task.cancel()

    async def answer(self, on_question: OnQuestion) -> None:
        await self._reached()
        self._on_question = on_question

    @property
    def answers(self) -> bool:
        """Whether a question reaches this node."""
        return self.connected and self._on_question is not None

    async def asked(self, question: bytes) -> bytes:
        """This node's answer; that of a node that is cut off meanwhile never arrives."""
        if self._on_question is None:
            raise errors.CLUSTER_UNREACHABLE(f"the node {self.name} does not answer questions")
        answer = await self._on_question(question)
        await self._up.wait()
        return answer

    async def close(self) -> None:
        self._closed = True
        self._followers.clear()
        self._on_question = None
        if self in self._ground.buses:
            self._ground.buses.remove(self)

    def _follow(self, deliver: Callable[[], None]) -> None:
        if self._closed:
            return
        self._followers.append(deliver)
        if self.connected:
            deliver()

    async def _reached(self) -> None:
        # Never answered in the same turn of the loop: a caller that leans on it would break.
        await asyncio.sleep(0)
        if self._closed:
            raise errors.CLUSTER_UNREACHABLE("the connection between the nodes is closed")
        try:
            async with asyncio.timeout(self._ground.patience):
                await self._up.wait()
        except TimeoutError:
            raise errors.CLUSTER_UNREACHABLE(
                "the connection between the nodes does not answer"
            ) from None

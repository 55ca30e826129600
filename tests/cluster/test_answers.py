"""The stream of answers as one node uses it: published in time, read so far, never passed over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.answers import AnswerStream
from smartsearch_sidecar.cluster.bus import Read
from smartsearch_sidecar.cluster.digests import encode_batch
from tests.fakes.bus import Ground, MemoryBus
from tests.fakes.until import until

ONE, TWO = b"1" * 16, b"2" * 16


class Behind(MemoryBus):
    """A node whose messages come when the test hands them over."""

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground, lambda _: None, "behind")
        self.hand: Read = lambda _sequence, _data: None

    async def read(self, read: Read) -> None:
        self.hand = read


class Reader:
    """A stream under test, and what it told."""

    def __init__(self) -> None:
        self.ground = Ground(patience=0.05)
        self.bus = Behind(self.ground)
        self.ground.buses.append(self.bus)
        self.learnt: list[bytes] = []
        self.broken: list[errors.SidecarError] = []
        self.stream = AnswerStream(self.bus, learn=self.learnt.append, broken=self.broken.append)


@pytest.fixture
async def reader() -> AsyncIterator[Reader]:
    """A stream that reads and publishes."""
    found = Reader()
    await found.stream.begin()
    task = asyncio.create_task(found.stream.run())
    yield found
    task.cancel()
    await asyncio.wait([task])


async def test_read_up_waits_for_what_was_there(reader: Reader) -> None:
    """Who asks for everything up to now waits for the last message there is, and no longer."""
    first, second = encode_batch([ONE]), encode_batch([TWO])
    reader.ground.append(first)
    reader.ground.append(second)
    waiting = asyncio.create_task(reader.stream.read_up())
    await asyncio.sleep(0.01)
    reader.bus.hand(1, first)
    await asyncio.sleep(0.01)
    assert not waiting.done()
    reader.bus.hand(2, second)
    await waiting
    assert reader.learnt == [ONE, TWO]
    reader.bus.hand(2, second)  # told again after a reconnect
    assert reader.learnt == [ONE, TWO]


async def test_a_gap_is_no_proof(reader: Reader) -> None:
    """A message that never came leaves it open whether an answer was given."""
    for data in (encode_batch([ONE]), encode_batch([TWO])):
        reader.ground.append(data)
    reader.bus.hand(2, encode_batch([TWO]))
    with pytest.raises(errors.ClusterUnreadable, match="never told"):
        await reader.stream.read_up()


async def test_what_is_no_message_is_told(reader: Reader) -> None:
    """Bytes that no node of this version writes are a failure of the run, and named."""
    reader.bus.hand(1, b"something else")
    assert [type(exc) for exc in reader.broken] == [errors.ClusterUnreadable]


async def test_published_means_kept(reader: Reader) -> None:
    """Published is said once the servers have kept all that was added, also over a lost link."""
    reader.bus.cut()
    reader.stream.add(ONE)
    waiting = asyncio.create_task(reader.stream.published())
    await until(lambda: reader.stream.waiting == 1)
    await asyncio.sleep(0.1)
    assert not waiting.done()
    reader.bus.mend()
    await waiting
    assert reader.ground.messages == [encode_batch([ONE])]
    assert reader.stream.waiting == 0
    await reader.stream.published()

"""Digests of answers between nodes: the message, the backlog, the stream as one node uses it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster import answer_digests
from smartsearch_sidecar.cluster.answer_digests import (
    BACKLOG_MAX,
    BATCH_MAX,
    BATCH_SECONDS,
    AnswerStream,
    Backlog,
    decode_batch,
    encode_batch,
)
from smartsearch_sidecar.cluster.bus import OnMessage
from smartsearch_sidecar.reward.provenance import DIGEST_BYTES, answer_digest
from tests.fakes.bus import Ground, MemoryBus
from tests.fakes.until import until


def digest(number: int) -> bytes:
    """One of many."""
    return number.to_bytes(DIGEST_BYTES, "big")


# --- the message ----------------------------------------------------------------------------------


def test_a_digest_is_what_provenance_makes() -> None:
    """Both rooms, which may not know each other, mean the same 28 bytes."""
    assert answer_digests.DIGEST_BYTES == DIGEST_BYTES == len(answer_digest("q", "x")) == 28


def test_the_bytes_of_a_message_are_pinned() -> None:
    """A mark of the format, then the digests end to end."""
    assert encode_batch([digest(1), digest(2)]) == b"SSD2" + digest(1) + digest(2)


def test_every_length_is_read_or_refused() -> None:
    """A message is a whole number of digests, from one to the bound."""
    whole = encode_batch(map(digest, range(3)))
    for cut in range(len(whole) + 2):
        data = (whole + b"x")[:cut]
        if cut in (32, 60, 88):
            assert encode_batch(decode_batch(data)) == data
        else:
            with pytest.raises(errors.ClusterUnreadable):
                decode_batch(data)
    most = encode_batch(map(digest, range(BATCH_MAX)))
    assert len(decode_batch(most)) == BATCH_MAX
    with pytest.raises(errors.ClusterUnreadable):
        decode_batch(most + digest(0))


def test_another_format_is_refused() -> None:
    """A message of another version is not read as digests."""
    with pytest.raises(errors.ClusterUnreadable):
        decode_batch(b"SSD3" + digest(1))


# --- publishing -----------------------------------------------------------------------------------


def test_a_digest_waits_for_others_only_so_long() -> None:
    """The first digest of a batch sets the time; those that follow go with it."""
    backlog = Backlog()
    assert backlog.due(0.0) is None
    backlog.add(digest(1), 10.0)
    backlog.add(digest(2), 10.015)
    assert backlog.due(10.0) == pytest.approx(BATCH_SECONDS)
    assert backlog.due(10.5) == 0.0
    assert decode_batch(backlog.take()) == [digest(1), digest(2)]


def test_a_full_batch_goes_at_once() -> None:
    """Under load a message is as large as it may be, and goes without waiting."""
    backlog = Backlog()
    for number in range(BATCH_MAX + 1):
        backlog.add(digest(number), 10.0)
    assert backlog.due(10.0) == 0.0
    assert len(decode_batch(backlog.take())) == BATCH_MAX
    assert len(backlog) == BATCH_MAX + 1
    backlog.kept()
    assert len(backlog) == 1
    assert backlog.published == BATCH_MAX


def test_one_message_is_under_way() -> None:
    """What comes meanwhile waits, and is due when the answer is there."""
    backlog = Backlog()
    backlog.add(digest(1), 10.0)
    backlog.take()
    backlog.add(digest(2), 10.01)
    assert backlog.due(99.0) is None
    with pytest.raises(errors.InvariantBroken):
        backlog.take()
    backlog.kept()
    assert backlog.due(10.01) == pytest.approx(BATCH_SECONDS)


def test_an_unconfirmed_message_goes_again_and_first() -> None:
    """Nothing is lost and nothing is reordered when a publication's fate is unknown."""
    backlog = Backlog()
    for number in range(4):
        backlog.add(digest(number), 10.0)
    first = backlog.take()
    backlog.add(digest(4), 10.0)
    backlog.failed()
    again = decode_batch(backlog.take())
    assert again[:4] == decode_batch(first)
    assert again[4:] == [digest(4)]
    assert backlog.published == 0


def test_a_failed_message_is_due_by_its_own_age() -> None:
    """What failed is old already: it does not wait for others again."""
    backlog = Backlog()
    backlog.add(digest(1), 10.0)
    backlog.take()
    backlog.add(digest(2), 50.0)
    backlog.failed()
    assert backlog.due(50.0) == 0.0


def test_a_full_backlog_refuses_rather_than_drops() -> None:
    """A digest that was dropped would refuse an honest rollout elsewhere."""
    backlog = Backlog()
    for number in range(BACKLOG_MAX):
        backlog.add(digest(number), 0.0)
    with pytest.raises(errors.ClusterUnreachable):
        backlog.add(digest(1), 0.0)
    backlog.take()
    with pytest.raises(errors.ClusterUnreachable):
        backlog.add(digest(1), 0.0)
    backlog.kept()
    backlog.add(digest(1), 0.0)


def test_only_what_is_under_way_is_settled() -> None:
    """A settlement without a message, and a digest of another size, are our own mistakes."""
    backlog = Backlog()
    for mistake in (backlog.take, backlog.kept, backlog.failed):
        with pytest.raises(errors.InvariantBroken):
            mistake()
    with pytest.raises(errors.InvariantBroken):
        backlog.add(b"short", 0.0)


# --- the stream -----------------------------------------------------------------------------------

ONE, TWO = b"1" * DIGEST_BYTES, b"2" * DIGEST_BYTES


class Behind(MemoryBus):
    """A node whose messages come when the test hands them over."""

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground, lambda _: None, "behind")
        self.hand: OnMessage = lambda _sequence, _data: None

    async def read(self, on_message: OnMessage) -> None:
        self.hand = on_message


class Reader:
    """A stream under test, and what it told."""

    def __init__(self) -> None:
        self.ground = Ground(patience=0.05)
        self.bus = Behind(self.ground)
        self.ground.buses.append(self.bus)
        self.learnt: list[bytes] = []
        self.broken: list[errors.SidecarError] = []
        self.stream = AnswerStream(
            self.bus, on_digest=self.learnt.append, on_failure=self.broken.append
        )


@pytest.fixture
async def reader() -> AsyncIterator[Reader]:
    """A stream that reads and publishes."""
    found = Reader()
    await found.stream.begin()
    task = asyncio.create_task(found.stream.run())
    yield found
    task.cancel()
    await asyncio.wait([task])


async def test_messages_of_an_earlier_version_say_nothing(reader: Reader) -> None:
    """Digests that bind no query are passed over; the others are learnt, and nothing has failed."""
    reader.bus.hand(1, b"SSD1" + bytes(32))
    reader.bus.hand(2, encode_batch([ONE]))
    assert reader.learnt == [ONE]
    assert reader.broken == []


async def test_read_up_waits_for_what_was_there(reader: Reader) -> None:
    """A call for everything up to now waits for the last message there is, and no longer."""
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


async def test_a_message_that_comes_again_is_not_news(reader: Reader) -> None:
    """Messages come again after a reconnect; the empty stream is read already."""
    await reader.stream.read_up()
    for number in (1, 2, 2, 1, 3):
        if number > len(reader.ground.messages):
            reader.ground.append(encode_batch([digest(number)]))
        reader.bus.hand(number, encode_batch([digest(number)]))
    assert reader.learnt == [digest(1), digest(2), digest(3)]
    await reader.stream.read_up()


async def test_messages_that_never_come_are_counted(reader: Reader) -> None:
    """A stream that lost messages proves nothing any more."""
    reader.bus.hand(1, encode_batch([ONE]))
    reader.bus.hand(4, encode_batch([TWO]))
    with pytest.raises(errors.ClusterUnreadable, match="2 messages of answers never came"):
        await reader.stream.read_up()


async def test_a_gap_is_no_proof(reader: Reader) -> None:
    """A message that never came leaves open whether an answer was given."""
    for data in (encode_batch([ONE]), encode_batch([TWO])):
        reader.ground.append(data)
    reader.bus.hand(2, encode_batch([TWO]))
    with pytest.raises(errors.ClusterUnreadable, match="never came"):
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
    await until(lambda: len(reader.stream._backlog) == 1)
    await asyncio.sleep(0.1)
    assert not waiting.done()
    reader.bus.mend()
    await waiting
    assert reader.ground.messages == [encode_batch([ONE])]
    assert len(reader.stream._backlog) == 0
    await reader.stream.published()

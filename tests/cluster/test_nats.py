"""The ``Bus`` over real NATS servers and, by the same tests, in memory."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from logging.handlers import BufferingHandler
from typing import Protocol

import pytest
from nats.aio.client import Client
from nats.aio.transport import TcpTransport

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.bus import Bus, Entry, OnLink
from smartsearch_sidecar.cluster.nats.bus import NatsBus, connect
from smartsearch_sidecar.cluster.nats.connection import TASKS, TRANSPORT, WRITER
from smartsearch_sidecar.cluster.nats.streams import api
from smartsearch_sidecar.config import ClusterSection
from tests.fakes.bus import Ground
from tests.fakes.nats_cluster import NatsCluster, NatsServer, Way, nats_cluster
from tests.fakes.until import until as until_it_holds

pytestmark = pytest.mark.process

UNTIL_SECONDS = 30.0
# Servers of another process answer late on a busy machine; how late is never what is tested.
until = partial(until_it_holds, seconds=UNTIL_SECONDS, pause=0.01)
RUNS = count()


def ignored(connected: bool) -> None:
    """Takes changes of the connection in tests that do not look at them."""


def settings(url: str, *, lost_seconds: float = 15) -> ClusterSection:
    """The section of one node."""
    return ClusterSection.model_validate(
        {"nats_url": url, "run_id": "r", "node": "a", "lost_seconds": lost_seconds}
    )


class Place(Protocol):
    """Where the nodes of one run meet; what the tests of both kinds need of it."""

    async def bus(self, on_link: OnLink = ignored) -> Bus: ...

    def stop(self) -> None: ...

    def start(self) -> None: ...


@dataclass
class InMemory:
    """The fake."""

    ground: Ground = field(default_factory=Ground)

    async def bus(self, on_link: OnLink = ignored) -> Bus:
        return await self.ground.connect(settings("nats://x"), "r", on_link=on_link)

    def stop(self) -> None:
        self.ground.stop()

    def start(self) -> None:
        self.ground.start()


@dataclass
class OnNats:
    """Real servers, which other tests may have used before: each test has a run of its own."""

    servers: NatsCluster
    stack: AsyncExitStack
    lost_seconds: float = 15
    run_id: str = field(default_factory=lambda: f"run-{next(RUNS)}")

    async def bus(self, on_link: OnLink = ignored, *, url: str = "") -> NatsBus:
        cluster = settings(url or self.servers.url, lost_seconds=self.lost_seconds)
        bus = await connect(cluster, self.run_id, on_link=on_link)
        assert isinstance(bus, NatsBus)
        self.stack.push_async_callback(bus.close)
        return bus

    def stop(self) -> None:
        self.servers.kill()

    def start(self) -> None:
        self.servers.start()


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsCluster]:
    """A server alone, with a password."""
    with nats_cluster(tmp_path_factory.mktemp("one"), credentials="user:hunter2") as servers:
        yield servers


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsCluster]:
    """Three servers that replicate for each other."""
    with nats_cluster(tmp_path_factory.mktemp("three"), 3) as servers:
        yield servers


@asynccontextmanager
async def on_nats(servers: NatsCluster, *, lost_seconds: float = 15) -> AsyncIterator[OnNats]:
    """A run on servers that are all up at its start, after any other test."""
    servers.start()
    async with AsyncExitStack() as stack:
        yield OnNats(servers, stack, lost_seconds)


@pytest.fixture(params=["memory", "nats"])
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    """Both kinds, one after the other. Calls give up soon."""
    if request.param == "memory":
        yield InMemory()
    else:
        async with on_nats(request.getfixturevalue("one"), lost_seconds=1.5) as run:
            yield run


@pytest.fixture
async def run(one: NatsCluster) -> AsyncIterator[OnNats]:
    """A run on the server alone."""
    async with on_nats(one) as run:
        yield run


# --- keys ----------------------------------------------------------------------------------------


async def test_a_key_is_created_once(place: Place) -> None:
    """Of two nodes that create a key only the first does, and both read what it said."""
    a, b = await place.bus(), await place.bus()
    assert await a.get("latch") is None
    assert await a.update("latch", b"first", 0)
    assert not await b.update("latch", b"second", 0)
    for bus in (a, b):
        entry = await bus.get("latch")
        assert entry is not None
        assert entry.value == b"first"


@pytest.mark.both_loops
async def test_one_of_many_changes_wins(place: Place) -> None:
    """Of many nodes that change a key from the same revision exactly one does."""
    buses = [await place.bus() for _ in range(4)]
    assert await buses[0].update("quota", b"0", 0)
    for _ in range(3):
        entry = await buses[0].get("quota")
        assert entry is not None
        won = await asyncio.gather(
            *(bus.update("quota", b"%d" % n, entry.revision) for n, bus in enumerate(buses * 2))
        )
        assert sum(won) == 1
        after = await buses[1].get("quota")
        assert after == Entry(b"%d" % (won.index(True) % 8), after.revision if after else 0)


async def test_put_sets_any_key(place: Place) -> None:
    """A value is put over another, and a change from the revision before it fails."""
    bus = await place.bus()
    await bus.put("state.a", b"1")
    before = await bus.get("state.a")
    await bus.put("state.a", b"")
    after = await bus.get("state.a")
    assert before is not None
    assert after is not None
    assert after.value == b""
    assert after.revision > before.revision
    assert not await bus.update("state.a", b"3", before.revision)


async def test_a_watch_tells_what_is_and_what_comes(place: Place) -> None:
    """A watch tells the present before it returns, then every change in order, of its words."""
    a, b = await place.bus(), await place.bus()
    for key, value in (("state.a", b"1"), ("states", b"no"), ("state.b", b"2"), ("latch", b"no")):
        await a.put(key, value)
    heard: list[tuple[str, bytes]] = []
    exact: list[tuple[str, bytes]] = []
    every: list[str] = []
    await b.watch("state.", lambda key, value: heard.append((key, value)))
    await b.watch("nothing", lambda key, value: exact.append((key, value)))
    await b.watch("", lambda key, _: every.append(key))
    assert heard == [("state.a", b"1"), ("state.b", b"2")]
    assert exact == []
    assert every == ["state.a", "states", "state.b", "latch"]
    for number in range(3, 8):
        await a.put("state.a", b"%d" % number)
        await until(lambda: heard[-1] == ("state.a", b"%d" % number))  # noqa: B023 - now
    assert heard[2:] == [("state.a", b"%d" % number) for number in range(3, 8)]
    await a.put("nothing", b"something")
    await until(lambda: exact == [("nothing", b"something")])


# --- the stream ----------------------------------------------------------------------------------


async def test_a_stream_is_read_from_its_first_message(place: Place) -> None:
    """Early and late, a reader gets every message once, by the numbers publishing gave."""
    a, b = await place.bus(), await place.bus()
    assert await b.last() == 0
    early: list[tuple[int, bytes]] = []
    late: list[tuple[int, bytes]] = []
    await b.read(lambda number, data: early.append((number, data)))
    messages = [b"%d" % n for n in range(50)]
    numbers = await asyncio.gather(*(a.publish(data) for data in messages))
    assert sorted(numbers) == list(range(1, 51))
    assert await b.last() == 50
    expected = sorted(zip(numbers, messages, strict=True))
    await until(lambda: len(early) == 50)
    await a.read(lambda number, data: late.append((number, data)))
    await until(lambda: len(late) == 50)
    assert early == late == expected


# --- questions -----------------------------------------------------------------------------------


@pytest.mark.both_loops
async def test_all_nodes_are_asked(place: Place) -> None:
    """A question reaches every node that answers, who asked included."""
    buses = [await place.bus() for _ in range(3)]
    for number, bus in enumerate(buses):

        async def asked(question: bytes, number: int = number) -> bytes:
            return question + b"%d" % number

        await bus.answer(asked)
    for bus in buses:
        answers = await bus.ask(b"node ", answers=3, seconds=UNTIL_SECONDS)
        assert sorted(answers) == [b"node 0", b"node 1", b"node 2"]


async def test_who_answers_late_is_not_waited_for(place: Place) -> None:
    """The answers heard in time are given; one that takes its time keeps no other question up."""
    a, b = await place.bus(), await place.bus()
    hurry = asyncio.Event()
    asked_of_b: list[bytes] = []

    async def prompt(question: bytes) -> bytes:
        return b"a:" + question

    async def slow(question: bytes) -> bytes:
        asked_of_b.append(question)
        if question == b"1":
            await hurry.wait()
        return b"b:" + question

    await a.answer(prompt)
    await b.answer(slow)
    assert await a.ask(b"1", answers=2, seconds=0.2) == [b"a:1"]
    assert sorted(await a.ask(b"2", answers=2, seconds=UNTIL_SECONDS)) == [b"a:2", b"b:2"]
    assert await a.ask(b"3", answers=0, seconds=UNTIL_SECONDS) == []
    hurry.set()
    assert asked_of_b[:2] == [b"1", b"2"]


async def test_no_node_answers(place: Place) -> None:
    """A question that reaches no node ends in time, without answers."""
    bus = await place.bus()
    assert await bus.ask(b"?", answers=1, seconds=0.1) == []


# --- losing it -----------------------------------------------------------------------------------


@pytest.mark.both_loops
async def test_all_gone_and_back(place: Place) -> None:
    """Without servers every call fails by name; with them again all goes on as if nothing was."""
    told: list[bool] = []
    a, b = await place.bus(told.append), await place.bus()
    heard: list[bytes] = []
    read: list[tuple[int, bytes]] = []

    async def asked(question: bytes) -> bytes:
        return question

    await a.answer(asked)
    await a.watch("state", lambda _, value: heard.append(value))
    await a.read(lambda number, data: read.append((number, data)))
    await b.put("state.b", b"before")
    await b.publish(b"before")
    await until(lambda: heard and read)
    assert a.connected

    place.stop()
    calls: list[Awaitable[object]] = [
        a.get("latch"),
        a.update("latch", b"", 0),
        a.update("latch", b"", 7),
        a.put("latch", b""),
        a.publish(b""),
        a.last(),
        a.watch("latch", lambda _key, _value: None),
        a.ask(b"?", answers=1, seconds=0.3),
    ]
    failed = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(each) for each in failed] == [errors.ClusterUnreachable] * len(calls)
    await until(lambda: not a.connected)

    place.start()
    await until(lambda: a.connected and b.connected)
    assert told == [False, True]
    await b.put("state.b", b"after")
    assert await b.publish(b"after") == 2
    await until(lambda: len(heard) == 2 and len(read) == 2)
    assert heard == [b"before", b"after"]
    assert read == [(1, b"before"), (2, b"after")]
    assert await a.get("latch") is None
    assert await b.ask(b"!", answers=1, seconds=UNTIL_SECONDS) == [b"!"]


async def test_closing(place: Place) -> None:
    """A bus is closed twice and while it is not connected; then it hears and does nothing."""
    told: list[bool] = []
    heard: list[bytes] = []
    a, b = await place.bus(told.append), await place.bus()
    await a.watch("state", lambda _, value: heard.append(value))
    await a.close()
    await a.close()
    assert not a.connected
    await b.put("state.b", b"1")
    with pytest.raises(errors.ClusterUnreachable):
        await a.get("state.b")
    with pytest.raises(errors.ClusterUnreachable):
        await a.ask(b"?", answers=1, seconds=UNTIL_SECONDS)
    place.stop()
    await until(lambda: not b.connected)
    await b.close()
    place.start()
    assert heard == []
    assert told == []


# --- one real server -----------------------------------------------------------------------------


async def test_nodes_make_it_together(run: OnNats) -> None:
    """Nodes that start at once make one bucket and one stream, on disk, one value a key."""
    buses = await asyncio.gather(*(run.bus() for _ in range(6)))
    assert sorted([await bus.update("agreement", b"", 0) for bus in buses]) == [False] * 5 + [True]
    connection = await buses[0]._dialer.reach()
    info = await api(connection, f"$JS.API.STREAM.INFO.KV_smartsearch-{run.run_id}", b"")
    assert info["config"]["storage"] == "file"
    assert info["config"]["max_msgs_per_subject"] == 1
    assert info["config"]["num_replicas"] == 1


async def test_what_is_not_ours_is_refused(run: OnNats) -> None:
    """A stream of the run's name that another program made is not taken for the run's."""
    elsewhere = await OnNats(run.servers, run.stack).bus()
    connection = await elsewhere._dialer.reach()
    name = f"KV_smartsearch-{run.run_id}"
    config = {"name": name, "subjects": ["other"], "storage": "memory"}
    await api(connection, f"$JS.API.STREAM.CREATE.{name}", config)
    with pytest.raises(errors.ClusterRefused, match=r"run_id"):
        await run.bus()


async def test_no_server_listens() -> None:
    """Where no server is, connecting fails within its bound and says where it looked."""
    with pytest.raises(errors.ClusterUnreachable, match=r"127\.0\.0\.1:1\b.*cluster\.nats_url"):
        await connect(settings("nats://127.0.0.1:1"), "r", on_link=ignored, seconds=0.5)


async def test_a_wrong_password(
    run: OnNats, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """A server that refuses the password is named, the password is not, and nothing is printed."""
    caplog.set_level(logging.DEBUG)
    url = run.servers.url.replace("hunter2", "hunter3")
    with pytest.raises(errors.ClusterUnreachable) as caught:
        await connect(settings(url), "r", on_link=ignored, seconds=0.5)
    assert "refused the user, password or token" in caught.value.message
    said = "".join(capfd.readouterr())
    assert "hunter" not in caught.value.message + caplog.text + said
    assert said == ""


async def test_a_loss_is_not_printed(
    one: NatsCluster, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """The library's own account of a lost server reaches neither a terminal nor a log."""
    caplog.set_level(logging.DEBUG)
    async with on_nats(one) as run:
        bus = await run.bus()
        await bus.watch("state", lambda _key, _value: None)
        one.kill()
        await until(lambda: not bus.connected)
        one.start()
        await until(lambda: bus.connected)
    assert "nats" not in caplog.text.replace("test_cluster_nats", "")
    assert "".join(capfd.readouterr()) == ""


def test_what_the_library_says_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of the library's own, which may hold an address, reaches no handler of ours."""
    handler = BufferingHandler(capacity=9)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    logging.getLogger("nats.aio.client").error("nats: encountered error")
    assert handler.buffer == []


async def test_a_key_has_no_wildcard(run: OnNats) -> None:
    """A key that would mean several to NATS never reaches it."""
    bus = await run.bus()
    for key in ("", "a.*", "a.>", "a b", ".a", "a..b"):
        with pytest.raises(errors.InvariantBroken):
            await bus.put(key, b"")


async def test_a_value_too_large(run: OnNats) -> None:
    """More bytes than a server takes is our own mistake, not the servers'."""
    bus = await run.bus()
    with pytest.raises(errors.InvariantBroken, match=r"2000000 bytes"):
        await bus.put("state.a", bytes(2_000_000))
    assert bus.connected


async def test_a_long_backlog(run: OnNats) -> None:
    """A node that comes late reads thousands of messages, none left out, while more arrive."""
    a, b = await run.bus(), await run.bus()
    data = bytes(1000)
    await asyncio.gather(*(a.publish(data) for _ in range(1500)))
    read: list[int] = []
    await b.read(lambda number, _: read.append(number))
    await asyncio.gather(*(a.publish(data) for _ in range(500)))
    await until(lambda: len(read) >= 2000)
    assert read == list(range(1, 2001))


async def test_a_frozen_server(one: NatsCluster) -> None:
    """A server that stands still with its connections open is noticed, and its return too."""
    async with on_nats(one, lost_seconds=1.5) as run:
        told: list[bool] = []
        bus = await run.bus(told.append)
        # Nobody calls over this one, so that only it itself can find out.
        idle = await run.bus()
        read: list[int] = []
        await bus.read(lambda number, _: read.append(number))
        one.freeze()
        try:
            await until(lambda: not bus.connected and not idle.connected)
            with pytest.raises(errors.ClusterUnreachable):
                await bus.publish(b"")
        finally:
            one.thaw()
        await until(lambda: bus.connected and idle.connected)
        assert told == [False, True]
        last = await bus.publish(b"")
        await until(lambda: read and read[-1] >= last)
        assert read == list(range(1, last + 1))


async def test_a_run_made_anew(one: NatsCluster) -> None:
    """Where the servers lost the run and another node made it anew, this node is out for good."""
    async with on_nats(one, lost_seconds=1.5) as run:
        bus = await run.bus()
        await bus.update("quota", b"all but spent", 0)
        connection = await bus._dialer.reach()
        for name in (f"KV_smartsearch-{run.run_id}", f"smartsearch-{run.run_id}-answers"):
            await api(connection, f"$JS.API.STREAM.DELETE.{name}", b"")
        other = await run.bus()
        one.kill()
        one.start()
        await until(lambda: not bus.connected)
        await until(lambda: other.connected)
        with pytest.raises(errors.ClusterUnreachable, match=r"made anew"):
            await bus.update("quota", b"all over again", 0)
        assert await other.get("quota") is None


async def test_what_hears_raises(run: OnNats) -> None:
    """A watch that raises is said to the loop, and its node is not connected any more."""
    said: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
    bus = await run.bus()

    def heard(key: str, value: bytes) -> None:
        raise RuntimeError(key)

    await bus.watch("state", heard)
    await bus.put("state.a", b"")
    await until(lambda: said)
    assert not bus.connected


# --- the way to it -------------------------------------------------------------------------------


@asynccontextmanager
async def deaf_until_kept(
    run: OnNats, kept: Callable[[NatsBus], Awaitable[object]]
) -> AsyncIterator[tuple[NatsBus, NatsBus]]:
    """A node that hears nothing until the servers have kept what it sent; then it is cut off."""
    async with Way(run.servers.servers[0]) as way:
        url = way.url.replace("//", "//user:hunter2@")
        near, far = await run.bus(), await run.bus(url=url)
        way.back = False

        async def mend() -> None:
            await until(lambda: kept(near))
            way.mend()

        mending = asyncio.create_task(mend())
        yield near, far
        await asyncio.wait_for(mending, UNTIL_SECONDS)
        await far.close()


async def test_a_message_is_not_kept_twice(run: OnNats) -> None:
    """A message whose confirmation was lost is sent again, and kept once."""
    async with deaf_until_kept(run, lambda bus: bus.last()) as (near, far):
        assert await far.publish(b"once") == 1
        assert await near.last() == 1


async def test_a_change_is_not_refused_by_itself(run: OnNats) -> None:
    """A change whose confirmation was lost has been made, once, though its revision is gone."""
    async with deaf_until_kept(run, lambda bus: bus.get("quota")) as (near, far):
        assert await far.update("quota", b"mine", 0)
        entry = await near.get("quota")
        assert entry is not None
        assert entry.value == b"mine"
        assert await near.update("quota", b"next", entry.revision)


async def test_one_node_apart(one: NatsCluster) -> None:
    """A node cut off without notice finds that out, and reads what it missed afterwards."""
    async with on_nats(one, lost_seconds=1.5) as run, Way(one.servers[0]) as way:
        told: list[bool] = []
        near = await run.bus()
        far = await run.bus(told.append, url=way.url.replace("//", "//user:hunter2@"))
        heard: list[bytes] = []
        await far.watch("state", lambda _, value: heard.append(value))
        way.part()
        await near.put("state.a", b"1")
        await near.put("state.a", b"2")
        await until(lambda: not far.connected)
        assert near.connected
        way.mend()
        await until(lambda: far.connected)
        assert heard == [b"2"]
        assert told == [False, True]
        await far.close()


async def test_a_call_can_be_cancelled(run: OnNats) -> None:
    """A caller that is cancelled stops, at any point of its call."""
    bus = await run.bus()

    async def forever() -> None:
        while True:
            await bus.publish(b"")

    for turns in range(60):
        task = asyncio.create_task(forever())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        _, running = await asyncio.wait((task,), timeout=UNTIL_SECONDS)
        assert not running
        assert task.cancelled()
    assert bus.connected


async def test_connecting_can_be_cancelled(one: NatsCluster) -> None:
    """A call cancelled while it connects leaves no task and no socket behind."""
    before = asyncio.all_tasks()
    for turns in range(0, 60, 3):
        task = asyncio.create_task(connect(settings(one.url), "cancelled", on_link=ignored))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await (await task).close()
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("busy", [False, True])
async def test_a_message_lost_on_the_way(run: OnNats, busy: bool) -> None:
    """A change whose message was lost is delivered all the same, in silence and amid others."""
    async with Way(run.servers.servers[0]) as way:
        near = await run.bus()
        far = await run.bus(url=way.url.replace("//", "//user:hunter2@"))
        heard: list[str] = []
        await near.put("state.a", b"first")
        await far.watch("", lambda key, _: heard.append(key))
        # What was sent before this answer has come: nothing is being read any more.
        await far.get("state.a")
        way.back = False
        await near.put("latch", b"missed")
        await until(lambda: b"missed" in way.lost)
        way.back = True
        async with asyncio.timeout(UNTIL_SECONDS):
            while "latch" not in heard:
                await near.put("state.b", b"") if busy else await asyncio.sleep(0.01)
        assert heard[:2] == ["state.a", "latch"]
        await far.close()


# --- three real servers --------------------------------------------------------------------------


async def leader(bus: NatsBus, servers: NatsCluster, stream: str) -> NatsServer:
    """Which server leads a stream."""
    info = await api(await bus._dialer.reach(), f"$JS.API.STREAM.INFO.{stream}", b"")
    assert info["config"]["num_replicas"] == 3
    return next(each for each in servers.servers if each.name == info["cluster"]["leader"])


@dataclass
class Traffic:
    """Writes all the time, and remembers what was kept and what was delivered."""

    bus: NatsBus
    kept: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    heard: list[int] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    async def go_on(self) -> None:
        """Publishes and puts, one after the other, until cancelled."""
        for number in count(1):
            try:
                self.kept.append(await self.bus.publish(b"%d" % number))
                await self.bus.put("state.x", b"%d" % number)
            except errors.ClusterUnreachable as exc:
                self.failed.append(exc.message)

    async def follow(self, bus: NatsBus) -> None:
        """Hears of it on another node."""
        await bus.read(lambda number, _: self.read.append(number))
        await bus.watch("state", lambda _, value: self.heard.append(int(value)))


@pytest.mark.timeout(90)  # two elections and a start of three servers, four to nine seconds each
async def test_three_servers(three: NatsCluster) -> None:
    """One of three dies and no loss is reported; all die, and everything goes on where it was."""
    async with on_nats(three) as run:
        told: list[tuple[str, bool]] = []
        near = await run.bus(lambda up: told.append(("near", up)))
        first = await leader(near, three, f"KV_smartsearch-{run.run_id}")
        # The one that dies leads the keys, and is the one this node is connected to.
        far = await run.bus(lambda up: told.append(("far", up)), url=first.url)
        traffic = Traffic(near)
        await traffic.follow(far)
        writing = asyncio.create_task(traffic.go_on())
        try:
            await until(lambda: len(traffic.kept) > 10)
            first.kill()
            before, heard = len(traffic.kept), len(traffic.heard)
            await until(lambda: len(traffic.kept) > before + 50)
            await until(lambda: len(traffic.read) > before + 50 and len(traffic.heard) > heard + 10)
            assert traffic.failed == []
            assert told == []

            three.kill()
            await until(lambda: not near.connected and not far.connected)
            three.start()
            await until(lambda: near.connected and far.connected)
            assert sorted(told) == [("far", False), ("far", True), ("near", False), ("near", True)]
            before = len(traffic.kept)
            await until(lambda: len(traffic.kept) > before + 10)
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
        last = await near.publish(b"the end")
        await until(lambda: traffic.read and traffic.read[-1] >= last)
        # Each once and in order, and nothing that was confirmed is missing.
        assert traffic.read == list(range(1, last + 1))
        assert set(traffic.kept) <= set(traffic.read)
        assert len(set(traffic.kept)) == len(traffic.kept)
        assert traffic.heard == sorted(set(traffic.heard))


# --- what is leaned on ---------------------------------------------------------------------------


def test_the_library_has_these_names() -> None:
    """The private names of nats-py that nats/connection.py reads exist in the installed version."""
    client = Client()
    for name in (*TASKS, TRANSPORT):
        assert hasattr(client, name), name
    assert WRITER in inspect.getsource(TcpTransport)

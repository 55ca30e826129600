"""``python -m tests.benchmarks.nodes``: 64 and 512 nodes over the rules of a cluster, without I/O.

The rules are the package's own; between them stands a clock of events instead of NATS: a question
takes a round trip, and a compare-and-set is decided half a round trip after it was sent. What the
rules themselves cost (time, memory, bytes) is measured; what the servers cost is not in here.

Every node searches all the time at one rate, which no training does: read the figures as the worst.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from smartsearch_sidecar.cluster.answer_digests import DIGEST_BYTES, Backlog, decode_batch
from smartsearch_sidecar.cluster.membership import HEARTBEATS, Membership
from smartsearch_sidecar.cluster.quota_leases import (
    SEARCHES,
    Leases,
    NodeLease,
    blocks,
    joined,
    leased,
    pause,
)
from smartsearch_sidecar.cluster.values import VALUE_BYTES_MAX, NodeState, RunStatus
from smartsearch_sidecar.reward.provenance import AnswerDigests

TOTAL = 10**9
START_SECONDS = 10.0
"""All begin at once; only after that are leases counted and times taken."""
STARVED_MAX = 0.01
"""Share of its time a node may wait for a lease before the rate counts as too high."""
ROW_RESOURCES = {
    SEARCHES: TOTAL,
    **{
        f"{split}.{what}": TOTAL
        for split in ("train", "validation")
        for what in ("scores", "helper_calls", "output_tokens")
    },
}


@dataclass(frozen=True)
class Setting:
    """What is assumed: a rate in searches a second and node, times in seconds."""

    nodes: int
    rate: float = 100.0
    lease_block: int = 256
    round_trip: float = 0.002
    seconds: float = 10.0
    lost_seconds: float = 15.0
    answers: int = 1_000_000


class Clock:
    """Events in the order of their time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._order), event))

    def run(self, until: float) -> None:
        while self._due and self._due[0][0] <= until:
            self.now, _, event = heapq.heappop(self._due)
            event()
        self.now = until


# --- leases ---------------------------------------------------------------------------------------


@dataclass
class Key:
    """The key ``quota`` as the servers hold it."""

    value: Leases
    revision: int = 1
    tried: int = 0
    won: int = 0
    joined_at: float = 0.0
    waits: list[float] = field(default_factory=list)


class Searcher:
    """A node that searches at its rate for as long as its lease reaches."""

    def __init__(self, name: str, clock: Clock, key: Key, setting: Setting, seed: int) -> None:
        self.name, self._clock, self._key, self._setting = name, clock, key, setting
        self._random = random.Random(seed)
        # Nodes are never in step for long; the same rate on all would be a coincidence.
        self._rate = setting.rate * self._random.uniform(0.8, 1.2)
        block = blocks({SEARCHES: TOTAL}, setting.lease_block, setting.nodes)
        self._block = block[SEARCHES]
        self._lease = NodeLease(name, block)
        self.used = 0.0
        self.starved = 0.0
        self._since = 0.0
        self._began = 0.0
        clock.after(0.0, lambda: self._try(joined, self._joined))

    def _try(
        self,
        change: Callable[[Leases, str], Leases],
        done: Callable[[], None],
        attempt: int = 1,
    ) -> None:
        """Read, change, compare-and-set, and again after a pause where another node was faster."""
        half, key = self._setting.round_trip / 2, self._key

        def read() -> None:
            value, revision = key.value, key.revision
            self._clock.after(half, lambda: decide(value, revision))

        def decide(value: Leases, revision: int) -> None:
            self._lease.seen(value, revision)
            new = change(value, self.name)
            self._clock.after(half, lambda: arrive(new, revision))

        def arrive(new: Leases, revision: int) -> None:
            key.tried += 1
            won = revision == key.revision
            if won:
                key.value, key.revision, key.won = new, revision + 1, key.won + 1
            self._clock.after(half, lambda: learn(won, new, revision))

        def learn(won: bool, new: Leases, revision: int) -> None:
            if won:
                self._lease.seen(new, revision + 1)
                done()
            else:
                seconds = pause(attempt, self._random.random())
                self._clock.after(seconds, lambda: self._try(change, done, attempt + 1))

        self._clock.after(half, read)

    def _joined(self) -> None:
        self._key.joined_at = self._clock.now
        self._since = self._clock.now
        self._ask()

    def _ask(self) -> None:
        self._began = self._clock.now
        self._try(self._more, self._leased)

    def _more(self, value: Leases, name: str) -> Leases:
        self.account()
        used = {SEARCHES: int(self.used)}
        return leased(value, name, self._lease.wanted(used, {SEARCHES: self._block // 2}))[0]

    def _leased(self) -> None:
        self._key.waits.append(self._clock.now - self._began)
        # What was used until now came out of the lease as it was.
        left = self._lease.left(SEARCHES, 0) - self.used
        seconds = max(0.0, left - self._block / 2 + 1) / self._rate
        self._clock.after(seconds, self._ask_ahead)

    def _ask_ahead(self) -> None:
        self.account()
        self._ask()

    def account(self) -> None:
        """Uses what the time since the last account allows, and notes what the lease did not."""
        wanted = (self._clock.now - self._since) * self._rate
        used = min(wanted, self._lease.left(SEARCHES, 0) - self.used)
        self.used += used
        self.starved += (wanted - used) / self._rate
        self._since = self._clock.now


@dataclass(frozen=True)
class LeaseTraffic:
    """What leasing came to, the start apart: counts and bytes a second, seconds, share of time."""

    join_seconds: float
    leases: float
    attempts_per_lease: float
    wait_p99: float
    starved: float
    bytes: float


def lease_traffic(setting: Setting) -> LeaseTraffic:
    """All nodes begin at the same moment and search from then on."""
    clock, key = Clock(), Key(Leases(setting.nodes, {SEARCHES: TOTAL}))
    nodes = [Searcher(f"node-{at:04}", clock, key, setting, seed=at) for at in range(setting.nodes)]
    clock.run(START_SECONDS)
    for node in nodes:
        node.account()
        node.starved = 0.0
    key.tried = key.won = 0
    key.waits = []
    clock.run(START_SECONDS + setting.seconds)
    for node in nodes:
        node.account()
    waits = sorted(key.waits) or [0.0]
    # A value is read and written in each attempt, as long as a run with rewards makes it.
    size = 2 * len(full_value(setting.nodes).encode())
    return LeaseTraffic(
        join_seconds=key.joined_at,
        leases=key.won / setting.seconds,
        attempts_per_lease=key.tried / max(1, key.won),
        wait_p99=waits[int(len(waits) * 0.99)],
        starved=statistics.fmean(node.starved for node in nodes) / setting.seconds,
        bytes=key.tried * size / setting.seconds,
    )


def rate_that_starves(setting: Setting) -> float:
    """The first rate of a ladder, in searches a second and node, at which nodes wait for leases."""
    rate = 25.0
    while rate < 50_000:
        tried = Setting(setting.nodes, rate, setting.lease_block, setting.round_trip, 3.0)
        if lease_traffic(tried).starved > STARVED_MAX:
            break
        rate *= 2
    return rate


def full_value(nodes: int) -> Leases:
    """The key of a run with rewards, well on its way."""
    names = [f"node-{at:04}" for at in range(nodes)]
    row = dict.fromkeys(ROW_RESOURCES, 123_456)
    return Leases(nodes, ROW_RESOURCES, dict.fromkeys(names, row), dict.fromkeys(names, 1))


def seconds_of(work: Callable[[], object], times: int = 5) -> float:
    """The least of a few measurements, in seconds of a core."""
    took = []
    for _ in range(times):
        began = time.process_time()
        work()
        took.append(time.process_time() - began)
    return min(took)


def lease_cpu(nodes: int) -> float:
    """Seconds of one attempt's own work: read, lease, write."""
    data = full_value(nodes).encode()
    return seconds_of(lambda: leased(Leases.decode(data), "node-0000", {SEARCHES: 256})[0].encode())


def nodes_that_fit(limit: int = VALUE_BYTES_MAX) -> int:
    """How many nodes the key has room for."""
    return 1000 * limit // len(full_value(1000).encode())


# --- digests --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Digests:
    """Messages a second of one node and of all; seconds of one core a second to read them; bytes
    held for the run's answers.
    """

    messages: float
    all_messages: float
    all_digests: float
    reading: float
    wait_max: float
    held: int


def digests(setting: Setting) -> Digests:
    """One node's backlog in events, and what it costs a node to read those of all."""
    backlog, clock = Backlog(), Clock()
    sent: list[bytes] = []
    waited: list[float] = []
    began: dict[bytes, float] = {}

    def answer(number: int) -> None:
        digest = random.Random(number).randbytes(DIGEST_BYTES)
        began[digest] = clock.now
        backlog.add(digest, clock.now)
        clock.after(1 / setting.rate, lambda: answer(number + 1))
        look()

    def look() -> None:
        due = backlog.due(clock.now)
        if due is not None and due <= 1e-9:
            sent.append(backlog.take())
            clock.after(setting.round_trip, kept)
        elif due is not None:
            clock.after(due, look)

    def kept() -> None:
        backlog.kept()
        waited.extend(clock.now - began[digest] for digest in decode_batch(sent[-1]))
        look()

    answer(0)
    clock.run(setting.seconds)
    known = AnswerDigests(setting.answers)
    each = reading_seconds(sent)
    for number in range(setting.answers):
        known.add_digest(number.to_bytes(8, "big") * 3 + bytes(4))
    return Digests(
        messages=len(sent) / setting.seconds,
        all_messages=setting.nodes * len(sent) / setting.seconds,
        all_digests=setting.nodes * setting.rate,
        reading=setting.nodes * setting.rate * each,
        wait_max=max(waited),
        held=sum(len(shard) for shard in known._shards if shard is not None),
    )


def reading_seconds(messages: Sequence[bytes]) -> float:
    """Seconds of one core to read one digest and remember it."""
    count = sum(len(decode_batch(message)) for message in messages)

    def read() -> None:
        known = AnswerDigests(count)
        for message in messages:
            for digest in decode_batch(message):
                known.add_digest(digest)

    return seconds_of(read, 3) / count


# --- membership -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MembershipLoad:
    """States published and received a second, seconds of one core a second to receive them and to
    judge, bytes a node holds of the others, seconds from a node's death to the verdict.
    """

    published: float
    received: float
    receiving: float
    memory: int
    state_bytes: int
    verdict_median: float
    verdict_max: float


def said(at: int, beat: int) -> NodeState:
    """A healthy node's state, with as many counts as the page shows."""
    counts = {
        f"retrieval_{what}": 123_456 for what in ("attempts", "responses", "failed", "declined")
    }
    return NodeState(
        f"{at:032x}", 0, beat, RunStatus.HEALTHY, False, True, counts, 200_000, "ab" * 32
    )


def membership_load(setting: Setting) -> MembershipLoad:
    """One node among all, to which each state comes at its own moment."""
    each, memory = receiving_seconds(setting)
    times = [time_to_verdict(setting, seed) for seed in range(9)]
    every = setting.nodes * HEARTBEATS / setting.lost_seconds
    return MembershipLoad(
        published=every,
        received=every * setting.nodes,
        receiving=every * each,
        memory=memory,
        state_bytes=len(said(1, 1).encode()),
        verdict_median=statistics.median(times),
        verdict_max=max(times),
    )


def receiving_seconds(setting: Setting) -> tuple[float, int]:
    """Seconds of one core to receive one state (with a verdict after each beat), and the bytes."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    membership = Membership("node-0000", setting.nodes, setting.lost_seconds, 0.0)
    beat = itertools.count(1)

    def round_of_words() -> None:
        number = next(beat)
        now = number * setting.lost_seconds / HEARTBEATS
        for at in range(setting.nodes):
            data = said(at, number).encode()
            membership.on_state(f"node-{at:04}", NodeState.decode(data), now)
        membership.on_tick(now)

    round_of_words()
    memory = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return seconds_of(round_of_words, 3) / setting.nodes, memory


def time_to_verdict(setting: Setting, seed: int) -> float:
    """Seconds from a node's death, at any moment, to another node's verdict that it is lost.

    The observer ticks with its own beat; a state travels half a round trip.
    """
    chance, clock = random.Random(seed), Clock()
    every = setting.lost_seconds / HEARTBEATS
    membership = Membership("node-0000", setting.nodes, setting.lost_seconds, 0.0)
    dies_at = chance.uniform(2 * every, 3 * every)
    found: list[float] = []

    def speak(at: int, beat: int) -> None:
        if at == 1 and clock.now >= dies_at:
            return
        state = said(at, beat)
        travel = setting.round_trip / 2
        clock.after(travel, lambda: membership.on_state(f"node-{at:04}", state, clock.now))
        clock.after(every, lambda: speak(at, beat + 1))

    def tick() -> None:
        verdict = membership.on_tick(clock.now)
        if verdict.cause is not None and not found:
            found.append(clock.now)
        clock.after(every, tick)

    for at in range(setting.nodes):
        clock.after(chance.uniform(0, every), lambda at=at: speak(at, 1))  # type: ignore[misc]
    clock.after(chance.uniform(0, every), tick)
    clock.run(dies_at + 2 * setting.lost_seconds)
    return found[0] - dies_at


# --- the table ------------------------------------------------------------------------------------


def rows(setting: Setting) -> list[tuple[str, str]]:
    """Every figure of one size of run, named and with its unit."""
    traffic, stream, there = lease_traffic(setting), digests(setting), membership_load(setting)
    cpu = lease_cpu(setting.nodes)
    starves = rate_that_starves(setting)
    value = len(full_value(setting.nodes).encode())
    read_max = setting.rate / max(stream.reading, 1e-9)
    return [
        ("LEASES", ""),
        ("all are in the run, begun at once, after", f"{traffic.join_seconds:.2f} s"),
        ("leases of the run", f"{traffic.leases:,.0f} /s"),
        ("compare-and-sets a lease", f"{traffic.attempts_per_lease:.2f}"),
        ("a lease is there after (p99)", f"{traffic.wait_p99 * 1000:,.0f} ms"),
        ("time without a lease", f"{traffic.starved:.2%}"),
        ("the key's value", f"{value / 1024:,.1f} KiB"),
        ("read and written by all", f"{traffic.bytes / 2**20:,.1f} MiB/s"),
        ("own work of an attempt", f"{cpu * 1000:.2f} ms"),
        ("DIGESTS", ""),
        ("messages of a node", f"{stream.messages:,.0f} /s"),
        ("messages of all, read by each", f"{stream.all_messages:,.0f} /s"),
        ("digests of all, read by each", f"{stream.all_digests:,.0f} /s"),
        ("one core of each node, to read them", f"{stream.reading:.1%}"),
        ("answer to stream, at most", f"{stream.wait_max * 1000:.0f} ms"),
        (f"held for {setting.answers:,} answers", f"{stream.held / 2**20:,.1f} MiB"),
        ("MEMBERSHIP", ""),
        ("states published", f"{there.published:,.0f} /s"),
        ("states received by all", f"{there.received:,.0f} /s"),
        ("a state", f"{there.state_bytes} bytes"),
        ("one core of each node, to receive them", f"{there.receiving:.2%}"),
        ("held of the others", f"{there.memory / 1024:,.0f} KiB"),
        ("death to verdict (median)", f"{there.verdict_median:.1f} s"),
        ("death to verdict (longest)", f"{there.verdict_max:.1f} s"),
        ("WHERE IT BREAKS", ""),
        ("leases: nodes wait from (per node)", f"{starves:,.0f} searches/s"),
        ("digests: a core is full at (per node)", f"{read_max:,.0f} searches/s"),
        ("the key is full at", f"{nodes_that_fit():,} nodes"),
    ]


def tables(settings: Sequence[Setting]) -> Table:
    """Sizes side by side."""
    one = settings[0]
    table = Table(
        "figure",
        *(f"{setting.nodes} nodes" for setting in settings),
        title=f"{one.rate:g} searches/s a node, blocks of {one.lease_block}, "
        f"{one.round_trip * 1000:g} ms a round trip, lost_seconds {one.lost_seconds:g}",
    )
    for found in zip(*(rows(setting) for setting in settings), strict=True):
        name = found[0][0]
        head = name.isupper()
        table.add_row(f"[bold]{name}" if head else name, *(value for _, value in found))
    return table


def main(words: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.nodes", description=__doc__)
    parser.add_argument("nodes", type=int, nargs="*", default=[64, 512])
    parser.add_argument("--rate", type=float, default=100.0, help="searches a second and node")
    parser.add_argument("--lease-block", type=int, default=256)
    parser.add_argument("--round-trip-ms", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=10.0, help="simulated")
    parser.add_argument("--answers", type=int, default=1_000_000, help="of the whole run")
    given = parser.parse_args(words)
    settings = [
        Setting(
            nodes=nodes,
            rate=given.rate,
            lease_block=given.lease_block,
            round_trip=given.round_trip_ms / 1000,
            seconds=given.seconds,
            answers=given.answers,
        )
        for nodes in given.nodes
    ]
    Console(width=100).print(tables(settings))


if __name__ == "__main__":
    main()

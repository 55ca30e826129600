"""The sum over nodes never exceeds the run's, also over lost, late and interleaved updates.

The key is one value changed by compare-and-set. An update may be applied now, later (also after its
sender died and came back), or never, and its sender may not be told. Hypothesis prints the steps of
a failing run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.quota_leases import (
    SEARCHES,
    Leases,
    NodeLease,
    blocks,
    joined,
    leased,
    returned,
)

TOKENS = "train.output_tokens"
TOTALS = {SEARCHES: 40, TOKENS: 30_000}
MEMBERS = 3
BLOCK = blocks(TOTALS, 5, MEMBERS)
NAMES = st.sampled_from("aaaabbcd")  # one more than there is room for, and two that are busy
FATES = st.sampled_from(["told", "told", "told", "untold", "lost", "late", "late"])
AMOUNTS = st.fixed_dictionaries({SEARCHES: st.integers(0, 9), TOKENS: st.integers(0, 5000)})


@dataclass
class Update:
    """A compare-and-set on its way."""

    sender: str
    process: int
    value: bytes
    revision: int
    ends: bool = False


@dataclass
class Node:
    """A node: its journal, which survives, and its process, which does not."""

    used: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOTALS, 0))
    process: int = 0
    alive: bool = False
    lease: NodeLease | None = None
    waits: bool = False
    ending: bool = False


class Nodes(RuleBasedStateMachine):
    """Every step is one thing that can happen to one node or to the key."""

    def __init__(self) -> None:
        super().__init__()
        self.value = Leases(MEMBERS, TOTALS).encode()
        self.revision = 1
        self.nodes = {name: Node() for name in "abcd"}
        self.under_way: list[Update] = []

    # --- the key ----------------------------------------------------------------------------------

    def send(self, name: str, new: Leases, fate: str, *, ends: bool = False) -> None:
        """An update of the key as it is now; one that is late stays under way."""
        node = self.nodes[name]
        node.waits = True
        update = Update(name, node.process, new.encode(), self.revision, ends)
        if fate == "late":
            self.under_way.append(update)
        else:
            self.settle(update, fate)

    @precondition(lambda self: self.under_way)
    @rule(at=st.integers(0, 99), fate=FATES)
    def arrive(self, at: int, fate: str) -> None:
        """A late update arrives, after anything that has happened since."""
        self.settle(self.under_way.pop(at % len(self.under_way)), fate)

    def settle(self, update: Update, fate: str) -> None:
        """It is applied or lost; its sender learns what became of it, or does not."""
        won = fate != "lost" and update.revision == self.revision
        if won:
            self.value, self.revision = update.value, self.revision + 1
        node = self.nodes[update.sender]
        if node.alive and node.process == update.process and node.waits:
            node.waits = False
            if fate != "untold" and won:
                self.told(node, update)

    def told(self, node: Node, update: Update) -> None:
        if node.lease is None:
            node.lease = NodeLease(update.sender, BLOCK)
        node.lease.seen(Leases.decode(update.value), update.revision + 1)
        if update.ends:
            node.alive = False

    @precondition(lambda self: self.under_way)
    @rule(at=st.integers(0, 99))
    def give_up(self, at: int) -> None:
        """A sender waits no longer; its update stays under way and may arrive at any time."""
        node = self.nodes[self.under_way[at % len(self.under_way)].sender]
        node.waits = False

    # --- a node's life ----------------------------------------------------------------------------

    @rule(name=NAMES, fate=FATES)
    def begin(self, name: str, fate: str) -> None:
        """A process starts, or starts again: it joins before anything else."""
        node = self.nodes[name]
        if not node.alive:
            node.process += 1
            node.alive, node.lease, node.waits, node.ending = True, None, False, False
        if node.lease is None and not node.waits:
            try:
                new = joined(Leases.decode(self.value), name)
            except errors.ClusterRefused:
                node.alive = False
                return
            self.send(name, new, fate)

    @rule(name=NAMES)
    def crash(self, name: str) -> None:
        """The process is gone; what it sent is not."""
        self.nodes[name].alive = False

    @rule(name=NAMES, needed=AMOUNTS, fate=FATES)
    def ask(self, name: str, needed: dict[str, int], fate: str) -> None:
        """A node reads the key and asks for more, if it has to."""
        node = self.nodes[name]
        if not self.serves(node) or node.waits or node.lease is None:
            return
        value = Leases.decode(self.value)
        node.lease.seen(value, self.revision)
        wanted = node.lease.wanted(node.used, needed)
        new, granted = leased(value, name, wanted)
        if granted:
            self.send(name, new, fate)

    @rule(name=NAMES, amounts=AMOUNTS)
    def use(self, name: str, amounts: dict[str, int]) -> None:
        """Admits what the lease allows; the journal says so."""
        node = self.nodes[name]
        if not self.serves(node) or node.lease is None:
            return
        for resource, amount in amounts.items():
            left = node.lease.left(resource, node.used[resource])
            node.used[resource] += min(amount, left)

    @rule(name=NAMES, fate=FATES)
    def close(self, name: str, fate: str) -> None:
        """A clean end: nothing is admitted any more, and the rest goes back."""
        node = self.nodes[name]
        if not node.alive or node.waits or node.lease is None:
            return
        node.ending = True
        self.send(name, returned(Leases.decode(self.value), name, node.used), fate, ends=True)

    @rule(name=NAMES, fate=FATES)
    def die_while_closing(self, name: str, fate: str) -> None:
        """What it sent last may still arrive, when its next process has begun."""
        self.close(name, "late")
        self.crash(name)
        self.begin(name, fate)

    @rule(name=NAMES, needed=AMOUNTS, amounts=AMOUNTS)
    def live(self, name: str, needed: dict[str, int], amounts: dict[str, int]) -> None:
        """What happens most: a node begins, leases and uses, and nothing goes wrong."""
        self.begin(name, "told")
        self.ask(name, needed, "told")
        self.use(name, amounts)

    def serves(self, node: Node) -> bool:
        return node.alive and not node.ending

    # --- what always holds ------------------------------------------------------------------------

    @invariant()
    def the_nodes_use_no_more_than_the_run_has(self) -> None:
        """Used, summed over all nodes, is within the totals; so are the leases."""
        value = Leases.decode(self.value)
        for resource, total in TOTALS.items():
            assert sum(node.used[resource] for node in self.nodes.values()) <= total
            assert value.taken(resource) <= total
        for name, node in self.nodes.items():
            lease = value.of(name)
            assert all(node.used[resource] <= lease[resource] for resource in TOTALS), name

    @invariant()
    def exhausted_is_exhausted(self) -> None:
        """A node that has just read the key calls a quota used up only where nothing is left."""
        value = Leases.decode(self.value)
        for name, node in self.nodes.items():
            fresh = NodeLease(name, BLOCK)
            fresh.seen(value, self.revision)
            if fresh.exhausted(SEARCHES, node.used[SEARCHES]):
                assert value.left(SEARCHES) == 0


TestNodes = Nodes.TestCase
TestNodes.settings = settings(
    max_examples=settings().max_examples,
    stateful_step_count=50,
    # Fifty steps are printed as they are: to shorten them takes longer than a test may.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["lease", "use", "return"]), st.sampled_from("abc"), AMOUNTS),
        max_size=30,
    )
)
def test_any_history_is_within_the_totals_and_survives_its_bytes(
    steps: list[tuple[str, str, dict[str, int]]],
) -> None:
    """Each value reads back as itself, and what is left plus what is leased is what there is."""
    value = Leases(MEMBERS, TOTALS)
    used: dict[str, dict[str, int]] = {}
    for step, node, amounts in steps:
        if node not in used:
            value = joined(value, node)
            used[node] = dict.fromkeys(TOTALS, 0)
        before = value
        if step == "lease":
            value, granted = leased(value, node, amounts)
            assert (value == before) is (not granted)
            assert all(granted.get(name, 0) <= amount for name, amount in amounts.items())
        elif step == "use":
            left = {name: value.of(node)[name] - used[node][name] for name in TOTALS}
            used[node] = {
                name: used[node][name] + min(amounts[name], left[name]) for name in TOTALS
            }
        else:
            value = returned(value, node, used[node])
            assert value.of(node) == used[node]
        assert Leases.decode(value.encode()) == value
        for name, total in TOTALS.items():
            assert value.left(name) + value.taken(name) == total
            assert value.left(name) >= 0


@pytest.mark.parametrize("nodes", [1, 2, 7, 64])
def test_every_quota_can_be_used_up(nodes: int) -> None:
    """Nodes that ask in turn lease the whole of a run, to the last search, and no more."""
    totals = {SEARCHES: 1000}
    block = blocks(totals, 256, nodes)
    value = Leases(nodes, totals)
    names = [f"n{at}" for at in range(nodes)]
    for name in names:
        value = joined(value, name)
    used = dict.fromkeys(names, 0)
    while value.left(SEARCHES):
        for name in names:
            own = NodeLease(name, block)
            own.seen(value, 1)
            used[name] += own.left(SEARCHES, used[name])
            value, _ = leased(value, name, own.wanted({SEARCHES: used[name]}, {SEARCHES: 1}))
    assert value.taken(SEARCHES) == 1000

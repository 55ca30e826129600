"""How much of the run's quotas each node may use: blocks leased from one shared value.

Theory. A quota belongs to the run. The value of one key says what there is of each resource
(*totals*) and what each node has taken of it (*leased*). A node takes a block by replacing the
value by one that leases it more, on the condition that no other node has replaced it meanwhile
(compare-and-set). A value whose leases exceed a total cannot be built, and only built values are
written. So the nodes together never hold more than the run has, even where updates are lost,
repeated or interleaved.

What a node may still use is its lease less what its own journal says it has used. Nothing else is
remembered anywhere, hence:

- an update whose answer was lost is settled by reading the value again, which names the lease;
- a node that comes back goes on with its lease; one that is lost keeps it, and so it stays spent;
- a clean close sets the lease to what was used, which gives the rest back, and only once.

One danger is left: an update sent by a process that died may arrive after the node's next process
has begun. So a node begins by writing (``joined``): earlier updates then name a revision that is
gone.

Resources: ``searches``, and per split ``SPLIT.scores``, ``SPLIT.helper_calls``,
``SPLIT.output_tokens``. The value also bounds how many nodes there are: a node has a place in
the run by standing in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.values import canonical, read_object, unreadable
from smartsearch_sidecar.config import Config
from smartsearch_sidecar.run.record import SplitQuotas
from smartsearch_sidecar.run.scores import MAX_NEW_TOKENS
from smartsearch_sidecar.run.state import RunState

SEARCHES: Final = "searches"
SCORES: Final = "scores"
HELPER_CALLS: Final = "helper_calls"
OUTPUT_TOKENS: Final = "output_tokens"
BLOCKS_A_NODE: Final = 4  # in its even share, at least: one lease must not empty a small run
PAUSE_SECONDS_FIRST: Final = 0.004  # a round trip or two: the new value is known after one
PAUSE_SECONDS_MAX: Final = 1.0  # far under a search's deadline: a race lost often is won in time

Amounts = Mapping[str, int]  # resource to a number of searches, scores, calls or tokens

_KEYS: Final = ("members", "resources", "totals", "nodes", "lives")
_WHAT: Final = "what the run's nodes have leased"


def resource(split: str, what: str) -> str:
    """The name of a split's resource: ``train.scores`` and the like."""
    return f"{split}.{what}"


def totals_of(config: Config) -> dict[str, int]:
    found = {SEARCHES: config.execute.max_calls}
    if config.reward.enabled:
        for split, part in (("train", config.reward), ("validation", config.reward.validation)):
            quotas = SplitQuotas.of(part).to_data()
            for what in (SCORES, HELPER_CALLS, OUTPUT_TOKENS):
                found[resource(split, what)] = quotas[f"max_{what}"]
    return found


def used_of(state: RunState) -> dict[str, int]:
    """What a node has used of each resource by its own fold, reserved tokens included."""
    found = {SEARCHES: state.attempts}
    for split, meter in state.scores.splits.items():
        found[resource(split, SCORES)] = meter.score_attempts
        found[resource(split, HELPER_CALLS)] = meter.model_attempts
        found[resource(split, OUTPUT_TOKENS)] = meter.committed_output_tokens
    return found


@dataclass(frozen=True, slots=True)
class Leases:
    """The value of the key ``quota``. It cannot lease more than there is, nor to too many nodes."""

    members: int  # how many nodes the run may have (``run.nodes``)
    totals: Amounts  # what there is of each resource
    nodes: Mapping[str, Amounts] = field(default_factory=dict)  # what each node has leased of each
    lives: Mapping[str, int] = field(default_factory=dict)  # how often each node has begun

    def __post_init__(self) -> None:
        if type(self.members) is not int or self.members < 1 or len(self.nodes) > self.members:
            count = len(self.nodes)
            raise errors.INTERNAL_ERROR(f"{count} nodes lease from a run of {self.members}")
        rows = self.nodes.values()
        if any(row.keys() != self.totals.keys() for row in rows):
            raise errors.INTERNAL_ERROR("a node leases other resources than the run has")
        if self.lives.keys() != self.nodes.keys():
            raise errors.INTERNAL_ERROR("a node leases without having begun, or the reverse")
        for counts in (self.totals, *rows, self.lives):
            if any(type(count) is not int or count < 0 for count in counts.values()):
                raise errors.INTERNAL_ERROR("a number of a lease is not a count")
        for name in self.totals:
            if self.left(name) < 0:
                why = f"{self.taken(name)} {name} are leased, and the run has {self.totals[name]}"
                raise errors.INTERNAL_ERROR(why)

    def taken(self, name: str) -> int:
        """What all nodes have leased of a resource."""
        return sum(amounts[name] for amounts in self.nodes.values())

    def left(self, name: str) -> int:
        """What is still to be leased of a resource."""
        return self.totals[name] - self.taken(name)

    def of(self, node: str) -> Amounts:
        """What a node has leased so far; zeros where it is not in the run."""
        return self.nodes.get(node, dict.fromkeys(self.totals, 0))

    def changed(self, node: str, by: Amounts, sign: int) -> Leases:
        """With a node's lease of each resource larger or, with ``sign`` -1, smaller."""
        row = {name: amount + sign * by.get(name, 0) for name, amount in self.of(node).items()}
        return replace(self, nodes={**self.nodes, node: row})

    def encode(self) -> bytes:
        """Canonical bytes; rows without names, because the value is written at every lease."""
        names = sorted(self.totals)
        rows = {node: [row[name] for name in names] for node, row in self.nodes.items()}
        value = {"members": self.members, "resources": names, "nodes": rows}
        value |= {"totals": [self.totals[name] for name in names], "lives": dict(self.lives)}
        return canonical(value)

    @classmethod
    def decode(cls, data: bytes) -> Leases:
        """Reads exactly what ``encode`` writes. Raises ``ClusterUnreadable`` for anything else."""
        value = read_object(data, _WHAT, _KEYS)
        names, rows, lives = value["resources"], value["nodes"], value["lives"]
        texts = type(names) is list and all(type(name) is str for name in names)
        if not texts or names != sorted(set(names)) or not type(rows) is type(lives) is dict:
            raise unreadable(_WHAT, "its resources or its nodes are not named")
        try:
            return cls(
                value["members"],
                _amounts(names, value["totals"]),
                {node: _amounts(names, row) for node, row in rows.items()},
                lives,
            )
        except errors.InvariantBroken as exc:
            raise unreadable(_WHAT, exc.message) from None


def _amounts(names: list[str], row: Any) -> dict[str, int]:
    if type(row) is not list or len(row) != len(names):
        raise unreadable(_WHAT, "a row has another length")
    return dict(zip(names, row, strict=True))


def joined(value: Leases, node: str) -> Leases:
    """With ``node`` in the run, one life further: another value each time, to be written at start.
    Raises ``ClusterRefused`` where the run has all its nodes.
    """
    if node not in value.nodes and len(value.nodes) >= value.members:
        raise errors.CLUSTER_REFUSED(
            f"node {node} is one too many: the run has its {value.members} nodes (run.nodes), "
            f"{', '.join(sorted(value.nodes))}; give this one the name of the node it replaces, "
            "or use another cluster.run_id"
        )
    lives = {**value.lives, node: value.lives.get(node, 0) + 1}
    return replace(value, nodes={**value.nodes, node: value.of(node)}, lives=lives)


def leased(value: Leases, node: str, wanted: Amounts) -> tuple[Leases, dict[str, int]]:
    """Adds to a node's lease of each resource what is wanted, or what is left where that is less.
    Returns the new value and what was granted, without zeros: if nothing, there is no news.
    """
    if node not in value.nodes:
        raise errors.INTERNAL_ERROR(f"node {node} wants to lease and has not joined")
    granted: dict[str, int] = {}
    for name, amount in wanted.items():
        if name not in value.totals or amount < 0:
            raise errors.INTERNAL_ERROR(f"{amount} of {name!r:.60} cannot be leased")
        if given := min(amount, value.left(name)):
            granted[name] = given
    return value.changed(node, granted, +1), granted


def returned(value: Leases, node: str, used: Amounts) -> Leases:
    """Gives back what a node has leased and not used. Its lease never grows: where more was used
    than leased (a helper wrote more than its cap) the lease stays. For the end of a node only.
    """
    if used.keys() != value.totals.keys():
        raise errors.INTERNAL_ERROR("what a node has used is not stated for every resource")
    if node not in value.nodes:
        return value
    unused = {name: max(0, amount - used[name]) for name, amount in value.of(node).items()}
    return value.changed(node, unused, -1)


def blocks(totals: Amounts, lease_block: int, members: int) -> dict[str, int]:
    """How much of each resource is leased at once; it is equal on every node of a run.
    ``lease_block`` searches, scores or helper calls, and the most tokens so many calls may write;
    less where a node's even share would not hold ``BLOCKS_A_NODE`` of them. Rewards are not shared
    evenly, because one node may score all: for them the share is the whole.
    """
    found: dict[str, int] = {}
    for name, total in totals.items():
        size = lease_block * (MAX_NEW_TOKENS if name.endswith(f".{OUTPUT_TOKENS}") else 1)
        sharers = members if name == SEARCHES else 1
        found[name] = max(1, min(size, total // (sharers * BLOCKS_A_NODE)))
    return found


def pause(attempt: int, draw: float) -> float:
    """Seconds before a compare-and-set that lost ``attempt`` times (from 1) is tried again.
    ``draw`` is random, of 0 to 1: nodes that lost to each other must not meet again.
    """
    return draw * min(PAUSE_SECONDS_MAX, PAUSE_SECONDS_FIRST * 2.0 ** min(attempt, 30))


class NodeLease:
    """How much this node may use, as far as it knows: what to admit, and when to ask for more.
    ``block`` is what ``blocks`` gave. ``seen`` takes each value of the key that is read or written
    here. ``used`` always comes from this node's own fold, for tokens with those reserved.
    """

    def __init__(self, node: str, block: Amounts) -> None:
        self.node = node
        self._block = dict(block)
        self._leased: dict[str, int] = dict.fromkeys(block, 0)
        self._run_left: dict[str, int] = dict(block)  # unknown: as if there were some
        self._revision = 0

    def seen(self, value: Leases, revision: int) -> None:
        """A value of the key and its revision; one older than the last is ignored."""
        if revision < self._revision:
            return
        self._revision = revision
        self._leased = dict(value.of(self.node))
        self._run_left = {name: value.left(name) for name in value.totals}

    def left(self, name: str, used: int) -> int:
        """What it may still use; below zero where a helper wrote more tokens than its cap."""
        return self._leased[name] - used

    def fits(self, name: str, used: int, needed: int = 1) -> bool:
        return self.left(name, used) >= needed

    def exhausted(self, name: str, used: int, needed: int = 1) -> bool:
        """Whether all that the run has left would not be enough either: refuse, do not wait.
        Only as new as the last value seen: ask for a lease before acting on it.
        """
        return self.left(name, used) + self._run_left[name] < needed

    def wanted(self, used: Amounts, needed: Amounts | None = None) -> dict[str, int]:
        """What to lease now; empty for nothing. ``needed`` is what requests wait for. Beyond that,
        a resource in use here is leased ahead once less than half a block is left; one that is not
        used here is left to the others.
        """
        needed = needed or {}
        found: dict[str, int] = {}
        for name, block in self._block.items():
            left, need = self.left(name, used.get(name, 0)), needed.get(name, 0)
            begun = need > 0 or used.get(name, 0) > 0
            ahead = begun and self._run_left[name] > 0 and 2 * left < block
            if left < need or ahead:
                found[name] = max(block, need - left)
        return found

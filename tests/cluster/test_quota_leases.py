"""Leases of the run's quotas: the shared value, its changes, and one node's view of it."""

from __future__ import annotations

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.quota_leases import (
    HELPER_CALLS,
    OUTPUT_TOKENS,
    PAUSE_SECONDS_MAX,
    SCORES,
    SEARCHES,
    Leases,
    NodeLease,
    blocks,
    joined,
    leased,
    pause,
    resource,
    returned,
)
from tests.fakes.each import each

TOKENS = resource("train", OUTPUT_TOKENS)
CALLS = resource("train", HELPER_CALLS)


def run(members: int = 3, **totals: int) -> Leases:
    """A run with so much of each resource and two nodes in it."""
    begun = Leases(members, {SEARCHES: 1000, TOKENS: 100_000, **totals})
    return joined(joined(begun, "a"), "b")


# --- the value ------------------------------------------------------------------------------------


def test_the_bytes_of_a_value_are_pinned() -> None:
    """Nodes of one version write the key in exactly this form."""
    value, _ = leased(run(), "b", {SEARCHES: 256})
    assert value.encode() == (
        b'{"lives":{"a":1,"b":1},"members":3,"nodes":{"a":[0,0],"b":[256,0]},'
        b'"resources":["searches","train.output_tokens"],"totals":[1000,100000]}'
    )
    assert Leases.decode(value.encode()) == value


@each(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"lives":{},"members":3,"nodes":{},"resources":[],"totals":[]',
        b'{"lives":{},"members":3,"nodes":{},"resources":[],"totals":[]} ',
        b'{"members":3,"lives":{},"nodes":{},"resources":[],"totals":[]}',
        b'{"lives":{},"members":3,"members":3,"nodes":{},"resources":[],"totals":[]}',
        b'{"lives":{},"members":3.0,"nodes":{},"resources":[],"totals":[]}',
        b'{"lives":{},"members":"3","nodes":{},"resources":[],"totals":[]}',
        b'{"lives":{},"members":true,"nodes":{},"resources":[],"totals":[]}',
        b'{"lives":{},"members":0,"nodes":{},"resources":[],"totals":[]}',
        b'{"lives":[],"members":3,"nodes":{},"resources":[],"totals":[]}',
        b'{"lives":{},"members":3,"nodes":[],"resources":[],"totals":[]}',
        b'{"lives":{},"members":3,"nodes":{},"resources":{},"totals":[]}',
        b'{"lives":{},"members":3,"nodes":{},"resources":[1],"totals":[1]}',
        b'{"lives":{},"members":3,"nodes":{},"resources":["b","a"],"totals":[1,1]}',
        b'{"lives":{},"members":3,"nodes":{},"resources":["a","a"],"totals":[1,1]}',
        b'{"lives":{},"members":3,"nodes":{},"resources":["a"],"totals":[]}',
        b'{"lives":{},"members":3,"nodes":{},"resources":["a"],"totals":[-1]}',
        b'{"lives":{},"members":3,"nodes":{},"resources":["a"],"totals":[true]}',
        b'{"lives":{},"members":3,"nodes":{},"resources":["a"],"totals":[99999999999999999999]}',
        b'{"lives":{},"members":3,"nodes":{"a":[1]},"resources":["a"],"totals":[1]}',
        b'{"lives":{"a":1},"members":3,"nodes":{},"resources":["a"],"totals":[1]}',
        b'{"lives":{"a":1},"members":3,"nodes":{"a":[2]},"resources":["a"],"totals":[1]}',
        b'{"lives":{"a":1},"members":3,"nodes":{"a":[-1]},"resources":["a"],"totals":[1]}',
        b'{"lives":{"a":1},"members":3,"nodes":{"a":[]},"resources":["a"],"totals":[1]}',
        b'{"lives":{"a":1},"members":3,"nodes":{"a":1},"resources":["a"],"totals":[1]}',
        b'{"lives":{"a":1,"b":1},"members":1,"nodes":{"a":[],"b":[]},"resources":[],"totals":[]}',
        b'{"extra":1,"lives":{},"members":3,"nodes":{},"resources":[],"totals":[]}',
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    """A value that no node of this version can have written is named, never guessed at."""
    with pytest.raises(errors.ClusterUnreadable) as refusal:
        Leases.decode(data)
    assert refusal.value.cause == "cluster_unreadable"


def test_a_value_that_overspends_cannot_be_built() -> None:
    """No code path can hold more leases than the run has, so none can write them."""
    with pytest.raises(errors.InvariantBroken):
        Leases(2, {SEARCHES: 10}, {"a": {SEARCHES: 6}, "b": {SEARCHES: 5}}, {"a": 1, "b": 1})
    with pytest.raises(errors.InvariantBroken):
        Leases(1, {SEARCHES: 10}, {"a": {SEARCHES: 1}, "b": {SEARCHES: 1}}, {"a": 1, "b": 1})


# --- its changes ----------------------------------------------------------------------------------


def test_a_lease_is_what_is_wanted_or_what_is_left() -> None:
    """The last block is smaller; after it nothing is granted, and there is nothing to write."""
    value, granted = leased(run(), "a", {SEARCHES: 900, TOKENS: 2048})
    assert granted == {SEARCHES: 900, TOKENS: 2048}
    value, granted = leased(value, "b", {SEARCHES: 256})
    assert granted == {SEARCHES: 100}
    assert value.left(SEARCHES) == 0
    assert leased(value, "a", {SEARCHES: 1}) == (value, {})
    assert value.of("a") == {SEARCHES: 900, TOKENS: 2048}


def test_a_node_leases_only_in_the_run_and_what_there_is() -> None:
    """A stranger, an unknown resource and a negative lease are our own mistakes."""
    for node, wanted in (("c", {SEARCHES: 1}), ("a", {"cars": 1}), ("a", {SEARCHES: -1})):
        with pytest.raises(errors.InvariantBroken):
            leased(run(), node, wanted)


def test_a_node_too_many_is_refused_by_name() -> None:
    """The value itself bounds the nodes, so two that come at once cannot both be the last."""
    full = joined(run(), "c")
    with pytest.raises(errors.ClusterRefused) as refusal:
        joined(full, "d")
    assert "node d is one too many: the run has its 3 nodes (run.nodes), a, b, c" in str(
        refusal.value
    )
    assert joined(full, "c").of("c") == full.of("c")


def test_joining_always_changes_the_value() -> None:
    """A node that begins writes, so that what its dead process sent can no longer arrive."""
    value, _ = leased(run(), "a", {SEARCHES: 5})
    again = joined(value, "a")
    assert again != value
    assert again.of("a") == value.of("a")
    assert again.encode() != value.encode()


def test_a_dead_processs_update_is_fenced_off() -> None:
    """A return sent before a crash names a revision that the resumed node has replaced."""
    key, revision = leased(run(), "a", {SEARCHES: 256})[0], 5
    late = (returned(key, "a", {SEARCHES: 10, TOKENS: 0}), revision)
    resumed = joined(key, "a")
    assert resumed != key  # so it is written, and the revision is another
    key, revision = resumed, revision + 1
    assert late[1] != revision
    assert key.of("a")[SEARCHES] == 256


def test_a_clean_end_gives_back_what_was_not_used() -> None:
    """The rest can be leased by others; a second return changes nothing."""
    value, _ = leased(run(), "a", {SEARCHES: 600, TOKENS: 4096})
    value = returned(value, "a", {SEARCHES: 10, TOKENS: 0})
    assert value.of("a") == {SEARCHES: 10, TOKENS: 0}
    assert value.left(SEARCHES) == 990
    assert returned(value, "a", {SEARCHES: 10, TOKENS: 0}) == value
    assert returned(value, "c", {SEARCHES: 0, TOKENS: 0}) == value


def test_a_return_never_grows_a_lease() -> None:
    """A helper that overran its cap has spent more than was leased; others' leases are theirs."""
    value, _ = leased(run(), "a", {TOKENS: 2048})
    assert returned(value, "a", {SEARCHES: 0, TOKENS: 9999}).of("a")[TOKENS] == 2048


def test_a_return_states_every_resource() -> None:
    """A return without a resource is refused: a missing one does not count as zero."""
    value, _ = leased(run(), "a", {SEARCHES: 600, TOKENS: 4096})
    with pytest.raises(errors.InvariantBroken):
        returned(value, "a", {SEARCHES: 10})


# --- how much, how soon ---------------------------------------------------------------------------


def test_blocks_are_sized_by_resource_and_by_run() -> None:
    """A block of tokens feeds a block of calls; in a small run no block empties it."""
    totals = {
        SEARCHES: 10_000_000,
        resource("train", SCORES): 10_000,
        CALLS: 100_000,
        TOKENS: 10_000_000,
        resource("validation", SCORES): 0,
    }
    assert blocks(totals, 256, 64) == {
        SEARCHES: 256,
        "train.scores": 256,
        CALLS: 256,
        TOKENS: 256 * 2048,
        "validation.scores": 1,
    }
    assert blocks({SEARCHES: 10_000}, 256, 64) == {SEARCHES: 39}
    assert blocks({SEARCHES: 3}, 256, 64) == {SEARCHES: 1}
    assert blocks({TOKENS: 100_000}, 256, 64) == {TOKENS: 25_000}


def test_pauses_grow_and_are_bounded() -> None:
    """Each lost race doubles the pause on average, up to a bound that a search can wait."""
    longest = [pause(attempt, 1.0) for attempt in range(1, 200)]
    assert longest == sorted(longest)
    assert longest[0] == 0.008
    assert longest[-1] == PAUSE_SECONDS_MAX
    assert pause(5, 0.0) == 0.0


# --- one node's view ------------------------------------------------------------------------------


def lease_of(value: Leases, block: int = 100) -> NodeLease:
    """Node a's view of a value."""
    found = NodeLease("a", {SEARCHES: block, TOKENS: 2048})
    found.seen(value, 7)
    return found


def test_what_is_left_is_the_lease_less_what_was_used() -> None:
    """The rest is computed from lease and use alone, so a resumed node finds it in its journal."""
    value, _ = leased(run(), "a", {SEARCHES: 256})
    node = lease_of(value)
    assert node.left(SEARCHES, 0) == 256
    assert node.left(SEARCHES, 250) == 6
    assert node.fits(SEARCHES, 250, 6)
    assert not node.fits(SEARCHES, 250, 7)


def test_an_older_value_is_of_no_interest() -> None:
    """A follower that answers late cannot take back what is known."""
    value, _ = leased(run(), "a", {SEARCHES: 256})
    node = lease_of(value)
    node.seen(run(), 6)
    assert node.left(SEARCHES, 0) == 256
    node.seen(leased(value, "a", {SEARCHES: 44})[0], 8)
    assert node.left(SEARCHES, 0) == 300


def test_more_is_asked_for_ahead_of_need() -> None:
    """At half a block the next one is asked for, before any search waits for it."""
    node = lease_of(leased(run(), "a", {SEARCHES: 100})[0])
    assert node.wanted({SEARCHES: 50, TOKENS: 0}) == {}
    assert node.wanted({SEARCHES: 51, TOKENS: 0}) == {SEARCHES: 100}


def test_what_is_not_used_here_is_left_to_others() -> None:
    """A node that scores nothing leases nothing of the rewards' quotas."""
    node = lease_of(run())
    assert node.wanted({SEARCHES: 0, TOKENS: 0}) == {}
    assert node.wanted({SEARCHES: 0, TOKENS: 0}, {TOKENS: 10}) == {TOKENS: 2048}


def test_a_need_beyond_a_block_is_asked_for_whole() -> None:
    """A batch larger than a block is leased at once, what was overrun included."""
    node = lease_of(leased(run(), "a", {SEARCHES: 100, TOKENS: 2048})[0])
    assert node.wanted({SEARCHES: 40, TOKENS: 0}, {SEARCHES: 500}) == {SEARCHES: 440}
    assert node.wanted({SEARCHES: 0, TOKENS: 3000}, {TOKENS: 2048}) == {TOKENS: 3000}


def test_exhausted_is_only_a_run_that_has_no_more() -> None:
    """While the run has something left it is leased; only then is the quota used up."""
    value, _ = leased(run(), "b", {SEARCHES: 900})
    node = lease_of(leased(value, "a", {SEARCHES: 90})[0])
    assert not node.exhausted(SEARCHES, 90)
    assert not node.exhausted(SEARCHES, 90, 10)
    assert node.exhausted(SEARCHES, 90, 11)
    empty = lease_of(leased(value, "a", {SEARCHES: 100})[0])
    assert not empty.exhausted(SEARCHES, 99)
    assert empty.exhausted(SEARCHES, 100)
    assert empty.wanted({SEARCHES: 80, TOKENS: 0}) == {}
    assert empty.wanted({SEARCHES: 100, TOKENS: 0}, {SEARCHES: 1}) == {SEARCHES: 100}


def test_a_node_that_has_seen_nothing_asks_before_it_refuses() -> None:
    """Before the first value is read nothing may be used, and nothing is exhausted."""
    node = NodeLease("a", {SEARCHES: 100})
    assert not node.fits(SEARCHES, 0)
    assert not node.exhausted(SEARCHES, 0)
    assert node.wanted({SEARCHES: 0}, {SEARCHES: 1}) == {SEARCHES: 100}

"""The simulation of many nodes runs over the rules, and its figures are those of the rules."""

from __future__ import annotations

import pytest

from tests.benchmarks.nodes import (
    Setting,
    digests,
    full_value,
    lease_traffic,
    main,
    membership_load,
    nodes_that_fit,
    time_to_verdict,
)

FEW = Setting(nodes=4, rate=50.0, lease_block=64, seconds=4.0, answers=100)


def test_the_table_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    """A run with few nodes prints all four parts, for each size asked for."""
    main(["2", "3", "--seconds", "1", "--answers", "50"])
    table = capsys.readouterr().out
    for words in ("LEASES", "DIGESTS", "MEMBERSHIP", "WHERE IT BREAKS", "2 nodes", "3 nodes"):
        assert words in table


def test_leases_follow_from_rate_and_block() -> None:
    """Each node leases a block as often as it uses one, and waits for hardly any."""
    traffic = lease_traffic(FEW)
    assert 0.5 <= traffic.leases / (FEW.nodes * FEW.rate / FEW.lease_block) <= 2.0
    assert traffic.attempts_per_lease >= 1.0
    assert traffic.starved < 0.02
    assert traffic == lease_traffic(FEW)


def test_too_fast_a_run_waits_for_its_leases() -> None:
    """A round trip bounds how often the key can change, and with it how much all may use."""
    fast = Setting(nodes=4, rate=50_000.0, lease_block=16, seconds=1.0)
    assert lease_traffic(fast).starved > 0.5


def test_digests_follow_from_the_rule_of_20_ms() -> None:
    """At most 50 messages a second leave a node, and no digest waits longer than it says."""
    stream = digests(FEW)
    assert 1 <= stream.messages <= 50
    assert stream.all_messages == FEW.nodes * stream.messages
    assert stream.wait_max <= 0.02 + 2 * FEW.round_trip


def test_the_verdict_is_there_in_time() -> None:
    """A dead node is found within lost_seconds and a beat, counted from its last word."""
    for seed in range(5):
        seconds = time_to_verdict(FEW, seed)
        assert FEW.lost_seconds * 0.8 - 0.1 <= seconds <= FEW.lost_seconds * 1.2 + 0.1
    assert membership_load(FEW).state_bytes < 1024


def test_the_key_has_room_for_more_nodes_than_a_run_may_have() -> None:
    """What ``run.nodes`` allows fits into one value of the key."""
    assert nodes_that_fit() > 4096
    assert full_value(4096).encode()

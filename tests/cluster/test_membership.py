"""Whether a run's nodes are there: the table cell by cell, and the machine that takes the facts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.join import (
    decode_registration,
    encode_registration,
    register,
    withdraw,
)
from smartsearch_sidecar.cluster.membership import (
    GRACE,
    TABLE,
    Link,
    Liveness,
    Membership,
    Reason,
    RunVerdict,
    weight_of,
)
from smartsearch_sidecar.cluster.values import NodeState, RunStatus
from tests.fakes.bus import Ground
from tests.fakes.each import each

LOST = 15.0


def state(
    name: str = "b", beat: int = 1, status: RunStatus = RunStatus.HEALTHY, **changes: Any
) -> NodeState:
    """A state that a node publishes."""
    values: dict[str, Any] = {
        "instance": f"run of {name}",
        "restarts": 0,
        "beat": beat,
        "status": status,
        "ended": False,
        "admitted": True,
        "counts": {"retrieval_attempts": 3},
        "seq": 7,
        "head": "ab" * 32,
        "cause": "deadline" if status is RunStatus.FAILED else None,
    }
    return NodeState(**{**values, **changes})


def members(*names: str, nodes: int | None = None) -> Membership:
    """Node a's view of nodes whose healthy states have all just arrived, at time 0."""
    found = Membership("a", nodes or len(names), LOST, 0.0)
    for name in names:
        found.on_joined(name, f"run of {name}", 0.0)
        found.on_state(name, state(name), 0.0)
    return found


def tick(one: Membership, start: float, end: float, step: float = 1.0) -> RunVerdict:
    """Time passes, listened to."""
    while start < end:
        one.on_tick(start)
        start += step
    return one.on_tick(end)


# --- the table ------------------------------------------------------------------------------------

HEALTHY = (RunStatus.HEALTHY, None)
PENDING = (RunStatus.PENDING, Reason.NODE_PENDING)
QUIET = (RunStatus.PENDING, Reason.NODE_QUIET)
ABSENT = (RunStatus.PENDING, Reason.NODE_ABSENT)
GONE = (RunStatus.FAILED, Reason.NODE_LOST)
DOWN = (RunStatus.PENDING, Reason.CLUSTER_UNREACHABLE)
CUT = (RunStatus.FAILED, Reason.CLUSTER_UNREACHABLE)
FAILED = (RunStatus.FAILED, Reason.NODE_FAILED)

# By liveness: what a healthy, a pending and a failed status come to while the servers are reached.
LINKED = {
    Liveness.FRESH: (HEALTHY, PENDING, FAILED),
    Liveness.ENDED: (HEALTHY, PENDING, FAILED),
    Liveness.UNANSWERED: (QUIET, QUIET, FAILED),
    Liveness.QUIET: (QUIET, QUIET, FAILED),
    Liveness.AWAITED: (ABSENT, ABSENT, FAILED),
    Liveness.LOST: (GONE, GONE, FAILED),
    Liveness.NEVER: (GONE, GONE, FAILED),
}


@each("link, liveness, status", list(itertools.product(Link, Liveness, RunStatus)))
def test_every_cell(link: Link, liveness: Liveness, status: RunStatus) -> None:
    """Each combination of facts has the weight that the design states, spelt out here once more."""
    expected = LINKED[liveness][list(RunStatus).index(status)]
    if link is not Link.UP and status is not RunStatus.FAILED:
        expected = DOWN if link is Link.DOWN else CUT
    assert TABLE[weight_of(link, liveness, status)][:2] == expected


def test_only_one_row_is_healthy() -> None:
    """Healthy is a node that is linked, says so, and was just heard or has ended."""
    healthy = {
        facts
        for facts in itertools.product(Link, Liveness, RunStatus)
        if TABLE[weight_of(*facts)].status is RunStatus.HEALTHY
    }
    assert healthy == {
        (Link.UP, Liveness.FRESH, RunStatus.HEALTHY),
        (Link.UP, Liveness.ENDED, RunStatus.HEALTHY),
    }


# --- all there ------------------------------------------------------------------------------------


def test_a_run_is_healthy_when_every_node_says_so() -> None:
    """All nodes are there, and all are healthy."""
    assert members("a", "b", "c").verdict(0.0) == RunVerdict(RunStatus.HEALTHY)


def test_the_worst_node_is_the_runs_state() -> None:
    """One pending node makes the run pending and is named; a failed one closes the latch."""
    one = members("a", "b", "c")
    one.on_state("c", state("c", 2, RunStatus.PENDING), 1.0)
    verdict = one.verdict(1.0)
    assert (verdict.status, verdict.reason, verdict.node) == (*PENDING, "c")
    assert verdict.cause is None
    assert verdict.detail == "node c has work in flight"
    one.on_state("b", state("b", 2, RunStatus.FAILED), 2.0)
    verdict = one.verdict(2.0)
    assert (verdict.status, verdict.reason, verdict.node) == (*FAILED, "b")
    assert verdict.cause == "deadline"
    assert verdict.detail == "on node b, by its own report"


def test_a_failure_stays() -> None:
    """The run has failed with the first cause, also where nodes are healthy later."""
    one = members("a", "b", "c")
    one.on_state("b", state("b", 2, RunStatus.FAILED), 1.0)
    one.on_state("b", state("b", 3), 2.0)
    one.on_state("c", state("c", 3, RunStatus.FAILED, cause="ledger_failed"), 2.0)
    assert one.verdict(2.0).cause == "deadline"
    assert one.verdict(2.0).node == "b"


def test_a_registered_node_that_says_nothing_is_pending() -> None:
    """To have joined is not to be healthy; after lost_seconds it is lost."""
    one = members("a", nodes=2)
    one.on_joined("b", "run of b", 0.0)
    assert one.verdict(0.0).reason is Reason.NODE_PENDING
    assert one.verdict(0.0).detail == "node b has published no state yet"
    verdict = tick(one, 0.0, LOST)
    assert (verdict.cause, verdict.node) == ("node_lost", "b")


# --- silence --------------------------------------------------------------------------------------


def test_silence_makes_pending_then_lost() -> None:
    """From half of lost_seconds on the run is pending, at lost_seconds it has failed, by name."""
    one = members("a", "b")
    assert tick(one, 0.0, LOST / 2 - 0.1).status is RunStatus.HEALTHY
    verdict = tick(one, LOST / 2 - 0.1, LOST / 2)
    assert (verdict.status, verdict.reason, verdict.node) == (*QUIET, "b")
    assert verdict.cause is None
    assert tick(one, LOST / 2, LOST - 0.1).status is RunStatus.PENDING
    verdict = tick(one, LOST - 0.1, LOST)
    assert (verdict.status, verdict.reason, verdict.cause) == (*GONE, "node_lost")
    assert verdict.detail == "node b has not been heard of for 15.0 s"


def test_a_word_in_time_is_enough() -> None:
    """A node heard of every fifth of lost_seconds is never quiet."""
    one = members("a", "b")
    for beat in range(2, 40):
        now = beat * LOST / 5
        assert one.on_tick(now).status is RunStatus.HEALTHY
        one.on_state("b", state("b", beat), now)


def test_our_own_silence_is_not_judged() -> None:
    """A node knows that it is there; the others judge whether they hear it."""
    one = members("a")
    assert tick(one, 0.0, 10 * LOST).status is RunStatus.HEALTHY


def test_what_was_told_before_is_no_sign_of_life() -> None:
    """A watch that begins again tells a dead node's last state again, as often as it likes."""
    one = members("a", "b")
    for now in range(1, 16):
        one.on_state("b", state("b"), float(now))
    assert one.on_tick(LOST).cause == "node_lost"


def test_an_older_word_is_no_news() -> None:
    """A state that is overtaken on its way does not undo the later one."""
    one = members("a", "b")
    one.on_state("b", state("b", 5, RunStatus.PENDING), 1.0)
    one.on_state("b", state("b", 4), 2.0)
    assert one.verdict(2.0).status is RunStatus.PENDING
    one.on_state("b", state("b", 1, restarts=1), 3.0)
    assert one.verdict(3.0).status is RunStatus.HEALTHY


def test_a_word_too_late_does_not_undo_the_loss() -> None:
    """A node is lost when its time is over, not when a verdict is asked."""
    one = members("a", "b", "c")
    for now in range(1, 16):
        one.on_state("c", state("c", 1 + now), float(now))
    one.on_state("b", state("b", 2), LOST + 0.5)
    assert (one.verdict(LOST + 0.5).cause, one.verdict(LOST + 0.5).node) == ("node_lost", "b")


def test_anothers_words_under_a_nodes_name_are_not_its_own() -> None:
    """The registration says which run directory a name is; the words of another count nothing."""
    one = members("a", "b")
    one.on_state("b", state("b", 9, instance="another"), 1.0)
    assert one.rows(1.0)["b"].state == state("b")
    one = members("a", nodes=2)
    one.on_state("b", state("b", instance="another"), 0.0)
    one.on_joined("b", "run of b", 0.0)
    assert one.rows(0.0)["b"].state is None


# --- absent nodes ---------------------------------------------------------------------------------


def test_an_absent_node_makes_pending_for_as_long_as_nothing_runs() -> None:
    """Before the first admission there is time without end to start the nodes."""
    none = Membership("a", 3, LOST, 0.0).verdict(0.0)
    assert none.detail == "3 of the run's 3 nodes have not joined yet (joined: none yet)"
    one = Membership("a", 3, LOST, 0.0)
    one.on_state("a", state("a", admitted=False), 0.0)
    verdict = tick(one, 0.0, 20 * LOST)
    assert (verdict.status, verdict.reason) == ABSENT
    assert verdict.detail == "2 of the run's 3 nodes have not joined yet (joined: a)"


def test_an_absent_node_is_lost_after_the_first_admission() -> None:
    """The clock runs from the first admission of any node, as far as it is known here."""
    one = Membership("a", 3, LOST, 0.0)
    one.on_state("a", state("a", admitted=False), 0.0)
    one.on_state("b", state("b", admitted=False), 0.0)
    for now in range(1, 40):
        one.on_state("b", state("b", now + 1, admitted=now >= 10), float(now))
        verdict = one.on_tick(float(now))
        assert (verdict.cause == "node_lost") is (now >= 25)
    assert one.verdict(40.0).detail == "1 of the run's 3 nodes have never joined (joined: a, b)"
    assert one.verdict(40.0).node is None


def test_a_node_that_comes_late_but_in_time_is_welcome() -> None:
    """The last to join makes the run healthy."""
    one = members("a", nodes=2)
    tick(one, 0.0, LOST - 1)
    one.on_joined("b", "run of b", LOST - 1)
    one.on_state("b", state("b"), LOST - 1)
    assert one.verdict(LOST - 1).status is RunStatus.HEALTHY


def test_a_node_that_comes_too_late_stays_lost() -> None:
    """Also where no verdict was asked between the end of the time and its coming."""
    for first in ("registration", "state"):
        one = members("a", nodes=2)
        tick(one, 0.0, LOST - 0.5)
        if first == "registration":
            one.on_joined("b", "run of b", LOST + 0.5)
        one.on_state("b", state("b"), LOST + 0.5)
        assert one.verdict(LOST + 0.5).cause == "node_lost"


# --- the end --------------------------------------------------------------------------------------


def test_a_node_that_ended_cleanly_is_settled() -> None:
    """A node that ended cleanly sends no further state, and its silence is no failure."""
    one = members("a", "b")
    one.on_state("b", state("b", 2, ended=True), 1.0)
    assert tick(one, 1.0, 10 * LOST) == RunVerdict(RunStatus.HEALTHY)
    assert one.verdict(10 * LOST, answered=["a"]).status is RunStatus.HEALTHY
    assert one.rows(10 * LOST)["b"].liveness is Liveness.ENDED


def test_a_node_that_ended_latched_has_failed() -> None:
    """To end does not undo a failure."""
    one = members("a", "b")
    one.on_state("b", state("b", 2, RunStatus.FAILED, ended=True), 1.0)
    assert one.verdict(1.0).cause == "deadline"


def test_a_node_that_resumes_is_a_node_again() -> None:
    """From its first state on, its silence counts."""
    one = members("a", "b")
    one.on_state("b", state("b", 2, ended=True), 1.0)
    tick(one, 1.0, 100.0)
    one.on_state("b", state("b", 1, restarts=1), 100.0)
    assert one.verdict(100.0).status is RunStatus.HEALTHY
    assert tick(one, 100.0, 100.0 + LOST).cause == "node_lost"


# --- the link -------------------------------------------------------------------------------------


def test_losing_the_servers_is_not_healthy_at_once() -> None:
    """Pending from the first moment, with the reason; back in time, the run goes on."""
    one = members("a", "b")
    one.on_disconnected(1.0)
    verdict = one.verdict(1.0)
    assert (verdict.status, verdict.reason, verdict.cause, verdict.node) == (*DOWN, None, None)
    tick(one, 1.0, LOST)
    one.on_connected(LOST + 0.9)
    assert one.verdict(LOST + 0.9).reason is Reason.NODE_QUIET
    one.on_state("b", state("b", 2), LOST + 1.0)
    assert one.verdict(LOST + 1.0).status is RunStatus.HEALTHY


def test_losing_the_servers_for_too_long_fails_the_run() -> None:
    """After lost_seconds the latch closes, also where no verdict was asked before."""
    one = members("a", "b")
    one.on_disconnected(1.0)
    one.on_disconnected(9.0)
    assert tick(one, 1.0, 1.0 + LOST).cause == "cluster_unreachable"
    late = members("a", "b")
    late.on_disconnected(1.0)
    late.on_connected(1.0 + LOST)
    late.on_state("b", state("b", 2), 1.0 + LOST)
    verdict = late.verdict(1.0 + LOST)
    assert (verdict.status, verdict.reason, verdict.cause) == (*CUT, "cluster_unreachable")
    assert verdict.detail == "node a does not reach the NATS servers"


def test_no_node_is_lost_while_this_one_did_not_listen() -> None:
    """Back after almost lost_seconds, each node has lost_seconds to be heard of again."""
    one = members("a", "b")
    one.on_disconnected(1.0)
    tick(one, 1.0, 14.0)
    one.on_connected(14.0)
    assert tick(one, 14.0, 14.0 + LOST - 0.1).reason is Reason.NODE_QUIET
    assert tick(one, 14.0 + LOST - 0.1, 14.0 + LOST).cause == "node_lost"


def test_a_connection_that_comes_and_goes_hides_no_node_for_ever() -> None:
    """A dead node is never taken for healthy meanwhile, and lost after a few times the time."""
    one, now = members("a", "b"), 8.0
    tick(one, 0.0, now)
    while one.on_tick(now).cause is None:
        assert one.verdict(now).status is RunStatus.PENDING
        one.on_disconnected(now)
        tick(one, now, now + 4.0)
        one.on_connected(now + 4.0)
        now += 5.0
    assert one.verdict(now).cause == "node_lost"
    assert GRACE * LOST <= now <= GRACE * LOST + 5


def test_a_process_that_stood_still_does_not_blame_the_others() -> None:
    """Stopped for a minute and going on, no node is lost; but none counts as healthy either."""
    one = members("a", "b")
    tick(one, 0.0, 5.0)
    assert one.verdict(70.0).reason is Reason.NODE_QUIET
    assert one.on_tick(70.0).cause is None
    one.on_state("b", state("b", 2), 70.1)
    assert one.verdict(70.1).status is RunStatus.HEALTHY
    dead = members("a", "b")
    tick(dead, 0.0, 5.0)
    assert tick(dead, 70.0, 70.0 + LOST).cause == "node_lost"


# --- all asked ------------------------------------------------------------------------------------


def test_a_node_that_does_not_answer_is_not_healthy() -> None:
    """The gate takes a live answer for healthy, not a status that is some seconds old."""
    one = members("a", "b")
    verdict = one.verdict(1.0, answered={"a"})
    assert (verdict.status, verdict.reason, verdict.node) == (*QUIET, "b")
    assert verdict.detail == "node b did not answer"
    assert one.verdict(1.0, answered={"a", "b"}).status is RunStatus.HEALTHY
    assert one.rows(1.0, answered={"a"})["b"].liveness is Liveness.UNANSWERED


def test_rows_say_what_is_known_of_each_node() -> None:
    """The page has a row per node: what was received, how long ago, the last state."""
    one = members("a", "b")
    one.on_state("b", state("b", 2, RunStatus.PENDING), 2.0)
    rows = one.rows(12.0)
    assert list(rows) == ["a", "b"]
    assert rows["a"].silent_seconds == 0.0
    assert rows["b"].silent_seconds == 10.0
    assert rows["b"].liveness is Liveness.QUIET
    assert rows["b"].state == state("b", 2, RunStatus.PENDING)


def test_asking_changes_nothing() -> None:
    """A verdict asked for, many times and for any time, leaves the machine as it was."""
    one, other = members("a", "b"), members("a", "b")
    for now in (100.0, 3.0, 55.0):
        one.verdict(now)
        one.rows(now)
    assert tick(one, 0.0, 9.0) == tick(other, 0.0, 9.0)
    assert tick(one, 9.0, LOST) == tick(other, 9.0, LOST)


# --- the values -----------------------------------------------------------------------------------


def test_the_bytes_of_a_state_are_pinned() -> None:
    """Nodes of one version publish their states in exactly this form."""
    said = state("b", 4, RunStatus.FAILED)
    assert said.encode() == (
        b'{"accepted_searches":0,"admitted":true,"beat":4,"cause":"deadline",'
        b'"counts":{"retrieval_attempts":3},"deaf_from":null,"detail":"","ended":false,"gaps":[],'
        b'"head":"' + b"ab" * 32 + b'","instance":"run of b","restarts":0,"seq":7,'
        b'"status":"failed"}'
    )
    assert NodeState.decode(said.encode()) == said
    assert encode_registration("x") == b'{"instance":"x"}'
    assert decode_registration(b'{"instance":"x"}') == "x"


@each(
    "before, after",
    [
        (b'"failed"', b'"fine"'),
        (b'"failed"', b'"healthy"'),
        (b'"failed"', b"1"),
        (b'"deadline"', b"null"),
        (b'"deadline"', b"1"),
        (b'"ended":false', b'"ended":0'),
        (b'"admitted":true', b'"admitted":null'),
        (b'"beat":4', b'"beat":-4'),
        (b'"beat":4', b'"beat":true'),
        (b'"beat":4', b'"beat":4.0'),
        (b'"seq":7', b'"seq":"7"'),
        (b'"counts":{"retrieval_attempts":3}', b'"counts":{"retrieval_attempts":"3"}'),
        (b'"counts":{"retrieval_attempts":3}', b'"counts":[]'),
        (b'"instance":"run of b"', b'"instance":null'),
        (b'"beat":4,', b""),
        (b'"beat":4,', b'"beat":4,"beat":4,'),
        (b'"beat":4,', b'"beat":4, '),
        (b'{"accepted', b'{"a":1,"accepted'),
        (b'"accepted_searches":0', b'"accepted_searches":-1'),
        (b'"detail":""', b'"detail":null'),
        (b'"deaf_from":null', b'"deaf_from":1'),
        (b'"gaps":[]', b'"gaps":{}'),
        (b'"gaps":[]', b'"gaps":[1]'),
    ],
)
def test_another_state_is_not_read(before: bytes, after: bytes) -> None:
    """A state of another shape is another version's."""
    data = state("b", 4, RunStatus.FAILED).encode()
    assert before in data
    with pytest.raises(errors.ClusterUnreadable):
        NodeState.decode(data.replace(before, after))


@pytest.mark.parametrize("data", [b"{}", b"[]", b'{"instance":1}', b'{"instance":"x","y":1}'])
def test_another_registration_is_not_read(data: bytes) -> None:
    """A registration of another shape is another version's."""
    with pytest.raises(errors.ClusterUnreadable):
        decode_registration(data)


def test_a_state_cannot_say_nonsense() -> None:
    """A cause belongs to a failure, work in flight to a node that goes on, a count counts."""
    nonsense: list[dict[str, Any]] = [
        {"status": RunStatus.FAILED, "cause": None},
        {"cause": "deadline"},
        {"status": RunStatus.PENDING, "ended": True},
        {"seq": -1},
        {"counts": {"x": 1.5}},
    ]
    for changes in nonsense:
        with pytest.raises(errors.InvariantBroken):
            state(**changes)


async def test_a_name_belongs_to_one_run_directory() -> None:
    """The same directory may come again, another one is refused by the name of the node; a name
    that was given back is free.
    """
    bus = Ground().bus()
    for _ in range(2):
        await register(bus, "b", "x")
    with pytest.raises(errors.ClusterRefused, match="as node b"):
        await register(bus, "b", "y")
    await withdraw(bus, "b", "y")  # not its own to give
    with pytest.raises(errors.ClusterRefused, match="as node b"):
        await register(bus, "b", "y")
    await withdraw(bus, "b", "x")
    await register(bus, "b", "y")

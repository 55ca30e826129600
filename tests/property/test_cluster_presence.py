"""Equal inputs give equal verdicts, and nobody is healthy who should not be.

Random histories of words, silences, breaks of the connection and stand-stills are told to the
machine; what it says is held against the history itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from smartsearch_sidecar.cluster.membership import Membership, Verdict
from smartsearch_sidecar.cluster.nodestate import NodeState, RunStatus

LOST = 10.0
NAMES = ("a", "b", "c")

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), st.integers(1, 40)),  # tenths of a second
        st.tuples(st.just("stand still"), st.integers(60, 300)),
        st.tuples(st.just("say"), st.sampled_from(NAMES)),
        st.tuples(st.just("work"), st.sampled_from(NAMES)),
        st.tuples(st.just("say again"), st.sampled_from(NAMES)),
        st.tuples(st.just("end"), st.sampled_from(NAMES)),
        st.tuples(st.just("fail"), st.sampled_from(NAMES)),
        st.tuples(st.just("down"), st.none()),
        st.tuples(st.just("up"), st.none()),
    ),
    max_size=60,
)


@dataclass
class Told:
    """What a history has told so far, noted apart from the machine."""

    now: float = 0.0
    down_since: float | None = None
    was_cut: bool = False
    last: dict[str, NodeState] = field(default_factory=dict)
    heard_at: dict[str, float] = field(default_factory=dict)


def play(
    steps: list[tuple[str, object]],
    look: Callable[[Membership, Told], None] = lambda one, told: None,
    *,
    nodes: int = 3,
) -> tuple[Membership, Told]:
    """Tells a history; ``look`` is called after each step."""
    one, told = Membership("a", nodes, LOST, 0.0), Told()
    for kind, what in steps:
        if kind in ("pass", "stand still"):
            assert isinstance(what, int)
            told.now = round(told.now + what / 10, 3)
            one.ticked(told.now)
        elif kind == "down":
            one.disconnected(told.now)
            told.down_since = told.now if told.down_since is None else told.down_since
        elif kind == "up":
            one.connected(told.now)
            told.was_cut |= told.down_since is not None and told.now - told.down_since >= LOST
            told.down_since = None
        else:
            say(one, told, kind, str(what))
        look(one, told)
    return one, told


def say(one: Membership, told: Told, kind: str, name: str) -> None:
    """A node's word; "say again" tells its last one once more."""
    before = told.last.get(name)
    if kind == "say again":
        if before is not None:
            one.heard(name, before, told.now)
        return
    word = {"work": RunStatus.PENDING, "fail": RunStatus.FAILED}.get(kind, RunStatus.HEALTHY)
    state = NodeState(
        instance=name,
        restarts=0,
        beat=0 if before is None else before.beat + 1,
        word=word,
        ended=kind == "end",
        admitted=kind == "work",
        counts={},
        seq=0,
        head="",
        cause="deadline" if word is RunStatus.FAILED else None,
    )
    one.heard(name, state, told.now)
    told.last[name], told.heard_at[name] = state, told.now


def verdicts_into(said: list[Verdict]) -> Callable[[Membership, Told], None]:
    """Notes each step's verdict."""
    return lambda one, told: said.append(one.verdict(told.now))


@settings(deadline=None)
@given(steps=STEPS)
def test_equal_histories_give_equal_verdicts(steps: list[tuple[str, object]]) -> None:
    """The machine holds no clock and no chance: told the same, it says the same, step by step."""
    said: list[list[Verdict]] = [[], []]
    for found in said:
        play(steps, verdicts_into(found))
    assert said[0] == said[1]


@settings(deadline=None)
@given(steps=STEPS, asked=st.floats(0, 100))
def test_looking_changes_nothing(steps: list[tuple[str, object]], asked: float) -> None:
    """How often and for when a verdict is asked has no influence on the next."""

    def look(one: Membership, told: Told) -> None:
        one.verdict(told.now + asked)
        one.verdict(told.now + asked, answered=())
        one.rows(told.now + asked)

    (one, told), (other, _) = play(steps), play(steps, look)
    assert one.verdict(told.now) == other.verdict(told.now)


@settings(max_examples=300, deadline=None)
@given(steps=STEPS)
def test_healthy_is_only_a_run_of_which_all_is_known(steps: list[tuple[str, object]]) -> None:
    """Linked, all joined, all healthy in their last word, and each just heard or cleanly ended."""

    def look(one: Membership, told: Told) -> None:
        if one.verdict(told.now).state is not RunStatus.HEALTHY:
            return
        assert told.down_since is None
        assert not told.was_cut
        assert set(told.last) == set(NAMES)
        for name, state in told.last.items():
            assert state.word is RunStatus.HEALTHY
            fresh = told.now - told.heard_at[name] < LOST / 2
            assert state.ended or fresh or name == "a"

    play(steps, look)


@settings(max_examples=300, deadline=None)
@given(steps=STEPS)
def test_a_failure_is_never_taken_back(steps: list[tuple[str, object]]) -> None:
    """The first cause stays, and a failed verdict always has one."""
    causes: list[str | None] = []

    def look(one: Membership, told: Told) -> None:
        verdict = one.verdict(told.now)
        assert (verdict.cause is not None) is (verdict.state is RunStatus.FAILED)
        assert not causes or causes[0] == verdict.cause
        if verdict.cause is not None:
            causes.append(verdict.cause)

    play(steps, look)


@settings(deadline=None)
@given(steps=STEPS)
def test_whoever_falls_silent_is_lost_in_bounded_time(steps: list[tuple[str, object]]) -> None:
    """After any history, linked and listening, a run with a silent node fails within the time."""
    one, told = play(steps)
    one.connected(told.now)
    ended = all(told.last.get(name) and told.last[name].ended for name in ("b", "c"))
    state = told.last.get("a")
    beat = 0 if state is None else state.beat + 1
    mine = NodeState("a", 0, beat, RunStatus.HEALTHY, False, True, {}, 0, "")
    one.heard("a", mine, told.now)  # something was admitted: the clock of the absent runs
    now = told.now
    for _ in range(11):
        now += LOST / 10
        one.ticked(now)
    verdict = one.verdict(now)
    assert verdict.state is RunStatus.FAILED or ended

"""Equal inputs give equal verdicts, and no run is healthy that should not be.

Random histories of states, silences, breaks of the connection and stand-stills are fed to the
machine; what it says is held against the history itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from smartsearch_sidecar.cluster.membership import Membership, RunVerdict
from smartsearch_sidecar.cluster.values import NodeState, RunStatus

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
class History:
    """What has happened so far, noted apart from the machine."""

    now: float = 0.0
    down_since: float | None = None
    was_cut: bool = False
    last: dict[str, NodeState] = field(default_factory=dict)
    heard_at: dict[str, float] = field(default_factory=dict)


def play(
    steps: list[tuple[str, object]],
    look: Callable[[Membership, History], None] = lambda one, history: None,
    *,
    nodes: int = 3,
) -> tuple[Membership, History]:
    """Feeds a history to the machine; ``look`` is called after each step."""
    one, history = Membership("a", nodes, LOST, 0.0), History()
    for kind, what in steps:
        if kind in ("pass", "stand still"):
            assert isinstance(what, int)
            history.now = round(history.now + what / 10, 3)
            one.on_tick(history.now)
        elif kind == "down":
            one.on_disconnected(history.now)
            history.down_since = history.now if history.down_since is None else history.down_since
        elif kind == "up":
            one.on_connected(history.now)
            history.was_cut |= (
                history.down_since is not None and history.now - history.down_since >= LOST
            )
            history.down_since = None
        else:
            say(one, history, kind, str(what))
        look(one, history)
    return one, history


def say(one: Membership, history: History, kind: str, name: str) -> None:
    """A node publishes its state; "say again" delivers its last one once more."""
    before = history.last.get(name)
    if kind == "say again":
        if before is not None:
            one.on_state(name, before, history.now)
        return
    status = {"work": RunStatus.PENDING, "fail": RunStatus.FAILED}.get(kind, RunStatus.HEALTHY)
    state = NodeState(
        instance=name,
        restarts=0,
        beat=0 if before is None else before.beat + 1,
        status=status,
        ended=kind == "end",
        admitted=kind == "work",
        counts={},
        seq=0,
        head="",
        cause="deadline" if status is RunStatus.FAILED else None,
    )
    one.on_state(name, state, history.now)
    history.last[name], history.heard_at[name] = state, history.now


def verdicts_into(said: list[RunVerdict]) -> Callable[[Membership, History], None]:
    """Notes each step's verdict."""
    return lambda one, history: said.append(one.verdict(history.now))


@given(steps=STEPS)
def test_equal_histories_give_equal_verdicts(steps: list[tuple[str, object]]) -> None:
    """The machine holds no clock and no chance: fed the same, it says the same, step by step."""
    said: list[list[RunVerdict]] = [[], []]
    for found in said:
        play(steps, verdicts_into(found))
    assert said[0] == said[1]


@given(steps=STEPS, asked=st.floats(0, 100))
def test_looking_changes_nothing(steps: list[tuple[str, object]], asked: float) -> None:
    """How often and for when a verdict is asked has no influence on the next."""

    def look(one: Membership, history: History) -> None:
        one.verdict(history.now + asked)
        one.verdict(history.now + asked, answered=())
        one.rows(history.now + asked)

    (one, history), (other, _) = play(steps), play(steps, look)
    assert one.verdict(history.now) == other.verdict(history.now)


@settings(max_examples=3 * settings().max_examples)
@given(steps=STEPS)
def test_healthy_is_only_a_run_of_which_all_is_known(steps: list[tuple[str, object]]) -> None:
    """Linked, all joined, all healthy in their last state, each just received or cleanly ended."""

    def look(one: Membership, history: History) -> None:
        if one.verdict(history.now).status is not RunStatus.HEALTHY:
            return
        assert history.down_since is None
        assert not history.was_cut
        assert set(history.last) == set(NAMES)
        for name, state in history.last.items():
            assert state.status is RunStatus.HEALTHY
            fresh = history.now - history.heard_at[name] < LOST / 2
            assert state.ended or fresh or name == "a"

    play(steps, look)


@settings(max_examples=3 * settings().max_examples)
@given(steps=STEPS)
def test_a_failure_is_never_taken_back(steps: list[tuple[str, object]]) -> None:
    """The first cause stays, and a failed verdict always has one."""
    causes: list[str | None] = []

    def look(one: Membership, history: History) -> None:
        verdict = one.verdict(history.now)
        assert (verdict.cause is not None) is (verdict.status is RunStatus.FAILED)
        assert not causes or causes[0] == verdict.cause
        if verdict.cause is not None:
            causes.append(verdict.cause)

    play(steps, look)


@given(steps=STEPS)
def test_a_silent_node_is_lost_in_bounded_time(steps: list[tuple[str, object]]) -> None:
    """After any history, linked and listening, a run with a silent node fails within the time."""
    one, history = play(steps)
    one.on_connected(history.now)
    ended = all(history.last.get(name) and history.last[name].ended for name in ("b", "c"))
    state = history.last.get("a")
    beat = 0 if state is None else state.beat + 1
    mine = NodeState("a", 0, beat, RunStatus.HEALTHY, False, True, {}, 0, "")
    one.on_state("a", mine, history.now)  # something was admitted: the clock of the absent runs
    now = history.now
    for _ in range(11):
        now += LOST / 10
        one.on_tick(now)
    verdict = one.verdict(now)
    assert verdict.status is RunStatus.FAILED or ended

"""The meter's rules: what may be sent, what it has cost, and that a fold reaches the same value."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from smartsearch_sidecar import errors
from smartsearch_sidecar.run.scores import Meter
from tests.fakes.each import each
from tests.fakes.raised import raises


def reserve(meter: Meter, wanted: int = 1) -> range:
    """Decides and applies in one step, as a run does; deciding alone changes nothing."""
    before = copy.deepcopy(meter)
    try:
        numbers = meter.admit(wanted)
    finally:
        assert meter == before
    for number in numbers:
        meter.on_requested(number)
    return numbers


def usage(meter: Meter) -> tuple[int, int, int, int, int]:
    """The five counters of helper calls."""
    return (
        meter.model_attempts,
        meter.model_responses,
        meter.input_tokens,
        meter.output_tokens,
        meter.unknown_output_token_reservations,
    )


def test_a_reservation_is_the_cap_until_it_is_measured() -> None:
    """2,048 tokens are kept when a call is sent, and its own tokens once they are known."""
    meter = Meter(10, 10_000)
    assert reserve(meter) == range(1, 2)
    assert usage(meter) == (1, 0, 0, 0, 2048)
    meter.on_answered(1, 300, 12)
    assert usage(meter) == (1, 1, 300, 12, 0)
    assert meter.settled


def test_a_lost_call_keeps_its_reservation() -> None:
    """What was not measured may have cost all of it, as in the reference."""
    meter = Meter(10, 10_000)
    reserve(meter)
    meter.on_failed(1)
    assert usage(meter) == (1, 0, 0, 0, 2048)
    assert meter.settled


def test_a_measured_failure_is_a_response_with_its_tokens() -> None:
    """A wrong, empty or over-long answer was paid for, as in the reference."""
    meter = Meter(10, 10_000)
    reserve(meter)
    meter.on_failed(1, (300, 2100))
    assert usage(meter) == (1, 1, 300, 2100, 0)


def test_a_call_that_was_never_sent_gives_its_reservation_back() -> None:
    """It costs nothing, but its number is used up."""
    meter = Meter(10, 2048)
    reserve(meter)
    meter.on_failed(1, sent=False)
    assert usage(meter) == (1, 0, 0, 0, 0)
    assert reserve(meter) == range(2, 3)


def test_what_does_not_fit_waits_while_others_are_unsettled() -> None:
    """A cheap answer makes room for the call that waited."""
    meter = Meter(10, 4096 + 100)
    reserve(meter)
    reserve(meter)
    assert not reserve(meter)
    assert usage(meter)[0] == 2
    meter.on_answered(1, 5, 101)
    assert not reserve(meter)
    meter.on_answered(2, 5, 100)
    assert reserve(meter) == range(3, 4)


def test_of_calls_wanted_together_those_that_fit_are_admitted() -> None:
    """By tokens or by calls, the fewer of them; the rest waits or is refused as one call is."""
    meter = Meter(3, 2 * 2048 + 100)
    assert reserve(meter, 5) == range(1, 3)
    assert usage(meter)[4] == 2 * 2048
    assert not reserve(meter, 5)
    meter.on_answered(1, 5, 1)
    assert reserve(meter, 5) == range(3, 4)
    with raises(errors.QUOTA_EXHAUSTED, match=r"reward\.max_helper_calls"):
        reserve(meter, 5)


def test_tokens_are_exhausted_only_once_nothing_is_unsettled() -> None:
    """Then no later settlement can make room any more."""
    meter = Meter(10, 2048 + 2047, section="reward.validation")
    reserve(meter)
    assert not reserve(meter)
    meter.on_failed(1)
    with raises(errors.QUOTA_EXHAUSTED, match=r"reward\.validation\.max_output_tokens"):
        reserve(meter)


def test_a_quota_below_one_call_is_exhausted_at_once() -> None:
    """The first call is admitted or refused by the same rule as any other."""
    with raises(errors.QUOTA_EXHAUSTED):
        reserve(Meter(10, 2047))
    assert reserve(Meter(10, 2048)) == range(1, 2)


def test_calls_are_exhausted_at_once() -> None:
    """A used call does not become free again, so a call over the cap is refused at once."""
    meter = Meter(1, 10_000)
    reserve(meter)
    with raises(errors.QUOTA_EXHAUSTED, match=r"reward\.max_helper_calls"):
        reserve(meter)


def test_an_overlong_answer_is_counted_as_it_was() -> None:
    """Tokens above the reservation are booked, and count against later calls."""
    meter = Meter(10, 4096)
    reserve(meter)
    meter.on_failed(1, (5, 3000))
    with raises(errors.QUOTA_EXHAUSTED):
        reserve(meter)
    assert meter.output_tokens == 3000


def test_scores_have_numbers_and_a_quota_of_their_own() -> None:
    """Attempts count when they begin, responses when they have a reward."""
    meter = Meter(10, 10_000, max_scores=2)
    assert meter.admit_scores(2) == range(1, 3)
    meter.on_score_requested(1)
    assert meter.admit_scores(1) == range(2, 3)
    with raises(errors.QUOTA_EXHAUSTED, match="2 more scores do not fit"):
        meter.admit_scores(2)
    meter.on_score_requested(2)
    assert not meter.settled
    meter.on_score_failed(1)
    meter.on_score_answered(2)
    assert (meter.score_attempts, meter.score_responses, meter.settled) == (2, 1, True)
    with raises(errors.QUOTA_EXHAUSTED, match=r"reward\.max_scores"):
        meter.admit_scores(1)


def test_usage_has_the_names_of_the_reference() -> None:
    """Operators compare the two, key by key."""
    assert list(Meter(1, 1).usage().items()) == [
        ("score_attempts", 0),
        ("score_responses", 0),
        ("model_attempts", 0),
        ("model_responses", 0),
        ("input_tokens", 0),
        ("output_tokens", 0),
        ("unknown_output_token_reservations", 0),
    ]


IMPOSSIBLE: dict[str, list[tuple[Any, ...]]] = {
    "a first call that is not the first": [("on_requested", 2)],
    "a number twice": [("on_requested", 1), ("on_requested", 1)],
    "a gap": [("on_requested", 1), ("on_requested", 3)],
    "more calls than allowed": [("on_requested", 1), ("on_requested", 2), ("on_requested", 3)],
    "an answer to nothing": [("on_answered", 1, 1, 1)],
    "a failure of nothing": [("on_failed", 1)],
    "two answers": [("on_requested", 1), ("on_answered", 1, 1, 1), ("on_answered", 1, 1, 1)],
    "a failure after an answer": [("on_requested", 1), ("on_answered", 1, 1, 1), ("on_failed", 1)],
    "an answer after a failure": [("on_requested", 1), ("on_failed", 1), ("on_answered", 1, 1, 1)],
    "negative tokens": [("on_requested", 1), ("on_answered", 1, 1, -1)],
    "tokens that are no number": [("on_requested", 1), ("on_failed", 1, (True, 1))],
    "a score that is not the next": [("on_score_requested", 2)],
    "more scores than allowed": [("on_score_requested", 1), ("on_score_requested", 2)],
    "a reward for nothing": [("on_score_answered", 1)],
    "a failed score that never was": [("on_score_failed", 1)],
}


@each("story", IMPOSSIBLE)
def test_an_impossible_history_is_a_broken_invariant(story: str) -> None:
    """A fold stops at what cannot have happened, and the state stays as it was before."""
    meter = Meter(2, 10_000, max_scores=1)
    *before, last = IMPOSSIBLE[story]
    for name, *arguments in before:
        getattr(meter, name)(*arguments)
    seen, name, *arguments = repr(meter), *last
    with pytest.raises(errors.InvariantBroken):
        getattr(meter, name)(*arguments)
    assert repr(meter) == seen


def test_a_request_that_had_to_wait_cannot_have_been_recorded() -> None:
    """The fold checks the quota again: a record beyond it is not ours."""
    meter = Meter(10, 2048)
    meter.on_requested(1)
    with pytest.raises(errors.InvariantBroken):
        meter.on_requested(2)


def test_a_measured_call_was_sent() -> None:
    """Usage and never sent contradict each other."""
    meter = Meter(10, 10_000)
    reserve(meter)
    with pytest.raises(errors.InvariantBroken):
        meter.on_failed(1, (1, 1), sent=False)


class MeterMachine(RuleBasedStateMachine):
    """Any interleaving of calls and settlements, beside a naive account of what was spent."""

    def __init__(self) -> None:
        super().__init__()
        self.live = Meter(12, 9 * 1000 + 48, cap=1000)
        self.open: list[int] = []
        self.spent: dict[int, int | None] = {}
        self.read = 0

    @rule(wanted=st.integers(1, 4))
    def ask(self, wanted: int) -> None:
        """Admission says yes, wait or exhausted, and each of them only where it is true."""
        room = 9 * 1000 + 48 - self.at_most()
        try:
            numbers = reserve(self.live, wanted)
        except errors.SidecarError as exc:
            refused = exc.failure
            assert refused is errors.QUOTA_EXHAUSTED
            assert len(self.spent) == 12 or (room < 1000 and not self.open)
            return
        first = len(self.spent) + 1
        assert list(numbers) == list(range(first, 13))[: min(wanted, room // 1000)]
        assert numbers or self.open
        self.open += numbers
        self.spent.update(dict.fromkeys(numbers))

    def settle_one(self, choice: int) -> int:
        return self.open.pop(choice % len(self.open))

    @precondition(lambda self: self.open)
    @rule(choice=st.integers(0, 20), read=st.integers(0, 500), written=st.integers(0, 1000))
    def answer(self, choice: int, read: int, written: int) -> None:
        """A call is measured."""
        number = self.settle_one(choice)
        self.live.on_answered(number, read, written)
        self.spent[number], self.read = written, self.read + read

    @precondition(lambda self: self.open)
    @rule(choice=st.integers(0, 20), written=st.integers(0, 1000))
    def refuse(self, choice: int, written: int) -> None:
        """A call is refused for what it says, and measured all the same."""
        number = self.settle_one(choice)
        self.live.on_failed(number, (7, written))
        self.spent[number], self.read = written, self.read + 7

    @precondition(lambda self: self.open)
    @rule(choice=st.integers(0, 20))
    def lose(self, choice: int) -> None:
        """A call is lost."""
        number = self.settle_one(choice)
        self.live.on_failed(number)

    @precondition(lambda self: self.open)
    @rule(choice=st.integers(0, 20))
    def keep_back(self, choice: int) -> None:
        """A call is recorded and not sent."""
        number = self.settle_one(choice)
        self.live.on_failed(number, sent=False)
        self.spent[number] = 0

    def at_most(self) -> int:
        """The most that can be spent: measured tokens, and the cap for each unmeasured call."""
        return sum(1000 if tokens is None else tokens for tokens in self.spent.values())

    @invariant()
    def never_over_quota(self) -> None:
        """Tokens and reservations together are what can have been spent, and within the quota."""
        assert self.live.committed_output_tokens == self.at_most() <= 9 * 1000 + 48
        assert self.live.output_tokens == sum(filter(None, self.spent.values()))
        assert self.live.input_tokens == self.read
        assert self.live.model_attempts == len(self.spent) <= 12
        assert self.live.unsettled == set(self.open)
        assert self.live.settled == (not self.open)

    def teardown(self) -> None:
        """Waiting ends: once every open call is settled, the next one is admitted or refused."""
        while self.open:
            self.lose(0)
        try:
            assert self.live.admit()
        except errors.SidecarError as exc:
            refused = exc.failure
            assert refused is errors.QUOTA_EXHAUSTED
            assert self.at_most() + 1000 > 9 * 1000 + 48 or len(self.spent) == 12


TestMeterMachine = MeterMachine.TestCase
TestMeterMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

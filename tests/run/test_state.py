"""The fold: what a run admits, counts and closes, and the sequences that are no history."""

from __future__ import annotations

from typing import Any

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.run.record import CLASSES, Cause, record_of
from smartsearch_sidecar.run.scores import Scores
from smartsearch_sidecar.run.state import RunState
from tests.fakes.each import each
from tests.fakes.journals import Event, answered, closed, failed, latched, requested, resumed
from tests.fakes.raised import raises


def claimed(max_calls: int = 10) -> Event:
    """The first record."""
    return "run.claimed", None, {"max_calls": max_calls, "claim_sha256": "c" * 64}


def folded(*events: Event, max_calls: int = 10) -> RunState:
    """The state after these events, claimed first."""
    state = RunState()
    for kind, number, data in (claimed(max_calls), *events):
        state.fold(record_of(kind, number, data))
    return state


def declined(number: int, reason: str = "empty") -> Event:
    """A declined query."""
    return "retrieval.declined", number, {"reason": reason, "env": "e", "call": "c"}


def lost(number: int | None, **data: Any) -> Event:
    """A client that had gone."""
    return "delivery.lost", number, {"stage": "waiting", **data}


def repeated(loss: int, number: int | None = 1) -> Event:
    """A client that asked again."""
    return "delivery.repeated", number, {"loss": loss}


def checkpoint(step: int = 1, **data: Any) -> Event:
    """An accepted checkpoint."""
    rest: dict[str, Any] = {"path": None, "manifest_sha256": None, "occurrence": 1, "usage": {}}
    return "checkpoint.accepted", 1, {"step": step, **rest, **data}


ASK = requested(1, "one")
ANSWER = answered(1, "one")


# --- what is counted ------------------------------------------------------------------------------


def test_new_run_is_open_and_settled() -> None:
    """Before anything was asked, nothing is counted and the quota is the claim's."""
    state = folded()
    assert (state.closed, state.settled, state.admit_search()) == (False, True, 1)
    assert state.usage() == dict.fromkeys(state.usage(), 0)


def test_search_is_pending_until_it_is_settled() -> None:
    """An admitted search counts at once and is unsettled until its answer or its failure."""
    assert not folded(ASK).settled
    assert folded(ASK).usage()["retrieval_attempts"] == 1
    assert folded(ASK, ANSWER).settled
    assert folded(ASK, failed(1)).settled
    assert folded(ASK, ANSWER).usage()["retrieval_responses"] == 1
    assert folded(ASK, failed(1)).usage()["retrieval_failed"] == 1


def test_answers_come_in_any_order() -> None:
    """Numbers are of admission, not of completion."""
    state = folded(ASK, requested(2, "two"), answered(2, "two"), ANSWER)
    assert (state.attempts, state.responses, state.settled) == (2, 2, True)


def test_admission_changes_nothing() -> None:
    """Only the record counts: asking twice gives the same number twice."""
    state = folded(ASK)
    before = folded(ASK)
    assert state.admit_search() == state.admit_search() == 2
    assert state == before


def test_declined_queries_have_a_series_of_their_own() -> None:
    """A declined query consumes no attempt."""
    state = folded(declined(1), ASK, ANSWER, declined(2, "too_long"), declined(3))
    assert (state.attempts, state.declined) == (1, 3)
    assert state.declined_by == {"empty": 2, "too_long": 1}


def test_answers_tell_cache_and_dropped_passages() -> None:
    """What an answer cost and left out is counted from its record alone."""
    kind, number, data = ANSWER
    state = folded(ASK, (kind, number, {**data, "cache": "hit", "dropped": [{}, {}]}))
    assert (state.cache, state.dropped_passages) == ({"hit": 1}, 2)


def test_lost_deliveries_are_counted() -> None:
    """With and without an attempt."""
    assert folded(ASK, ANSWER, lost(1), lost(None)).lost == 2


def test_a_loss_that_awaits_its_repeat_is_unsettled() -> None:
    """Which one a repeat settles it says itself; the others stay open."""
    losses = lost(1), lost(1, awaits_repeat=True), lost(None, awaits_repeat=True)
    state = folded(ASK, ANSWER, *losses)
    assert (state.settled, state.awaited, state.lost) == (False, {2, 3}, 3)
    state = folded(ASK, ANSWER, *losses, repeated(3, None))
    assert (state.settled, state.awaited, state.repeated) == (False, {2}, 1)
    state = folded(ASK, ANSWER, *losses, repeated(3), repeated(2))
    assert (state.settled, state.awaited, state.repeated) == (True, set(), 2)
    assert state.attempts == 1


def test_further_calls_of_searches_are_counted() -> None:
    """Beyond the first of each, as their answers say."""
    kind, number, data = answered(2, "two")
    third = (kind, number, {**data, "tries": 3})
    assert folded(ASK, ANSWER, requested(2, "two"), third).retries == 2


def test_checkpoints_are_counted_by_step() -> None:
    """The same step may come again, and is told apart by its occurrence."""
    data = {"step": 6, "path": None, "manifest_sha256": None, "state": "pending"}
    refused = "checkpoint.refused", 1, data
    state = folded(checkpoint(5), checkpoint(5), refused)
    assert (state.checkpoints_accepted, state.checkpoints_refused) == (2, 1)
    assert state.checkpoint_steps == {5: 2}


# --- the latch ------------------------------------------------------------------------------------


def test_latch_closes_for_good_with_its_cause() -> None:
    """Closed means that nothing is admitted any more, and why stays readable."""
    state = folded(ASK, failed(1), latched("retrieval_failed", 1, consumed=True))
    assert state.closed
    assert state.cause == Cause("retrieval_failed", 1, True, "for a test")
    with raises(errors.LATCH_CLOSED):
        state.admit_search()


def test_work_admitted_before_is_settled_after() -> None:
    """A search that was under way when the latch closed is still recorded."""
    assert folded(ASK, latched("http_busy"), ANSWER).responses == 1


def test_cause_reads_back() -> None:
    """``latch.closed`` holds all of a cause."""
    cause = Cause("deadline", 3, True, "a sentence")
    assert Cause.from_data(cause.to_data()) == cause


def test_quota_is_exhausted_exactly_at_its_end() -> None:
    """The last search is admitted, the next one is not."""
    state = folded(ASK, ANSWER, max_calls=2)
    assert state.admit_search() == 2
    state.fold(record_of(*requested(2, "two")))
    with raises(errors.QUOTA_EXHAUSTED):
        state.admit_search()


# --- ends and restarts ----------------------------------------------------------------------------


def test_end_is_clean_only_as_the_last_record() -> None:
    """Anything after ``run.closed`` means that the run went on."""
    assert folded(closed(0)).closed_cleanly
    assert not folded(closed(0), resumed()).closed_cleanly
    assert not folded(ASK, ANSWER).closed_cleanly


def test_restart_keeps_numbers_and_counts() -> None:
    """A number is never used twice, also not across a restart."""
    state = folded(ASK, ANSWER, closed(1), resumed())
    assert (state.restarts, state.admit_search(), state.responses) == (1, 2, 1)


def test_what_was_unsettled_stays_so_over_a_restart() -> None:
    """A search that no process is working on is not forgotten."""
    state = folded(ASK, resumed())
    assert state.searching == {1}


# --- sequences that are no history ----------------------------------------------------------------

LATCH = latched("operator")


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([requested(2, "two")], id="number skipped"),
        pytest.param([ASK, ASK], id="number used twice"),
        pytest.param([requested(0, "none")], id="number below the first"),
        pytest.param([("retrieval.requested", None, {})], id="no number"),
        pytest.param([ANSWER], id="answered without being admitted"),
        pytest.param([ASK, ANSWER, ANSWER], id="answered twice"),
        pytest.param([ASK, ANSWER, failed(1)], id="answered and failed"),
        pytest.param([ASK, ("retrieval.failed", None, {})], id="failed without a number"),
        pytest.param([declined(2)], id="declined out of order"),
        pytest.param([LATCH, LATCH], id="latched twice"),
        pytest.param([LATCH, ASK], id="admitted after the latch"),
        pytest.param([LATCH, declined(1)], id="declined after the latch"),
        pytest.param([LATCH, checkpoint()], id="checkpoint after the latch"),
        pytest.param([ASK, checkpoint()], id="checkpoint while pending"),
        pytest.param(
            [ASK, ANSWER, checkpoint(usage={"retrieval_attempts": 2})], id="checkpoint miscounts"
        ),
        pytest.param([ASK, ANSWER, closed(2)], id="end miscounts"),
        pytest.param([lost(1)], id="lost without an attempt"),
        pytest.param([ASK, lost(2)], id="lost of a later attempt"),
        pytest.param([ASK, ANSWER, lost(1), repeated(1)], id="a repeat that was not awaited"),
        pytest.param(
            [ASK, ANSWER, lost(1, awaits_repeat=True), repeated(1), repeated(1)],
            id="a loss repeated twice",
        ),
        pytest.param(
            [ASK, ANSWER, lost(1, awaits_repeat=True), repeated(1, 2)],
            id="repeated with an answer that is none",
        ),
        pytest.param(
            [ASK, ANSWER, lost(1, awaits_repeat=True), checkpoint()],
            id="checkpoint over an open loss",
        ),
    ],
)
def test_impossible_sequence_is_refused(events: list[Event]) -> None:
    """No process of ours writes these, so no journal that holds one is read."""
    with pytest.raises(errors.LedgerCorrupt):
        folded(*events)


REWARDS: Event = (
    "run.claimed",
    None,
    {
        "max_calls": 1,
        "claim_sha256": "c" * 64,
        "reward": {
            "train": {"max_scores": 9, "max_helper_calls": 9, "max_output_tokens": 100_000},
        },
    },
)
SCORE: Event = ("reward.requested", 1, {"split": "train", "key": "k", "solution_str": "s"})
CALL: Event = (
    "helper.requested",
    1,
    {"split": "train", "score": 1, "prompt_sha256": "d" * 64, "prompt_bytes": 1, "seed": 0},
)


@each(
    "events",
    [[LATCH, SCORE], [SCORE, LATCH, CALL]],
    ids=["a score after the latch", "a helper call after the latch"],
)
def test_no_reward_is_begun_after_the_latch(events: list[Event]) -> None:
    """Each is taken before the latch closes, and refused after it."""
    state = RunState()
    *before, last = events
    for kind, number, data in (REWARDS, *(event for event in before if event is not LATCH), last):
        state.fold(record_of(kind, number, data))
    state = RunState()
    for kind, number, data in (REWARDS, *before):
        state.fold(record_of(kind, number, data))
    with pytest.raises(errors.LedgerCorrupt, match="comes after the latch"):
        state.fold(record_of(*last))


def test_search_over_the_quota_is_refused() -> None:
    """The quota binds the history, not only the process."""
    with pytest.raises(errors.LedgerCorrupt, match="quota of 1"):
        folded(ASK, ANSWER, requested(2, "two"), max_calls=1)


@each(
    ("kind", "number", "data"),
    [
        ("run.claimed", None, {}),
        ("run.claimed", None, {"max_calls": "many", "claim_sha256": ""}),
        ("run.claimed", None, {"max_calls": 1, "claim_sha256": "", "reward": []}),
        ("retrieval.declined", 1, {}),
        ("retrieval.declined", 1, {"reason": []}),
        ("latch.closed", None, {}),
        ("checkpoint.accepted", 1, {"step": 1, "usage": 3}),
        ("checkpoint.accepted", 1, {}),
        ("reward.requested", 1, {}),
        ("reward.requested", 1, {"split": "train"}),
        ("helper.failed", 1, {"split": "train", "usage": 7}),
    ],
)
def test_record_without_what_is_read_of_it_is_refused(
    kind: str, number: int | None, data: dict[str, Any]
) -> None:
    """Missing or misshapen data is a damaged ledger, never a traceback."""
    with pytest.raises(errors.LedgerCorrupt):
        folded((kind, number, data))


def test_answer_without_its_cache_is_refused() -> None:
    """The same for a record that passes every other rule."""
    with pytest.raises(errors.LedgerCorrupt):
        folded(ASK, ("retrieval.answered", 1, {"documents": []}))


def test_every_kind_has_a_rule() -> None:
    """No record that can be written is unknown to the fold."""
    rules = [*RunState._STEPS, *Scores.STEPS]
    assert len(rules) == len(set(rules))
    assert set(rules) == set(CLASSES.values())
    with pytest.raises(errors.LedgerCorrupt, match="written by a newer version"):
        record_of("run.dreamt", None, {})


def test_record_of_a_later_version_may_state_more() -> None:
    """Counts this version does not keep are no reason to refuse its own."""
    assert (
        folded(checkpoint(usage={"retrieval_attempts": 0, "train": {}})).checkpoints_accepted == 1
    )

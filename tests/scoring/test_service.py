"""``/reward`` end to end: our own scorer, a real helper server, a real ledger, over real HTTP."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from smartsearch_sidecar import errors
from tests.fakes import rollouts
from tests.fakes.helper import FakeHelper
from tests.fakes.rewarded import (
    QUESTION,
    TRUTH,
    VALIDATION_QUESTION,
    VALIDATION_TRUTH,
    Rewarded,
    item,
    rewarded,
)
from tests.fakes.served import read_records, served
from tests.fakes.until import until


def of(directory: Path, kind: str) -> list[dict[str, Any]]:
    """The records of one kind."""
    return [record for record in read_records(directory) if record["kind"] == kind]


async def expect_latched(rewards: Rewarded, cause: str) -> dict[str, Any]:
    """Closed for ``cause``, settled, refused, and still so after a restart."""
    status, health = await rewards.run.health(settle=5)
    assert (status, health["state"], health["cause"]["cause"]) == (503, "failed", cause)
    assert rewards.run.service.run.state.settled
    status, value = await rewards.reward(await plain_rollout())
    assert (status, value["error"]["code"]) == (502, "reward_failed")
    assert (await rewards.run.execute("q"))[0] == 502
    assert await rewards.run.stop() == 4
    usage: dict[str, Any] = health["reward"]
    return usage


async def plain_rollout(answer: str = "Paris", question: str = QUESTION) -> str:
    """A rollout without a search: nothing is asked of the helper."""
    return rollouts.rollout(question, [], rollouts.final(answer))


# --- good scores ----------------------------------------------------------------------------------


async def test_reward_is_recorded_metered_and_answered(tmp_path: Path) -> None:
    """One score: each helper call recorded before it is sent, the usage counted, health good."""
    async with rewarded(tmp_path) as rewards:
        solution = await rewards.rollout("Faust", "Gounod")
        status, value = await rewards.reward(solution)
        assert (status, value["split"], value["number"], value["reused"]) == (
            200,
            "train",
            1,
            False,
        )
        records = read_records(rewards.run.directory)
        kinds = [record["kind"] for record in records if "retrieval" not in record["kind"]]
        assert kinds == [
            "run.claimed",
            "reward.requested",
            "helper.requested",
            "helper.requested",
            "helper.answered",
            "helper.answered",
            "reward.answered",
        ]
        assert records[-1]["data"]["reward"] == value["reward"]
        status, health = await rewards.run.health()
        assert status == 200
        train = health["reward"]["train"]
        assert (train["score_responses"], train["model_responses"]) == (1, 2)
        assert train["unknown_output_token_reservations"] == 0
        assert await rewards.run.stop() == 0


async def test_identical_rollout_is_reused_and_free(tmp_path: Path) -> None:
    """The trainer's second pass gets what the first one got, without a call or a score."""
    async with rewarded(tmp_path) as rewards:
        solution = await rewards.rollout("Faust")
        _, first = await rewards.reward(solution)
        _, second = await rewards.reward(solution)
        assert second == {**first, "reused": True}
        assert len(rewards.helper.calls) == 1
        assert len(of(rewards.run.directory, "reward.reused")) == 1
        assert rewards.run.service.run.state.scores.splits["train"].score_attempts == 1


async def test_identical_rollouts_in_flight_are_shared(tmp_path: Path) -> None:
    """Two requests for the same rollout at once cost one score."""
    async with rewarded(tmp_path) as rewards:
        solution = await rewards.rollout("Faust")
        rewards.helper.gate.clear()
        asking = [asyncio.create_task(rewards.reward(solution)) for _ in range(3)]
        await rewards.helper.until_calls(1)
        rewards.helper.gate.set()
        answers = [value for _, value in await asyncio.gather(*asking)]
        assert len({value["reward"] for value in answers}) == 1
        assert sorted(value["reused"] for value in answers) == [False, True, True]
        assert len(rewards.helper.calls) == 1


async def test_reference_profile_scores_every_time_one_call_after_another(tmp_path: Path) -> None:
    """Without reuse and side by side each request is a score, its calls strictly in turn."""
    async with rewarded(tmp_path, profile="reference") as rewards:
        solution = await rewards.rollout("Faust", "Gounod", "Paris")
        numbers = [(await rewards.reward(solution))[1]["number"] for _ in range(2)]
        assert numbers == [1, 2]
        assert len(rewards.helper.calls) == 6
        assert rewards.helper.busiest == 1


async def test_batch_is_answered_in_order_and_side_by_side(tmp_path: Path) -> None:
    """Rows and rounds of a batch travel together; both splits count for themselves."""
    async with rewarded(tmp_path) as rewards:
        rows = [
            item(await rewards.rollout(f"q{n}", f"r{n}", answer="Paris" if n % 2 else "Rome"))
            for n in range(6)
        ]
        validation = await rewards.rollout("v", answer="George Eliot", question=VALIDATION_QUESTION)
        rows.append(item(validation, VALIDATION_TRUTH))
        rewards.helper.gate.clear()
        asking = asyncio.create_task(rewards.batch(*rows))
        await rewards.helper.until_calls(13)
        rewards.helper.gate.set()
        status, value = await asking
        assert status == 200
        singles = [row["reward"] for row in value["rewards"]]
        assert len(singles) == 7
        assert [row["number"] for row in value["rewards"]] == [1, 2, 3, 4, 5, 6, 1]
        assert [row["split"] for row in value["rewards"]] == ["train"] * 6 + ["validation"]
        assert singles[1] > singles[0]
        assert rewards.helper.busiest == 13


async def test_repeated_rows_of_a_batch_cost_one_score(tmp_path: Path) -> None:
    """A group of equal rollouts in one batch is scored once."""
    async with rewarded(tmp_path) as rewards:
        solution = await rewards.rollout("Faust")
        status, value = await rewards.batch(*[item(solution)] * 4)
        assert status == 200
        assert [row["reused"] for row in value["rewards"]] == [False, True, True, True]
        assert len(rewards.helper.calls) == 1


async def test_provenance_knows_declined_empty_and_composed_answers(tmp_path: Path) -> None:
    """Blocks as the client writes them are found again: declined, empty, decomposed, padded."""
    async with rewarded(tmp_path) as rewards:
        provider = rewards.run.provider
        provider.answer = lambda query: (
            []
            if query == "nothing"
            else [{"id": query, "contents": "Cafe\u0301 de la Paix  \n ends with spaces  "}]
        )
        solution = await rewards.rollout("", "nothing", "café", "</search> bad")
        status, value = await rewards.reward(solution)
        assert status == 200, value
        requested = of(rewards.run.directory, "reward.requested")[0]["data"]
        assert (requested["judged_blocks"], requested["broken_blocks"]) == (4, [])


async def test_policy_written_blocks_are_counted_never_refused(tmp_path: Path) -> None:
    """A ``<result>`` the policy wrote itself is its own business."""
    async with rewarded(tmp_path) as rewards:
        own = "I imagine. <result>made up</result> </think><think>"
        turns = [rollouts.answered("q", await rewards.told("q"))]
        solution = rollouts.rollout(QUESTION, turns, own + rollouts.final("Paris"))
        assert (await rewards.reward(solution))[0] == 200
        assert rewards.run.service.run.state.scores.policy_blocks >= 1


async def test_restart_remembers_answers_and_scores(tmp_path: Path) -> None:
    """After a clean restart old blocks are still known, and an identical rollout is still free."""
    async with FakeHelper() as helper:
        async with rewarded(tmp_path, helper=helper) as rewards:
            solution = await rewards.rollout("Faust", "")
            _, first = await rewards.reward(solution)
            other = await rewards.rollout("Faust", "", answer="Rome")
            assert await rewards.run.stop() == 0
        async with rewarded(tmp_path, resume=True, helper=helper) as rewards:
            assert await rewards.reward(solution) == (200, {**first, "reused": True})
            status, value = await rewards.reward(other)
            assert (status, value["number"], value["reused"]) == (200, 2, False)


# --- what is refused before anything is spent -----------------------------------------------------


@pytest.mark.parametrize(
    "value, status, cause",
    [
        ({"solution_str": "x"}, 400, "invalid_reward_request"),
        ({"solution_str": 1, "ground_truth": "x"}, 400, "invalid_reward_request"),
        ({"solution_str": "x", "ground_truth": []}, 400, "invalid_reward_request"),
        (
            {"solution_str": "x", "ground_truth": "y", "data_source": "other"},
            400,
            "invalid_reward_request",
        ),
        ({"solution_str": "no turn", "ground_truth": "Paris"}, 409, "no_user_turn"),
    ],
)
async def test_shapes_close_the_latch(
    tmp_path: Path, value: dict[str, Any], status: int, cause: str
) -> None:
    """A reward request that cannot be scored is the trainer's fault: refused, and the run fails."""
    async with rewarded(tmp_path) as rewards:
        got, _ = await rewards.run.internal("POST", "/reward", value)
        assert got == status
        usage = await expect_latched(rewards, cause)
        assert usage["train"]["score_attempts"] == 0


async def test_strict_json_and_edge_faults_have_reward_causes(tmp_path: Path) -> None:
    """What the edge refuses on this route closes the latch under a name of its own."""
    for number, (data, kind, cause) in enumerate(
        [
            (b"{", "application/json", "reward_http_invalid_request"),
            (b"{}", "text/plain", "reward_http_content_type"),
        ]
    ):
        async with rewarded(tmp_path, name=f"run{number}") as rewards:
            url = rewards.run.endpoints.internal_url + "/reward"
            async with rewards.run.session.post(
                url, data=data, headers={"Content-Type": kind}
            ) as answer:
                assert answer.status in {400, 415}
            await expect_latched(rewards, cause)


async def test_other_answers_than_declared_are_409(tmp_path: Path) -> None:
    """Question and answers must be the declared ones; neither appears in the answer."""
    async with rewarded(tmp_path) as rewards:
        status, value = await rewards.reward(await plain_rollout(), ["London"])
        assert (status, value["error"]["code"]) == (409, "reference_mismatch")
        assert "Paris" not in json.dumps(value)
        usage = await expect_latched(rewards, "reference_mismatch")
        assert usage["train"]["score_attempts"] == 0
        assert "Paris" not in (rewards.run.directory / "latch.json").read_text()


async def test_batch_with_one_unusable_row_is_refused_whole(tmp_path: Path) -> None:
    """One bad row, and no helper is called for any of them."""
    async with rewarded(tmp_path) as rewards:
        good = item(await rewards.rollout("Faust"))
        status, _ = await rewards.batch(good, item(await plain_rollout(question="Unknown?")))
        assert status == 409
        assert rewards.helper.calls == []
        usage = await expect_latched(rewards, "reference_mismatch")
        assert usage["train"]["score_attempts"] == 0


async def test_too_long_a_rollout_is_413(tmp_path: Path) -> None:
    """A rollout over ``reward.max_input_bytes`` is refused before it is scored."""
    async with rewarded(tmp_path, reward__max_input_bytes=100) as rewards:
        status, value = await rewards.reward(await plain_rollout())
        assert (status, value["error"]["code"]) == (413, "solution_too_long")
        await expect_latched(rewards, "solution_too_long")


@pytest.mark.parametrize("text", ["error: 502", "error: execution timed out", "HTTPConnectionPool"])
async def test_foreign_block_breaks_provenance(tmp_path: Path, text: str) -> None:
    """An error text where only the rollout writes: a failure we never saw ends the run."""
    async with rewarded(tmp_path) as rewards:
        turns = [
            rollouts.answered("q", await rewards.told("q")),
            rollouts.Turn(query="lost", text=text),
        ]
        solution = rollouts.rollout(QUESTION, turns, rollouts.final("Paris"))
        status, value = await rewards.reward(solution)
        assert (status, value["error"]["code"]) == (409, "provenance_broken")
        assert rewards.helper.calls == []
        await expect_latched(rewards, "provenance_broken")


async def test_record_mode_counts_foreign_blocks(tmp_path: Path) -> None:
    """With ``provenance = "record"`` they are counted and the reward is given."""
    async with rewarded(tmp_path, reward__provenance="record") as rewards:
        turns = [rollouts.Turn(query="lost", text="error: 502")]
        solution = rollouts.rollout(QUESTION, turns, rollouts.final("Paris"))
        assert (await rewards.reward(solution))[0] == 200
        _, health = await rewards.run.health()
        assert health["result_blocks"]["broken"] == 1


async def test_score_quota(tmp_path: Path) -> None:
    """A batch that does not fit into the score quota is refused whole."""
    async with rewarded(tmp_path, reward__max_scores=1) as rewards:
        rows = [item(await rewards.rollout(f"q{n}")) for n in range(2)]
        status, value = await rewards.batch(*rows)
        assert (status, value["error"]["code"]) == (429, "quota_exhausted")
        assert rewards.helper.calls == []
        await expect_latched(rewards, "quota_exhausted")


async def test_helper_token_quota_waits_then_ends(tmp_path: Path) -> None:
    """Reservations wait while others are unsettled; the quota ends when none is left to come."""
    keys: dict[str, Any] = {"reward__max_output_tokens": 2048 + 9}
    async with rewarded(tmp_path, **keys) as rewards:
        assert (await rewards.reward(await rewards.rollout("a", "b", "c", "d")))[0] == 200
        assert rewards.helper.busiest == 1
        status, value = await rewards.reward(await rewards.rollout("e", "f"))
        assert (status, value["error"]["code"]) == (429, "quota_exhausted")
        await expect_latched(rewards, "quota_exhausted")


# --- the helper fails -----------------------------------------------------------------------------

FAULTS = {
    "empty": "helper_empty",
    "overlong": "helper_overlong",
    "no_usage": "helper_usage_missing",
    "abort": "helper_finish_reason",
    "error_500": "helper_status",
    "redirect": "helper_redirect",
    "html": "helper_not_json",
    "bad_json": "helper_answer_invalid",
    "hang": "helper_timeout",
    "lost": "helper_transport",
    "cut": "helper_truncated",
}


@pytest.mark.parametrize("place", ["first", "last", "batch"])
@pytest.mark.parametrize("failure", list(FAULTS))
async def test_helper_fault(tmp_path: Path, failure: str, place: str) -> None:
    """No reward, the latch closed under the fault's own name, every call settled, for good."""
    keys: dict[str, Any] = {"reward__helper__timeout_seconds": 0.5 if failure == "hang" else 10.0}
    async with FakeHelper() as helper:
        async with rewarded(tmp_path, helper=helper, **keys) as rewards:
            solution = await rewards.rollout("one", "two", "three")
            helper.failures[{"first": 1, "last": 3, "batch": 4}[place]] = failure
            if place == "batch":
                other = item(await rewards.rollout("four", "five"))
                status, value = await rewards.batch(item(solution), other)
            else:
                status, value = await rewards.reward(solution)
            assert (status, value["error"]["code"]) == (502, FAULTS[failure])
            usage = await expect_latched(rewards, FAULTS[failure])
        expect_settled(rewards.run.directory, usage["train"], failure, batch=place == "batch")
        async with rewarded(tmp_path, resume=True, helper=helper, **keys) as again:
            _, health = await again.run.health()
            assert health["cause"]["cause"] == FAULTS[failure]
            assert health["reward"] == usage


def expect_settled(directory: Path, used: dict[str, int], failure: str, *, batch: bool) -> None:
    """No reward, every call settled, and exactly the calls of unknown cost still reserved."""
    assert (used["score_attempts"], used["score_responses"]) == (2 if batch else 1, 0)
    failed = [record["data"] for record in of(directory, "helper.failed")]
    assert FAULTS[failure] in {data["code"] for data in failed}
    sent = used["model_attempts"] - sum(not data["sent"] for data in failed)
    unknown = 2048 * (sent - used["model_responses"])
    assert used["unknown_output_token_reservations"] == unknown


async def test_helper_that_was_never_there_is_told_at_start(tmp_path: Path) -> None:
    """An unreachable helper is noticed before the run begins, and the directory stays free."""
    helper = FakeHelper()
    await helper.start()
    await helper.stop()
    with pytest.raises(errors.HelperUnreachable):
        async with rewarded(tmp_path, helper=helper):
            pass
    assert not (tmp_path / "run").exists()


async def test_source_that_changes_fails_the_score(tmp_path: Path) -> None:
    """Changed bytes under the scorer: the score fails and the latch closes."""
    async with rewarded(tmp_path) as rewards:
        solution = await rewards.rollout("q")
        rewards.source.write_bytes(rewards.source.read_bytes() + b"\n")
        status, value = await rewards.reward(solution)
        assert (status, value["error"]["code"]) == (502, "source_changed")
        assert rewards.helper.calls == []
        await expect_latched(rewards, "source_changed")


async def test_unparsed_verdicts_close_the_latch(tmp_path: Path) -> None:
    """Above the share, verdicts that are neither 0 nor 1 end the run instead of raising rewards."""
    async with rewarded(tmp_path, reward__unparsed_share_max=0.02) as rewards:
        rewards.helper.verdict = lambda _prompt: "<answer>Score: 0"
        for number in range(4):
            assert (await rewards.reward(await rewards.rollout(f"q{number}")))[0] == 200
        status, value = await rewards.reward(await rewards.rollout("q5"))
        assert (status, value["error"]["code"]) == (502, "verdicts_unparsed")
        await expect_latched(rewards, "verdicts_unparsed")


async def test_caller_that_leaves_is_recorded_not_latched(tmp_path: Path) -> None:
    """The trainer's own timeout raises there; here the score is finished and kept."""
    async with rewarded(tmp_path) as rewards:
        solution = await rewards.rollout("q")
        rewards.helper.gate.clear()
        asking = asyncio.create_task(rewards.reward(solution))
        await rewards.helper.until_calls(1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        rewards.helper.gate.set()
        scores = rewards.run.service.run.state.scores
        await until(lambda: scores.splits["train"].score_responses == 1)
        status, _ = await rewards.run.health(settle=5)
        assert status == 200
        assert (await rewards.reward(solution))[1]["reused"] is True


async def test_rewards_are_off_unless_enabled(tmp_path: Path) -> None:
    """Without ``reward.enabled`` the route is not there, and asking changes nothing."""
    async with served(tmp_path / "run") as run:
        status, _ = await run.internal("POST", "/reward", {"solution_str": "", "ground_truth": "x"})
        assert status == 404
        assert (await run.health())[0] == 200


async def test_execute_capability_reaches_no_reward(tmp_path: Path) -> None:
    """Rollout code cannot score: under its capability the route is its own failure."""
    async with rewarded(tmp_path) as rewards:
        status, _ = await rewards.run.post(b"{}", path="/reward")
        assert status == 404
        assert TRUTH[0] not in str(status)

"""The rows of the table about rewards: one test each, beside the reference's own scorer class.

What is scored is a source of our own writing, which both run: see ``test_reward_parity.py``.
"""

from __future__ import annotations

import asyncio
import json
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import rollouts
from tests.fakes.rewarded import (
    QUESTION,
    SOURCE,
    SOURCE_SHA256,
    TRUTH,
    VALIDATION_QUESTION,
    VALIDATION_TRUTH,
    rewarded,
)
from tests.parity.messages import ODD, names_of
from tests.parity.play import Step, differs
from tests.parity.sides import HEALTH, needs_reference, pair, reference, teacher, tools
from tests.parity.wire import CAPABILITY, asking, exchange, message

pytestmark = needs_reference

MODEL_SHA256 = "a" * 64
PLAIN = rollouts.rollout(QUESTION, [], rollouts.final("Paris"))
VALIDATION = rollouts.rollout(VALIDATION_QUESTION, [], rollouts.final(VALIDATION_TRUTH))


@pytest.fixture
def scorer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes reference scorers; each has a directory of its own."""
    module, count = tools(), 0
    checkout = tmp_path / "checkout"
    source = checkout / "src/verl/utils/reward_score/re_call.py"
    source.parent.mkdir(parents=True)
    source.write_bytes(SOURCE.read_bytes())
    monkeypatch.setattr(module, "_REWARD_SHA", SOURCE_SHA256)
    monkeypatch.setattr(
        module, "verify_smartsearch_sampling_source", lambda root: (Path(root), {"root": "x"})
    )

    def make(
        references: Mapping[str, Any] | None = None,
        *,
        split: str = "train",
        verdict: Callable[[str], str] = lambda _prompt: "<answer> 1 ",
        **controls: int,
    ) -> Any:
        nonlocal count
        count += 1

        def generate(prompt: str, **_options: Any) -> Any:
            return teacher().SmartSearchTeacherCompletion(verdict(prompt), 1, 1, MODEL_SHA256)

        limits = {"max_model_calls": 1000, "max_total_output_tokens": 10**7, **controls}
        return module.SmartSearchNativeGRPOReward(
            generate,
            checkout=checkout,
            references={QUESTION: TRUTH} if references is None else references,
            model_fingerprint_sha256=MODEL_SHA256,
            controls=teacher().SmartSearchTeacherControls(**limits),
            output_root=tmp_path / f"scores-{count}",
            reference_split=split,
        )

    return make


def searched(*turns: rollouts.Turn) -> str:
    return rollouts.rollout(QUESTION, turns, rollouts.final("Paris"))


def refuses(score: Any, solution: str, truth: Any) -> bool:
    try:
        score(None, solution, truth)
    except Exception:  # noqa: BLE001 - after any exception there is no reward
        return True
    return False


# --- both profiles --------------------------------------------------------------------------------


async def test_differs_one_latch(tmp_path: Path, scorer: Callable[..., Any]) -> None:
    """Retrieval and both splits fail apart there; here the first failure ends all three."""
    train, validation = (
        scorer(),
        scorer({VALIDATION_QUESTION: [VALIDATION_TRUTH]}, split="validation"),
    )
    with reference(tmp_path / "reference") as theirs:
        assert (await exchange(theirs.port, asking(""))).status == 400
        train.failed = True
        assert refuses(train, PLAIN, TRUTH)
        assert validation(None, VALIDATION, [VALIDATION_TRUTH]) > 0
        assert theirs.state().latched
    async with rewarded(tmp_path, profile="reference") as rewards:
        assert (await rewards.reward(VALIDATION, VALIDATION_TRUTH))[0] == 200
        assert (await rewards.run.execute(""))[0] == 400
        assert (await rewards.reward(PLAIN))[0] == 502
        assert (await rewards.reward(VALIDATION, VALIDATION_TRUTH))[0] == 502
    async with rewarded(tmp_path, name="second", profile="reference") as rewards:
        assert (await rewards.reward(PLAIN, ["another answer"]))[0] == 409
        assert (await rewards.run.execute("Ada"))[0] == 502
        assert (await rewards.reward(VALIDATION, VALIDATION_TRUTH))[0] == 502


@dataclass(frozen=True)
class Refusal:
    """A score that is refused: the row, our bound for it, theirs, and our code."""

    solution: str
    truth: Any
    code: str
    keys: dict[str, Any] = field(default_factory=dict)
    controls: dict[str, int] = field(default_factory=dict)


REFUSALS = (
    Refusal(PLAIN, ["another answer"], "reference_mismatch"),
    Refusal(PLAIN.replace("<|im_start|>user", "<|im_start|>users"), TRUTH, "no_user_turn"),
    Refusal(
        PLAIN + "x" * 4096,
        TRUTH,
        "solution_too_long",
        {"reward__max_input_bytes": 4096},
        {"max_input_bytes": 4096},
    ),
    Refusal(PLAIN, TRUTH, "quota_exhausted", {"reward__max_scores": 1}, {"max_rollout_rows": 1}),
)


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: str(refusal.code))
async def test_differs_refused_scores(
    tmp_path: Path, scorer: Callable[..., Any], refusal: Refusal
) -> None:
    """A score that is refused raises there and no more; here it closes the latch."""
    train = scorer(**refusal.controls)
    assert not refuses(train, PLAIN, TRUTH)
    assert refuses(train, refusal.solution, refusal.truth)
    assert not train.failed
    async with rewarded(tmp_path, profile="reference", **refusal.keys) as rewards:
        assert (await rewards.reward(PLAIN))[0] == 200
        status, value = await rewards.reward(refusal.solution, refusal.truth)
        assert (status >= 400, value["error"]["code"]) == (True, refusal.code)
        _, health = await rewards.run.health()
        assert (health["state"], health["cause"]["cause"]) == ("failed", refusal.code)


async def test_differs_references(tmp_path: Path, scorer: Callable[..., Any]) -> None:
    """A question is found in another composition and may repeat here; there neither."""
    question = "Which caf\u00e9?"
    apart = unicodedata.normalize("NFD", question)
    solution = rollouts.rollout(question, [], rollouts.final("Paris"))
    assert refuses(scorer({apart: TRUTH}), solution, TRUTH)
    with pytest.raises(ValueError, match="collide"):
        scorer({question: TRUTH, f" {question}": TRUTH})
    rows = [{"question": asked, "ground_truth": TRUTH} for asked in (apart, question, question)]
    train = tmp_path / "repeated.jsonl"
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    async with rewarded(
        tmp_path, profile="reference", reward__references__train=str(train)
    ) as rewards:
        assert (await rewards.reward(solution))[0] == 200


@pytest.mark.parametrize("name", names_of("over_http"))
async def test_differs_over_http(tmp_path: Path, name: str) -> None:
    """A path of the operator's or a probe's is a stranger's there, and known here."""
    await differs(tmp_path, Step(ODD[name].request, odd=name), "over_http")


async def test_health_and_rewards_are_asked_over_http(tmp_path: Path) -> None:
    """Health and a score are routes of the internal capability, and no route of the reference."""
    async with pair(tmp_path / "pair") as both:
        assert (await exchange(both.reference.port, HEALTH)).status == 501
        assert (await exchange(both.ours.port, HEALTH)).status == 200
        said = await exchange(both.reference.port, message(b"{}", target=f"/{CAPABILITY}/reward"))
        assert said.status == 404
    async with rewarded(tmp_path, profile="reference") as rewards:
        assert (await rewards.reward(PLAIN))[0] == 200


# --- the training profile -------------------------------------------------------------------------


async def test_differs_reward_provenance(tmp_path: Path, scorer: Callable[..., Any]) -> None:
    """A block that the run did not answer is scored there; here it is refused and latches."""
    solution = searched(rollouts.Turn(query="lost", text="error: 502"))
    assert not refuses(scorer(), solution, TRUTH)
    async with rewarded(tmp_path) as rewards:
        status, value = await rewards.reward(solution)
        assert (status, value["error"]["code"]) == (409, "provenance_broken")
        assert rewards.run.service.run.state.closed


async def test_differs_reward_side_by_side(tmp_path: Path, scorer: Callable[..., Any]) -> None:
    """The calls of a rollout are made one after another there, and all at once here."""
    inside = most_inside = 0

    def verdict(_prompt: str) -> str:
        nonlocal inside, most_inside
        inside += 1
        most_inside = max(most_inside, inside)
        inside -= 1
        return "<answer> 1 "

    async with rewarded(tmp_path) as rewards:
        solution = await rewards.rollout("one", "two", "three")
        assert not refuses(scorer(verdict=verdict), solution, TRUTH)
        assert most_inside == 1
        rewards.helper.gate.clear()
        scoring = asyncio.create_task(rewards.reward(solution))
        await rewards.helper.until_calls(3)  # none of them is answered yet
        rewards.helper.gate.set()
        assert (await scoring)[0] == 200


async def test_differs_reward_helper_retries(tmp_path: Path, scorer: Callable[..., Any]) -> None:
    """A helper that refuses a call once fails the score there, and is asked again here."""
    async with rewarded(tmp_path) as rewards:
        solution = await rewards.rollout("one")
        assert refuses(scorer(verdict=_refusing), solution, TRUTH)
        rewards.helper.failures[1] = "busy_503"
        assert (await rewards.reward(solution))[0] == 200
        _, health = await rewards.run.health(settle=2)
        assert health["reward"]["train"]["model_attempts"] == 2


def _refusing(_prompt: str) -> str:
    raise OSError("503 Service Unavailable")


async def test_differs_reward_reuse_identical(tmp_path: Path, scorer: Callable[..., Any]) -> None:
    """The same rollout twice is two scores there, and one here that is given twice."""
    async with rewarded(tmp_path) as rewards:
        solution = await rewards.rollout("one")
        train = scorer()
        train(None, solution, TRUTH)
        train(None, solution, TRUTH)
        assert (train.usage["score_attempts"], train.usage["model_attempts"]) == (2, 2)
        _, first = await rewards.reward(solution)
        _, second = await rewards.reward(solution)
        assert (first["reward"], second["reused"]) == (second["reward"], True)
        assert len(rewards.helper.calls) == 1


async def test_differs_reward_unparsed_share_max(
    tmp_path: Path, scorer: Callable[..., Any]
) -> None:
    """Verdicts that cannot be parsed raise rewards for ever there; here they end the run."""

    def verdict(_prompt: str) -> str:
        return "<answer>Score: 0"

    async with rewarded(tmp_path) as rewards:
        rewards.helper.verdict = verdict
        train, answers = scorer(verdict=verdict), []
        for number in range(60):
            solution = await rewards.rollout(f"q{number}")
            assert not refuses(train, solution, TRUTH)
            answers.append(await rewards.reward(solution))
            if answers[-1][0] != 200:
                break
        status, value = answers[-1]
        assert (status, value["error"]["code"]) == (502, "verdicts_unparsed")
        assert rewards.run.service.run.state.closed

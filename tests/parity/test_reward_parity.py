"""Rewards beside the reference class: same rollouts, same helper texts, same rewards and usage.

The reference verifies the pinned trainer's checkout, which is not ours to ship; its two names for
that (the verifier and the digest) are pointed at the scorer of our own writing, which both run.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import rollouts
from tests.fakes.helper import FakeHelper
from tests.fakes.rewarded import SOURCE, SOURCE_SHA256, rewarded
from tests.fakes.served import read_records
from tests.fakes.soaked import soaked
from tests.parity.sides import needs_reference

pytestmark = needs_reference

USER_TURN = re.compile(r"(<\|im_start\|>user\n).*?(<\|im_end\|>)", re.DOTALL)
MODEL_SHA256 = "a" * 64


def sequence(seed: int, count: int = 6) -> list[rollouts.Case]:
    """Generated rollouts, each with a question of its own so that references cannot collide."""
    return [
        rollouts.Case(
            solution_str=USER_TURN.sub(rf"\g<1>Question {number}?\g<2>", case.solution_str),
            ground_truth=case.ground_truth,
            texts=tuple(text.split("</answer>")[0] for text in case.texts),
        )
        for number, case in enumerate(rollouts.cases(count, seed))
    ]


def references_of(cases: Sequence[rollouts.Case]) -> dict[str, list[str]]:
    """Question to answers, as the reference is given them."""
    return {
        f"Question {number}?": [truth] if isinstance(truth, str) else list(truth)
        for number, truth in enumerate(case.ground_truth for case in cases)
    }


async def ours(
    tmp_path: Path, cases: Sequence[rollouts.Case]
) -> tuple[list[float | None], dict[str, int], list[tuple[str, int, int]]]:
    """Rewards (``None`` where the score failed), usage, and each helper answer with its tokens."""
    train = tmp_path / "references.jsonl"
    train.write_text(
        "".join(
            json.dumps({"question": question, "ground_truth": answers}) + "\n"
            for question, answers in references_of(cases).items()
        )
    )
    said: list[str] = []
    rewards: list[float | None] = []
    async with FakeHelper() as helper:
        helper.verdict = lambda _prompt: said.pop(0)
        keys: dict[str, Any] = {
            "profile": "reference",
            "reward__references__train": str(train),
            "reward__references__validation": None,
        }
        async with rewarded(tmp_path, helper=helper, **keys) as run:
            for case in cases:
                said[:] = case.texts
                status, value = await run.reward(case.solution_str, case.ground_truth)
                rewards.append(value["reward"] if status == 200 else None)
            _, health = await run.run.health()
            directory = run.run.directory
    answers = [
        (record["data"]["text"], record["data"]["input_tokens"], record["data"]["output_tokens"])
        for record in read_records(directory)
        if record["kind"] == "helper.answered"
    ]
    failed = [r["data"] for r in read_records(directory) if r["kind"] == "helper.failed"]
    answers += [("", *data["usage"]) for data in failed]
    return rewards, health["reward"]["train"], answers


def theirs(
    tmp_path: Path,
    cases: Sequence[rollouts.Case],
    answers: list[tuple[str, int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[list[float | None], dict[str, int]]:
    """The reference on the same rollouts, its helper saying what ours was told."""
    tools = importlib.import_module("agentinputlab.recipes.smartsearch_grpo_tools")
    teacher = importlib.import_module("agentinputlab.recipes.smartsearch_teacher")
    checkout = tmp_path / "checkout"
    source = checkout / "src/verl/utils/reward_score/re_call.py"
    source.parent.mkdir(parents=True)
    source.write_bytes(SOURCE.read_bytes())
    monkeypatch.setattr(tools, "_REWARD_SHA", SOURCE_SHA256)
    monkeypatch.setattr(
        tools, "verify_smartsearch_sampling_source", lambda root: (Path(root), {"root": "x"})
    )
    left = list(answers)

    def generate(_prompt: str, **_options: Any) -> Any:
        text, tokens_in, tokens_out = left.pop(0)
        return teacher.SmartSearchTeacherCompletion(text, tokens_in, tokens_out, MODEL_SHA256)

    scorer = tools.SmartSearchNativeGRPOReward(
        generate,
        checkout=checkout,
        references=references_of(cases),
        model_fingerprint_sha256=MODEL_SHA256,
        controls=teacher.SmartSearchTeacherControls(
            max_model_calls=100_000, max_total_output_tokens=10_000_000, max_rollout_rows=10_000
        ),
        output_root=tmp_path / "reference",
    )
    rewards: list[float | None] = []
    for case in cases:
        try:
            rewards.append(scorer(None, case.solution_str, case.ground_truth))
        except Exception:  # noqa: BLE001 - after any exception there is no reward
            rewards.append(None)
    assert left == []
    return rewards, dict(scorer.usage)


# The six hold every kind of rollout and of helper text that the generator knows.
@pytest.mark.parametrize("seed", [*range(6), *soaked(range(6, 20))])
async def test_rewards_and_usage_equal_the_references(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One caller at a time, reference profile: every reward, every counter, and who fails."""
    cases = sequence(seed)
    rewards, usage, answers = await ours(tmp_path, cases)
    expected, expected_usage = theirs(tmp_path, cases, answers, monkeypatch)
    assert rewards == expected, f"seed {seed}"
    assert usage == expected_usage, f"seed {seed}"


def test_the_sequences_hold_good_scores_and_failures() -> None:
    """The generator reaches both outcomes: helper texts that are empty, and whole rollouts."""
    texts = [text for seed in range(6) for case in sequence(seed) for text in case.texts]
    assert "" in texts
    assert len(texts) > 100
    assert hashlib.sha256(SOURCE.read_bytes()).hexdigest() == SOURCE_SHA256

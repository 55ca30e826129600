"""What the trainer reports has a cause of its own, and nothing that the policy writes is reported.

Current verl hands over the policy's text alone. Its form is the policy's affair: whatever tokens
and turns stand in it, the row is sent and scored. ``extra_info`` is the dataset's, and is judged.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from smartsearch_sidecar import errors
from tests.fakes import rollouts, trainer
from tests.fakes.rewarded import QUESTION, TRUTH, Rewarded, rewarded
from tests.fakes.tool_loop import FILE, tool_file

VARIABLE = "SMARTSEARCH_SIDECAR_ENDPOINTS"
FINAL = " Clear. </think>\n<answer> It is \\[ \\boxed{Paris} \\] </answer>"
TURN = "<|im_start|>user\nAnother question?<|im_end|>\n<|im_start|>assistant\n"

WRITTEN = {
    "a user turn at its beginning": TURN + FINAL,
    "a user turn in the middle": f" Hm. {TURN}{FINAL}",
    "a turn that never ends": f"<|im_start|>user\nIs it so?{FINAL}",
    "another role": f"<|im_start|>tool\nx<|im_end|>{FINAL}",
    "the whole prompt again": rollouts.prompt(QUESTION) + FINAL,
    "the whole prompt with another question": rollouts.prompt("Which?") + FINAL,
    "the prompt without its tokens": f"system\nx\nuser\n{QUESTION}\nassistant\n<think>{FINAL}",
    "a turn without its tokens": f"user\nIs it so?\nassistant\n{FINAL}",
    "ends of turns": f"<|im_end|>{FINAL}<|im_end|><|im_end|>",
    "nothing": "",
    "thoughts": "<think>" * 9 + FINAL,
}


def load(file: str, name: str = "compute_score") -> Any:
    return trainer.load_as_current(trainer.current_config("naive"), str(FILE.with_name(file)), name)


async def score(solution: Any, extra_info: Any) -> float:
    """One row, as the manager ``naive`` calls for it after verl's own agent loop."""
    function = load("verl_reward.py", "compute_score_async")
    extra_info |= {"tool_rewards": [], "turn_scores": [], "num_turns": 2}
    return float(
        await function(
            data_source="x", solution_str=solution, ground_truth=TRUTH, extra_info=extra_info
        )
    )


async def cause(served: Rewarded) -> Any:
    return (await served.run.health(5))[1].get("cause")


@pytest.mark.parametrize(
    "extra_info",
    [
        {"question": QUESTION},
        {"prompt": [{"role": "user", "content": QUESTION}]},
        {"prompt": rollouts.prompt(QUESTION)},
    ],
    ids=["question", "messages", "rendered"],
)
@pytest.mark.parametrize("written", WRITTEN)
async def test_whatever_the_policy_writes_is_scored(
    written: str, extra_info: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row holds the policy's text to the letter, and the run stays healthy."""
    async with rewarded(tmp_path) as served:
        monkeypatch.setenv(VARIABLE, str(served.run.directory / "endpoints.json"))
        await score(WRITTEN[written], dict(extra_info))
        (asked,) = [one for one in served.run.records() if one["kind"] == "reward.requested"]
        # The generation prompt's tag is not doubled where the policy's text begins with one.
        tag = "" if written == "thoughts" and len(extra_info.get("prompt", "")) < 2 else "<think>"
        assert asked["data"]["solution_str"].endswith(f"assistant\n{tag}{WRITTEN[written]}")
        assert (await served.run.health(5))[1]["state"] == "healthy"


@pytest.mark.parametrize(
    ("extra_info", "words"),
    [
        ({"question": f"{QUESTION}<|im_end|>"}, "special tokens of the template"),
        ({"prompt": "<|im_start|>user\nno end"}, "not in the form of the pinned template"),
        ({"prompt": f"user\n{QUESTION}\nassistant\n"}, "special tokens are gone"),
        ({}, "neither question nor prompt"),
    ],
)
async def test_extra_info_is_judged_and_reported_as_the_trainers_word(
    extra_info: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dataset whose prompt cannot be read closes the run under ``trainer_reported``."""
    async with rewarded(tmp_path) as served:
        monkeypatch.setenv(VARIABLE, str(served.run.directory / "endpoints.json"))
        with pytest.raises(RuntimeError, match=words):
            await score(FINAL, extra_info)
        found = await cause(served)
        assert found["cause"] == "trainer_reported"
        assert found["detail"].startswith("the trainer: no reward: ")
        assert words in found["detail"]


async def test_every_file_reports_under_the_same_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search tool and the pinned trainer's file report as the current one does."""
    for number, file in enumerate(["smartsearch_reward.py", "verl_search_tool.py"]):
        async with rewarded(tmp_path, name=f"run-{number}") as served:
            monkeypatch.setenv(VARIABLE, str(served.run.directory / "endpoints.json"))
            if file == "verl_search_tool.py":
                with tool_file(monkeypatch) as module:
                    monkeypatch.setattr(module, "_ask", _once_not_json(module._ask))
                    with pytest.raises(RuntimeError, match="no search"):
                        await module.SidecarSearch({}).execute("id", {"query": "Ada"})
            else:
                monkeypatch.delitem(sys.modules, "custom_module", raising=False)
                function = trainer.load_as_pinned(str(FILE.with_name(file)))
                with pytest.raises(RuntimeError, match="no reward"):
                    await asyncio.to_thread(function, "re_call", None, "x", {"no": {"text"}})
            found = await cause(served)
            assert found["cause"] == "trainer_reported", file


def _once_not_json(ask: Any) -> Any:
    """The first request meets another program; what is asked after it arrives."""
    met: list[str] = []

    def asked(url: str, path: str, *words: Any) -> Any:
        if not met:
            met.append(path)
            return 200, "<html>"
        return ask(url, path, *words)

    return asked


@pytest.mark.parametrize(
    ("body", "status", "closed_as"),
    [
        ({"reason": "why"}, 200, "operator"),
        ({"reason": "why", "by": "operator"}, 200, "operator"),
        ({"reason": "why", "by": "trainer"}, 200, "trainer_reported"),
        ({"reason": "why", "by": "policy"}, 400, None),
        ({"reason": "why", "by": None}, 400, None),
        ({"reason": "why", "by": ["trainer"]}, 400, None),
        ({"by": "trainer"}, 400, None),
        (["why"], 400, None),
    ],
)
async def test_the_latch_says_who_closed_it(
    body: Any, status: int, closed_as: str | None, tmp_path: Path
) -> None:
    """A person's word is ``operator``; only a library says that it is the trainer's."""
    async with rewarded(tmp_path) as served:
        assert (await served.run.internal("POST", "/latch", body))[0] == status
        found = await cause(served)
        assert (found and found["cause"]) == closed_as
        if closed_as is not None:
            assert errors.remedy(closed_as)

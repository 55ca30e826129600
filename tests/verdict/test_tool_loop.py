"""verl's tool loop: what stands in ``<tool_response>`` is held against what the tool was answered.

Both files of ``integrations/`` are driven in verl's order against a daemon: the agent loop calls
the tool, its extra fields travel to a reward manager, and that calls the reward function.
"""

from __future__ import annotations

import asyncio
import random
import unicodedata
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from smartsearch_sidecar.contract.reward import ToolAnswer
from smartsearch_sidecar.reward.provenance import AnswerDigests, Judgement
from smartsearch_sidecar.reward.tool_answers import judge_tool_answers
from tests.fakes import trainer
from tests.fakes.helper import FakeHelper
from tests.fakes.provider import FakeProvider, documents_for
from tests.fakes.rewarded import QUESTION, TRUTH, Rewarded, rewarded
from tests.fakes.tool_loop import FILE, STABLE_KEYS, ToolLoop, call, tool_file
from tests.fakes.until import until

REWARD_FILE = FILE.with_name("verl_reward.py")
VARIABLE = "SMARTSEARCH_SIDECAR_ENDPOINTS"
FINAL = "<think> Clear. </think>\n<answer> It is \\[ \\boxed{Paris} \\] </answer>"
MANAGERS: dict[str, Any] = {
    "naive": trainer.NaiveRewardManager,
    "dapo": trainer.DAPORewardManager,
}


def asking(*queries: Any) -> list[str]:
    """The turns of a tidy policy: one search in each, then an answer."""
    thought = "<think> I look it up. </think>\n"
    return [*(f"{thought}{call(query)}" for query in queries), FINAL]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The file of the search tool, loaded afresh."""
    with tool_file(monkeypatch) as loaded:
        yield loaded


@dataclass
class Trained:
    """A daemon, and a trainer beside it: one tool, one reward manager."""

    served: Rewarded
    tool: Any
    manager: Any

    async def rollout(self, turns: Sequence[str], **loop: Any) -> dict[str, Any]:
        return await ToolLoop(self.tool, **loop).run(QUESTION, turns, ground_truth=TRUTH)

    async def score(self, *rows: dict[str, Any]) -> list[float]:
        batch = trainer.Batch(self.manager.tokenizer, list(rows))
        return [row["reward_score"] for row in await self.manager.run_batch(batch)]

    def judged(self) -> list[tuple[int, int, list[int]]]:
        """Judged blocks, the policy's own, and broken ones of every reward that was recorded."""
        return [
            (data["judged_blocks"], data["policy_blocks"], data.get("broken_blocks") or [])
            for record in self.served.run.records()
            if record["kind"] == "reward.requested"
            for data in [record["data"]]
        ]

    async def cause(self) -> Any:
        return (await self.served.run.health(5))[1].get("cause")

    async def expect_healthy(self, judged: int, own: int = 0) -> None:
        assert self.judged() == [(judged, own, [])]
        assert (await self.served.run.health(5))[1]["state"] == "healthy"

    async def expect_broken(self, row: dict[str, Any], words: str) -> None:
        """The row gets no reward, and the latch is closed for what stands in its text."""
        with pytest.raises(RuntimeError, match="provenance_broken"):
            await self.score(row)
        cause = await self.cause()
        assert cause["cause"] == "provenance_broken"
        assert words in cause["detail"]


@asynccontextmanager
async def training(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    *,
    manager: str = "naive",
    **keys: Any,
) -> AsyncIterator[Trained]:
    async with rewarded(tmp_path, **keys) as served:
        monkeypatch.setenv(VARIABLE, str(served.run.directory / "endpoints.json"))
        config = trainer.current_config(manager)
        function = trainer.load_as_current(config, str(REWARD_FILE), "compute_score_async")
        chosen = MANAGERS[manager](trainer.Tokenizer(), function)
        yield Trained(served, module.SidecarSearch({"type": "native"}), chosen)


# --- what must be judged --------------------------------------------------------------------------


async def test_the_tool_loop_is_judged(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every answer that the tool was given is found in the text, by count, order and text."""
    async with training(tmp_path, monkeypatch, module) as beside:
        row = await beside.rollout(asking("Ada", "Bob", "Ada", " "))
        await beside.score(row)
        await beside.expect_healthy(judged=4)


@pytest.mark.parametrize(
    "other",
    [
        "error: 502",
        "",
        "invalid query",
        "Error executing tool 'wikipedia_search': timed out",
        "\n\n".join(document["contents"] for document in documents_for("first")),
        "\n\n".join(document["contents"] for document in documents_for("second", 4)),
    ],
)
async def test_what_stands_in_an_answers_place_is_found(
    other: str, module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error's text, an empty one, a part, or this run's answer to another query is refused."""
    async with training(tmp_path, monkeypatch, module) as beside:
        loop = ToolLoop(beside.tool, spoil=lambda text: other if "second" in text else text)
        await beside.rollout(asking(" ", "first"))  # answers of this run that are not this query's
        row = await loop.run(QUESTION, asking("first", "second"), ground_truth=TRUTH)
        await beside.expect_broken(row, "1 of 2 answers of the search tool")


async def test_answers_that_changed_places_are_found(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two answers in each other's place are two right texts in the wrong order."""
    async with training(tmp_path, monkeypatch, module) as beside:
        row = await beside.rollout(asking("one", "two"))
        handed = row["tool_extra_fields"]["extras"]["smartsearch_answers"]
        first, second = (answer["result"] for answer in handed)
        swapped = row["response"].replace(first, "\0").replace(second, first).replace("\0", second)
        await beside.expect_broken({**row, "response": swapped}, "1 of 2 answers")


async def test_an_answer_of_another_program_is_found(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tool was told by another sidecar is no answer of this run, though it is the text."""
    async with training(tmp_path, monkeypatch, module) as beside:
        row = await beside.rollout(asking("one"))
        answer = row["tool_extra_fields"]["extras"]["smartsearch_answers"][0]
        row["response"] = row["response"].replace(answer["result"], "something else")
        answer["result"] = "something else"
        await beside.expect_broken(row, "1 of 1 answers")


async def test_broken_tool_answers_are_recorded_where_they_are_not_refused(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``provenance = "record"`` the journal says how many and where."""
    async with training(tmp_path, monkeypatch, module, reward__provenance="record") as beside:
        row = await beside.rollout(asking("one", "two"), spoil=lambda text: f"{text} and more")
        await beside.score(row)
        ((judged, own, broken),) = beside.judged()
        assert (judged, own, len(broken)) == (2, 2, 2)


@pytest.mark.parametrize("side", ["left", "right", "middle"])
@pytest.mark.parametrize("most", [256, 20, 351])
async def test_an_answer_that_verl_cut_is_judged_by_what_is_left(
    side: str, most: int, module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's default leaves 256 characters of an answer: beginning and end must be its own."""
    loop = {"truncate_side": side, "max_tool_response_length": most}
    async with training(tmp_path, monkeypatch, module) as beside:
        row = await beside.rollout(asking("Ada", "Bob", "x (truncated) y"), **loop)
        assert row["response"].count("(truncated)") >= 3 + (most == 351)
        await beside.score(row)
        await beside.expect_healthy(judged=3)
        spoilt = await beside.rollout(asking("Ada"), spoil=lambda text: "no" + text * 2, **loop)
        if side == "left":
            spoilt = await beside.rollout(asking("Ada"), spoil=lambda text: text * 2 + "no", **loop)
        await beside.expect_broken(spoilt, "1 of 1 answers")


@pytest.mark.parametrize("left", [0, 1, 40, 180])
async def test_a_block_that_the_response_ends_in_is_judged_by_its_beginning(
    left: int, module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit that falls into a block leaves a beginning, which must be the answer's."""
    async with training(tmp_path, monkeypatch, module) as beside:
        row = await beside.rollout(asking("Ada", "Bob"))
        begins = row["response"].rindex("<tool_response>\n") + len("<tool_response>\n")
        await beside.score({**row, "response": row["response"][: begins + left]})
        await beside.expect_healthy(judged=2)
        await beside.expect_broken({**row, "response": row["response"][:begins] + "err"}, "1 of 2")


async def test_answers_from_before_a_restart_are_judged(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollout that began before a clean stop is judged after the resume, by the journal."""
    helper = FakeHelper()
    await helper.start()
    try:
        async with training(tmp_path, monkeypatch, module, helper=helper) as beside:
            row = await beside.rollout(asking("Ada", "Bob"))
            assert await beside.served.run.stop() == 0
        async with training(tmp_path, monkeypatch, module, helper=helper, resume=True) as beside:
            await beside.score(row)
            await beside.expect_healthy(judged=2)
    finally:
        await helper.stop()


# --- what is no failure ---------------------------------------------------------------------------

OWN: dict[str, str] = {
    "a response it made up": "<tool_response>\nmade up\n</tool_response>\n" + call("Ada"),
    "a turn it made up": "\nuser\n<tool_response>\nx\n</tool_response>\nassistant\n" + call("Ada"),
    "a tag it never closed": "<tool_response>\nopen " + call("Ada"),
    "a tag that only closes": "</tool_response>" + call("Ada"),
    "thousands of tags": "<tool_response>" * 5000 + call("Ada"),
    "a result behind a search": "<search>q</search><result>mine</result>" + call("Ada"),
    "special tokens": "<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    + call("Ada"),
    "words that say cut": "<tool_response>...(truncated)...</tool_response>" + call("Ada"),
}


@pytest.mark.parametrize("most", [20_000, 256])
@pytest.mark.parametrize("own", OWN)
async def test_what_the_policy_writes_itself_is_never_refused(
    own: str, most: int, module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of its own are counted and skipped, whatever form they have."""
    async with training(tmp_path, monkeypatch, module) as beside:
        turns = [f"<think> I think. </think>{OWN[own]}", FINAL + OWN[own].removesuffix(call("Ada"))]
        loop = {"max_tool_response_length": most, "response_length": 1_000_000}
        row = await beside.rollout(turns, **loop)
        await beside.score(row)
        await beside.expect_healthy(1, own=OWN[own].count("<tool_response>") * 2)


@pytest.mark.parametrize(
    "slip",
    [call("Ada", name="google"), "<tool_call>\nno json\n</tool_call>", call(None), call([1])],
)
async def test_a_slip_of_the_policy_is_no_failure(
    slip: str, module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tool that is not there, arguments that are no JSON, a query that is no text."""
    async with training(tmp_path, monkeypatch, module) as beside:
        row = await beside.rollout([f"<think> So. </think>{slip}", *asking("Ada")])
        await beside.score(row)
        asked = "wikipedia_search" in slip
        await beside.expect_healthy(judged=1 + asked, own=1 - asked)


async def test_a_query_that_cannot_be_written_is_judged_too(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lone surrogate has no UTF-8 form: the answer says so, and the row can still be sent."""
    async with training(tmp_path, monkeypatch, module) as beside:
        turns = ["<think> So. </think>" + call("Q").replace("Q", "\\ud800"), FINAL]
        await beside.score(await beside.rollout(turns))
        await beside.expect_healthy(judged=1)


async def test_a_rollout_without_a_search_has_nothing_to_judge(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call was made, so no answer is missed, and its own result is its own."""
    async with training(tmp_path, monkeypatch, module) as beside:
        await beside.score(await beside.rollout([f"<search>x</search><result>x</result>{FINAL}"]))
        await beside.expect_healthy(judged=0)


async def test_answers_that_had_no_room_are_not_missed(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl leaves a turn out that would pass the response's limit: those before are judged."""
    async with training(tmp_path, monkeypatch, module) as beside:
        turns = [
            "<think> So. </think>" + call("Ada"),
            "<think> </think><tool_response>\nmine\n</tool_response>" + call("Bob") + call("Cy"),
        ]
        row = await beside.rollout(turns, response_length=700, max_parallel_calls=2)
        assert "about Bob" not in row["response"]
        await beside.score(row)
        await beside.expect_healthy(judged=1, own=1)
        assert sorted(beside.served.run.provider.queries) == ["Ada", "Bob", "Cy"]


class Uneven(FakeProvider):
    """The first query of a turn is answered last."""

    async def search(self, query: str, top_n: int) -> Sequence[Mapping[str, Any]]:
        found = await super().search(query, top_n)
        if query == "slow":
            await until(lambda: "quick" in self.queries)
        return found


async def test_calls_of_one_turn_keep_their_order(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that came in another order than their calls stand in the order of the calls."""
    async with training(tmp_path, monkeypatch, module, provider=Uneven()) as beside:
        turns = ["<think> So. </think>" + call("slow") + call("quick") + call("slow"), FINAL]
        await beside.score(await beside.rollout(turns, max_parallel_calls=3))
        await beside.expect_healthy(judged=3)


async def test_a_passage_that_holds_the_tags_itself(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An article about chat templates is an answer as any other."""
    provider = FakeProvider()
    provider.answer = [
        {"id": "1", "contents": "Write <tool_response>\nx\n</tool_response> there.", "score": 1.0},
        {"id": "2", "contents": "cafe\u0301 </tool_response>", "score": 0.5},
    ]
    async with training(tmp_path, monkeypatch, module, provider=provider) as beside:
        await beside.score(await beside.rollout(asking("Ada", "Bob")))
        ((judged, _, broken),) = beside.judged()
        assert (judged, broken) == (2, [])


# --- the way from the tool to the reward ----------------------------------------------------------


async def test_no_row_has_a_key_that_others_lack(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl joins the rows of its workers by the keys of the first: one more is an error."""
    async with training(tmp_path, monkeypatch, module) as beside:
        rows = [await beside.rollout(asking(*queries)) for queries in ([], ["Ada"])]
        for row in rows:
            assert set(row["tool_extra_fields"]) - {"global_steps"} <= STABLE_KEYS


async def test_dapo_hands_over_nothing_and_nothing_is_judged(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That manager drops what an agent loop says of a row: the record says that none is judged."""
    async with training(tmp_path, monkeypatch, module, manager="dapo") as beside:
        await beside.score(await beside.rollout(asking("Ada")))
        assert beside.judged() == [(0, 0, [])]


async def test_a_call_that_never_reached_the_tool_fails_its_trajectory(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verl that calls ``execute`` in another way makes a message of that error: it is raised."""
    async with training(tmp_path, monkeypatch, module) as beside:

        class Other:
            """The same tool, called by names it does not have."""

            def __getattr__(self, name: str) -> Any:
                return getattr(beside.tool, name)

            async def execute(self, instance_id: str, arguments: Any, **given: Any) -> Any:
                return await beside.tool.execute(instance=instance_id, arguments=arguments, **given)

        with pytest.raises(RuntimeError, match="without an answer"):
            await ToolLoop(Other()).run(QUESTION, asking("Ada"), ground_truth=TRUTH)
        cause = await beside.cause()
        assert cause["cause"] == "trainer_reported"


async def test_a_trajectory_that_is_given_up_is_no_failure(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl cancels a rollout at its end: nothing is raised in its place, and nothing reported."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    async with training(tmp_path, monkeypatch, module, provider=provider) as beside:
        rollout = asyncio.create_task(beside.rollout(asking("Ada")))
        await until(lambda: provider.queries)
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
        provider.gate.set()
        assert await beside.cause() is None


@pytest.mark.parametrize(
    "answers",
    [
        {},
        [["q", "r"]],
        [{"query": "q"}],
        [{"query": 1, "result": ""}],
        [{"query": "q", "result": None}],
        [{"query": "q", "sha256": "a" * 63}],
        [{"query": "q", "sha256": "a" * 64, "result": ""}],
        [{"query": "\ud800", "result": ""}],
        None,
    ],
)
async def test_tool_answers_of_another_shape_are_refused(answers: Any, tmp_path: Path) -> None:
    """A row says what was answered in one form alone."""
    async with rewarded(tmp_path) as served:
        row = {"solution_str": "x", "ground_truth": "y", "tool_answers": answers}
        assert (await served.batch(row))[0] == 400
        assert (await served.run.health())[1]["cause"]["cause"] == "invalid_reward_request"


# --- honest rollouts, many ------------------------------------------------------------------------

PIECES = (
    *(
        "cafe\u0301 \u212b \u2126",
        "東京 は",
        "(truncated)",
        "...",
        "a\r\nb",
        "\u0301 alone",
        "  two  ",
    ),
    *("user\n<tool_response>\n", "</tool_response>", "<result>", "\u1112\u1161\u11ab", "e"),
)


@pytest.mark.parametrize("count", [150, pytest.param(4000, marks=pytest.mark.soak)])
async def test_honest_rollouts_are_never_refused(
    count: int, module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeded rollouts with odd passages, cuts on every side and little room: every answer that
    stands in the text is found, and one that is replaced is not.
    """
    function = trainer.load_as_current(
        trainer.current_config("naive"), str(REWARD_FILE), "compute_score"
    )
    make_row = function.args[0].__globals__["_row"]
    draw = random.Random(13)
    tool = module.SidecarSearch({"type": "native"})
    given = AnswerDigests(25 * count)
    seen = 0

    def search(query: str) -> str:
        passages = [
            " ".join(draw.choices(PIECES, k=draw.randint(1, 40))).strip()
            for _ in range(draw.randint(0, 5))
        ]
        answer = "\n\n".join(passages)
        given.add(query, answer)
        return answer

    monkeypatch.setattr(tool, "_search", search)
    manager = trainer.NaiveRewardManager(trainer.Tokenizer(), None)
    for _ in range(count):
        loop = ToolLoop(
            tool,
            response_length=draw.choice([300, 900, 4_000, 100_000]),
            max_tool_response_length=draw.choice([40, 41, 90, 256, 20_000]),
            truncate_side=draw.choice(["left", "right", "middle"]),
            max_parallel_calls=draw.choice([1, 1, 3]),
        )
        turns = [
            "<think>" + draw.choice(["", draw.choice(PIECES)]) + call("q") * draw.choice([1, 1, 2])
            for _ in range(draw.randint(0, 4))
        ]
        row = await loop.run(QUESTION, [*turns, FINAL], ground_truth=TRUTH)
        (item,) = trainer.Batch(loop.tokenizer, [row]).items
        manager.tokenizer = loop.tokenizer
        asked = manager._arguments(item)
        solution = unicodedata.normalize("NFC", asked["solution_str"])
        sent = make_row(solution, TRUTH, asked["extra_info"], {}, swallowed=False)
        answers = tuple(
            ToolAnswer(one["query"], one.get("sha256"), one.get("result"))
            for one in sent["tool_answers"]
        )
        judgement = judge_tool_answers(given, sent["solution_str"], answers)
        assert judgement.broken == ()
        assert judgement.judged == len(answers)
        seen += len(answers)
        if any(answer.result != "" for answer in answers):
            other = sent["solution_str"].replace("<tool_response>\n", "<tool_response>\nerror: ")
            spoilt: Judgement = judge_tool_answers(given, other, answers)
            assert spoilt.broken
    assert seen > count * 3 / 4

"""Result blocks of a rollout: what only the rollout can have written is judged, and by its query.

The rows are tried on a real daemon. Then the pinned rollout is played with Qwen's tokenizer, and
with one that adds a BOS token and one that adds spaces: no honest block is refused, and each false
one is.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.reward.provenance import AnswerDigests, Judgement, block_of
from smartsearch_sidecar.scoring.build import recorded_answers
from tests.fakes import rollouts, trainer
from tests.fakes.helper import FakeHelper
from tests.fakes.pinned_rollout import QUERIES, PinnedRollout
from tests.fakes.qwen_bpe import Bpe
from tests.fakes.raised import raises
from tests.fakes.rewarded import (
    QUESTION,
    TRUTH,
    VALIDATION_QUESTION,
    VALIDATION_TRUTH,
    Rewarded,
    item,
    rewarded,
)
from tests.fakes.rollouts import Turn, answered, final, prompt, rollout

PARIS = '"Paris"\nParis is the capital of France.\n\n"Seine"\nA river.'
LYON = "Lyon lies on the Rhone.\n\nIt is a city."
ERRORS = (
    "error: 502",
    "error: execution timed out",
    "HTTPConnectionPool(host='127.0.0.1', port=8765): Max retries exceeded with url: /x",
    "('Connection aborted.', RemoteDisconnected('Remote end closed connection'))",
    "error: \nName or service not known",
)
GLUE = (
    " ",
    "\n",
    "\u00a0 ",
    "<s>",
    "<|begin_of_text|>",
    " <s> ",
    "[BOS]",
    "<\uff5cbegin\u2581of\uff5c>",
)


def handed_over(**answers: str) -> AnswerDigests:
    """A run that gave these answers, each to the query of its name."""
    digests = AnswerDigests(100)
    for query, text in answers.items():
        digests.add(query, text)
    return digests


def judged(digests: AnswerDigests, *turns: Turn, ending: str = final("Paris")) -> Judgement:
    return digests.judge(rollout("Which city?", turns, ending))


def cut_at(turn: Turn, characters: int) -> str:
    """A rollout that ends so far behind the ``<result>`` of its last block."""
    text = rollout(QUESTION, [turn], "")
    return text[: text.rindex("<result>") + len("<result>") + characters]


async def refused(rewards: Rewarded, solution: str, cause: str) -> None:
    """No reward is given for a rollout, and the run has failed with ``cause``."""
    status, _ = await rewards.reward(solution)
    assert status != 200
    _, health = await rewards.run.health(settle=5)
    assert (health["state"], health["cause"]["cause"]) == ("failed", cause)
    status, _ = await rewards.run.internal("POST", "/checkpoints", {"step": 1})
    assert status == 409


# --- anything between </search> and <result> ------------------------------------------------------


@pytest.mark.parametrize("glue", GLUE)
async def test_glue(tmp_path: Path, glue: str) -> None:
    """A failure behind a BOS token, a space or a line end is as false as one without."""
    async with rewarded(tmp_path) as rewards:
        honest = (await rewards.rollout("Faust")).replace("</search><", f"</search>{glue}<")
        assert (await rewards.reward(honest))[0] == 200
        lost = rollout(QUESTION, [Turn("Gounod", "error: 502")], final("Paris"))
        lost = lost.replace("</search><", f"</search>{glue}<")
        await refused(rewards, lost, "provenance_broken")


def test_what_a_policy_writes_is_no_glue() -> None:
    """Words or a protocol tag between the two make the block the policy's own."""
    for between in ("so ", "</think>", "<think>", "<answer>", " . ", "<", "< b >"):
        text = rollout("Which city?", [answered("q", PARIS)], "")
        text = text.replace("</search><result>", f"</search>{between}<result>")
        found = handed_over(q=PARIS).judge(text)
        assert (found.judged, found.policy_own, found.broken) == (0, 1, ()), between


# --- fewer than three <think> in the prompt -------------------------------------------------------


@pytest.mark.parametrize("shown", range(3))
async def test_prompt_with_fewer_thinks(tmp_path: Path, shown: int) -> None:
    """Where the fourth <think> is one of the policy's, the rollout is refused: the scorer would not
    read its first rounds.
    """
    async with rewarded(tmp_path) as rewards:
        system = "Use <think> and <think>."[: len("Use ") + 12 * shown]
        assert system.count("<think>") == shown
        turns = [Turn("q", "error: 502"), *[answered("q", await rewards.told("q"))] * 3]
        text = rollout(QUESTION, turns, final("Paris"), system=system)
        await refused(rewards, text, "template_differs")


async def test_prompt_truncated_at_its_left(tmp_path: Path) -> None:
    """A prompt that lost words before its tags is as good as whole; one that lost a tag is not."""
    async with rewarded(tmp_path) as rewards:
        text = await rewards.rollout("one", "two", "three")
        first = text.index("<think>")
        assert (await rewards.reward(text[first:]))[0] == 200
        await refused(rewards, text[first + 1 :], "template_differs")


def test_the_generation_prompt_is_where_the_response_begins() -> None:
    """A prompt with more tags, or a question with one, hides no round and shows no block."""
    for system in (rollouts.SYSTEM_PROMPT, f"<think> {rollouts.SYSTEM_PROMPT}"):
        for question in ("Which city?", "Is it <think> or not?"):
            text = rollout(question, [Turn("q", "error: 502")], final("Paris"), system=system)
            found = handed_over(q=PARIS).judge(text)
            assert found == Judgement(1, 0, 0, (text.index("<result>error"),))


def test_a_text_without_a_generation_prompt_differs() -> None:
    """Where no turn follows the user's, no response can be told apart."""
    text = rollout("Which city?", [answered("q", PARIS)], final("Paris"))
    for spoilt in (
        text.replace("<|im_start|>assistant", ""),
        text.replace("<|im_start|>user", ""),
        text.replace("<|im_end|>", ""),
    ):
        with raises(errors.TEMPLATE_DIFFERS):
            handed_over(q=PARIS).judge(spoilt)


# --- a block cut by the response limit ------------------------------------------------------------


@pytest.mark.parametrize(
    "said", ["HTTPConnectionPool", "error: 5", "error", "e", "H", "R\u00e9seau"]
)
async def test_cut_block_that_cannot_be_ours(tmp_path: Path, said: str) -> None:
    """What a client wrote in place of an answer is refused however early the limit cut it."""
    async with rewarded(tmp_path) as rewards:
        await rewards.told("q")
        await refused(rewards, cut_at(Turn("q", said), len(said)), "provenance_broken")


async def test_cut_block_that_is_ours(tmp_path: Path) -> None:
    """An answer is known at every length, with half a character or special tokens at its end."""
    answer = (
        '"Cafe\u0301"\nUn cafe\u0301 \u1100\u1161\u11a8 \u212b <b>x</b> </s> "東京" ' + "word " * 40
    )
    async with rewarded(tmp_path) as rewards:
        rewards.run.provider.answer = [{"id": "1", "contents": answer}]
        turn = answered("q", await rewards.told("q"))
        own = handed_over(q=turn.text.removeprefix("result: \n"))
        for form in ("NFC", "NFD"):
            text = unicodedata.normalize(form, prompt(QUESTION) + turn.written)
            opened, closed = text.rindex("<result>") + len("<result>"), text.rindex("</result>")
            for end in range(opened, closed + len("</result>")):
                for left in ("", "\ufffd", "<|im_end|>", "\ufffd<|im_end|>"):
                    found = own.judge(text[:end] + left)
                    assert found == Judgement(1, 0, 1, ()), (form, text[end - 20 : end], left)
        assert (await rewards.reward(cut_at(turn, 40)))[0] == 200


def test_cut_block_of_another_answer() -> None:
    """It must begin as an answer to its own query does, from the first character that differs."""
    digests = handed_over(q=PARIS, other=LYON, nothing="")
    for length in range(len("result: \n") + 2, len(answered("q", LYON).text)):
        assert len(digests.judge(cut_at(answered("q", LYON), length)).broken) == 1, length
        assert digests.judge(cut_at(answered("other", LYON), length)).broken == ()
    for length in range(len("\n</result>")):
        assert digests.judge(cut_at(Turn("nothing", ""), length)).broken == ()
        assert digests.judge(cut_at(Turn("q", ""), length)).broken == () if not length else True
        assert len(digests.judge(cut_at(Turn("never asked", ""), length)).broken) == 1


def test_cut_long_answers_are_told_apart() -> None:
    """Answers that begin alike are told apart by what is compared behind."""
    draw = random.Random(7)
    alike = "The same words. " * 3
    texts = [alike + draw.randbytes(2000).hex() for _ in range(40)]
    digests = handed_over(**{f"q{number}": text for number, text in enumerate(texts)})
    for number, text in enumerate(texts):
        for length in range(220, 4000, 300):
            own, other = f"q{number}", f"q{(number + 1) % len(texts)}"
            assert digests.judge(cut_at(answered(own, text), length)).broken == ()
            assert len(digests.judge(cut_at(answered(other, text), length)).broken) == 1


# --- another query's answer -----------------------------------------------------------------------


@pytest.mark.parametrize("said", ["another's", "invalid query", "empty"])
async def test_answer_is_bound_to_its_query(tmp_path: Path, said: str) -> None:
    """An answer, a refusal or an empty result that the run gave to one query is none to another."""
    async with rewarded(tmp_path) as rewards:
        provider = rewards.run.provider
        provider.answer = lambda query: (
            [] if query == "nothing" else [{"id": "1", "contents": query}]
        )
        honest = await rewards.rollout("Faust", "nothing", "", "a </search> b")
        assert (await rewards.reward(honest.replace("a </search> b", "")))[0] == 200
        text = {"another's": "Gounod", "invalid query": "invalid query", "empty": ""}[said]
        assert await rewards.told("Gounod") == "Gounod"
        lost = rollout(QUESTION, [answered("Faust", text)], final("Paris"))
        await refused(rewards, lost, "provenance_broken")


def test_query_as_it_was_asked_and_as_it_stands() -> None:
    """White space, composition and special tokens come and go between the call and the rollout."""
    digests = AnswerDigests(100)
    digests.add("Cafe\u0301 <|box_start|>de la  Paix", PARIS)
    for query in (
        " Café de la Paix\n",
        "Cafe\u0301 de<|box_end|> la Paix",
        "Caf\u00e9 de la Paix<s>",
    ):
        assert judged(digests, answered(query, PARIS)).broken == (), query
    for query in ("Café de la Pai", "café de la paix", "", "Cafe de la Paix"):
        assert len(judged(digests, answered(query, PARIS)).broken) == 1, query


def test_query_that_a_tokenizer_composes_with_its_tag() -> None:
    """A query that begins with U+0338 makes another character of the tag's last one."""
    digests = AnswerDigests(100)
    digests.add("\u0338x", PARIS)
    text = rollout("Which city?", [answered("\u0338x", PARIS)], final("Paris"))
    assert "<search>" not in text[text.index("assistant") :]
    assert digests.judge(text) == Judgement(1, 0, 0, ())


@pytest.mark.parametrize(
    "query", ["", " \n", "a <result> b", "</THINK>", "東" * 3000, "w " * 600, "\x01" * 2040]
)
def test_declined_query_is_known_by_itself(query: str) -> None:
    """What this run, or the unmodified environment, declines is answered so without being kept."""
    digests = handed_over(q=PARIS)
    assert judged(digests, answered(query, "invalid query")).broken == ()
    assert len(judged(digests, answered("q", "invalid query")).broken) == 1
    assert digests.judge(cut_at(answered(query, "invalid query"), 14)).broken == ()
    assert len(digests.judge(cut_at(answered("q", "invalid query"), 14)).broken) == 1


async def test_declined_queries_take_no_memory(tmp_path: Path) -> None:
    """More of them than the run may search neither fill the set nor fail a request."""
    async with rewarded(tmp_path, execute__max_calls=1) as rewards:
        assert await rewards.told("q")
        for number in range(40):
            assert await rewards.told(f"{number} <result>") == "invalid query"


# --- resumed runs ---------------------------------------------------------------------------------


async def test_resumed_run_knows_queries(tmp_path: Path) -> None:
    """After a restart an answer is bound to its query as before."""
    async with FakeHelper() as helper:
        async with rewarded(tmp_path, helper=helper) as rewards:
            honest = await rewards.rollout("Faust", "Cafe\u0301", "  padded ", "")
            other = rollout(QUESTION, [answered("Faust", await rewards.told("x"))], final("Paris"))
        async with rewarded(tmp_path, resume=True, helper=helper) as rewards:
            assert (await rewards.reward(honest))[0] == 200
            await refused(rewards, other, "provenance_broken")


async def test_journal_without_queries(tmp_path: Path) -> None:
    """A run whose records hold no query beside the call has it read from the call."""
    async with FakeHelper() as helper:
        async with rewarded(tmp_path, helper=helper) as rewards:
            honest = await rewards.rollout("it's \\n", "Faust", "nothing")
            other = rollout(QUESTION, [answered("Faust", await rewards.told("x"))], final("Paris"))
            await rewards.run.stop()
            forget_queries(rewards.run.directory)
        async with rewarded(tmp_path, resume=True, helper=helper) as rewards:
            assert (await rewards.reward(honest))[0] == 200
            await refused(rewards, other, "provenance_broken")


@pytest.mark.parametrize(("name", "count"), [("rewards", 8), ("searches", 11), ("native", 4)])
def test_old_journals_bind_their_answers(name: str, count: int) -> None:
    """The journals of earlier versions hold what binds each answer to its query."""
    folder = Path(__file__).resolve().parents[1] / "data" / "journals" / name
    found = list(recorded_answers(folder))
    assert len(found) == count
    assert all(query and query == query.strip() for query, _ in found)
    assert [query for query, text in found if not text] in ([], ["nothing found"])


def forget_queries(directory: Path) -> None:
    """Writes the journal again as a version did that did not record queries."""
    path = directory / "journal" / "000001.jsonl"
    lines, head = [], None
    for line in path.read_bytes().splitlines():
        record = json.loads(line)
        record["data"].pop("query", None)
        record.pop("sum")
        record["prev"] = record["prev"] if head is None else head
        body = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()[:-1]
        head = hashlib.sha256(body).hexdigest()
        lines.append(body + b',"sum":"%b"}\n' % head.encode())
    path.write_bytes(b"".join(lines))


# --- rewards without one judged block -------------------------------------------------------------


def elsewhere(text: str) -> str:
    """A rollout that holds its results as another trainer's does."""
    response = text.index("<|im_start|>assistant")
    own = (
        text[response:].replace("<result>", "<information>").replace("</result>", "</information>")
    )
    return text[:response] + own


def called(query: str) -> str:
    """A rollout that searches by a tool call."""
    call = json.dumps({"name": "wikipedia_search", "arguments": {"query": query}})
    turn = f" hm </think>\n<tool_call>{call}</tool_call><|im_end|>\n<|im_start|>user\n"
    told = "<tool_response>error: 502</tool_response><|im_end|>\n<|im_start|>assistant\n<think>"
    return prompt(QUESTION) + turn + told + final("Paris")


@pytest.mark.parametrize("provenance", ["enforce", "record"])
@pytest.mark.parametrize("form", ["tags", "tool call"])
async def test_nothing_judged(tmp_path: Path, form: str, provenance: str) -> None:
    """Searches answered, rewards given and no block judged is not healthy, and stays so."""
    async with FakeHelper() as helper:
        keys: dict[str, Any] = {"helper": helper, "reward__provenance": provenance}
        async with rewarded(tmp_path, **keys) as rewards:
            text = await rewards.rollout("Faust")
            text = elsewhere(text) if form == "tags" else called("Faust")
            assert (await rewards.reward(text))[0] == 200
            status, health = await rewards.run.health(settle=5)
            assert (status, health["cause"]["cause"]) == (503, "nothing_judged")
            status, _ = await rewards.run.internal("POST", "/checkpoints", {"step": 1})
            assert status == 409
            assert await rewards.run.stop() == 4
        async with rewarded(tmp_path, resume=True, **keys) as rewards:
            assert (await rewards.run.health())[0] == 503


async def test_nothing_judged_in_one_split(tmp_path: Path) -> None:
    """Blocks that validation judged say nothing for the rollouts that are trained on."""
    async with rewarded(tmp_path) as rewards:
        validation = await rewards.rollout("v", question=VALIDATION_QUESTION)
        assert (await rewards.reward(validation, VALIDATION_TRUTH))[0] == 200
        assert (await rewards.run.health(5))[0] == 200
        assert (await rewards.reward(elsewhere(await rewards.rollout("t"))))[0] == 200
        _, health = await rewards.run.health(5)
        assert "train split" in health["cause"]["detail"]


async def test_honest_moments_without_a_judged_block(tmp_path: Path) -> None:
    """Rollouts that never searched, that stopped at a call, or that mention another query are as
    healthy after other searches as before.
    """
    async with rewarded(tmp_path) as rewards:
        await rewards.told("Faust")
        plain = rollout(QUESTION, [], final("Paris"))
        texts = [
            plain,
            prompt(QUESTION) + " hm </think>\n<search>Faust</search>",
            prompt(QUESTION) + " hm </think>\n<search>Faust</search><|im_end|>\n",
            prompt(QUESTION) + " hm </think>\n<search>a <search>Faust</search>",
            prompt(QUESTION) + ' hm {"query": "Gounod"} {"query": "\\x"} <search>no</search> so',
            prompt(QUESTION) + " hm </think>\n<search>Faust</search><res",
            prompt(QUESTION) + " hm </think>\n<search>Faust</search>).\n\n",
        ]
        for text in texts:
            assert (await rewards.reward(text))[0] == 200
        validation = rollout(VALIDATION_QUESTION, [], final("George Eliot"))
        assert (await rewards.reward(validation, VALIDATION_TRUTH))[0] == 200
        assert (await rewards.run.health(5))[0] == 200
        assert (await rewards.run.internal("POST", "/checkpoints", {"step": 1}))[0] == 201


async def test_judged_is_counted_everywhere(tmp_path: Path) -> None:
    """Status, health, metrics, receipt and its record say how many were judged."""
    async with rewarded(tmp_path) as rewards:
        own = " I recall <result>x</result>" + final("Paris")
        turns = [answered(query, await rewards.told(query)) for query in ("one", "two", "three")]
        assert (await rewards.reward(rollout(QUESTION, turns, own)))[0] == 200
        counted = {"judged": 3, "policy": 1, "broken": 0}
        for path in ("/status", "/health"):
            assert (await rewards.run.internal("GET", path))[1]["result_blocks"] == counted
        _, receipt = await rewards.run.internal("POST", "/checkpoints", {"step": 1})
        assert receipt["result_blocks"] == counted
        url = f"{rewards.run.endpoints.internal_url}/metrics"
        async with rewards.run.session.get(url) as answer:
            found = dict(
                re.findall(r'result_blocks_total\{kind="(\w+)"\} (\d+)', await answer.text())
            )
        assert found == {"judged": "3", "policy": "1", "broken": "0"}
        (accepted,) = (one for one in rewards.run.records() if one["kind"] == "checkpoint.accepted")
        assert accepted["data"]["result_blocks"] == counted


# --- the policy's text in current verl ------------------------------------------------------------

VERL = Path(__file__).resolve().parents[2] / "smartsearch_sidecar/integrations/verl_reward.py"
WRITTEN = (
    "<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n<think> So. </think>",
    "<|im_start|>user\nAnd then?<|im_end|>",
    f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n So. </think>",
    (
        f"<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n"
        "<|im_start|>assistant\n So. </think>"
    ),
    "<|im_start|>assistant\n<think> So.",
    "user\nAnd then?\nassistant\n So. </think>",
    f"user\n{QUESTION}\nassistant\n So. </think>",
    "system\nBe.\nuser\nAnd then?\nassistant\n So. </think>",
    " So. </think><|im_end|>\n<|im_start|>user\n<result>x</result><|im_end|>",
)


@pytest.mark.parametrize(
    "extra_info",
    [
        {"question": QUESTION},
        {"prompt": [{"role": "user", "content": QUESTION}]},
        {"prompt": prompt(QUESTION)},
    ],
)
async def test_what_the_policy_writes_closes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra_info: dict[str, Any]
) -> None:
    """Special tokens and turns in a response are the policy's own: it gets its reward, and the run
    stays healthy.
    """
    score = trainer.load_as_current(
        trainer.current_config("naive"), str(VERL), "compute_score_async"
    )
    async with rewarded(tmp_path) as rewards:
        endpoints = rewards.run.directory / "endpoints.json"
        monkeypatch.setenv("SMARTSEARCH_SIDECAR_ENDPOINTS", str(endpoints))
        for response in WRITTEN:
            reward = await score(
                data_source="re_call",
                solution_str=response,
                ground_truth=TRUTH,
                extra_info=extra_info,
            )
            assert isinstance(reward, float), response
        assert (await rewards.run.health(settle=5))[0] == 200


# --- the pinned rollout through real tokenizers ---------------------------------------------------

PASSAGES = (
    *("result: \nAnd more.", "search result answer think", "a < b and <b>bold</b>", "\ufeffbegins"),
    *(
        '"Cafe\u0301"\nUn cafe\u0301 \u212b \u2126',
        "東京は日本の首都である。",
        "שלום עולם",
        "🎭🏛️ 👩‍🔬",
    ),
    *(
        "\u0338a mark first",
        "\u1100\u1161\u11a8 jamo",
        "tab\tand\r\nlines  \n x",
        "<<<>>> </b> [BOS]",
    ),
    *("0123456789 " * 40, "{1} \\boxed{no} $x$", "\ufffd\ufffd", "zero\u200bwidth", "x" * 3000),
    *("drop <result> it", "drop <|im_end|> it"),
)
TOKENIZERS = {
    "qwen": Bpe(),
    "adds BOS": Bpe(bos=True),
    "adds spaces": Bpe(space=True),
    "adds both": Bpe(bos=True, space=True),
}


def passages_for(query: str) -> list[dict[str, str]]:
    """Up to five odd passages, the same for the same query; none for some."""
    draw = random.Random(unicodedata.normalize("NFC", query))
    texts = draw.sample(PASSAGES, draw.choice((0, 1, 3, 5)))
    return [
        {"id": str(number), "contents": f"{draw.choice((text, query + text))} {draw.random()}"}
        for number, text in enumerate(texts)
        if query.isprintable() or number
    ]


class Text(NamedTuple):
    """One rollout as it is scored."""

    text: str
    validation: bool
    refined: bool

    @property
    def item(self) -> dict[str, Any]:
        return item(self.text, VALIDATION_TRUTH if self.validation else TRUTH)


async def played(rewards: Rewarded, bpe: Bpe, draw: random.Random) -> list[Text]:
    """The group of one question, some of it refined as in training."""

    async def ask(query: str) -> str:
        status, value = await rewards.run.execute(query)
        assert status == 200, value
        return rollouts.client_text(value["result"])

    length = draw.choice((60, 150, 400, 1500, 8192))
    pinned = PinnedRollout(bpe, ask, draw, response_length=length, turns_max=draw.randint(1, 5))
    validation = draw.random() < 0.2
    question = VALIDATION_QUESTION if validation else QUESTION
    start = pinned.prompt(question, lost=draw.choice((0, 0, 3, 9)))
    texts = []
    for _ in range(draw.randint(1, 4)):
        first = await pinned.play(start)
        texts.append(Text(pinned.text(first), validation, refined=False))
        again = None if validation else await pinned.refine(first)
        if again is not None:
            texts.append(Text(pinned.text(again), validation, refined=True))
    return texts


async def honest(rewards: Rewarded, bpe: Bpe, seed: int, blocks: int) -> None:
    """Plays until so many blocks are judged; each batch has its rewards, and the run is healthy."""
    rewards.run.provider.answer = passages_for
    draw = random.Random(seed)
    count = refined = cut = 0
    while count < blocks:
        group = [one for _ in range(4) for one in await played(rewards, bpe, draw)]
        for at in range(0, len(group), 32):
            status, value = await rewards.batch(*[one.item for one in group[at : at + 32]])
            assert status == 200, value
        refined += sum(one.refined for one in group)
        cut += sum(one.text.rfind("<result>") > one.text.rfind("</result>") for one in group)
        counts = (await rewards.run.internal("GET", "/status"))[1]["result_blocks"]
        assert counts["broken"] == 0
        count = counts["judged"]
    assert (await rewards.run.health(settle=5))[0] == 200
    assert min(refined, cut) >= blocks / 50


@pytest.mark.parametrize("name", TOKENIZERS)
async def test_honest_rollouts_are_never_refused(tmp_path: Path, name: str) -> None:
    """Odd passages and queries, refined ones, groups, limits at every place: none is broken."""
    async with rewarded(tmp_path, reward__reuse_identical=True) as rewards:
        await honest(rewards, TOKENIZERS[name], seed=1, blocks=80 if name == "qwen" else 40)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TOKENIZERS)
async def test_soak_honest_rollouts_are_never_refused(tmp_path: Path, name: str) -> None:
    """5,000 judged blocks with each tokenizer, and no false refusal."""
    keys: dict[str, Any] = {"execute__max_calls": 100_000, "reward__max_scores": 100_000}
    async with rewarded(tmp_path, **keys) as rewards:
        await honest(rewards, TOKENIZERS[name], seed=2, blocks=5_000)


BLOCK = re.compile(
    r"<search>(?P<query>(?:(?!</?search>).)*)</search>(?P<glue>(?:\s|<s>)*)"
    r"<result>(?P<said>[^<]*)\n</result>\n",
    re.DOTALL,
)


async def test_each_false_block_is_refused(tmp_path: Path) -> None:
    """One block of an honest rollout made false, whole or cut, at random: refused each time."""
    draw = random.Random(4)
    async with rewarded(tmp_path) as rewards:
        digests = AnswerDigests(10_000)
        rewards.run.service.on_answer = digests.add
        rewards.run.provider.answer = passages_for
        texts = [
            text
            for bpe in TOKENIZERS.values()
            for _ in range(12)
            for text, _, _ in await played(rewards, bpe, draw)
        ]
    tried = 0
    for text in texts:
        assert digests.judge(text).broken == ()
        response = text.index("<|im_start|>assistant")
        blocks = list(BLOCK.finditer(text, response))
        for found in blocks:
            query, said = found["query"], found["said"]
            for false in falsehoods(draw, query, said):
                start, end = found.span("said")
                spoilt = text[:start] + false + text[end:]
                assert digests.judge(spoilt).broken, (query, false)
                least = 1 if not false.startswith("result: \n") else len("result: \n") + 7
                begins_right = bool(said) and false.startswith(said)
                if len(false) > least and found is blocks[-1] and not begins_right:
                    cut = text[:start] + false[: draw.randint(least, len(false))]
                    assert digests.judge(cut).broken, (query, false, cut[-30:])
                tried += 1
    assert tried > 300


def falsehoods(draw: random.Random, query: str, said: str) -> Iterator[str]:
    """What may stand in place of an answer that never came."""
    yield draw.choice(ERRORS)
    yield f"result: \n#{draw.random()} of another query"
    if said:
        yield ""
        yield f"{said} and more"
        yield said.replace("result: \n", "output: \n")
    if said != "result: \ninvalid query" and len(query) < 1000 and query.strip():
        yield "result: \ninvalid query"


def test_queries_of_the_generator_are_told_apart() -> None:
    """The generator's queries are many to provenance too, so that it binds what they ask."""
    digests = AnswerDigests(100)
    for query in QUERIES:
        digests.add(query, PARIS)
    assert len(digests) >= len(QUERIES) - 4
    assert block_of(PARIS).startswith("<result>result: \n")

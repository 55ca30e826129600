"""The file for current verl, driven as verl's reward managers drive a custom reward function."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import pickle
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import rollouts, trainer
from tests.fakes.reward_server import (
    EXECUTE,
    INTERNAL,
    RewardServer,
    digest_reward,
    error,
    reward_server,
)
from tests.fakes.rewarded import QUESTION, TRUTH, rewarded

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "smartsearch_sidecar" / "integrations" / "verl_reward.py"
SECRET = "Charles Gounod's birthplace"
ASKED = "Which city?"
RESPONSE = " I know. </think>\n<answer> It is \\[ \\boxed{Paris} \\] </answer>"
FORMS = ["compute_score", "compute_score_async"]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RewardServer]:
    """A sidecar's internal routes, and the variable that names its endpoints."""
    with reward_server(tmp_path) as running:
        monkeypatch.setenv("SMARTSEARCH_SIDECAR_ENDPOINTS", str(running.endpoints))
        yield running


def load(name: str = "compute_score", manager: str = "naive", **reward_kwargs: Any) -> Any:
    """The function as verl's loader makes it, with its configuration in a local variable."""
    config = trainer.current_config(manager)
    return trainer.load_as_current(config, str(FILE), name, **reward_kwargs)


def held_by(function: Any) -> dict[str, Any]:
    """The names of the file that a loaded function is from."""
    names: dict[str, Any] = function.args[0].__globals__
    return names


def row(number: int = 0, **keys: Any) -> dict[str, Any]:
    return {
        "prompt": rollouts.prompt(f"question {number}?"),
        "response": f"{RESPONSE}{number}<|im_end|>",
        "ground_truth": [f"answer {number}"],
        "extra_info": {"question": f"question {number}?"},
        "data_source": "asearcher",
        **keys,
    }


def score(function: Any, solution: Any = RESPONSE, extra_info: Any = None, **keys: Any) -> float:
    """One rollout, as verl calls for it, through whichever form was loaded."""
    given = {
        "data_source": "asearcher",
        "solution_str": solution,
        "ground_truth": TRUTH,
        "extra_info": extra_info,
        "reward_router_address": "127.0.0.1:1",
        "reward_model_tokenizer": None,
        **keys,
    }
    answer = function(**given)
    return float(asyncio.run(answer) if inspect.iscoroutine(answer) else answer)


def sent(server: RewardServer) -> list[dict[str, Any]]:
    """Every row that arrived, in order."""
    return [item for asked in server.asked("/reward/batch") for item in asked["items"]]


# --- managers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
async def test_a_reward_loop_gets_each_row_its_reward(name: str, server: RewardServer) -> None:
    """Rows scored side by side, plain or awaited, come back right."""
    tokenizer = trainer.Tokenizer()
    manager = trainer.NaiveRewardManager(tokenizer, load(name))
    results = await manager.run_batch(trainer.Batch(tokenizer, [row(at) for at in range(40)]))
    wanted = [
        digest_reward(
            {
                "solution_str": _pinned_form(f"question {number}?", f"{RESPONSE}{number}"),
                "ground_truth": [f"answer {number}"],
            }
        )
        for number in range(40)
    ]
    assert [result["reward_score"] for result in results] == pytest.approx(wanted)
    assert {item["data_source"] for item in sent(server)} == {"re_call"}


async def test_rows_that_arrive_together_travel_together(server: RewardServer) -> None:
    """What gathers while a request is under way goes in the next ones, 64 rows in each."""
    tokenizer = trainer.Tokenizer()
    manager = trainer.NaiveRewardManager(tokenizer, load("compute_score_async"))
    all_there = threading.Event()
    server.reward = lambda item: float(all_there.wait(20))
    batch = trainer.Batch(tokenizer, [row(at) for at in range(150)])
    scoring = asyncio.create_task(manager.run_batch(batch))
    await asyncio.sleep(0)  # the loop makes its tasks
    await asyncio.sleep(0)  # and each of them hands over its row
    all_there.set()
    assert [result["reward_score"] for result in await scoring] == [1.0] * 150
    first, *others = [len(asked["items"]) for asked in server.asked("/reward/batch")]
    assert sum(others) == 150 - first
    assert set(others[:-1]) <= {64}
    assert others[-1] <= 64
    assert server.busiest == 1


def _pinned_form(question: str, response: str) -> str:
    """What the sidecar must be sent for a response alone."""
    return rollouts.prompt(question, system=_unseen()) + response


@functools.cache
def _unseen() -> str:
    """The words that stand for a system prompt that the function has not been given."""
    return str(held_by(load())["UNSEEN_SYSTEM_PROMPT"])


def test_a_batch_manager_gets_rewards_in_order(server: RewardServer) -> None:
    """A whole batch, handed over at once, comes back in its order."""
    tokenizer = trainer.Tokenizer()
    manager = trainer.BatchRewardManager(tokenizer, load("compute_score_batch"))
    server.reward = lambda item: float(item["ground_truth"][0].split()[1])
    assert manager(trainer.Batch(tokenizer, [row(number) for number in range(100)])) == [
        float(number) for number in range(100)
    ]
    assert load("compute_score_batch")([], [], []) == []


def test_the_worker_of_remote_is_sent_the_function(server: RewardServer) -> None:
    """What a process of its own is sent holds no lock and no thread."""
    function = load()
    score(function, extra_info={"question": ASKED})
    held = held_by(function)
    assert pickle_through(held["_FAILED"], held).first is None
    assert pickle_through(held["_SENDER"], held) is not held["_SENDER"]


def pickle_through(value: Any, held: dict[str, Any]) -> Any:
    """Pickled and read again, with the classes found as a pickle by value would bring them."""
    module = type(sys)(held["__name__"])
    module.__dict__.update(held)
    sys.modules[held["__name__"]] = module
    try:
        return pickle.loads(pickle.dumps(value))  # noqa: S301 - what was pickled one call before
    finally:
        del sys.modules[held["__name__"]]


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
def test_the_first_failure_is_the_last_word(name: str, server: RewardServer) -> None:
    """A failed row raises a sentence without secrets; afterwards nothing is asked any more."""
    function = load(name)
    server.failing = 1
    with pytest.raises(RuntimeError, match="helper_timeout") as seen:
        score(function, extra_info={"question": ASKED}, ground_truth=[SECRET])
    assert type(seen.value) is RuntimeError
    with pytest.raises(RuntimeError, match="refused, since this process has failed before"):
        score(function, extra_info={"question": ASKED})
    assert len(server.asked("/reward/batch")) == 1
    assert len(server.asked("/latch")) == 1
    said = str(seen.value) + json.dumps(server.asked("/latch"))
    assert not [word for word in (INTERNAL, EXECUTE, SECRET) if word in said]


@pytest.mark.parametrize(
    "answer",
    [
        (200, {"rewards": [{"reward": float("nan")}]}),
        (202, {"rewards": [{"reward": 1.0}]}),
        (429, error("busy")),
    ],
)
@pytest.mark.parametrize("name", FORMS)
def test_anything_but_a_finite_number_is_refused(
    name: str, answer: Any, server: RewardServer
) -> None:
    """What else comes back is no reward."""
    server.answers["/reward/batch"] = answer
    with pytest.raises(RuntimeError, match="no reward"):
        score(load(name), extra_info={"question": ASKED})


def test_an_unforeseen_failure_says_its_kind_alone(server: RewardServer) -> None:
    """The text of a foreign exception may hold a rollout or an answer: it goes no further."""

    class Odd:
        """Columns that cannot be read."""

        def keys(self) -> list[str]:
            raise LookupError(SECRET)

    with pytest.raises(RuntimeError, match="no reward: LookupError") as seen:
        score(load(), extra_info=Odd())
    assert SECRET not in str(seen.value) + json.dumps(server.asked("/latch"))


async def test_every_row_of_a_failed_request_raises(server: RewardServer) -> None:
    """No row of a loop gets a number when one of them fails, not even 0.0."""
    tokenizer = trainer.Tokenizer()
    manager = trainer.NaiveRewardManager(tokenizer, load("compute_score_async"))
    server.answers["/reward/batch"] = (502, error("helper_timeout"))
    batch = trainer.Batch(tokenizer, [row(number) for number in range(70)])
    tasks = [manager.run_single(batch[number]) for number in range(70)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(result) for result in results} == {RuntimeError}
    assert len({id(result) for result in results}) == 70


async def test_a_reward_given_up_on_is_a_failure(server: RewardServer) -> None:
    """A caller that stops waiting may train on another number, so the latch is asked for."""
    function = load("compute_score_async")
    entered, leave = threading.Event(), threading.Event()
    told = threading.Event()

    def slow(value: dict[str, Any]) -> Any:
        entered.set()
        leave.wait(20)
        return 200, {"rewards": [{"reward": 1.0}] * len(value["items"])}

    def latch(value: Any) -> Any:
        told.set()
        return 200, {}

    server.answers.update({"/reward/batch": slow, "/latch": latch})
    given = ("asearcher", RESPONSE, TRUTH, {"question": ASKED})
    waiting = asyncio.ensure_future(function(*given))
    await asyncio.to_thread(entered.wait, 20)
    queued = asyncio.ensure_future(function(*given))
    await asyncio.sleep(0)  # its row is handed over, and waits for the request under way
    waiting.cancel()
    queued.cancel()
    for task in (waiting, queued):
        with pytest.raises(asyncio.CancelledError):
            await task
    leave.set()
    assert await asyncio.to_thread(told.wait, 20)
    with pytest.raises(RuntimeError, match="stopped waiting"):
        await function(*given)
    assert len(server.asked("/reward/batch")) == 1


def test_an_unawaited_row_is_not_sent(server: RewardServer) -> None:
    """A row that was withdrawn before its request began leaves no trace, not even a failure."""
    function = load()
    sender = held_by(function)["_SENDER"]
    entered, leave = threading.Event(), threading.Event()

    def slow(item: dict[str, Any]) -> float:
        entered.set()
        return float(leave.wait(20))

    server.reward = slow
    under_way = sender.submit(lambda: {"solution_str": "first", "ground_truth": "a"})
    assert entered.wait(20)
    assert sender.submit(lambda: {"solution_str": "withdrawn", "ground_truth": "a"}).cancel()
    leave.set()
    assert under_way.result(20) == 1.0
    assert score(function, extra_info={"question": ASKED}) == 1.0
    assert [item["solution_str"] for item in sent(server)][:1] == ["first"]
    assert "withdrawn" not in [item["solution_str"] for item in sent(server)]


# --- finding the sidecar --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "mode", "sentence"),
    [
        (None, 0o600, "cannot be read"),
        ("{}", 0o600, "is not the endpoints.json"),
        ("[]", 0o600, "is not the endpoints.json"),
        ('{"internal_url": 1, "sandbox_url": 2}', 0o600, "is not the endpoints.json"),
        ('{"internal_url": "https://h:1/c", "sandbox_url": "http://h:1/c"}', 0o600, "is not the"),
        ('{"internal_url": "http://h:1/", "sandbox_url": "http://h:1/c"}', 0o600, "is not the"),
        ("whole", 0o640, "can be read by others"),
        ("whole", 0o604, "can be read by others"),
    ],
)
def test_endpoints_that_are_no_endpoints(
    content: str | None,
    mode: int,
    sentence: str,
    server: RewardServer,
) -> None:
    """A file that is missing, open to others or something else is refused by a sentence."""
    if content is None:
        server.endpoints.unlink()
    elif content != "whole":
        server.endpoints.write_text(content)
    if content is not None:
        server.endpoints.chmod(mode)
    with pytest.raises(RuntimeError, match=sentence) as seen:
        score(load(), extra_info={"question": ASKED})
    assert INTERNAL not in str(seen.value)
    assert server.seen == []


def test_endpoints_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable nothing is guessed."""
    monkeypatch.delenv("SMARTSEARCH_SIDECAR_ENDPOINTS", raising=False)
    with pytest.raises(RuntimeError, match="SMARTSEARCH_SIDECAR_ENDPOINTS must name"):
        score(load(), extra_info={"question": ASKED})


def test_a_resumed_sidecar_is_found_where_it_is_now(server: RewardServer, tmp_path: Path) -> None:
    """The address is read anew for each request."""
    function = load()
    score(function, extra_info={"question": ASKED})
    (tmp_path / "second").mkdir()
    with reward_server(tmp_path / "second") as moved:
        shutil.copy(moved.endpoints, server.endpoints)
        score(function, extra_info={"question": ASKED})
        assert len(moved.asked("/reward/batch")) == 1
    assert len(server.asked("/reward/batch")) == 1


# --- managers that swallow ------------------------------------------------------------------------


@pytest.mark.parametrize("section", ["reward", "reward_model"])
@pytest.mark.parametrize("manager", ["rate_limited", "prime"])
def test_a_swallowing_manager_keeps_the_file_from_loading(manager: str, section: str) -> None:
    """Where verl's configuration names such a manager, the run does not start."""
    with pytest.raises(RuntimeError, match=r"turns every failure into a reward of 0\.0"):
        trainer.load_as_current(trainer.current_config(manager, section), str(FILE), FORMS[0])


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("by", ["class", "module"])
async def test_a_swallowing_manager_gets_no_number(
    by: str, name: str, server: RewardServer
) -> None:
    """Under rate_limited the refusal is an exception that it does not turn into 0.0."""
    tokenizer = trainer.Tokenizer()
    manager: Any = trainer.RateLimitedRewardManager(tokenizer, load(name))
    if by == "module":
        namespace = {**vars(trainer), "__name__": "verl.experimental.reward_manager.limited"}
        source = inspect.getsource(trainer.NaiveRewardManager)
        source += inspect.getsource(trainer.RateLimitedRewardManager)
        exec("from __future__ import annotations\n" + source, namespace)  # noqa: S102 - our own
        kind = type("Renamed", (namespace["RateLimitedRewardManager"],), {})
        manager = kind(tokenizer, load(name))
    item = trainer.Batch(tokenizer, [row()])[0]
    with pytest.raises(asyncio.CancelledError, match="naive, dapo or remote"):
        await manager.run_single(item)
    assert server.asked("/reward/batch") == []
    assert len(server.asked("/latch")) == 1


# --- the text the scorer reads --------------------------------------------------------------------


@pytest.mark.parametrize(
    "extra_info",
    [
        {"question": ASKED},
        {"question": ASKED, "prompt": "something else"},
        {"prompt": ASKED},
        {"prompt": [{"role": "user", "content": ASKED}]},
        {"question": ASKED, "prompt": [{"role": "user", "content": f"Answer this. {ASKED}"}]},
    ],
)
def test_the_user_turn_is_rebuilt(extra_info: dict[str, Any], server: RewardServer) -> None:
    """From question or prompt the text has the pinned form, with three tags before the fourth."""
    score(load(), extra_info=extra_info)
    (item,) = sent(server)
    assert item["solution_str"] == _pinned_form(ASKED, RESPONSE)
    assert item["solution_str"].split("<think>", 4)[4] == RESPONSE


@pytest.mark.parametrize("prompt", ["messages", "rendered", "rendered without question"])
def test_a_system_prompt_that_is_known_is_kept(prompt: str, server: RewardServer) -> None:
    """With the real system prompt at hand the text is the pinned trainer's to the letter."""
    extra_info: dict[str, Any] = {"question": ASKED, "prompt": rollouts.prompt(ASKED)}
    if prompt == "messages":
        extra_info["prompt"] = [
            {"role": "system", "content": rollouts.SYSTEM_PROMPT},
            {"role": "user", "content": ASKED},
        ]
    if prompt == "rendered without question":
        del extra_info["question"]
    score(load(), extra_info=extra_info)
    assert sent(server)[0]["solution_str"] == rollouts.prompt(ASKED) + RESPONSE


def test_a_system_prompt_with_other_tags_is_replaced(server: RewardServer) -> None:
    """The scorer counts tags, so a prompt that shows more or fewer of them cannot stand there."""
    prompt = [{"role": "system", "content": "Use <think>."}, {"role": "user", "content": ASKED}]
    score(load(), extra_info={"prompt": prompt})
    assert sent(server)[0]["solution_str"] == _pinned_form(ASKED, RESPONSE)


def test_a_whole_text_passes_as_it_is(server: RewardServer) -> None:
    """A manager that hands over prompt and response, special tokens kept, needs no extra_info."""
    text = rollouts.rollout(
        ASKED, [rollouts.answered("a", "b")], rollouts.final("Paris") + "<|im_start|>user\nno"
    )
    score(load(), text)
    assert sent(server)[0]["solution_str"] == text


@pytest.mark.parametrize(
    ("prefilled", "response", "assistant"),
    [
        (None, RESPONSE, f"<think>{RESPONSE}"),
        (None, f"<think>{RESPONSE}", f"<think>{RESPONSE}"),
        (True, f"<think>{RESPONSE}", f"<think><think>{RESPONSE}"),
        (False, RESPONSE, RESPONSE),
    ],
)
def test_the_generation_prompt_can_be_declared(
    prefilled: bool | None, response: str, assistant: str, server: RewardServer
) -> None:
    """Whether the fourth tag is the prompt's or the policy's is looked at, or said by a keyword."""
    said: dict[str, Any] = {} if prefilled is None else {"think_prefilled": prefilled}
    score(load(**said), response, {"question": ASKED})
    assert sent(server)[0]["solution_str"].endswith(f"assistant\n{assistant}")


def test_a_rendered_prompt_says_how_it_ends(server: RewardServer) -> None:
    """The end of a rendered prompt decides, not the look of the response."""
    bare = rollouts.prompt(ASKED).removesuffix("<think>")
    score(load(), RESPONSE, {"prompt": bare})
    assert sent(server)[0]["solution_str"] == bare + RESPONSE


GONE = f"system\n{rollouts.SYSTEM_PROMPT}\nuser\n{ASKED}\nassistant\n<think>"


@pytest.mark.parametrize(
    ("solution", "extra_info", "sentence"),
    [
        (RESPONSE, None, "neither question nor prompt"),
        (RESPONSE, {"question": "  "}, "neither question nor prompt"),
        (RESPONSE, {"index": 3, "split": "train"}, "neither question nor prompt"),
        (GONE + RESPONSE, None, "neither question nor prompt"),
        (RESPONSE, {"prompt": GONE}, "special tokens are gone"),
        (RESPONSE, {"question": f"{ASKED}<|im_end|>"}, "special tokens of the template"),
        (RESPONSE, {"prompt": "<|im_start|>user\nno end"}, "not in the form of the pinned"),
        ("<|im_start|>assistant\n<think> hm", None, "not in the form of the pinned"),
        (RESPONSE, {"prompt": 7}, "neither text nor a list"),
        (RESPONSE, {"prompt": [{"role": "assistant", "content": "a"}]}, "must be one user message"),
        (RESPONSE, {"prompt": [{"role": "user", "content": ["image"]}]}, "neither question nor"),
        (None, {"question": ASKED}, "a rollout is not text"),
    ],
)
@pytest.mark.parametrize("name", FORMS)
def test_a_text_that_cannot_be_rebuilt_is_refused(
    name: str, solution: Any, extra_info: Any, sentence: str, server: RewardServer
) -> None:
    """Nothing is guessed: a sentence says what is missing, and the latch is asked for."""
    with pytest.raises(RuntimeError, match=sentence):
        score(load(name), solution, extra_info)
    assert server.asked("/reward/batch") == []
    assert len(server.asked("/latch")) == 1


# --- the file itself ------------------------------------------------------------------------------


DRIVER = """
rewards = []
for name in ("compute_score", "compute_score_async"):
    function = standins.load_as_current(standins.current_config("naive"), sys.argv[2], name)
    tokenizer = standins.Tokenizer()
    manager = standins.NaiveRewardManager(tokenizer, function)
    rows = standins.Batch(tokenizer, json.loads(sys.argv[3]))
    rewards.append([row["reward_score"] for row in asyncio.run(manager.run_batch(rows))])
print(json.dumps({"python": sys.version_info[:2], "rewards": rewards}))
"""


@pytest.mark.process
@pytest.mark.may_skip(reason="Python 3.10 is the trainer's; not every machine has one")
def test_it_runs_in_the_trainers_python(server: RewardServer, tmp_path: Path) -> None:
    """Loaded by path in Python 3.10, without this package, both forms score a batch."""
    python = trainer.old_python()
    if python is None:
        pytest.skip("no Python 3.10 on the path or under pyenv")
    words = [str(FILE), json.dumps([row(number) for number in range(5)])]
    told = trainer.run_alone(python, DRIVER, words, server.endpoints, tmp_path)
    assert told["python"] == [3, 10]
    plain, awaited = told["rewards"]
    assert plain == awaited
    assert len(set(plain)) == 5


async def test_beside_a_served_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A response whose searches this run has answered is scored as its whole text is."""
    async with rewarded(tmp_path) as served:
        endpoints = served.run.directory / "endpoints.json"
        monkeypatch.setenv("SMARTSEARCH_SIDECAR_ENDPOINTS", str(endpoints))
        text = await served.rollout("one query")
        response = text.split("assistant\n<think>", 1)[1]
        status, whole = await served.reward(text)
        assert status == 200
        tokenizer = trainer.Tokenizer()
        manager = trainer.NaiveRewardManager(tokenizer, load("compute_score_async"))
        given = row(response=response, ground_truth=TRUTH, extra_info={"question": QUESTION})
        (result,) = await manager.run_batch(trainer.Batch(tokenizer, [given]))
        assert result["reward_score"] == whole["reward"]

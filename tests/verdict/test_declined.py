"""Row "the policy's malformed call": declined in band where the policy writes the whole call.

The calls are what ReCall's wrapper makes of the JSON that a policy wrote, and the requests those of
rLLM's tool and of the unmodified environment.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smartsearch_sidecar.contract.execute import DECLINED_CALL_RESULT
from smartsearch_sidecar.reward.provenance import DECLINED_CALL, AnswerDigests, block_of
from tests.fakes import rollouts
from tests.fakes.helper import FakeHelper
from tests.fakes.rewarded import QUESTION, rewarded
from tests.fakes.served import ENVIRONMENT, Served, native_body, read_records, served

DECLINE: dict[str, Any] = {"execute__on_invalid_call": "decline"}
ROUTES: dict[str, Any] = {"execute__routes": ["execute", "search", "retrieve"]}


def wrapped(written: str) -> str:
    """What ReCall's wrapper sends for a policy's tool call: Python of it, or why it could not."""
    try:
        value = json.loads(written)
        arguments = ", ".join(f"{name}={each!r}" for name, each in value["arguments"].items())
        return f"{value['name']}({arguments})"
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        return f"Parse tool call failed: {exc}"


def called(arguments: Any, name: str = "wikipedia_search") -> str:
    return wrapped(json.dumps({"name": name, "arguments": arguments}))


CALLS = {
    "not JSON": wrapped("{'query': Ada}"),
    "no name": wrapped('{"arguments": {"query": "Ada"}}'),
    "arguments in a list": called(["Ada", 5]),
    "another tool": called({"city": "Paris"}, name="get_weather"),
    "no tool": called({"query": "Ada", "top_n": 5}, name="None"),
    "an added argument": called({"query": "Ada", "top_n": 5, "language": "en"}),
    "an argument that is no name": called({"query": "Ada", "top n": 5}),
    "a list of queries": called({"query": ["Ada", "Bob"], "top_n": 5}),
    "no query": called({"top_n": 5}),
    "null": called({"query": None, "top_n": 5}),
    "no number": called({"query": "Ada"}),
    "another number": called({"query": "Ada", "top_n": 10}),
    "a number as text": called({"query": "Ada", "top_n": "5"}),
    "a name without UTF-8": called({"query": "Ada", "\ud800": 5}),
    "code": called({}, name="__import__('os').system"),
    "nothing": "",
    "deeper than a parser goes": f"wikipedia_search(query={'[' * 5000}",
}


async def calls(run: Served, call: Any) -> tuple[int, Any]:
    return await run.post(json.dumps({"env": ENVIRONMENT, "call": call}).encode())


def declined_records(directory: Path) -> list[dict[str, Any]]:
    return [r for r in read_records(directory) if r["kind"] == "retrieval.declined"]


@pytest.mark.parametrize("name", CALLS)
async def test_a_malformed_call_is_declined(tmp_path: Path, name: str) -> None:
    """The policy is told so in band; it is recorded and counted, and the run goes on."""
    async with served(tmp_path / "run", **DECLINE) as run:
        status, value = await calls(run, CALLS[name])
        assert (status, value) == (200, {"result": "invalid call", "output": "", "error": ""})
        assert (await run.execute("Ada"))[0] == 200
        status, health = await run.health(settle=2)
        assert (status, health["declined"]) == (200, {"invalid_call": 1})
        assert (health["retrieval_declined"], health["retrieval_attempts"]) == (1, 1)
        _, shown = await run.internal("GET", "/status")
        assert shown["declined"] == {"invalid_call": 1}
        async with run.session.get(run.endpoints.internal_url + "/metrics") as answer:
            assert 'declined_total{reason="invalid_call"} 1' in await answer.text()
        assert await run.stop() == 0
    (record,) = declined_records(run.directory)
    spelled = CALLS[name].encode("utf-8", "backslashreplace").decode()
    expected = {"reason": "invalid_call", "env": ENVIRONMENT, "call": spelled, "query": ""}
    assert record["data"] == expected


@pytest.mark.parametrize("name", sorted(set(CALLS) - {"a name without UTF-8"}))
async def test_by_default_it_ends_the_run(tmp_path: Path, name: str) -> None:
    """The pinned rollout writes the call itself: another one comes from another program."""
    async with served(tmp_path / "run") as run:
        assert (await calls(run, CALLS[name]))[0] == 400
        _, health = await run.health()
        assert health["cause"]["cause"] == "invalid_native_request"


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        (b'{"env": "x"', "http_invalid_request"),
        (json.dumps({"env": "another", "call": "x"}).encode(), "invalid_native_request"),
        (json.dumps({**native_body("Ada"), "timeout": 5}).encode(), "invalid_native_request"),
        (json.dumps({"env": ENVIRONMENT}).encode(), "invalid_native_request"),
        (json.dumps({"env": ENVIRONMENT, "call": ["x"]}).encode(), "invalid_native_request"),
        (json.dumps([ENVIRONMENT, "x"]).encode(), "invalid_native_request"),
    ],
)
async def test_what_the_policy_does_not_write_ends_the_run(
    tmp_path: Path, body: bytes, cause: str
) -> None:
    """Body, environment and keys are the client program's: they are refused as before."""
    async with served(tmp_path / "run", **DECLINE) as run:
        assert (await run.post(body))[0] == 400
        _, health = await run.health()
        assert (health["cause"]["cause"], health["declined"]) == (cause, {})


async def test_the_two_keys_are_apart(tmp_path: Path) -> None:
    """A bad query ends the run where only calls are declined, and the other way round."""
    async with served(tmp_path / "calls", execute__on_invalid_query="latch", **DECLINE) as run:
        assert (await calls(run, CALLS["another tool"]))[0] == 200
        assert (await run.execute(""))[0] == 400
        assert run.service.run.state.closed
    async with served(tmp_path / "queries") as run:
        assert (await run.execute(""))[1]["result"] == "invalid query"
        assert (await calls(run, CALLS["another tool"]))[0] == 400
        assert run.service.run.state.closed


@pytest.mark.parametrize("top_k", [3, 0, -1, 2.5, "5", None, [5], True])
async def test_a_number_that_the_policy_chose(tmp_path: Path, top_k: Any) -> None:
    """rLLM's tool sends the policy's own ``top_k`` on: nothing is found, and it is recorded."""
    async with served(tmp_path / "run", execute__retrieve_topk=10, **ROUTES, **DECLINE) as run:
        body = json.dumps({"query": "Ada", "top_k": top_k}).encode()
        status, value = await run.post(body, path="/retrieve")
        assert (status, value["results"], value["num_results"]) == (200, [], 0)
        good = json.dumps({"query": "Ada", "top_k": 10}).encode()
        assert (await run.post(good, path="/retrieve"))[1]["num_results"] == 10
        status, health = await run.health(settle=2)
        assert (status, health["declined"]) == (200, {"invalid_call": 1})
        assert health["retrieval_attempts"] == 1


async def test_the_environment_of_verifiers_is_told_in_its_form(tmp_path: Path) -> None:
    """Its search tool lets the policy say ``topk``: it joins no passage, as for a bad query."""
    async with served(tmp_path / "run", **ROUTES, **DECLINE) as run:
        body = json.dumps({"queries": ["Ada"], "topk": 8, "return_scores": True}).encode()
        assert await run.post(body, path="/retrieve") == (200, {"result": [[]]})
        assert (await run.health(settle=2))[1]["declined"] == {"invalid_call": 1}


async def test_the_unmodified_environment_is_told_in_its_form(tmp_path: Path) -> None:
    """It joins the contents it is given, and what it is given says what it says by itself."""
    async with served(tmp_path / "run", **ROUTES, **DECLINE) as run:
        body = json.dumps({"query": ["Ada"], "top_n": 50, "return_score": True}).encode()
        status, value = await run.post(body, path="/search")
        assert (status, value) == (
            200,
            [[{"id": "invalid-call", "contents": "invalid call"}], [0.0]],
        )
        assert (await run.health(settle=2))[1]["declined"] == {"invalid_call": 1}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("/batch_search", {"query": ["Ada"], "top_n": 10}),
        ("/retrieve", {"queries": ["Ada", "Bob"], "topk": 10, "return_scores": True}),
        ("/retrieve", {"queries": ["Ada"], "topk": 10}),
        ("/retrieve", {"query": "Ada", "topk": 10}),
        ("/retrieve", {"query": "Ada", "top_k": 3, "more": 1}),
        ("/search", {"query": "Ada", "top_n": 5, "more": 1}),
    ],
)
async def test_a_number_of_the_client_ends_the_run(tmp_path: Path, path: str, value: Any) -> None:
    """Where the client's configuration says how many passages, another number is its fault."""
    async with served(tmp_path / "run", **ROUTES, **DECLINE) as run:
        status, answer = await run.post(json.dumps(value).encode(), path=path)
        assert status == 400 or answer["result"] is None
        _, health = await run.health()
        assert health["cause"]["cause"] == "invalid_search_request"


def test_a_declined_call_that_was_cut_is_known() -> None:
    """Its block is judged by prefix like any other, where this run has declined a call."""
    answers, without = AnswerDigests(2), AnswerDigests(2)
    answers.add(DECLINED_CALL, DECLINED_CALL_RESULT)
    whole = block_of(DECLINED_CALL_RESULT)
    for end in range(len("<result>") + 1, len(whole)):
        assert answers.has_beginning("any", whole[:end])
        assert not without.has_beginning("any", whole[:end])
    assert not answers.has_beginning("any", whole[:-20] + "!")


async def test_a_declined_call_is_an_answer_of_this_run(tmp_path: Path) -> None:
    """Its block is known to provenance, also after a restart; without one it is unknown."""
    helper = FakeHelper()
    await helper.start()
    turn = rollouts.answered("nonsense", DECLINED_CALL_RESULT)
    solution = rollouts.rollout(QUESTION, [turn], rollouts.final("Paris"))
    again = rollouts.rollout(QUESTION, [turn, turn], rollouts.final("Paris"))
    try:
        async with rewarded(tmp_path, helper=helper, **DECLINE) as scored:
            assert (await calls(scored.run, CALLS["not JSON"]))[0] == 200
            assert (await calls(scored.run, native_body("")["call"]))[0] == 200
            assert (await scored.reward(solution))[0] == 200
            assert await scored.run.stop() == 0
        async with rewarded(tmp_path, helper=helper, resume=True, **DECLINE) as scored:
            assert (await scored.reward(again))[0] == 200
        async with rewarded(tmp_path, name="other", helper=helper, **DECLINE) as scored:
            assert (await scored.reward(solution))[0] == 409
            _, health = await scored.run.health()
            assert health["cause"]["cause"] == "provenance_broken"
    finally:
        await helper.stop()

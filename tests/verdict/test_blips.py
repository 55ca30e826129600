"""Row "one blip ends the run": a 503, 429 or 500 of the retriever, a 503 or 429 of the helper.

A search is asked again within its deadline, and answered and recorded once. A call of the helper is
a call of its own each time, in the ledger and in the quota.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.config import FlashRagSection
from smartsearch_sidecar.retrieval.flashrag.provider import PASSING, FlashragProvider
from smartsearch_sidecar.run.scores import MAX_NEW_TOKENS
from smartsearch_sidecar.scoring import helper_calls
from tests.fakes.helper import FakeHelper
from tests.fakes.retriever import FakeRetriever
from tests.fakes.rewarded import Rewarded, rewarded
from tests.fakes.served import Served, read_records, served

SERVED_AS = {"corpus_sha256": "c" * 64, "index_sha256": "1" * 64, "timeout_seconds": 5.0}


@asynccontextmanager
async def behind(
    path: Path,
    *,
    canaries: Path | None = None,
    made: FakeRetriever | None = None,
    **keys: Any,
) -> AsyncIterator[tuple[Served, FakeRetriever]]:
    """A run in front of a retriever over HTTP."""
    async with made or FakeRetriever() as retriever:
        settings: dict[str, Any] = {**SERVED_AS, "url": retriever.url, "canaries": canaries}
        provider = FlashragProvider(FlashRagSection(**settings))
        await provider.start()
        async with served(path, provider=provider, execute__slots=16, **keys) as run:
            yield run, retriever


def of_kind(directory: Path, *kinds: str) -> list[tuple[str, int, dict[str, Any]]]:
    return [
        (r["kind"], r["number"], r["data"]) for r in read_records(directory) if r["kind"] in kinds
    ]


# --- the retriever --------------------------------------------------------------------------------


@pytest.mark.parametrize("status", PASSING)
async def test_one_blip_of_the_retriever_is_asked_again(tmp_path: Path, status: int) -> None:
    """The search has one answer, whose record says that it took two calls; a hit says nothing."""
    async with behind(tmp_path / "run") as (run, retriever):
        retriever.failure, retriever.failures_left = str(status), 1
        answer, value = await run.execute("Ada")
        assert answer == 200
        contents = [document["contents"] for document in retriever.documents("Ada")]
        assert value["result"] == "\n\n".join(contents)
        assert retriever.asked == {"Ada": 2}
        assert (await run.execute("Ada"))[0] == 200
        answer, health = await run.health(settle=2)
        assert (answer, health["retrieval_retries"], health["retrieval_attempts"]) == (200, 1, 2)
        async with run.session.get(run.endpoints.internal_url + "/metrics") as metrics:
            assert "search_retries_total 1" in await metrics.text()
        assert await run.stop() == 0
    found = of_kind(run.directory, "retrieval.answered", "retrieval.failed")
    assert [(kind, number, data.get("tries")) for kind, number, data in found] == [
        ("retrieval.answered", 1, 2),
        ("retrieval.answered", 2, None),
    ]


async def test_one_blip_of_a_whole_call_loses_no_search_of_it(tmp_path: Path) -> None:
    """Searches that travelled together are all asked again; each is answered and recorded once."""
    async with behind(tmp_path / "run") as (run, retriever):
        retriever.gate.clear()
        asked = [asyncio.create_task(run.execute(f"query {number}")) for number in range(12)]
        await retriever.arrived(1)
        retriever.failure, retriever.failures_left = "503", 2
        retriever.gate.set()
        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 12
        status, health = await run.health(settle=2)
        assert (status, health["retrieval_attempts"], health["retrieval_responses"]) == (
            200,
            12,
            12,
        )
        assert health["retrieval_retries"] > 0
        assert sum(retriever.asked.values()) == 12 + health["retrieval_retries"]
    answered = of_kind(run.directory, "retrieval.answered")
    assert sorted(number for _, number, _ in answered) == list(range(1, 13))


@pytest.mark.parametrize(
    ("keys", "calls"),
    [
        ({}, 3),
        ({"retrieval__retries": 1}, 2),
        ({"retrieval__retries": 0}, 1),
        ({"profile": "reference"}, 1),
    ],
)
async def test_the_tries_have_a_bound(tmp_path: Path, keys: dict[str, Any], calls: int) -> None:
    """A retriever that stays overloaded ends the run by name, after so many calls."""
    async with behind(tmp_path / "run", **keys) as (run, retriever):
        retriever.failure = "503"
        status, value = await run.execute("Ada")
        assert (status, value["error"]["code"]) == (502, "retrieval_failed")
        assert len(retriever.calls) == calls
        _, health = await run.health()
        assert health["cause"]["cause"] == "retrieval_failed"
        assert "answered /search with status 503" in health["cause"]["detail"]
        assert ("(try" in health["cause"]["detail"]) == (calls > 1)
        assert "SECRET" not in health["cause"]["detail"]


@pytest.mark.parametrize("failure", ["401", "403", "409", "501", "redirect", "html", "cut"])
async def test_what_is_no_blip_ends_the_run_at_once(tmp_path: Path, failure: str) -> None:
    """Another status, another service or half an answer would be the same the next time."""
    async with behind(tmp_path / "run") as (run, retriever):
        retriever.failure, retriever.failures_left = failure, 1
        assert (await run.execute("Ada"))[0] == 502
        assert len(retriever.calls) == 1
        assert run.service.run.state.closed


class Careless(FakeRetriever):
    """Its answers hold a blank passage, and another one twice."""

    def documents(self, query: str, top_n: int = 5) -> list[dict[str, str]]:
        first, second, third, *_ = super().documents(query, top_n)
        return [first, {**second, "contents": " \n"}, {**first}, third]


async def test_one_unusable_passage_is_left_out(tmp_path: Path) -> None:
    """A blank passage and a repeated one are recorded as left out where a tagged one would be."""
    good = FakeRetriever().documents("Ada")
    async with behind(tmp_path / "run", made=Careless()) as (run, _):
        status, value = await run.execute("Ada")
        assert (status, value["result"]) == (200, f"{good[0]['contents']}\n\n{good[2]['contents']}")
        status, health = await run.health(settle=2)
        assert status == 200
        _, shown = await run.internal("GET", "/status")
        assert shown["dropped_passages"] == 2
    ((_, _, data),) = of_kind(run.directory, "retrieval.answered")
    assert data["dropped"] == [
        {"id": good[1]["id"], "reason": "blank"},
        {"id": good[0]["id"], "reason": "repeated_id"},
    ]
    async with behind(tmp_path / "strict", made=Careless(), retrieval__on_protocol_tag="latch") as (
        run,
        _,
    ):
        assert (await run.execute("Ada"))[0] == 502
        _, health = await run.health()
        assert health["cause"]["cause"] == "document_invalid"


async def test_one_blip_of_a_canary_is_asked_again_in_the_next_round(tmp_path: Path) -> None:
    """One round that meets a 503 proves nothing; three in a row are a retriever that is gone."""
    documents = FakeRetriever().documents("tide")
    line = {"query": "tide", "top_n": 5, "documents": _digests(documents)}
    canaries = tmp_path / "canaries.jsonl"
    canaries.write_text(json.dumps(line))
    async with behind(tmp_path / "run", canaries=canaries) as (run, retriever):
        watch = run.provider._watch
        retriever.failure, retriever.failures_left = "503", 2
        for _ in range(3):
            await watch.round()
        assert (await run.health(settle=2))[0] == 200
        retriever.failures_left = 3
        for _ in range(3):
            await watch.round()
        assert run.service.run.state.closed


def _digests(documents: list[dict[str, str]]) -> list[dict[str, str]]:
    return [
        {"id": each["id"], "contents_sha256": sha256(each["contents"].encode()).hexdigest()}
        for each in documents
    ]


# --- the helper -----------------------------------------------------------------------------------


@pytest.fixture
async def helper() -> AsyncIterator[FakeHelper]:
    async with FakeHelper() as fake:
        yield fake


async def two_rounds(scored: Rewarded) -> str:
    return await scored.rollout("Ada", "Bob")


def usage(health: dict[str, Any]) -> tuple[int, int, int]:
    """Calls sent, calls answered, tokens still reserved, of the training split."""
    used = health["reward"]["train"]
    names = ("model_attempts", "model_responses", "unknown_output_token_reservations")
    attempts, responses, reserved = (used[name] for name in names)
    return attempts, responses, reserved


@pytest.mark.parametrize("side_by_side", [True, False])
@pytest.mark.parametrize("failure", ["busy_503", "busy_429"])
async def test_one_refusal_of_the_helper_is_asked_again(
    tmp_path: Path, helper: FakeHelper, failure: str, side_by_side: bool
) -> None:
    """A call of its own each: three are recorded, numbered and counted, and the reward is given."""
    helper.failures[1] = failure
    keys: dict[str, Any] = {"reward__side_by_side": side_by_side}
    async with rewarded(tmp_path, helper=helper, **keys) as scored:
        status, value = await scored.reward(await two_rounds(scored))
        assert status == 200, value
        assert len(helper.calls) == 3
        status, health = await scored.run.health(settle=2)
        assert (status, usage(health)) == (200, (3, 2, MAX_NEW_TOKENS))
        assert await scored.run.stop() == 0
    kinds = ("helper.requested", "helper.answered", "helper.failed")
    found = of_kind(scored.run.directory, *kinds)
    assert sorted(number for kind, number, _ in found if kind == "helper.requested") == [1, 2, 3]
    (failed,) = [(number, data) for kind, number, data in found if kind == "helper.failed"]
    assert failed[0] == 1
    assert (failed[1]["code"], failed[1]["sent"], failed[1]["usage"]) == (
        "helper_status",
        True,
        None,
    )
    asked = {number: data["prompt_sha256"] for kind, number, data in found if kind == kinds[0]}
    assert asked[1] in (asked[2], asked[3])
    assert {data["score"] for _, _, data in found} == {1}


@pytest.mark.parametrize(
    ("keys", "failure", "calls"),
    [
        ({"reward__helper__retries": 1}, "busy_503", 2),
        ({"reward__helper__retries": 0}, "busy_503", 1),
        ({"profile": "reference"}, "busy_503", 1),
        ({}, "error_500", 1),
        ({}, "empty", 1),
        ({}, "reset", 1),
    ],
)
async def test_the_helper_is_asked_no_further(
    tmp_path: Path, helper: FakeHelper, keys: dict[str, Any], failure: str, calls: int
) -> None:
    """Past the bound, or after it may have worked, the failure ends the run."""
    helper.failure = failure
    async with rewarded(tmp_path, helper=helper, **keys) as scored:
        status, _ = await scored.reward(await scored.rollout("Ada"))
        assert status == 502
        assert len(helper.calls) == calls
        _, health = await scored.run.health()
        expected = {"empty": "helper_empty", "reset": "helper_transport"}.get(
            failure, "helper_status"
        )
        assert health["cause"]["cause"] == expected
        assert usage(health)[0] == calls


async def test_no_pause_goes_past_the_deadline(
    tmp_path: Path, helper: FakeHelper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal is the failure at once where the next try could not be in time."""
    monkeypatch.setattr(helper_calls, "REFUSED_PAUSE_SECONDS", (60.0, 60.0))
    helper.failure = "busy_429"
    async with rewarded(tmp_path, helper=helper, reward__deadline_seconds=30.0) as scored:
        assert (await scored.reward(await scored.rollout("Ada")))[0] == 502
        assert len(helper.calls) == 1
        _, health = await scored.run.health()
        assert health["cause"]["cause"] == "helper_status"


@pytest.mark.parametrize("failure", ["empty", "blank"])
async def test_one_empty_completion_may_be_scored(
    tmp_path: Path, helper: FakeHelper, failure: str
) -> None:
    """As the pinned scorer does, which counts the round as correct; measured, and told apart."""
    helper.failures[1] = failure
    keys: dict[str, Any] = {"reward__helper__on_empty": "score", "reward__side_by_side": False}
    async with rewarded(tmp_path, helper=helper, **keys) as scored:
        status, first = await scored.reward(await two_rounds(scored))
        assert status == 200, first
        status, second = await scored.reward(await scored.rollout("Ada", "Cleo"))
        assert (status, second["reward"]) == (200, first["reward"])
        status, health = await scored.run.health(settle=2)
        assert (status, health["verdicts"]) == (200, {"empty": 1, "1": 3})
        assert health["verdicts_unparsed_share"] == 1 / 200
        assert usage(health) == (4, 4, 0)
    (one, *_) = of_kind(scored.run.directory, "helper.answered")
    assert (one[1], one[2]["text"].strip(), one[2]["output_tokens"] > 0) == (1, "", True)
    assert [
        data["verdicts"] for _, _, data in of_kind(scored.run.directory, "reward.answered")
    ] == [
        ["empty", "1"],
        ["1", "1"],
    ]


async def test_empty_completions_have_a_bound(tmp_path: Path, helper: FakeHelper) -> None:
    """Above the share that may be neither 0 nor 1 they end the run."""
    helper.failure = "empty"
    keys: dict[str, Any] = {
        "reward__helper__on_empty": "score",
        "reward__unparsed_share_max": 0.004,
    }
    async with rewarded(tmp_path, helper=helper, **keys) as scored:
        assert (await scored.reward(await two_rounds(scored)))[0] == 502
        _, health = await scored.run.health()
        assert health["cause"]["cause"] == "verdicts_unparsed"


async def test_the_quota_counts_each_try(tmp_path: Path, helper: FakeHelper) -> None:
    """Where no call is left, the refused one is not asked again, and the quota is the cause."""
    helper.failures[1] = "busy_503"
    async with rewarded(tmp_path, helper=helper, reward__max_helper_calls=1) as scored:
        assert (await scored.reward(await scored.rollout("Ada")))[0] == 429
        assert len(helper.calls) == 1
        _, health = await scored.run.health()
        assert health["cause"]["cause"] == "quota_exhausted"


async def test_another_failure_ends_the_pause(tmp_path: Path, helper: FakeHelper) -> None:
    """While one prompt waits to be asked again, another one fails for good: no call follows."""
    helper.failures.update({1: "busy_503", 2: "empty"})
    async with rewarded(tmp_path, helper=helper) as scored:
        assert (await scored.reward(await two_rounds(scored)))[0] == 502
        assert len(helper.calls) == 2
        _, health = await scored.run.health()
        assert health["cause"]["cause"] == "helper_empty"
        assert scored.run.service.run.state.scores.settled


def test_only_a_refusal_is_marked() -> None:
    """Any other fault of the helper is never asked again, whatever its name."""
    assert not errors.HELPER_STATUS("500").refused
    assert errors.HELPER_STATUS("503", refused=True).refused

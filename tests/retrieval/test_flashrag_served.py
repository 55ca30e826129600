"""The sidecar in front of a FlashRAG retriever: gathered, shared, recorded, faults named."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from smartsearch_sidecar.commands import app
from smartsearch_sidecar.config import FlashRagSection
from smartsearch_sidecar.retrieval.canaries import CANARY_SECONDS
from smartsearch_sidecar.retrieval.flashrag.provider import FlashragProvider
from tests.fakes.process import ROOT, toml
from tests.fakes.retriever import FakeRetriever
from tests.fakes.served import Served, served
from tests.fakes.until import until


def provider_for(
    retriever: FakeRetriever, canary_seconds: float = CANARY_SECONDS, **keys: Any
) -> FlashragProvider:
    settings: dict[str, Any] = {
        "url": retriever.url,
        "corpus_sha256": "c" * 64,
        "index_sha256": "1" * 64,
        "batch_max": 32,
        "timeout_seconds": 0.5,
        **keys,
    }
    return FlashragProvider(FlashRagSection(**settings), canary_seconds=canary_seconds)


async def expect_cause(run: Served, cause: str, code: str = "retrieval_failed") -> None:
    """The next search is refused, and health names why."""
    status, value = await run.execute("one more")
    assert status == 502, value
    assert value["error"]["code"] == code
    status, health = await run.health()
    assert (status, health["cause"]["cause"]) == (503, cause)
    assert await run.stop() == 4


def settled(run: Served, count: int) -> dict[str, int]:
    """How the answers of ``count`` searches came about; each has its two records on disk."""
    kinds = [record["kind"] for record in run.records()]
    assert kinds.count("retrieval.requested") == kinds.count("retrieval.answered") == count
    caches = [r["data"]["cache"] for r in run.records() if r["kind"] == "retrieval.answered"]
    return {outcome: caches.count(outcome) for outcome in set(caches)}


async def test_sixty_four_clients_cost_few_calls(tmp_path: Path) -> None:
    """64 clients in the eight slots, one call at a time upstream: at least four searches a call,
    identical ones asked once, and every request counted and recorded.
    """
    async with FakeRetriever(latency=0.03) as retriever:
        provider = provider_for(retriever, timeout_seconds=8.0)
        await provider.start()
        async with served(tmp_path / "run", provider=provider) as run:

            async def client(number: int) -> None:
                for turn in range(4):
                    # Groups of eight ask alike, as the rollouts of one question do.
                    status, value = await run.execute(f"group {number // 8} turn {turn}")
                    assert status == 200, value

            await asyncio.gather(*(client(number) for number in range(64)))
            _, health = await run.health()
            assert health["retrieval_attempts"] == health["retrieval_responses"] == 256
            assert health["cache"] == settled(run, 256)
            assert health["cache"]["miss"] == 32
        asked = [query for call in retriever.calls for query in call.queries]
        assert len(asked) == len(set(asked)) == 32
        assert 256 / len(retriever.calls) >= 4
        assert retriever.busiest == 1


async def test_distinct_searches_are_gathered(tmp_path: Path) -> None:
    """Without a single repeated query it is still at least four searches a call, with a slot for
    each client (a search that waits for a slot joins no call).
    """
    async with FakeRetriever(latency=0.03) as retriever:
        provider = provider_for(retriever, timeout_seconds=8.0)
        await provider.start()
        async with served(tmp_path / "run", provider=provider, execute__slots=64) as run:
            answers = await asyncio.gather(*(run.execute(f"query {n}") for n in range(128)))
            assert {status for status, _ in answers} == {200}
            assert settled(run, 128) == {"miss": 128}
        assert 128 / len(retriever.calls) >= 4
        assert retriever.busiest == 1


@pytest.mark.parametrize("failure", ["500", "html", "html_as_json", "hang", "cut", "strings"])
async def test_faults_of_a_retriever_are_named(tmp_path: Path, failure: str) -> None:
    """A retriever that answers anything but passages ends the run with ``retrieval_failed``."""
    async with FakeRetriever() as retriever:
        provider = provider_for(retriever)
        await provider.start()
        async with served(tmp_path / "run", provider=provider) as run:
            assert (await run.execute("good"))[0] == 200
            retriever.failure = failure
            await expect_cause(run, "retrieval_failed")


async def test_killed_retriever(tmp_path: Path) -> None:
    """A retriever that is gone is a fault after the profile's retries."""
    async with FakeRetriever() as retriever:
        provider = provider_for(retriever)
        await provider.start()
        async with served(tmp_path / "run", provider=provider) as run:
            await retriever.kill()
            await expect_cause(run, "retrieval_failed")


async def test_same_ids_with_other_contents_are_drift(tmp_path: Path) -> None:
    """A corpus changed under its ids is found by the first document seen before."""
    async with FakeRetriever() as retriever:
        provider = provider_for(retriever)
        await provider.start()
        keys: dict[str, Any] = {"retrieval__cache_mib": 0}
        async with served(tmp_path / "run", provider=provider, **keys) as run:
            assert (await run.execute("one more"))[0] == 200
            retriever.revision = 2
            await expect_cause(run, "document_drift")


async def test_restarted_with_another_index_is_found_by_canaries(tmp_path: Path) -> None:
    """Recorded by the command, asked on a timer: another index closes the latch by itself."""
    async with FakeRetriever() as retriever:
        canaries = await asyncio.to_thread(record_canaries, tmp_path, retriever)
        provider = provider_for(retriever, canaries=canaries, canary_seconds=0.05)
        await provider.start()
        async with served(tmp_path / "run", provider=provider) as run:
            assert (await run.health())[0] == 200
            retriever.edition = "wiki19"
            await until(lambda: run.service.run.state.closed)
            _, health = await run.health()
            assert health["cause"]["cause"] == "identity_changed"
            assert "canar" in health["cause"]["detail"]
            assert await run.stop() == 4


def record_canaries(tmp_path: Path, retriever: FakeRetriever) -> Path:
    """Runs ``canaries record`` as an operator does; the file it wrote."""
    questions, out = tmp_path / "questions.txt", tmp_path / "canaries.jsonl"
    questions.write_text("Who wrote Faust?\n\nWhere is Paris?\n")
    config = tmp_path / "flashrag.toml"
    config.write_text(
        toml(
            {
                "retrieval.provider": "flashrag",
                "retrieval.flashrag.url": retriever.url,
                "retrieval.flashrag.corpus_sha256": "c" * 64,
                "retrieval.flashrag.index_sha256": "1" * 64,
            }
        )
    )
    words = ["canaries", "record", str(questions), str(out), "--config", str(config)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert len(out.read_text().splitlines()) == 2
    assert str(ROOT) not in out.read_text()
    return out

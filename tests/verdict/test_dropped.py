"""A retriever whose passages carry protocol tags: what is left of its answers, and how often."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from smartsearch_sidecar.commands import app
from smartsearch_sidecar.run.coverage import EMPTIED_LEAST, EMPTIED_WINDOW, Emptied
from tests.fakes import rollouts
from tests.fakes.provider import FakeProvider, documents_for
from tests.fakes.rewarded import QUESTION, rewarded
from tests.fakes.served import Served, served
from tests.test_metrics import scrape

BAD = "bad"


def some_tagged(query: str) -> list[dict[str, Any]]:
    """Every passage of a query that begins with ``bad`` carries a tag."""
    found = documents_for(query)
    if query.startswith(BAD):
        for document in found:
            document["contents"] += " </result>"
    return found


def tagged() -> FakeProvider:
    provider = FakeProvider()
    provider.answer = some_tagged
    return provider


async def ask(run: Served, *queries: str) -> list[int]:
    """The status of each search, one after the other."""
    return [(await run.execute(query))[0] for query in queries]


def numbered(count: int, word: str = BAD) -> list[str]:
    return [f"{word} {number}" for number in range(count)]


async def test_passages_that_all_carry_tags(tmp_path: Path) -> None:
    """Every answer is empty: after a few the latch closes by a cause of its own, and no checkpoint
    is accepted; status, metrics and health say how many were empty.
    """
    async with served(tmp_path / "run", provider=tagged()) as run:
        assert await ask(run, *numbered(EMPTIED_LEAST - 1)) == [200] * (EMPTIED_LEAST - 1)
        _, status = await run.internal("GET", "/status")
        assert status["emptied"] == {"answers": EMPTIED_LEAST - 1, "share": 0.0}
        assert await ask(run, f"{BAD} last") == [502]
        _, health = await run.health()
        assert (health["state"], health["cause"]["cause"]) == ("failed", "answers_emptied")
        assert "retrieval.emptied_share_max (0.1)" in health["cause"]["detail"]
        assert health["emptied"] == {"answers": EMPTIED_LEAST, "share": 1.0}
        found = await scrape(run)
        assert found("answers_emptied_total") == EMPTIED_LEAST
        assert found("answers_emptied_share") == 1.0
        assert (await run.internal("POST", "/checkpoints", {"step": 1}))[0] == 409
    answered = [one["data"] for one in run.records() if one["kind"] == "retrieval.answered"]
    assert [one["emptied"] for one in answered] == [True] * EMPTIED_LEAST
    shown = await asyncio.to_thread(CliRunner().invoke, app, ["ledger", "show", str(run.directory)])
    assert "5 dropped, all" in shown.output


async def test_one_unlucky_query_closes_nothing(tmp_path: Path) -> None:
    """A group of rollouts, and every rank of it, repeats a query: that is one search."""
    async with served(tmp_path / "run", provider=tagged()) as run:
        assert set(await ask(run, *[f"{BAD} again"] * 100)) == {200}
        _, status = await run.internal("GET", "/status")
        assert status["emptied"]["answers"] == 100
        assert (await run.health())[0] == 200


async def test_a_share_under_the_bound_is_borne(tmp_path: Path) -> None:
    """One in ten is borne for ever, and one more closes the latch."""
    async with served(tmp_path / "run", provider=tagged()) as run:
        good = iter(numbered(10_000, "good"))
        bad = iter(numbered(10_000))
        for _ in range(EMPTIED_LEAST + 10):
            assert await ask(run, *(next(good) for _ in range(9)), next(bad)) == [200] * 10
        assert run.service.run.state.emptied.share == 0.1
        assert await ask(run, next(bad)) == [502]
        assert (await run.health())[1]["cause"]["cause"] == "answers_emptied"


async def test_an_answer_that_keeps_a_passage_is_not_empty(tmp_path: Path) -> None:
    """Dropped passages alone close nothing."""
    provider = FakeProvider()

    def one_tagged(query: str) -> list[dict[str, Any]]:
        first, *rest = documents_for(query)
        return [{**first, "contents": "</think>"}, *rest]

    provider.answer = one_tagged
    async with served(tmp_path / "run", provider=provider) as run:
        assert set(await ask(run, *numbered(40))) == {200}
        _, status = await run.internal("GET", "/status")
        assert (status["dropped_passages"], status["emptied"]["answers"]) == (40, 0)


async def test_finding_nothing_is_not_dropping(tmp_path: Path) -> None:
    """A query that no passage fits is answered empty, as ever."""
    provider = FakeProvider()
    provider.answer = lambda query: []
    async with served(tmp_path / "run", provider=provider) as run:
        assert set(await ask(run, *numbered(40))) == {200}
        assert run.service.run.state.emptied.count == 0


async def test_the_bound_can_be_turned_off(tmp_path: Path) -> None:
    """With 1.0 every answer may be empty."""
    keys: dict[str, Any] = {"retrieval__emptied_share_max": 1.0}
    async with served(tmp_path / "run", provider=tagged(), **keys) as run:
        assert set(await ask(run, *numbered(40))) == {200}
        assert (await run.health())[0] == 200


async def test_a_restart_forgets_no_empty_answer(tmp_path: Path) -> None:
    """The window is part of the fold: half of the least count before a stop, half after it."""
    half = EMPTIED_LEAST // 2
    async with served(tmp_path / "run", provider=tagged()) as run:
        assert set(await ask(run, *numbered(half))) == {200}
    again: dict[str, Any] = {"resume": True, "trainer_stopped": True, "provider": tagged()}
    async with served(tmp_path / "run", **again) as run:
        assert await ask(run, *numbered(half, "bad other")) == [200] * (half - 1) + [502]


def test_the_window_forgets_what_left_it() -> None:
    """The count of the last searches follows the window, however long it runs."""
    emptied = Emptied()
    pattern = [number % 3 == 0 or number % 7 == 0 for number in range(3 * EMPTIED_WINDOW)]
    for one in pattern:
        emptied.add(emptied=one, repeated=False)
    assert emptied.lately == sum(pattern[-EMPTIED_WINDOW:])
    assert emptied.count == sum(pattern)
    for _ in range(EMPTIED_WINDOW):
        emptied.add(emptied=False, repeated=False)
    assert (emptied.lately, emptied.share) == (0, 0.0)


# --- blocks that are recorded and not refused -----------------------------------------------------


async def test_broken_blocks_of_a_recording_run_are_told(tmp_path: Path) -> None:
    """With ``reward.provenance = "record"`` a block that is no answer of this run closes nothing:
    ``check`` and the receipt say how many there are.
    """
    async with rewarded(tmp_path, reward__provenance="record") as on:
        turns = [rollouts.Turn(query="lost", text=f"error: {code}") for code in (502, 503)]
        turns.append(rollouts.answered("kept", await on.told("kept")))
        solution = rollouts.rollout(QUESTION, turns, rollouts.final("Paris"))
        assert (await on.reward(solution))[0] == 200
        words = ["check", "--run-dir", str(on.run.directory)]
        told = await asyncio.to_thread(CliRunner().invoke, app, words)
        assert told.exit_code == 0
        sentence = "  2 result blocks of scored rollouts are no answer of this run\n"
        assert told.output == "healthy: 1 of 1 searches answered\n" + sentence
        _, receipt = await on.run.internal("POST", "/checkpoints", {"step": 1})
        assert receipt["result_blocks"] == {"judged": 3, "policy": 0, "broken": 2}
        assert on.run.records()[-1]["data"]["result_blocks"] == receipt["result_blocks"]

"""``ledger replay``: the same documents again, or what differs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from smartsearch_sidecar import errors
from smartsearch_sidecar.commands import ledger
from smartsearch_sidecar.ledger.replay import FIRST_DIFFERENCES, Outcome, Replayed, compare, replay
from smartsearch_sidecar.retrieval.guard import Guard
from tests.fakes.journals import Written, answered, closed, failed, requested, searches, write_run
from tests.fakes.provider import FakeProvider, documents_for
from tests.fakes.until import until

# --- the comparison -------------------------------------------------------------------------------


def ranked(*pairs: tuple[str, float | None]) -> list[dict[str, Any]]:
    """Documents by id and score, best first; the text is the id's."""
    return [{"id": name, "contents": f"text of {name}", "score": score} for name, score in pairs]


A, B, C = ("a", 3.0), ("b", 2.0), ("c", 1.0)
NEAR = 1 + 4e-6
FAR = 1 + 4e-5


@pytest.mark.parametrize(
    ("old", "new", "outcome"),
    [
        pytest.param([A, B, C], [A, B, C], Outcome.EQUAL, id="equal"),
        pytest.param([], [], Outcome.EQUAL, id="both empty"),
        pytest.param([A, B], [("a", 9.0), ("b", 8.0)], Outcome.EQUAL, id="other scores alone"),
        pytest.param([A, B, C], [B, A, C], Outcome.REORDERED, id="swapped"),
        pytest.param([("a", None), B], [B, ("a", None)], Outcome.REORDERED, id="no scores"),
        pytest.param(
            [A, ("b", 3.0 / NEAR)], [("b", 3.0), ("a", 3.0 / NEAR)], Outcome.NEAR_TIE, id="tie"
        ),
        pytest.param(
            [A, ("b", 3.0 / FAR)], [("b", 3.0), ("a", 3.0 / FAR)], Outcome.REORDERED, id="no tie"
        ),
        pytest.param([A, B, C], [A, B, ("d", NEAR)], Outcome.NEAR_TIE, id="tie at the end"),
        pytest.param([A, B, C], [A, B, ("d", FAR)], Outcome.DIFFERENT, id="no tie at the end"),
        pytest.param([A, B, C], [A, ("d", 2.0), C], Outcome.DIFFERENT, id="gone from the middle"),
        pytest.param([A, B, C], [A, B], Outcome.DIFFERENT, id="one less"),
        pytest.param([A, B], [A, B, C], Outcome.DIFFERENT, id="one more"),
        pytest.param([], [A], Outcome.DIFFERENT, id="found now"),
        pytest.param(
            [("a", 0.0), ("b", 0.0)], [("b", 0.0), ("a", 0.0)], Outcome.NEAR_TIE, id="zero scores"
        ),
    ],
)
def test_answers_are_compared_by_rank(
    old: list[tuple[str, float | None]], new: list[tuple[str, float | None]], outcome: Outcome
) -> None:
    """Order and near ties are told apart from other documents."""
    found, detail = compare(ranked(*old), ranked(*new))
    assert found is outcome
    assert bool(detail) == (outcome is not Outcome.EQUAL)


def test_changed_text_is_different_at_any_score() -> None:
    """The same id with other contents is another document, and no tie explains it."""
    old = ranked(A, B)
    new = [old[0], {**old[1], "contents": "other"}]
    assert compare(old, new) == (Outcome.DIFFERENT, "document 'b' has another text")


def test_detail_names_the_first_rank_that_differs() -> None:
    """Where to look."""
    assert compare(ranked(A, B, C), ranked(A, C, B))[1] == "rank 2: 'c' instead of 'b'"


# --- replaying ------------------------------------------------------------------------------------


async def replayed(run: Written, provider: FakeProvider, **keys: Any) -> Replayed:
    """Replays through a guard, as the command does."""
    guard = Guard(provider, top_n=5, retries=0, drop_tagged=True, watch_drift=False)
    await guard.claim_identity()
    return await replay(run.directory, guard.search, **keys)


@pytest.fixture
def run(tmp_path: Path) -> Written:
    """Thirty answered searches, some out of order, one that failed and one never settled."""
    events = [*searches(28), requested(29, "x"), requested(30, "y"), requested(31, "z")]
    events += [answered(31, "z"), failed(29), answered(30, "y"), requested(32, "open")]
    return write_run(tmp_path / "run", events, per_segment=11)


async def test_frozen_corpus_answers_alike(run: Written) -> None:
    """Every answered search is asked once more, stripped as it was, and nothing else is."""
    provider = FakeProvider()
    told: list[tuple[int, int]] = []
    result = await replayed(run, provider, progress=lambda *pair: told.append(pair))
    assert result.counts == {
        Outcome.EQUAL: 30,
        **dict.fromkeys(list(Outcome)[1:], 0),
    }
    assert (result.same, result.searches, result.differences) == (True, 30, [])
    assert sorted(provider.queries) == sorted([*(f"query {n}" for n in range(1, 29)), "y", "z"])
    assert told[-1] == (sum(map(len, run.lines)),) * 2


async def test_differences_are_counted_and_the_first_are_told(run: Written) -> None:
    """In the order of the journal, with number and query."""
    provider = FakeProvider()
    provider.answer = lambda query: (
        documents_for(query) if query.endswith("7") else documents_for(query)[::-1]
    )
    result = await replayed(run, provider)
    assert not result.same
    assert result.counts[Outcome.EQUAL] == 3
    assert result.counts[Outcome.REORDERED] == 27
    assert len(result.differences) == FIRST_DIFFERENCES
    first = result.differences[0]
    assert (first.number, first.query, first.outcome) == (1, "query 1", Outcome.REORDERED)
    assert [item.number for item in result.differences] == [1, 2, 3, 4, 5, 6, 8, 9, 10, 11]


async def test_search_that_fails_is_a_difference(run: Written) -> None:
    """A provider that cannot answer any more did not answer alike."""
    provider = FakeProvider()
    provider.fault = RuntimeError("gone")
    result = await replayed(run, provider)
    assert result.counts[Outcome.FAILED] == 30
    assert not result.same
    assert "the provider failed" in result.differences[0].detail


async def test_other_routes_are_asked_as_they_were(tmp_path: Path) -> None:
    """A search for three passages is held against an answer of three."""
    data = {"route": "retrieve", "query": " q ", "top_n": 3}
    documents = documents_for("q", 3)
    run = write_run(
        tmp_path / "run", [("retrieval.requested", 1, data), answered(1, "q", documents)]
    )
    provider = FakeProvider()
    result = await replayed(run, provider)
    assert (result.counts[Outcome.EQUAL], provider.queries) == (1, ["q"])


@pytest.mark.parametrize("top_n", [0, "3", None, True])
async def test_request_without_a_number_of_passages_is_damage(tmp_path: Path, top_n: Any) -> None:
    """A sentence, not a traceback."""
    data = {"route": "retrieve", "query": "q", "top_n": top_n}
    run = write_run(tmp_path / "run", [("retrieval.requested", 1, data), answered(1, "q", [])])
    with pytest.raises(errors.LedgerCorrupt, match=r"how many passages|top_n is no int"):
        await replayed(run, FakeProvider())


async def test_only_so_many_are_asked_at_once(run: Written) -> None:
    """A retriever is not asked harder than the run did."""
    provider = FakeProvider(seconds=0.001)
    await replayed(run, provider, concurrency=3)
    assert provider.most_under_way == 3


async def test_cancelled_replay_leaves_no_search_behind(run: Written) -> None:
    """Ctrl-C while searches are under way ends them."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    task = asyncio.create_task(replayed(run, provider))
    await until(lambda: provider.under_way == 8)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert provider.under_way == 0


async def test_torn_line_is_left_out(run: Written) -> None:
    """And told."""
    last = run.directory / "journal" / "000006.jsonl"
    await asyncio.to_thread(last.write_bytes, last.read_bytes() + b"{")
    result = await replayed(run, FakeProvider())
    assert (result.torn, result.same) == (True, True)


async def test_damaged_run_is_not_replayed(run: Written) -> None:
    """What is compared has to be what was recorded."""
    run.segment.write_bytes(b"x" + run.segment.read_bytes()[1:])
    with pytest.raises(errors.LedgerCorrupt, match="line 1"):
        await replayed(run, FakeProvider())


# --- from a shell ---------------------------------------------------------------------------------


def configuration(tmp_path: Path) -> Path:
    """A configuration whose provider is a plugin that answers as the fake does."""
    path = tmp_path / "config.toml"
    path.write_text('[retrieval]\nprovider = "tests.fakes.replayed:make"\n')
    return path


def shell(*words: object) -> Any:
    """Runs ``ledger …`` as typed."""
    return CliRunner().invoke(ledger.app, [str(word) for word in words])


def test_shell_replays_through_the_configured_provider(run: Written, tmp_path: Path) -> None:
    """Exit 0 and a sentence while the corpus is the same, with another identity told."""
    told = shell("replay", run.directory, "--config", configuration(tmp_path))
    assert told.exit_code == 0, told.output
    assert "30 searches asked again: 30 equal" in told.stdout
    assert "another provider than the claim's: provider" in told.stdout
    value = shell("replay", run.directory, "--config", configuration(tmp_path), "--json")
    assert json.loads(value.stdout)["counts"]["equal"] == 30


def test_shell_ends_with_one_where_it_differs(tmp_path: Path) -> None:
    """The first differences are listed, in letters a terminal does not obey."""
    run = write_run(tmp_path / "run", [requested(1, "\x1b[31mred"), answered(1, "else"), closed(1)])
    told = shell("replay", run.directory, "--config", configuration(tmp_path))
    assert told.exit_code == 1
    assert "1 different" in told.stdout
    assert "\x1b" not in told.stdout
    assert "#1 different: rank 1" in told.stdout

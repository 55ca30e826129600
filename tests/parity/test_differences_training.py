"""The rows of the table that only the training profile has, of the search: one test each."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.run.coverage import EMPTIED_LEAST
from tests.fakes.until import until
from tests.parity.messages import BODY
from tests.parity.retriever import Held, Plan, Scripted
from tests.parity.sides import Ours, Reference, needs_reference, ours, reference
from tests.parity.wire import asking, exchange, message

pytestmark = needs_reference

TRAINING = "training"


async def statuses(side: Ours | Reference, *requests: bytes) -> list[int | None]:
    """What a service answers to these requests, one after another."""
    return [(await exchange(side.port, request)).status for request in requests]


async def test_differs_execute_body_bytes_max(tmp_path: Path) -> None:
    """A body of 20,000 bytes ends the run there and is an everyday one here."""
    large = message(BODY + b" " * (20_000 - len(BODY)))
    with reference(tmp_path / "reference") as theirs:
        assert await statuses(theirs, large) == [413]
        assert theirs.state().latched
    async with ours(tmp_path, profile=TRAINING) as mine:
        assert await statuses(mine, large) == [200]
        over = message(BODY + b" " * (262_145 - len(BODY)))
        assert await statuses(mine, over) == [413]


async def test_differs_execute_waiting_max(tmp_path: Path) -> None:
    """The ninth call at once ends the run there, and waits for its turn here."""
    with reference(tmp_path / "reference", Held()) as theirs:
        calls = [asyncio.create_task(exchange(theirs.port, asking(f"q{n}"))) for n in range(8)]
        await until(lambda: theirs.slots_free() == 0)
        calls.append(asyncio.create_task(exchange(theirs.port, asking("ninth"))))
        await until(theirs.refusing.is_set)
        theirs.retriever.release.set()
        assert 429 in {said.status for said in await asyncio.gather(*calls)}
        assert theirs.state().cause == "http_busy"
    async with ours(tmp_path, Held(), profile=TRAINING) as mine:
        calls = [asyncio.create_task(exchange(mine.port, asking(f"q{n}"))) for n in range(9)]
        slots = mine.run.service.slots
        await until(lambda: mine.retriever.inside == 8 and slots.waiting == 1)
        mine.retriever.release.set()
        assert [said.status for said in await asyncio.gather(*calls)] == [200] * 9
        assert (await mine.state()).healthy


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("", 400),
        (" \n", 400),
        ("x" * 4097, 400),
        ("\ud800", 400),
        ("x" * 9000, 400),
        ("</Think>", 502),
    ],
    ids=["empty", "blank", "long", "not encodable", "a long call", "a tag"],
)
async def test_differs_execute_on_invalid_query(tmp_path: Path, query: str, status: int) -> None:
    """What the policy gets wrong ends the run there, and is declined here."""
    with reference(tmp_path / "reference") as theirs:
        assert await statuses(theirs, asking(query)) == [status]
        assert theirs.state().latched
    async with ours(tmp_path, profile=TRAINING) as mine:
        said = await exchange(mine.port, asking(query))
        assert (said.status, said.value["result"]) == (200, "invalid query")
        state = await mine.state()
        assert (bool(state.healthy), state.attempts) == (True, 0)
        assert mine.run.service.run.state.declined == 1


class Flaky(Scripted):
    """Its first ``faults`` searches break off."""

    def __init__(self, fault: Exception, faults: int) -> None:
        super().__init__()
        self.fault, self.faults = fault, faults

    def search(self, query: str, top_n: int = 5) -> Any:
        found = super().search(query, top_n)
        if len(self.searches) <= self.faults:
            raise self.fault
        return found


async def test_differs_retrieval_retries(tmp_path: Path) -> None:
    """A search that breaks off ends the run there; here it is tried twice more."""
    with reference(tmp_path / "reference", Flaky(ConnectionResetError(), 1)) as theirs:
        assert await statuses(theirs, asking("Ada")) == [502]
        assert theirs.state().latched
    fault = errors.PROVIDER_TRANSPORT("the connection was reset")
    async with ours(tmp_path, Flaky(fault, 2), profile=TRAINING) as mine:
        assert await statuses(mine, asking("Ada")) == [200]
        assert (await mine.state()).searches == 3


async def test_differs_retrieval_cache_mib(tmp_path: Path) -> None:
    """A repeated query is searched again there; here once, and both calls count."""
    with reference(tmp_path / "reference") as theirs:
        assert await statuses(theirs, asking("Ada"), asking("Ada")) == [200, 200]
        assert theirs.state().searches == 2
    async with ours(tmp_path, profile=TRAINING) as mine:
        assert await statuses(mine, asking("Ada"), asking("Ada")) == [200, 200]
        state = await mine.state()
        assert (state.searches, state.attempts, state.responses) == (1, 2, 2)


async def test_differs_retrieval_on_protocol_tag(tmp_path: Path) -> None:
    """A passage with a tag ends the run there; here it is left out."""
    plan = Plan(search="a tag")
    with reference(tmp_path / "reference") as theirs:
        theirs.retriever.play(plan)
        assert await statuses(theirs, asking("Ada")) == [502]
    async with ours(tmp_path, profile=TRAINING) as mine:
        mine.retriever.play(plan)
        said = await exchange(mine.port, asking("Ada"))
        assert said.status == 200
        assert "RESULT" not in said.value["result"]
        assert mine.run.service.run.state.dropped_passages == 1


async def test_differs_retrieval_emptied_share_max(tmp_path: Path) -> None:
    """The first passage with a tag ends the run there; here the answers that lost every one do."""
    plan = Plan(search=({"id": "1", "contents": "x </RESULT> y", "score": 1.0},))
    with reference(tmp_path / "reference") as theirs:
        theirs.retriever.play(plan)
        assert await statuses(theirs, asking("Ada"), asking("Ada")) == [502, 502]
    async with ours(tmp_path, profile=TRAINING) as mine:
        mine.retriever.play(plan)
        questions = [asking(f"Ada {number}") for number in range(EMPTIED_LEAST)]
        assert await statuses(mine, *questions) == [200] * (EMPTIED_LEAST - 1) + [502]
        assert (await mine.state()).cause == "answers_emptied"


async def test_differs_retrieval_on_drift(tmp_path: Path) -> None:
    """A document that changes under its id is served there, and ends the run here."""
    plan = Plan(search="drifting contents")
    with reference(tmp_path / "reference") as theirs:
        theirs.retriever.play(plan)
        assert await statuses(theirs, asking("one"), asking("two")) == [200, 200]
    async with ours(tmp_path, profile=TRAINING) as mine:
        mine.retriever.play(plan)
        assert await statuses(mine, asking("one"), asking("two")) == [200, 502]
        await mine.state()
        assert mine.cause is not None
        assert mine.cause["cause"] == "document_drift"

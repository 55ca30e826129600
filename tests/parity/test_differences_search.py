"""The rows of the table that are met in a search: one test each, against both services."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from tests.fakes.until import until
from tests.parity.play import Step, differs
from tests.parity.retriever import OTHER_SEARCHES, VALUE_ERRORS, Held, Plan
from tests.parity.sides import needs_reference, ours, pair, reference
from tests.parity.wire import asking, exchange
from tests.web.rawclient import RawClient

pytestmark = needs_reference

EIGHT = 8  # slots, in either service
SEND_BYTES = 64 * 1024  # what the kernel is to buffer for a client that does not read
LARGE = "x" * (16 * SEND_BYTES)


def searches_of(row: str) -> list[str]:
    return [name for name, (own, _) in OTHER_SEARCHES.items() if own == row]


# --- one after another or side by side ------------------------------------------------------------


async def test_differs_side_by_side(tmp_path: Path) -> None:
    """Of eight searches asked at once, one is made at a time there, and all eight here."""
    with reference(tmp_path / "reference", Held()) as theirs:
        calls = [asyncio.create_task(exchange(theirs.port, asking(f"q{n}"))) for n in range(EIGHT)]
        await until(lambda: theirs.slots_free() == 0)
        theirs.retriever.release.set()
        assert [said.status for said in await asyncio.gather(*calls)] == [200] * EIGHT
        assert theirs.retriever.most_inside == 1
    async with ours(tmp_path, Held()) as mine:
        calls = [asyncio.create_task(exchange(mine.port, asking(f"q{n}"))) for n in range(EIGHT)]
        await until(lambda: mine.retriever.inside == EIGHT)
        mine.retriever.release.set()
        assert [said.status for said in await asyncio.gather(*calls)] == [200] * EIGHT


async def test_differs_under_way(tmp_path: Path) -> None:
    """The ninth call at once is 429 and latches in either service; of the eight before it the one
    whose search was under way is answered there, none here.
    """
    with reference(tmp_path / "reference", Held()) as theirs:
        calls = [asyncio.create_task(exchange(theirs.port, asking(f"q{n}"))) for n in range(EIGHT)]
        await until(lambda: theirs.slots_free() == 0 and theirs.retriever.inside == 1)
        ninth = asyncio.create_task(exchange(theirs.port, asking("ninth")))
        await until(theirs.refusing.is_set)
        theirs.retriever.release.set()
        said = await ninth
        assert (said.status, said.code) == (429, "busy")
        # The refusal and the seven others wait for one lock, which keeps no order.
        assert 200 in {said.status for said in await asyncio.gather(*calls)}
        assert theirs.state().cause == "http_busy"
    async with ours(tmp_path, Held()) as mine:
        calls = [asyncio.create_task(exchange(mine.port, asking(f"q{n}"))) for n in range(EIGHT)]
        await until(lambda: mine.retriever.inside == EIGHT)
        said = await exchange(mine.port, asking("ninth"))
        assert (said.status, said.code) == (429, "busy")
        mine.retriever.release.set()
        assert [said.status for said in await asyncio.gather(*calls)] == [502] * EIGHT
        state = await mine.state()
        assert (state.cause, state.responses) == ("http_busy", EIGHT)


async def test_differs_slot_before_answer(tmp_path: Path) -> None:
    """Eight clients that do not read their answers keep every slot there, and none here."""
    plan = Plan(search=({"id": "1", "contents": LARGE},))
    with reference(tmp_path / "reference") as theirs:
        theirs.retriever.play(plan)
        theirs.server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        readers = await _eight_that_do_not_read(theirs.port)
        await until(lambda: theirs.service.responses == EIGHT)
        assert (await exchange(theirs.port, asking("ninth"))).status == 429
        for client in readers:
            client.reset()
    async with ours(tmp_path) as mine:
        mine.retriever.play(plan)
        (listener,) = mine.run.daemon._listeners
        listener.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        readers = await _eight_that_do_not_read(mine.port)
        state, slots = mine.run.service.run.state, mine.run.service.slots
        await until(lambda: state.responses == EIGHT and slots.idle)
        mine.retriever.play(Plan())
        assert (await exchange(mine.port, asking("ninth"))).status == 200
        for client in readers:
            client.reset()


async def _eight_that_do_not_read(port: int) -> list[RawClient]:
    clients = []
    for number in range(EIGHT):
        client = await RawClient.connect(("127.0.0.1", port), receive_bytes=4096)
        await client.send(asking(f"q{number}"))
        clients.append(client)
    return clients


async def test_differs_deadline(tmp_path: Path) -> None:
    """A search that takes long is waited for there; here it ends at the deadline, and the run."""
    with reference(tmp_path / "reference", Held()) as theirs:
        async with ours(tmp_path, Held(), execute__deadline_seconds=0.2) as mine:
            patient = asyncio.create_task(exchange(theirs.port, asking("slow")))
            said = await exchange(mine.port, asking("slow"))
            assert (said.status, said.code) == (504, "deadline")
            assert (await mine.state()).cause == "attempt failed"
            assert mine.cause is not None
            assert mine.cause["cause"] == "deadline"
            theirs.retriever.release.set()
            assert (await patient).status == 200
            mine.retriever.release.set()


# --- what a retriever brings ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan",
    [
        *(Plan(search=name) for name in sorted(VALUE_ERRORS)),
        Plan(before="raises ValueError"),
        Plan(after="raises ValueError"),
    ],
    ids=str,
)
async def test_differs_provider_value_error(tmp_path: Path, plan: Plan) -> None:
    """A retriever's ValueError is the caller's mistake there and the retriever's here."""
    await differs(tmp_path, Step(asking("Ada"), plan), "provider_value_error")


async def test_differs_provider_exit(tmp_path: Path) -> None:
    """A retriever that exits leaves the run open there, its attempt unsettled; here it fails."""
    step = Step(asking("Ada"), Plan(search="raises SystemExit"))
    moment = await differs(tmp_path, step, "provider_exit")
    assert (moment.their_state.latched, moment.their_state.healthy) == (False, None)
    assert (moment.our_state.latched, moment.our_cause) == (True, "retrieval_failed")


async def _brought(tmp_path: Path, name: str, row: str) -> None:
    moment = await differs(tmp_path, Step(asking("Ada"), Plan(search=name)), row)
    assert moment.our_cause == "document_invalid"
    assert moment.our_state.consumed


@pytest.mark.parametrize("name", searches_of("not_documents"))
async def test_differs_not_documents(tmp_path: Path, name: str) -> None:
    """Something empty that is no list of documents is nothing found there, and a fault here."""
    await _brought(tmp_path, name, "not_documents")


@pytest.mark.parametrize("name", searches_of("score_range"))
async def test_differs_score_range(tmp_path: Path, name: str) -> None:
    """A score beyond 64 bits is kept there, and a fault here."""
    await _brought(tmp_path, name, "score_range")


@pytest.mark.parametrize("name", searches_of("special_tokens"))
async def test_differs_special_tokens(tmp_path: Path, name: str) -> None:
    """A passage with a special token is given there; here it counts as one with a tag."""
    await _brought(tmp_path, name, "special_tokens")


async def test_differs_health_asks(tmp_path: Path) -> None:
    """An index swapped after the last search is healthy there; here asking for health ends it."""
    async with pair(tmp_path) as both:
        both.play(Plan(before="another index"))
        assert both.reference.state().healthy
        state = await both.ours.state()
        assert (state.healthy, state.cause) == (None, "in memory only")
        assert both.ours.cause is not None
        assert both.ours.cause["cause"] == "identity_changed"

"""Other trainers' clients over real HTTP: their bytes in, what they read out, and what is recorded.

The requests are those of the clients themselves, header for header. What each of them makes of an
answer is written down again here in a line or two.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.contract.other_clients import QUERIES_MAX, Form, Query, Searches
from smartsearch_sidecar.ledger.disk import Disk
from smartsearch_sidecar.search.service import AHEAD_RECORDS, AT_ONCE, search_many
from tests.fakes.provider import FakeProvider, documents_for
from tests.fakes.served import EXECUTE_CAPABILITY, Served, read_records, served
from tests.fakes.until import until
from tests.web.rawclient import Answer, RawClient

ALL: dict[str, Any] = {"execute__routes": ["execute", "search", "retrieve"]}
QUERY = 'Ada "é" 東'


def nested(queries: list[Any], topk: int = 3) -> dict[str, Any]:
    """What Search-R1 posts to ``/retrieve``."""
    return {"queries": queries, "topk": topk, "return_scores": True}


async def ask(run: Served, value: Any, path: str = "/retrieve") -> tuple[int, Any]:
    return await run.post(json.dumps(value).encode(), path=path)


def kinds(run: Served) -> list[str]:
    return [str(record["kind"]) for record in run.records()]


async def cause(run: Served) -> str:
    status, health = await run.health()
    assert (status, health["state"]) == (503, "failed")
    return str(health["cause"]["cause"])


# --- the clients ----------------------------------------------------------------------------------

REQUESTS = (
    "User-Agent: python-requests/2.34.2\r\nAccept-Encoding: gzip, deflate\r\nAccept: */*\r\n"
    "Connection: keep-alive\r\nContent-Length: {length}\r\nContent-Type: application/json\r\n"
)
SKYRL = (
    "User-Agent: python-requests/2.34.2\r\nAccept-Encoding: gzip, deflate\r\n"
    "Accept: application/json\r\nConnection: keep-alive\r\nContent-Type: application/json\r\n"
    "Content-Length: {length}\r\n"
)
AIOHTTP = (
    "Accept: */*\r\nAccept-Encoding: gzip, deflate\r\nUser-Agent: Python/3.11 aiohttp/3.14.5\r\n"
    "Content-Length: {length}\r\nContent-Type: application/json\r\n"
)
HTTPX = (
    "Accept: */*\r\nAccept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\n"
    "User-Agent: python-httpx/0.28.1\r\nContent-Length: {length}\r\n"
    "Content-Type: application/json\r\n"
)
ASKED = r'"Ada \"\u00e9\" \u6771"'

CLIENTS: dict[str, tuple[str, str, str]] = {
    "search-r1": (
        "retrieve",
        REQUESTS,
        f'{{"queries": [{ASKED}, "Bob"], "topk": 3, "return_scores": true}}',
    ),
    "slime": (
        "retrieve",
        AIOHTTP,
        f'{{"queries": [{ASKED}], "topk": 3, "return_scores": false}}',
    ),
    "skyrl-gym": ("retrieve", SKYRL, f'{{"query": {ASKED}, "topk": 3, "return_scores": true}}'),
    "skyrl-agent": (
        "retrieve",
        SKYRL,
        f'{{"queries": [{ASKED}], "topk": 3, "return_scores": true}}',
    ),
    "rllm": ("retrieve", HTTPX, '{"query":"Ada \\"é\\" 東","top_k":3}'),
    "environment": ("search", REQUESTS, f'{{"query": {ASKED}, "top_n": 5}}'),
    "flashrag": (
        "batch_search",
        REQUESTS,
        f'{{"query": [{ASKED}, "Bob"], "top_n": 5, "return_score": false}}',
    ),
}


async def sent(client: RawClient, port: int, name: str) -> Answer:
    """One request of a client as it stands on the wire."""
    segment, headers, text = CLIENTS[name]
    body = text.encode()
    head = (
        f"POST /{EXECUTE_CAPABILITY}/{segment} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        + headers.format(length=len(body))
        + "\r\n"
    )
    await client.send(head.encode() + body)
    return await client.answer()


def contents_read(name: str, value: Any) -> list[list[str]]:
    """The passages of each query as this client takes them out of an answer."""
    if name in ("search-r1", "skyrl-gym", "skyrl-agent"):
        return [[item["document"]["contents"] for item in found] for found in value["result"]]
    if name == "slime":
        return [[item.get("contents", "") for item in value.get("result", [[]])[0]]]
    if name == "rllm":
        return [[item.get("content", "").get("contents") for item in value.get("results", [])]]
    return [
        [line["contents"] for line in found] for found in (value if name == "flashrag" else [value])
    ]


@pytest.mark.parametrize("name", CLIENTS)
async def test_each_client_reads_its_passages(tmp_path: Path, name: str) -> None:
    """The bytes a client sends are answered in the form it reads, on a connection that it keeps."""
    async with served(tmp_path / "run", **ALL) as run:
        client = await RawClient.connect(("127.0.0.1", run.port))
        answers = [await sent(client, run.port, name) for _ in range(2)]
        client.close()
        count = 5 if name in ("environment", "flashrag") else 3
        queries = [QUERY, "Bob"] if name in ("search-r1", "flashrag") else [QUERY]
        for answer in answers:
            assert answer.status == 200
            assert answer.headers["content-type"] == "application/json"
            assert contents_read(name, json.loads(answer.body)) == [
                [document["contents"] for document in documents_for(query, count)]
                for query in queries
            ]
        assert run.provider.queries == queries
        health = (await run.health())[1]
        assert health["retrieval_attempts"] == health["retrieval_responses"] == 2 * len(queries)
        assert health["cache"] == {"miss": len(queries), "hit": len(queries)}


@pytest.mark.parametrize("name", CLIENTS)
async def test_each_client_notices_a_failure(tmp_path: Path, name: str) -> None:
    """What a client turns into an exception anyhow stays an error status; slime's gets a 200.

    SkyRL and rLLM put words of their own in an error's place, and try or stop by its status.
    """
    provider = FakeProvider()
    provider.fault = RuntimeError("broken")
    async with served(tmp_path / "run", provider=provider, **ALL) as run:
        client = await RawClient.connect(("127.0.0.1", run.port))
        answers = [await sent(client, run.port, name) for _ in range(2)]
        client.close()
        for answer in answers:
            value = json.loads(answer.body)
            assert answer.status == (200 if name == "slime" else 502)
            assert value["error"]["code"] == "retrieval_failed"
            assert EXECUTE_CAPABILITY.encode() not in answer.raw
            if name in ("search-r1", "slime", "environment", "flashrag"):
                with pytest.raises((KeyError, TypeError)):
                    contents_read(name, value)
        assert await cause(run) == "retrieval_failed"


# --- which routes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("routes", "open_segments"),
    [
        (["execute", "search"], {"execute", "search", "batch_search"}),
        (["retrieve"], {"retrieve"}),
        (["search", "retrieve"], {"search", "batch_search", "retrieve"}),
    ],
)
async def test_only_what_is_named_is_served(
    tmp_path: Path, routes: list[str], open_segments: set[str]
) -> None:
    """A route that ``execute.routes`` does not name is one that does not exist."""
    bodies: dict[str, Any] = {
        "search": {"query": "q", "top_n": 5},
        "batch_search": {"query": ["q"], "top_n": 5},
        "retrieve": nested(["q"]),
    }
    for segment in ("execute", "search", "batch_search", "retrieve"):
        async with served(tmp_path / segment, execute__routes=routes) as run:
            if segment == "execute":
                status, value = await run.execute("q")
            else:
                status, value = await ask(run, bodies[segment], f"/{segment}")
            if segment in open_segments:
                assert status == 200
            else:
                assert (status, value["error"]["code"]) == (404, "not_found")
                assert await cause(run) == "http_not_found"


@pytest.mark.parametrize("segment", ["search", "batch_search", "retrieve"])
async def test_other_methods_close_the_latch(tmp_path: Path, segment: str) -> None:
    """Clients of these routes post as well: another method is a rollout that got no answer."""
    async with served(tmp_path / "run", **ALL) as run:
        async with run.session.get(f"{run.endpoints.sandbox_url}/{segment}") as answer:
            assert answer.status == 405
        assert await cause(run) == "http_method_not_allowed"


# --- a batch --------------------------------------------------------------------------------------


async def test_a_batch_is_as_many_searches(tmp_path: Path) -> None:
    """Each query has a number of its own, in the order asked, and a record of its own."""
    async with served(tmp_path / "run", **ALL) as run:
        queries = [f" query {number} " for number in range(20)]
        status, value = await ask(run, nested(queries))
        assert status == 200
        assert [found[0]["document"]["id"] for found in value["result"]] == [
            f"query {number}#0" for number in range(20)
        ]
        requested = [r for r in run.records() if r["kind"] == "retrieval.requested"]
        assert [(r["number"], r["data"]) for r in requested] == [
            (
                number,
                {"route": "retrieve", "query": query, "top_n": 3, "item": number, "items": 20},
            )
            for number, query in enumerate(queries, 1)
        ]
        answered = [r for r in run.records() if r["kind"] == "retrieval.answered"]
        assert sorted(r["number"] for r in answered) == list(range(1, 21))
        assert {len(r["data"]["documents"]) for r in answered} == {3}
        assert (await run.health())[0] == 200
        assert await run.stop() == 0


async def test_a_single_search_is_recorded_without_its_place(tmp_path: Path) -> None:
    """There is no place to name where there is one query."""
    async with served(tmp_path / "run", **ALL) as run:
        assert (await ask(run, {"query": "q", "top_n": 5}, "/search"))[0] == 200
        assert run.records()[1]["data"] == {"route": "search", "query": "q", "top_n": 5}


async def test_a_batch_holds_one_slot_and_runs_side_by_side(tmp_path: Path) -> None:
    """With one slot and no room, the searches of one request are under way together."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    keys = {**ALL, "execute__slots": 1, "execute__waiting_max": 0}
    async with served(tmp_path / "run", provider=provider, **keys) as run:
        task = asyncio.create_task(
            ask(run, nested([f"q{number}" for number in range(AT_ONCE + 9)]))
        )
        await until(lambda: provider.under_way == AT_ONCE)
        assert run.service.slots.in_service == 1
        provider.gate.set()
        status, value = await task
        assert (status, len(value["result"])) == (200, AT_ONCE + 9)
        assert provider.most_under_way == AT_ONCE
        assert run.service.slots.idle


async def test_identical_queries_of_a_batch_are_searched_once(tmp_path: Path) -> None:
    """Every one counts and is recorded; the work is done once, also for /execute after it."""
    async with served(tmp_path / "run", **ALL) as run:
        status, value = await ask(run, {"query": ["q"] * 4, "top_n": 5}, "/batch_search")
        assert (status, len(value)) == (200, 4)
        assert (await run.execute("q"))[0] == 200
        assert run.provider.queries == ["q"]
        health = (await run.health())[1]
        assert health["cache"] == {"miss": 1, "shared": 3, "hit": 1}
        assert health["retrieval_responses"] == 5


async def test_an_empty_batch_is_answered_and_leaves_no_record(tmp_path: Path) -> None:
    """Search-R1 posts one in every step without a search; a failed run refuses it too."""
    async with served(tmp_path / "run", **ALL) as run:
        assert await ask(run, nested([])) == (200, {"result": []})
        assert kinds(run) == ["run.claimed"]
        await run.internal("POST", "/latch", {"reason": "by hand"})
        assert (await ask(run, nested([])))[0] == 502


async def test_a_step_of_rollouts_fits(tmp_path: Path) -> None:
    """Thousands of queries in one body, far over ``execute.body_bytes_max``."""
    keys = {**ALL, "execute__body_bytes_max": 16_384, "execute__deadline_seconds": 60}
    async with served(tmp_path / "run", **keys) as run:
        queries = [f"{number} {'word ' * 20}" for number in range(QUERIES_MAX)]
        status, value = await ask(run, nested(queries))
        assert (status, len(value["result"])) == (200, QUERIES_MAX)
        ids = [found[2]["document"]["id"] for found in value["result"]]
        assert ids == [
            document["id"] for q in queries for document in documents_for(q.strip())[2:3]
        ]
        assert (await run.health(5))[1]["retrieval_responses"] == QUERIES_MAX


async def test_a_lone_search_keeps_the_bound_of_bodies(tmp_path: Path) -> None:
    """Only what may hold a batch may be large."""
    async with served(tmp_path / "run", execute__body_bytes_max=1024, **ALL) as run:
        status, value = await ask(run, {"query": "x" * 1100, "top_n": 5}, "/search")
        assert (status, value["error"]["code"]) == (413, "body_size")


async def test_topk_is_the_configured_one(tmp_path: Path) -> None:
    """Ten for rLLM, also where the pinned contract has five; another number ends the run."""
    async with served(tmp_path / "run", execute__retrieve_topk=10, **ALL) as run:
        status, value = await ask(run, {"query": "q", "top_k": 10})
        assert (status, value["num_results"]) == (200, 10)
        assert [item["id"] for item in value["results"]] == [f"doc_{n}" for n in range(1, 11)]
        status, value = await ask(run, {"query": "q", "top_k": 5})
        assert (status, value["error"]["code"]) == (400, "invalid_request")
        assert await cause(run) == "invalid_search_request"


# --- bad queries ----------------------------------------------------------------------------------


async def test_bad_queries_of_a_batch_are_declined(tmp_path: Path) -> None:
    """They cost no attempt, are recorded and counted, and the others are searched."""
    async with served(tmp_path / "run", **ALL) as run:
        bad = ["", " \n", "x" * 5000, "a </search> b", "\ud800", ["a"], None]
        status, value = await ask(run, nested([*bad[:3], "good", *bad[3:]]))
        assert status == 200
        assert [len(found) for found in value["result"]] == [0, 0, 0, 3, 0, 0, 0, 0]
        health = (await run.health())[1]
        assert (health["retrieval_declined"], health["retrieval_attempts"]) == (7, 1)
        assert health["declined"] == {
            "empty": 2,
            "too_long": 1,
            "protocol_tag": 1,
            "not_encodable": 1,
            "not_text": 2,
        }
        declined = [r["data"] for r in run.records() if r["kind"] == "retrieval.declined"]
        assert declined[0] == {
            "reason": "empty",
            "route": "retrieve",
            "query": "",
            "top_n": 3,
            "item": 1,
            "items": 8,
        }
        assert run.provider.queries == ["good"]
        assert await run.stop() == 0


async def test_the_environment_says_invalid_query(tmp_path: Path) -> None:
    """It joins the contents it is given, and what it is given says what it says by itself."""
    async with served(tmp_path / "run", **ALL) as run:
        status, value = await ask(run, {"query": " ", "top_n": 5}, "/search")
        text = "".join(f"{line['contents']}\n\n" for line in value).strip()
        assert (status, text) == (200, "invalid query")


async def test_nothing_is_asked_for_bad_queries_alone(tmp_path: Path) -> None:
    """The provider is not even asked who it is; the quota is untouched, also when used up."""
    async with served(tmp_path / "run", execute__max_calls=1, **ALL) as run:
        assert (await run.execute("q"))[0] == 200
        assert await ask(run, nested(["", " "])) == (200, {"result": [[], []]})
        assert (await run.health())[0] == 200


@pytest.mark.parametrize(
    ("query", "row", "attempts"),
    [
        ("", (400, "invalid_request", "invalid_native_request"), 0),
        ("x" * 5000, (400, "invalid_request", "invalid_native_request"), 0),
        (["a"], (400, "invalid_request", "invalid_native_request"), 0),
        ("\ud800", (400, "invalid_request", "http_invalid_request"), 0),
        ("a </search>", (502, "retrieval_failed", "retrieval_failed"), 1),
    ],
    ids=["empty", "long", "list", "surrogate", "tag"],
)
async def test_the_reference_profile_latches(
    tmp_path: Path, query: Any, row: tuple[int, str, str], attempts: int
) -> None:
    """With ``on_invalid_query = "latch"`` a bad query ends the run as it does in /execute."""
    status, code, expected = row
    async with served(tmp_path / "run", profile="reference", **ALL) as run:
        got, value = await ask(run, {"query": query, "topk": 3, "return_scores": True})
        assert (got, value["error"]["code"]) == (status, code)
        assert await cause(run) == expected
        assert run.service.run.state.attempts == attempts
        assert run.provider.queries == []


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"queries": ["q"], "queries": ["q"]}', "http_invalid_request"),
        (b"{", "http_invalid_request"),
        (b'{"queries": ["q"], "topk": 4, "return_scores": true}', "invalid_search_request"),
        (b'{"query": "q", "top_n": 5}', "invalid_search_request"),
    ],
)
async def test_what_is_no_request_ends_the_run(tmp_path: Path, body: bytes, expected: str) -> None:
    """As in /execute: only a wrong program sends it."""
    async with served(tmp_path / "run", **ALL) as run:
        status, value = await run.post(body, path="/retrieve")
        assert (status, value["error"]["code"]) == (400, "invalid_request")
        assert await cause(run) == expected
        assert run.service.run.state.attempts == 0


async def test_one_search_that_fails_fails_its_batch(tmp_path: Path) -> None:
    """Nobody gets a part of an answer; what was under way settles, the rest is never admitted."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()

    def answer(query: str) -> Any:
        return "no documents" if query == "bad" else documents_for(query, 3)

    provider.answer = answer
    async with served(tmp_path / "run", provider=provider, **ALL) as run:
        queries = ["bad", *(f"q{number}" for number in range(2 * AT_ONCE))]
        task = asyncio.create_task(ask(run, nested(queries)))
        await until(lambda: provider.under_way == AT_ONCE)
        provider.gate.set()
        status, value = await task
        assert (status, value["error"]["code"]) == (502, "retrieval_failed")
        state = run.service.run.state
        assert (state.attempts, state.failed, state.responses) == (AT_ONCE, 1, AT_ONCE - 1)
        assert state.settled
        assert await cause(run) == "document_invalid"
        assert await run.stop() == 4
    assert [r["kind"] for r in read_records(tmp_path / "run")].count("latch.closed") == 1


async def test_quota_ends_in_the_middle_of_a_batch(tmp_path: Path) -> None:
    """What the quota allows is searched and recorded, and the batch is refused as a whole."""
    async with served(tmp_path / "run", execute__max_calls=3, **ALL) as run:
        status, value = await ask(run, nested([f"q{number}" for number in range(5)]))
        assert (status, value["error"]["code"]) == (429, "quota_exhausted")
        assert await cause(run) == "quota_exhausted"
        assert (run.service.run.state.attempts, run.service.run.state.settled) == (3, True)


@pytest.mark.parametrize(
    ("value", "row"),
    [(nested(["q", "r"]), (504, "deadline")), ({"queries": ["q", "r"], "topk": 3}, (200, None))],
)
async def test_deadline_bounds_the_whole_batch(
    tmp_path: Path, value: dict[str, Any], row: tuple[int, str | None]
) -> None:
    """A search still running then fails its batch; slime's client is told so with a 200."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    keys = {**ALL, "execute__deadline_seconds": 0.1}
    async with served(tmp_path / "run", provider=provider, **keys) as run:
        status, answer = await ask(run, value)
        assert status == row[0]
        assert answer["error"]["code"] == "deadline"
        assert answer.get("result") is None
        assert await cause(run) == "deadline"
        assert (run.service.run.state.attempts, run.service.run.state.failed) == (2, 2)
        provider.gate.set()


async def test_a_latch_that_closes_meanwhile_fails_the_batch(tmp_path: Path) -> None:
    """Admitted searches are settled and recorded, no other is admitted, the batch is refused."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    async with served(tmp_path / "run", provider=provider, **ALL) as run:
        queries = [*(f"q{number}" for number in range(AT_ONCE)), "", "late"]
        task = asyncio.create_task(ask(run, nested(queries)))
        await until(lambda: provider.under_way == AT_ONCE)
        await run.internal("POST", "/latch", {"reason": "by hand"})
        provider.gate.set()
        assert (await task)[0] == 502
        state = run.service.run.state
        assert (state.responses, state.declined, state.settled) == (AT_ONCE, 0, True)
        assert state.cause is not None
        assert state.cause.cause == "operator"


async def test_busy_is_told_in_the_clients_form(tmp_path: Path) -> None:
    """The form is known before the slot, so that slime's client notices a full house as well."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    keys = {**ALL, "execute__slots": 1, "execute__waiting_max": 0}
    async with served(tmp_path / "run", provider=provider, **keys) as run:
        first = asyncio.create_task(run.execute("first"))
        await until(lambda: provider.under_way == 1)
        status, value = await ask(run, {"queries": ["q"], "topk": 3, "return_scores": False})
        assert (status, value["result"], value["error"]["code"]) == (200, None, "busy")
        assert await cause(run) == "http_busy"
        provider.gate.set()
        assert (await first)[0] == 502


# --- a lost client --------------------------------------------------------------------------------


async def test_a_lost_batch_names_all_its_searches(tmp_path: Path) -> None:
    """One record names the answers that were not delivered, and the latch closes."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    async with served(tmp_path / "run", provider=provider, **ALL) as run:
        body = json.dumps(nested(["a", "b", "c"])).encode()
        client = await RawClient.connect(("127.0.0.1", run.port))
        await client.send(
            f"POST /{EXECUTE_CAPABILITY}/retrieve HTTP/1.1\r\nHost: x\r\nContent-Type: "
            f"application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await until(lambda: provider.under_way == 3)
        client.close()
        provider.gate.set()
        await until(lambda: run.service.run.state.closed)
        assert await cause(run) == "response_undelivered"
        (lost,) = [r for r in run.records() if r["kind"] == "delivery.lost"]
        assert (lost["number"], lost["data"]["others"]) == (1, [2, 3])
        assert run.service.run.state.responses == 3


def batch(*queries: str) -> Searches:
    return Searches(Form.nested_many, tuple(Query(q, None) for q in queries), 3, scores=False)


async def cancelled(run: Served, asked: Searches, ready: Any) -> None:
    began = asyncio.get_running_loop().time()
    task = asyncio.create_task(search_many(run.service, asked, began=began, gone=lambda: False))
    await until(ready)
    task.cancel()
    results = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert run.service.slots.idle
    assert run.service.run.state.settled


@pytest.mark.both_loops
@pytest.mark.parametrize("count", [1, 3])
async def test_cancelled_during_its_searches(tmp_path: Path, count: int) -> None:
    """Every search that was under way is settled as failed, and its answer named as lost."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    async with served(tmp_path / "run", provider=provider, **ALL) as run:
        asked = batch(*(f"q{number}" for number in range(count)))
        await cancelled(run, asked, lambda: provider.under_way == count)
        assert (run.service.run.state.failed, run.service.run.state.lost) == (count, count)
        assert await cause(run) == "request_cancelled"
        provider.gate.set()


class HeldDisk(Disk):
    """A disk whose syncs wait until they are let through."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()

    def sync(self, fd: int) -> None:
        self.gate.wait(10)
        super().sync(fd)


@pytest.mark.both_loops
async def test_cancelled_before_the_sync_of_its_answers(tmp_path: Path) -> None:
    """Cancelled while its records are being synced: all are recorded, and one record names them."""
    disk = HeldDisk()
    async with served(tmp_path / "run", disk=disk, **ALL) as run:
        disk.gate.clear()
        await cancelled(run, batch("a", "b"), lambda: run.service.run.state.responses == 2)
        disk.gate.set()
        assert await cause(run) == "response_undelivered"
        (lost,) = [r for r in run.records() if r["kind"] == "delivery.lost"]
        assert (lost["number"], lost["data"]["others"]) == (1, [2])


async def test_a_batch_is_answered_once_its_records_are_on_disk(tmp_path: Path) -> None:
    """No answer leaves before the sync that covers the last of its records, and a batch from the
    cache does not run ahead of the ledger without a bound.
    """
    most_ahead = 3 * AT_ONCE + 2 * AHEAD_RECORDS
    count = 2 * most_ahead
    assert count <= QUERIES_MAX
    disk = HeldDisk()
    async with served(tmp_path / "run", disk=disk, **ALL) as run:
        assert (await ask(run, nested(["q"])))[0] == 200
        disk.gate.clear()
        task = asyncio.create_task(ask(run, nested(["q"] * count)))
        await until(lambda: run.service.run.writer.queued >= AHEAD_RECORDS)
        for _ in range(20):
            await asyncio.sleep(0)
        assert run.service.run.state.responses < most_ahead
        assert not task.done()
        disk.gate.set()
        status, value = await task
        assert (status, len(value["result"])) == (200, count)
        answered = [r for r in run.records() if r["kind"] == "retrieval.answered"]
        assert len(answered) == count + 1


async def test_a_ledger_that_fails_fails_the_batch(tmp_path: Path) -> None:
    """Nothing is answered that is not recorded."""

    class FullDisk(Disk):
        full = False

        def sync(self, fd: int) -> None:
            if self.full:
                raise OSError(28, "No space left on device")
            super().sync(fd)

    disk = FullDisk()
    async with served(tmp_path / "run", disk=disk, **ALL) as run:
        disk.full = True
        status, value = await ask(run, nested(["a", "b"]))
        assert (status, value["error"]["code"]) == (503, "ledger_failed")
        assert await cause(run) == "ledger_failed"


# --- what provenance takes ------------------------------------------------------------------------


async def test_the_environments_answers_are_told_for_provenance(tmp_path: Path) -> None:
    """What the unmodified environment makes of /batch_search is a rollout's text; the answer of
    /retrieve is no text that the pinned scorer judges.
    """
    told: list[tuple[str, str]] = []
    async with served(tmp_path / "run", **ALL) as run:
        run.service.on_answer = lambda query, text: told.append((query, text))
        await ask(run, {"query": ["Ada", ""], "top_n": 5}, "/batch_search")
        await ask(run, nested(["Bob"]))
        joined = "\n\n".join(document["contents"] for document in documents_for("Ada"))
        assert told == [("Ada", joined)]  # what is declined depends on the query alone


async def test_a_slip_of_ours_settles_the_batch(tmp_path: Path) -> None:
    """An unknown exception fails the request and closes the latch, once all of it is settled."""

    class Odd(BaseException):
        """Neither an answer nor an error a provider may raise."""

    class OddProvider(FakeProvider):
        async def search(self, query: str, top_n: int) -> Sequence[Mapping[str, Any]]:
            if query == "odd":
                raise Odd
            return await super().search(query, top_n)

    provider = OddProvider()
    provider.gate = asyncio.Event()
    async with served(tmp_path / "run", provider=provider, **ALL) as run:
        began = asyncio.get_running_loop().time()
        asked = batch("odd", "held")
        task = asyncio.create_task(search_many(run.service, asked, began=began, gone=lambda: False))
        await until(lambda: run.service.run.state.closed)
        assert (task.done(), run.service.slots.in_service) == (False, 1)
        provider.gate.set()
        with pytest.raises(Odd):
            await task
        assert run.service.run.state.settled
        assert run.service.slots.idle
        assert await cause(run) == errors.INTERNAL_ERROR.closes_as

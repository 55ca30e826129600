"""Every row of the /execute table over real HTTP: status, code, latch cause, counts, health."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from smartsearch_sidecar import errors
from tests.fakes.provider import FakeProvider, documents_for
from tests.fakes.served import (
    EXECUTE_CAPABILITY,
    INTERNAL_CAPABILITY,
    Served,
    native_body,
    read_records,
    served,
)
from tests.fakes.until import until
from tests.web.rawclient import Answer, RawClient


async def raw_exchange(port: int, data: bytes) -> Answer:
    """Sends exactly these bytes on a new connection and returns the first answer."""
    client = await RawClient.connect(("127.0.0.1", port))
    try:
        await client.send(data)
        return await client.answer()
    finally:
        client.sock.close()


def error_code(answer: Answer) -> str:
    return str(json.loads(answer.body)["error"]["code"])


async def expect_latched(
    run: Served, cause: str, *, attempts: int = 0, responses: int = 0, consumed: bool = False
) -> None:
    """The run has failed for ``cause``, says so everywhere, and ends with exit code 4."""
    status, health = await run.health()
    assert (status, health["state"]) == (503, "failed")
    assert health["cause"]["cause"] == cause
    assert health["cause"]["attempt_consumed"] is consumed
    assert (health["retrieval_attempts"], health["retrieval_responses"]) == (attempts, responses)
    latch = json.loads((run.directory / "latch.json").read_bytes())
    assert latch["cause"] == cause
    assert (await run.execute("after the failure"))[0] == 502
    async with run.session.get(f"http://127.0.0.1:{run.port}/readyz") as answer:
        assert answer.status == 503
    assert await run.stop() == 4
    kinds = [record["kind"] for record in read_records(run.directory)]
    assert kinds.count("latch.closed") == 1
    assert kinds[-1] == "run.closed"


async def test_answer_is_recorded_and_counted(tmp_path: Path) -> None:
    """A search is answered with the joined passages, and its record is on disk by then."""
    async with served(tmp_path / "run") as run:
        status, value = await run.execute("Ada Lovelace")
        records = run.records()
        assert status == 200
        assert set(value) == {"result", "output", "error"}
        assert value["result"] == "\n\n".join(
            document["contents"] for document in documents_for("Ada Lovelace")
        )
        assert [record["kind"] for record in records] == [
            "run.claimed",
            "retrieval.requested",
            "retrieval.answered",
        ]
        assert records[1]["data"] == {**native_body("Ada Lovelace"), "query": "Ada Lovelace"}
        assert [item["id"] for item in records[2]["data"]["documents"]] == [
            document["id"] for document in documents_for("Ada Lovelace")
        ]
        assert (await run.health())[0] == 200
        assert await run.stop() == 0
    assert read_records(tmp_path / "run")[-1]["kind"] == "run.closed"
    assert not (tmp_path / "run" / "endpoints.json").exists()
    assert not (tmp_path / "run" / "latch.json").exists()


async def test_query_is_stripped_for_the_search(tmp_path: Path) -> None:
    """The provider gets the query without surrounding white space, as the reference's does."""
    async with served(tmp_path / "run") as run:
        assert (await run.execute("  Ada \n"))[0] == 200
        assert run.provider.queries == ["Ada"]


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/" + "x" * 43 + "/execute", 401),
        ("/" + EXECUTE_CAPABILITY[:-1] + "/execute", 401),
        ("/" + EXECUTE_CAPABILITY[:-1] + "x/execute", 401),
        ("//" + "x" * 43 + "/execute/", 401),
        ("/%65" + EXECUTE_CAPABILITY[2:] + "/execute", 401),
        ("http://127.0.0.1/" + "x" * 43 + "/execute", 401),
        ("/?x=" + "x" * 43, 401),
        ("/", 401),
        ("/execute", 401),
        ("/" + INTERNAL_CAPABILITY + "/nothing", 404),
    ],
)
async def test_strangers_and_slips_touch_nothing(tmp_path: Path, target: str, status: int) -> None:
    """A target without a capability, or the operator's own slip, counts and closes nothing."""
    async with served(tmp_path / "run") as run:
        body = json.dumps(native_body("q")).encode()
        answer = await raw_exchange(
            run.port,
            f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body,
        )
        assert answer.status == status
        assert EXECUTE_CAPABILITY.encode() not in answer.raw
        assert (await run.health())[0] == 200
        assert [record["kind"] for record in run.records()] == ["run.claimed"]


@pytest.mark.parametrize(
    "segment",
    ["Execute", "execute?x=1", "%65xecute", "", "search", "retrieve", "execute#x", "health"],
)
async def test_other_segments_close_the_latch(tmp_path: Path, segment: str) -> None:
    """The right capability with any other second segment is the trainer's own fault."""
    async with served(tmp_path / "run") as run:
        answer = await raw_exchange(
            run.port,
            f"POST /{EXECUTE_CAPABILITY}/{segment} HTTP/1.1\r\nHost: x\r\n"
            "Content-Length: 0\r\n\r\n".encode(),
        )
        assert (answer.status, error_code(answer)) == (404, "not_found")
        await expect_latched(run, "http_not_found")


@pytest.mark.parametrize(
    ("headers", "body", "row"),
    [
        ("", b"", (400, "invalid_body", "http_invalid_body")),
        (
            "Transfer-Encoding: chunked\r\n",
            b"0\r\n\r\n",
            (400, "invalid_body", "http_invalid_body"),
        ),
        ("Content-Length: 0\r\n", b"", (413, "body_size", "http_body_size")),
        ("Content-Length: 999999999\r\n", b"", (413, "body_size", "http_body_size")),
        ("Content-Length: 2\r\n", b"{}", (415, "content_type", "http_content_type")),
        (
            "Content-Type: text/json\r\nContent-Length: 2\r\n",
            b"{}",
            (415, "content_type", "http_content_type"),
        ),
        (
            "Content-Length: 2\r\nContent-Length: 2\r\n",
            b"{}",
            (400, "bad_message", "http_bad_message"),
        ),
    ],
)
async def test_framing_faults(
    tmp_path: Path, headers: str, body: bytes, row: tuple[int, str, str]
) -> None:
    """Each fault of framing has its row."""
    status, code, cause = row
    async with served(tmp_path / "run") as run:
        answer = await raw_exchange(
            run.port,
            f"POST /{EXECUTE_CAPABILITY}/execute HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode()
            + body,
        )
        assert (answer.status, error_code(answer)) == (status, code)
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert json.loads(answer.body)["error"]["retryable"] is False
        await expect_latched(run, cause)


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON"])
async def test_media_type_parameters_and_case_are_allowed(
    tmp_path: Path, content_type: str
) -> None:
    """The media type is compared without its parameters and without case."""
    async with served(tmp_path / "run") as run:
        body = json.dumps(native_body("q")).encode()
        assert (await run.post(body, content_type=content_type))[0] == 200


async def test_late_body(tmp_path: Path) -> None:
    """A body that does not come in time is 400 and closes the latch."""
    async with served(tmp_path / "run", server__body_seconds=0.05) as run:
        answer = await raw_exchange(
            run.port,
            f"POST /{EXECUTE_CAPABILITY}/execute HTTP/1.1\r\nHost: x\r\n"
            "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{".encode(),
        )
        assert (answer.status, error_code(answer)) == (400, "invalid_body")
        await expect_latched(run, "http_invalid_body")


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"\xef\xbb\xbf{}",
        b'{"env":1,"env":2}',
        b'{"a":NaN}',
        b"[" * 65 + b"]" * 65,
        b"\xff\xfe",
        "{}".encode("utf-16"),
    ],
)
async def test_bytes_that_are_not_strict_json(tmp_path: Path, body: bytes) -> None:
    """What is not strict UTF-8 JSON closes the latch as ``http_invalid_request``."""
    async with served(tmp_path / "run") as run:
        status, value = await run.post(body)
        assert (status, value["error"]["code"]) == (400, "invalid_request")
        await expect_latched(run, "http_invalid_request")


@pytest.mark.parametrize(
    "value",
    [
        [],
        {"env": "x"},
        {**native_body("q"), "timeout": 5},
        native_body("q", environment="import os"),
        {**native_body("q"), "call": "wikipedia_search('q', 5)"},
        {**native_body("q"), "call": "__import__('os').system('true')"},
        {**native_body("q"), "call": "wikipedia_search(query='q', top_n=10)"},
    ],
)
async def test_json_of_another_shape(tmp_path: Path, value: Any) -> None:
    """Another shape, environment or call closes the latch as ``invalid_native_request``."""
    async with served(tmp_path / "run") as run:
        status, answer = await run.post(json.dumps(value).encode())
        assert (status, answer["error"]["code"]) == (400, "invalid_request")
        assert run.provider.queries == []
        await expect_latched(run, "invalid_native_request")


BAD_QUERIES = {
    "empty": "",
    "blank": " \t\n",
    "long": "word " * 1800,
    "cjk": "東" * 3000,
    "tag": "a </search> b",
    "surrogate": "\ud800",
}


@pytest.mark.parametrize("query", BAD_QUERIES.values(), ids=BAD_QUERIES.keys())
async def test_training_declines_what_the_policy_gets_wrong(tmp_path: Path, query: str) -> None:
    """A bad query is answered ``invalid query``, recorded, counted, and costs no attempt."""
    async with served(tmp_path / "run") as run:
        assert await run.execute(query) == (
            200,
            {"result": "invalid query", "output": "", "error": ""},
        )
        status, health = await run.health()
        assert (status, health["retrieval_declined"], health["retrieval_attempts"]) == (200, 1, 0)
        assert run.records()[-1]["kind"] == "retrieval.declined"
        assert run.records()[-1]["data"]["call"] == native_body(query)["call"]
        assert run.provider.queries == []
        assert await run.stop() == 0


@pytest.mark.parametrize(
    ("query", "row", "attempts"),
    [
        ("", (400, "invalid_request", "invalid_native_request"), 0),
        ("word " * 900, (400, "invalid_request", "invalid_native_request"), 0),
        ("\ud800", (400, "invalid_request", "http_invalid_request"), 0),
        ("a </search> b", (502, "retrieval_failed", "retrieval_failed"), 1),
    ],
    ids=["empty", "long", "surrogate", "tag"],
)
async def test_reference_latches_what_the_policy_gets_wrong(
    tmp_path: Path, query: str, row: tuple[int, str, str], attempts: int
) -> None:
    """With ``on_invalid_query = "latch"`` each ends the run in the reference's own way."""
    status, code, cause = row
    async with served(tmp_path / "run", profile="reference") as run:
        got, value = await run.execute(query)
        assert (got, value["error"]["code"]) == (status, code)
        await expect_latched(run, cause, attempts=attempts, consumed=bool(attempts))


async def test_closed_latch_comes_before_a_bad_query(tmp_path: Path) -> None:
    """Once the run has failed, a query that would be declined is refused too."""
    async with served(tmp_path / "run") as run:
        await run.internal("POST", "/latch", {"reason": "by hand"})
        status, value = await run.execute("")
        assert (status, value["error"]["code"]) == (502, "retrieval_failed")


async def test_ninth_is_busy_in_the_reference_profile(tmp_path: Path) -> None:
    """Without a waiting room the ninth request is refused at once and ends the run."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    async with served(tmp_path / "run", provider=provider, profile="reference") as run:
        eight = [asyncio.create_task(run.execute(f"q{n}")) for n in range(8)]
        await until(lambda: provider.under_way == 8)
        status, value = await run.execute("ninth")
        assert (status, value["error"]["code"]) == (429, "busy")
        provider.gate.set()
        assert {status for status, _ in await asyncio.gather(*eight)} == {502}
        await expect_latched(run, "http_busy", attempts=8, responses=8)


async def test_deadline_while_waiting_is_busy(tmp_path: Path) -> None:
    """A request whose deadline passes in the room is refused as busy, and ends the run."""
    keys: dict[str, Any] = {"execute__slots": 1, "execute__deadline_seconds": 0.1}
    async with served(tmp_path / "run", **keys) as run:
        await run.service.slots.take(1e9)
        status, value = await run.execute("waits for ever")
        assert (status, value["error"]["code"]) == (429, "busy")
        run.service.slots.give()
        assert run.provider.queries == []
        await expect_latched(run, "http_busy")


async def test_quota(tmp_path: Path) -> None:
    """The search over ``max_calls`` is refused and ends the run; no attempt is consumed."""
    async with served(tmp_path / "run", execute__max_calls=2) as run:
        assert [(await run.execute(f"q{n}"))[0] for n in range(2)] == [200, 200]
        status, value = await run.execute("q3")
        assert (status, value["error"]["code"]) == (429, "quota_exhausted")
        await expect_latched(run, "quota_exhausted", attempts=2, responses=2)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (ValueError("x"), "retrieval_failed"),
        (errors.PROVIDER_FAULT("x"), "retrieval_failed"),
        (errors.IDENTITY_CHANGED("x"), "identity_changed"),
        (errors.DOCUMENT_INVALID("x"), "document_invalid"),
        (errors.DOCUMENT_DRIFT("x"), "document_drift"),
    ],
)
async def test_provider_faults_are_502(tmp_path: Path, fault: Exception, cause: str) -> None:
    """Whatever a provider raises is 502 for the rollout and named in the latch."""
    provider = FakeProvider()
    provider.fault = fault
    async with served(tmp_path / "run", provider=provider) as run:
        status, value = await run.execute("q")
        assert (status, value["error"]["code"]) == (502, "retrieval_failed")
        assert "retrieval.failed" in [record["kind"] for record in run.records()]
        await expect_latched(run, cause, attempts=1, consumed=True)


async def test_identity_changed_before_a_search_consumes_nothing(tmp_path: Path) -> None:
    """An identity that differs before the search is found without an attempt."""
    async with served(tmp_path / "run") as run:
        run.provider.identity_values["corpus_sha256"] = "d" * 64
        assert (await run.execute("q"))[0] == 502
        assert run.provider.queries == []
        await expect_latched(run, "identity_changed")


async def test_deadline_during_the_search(tmp_path: Path) -> None:
    """A search still running at the deadline is settled as failed; its late result is dropped."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    async with served(tmp_path / "run", provider=provider, execute__deadline_seconds=0.05) as run:
        status, value = await run.execute("q")
        assert (status, value["error"]["code"]) == (504, "deadline")
        provider.gate.set()
        await until(lambda: not provider.under_way)
        assert "retrieval.answered" not in [record["kind"] for record in run.records()]
        await expect_latched(run, "deadline", attempts=1, consumed=True)


async def test_latched_while_searching_is_recorded_and_refused(tmp_path: Path) -> None:
    """Work admitted before the latch closed is finished and recorded, then answered 502."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    async with served(tmp_path / "run", provider=provider) as run:
        asking = asyncio.create_task(run.execute("q"))
        await until(lambda: provider.under_way == 1)
        await run.internal("POST", "/latch", {"reason": "stop it"})
        provider.gate.set()
        assert (await asking)[0] == 502
        assert "retrieval.answered" in [record["kind"] for record in run.records()]
        await expect_latched(run, "operator", attempts=1, responses=1)


async def test_sixty_four_clients_that_come_straight_back(tmp_path: Path) -> None:
    """64 clients in a loop over 8 slots never meet a 429, and every answer is their own."""
    async with served(tmp_path / "run") as run:

        async def client(number: int) -> None:
            for turn in range(4):
                status, value = await run.execute(f"client {number} turn {turn}")
                assert status == 200
                assert f"about client {number} turn {turn}." in value["result"]

        await asyncio.gather(*(client(number) for number in range(64)))
        status, health = await run.health()
        assert (status, health["retrieval_responses"]) == (200, 256)
        assert run.provider.most_under_way <= 8
        assert run.service.slots.most_waiting > 0

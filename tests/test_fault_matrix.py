"""Every fault of edge, client, provider and ledger as one table, each with its outcome.

A row is a fault done to a real daemon over real sockets, and its outcome: what the client is
answered, why the latch closes, what counts, what health says and what the process exits with. After
each row the history is verified, nothing of a capability is in a file or in the log, and a failed
run is resumed to show that it stays failed (invariants 1, 4, 5, 7, 9 to 11, 13 and 14 of the
package's README). That 2,000 idle connections disturb no request, and the outcome of a stalled
reader, are tested beside the edge (``web/test_edge_hostile.py``, ``web/test_edge.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.config import FlashRagSection
from smartsearch_sidecar.gate import health as health_module
from smartsearch_sidecar.ledger.disk import Disk
from smartsearch_sidecar.ledger.file import LATCH
from smartsearch_sidecar.ledger.reader import RunReader
from smartsearch_sidecar.ledger.recovery import Ending
from smartsearch_sidecar.ledger.verify import verify
from smartsearch_sidecar.retrieval.flashrag.provider import FlashragProvider
from tests.fakes import faults as do
from tests.fakes.disk import FailingSync, FullDisk, ReadOnlyDisk
from tests.fakes.faults import (
    Act,
    Answered,
    HeldDisk,
    NamelessProvider,
    answering,
    ask,
    asking,
    disk_failing,
    leaving_after,
    raising,
    request,
    sending,
    to,
)
from tests.fakes.provider import CORPUS_SHA256, INDEX_SHA256, FakeProvider, documents_for
from tests.fakes.retriever import FakeRetriever
from tests.fakes.served import EXECUTE_CAPABILITY, INTERNAL_CAPABILITY, Served, served
from tests.fakes.until import until

STRANGER = "x" * len(EXECUTE_CAPABILITY)


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    ``act`` does it and says what the client was answered. ``cause`` of ``None`` means that the run
    stays healthy and ends with exit code 0; any other that it has failed and ends with 4.
    """

    name: str
    act: Act
    answered: Answered
    cause: str | None
    consumed: bool = False
    attempts: int = 0
    responses: int = 0
    lost: int = 0
    refused: dict[str, int] | None = None
    keys: dict[str, Any] = field(default_factory=dict)
    provider: Callable[[], FakeProvider] = FakeProvider
    disk: Callable[[], Disk] = Disk
    # After a fault of the disk: what a restart can still know, and whether the last line is torn.
    restarts_as: str | None = None
    torn: bool = False

    @property
    def state(self) -> str:
        """What health says."""
        return "healthy" if self.cause is None else "failed"

    @property
    def counted(self) -> dict[str, int]:
        """What health counts as refused; a row says so where it is not one refusal."""
        if self.refused is not None:
            return self.refused
        if self.lost:
            return {"response_undelivered": self.lost}
        if self.cause is not None:
            return {self.cause: 1}
        return {} if self.answered[1] in (None, "bad_message") else {str(self.answered[1]): 1}

    @property
    def exit_code(self) -> int:
        """What the process ends with."""
        return 0 if self.cause is None else 4


# --- the tables ----------------------------------------------------------------------------------

IN_RECORD_MODE: dict[str, Any] = {"execute__on_undelivered": "record"}
ONE_SLOT: dict[str, Any] = {"execute__slots": 1}
OVERSIZED = f"X-Filler: {'y' * 20_000}\r\n"
RECORDED: dict[str, Any] = {"cause": None, "attempts": 1, "responses": 1, "lost": 1}
LOST: dict[str, Any] = {**RECORDED, "cause": "response_undelivered", "consumed": True}

# fmt: off
CLIENT: list[Fault] = [
    Fault("half a body, then gone", leaving_after(request(length=999)), (None, None),
          "http_invalid_body"),
    Fault("half a body, then silence", sending(request(length=999)), (400, "invalid_body"),
          "http_invalid_body", keys={"server__body_seconds": 0.05}),
    Fault("half a head, then gone", leaving_after(request()[:90]), (None, None),
          "http_bad_message"),
    Fault("half a head of a stranger", leaving_after(request(of=STRANGER)[:90]), (None, None),
          None),
    Fault("oversized headers", sending(request(more=OVERSIZED)), (400, "bad_message"),
          "http_bad_message"),
    Fault("oversized headers of a stranger", sending(request(of=STRANGER, more=OVERSIZED)),
          (400, "bad_message"), None),
    Fault("not HTTP, of ours", sending(b"HELO /" + EXECUTE_CAPABILITY.encode() + b"/\r\n\r\n"),
          (400, "bad_message"), "http_bad_message"),
    Fault("no length", sending(request(b"").replace(b"Content-Length", b"X-Length")),
          (400, "invalid_body"), "http_invalid_body"),
    Fault("two lengths", sending(request(more=f"Content-Length: {len(do.BODY)}\r\n")),
          (400, "bad_message"), "http_bad_message"),
    Fault("chunked", sending(request(b"1\r\nx\r\n0\r\n\r\n").replace(
        b"Content-Length: 11", b"Transfer-Encoding: chunked")), (400, "invalid_body"),
        "http_invalid_body"),
    Fault("empty body", sending(request(b"")), (413, "body_size"), "http_body_size"),
    Fault("huge body", sending(request(b"", length=10**9)), (413, "body_size"), "http_body_size"),
    Fault("another media type", sending(request().replace(b"application/json", b"text/plain")),
          (415, "content_type"), "http_content_type"),
    Fault("another route", to("/search"), (404, "not_found"), "http_not_found"),
    Fault("another method", to("/execute", "GET"), (405, "method_not_allowed"),
          "http_method_not_allowed"),
    Fault("not JSON", sending(request(b"{")), (400, "invalid_request"), "http_invalid_request"),
    Fault("another call", sending(request(b'{"env":"","call":""}')), (400, "invalid_request"),
          "invalid_native_request"),
    Fault("slow sender", do.send_slowly, (200, None), None, attempts=1, responses=1),
    Fault("slow reader", do.read_slowly, (200, None), None, attempts=2, responses=2),
    Fault("pipelined", do.pipeline, (200, None), None, attempts=2, responses=2),
    Fault("pipelined, then gone", do.leave_a_pipeline, (None, None), "http_bad_message", attempts=1,
          responses=1, refused={"http_bad_message": 1, "retrieval_failed": 1}),
    Fault("gone from the room", do.leave_the_room, (None, None), "response_undelivered", lost=1,
          keys=ONE_SLOT),
    Fault("gone from the search", do.leave_the_search, (None, None), **LOST),
    Fault("gone from the sync", do.leave_the_sync, (None, None), disk=HeldDisk, **LOST),
    Fault("gone from the answer", do.leave_the_answer, (None, None), **LOST),
    Fault("gone from the room, recorded", do.leave_the_room, (None, None), None, lost=1,
          keys={**ONE_SLOT, **IN_RECORD_MODE}),
    Fault("gone from the search, recorded", do.leave_the_search, (None, None),
          **RECORDED, keys=IN_RECORD_MODE),
    Fault("gone from the sync, recorded", do.leave_the_sync, (None, None), disk=HeldDisk,
          **RECORDED, keys=IN_RECORD_MODE),
    Fault("gone from the answer, recorded", do.leave_the_answer, (None, None),
          **RECORDED, keys=IN_RECORD_MODE),
    Fault("one connection too many", do.one_connection_too_many, (None, None), "http_busy",
          attempts=2, responses=2, keys={"server__connections_max": 2}),
    Fault("idle connections", do.idle_connections, (200, None), None, attempts=1, responses=1),
    Fault("full house", do.find_the_house_full, (429, "busy"), "http_busy", attempts=1, responses=1,
          keys={**ONE_SLOT, "execute__waiting_max": 0},
          refused={"http_busy": 1, "retrieval_failed": 1}),
    Fault("deadline in the room", do.wait_too_long, (429, "busy"), "http_busy",
          keys={**ONE_SLOT, "execute__deadline_seconds": 0.05}),
    Fault("quota", asking("one", "two"), (429, "quota_exhausted"), "quota_exhausted", attempts=1,
          responses=1, keys={"execute__max_calls": 1}),
]
# fmt: on

BRIEF: dict[str, Any] = {"execute__deadline_seconds": 0.1}
SEARCH_FAILED: dict[str, Any] = {
    "answered": (502, "retrieval_failed"),
    "consumed": True,
    "attempts": 1,
}
INVALID: dict[str, Any] = {**SEARCH_FAILED, "cause": "document_invalid"}
CRASHED: dict[str, Any] = {**SEARCH_FAILED, "cause": "retrieval_failed"}
TOO_LONG = "x" * (8 * 1024 * 1024 + 1)
TRANSPORT = errors.PROVIDER_TRANSPORT("broken off")

# fmt: off
PROVIDER: list[Fault] = [
    Fault("hang", asking("q"), (504, "deadline"), "deadline", consumed=True, attempts=1,
          keys=BRIEF, provider=do.hanging),
    Fault("hang over its own name", asking("q"), (504, "deadline"), "deadline", keys=BRIEF,
          provider=NamelessProvider),
    Fault("slow, in time", asking("q"), (200, None), None, attempts=1, responses=1,
          provider=lambda: FakeProvider(seconds=0.05)),
    Fault("crash", asking("q"), **CRASHED, provider=raising(RuntimeError("boom"))),
    Fault("crash with an unspeakable word", asking("q"), **CRASHED,
          provider=raising(errors.PROVIDER_FAULT("a lone \ud800 surrogate"))),
    Fault("memory", asking("q"), **CRASHED, provider=raising(MemoryError())),
    Fault("its own cancellation", asking("q"), **CRASHED,
          provider=raising(asyncio.CancelledError())),
    Fault("its own timeout", asking("q"), **CRASHED, provider=raising(TimeoutError())),
    Fault("crash shared by three", do.share_a_failure, **{**CRASHED, "attempts": 3},
          provider=raising(RuntimeError("boom")), refused={"retrieval_failed": 3}),
    Fault("broken off twice", asking("q"), (200, None), None, attempts=1, responses=1,
          provider=raising(TRANSPORT, 2)),
    Fault("broken off three times", asking("q"), **CRASHED, provider=raising(TRANSPORT, 3)),
    Fault("text", asking("q"), **INVALID, provider=answering("text")),
    Fault("nothing", asking("q"), **INVALID, provider=answering(None)),
    Fault("strings", asking("q"), **INVALID, provider=answering(["a", "b"])),
    Fault("no contents", asking("q"), **INVALID, provider=answering([{"id": "1"}])),
    Fault("a number for contents", asking("q"), **INVALID,
          provider=answering([{"id": "1", "contents": 5}])),
    Fault("not finite", asking("q"), **INVALID,
          provider=answering([{"id": "1", "contents": "x", "score": float("nan")}])),
    Fault("one id twice", asking("q"), **INVALID,
          provider=answering([{"id": "1", "contents": x} for x in "xy"])),
    Fault("six", asking("q"), **INVALID, provider=answering(documents_for("q", 6))),
    Fault("huge", asking("q"), **INVALID,
          provider=answering([{"id": "1", "contents": TOO_LONG}])),
    Fault("no UTF-8 form", asking("q"), **INVALID,
          provider=answering([{"id": "1", "contents": "\ud800"}])),
    Fault("drift", asking("a", "b"), (502, "retrieval_failed"), "document_drift", consumed=True,
          attempts=2, responses=1, provider=do.drifting),
    Fault("another corpus before", do.change_and_ask, (502, "retrieval_failed"),
          "identity_changed"),
    Fault("nameless before", do.cannot_say_and_ask, (502, "retrieval_failed"), "retrieval_failed"),
    Fault("another index after", asking("q"), **{**SEARCH_FAILED, "cause": "identity_changed"},
          provider=do.changing),
]
# fmt: on

ROOMY = 10**9
LEDGER_FAILED: dict[str, Any] = {"answered": (503, "ledger_failed"), "cause": "ledger_failed"}
# What was decided counts, although the disk took none of it: the run is over either way.
UNTAKEN: dict[str, Any] = {**LEDGER_FAILED, "attempts": 1, "responses": 1}
# The room that was set aside takes what no new file can.
LATCH_UNTAKEN: dict[str, Any] = {"answered": (200, None), "cause": "operator", "refused": {}}
MEGABYTE = [{"id": "1", "contents": "x" * 1_100_000}]

# fmt: off
LEDGER: list[Fault] = [
    Fault("disk full", do.filling(0), **UNTAKEN, disk=lambda: FullDisk(ROOMY),
          restarts_as="ledger_failed"),
    Fault("disk full within a record", do.filling(700), **UNTAKEN, disk=lambda: FullDisk(ROOMY),
          restarts_as="ledger_failed", torn=True),
    Fault("disk full, no names left", do.filling(0), **UNTAKEN,
          disk=lambda: FullDisk(ROOMY, names=False), restarts_as="ledger_failed"),
    Fault("read-only", do.turn_read_only, **UNTAKEN, disk=ReadOnlyDisk,
          restarts_as="unclean_restart"),
    Fault("failed sync", asking("q"), **UNTAKEN, disk=lambda: FailingSync(4),
          restarts_as="ledger_failed"),
    Fault("failed sync of a declined query", asking(""), **LEDGER_FAILED,
          disk=lambda: FailingSync(4), restarts_as="ledger_failed"),
    Fault("failed rotation", asking("a", "b"), **LEDGER_FAILED, attempts=2, responses=2,
          keys={"ledger__segment_mib": 1}, provider=answering(MEGABYTE),
          disk=disk_failing("open", "000002"), restarts_as="ledger_failed"),
    Fault("latch not made", do.close_by_hand, **LATCH_UNTAKEN, disk=disk_failing("open", LATCH)),
    Fault("latch not written", do.close_by_hand, **LATCH_UNTAKEN,
          disk=disk_failing("write", LATCH)),
    Fault("latch not synced", do.close_by_hand, **LATCH_UNTAKEN, disk=disk_failing("sync", LATCH)),
    Fault("latch's name not synced", do.close_by_hand, **LATCH_UNTAKEN,
          disk=disk_failing("directory", LATCH)),
]
# fmt: on


# --- the outcome of each --------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [*CLIENT, *PROVIDER, *LEDGER], ids=lambda fault: fault.name)
async def test_fault(tmp_path: Path, capfd: pytest.CaptureFixture[str], fault: Fault) -> None:
    """The fault has exactly the outcome of its row, also after a restart."""
    directory = tmp_path / "run"
    async with served(directory, provider=fault.provider(), disk=fault.disk(), **fault.keys) as run:
        await hold(run, fault)
    await asyncio.to_thread(check_files, directory, fault)
    async with served(directory, resume=True, trainer_stopped=True, **fault.keys) as run:
        _, health = await run.health()
        expected = fault.restarts_as or fault.cause
        assert (health["cause"] and health["cause"]["cause"]) == expected
        assert await run.stop() == (4 if expected else 0)
    said = "".join(capfd.readouterr())
    assert EXECUTE_CAPABILITY not in said
    assert INTERNAL_CAPABILITY not in said


async def hold(run: Served, fault: Fault) -> None:
    """Does the fault and holds the run against its row."""
    state = run.service.run.state
    async with asyncio.timeout(20):
        assert await fault.act(run) == fault.answered
    await until(lambda: (state.closed, state.lost) == (fault.cause is not None, fault.lost))
    status, health = await run.health(settle=5)
    cause = health["cause"] or {"cause": None, "attempt_consumed": False}
    assert (status, health["state"]) == (200 if fault.cause is None else 503, fault.state)
    assert (cause["cause"], cause["attempt_consumed"]) == (fault.cause, fault.consumed)
    counts = (health["retrieval_attempts"], health["retrieval_responses"])
    assert counts == (fault.attempts, fault.responses)
    assert health["refused"] == fault.counted
    assert state.settled
    assert run.service.slots.idle
    status, _ = await run.internal("POST", "/checkpoints", {"step": 1, "allow_idle": True})
    assert status == (201 if fault.cause is None else 503 if fault.restarts_as else 409)
    if fault.cause is not None:
        assert (await ask(run, "after the failure"))[0] in (502, 503)
    assert await run.stop() == fault.exit_code


def check_files(directory: Path, fault: Fault) -> None:
    """The history is whole, its end is recorded where the disk took it, and no secret is in it."""
    found = verify(directory, documents=True)
    assert found.problem is None or (fault.torn and found.ending is Ending.TORN)
    if fault.restarts_as is None:
        assert found.state.closed_cleanly
        assert (RunReader(directory).latch() is not None) == (fault.cause is not None)
    for path in directory.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert EXECUTE_CAPABILITY.encode() not in data
            assert INTERNAL_CAPABILITY.encode() not in data


# --- a retriever over HTTP ------------------------------------------------------------------------

# How it fails, and whether the failure is of the transport, which is tried twice more.
REMOTE: list[tuple[str, bool]] = [
    ("hang", True),
    ("drip", True),
    ("closed", True),
    ("closed_midway", True),
    ("not_http", False),
    ("500", True),
    ("503", True),
    ("redirect", False),
    ("html", False),
    ("html_as_json", False),
    ("cut", False),
    ("error_object", False),
    ("strings", False),
    ("gzip", False),
    ("huge", False),
]


@asynccontextmanager
async def remote(
    directory: Path, *, timeout_seconds: float = 20.0, **keys: Any
) -> AsyncIterator[tuple[Served, FakeRetriever]]:
    """A daemon in front of a retriever in the pinned trainer's form."""
    async with FakeRetriever() as retriever:
        settings = FlashRagSection(
            url=retriever.url,
            corpus_sha256=CORPUS_SHA256,
            index_sha256=INDEX_SHA256,
            timeout_seconds=timeout_seconds,
        )
        provider = FlashragProvider(settings)
        await provider.start()
        async with served(directory, provider=provider, **keys) as run:
            yield run, retriever


@pytest.mark.parametrize(("failure", "again"), REMOTE)
async def test_remote_fault(tmp_path: Path, failure: str, again: bool) -> None:
    """A retriever that misbehaves ends the run as a provider's fault, and is not quoted."""
    fault = Fault(failure, asking("bad"), **{**CRASHED, "attempts": 2, "responses": 1})
    # Only where no answer comes is the time to run out: elsewhere a slow machine would use it up.
    seconds = 0.5 if failure in ("hang", "drip") else 20.0
    async with remote(tmp_path / "run", timeout_seconds=seconds) as (run, retriever):
        assert await ask(run, "good") == (200, None)
        retriever.failure = failure
        await hold(run, fault)
        assert retriever.asked["bad"] == (3 if again else 1)
    await asyncio.to_thread(check_files, tmp_path / "run", fault)
    assert b"SECRET-PASSAGE" not in (tmp_path / "run" / LATCH).read_bytes()


async def test_remote_retriever_dies(tmp_path: Path) -> None:
    """``kill -9`` of the retriever with a search in it: tried again in vain, then the run's end."""
    async with remote(tmp_path / "run") as (run, retriever):
        retriever.gate.clear()
        asked = asyncio.create_task(ask(run))
        await retriever.arrived(1)
        await retriever.kill()
        assert await asked == (502, "retrieval_failed")
        assert (await run.health())[1]["cause"]["cause"] == "retrieval_failed"
        assert await run.stop() == 4


async def test_remote_passages_drift(tmp_path: Path) -> None:
    """The same document with other contents is drift, under any declared identity."""
    async with remote(tmp_path / "run", retrieval__cache_mib=0) as (run, retriever):
        assert await ask(run) == (200, None)
        retriever.revision = 2
        assert await ask(run) == (502, "retrieval_failed")
        assert (await run.health())[1]["cause"]["cause"] == "document_drift"
        assert await run.stop() == 4


async def test_hung_provider_does_not_hang_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Health of a provider that does not say any more what it serves is an answer, and no."""
    monkeypatch.setattr(health_module, "IDENTITY_SECONDS", 0.05)
    async with served(tmp_path / "run", provider=NamelessProvider()) as run:
        code, health = await run.health()
        assert (code, health["cause"]["cause"]) == (503, "retrieval_failed")
        assert "did not confirm its identity" in health["cause"]["detail"]
        assert await run.stop() == 4

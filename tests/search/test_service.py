"""The order of one request under cancellation, hang-up and a failing ledger, on both loops."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.disk import Disk
from tests.fakes.provider import FakeProvider
from tests.fakes.served import (
    EXECUTE_CAPABILITY,
    Served,
    native_body,
    read_records,
    served,
)
from tests.fakes.until import until
from tests.web.rawclient import RawClient

BODY = json.dumps(native_body("Ada")).encode()
REQUEST = (
    f"POST /{EXECUTE_CAPABILITY}/execute HTTP/1.1\r\nHost: x\r\n"
    f"Content-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n"
).encode() + BODY


class HeldDisk(Disk):
    """A disk whose syncs wait until they are let through."""

    def __init__(self) -> None:
        self.open_gate = threading.Event()
        self.open_gate.set()

    def sync(self, fd: int) -> None:
        self.open_gate.wait(10)
        super().sync(fd)


async def cancelled_at(run: Served, reached: Any) -> None:
    """Cancels a request of the service once ``reached`` holds."""
    began = asyncio.get_running_loop().time()
    task = asyncio.create_task(run.service.execute(BODY, began=began, gone=lambda: False))
    await until(reached)
    task.cancel()
    results = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)


def settled_and_latched(run: Served, cause: str, attempts: int) -> None:
    """Slot back, attempt settled, latch closed for ``cause``."""
    state = run.service.run.state
    assert run.service.slots.idle
    assert state.settled
    assert state.cause is not None
    assert state.cause.cause == cause
    assert state.attempts == attempts


@pytest.mark.both_loops
async def test_cancelled_while_waiting_for_a_slot(tmp_path: Path) -> None:
    """Cancelled in the room: nothing is consumed, and the lost answer closes the latch."""
    async with served(tmp_path / "run", execute__slots=1) as run:
        await run.service.slots.take(1e9)
        await cancelled_at(run, lambda: run.service.slots.waiting == 1)
        run.service.slots.give()
        settled_and_latched(run, "response_undelivered", 0)


class SlowlyNamed(FakeProvider):
    """Says who it is at once when the run is claimed, and from then on when ``named`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.named = asyncio.Event()
        self.asked = 0

    async def identity(self) -> Mapping[str, Any]:
        self.asked += 1
        if self.asked > 1:
            await self.named.wait()
        return await super().identity()


@pytest.mark.both_loops
async def test_cancelled_before_the_search(tmp_path: Path) -> None:
    """Cancelled while the provider is asked who it is: nothing consumed, and not forgotten."""
    provider = SlowlyNamed()
    async with served(tmp_path / "run", provider=provider) as run:
        await cancelled_at(run, lambda: provider.asked == 2)
        provider.named.set()
        settled_and_latched(run, "response_undelivered", 0)
        assert run.service.run.state.lost == 1


@pytest.mark.both_loops
async def test_cancelled_during_the_search(tmp_path: Path) -> None:
    """Cancelled in the search: the attempt is settled as failed and closes the latch."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    async with served(tmp_path / "run", provider=provider) as run:
        await cancelled_at(run, lambda: provider.under_way == 1)
        settled_and_latched(run, "request_cancelled", 1)
        assert run.service.run.state.failed == 1
        provider.gate.set()


@pytest.mark.both_loops
async def test_cancelled_before_the_sync_of_its_answer(tmp_path: Path) -> None:
    """Cancelled while its record is being synced: the answer is recorded, and lost."""
    disk = HeldDisk()
    async with served(tmp_path / "run", disk=disk) as run:
        disk.open_gate.clear()
        await cancelled_at(run, lambda: run.service.run.state.responses == 1)
        disk.open_gate.set()
        settled_and_latched(run, "response_undelivered", 1)
        assert run.service.run.state.lost == 1
        assert await run.stop() == 4
    kinds = [record["kind"] for record in read_records(tmp_path / "run")]
    assert kinds[1:] == [
        "retrieval.requested",
        "retrieval.answered",
        "delivery.lost",
        "latch.closed",
        "run.closed",
    ]


async def hang_up(run: Served) -> RawClient:
    client = await RawClient.connect(("127.0.0.1", run.port))
    await client.send(REQUEST)
    return client


@pytest.mark.both_loops
async def test_hang_up_while_waiting_for_a_slot(tmp_path: Path) -> None:
    """If the client leaves while its request waits, no search is made and the latch closes."""
    async with served(tmp_path / "run", execute__slots=1) as run:
        await run.service.slots.take(1e9)
        client = await hang_up(run)
        await until(lambda: run.service.slots.waiting == 1)
        client.sock.close()
        run.service.slots.give()
        await until(lambda: run.service.run.state.closed)
        settled_and_latched(run, "response_undelivered", 0)
        assert run.provider.queries == []


@pytest.mark.both_loops
async def test_hang_up_during_the_search(tmp_path: Path) -> None:
    """Gone during the search: the work is finished and recorded, and the lost answer latches."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    async with served(tmp_path / "run", provider=provider) as run:
        client = await hang_up(run)
        await until(lambda: provider.under_way == 1)
        client.sock.close()
        provider.gate.set()
        await until(lambda: run.service.run.state.closed)
        settled_and_latched(run, "response_undelivered", 1)
        cause = run.service.run.state.cause
        assert cause is not None
        assert (cause.number, cause.attempt_consumed) == (1, True)
        assert run.service.run.state.responses == 1


@pytest.mark.both_loops
async def test_hang_up_during_the_sync(tmp_path: Path) -> None:
    """Gone while its record is synced: recorded as answered, then as lost."""
    disk = HeldDisk()
    async with served(tmp_path / "run", disk=disk) as run:
        disk.open_gate.clear()
        client = await hang_up(run)
        await until(lambda: run.service.run.state.responses == 1)
        client.sock.close()
        disk.open_gate.set()
        await until(lambda: run.service.run.state.closed)
        settled_and_latched(run, "response_undelivered", 1)


@pytest.mark.both_loops
async def test_record_mode_records_the_loss_and_goes_on(tmp_path: Path) -> None:
    """With ``on_undelivered = "record"`` a hang-up is written down and the run stays good."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    keys: dict[str, Any] = {"execute__on_undelivered": "record"}
    async with served(tmp_path / "run", provider=provider, **keys) as run:
        client = await hang_up(run)
        await until(lambda: provider.under_way == 1)
        client.sock.close()
        provider.gate.set()
        await until(lambda: run.service.run.state.lost == 1)
        provider.gate = None
        assert (await run.execute("next"))[0] == 200
        status, health = await run.health(settle=2)
        assert (status, health["delivery_lost"]) == (200, 1)
        assert await run.stop() == 0


@pytest.mark.both_loops
async def test_slot_is_free_before_the_answer_is_written(tmp_path: Path) -> None:
    """A client that reads slowly holds no slot: with one slot the next one is served."""
    provider = FakeProvider()
    provider.answer = [{"id": "1", "contents": "x" * 4_000_000}]
    async with served(tmp_path / "run", provider=provider, execute__slots=1) as run:
        slow = await RawClient.connect(("127.0.0.1", run.port), receive_bytes=4096)
        await slow.send(REQUEST)
        await until(lambda: run.service.run.state.responses == 1)
        provider.answer = None
        assert (await run.execute("next"))[0] == 200
        assert run.service.slots.idle
        assert (await slow.answer()).status == 200
        slow.sock.close()


class BrokenDisk(Disk):
    """A disk that stops taking syncs when told to."""

    broken = False

    def sync(self, fd: int) -> None:
        if self.broken:
            raise OSError(28, "No space left on device")
        super().sync(fd)


@pytest.mark.both_loops
async def test_failed_sync_closes_the_door_at_once(tmp_path: Path) -> None:
    """The answer whose sync failed is 503, every later one refused, the exit code 4."""
    disk = BrokenDisk()
    async with served(tmp_path / "run", disk=disk) as run:
        assert (await run.execute("before"))[0] == 200
        disk.broken = True
        status, value = await run.execute("q")
        assert (status, value["error"]["code"]) == (503, "ledger_failed")
        status, health = await run.health()
        assert (status, health["state"], health["cause"]["cause"]) == (
            503,
            "failed",
            "ledger_failed",
        )
        disk.broken = False
        status, value = await run.execute("again")
        assert status in (502, 503)
        assert await run.stop() == 4


@pytest.mark.both_loops
async def test_a_broken_invariant_is_500_and_ends_the_run(tmp_path: Path) -> None:
    """A promise of our own that breaks in a search settles the attempt and closes the latch."""
    provider = FakeProvider()
    provider.fault = errors.INTERNAL_ERROR("broken")
    async with served(tmp_path / "run", provider=provider) as run:
        assert (await run.execute("q"))[0] == 500
        settled_and_latched(run, "internal_error", 1)


@pytest.mark.both_loops
async def test_drain_finishes_what_is_in_service(tmp_path: Path) -> None:
    """SIGTERM during a search: it is answered, recorded, and the run ends clean."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    async with served(tmp_path / "run", provider=provider) as run:
        asking = asyncio.create_task(run.execute("q"))
        await until(lambda: provider.under_way == 1)
        stopping = asyncio.create_task(run.stop())
        await asyncio.sleep(0)
        provider.gate.set()
        assert (await asking)[0] == 200
        assert await stopping == 0
    assert read_records(tmp_path / "run")[-1]["kind"] == "run.closed"


@pytest.mark.both_loops
async def test_settle_waits_for_work_in_flight(tmp_path: Path) -> None:
    """Health is pending while a search runs, and healthy as soon as it has settled."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    async with served(tmp_path / "run", provider=provider) as run:
        asking = asyncio.create_task(run.execute("q"))
        await until(lambda: provider.under_way == 1)
        status, health = await run.health()
        assert (status, health["state"]) == (503, "pending")
        settling = asyncio.create_task(run.health(settle=10))
        await until(lambda: True)
        provider.gate.set()
        status, health = await settling
        assert (status, health["state"]) == (200, "healthy")
        assert (await asking)[0] == 200


class SlowToSay(FakeProvider):
    """Says who it is, once it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.let: asyncio.Event | None = None

    async def identity(self) -> Mapping[str, Any]:
        let, self.let = self.let, None
        if let is not None:
            self.asked.set()
            await let.wait()
        return await super().identity()


async def test_settle_waits_for_what_begins_while_it_looks(tmp_path: Path) -> None:
    """A search that begins while the provider is asked who it is has the rest of the time too."""
    provider = SlowToSay()
    async with served(tmp_path / "run", provider=provider) as run:
        let = provider.let = asyncio.Event()
        settling = asyncio.create_task(run.health(settle=10))
        await provider.asked.wait()
        provider.gate = asyncio.Event()
        asking = asyncio.create_task(run.execute("q"))
        await until(lambda: provider.under_way == 1)
        let.set()
        assert not (await asyncio.wait([settling], timeout=0.1))[0]
        provider.gate.set()
        status, health = await settling
        assert (status, health["state"]) == (200, "healthy")
        assert (await asking)[0] == 200

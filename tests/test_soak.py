"""Load for a long time: memory, descriptors and latency stay where they were, and counts are exact.

A daemon in a process of its own, 64 clients. Each goes on where it was in its seeded walk: queries,
repeats, queries the policy got wrong, requests in small pieces, and hang-ups before the answer,
which ``on_undelivered = "record"`` writes down. Between two windows all of them pause, and the
daemon is measured at rest.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from smartsearch_sidecar.ledger.verify import verify
from tests.crash.dying import padded
from tests.crash.harness import Daemon, Launcher
from tests.fakes.served import native_body

pytestmark = pytest.mark.process

CLIENTS = 64
PASSAGE_BYTES = 100
PATIENCE = 30.0
INVALID = ["", "   ", "x" * 5000, "an <answer> of its own"]
# Growth that is allowed: what Python's allocator does, and what a call is known to leave behind.
MEMORY_FACTOR, BYTES_A_CALL = 1.2, 32
DESCRIPTORS_MORE = 2
LATENCY_FACTOR = 10  # of medians, and only against creeping growth: other work shares the machine
KEYS: dict[str, Any] = {
    "execute__on_undelivered": "record",
    "execute__max_calls": 10**9,
    "retrieval__cache_mib": 1,
}


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    """Starts the daemon; what still runs is ended with it."""
    started = Launcher()
    yield started
    started.close()


@dataclass
class Counts:
    """What the clients did, to be found again in health and journal."""

    answered: int = 0
    declined: int = 0
    left: int = 0
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Sample:
    """A daemon at rest: resident bytes, open descriptors; and the median answer before that."""

    calls: int
    resident: int
    descriptors: int
    median: float


class Walk:
    """One client: a seeded choice of what comes next, and raw bytes to do it with."""

    def __init__(self, url: str, name: int, seed: int, counts: Counts) -> None:
        parts = urlsplit(url)
        self._host, self._port = str(parts.hostname), int(parts.port or 0)
        self._target = parts.path + "/execute"
        self._name = name
        self._rng = random.Random(f"{seed} {name}")
        self._counts = counts
        self._asked = 0

    def _request(self, query: str) -> bytes:
        body = json.dumps(native_body(query)).encode()
        head = (
            f"POST {self._target} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def _query(self) -> str:
        self._asked += 1
        return f"{self._name} {self._asked // 2}" if self._rng.random() < 0.5 else f"{self._name}"

    async def steps(self, count: int, pause: float) -> None:
        """So many requests; each on a connection of its own, as the pinned client sends them."""
        for _ in range(count):
            async with asyncio.timeout(PATIENCE):
                reader, writer = await asyncio.open_connection(self._host, self._port)
                try:
                    await self._step(reader, writer)
                finally:
                    writer.close()
            if pause:
                await asyncio.sleep(self._rng.uniform(0, 2 * pause))

    async def _step(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kind = self._rng.random()
        query = self._rng.choice(INVALID) if kind < 0.1 else self._query()
        data = self._request(query)
        if 0.1 <= kind < 0.15:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
        began = time.monotonic()
        if kind > 0.95:  # in pieces
            for start in range(0, len(data), 50):
                writer.write(data[start : start + 50])
                await asyncio.sleep(0)
        else:
            writer.write(data)
        if 0.1 <= kind < 0.15:  # leaves, now or soon, and does not read what arrived
            await asyncio.sleep(self._rng.choice((0.0, 0.001, 0.01)))
            self._counts.left += 1
            writer.transport.abort() if self._rng.random() < 0.5 else writer.close()
            return
        result = await _result(reader)
        self._counts.seconds.append(time.monotonic() - began)
        if kind < 0.1:
            assert result == "invalid query"
            self._counts.declined += 1
        else:
            found = padded(query, PASSAGE_BYTES)
            assert result == "\n\n".join(document["contents"] for document in found)
            self._counts.answered += 1


async def _result(reader: asyncio.StreamReader) -> str:
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), head
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
    return str(json.loads(await reader.readexactly(length))["result"])


@asynccontextmanager
async def loaded(
    launcher: Launcher, directory: Path, seed: int
) -> AsyncIterator[tuple[Daemon, list[Walk], Counts]]:
    """A daemon and its clients; the journal of an hour is not left behind."""
    daemon = launcher.start(directory, passage_bytes=PASSAGE_BYTES, **KEYS)
    counts = Counts()
    url = (await asyncio.to_thread(daemon.ready)).sandbox_url
    try:
        yield daemon, [Walk(url, name, seed, counts) for name in range(CLIENTS)], counts
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def window(
    daemon: Daemon, walks: list[Walk], counts: Counts, steps: int, pause: float
) -> Sample:
    """All clients for a while, then the daemon at rest."""
    counts.seconds.clear()
    await asyncio.gather(*(walk.steps(steps, pause) for walk in walks))
    health = await asyncio.to_thread(lambda: daemon.internal().health(20.0))
    assert health.status == 200, health.value
    process = Path(f"/proc/{daemon.pid}")
    descriptors = [0]
    async with asyncio.timeout(PATIENCE):
        # Connections of clients that left are closed when the daemon has noticed.
        while len(descriptors) < 5 or len(set(descriptors[-5:])) > 1:
            await asyncio.sleep(0.01)
            descriptors.append(sum(1 for _ in (process / "fd").iterdir()))
    resident = int((process / "statm").read_text().split()[1]) * 4096
    calls = int(health.value["retrieval_attempts"])
    return Sample(calls, resident, descriptors[-1], statistics.median(counts.seconds))


async def soak(
    launcher: Launcher,
    directory: Path,
    seed: int,
    *,
    steps: int,
    pause: float,
    go_on: Callable[[int], bool],
) -> None:
    """Windows of load while ``go_on`` says so of their number; then everything is held together."""
    print(f"seed {seed}")
    samples: list[Sample] = []
    async with loaded(launcher, directory, seed) as (daemon, walks, counts):
        while go_on(len(samples)):
            samples.append(await window(daemon, walks, counts, steps, pause))
        health = (await asyncio.to_thread(lambda: daemon.internal().health(20.0))).value
        code = await asyncio.to_thread(daemon.stop)
        found = await asyncio.to_thread(verify, directory)
    assert code == 0
    assert found.ok, found.problem
    check_counts(counts, health, Counter(found.kinds))
    check_flat(samples)


def check_counts(counts: Counts, health: dict[str, Any], kinds: Counter[str]) -> None:
    """Nothing lost, nothing counted twice: clients, health and journal say the same."""
    assert health["delivery_lost"] == kinds["delivery.lost"] == counts.left
    attempts = health["retrieval_attempts"]
    assert attempts == health["retrieval_responses"] == kinds["retrieval.answered"]
    # A client that left while waiting had no attempt; every other one had exactly one.
    assert counts.answered <= attempts <= counts.answered + counts.left
    assert health["retrieval_declined"] == kinds["retrieval.declined"] == counts.declined
    assert health["refused"].keys() <= {"response_undelivered"}
    assert health["cause"] is None


def check_flat(samples: list[Sample]) -> None:
    """After a quarter of the windows nothing grows but what a call is known to leave."""
    warm, *later = samples[len(samples) // 4 :]
    for sample in later:
        allowed = warm.resident * MEMORY_FACTOR + (sample.calls - warm.calls) * BYTES_A_CALL
        assert sample.resident <= allowed, samples
        assert sample.descriptors <= warm.descriptors + DESCRIPTORS_MORE, samples
    third = len(samples) // 3
    before = max(sample.median for sample in samples[:third])
    after = min(sample.median for sample in samples[-third:])
    assert after <= LATENCY_FACTOR * before, samples


async def test_soak_in_short(launcher: Launcher, tmp_path: Path) -> None:
    """A thousand requests with hang-ups and policy errors leave nothing but their records."""
    # Every kind of request comes by the dozen: wrong queries, hang-ups, and pieces.
    await soak(launcher, tmp_path / "run", 7, steps=2, pause=0.0, go_on=lambda number: number < 8)


@pytest.mark.soak
@pytest.mark.timeout(5400)
async def test_soak_for_an_hour(launcher: Launcher, tmp_path: Path) -> None:
    """The same for an hour, at some 600 requests a second."""
    end = time.monotonic() + 3600
    await soak(
        launcher,
        tmp_path / "run",
        random.randrange(2**32),
        steps=300,
        pause=0.1,
        go_on=lambda number: time.monotonic() < end,
    )

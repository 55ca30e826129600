"""A real daemon in this process: real sockets, real ledger, a provider of the test's choice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from smartsearch_sidecar.client import Endpoints
from smartsearch_sidecar.cluster.bus import Connect
from smartsearch_sidecar.config import Config, load
from smartsearch_sidecar.ledger.disk import Disk
from smartsearch_sidecar.ledger.receipt import CheckpointReceipt
from smartsearch_sidecar.process.daemon import Daemon
from smartsearch_sidecar.retrieval.provider import Provider
from smartsearch_sidecar.search.service import Service
from tests.fakes.provider import FakeProvider

ENVIRONMENT = "agentinputlab:smartsearch-fixed-wikipedia-v1"
EXECUTE_CAPABILITY = "execute-capability-for-tests-0123456789abcd"
INTERNAL_CAPABILITY = "internal-capability-for-tests-0123456789abc"


def native_body(query: str, environment: str = ENVIRONMENT) -> dict[str, str]:
    """The body the pinned rollout posts for a query."""
    return {"env": environment, "call": f"wikipedia_search(query={query!r}, top_n=5)"}


@dataclass
class Served:
    """A daemon under test and how to reach it."""

    daemon: Daemon
    endpoints: Endpoints
    service: Service
    provider: Any
    session: aiohttp.ClientSession
    directory: Path
    task: asyncio.Task[int]
    exit_code: int | None = field(default=None)

    @property
    def port(self) -> int:
        return int(self.endpoints.sandbox_url.split(":")[2].split("/")[0])

    async def execute(self, query: str) -> tuple[int, Any]:
        """Posts a query as a rollout does; the status and the JSON."""
        return await self.post(json.dumps(native_body(query)).encode())

    async def post(
        self, body: bytes, *, content_type: str = "application/json", path: str = "/execute"
    ) -> tuple[int, Any]:
        async with self.session.post(
            self.endpoints.sandbox_url + path, data=body, headers={"Content-Type": content_type}
        ) as answer:
            return answer.status, await answer.json()

    async def internal(self, method: str, path: str, value: Any = None) -> tuple[int, Any]:
        async with self.session.request(
            method, self.endpoints.internal_url + path, json=value
        ) as answer:
            return answer.status, await answer.json()

    async def health(self, settle: float = 0.0) -> tuple[int, Any]:
        return await self.internal("GET", f"/health?settle={settle}")

    async def stop(self) -> int:
        """Stops the daemon as SIGTERM does and returns its exit code."""
        self.daemon.stop()
        self.exit_code = await self.task
        return self.exit_code

    def records(self) -> list[dict[str, Any]]:
        """The journal as it lies on disk."""
        return read_records(self.directory)


def read_records(directory: Path) -> list[dict[str, Any]]:
    """Every record of a run's journal, parsed."""
    return [
        json.loads(line)
        for segment in sorted((directory / "journal").iterdir())
        for line in segment.read_bytes().splitlines()
    ]


def configured(directory: Path, profile: str = "training", **keys: Any) -> Config:
    """A configuration for tests; keys with ``__`` for the dot, e.g. ``execute__slots=2``."""
    overrides: dict[str, Any] = {
        "profile": profile,
        "run.directory": str(directory),
        "server.port": 0,
        "server.execute_capability": EXECUTE_CAPABILITY,
        "server.internal_capability": INTERNAL_CAPABILITY,
        "retrieval.bm25.index": str(directory / "no-index"),
    }
    overrides.update({key.replace("__", "."): value for key, value in keys.items()})
    return load(None, overrides=overrides, environ={})


@asynccontextmanager
async def served(
    directory: Path,
    *,
    provider: Provider | None = None,
    disk: Disk | None = None,
    config: Config | None = None,
    resume: bool = False,
    receipt: CheckpointReceipt | None = None,
    trainer_stopped: bool = False,
    connect: Connect | None = None,
    **keys: Any,
) -> AsyncIterator[Served]:
    """Serves a run in ``directory`` until the block ends (or the test stops it)."""
    chosen = provider if provider is not None else FakeProvider()
    ready: asyncio.Future[tuple[Endpoints, Service]] = asyncio.get_running_loop().create_future()
    daemon = Daemon(
        config or configured(directory, **keys),
        disk=disk,
        provider=chosen,
        resume=resume,
        receipt=receipt,
        trainer_stopped=trainer_stopped,
        connect=connect,
        on_ready=lambda endpoints, service: ready.set_result((endpoints, service)),
    )
    task = asyncio.create_task(daemon.run())
    await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var]
    if not ready.done():
        await task  # raises what kept it from serving
    endpoints, service = ready.result()
    async with aiohttp.ClientSession() as session:
        run = Served(daemon, endpoints, service, chosen, session, directory, task)
        try:
            yield run
        finally:
            if not task.done():
                await run.stop()

"""What is measured, each in a process of its own: ``python -m tests.benchmarks.servers NAME PORT``.

``ours`` is the daemon with a provider that costs nothing and a synced ledger; ``bare`` an aiohttp
handler that returns the same bytes; ``reference`` the reference service with the same passages.
"""

from __future__ import annotations

import asyncio
import importlib
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web

from smartsearch_sidecar.contract import render_execute
from smartsearch_sidecar.daemon import Daemon
from tests.fakes.provider import FakeProvider
from tests.fakes.served import EXECUTE_CAPABILITY, configured

DOCUMENTS: Sequence[Mapping[str, Any]] = [
    {"id": str(rank), "contents": f'"Article {rank}"\n' + "words of it " * 50, "score": 5.0 - rank}
    for rank in range(5)
]
SLOW_SECONDS = 0.05


class Instant(FakeProvider):
    """Five passages at once, or after fifty milliseconds."""

    async def search(self, query: str, top_n: int) -> Sequence[Mapping[str, Any]]:
        if self.seconds:
            await asyncio.sleep(self.seconds)
        return DOCUMENTS


async def ours(port: int, seconds: float) -> None:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        config = configured(
            Path(folder) / "run",
            execute__max_calls=1_000_000_000,
            # A load generator leaves with requests in flight; a rollout would have failed the run.
            execute__on_undelivered="record",
            server__port=port,
        )
        daemon = Daemon(config, provider=Instant(seconds=seconds))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, daemon.stop)
        await daemon.run()


async def bare(port: int) -> None:
    text = "\n\n".join(str(item["contents"]).strip() for item in DOCUMENTS)
    payload = render_execute(text)

    async def handler(request: web.BaseRequest) -> web.Response:
        await request.read()
        return web.Response(body=payload, content_type="application/json")

    server = web.Server(handler, access_log=None)
    listening = await asyncio.get_running_loop().create_server(
        server, "127.0.0.1", port, backlog=4096
    )
    await listening.serve_forever()


class Retriever:
    """The same passages behind the reference's retriever surface."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def fingerprint(self) -> dict[str, str]:
        return {"corpus_sha256": "c" * 64, "index_sha256": "1" * 64}

    def search(self, query: str, top_n: int = 5) -> list[dict[str, Any]]:
        time.sleep(self._seconds)
        return [dict(item) for item in DOCUMENTS]


def reference(port: int, seconds: float) -> None:
    tools = importlib.import_module("agentinputlab.recipes.smartsearch_grpo_tools")
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        service = tools.SmartSearchGRPORetrievalService(
            Retriever(seconds), output_root=Path(folder) / "run", max_retrieval_calls=10**9
        )
        server = tools.make_smartsearch_grpo_retrieval_server(
            service, capability=EXECUTE_CAPABILITY, port=port
        )
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        server.serve_forever()


def main() -> None:
    name, port = sys.argv[1], int(sys.argv[2])
    seconds = SLOW_SECONDS if name.endswith("-50ms") else 0.0
    kind = name.removesuffix("-50ms")
    if kind == "reference":
        reference(port, seconds)
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(ours(port, seconds) if kind == "ours" else bare(port))


if __name__ == "__main__":
    main()

"""The peers, and what stands behind: ``python -m tests.benchmarks.servers KIND READY [WORDS]``.

READY is a file that gets ``{"url": ...}`` once the server listens. Kinds:

- ``bare``: an aiohttp handler that reads the body and returns the bytes our answer has;
- ``reference MILLISECONDS [INDEX]``: the reference service, over made-up passages or a BM25 index;
- ``layer NUMBER``: ours, put together from the outside in (``layers.py``);
- ``retriever MILLISECONDS``: a FlashRAG retriever that serves one call at a time, and writes what
  it was asked to READY with ``.asked`` behind when it is ended;
- ``helper MILLISECONDS``: a reward helper whose completions run side by side.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web

from smartsearch_sidecar.contract.execute import render_execute
from tests.benchmarks.instant import DOCUMENTS
from tests.fakes.provider import CORPUS_SHA256, INDEX_SHA256

# Each kind imports what it needs and no more: a peer's memory and start are looked at, too.

EXECUTE_CAPABILITY = "execute-capability-for-benchmarks-0123456789"
BACKLOG = 4096


def say(ready: Path, url: str) -> None:
    """Tells where we listen, all at once."""
    beside = ready.with_suffix(".new")
    beside.write_text(json.dumps({"url": url}))
    beside.rename(ready)


def constant() -> bytes:
    """The body of our answer for the made-up passages."""
    return render_execute("\n\n".join(str(item["contents"]).strip() for item in DOCUMENTS))


async def bare(ready: Path) -> None:
    payload = constant()

    async def handler(request: web.BaseRequest) -> web.Response:
        await request.read()
        return web.Response(body=payload, content_type="application/json")

    server = web.Server(handler, access_log=None)
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(server, "127.0.0.1", 0, backlog=BACKLOG)
    port = listening.sockets[0].getsockname()[1]
    say(ready, f"http://127.0.0.1:{port}/{EXECUTE_CAPABILITY}/execute")
    await ended()


async def ended() -> None:
    """Returns at SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()


class Retriever:
    """The reference's retriever surface, over made-up passages or an index."""

    def __init__(self, seconds: float, index: str | None) -> None:
        self._seconds = seconds
        self._index: Any = None
        if index is not None:
            from smartsearch_sidecar.retrieval.bm25.provider import verify_and_open

            self._index = verify_and_open(Path(index))

    def fingerprint(self) -> dict[str, str]:
        return {"corpus_sha256": CORPUS_SHA256, "index_sha256": INDEX_SHA256}

    def search(self, query: str, top_n: int = 5) -> list[dict[str, Any]]:
        if self._index is not None:
            found: list[dict[str, Any]] = self._index.search(query, top_n)
            return found
        time.sleep(self._seconds)
        return [dict(item) for item in DOCUMENTS]


def reference(ready: Path, seconds: float, index: str | None) -> None:
    tools = importlib.import_module("agentinputlab.recipes.smartsearch_grpo_tools")
    service = tools.SmartSearchGRPORetrievalService(
        Retriever(seconds, index), output_root=Path.cwd() / "reference", max_retrieval_calls=10**9
    )
    server = tools.make_smartsearch_grpo_retrieval_server(
        service, capability=EXECUTE_CAPABILITY, port=0
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    say(ready, f"http://127.0.0.1:{server.server_address[1]}/{EXECUTE_CAPABILITY}/execute")
    server.serve_forever()


async def retriever(ready: Path, seconds: float) -> None:
    from tests.fakes.retriever import FakeRetriever

    async with FakeRetriever(latency=seconds) as behind:
        say(ready, behind.url)
        await ended()
        asked = {"calls": len(behind.calls), "queries": behind.asked.total()}
        ready.with_name(ready.name + ".asked").write_text(json.dumps(asked))


async def helper(ready: Path, seconds: float) -> None:
    from tests.fakes.helper import FakeHelper

    async with FakeHelper(latency=seconds) as behind:
        say(ready, behind.url)
        await ended()


async def layer(ready: Path, number: int) -> None:
    from tests.benchmarks import layers

    server, port = await layers.serve(number, EXECUTE_CAPABILITY, constant(), Path.cwd())
    say(ready, f"http://127.0.0.1:{port}/{EXECUTE_CAPABILITY}/execute")
    await ended()
    server.close()


def main() -> None:
    kind, ready, *words = sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]
    number = int(words[0]) if words else 0
    if kind == "reference":
        reference(ready, number / 1000, words[1] if len(words) > 1 else None)
        return
    kinds: dict[str, Callable[[], Any]] = {
        "bare": lambda: bare(ready),
        "layer": lambda: layer(ready, number),
        "retriever": lambda: retriever(ready, number / 1000),
        "helper": lambda: helper(ready, number / 1000),
    }
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(kinds[kind]())


if __name__ == "__main__":
    main()

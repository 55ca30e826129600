"""A retriever service as the pinned trainer runs it, on 127.0.0.1, that can be told to misbehave.

Routes, fields, defaults and refusals are those of the real one (FastAPI over FlashRAG): ``/search``
refuses a blank query with 400, a field of the wrong type is 422, ``/batch_search`` takes anything,
``return_score`` adds scores. The corpus is made up from the query, so any query has an answer.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Self

from aiohttp import web


@dataclass(frozen=True, slots=True)
class Call:
    """One call as it arrived: route without slash, queries, top-n, and the headers' dictionary."""

    route: str
    queries: tuple[str, ...]
    top_n: int
    headers: dict[str, str]


class FakeRetriever:
    """Knobs may be turned while it runs.

    Attributes:
        latency: seconds each call takes; calls are answered one at a time unless ``side_by_side``.
        edition: which index is loaded; another one answers with other ids.
        revision: what the passages say; another one changes contents under the same ids.
        failure: name of a method ``_fail_<name>``, a status as text, or ``None`` for good answers.
        failures_left: how many more calls fail; ``None`` for all.
        refused: queries refused with ``refused_status``, whole batch included.
        routes: what is served; anything else is 404.
        gate: searches wait here once they are counted; set unless a test clears it.
    """

    def __init__(self, *, latency: float = 0.0) -> None:
        self.latency = latency
        self.side_by_side = False
        self.edition = "wiki18"
        self.revision = 1
        self.failure: str | None = None
        self.failures_left: int | None = None
        self.refused: set[str] = set()
        self.refused_status = 400
        self.routes = {"search", "batch_search", "health"}
        self.gate = asyncio.Event()
        self.gate.set()
        self.calls: list[Call] = []
        self.missed: list[str] = []
        self.busy = self.busiest = 0
        self.port = 0
        self._arrived = asyncio.Condition()
        self._one = asyncio.Semaphore(1)
        self._stopping = asyncio.Event()
        self._runner: web.AppRunner | None = None

    # --- life ------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listens on a free port, or again on the one it had."""
        self._stopping.clear()
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_route("*", "/{route:.*}", self._handle)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Ends it; calls that hang are let go first."""
        runner, self._runner = self._runner, None
        if runner is not None:
            self._stopping.set()
            self.gate.set()
            await runner.cleanup()

    async def kill(self) -> None:
        """Drops every connection without an answer and stops listening, as ``kill -9`` does."""
        if self._runner is not None and self._runner.server is not None:
            for connection in self._runner.server.connections:
                if connection.transport is not None:
                    connection.transport.abort()
        await self.stop()

    async def arrived(self, count: int) -> None:
        """Waits until ``count`` search calls have arrived in all."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.calls) >= count)

    # --- counting --------------------------------------------------------------------------------

    @property
    def asked(self) -> Counter[str]:
        """How often each query was asked, over all calls."""
        return Counter(query for call in self.calls for query in call.queries)

    @property
    def shapes(self) -> list[tuple[str, int]]:
        """Route and number of queries of each call, in order of arrival."""
        return [(call.route, len(call.queries)) for call in self.calls]

    def documents(self, query: str, top_n: int = 5) -> list[dict[str, str]]:
        """What a search for ``query`` answers."""
        stem = hashlib.sha256(f"{self.edition}|{query}".encode()).hexdigest()[:12]
        return [
            {
                "id": f"{stem}-{rank}",
                "contents": f'"Article {stem}"\nPassage {rank} of revision {self.revision}.',
            }
            for rank in range(top_n)
        ]

    # --- answering -------------------------------------------------------------------------------

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        route = request.path.removeprefix("/")
        if route not in self.routes:
            self.missed.append(route)
            return web.json_response({"detail": "Not Found"}, status=404)
        if request.method != ("GET" if route == "health" else "POST"):
            return web.json_response({"detail": "Method Not Allowed"}, status=405)
        if route == "health":
            return await self._failed(request, 0) or web.json_response({"status": "healthy"})
        body = await request.json()
        query, top_n = body.get("query"), body.get("top_n", 10)
        many = route == "batch_search"
        queries = query if many else [query]
        if not isinstance(queries, list) or not all(isinstance(q, str) for q in queries):
            return web.json_response({"detail": [{"type": "string_type"}]}, status=422)
        async with self._arrived:
            self.calls.append(Call(route, tuple(queries), top_n, dict(request.headers)))
            self._arrived.notify_all()
        if not self.refused.isdisjoint(queries) or (not many and not query.strip()):
            return web.json_response({"detail": "refused"}, status=self.refused_status)
        await self._work()
        failed = await self._failed(request, len(queries))
        if failed is not None:
            return failed
        answer = [self.documents(q, top_n) for q in queries]
        scores = [[1.0] * top_n for _ in queries]
        if not many:
            value: object = (answer[0], scores[0]) if body.get("return_score") else answer[0]
        else:
            value = (answer, scores) if body.get("return_score") else answer
        return web.json_response(value)

    async def _work(self) -> None:
        self.busy += 1
        self.busiest = max(self.busiest, self.busy)
        try:
            await self.gate.wait()
            if self.side_by_side:
                await asyncio.sleep(self.latency)
            else:
                async with self._one:
                    await asyncio.sleep(self.latency)
        finally:
            self.busy -= 1

    async def _failed(self, request: web.Request, count: int) -> web.StreamResponse | None:
        if self.failure is None or self.failures_left == 0:
            return None
        if self.failures_left is not None:
            self.failures_left -= 1
        if self.failure.isdigit():
            page = f"<html>{self.failure}: SECRET-PASSAGE</html>"
            return web.Response(status=int(self.failure), text=page, content_type="text/html")
        fail: Callable[[web.Request, int], Awaitable[web.StreamResponse]]
        fail = getattr(self, f"_fail_{self.failure}")
        return await fail(request, count)

    async def _fail_proxy(self, request: web.Request, count: int) -> web.StreamResponse:
        page = "<html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>"
        return web.Response(status=502, text=page, content_type="text/html")

    async def _fail_redirect(self, request: web.Request, count: int) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": f"{self.url}/health"})

    async def _fail_html(self, request: web.Request, count: int) -> web.StreamResponse:
        page = "<!doctype html><html><body>Gateway SECRET-PASSAGE</body></html>"
        return web.Response(text=page, content_type="text/html")

    async def _fail_html_as_json(self, request: web.Request, count: int) -> web.StreamResponse:
        return web.Response(text="  <html>SECRET-PASSAGE", content_type="application/json")

    async def _fail_text(self, request: web.Request, count: int) -> web.StreamResponse:
        return web.Response(text="SECRET-PASSAGE", content_type="text/plain")

    async def _fail_cut(self, request: web.Request, count: int) -> web.StreamResponse:
        return web.Response(text='[{"id": "SECRET-PASSAGE', content_type="application/json")

    async def _fail_error_object(self, request: web.Request, count: int) -> web.StreamResponse:
        return web.json_response({"error": "SECRET-PASSAGE"})

    async def _fail_scores(self, request: web.Request, count: int) -> web.StreamResponse:
        return web.json_response([self.documents("SECRET-PASSAGE"), [1.0] * 5])

    async def _fail_empty(self, request: web.Request, count: int) -> web.StreamResponse:
        return web.json_response([] if request.path == "/search" else [[]] * count)

    async def _fail_strings(self, request: web.Request, count: int) -> web.StreamResponse:
        return web.json_response([["SECRET-PASSAGE"]] * count)

    async def _fail_short(self, request: web.Request, count: int) -> web.StreamResponse:
        return web.json_response([self.documents("SECRET-PASSAGE")] * (count - 1))

    async def _fail_gzip(self, request: web.Request, count: int) -> web.StreamResponse:
        body = gzip.compress(json.dumps(self.documents("SECRET-PASSAGE")).encode())
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        return web.Response(body=body, headers=headers)

    async def _fail_huge(self, request: web.Request, count: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        while not self._stopping.is_set():
            await response.write(b" " * 65536)
        return response

    async def _fail_hang(self, request: web.Request, count: int) -> web.StreamResponse:
        await self._stopping.wait()
        return web.Response(status=503)

    async def _fail_drip(self, request: web.Request, count: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        while not self._stopping.is_set():
            await response.write(b" ")
            await asyncio.sleep(0.02)
        return response

    async def _fail_closed(self, request: web.Request, count: int) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.close()
        return web.Response()

    async def _fail_closed_midway(self, request: web.Request, count: int) -> web.StreamResponse:
        headers = {"Content-Type": "application/json", "Content-Length": "1000"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        await response.write(b'[{"id": ')
        if request.transport is not None:
            request.transport.close()
        return response

    async def _fail_not_http(self, request: web.Request, count: int) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.write(b"SSH-2.0-OpenSSH_9.6\r\nSECRET-PASSAGE\r\n\r\n")
            request.transport.close()
        return web.Response()

"""Our own modules put together from the outside in, so that each one's cost is a difference.

Layer 0 is the bare aiohttp handler and the last two are the whole daemon (``profiling.py``). In
between, every layer does what the one before does and one thing more, as ``service.py`` would for a
query that is sound; answers are the same bytes throughout. What costs more than it should shows
here first; what a layer costs is then measured, not guessed from a tracer's own distortions.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Final

from smartsearch_sidecar.contract.execute import (
    ExecuteCall,
    ExecuteRules,
    parse_execute,
    render_execute,
)
from smartsearch_sidecar.ledger.file import RunFiles
from smartsearch_sidecar.ledger.writer import wall_clock
from smartsearch_sidecar.process.sockets import bind
from smartsearch_sidecar.retrieval.guard import CachedSearch, Guard
from smartsearch_sidecar.run.line import Draft, draft, encode_line
from smartsearch_sidecar.run.record import NativeCall, RetrievalAnswered, RetrievalRequested
from smartsearch_sidecar.run.slots import Slots
from smartsearch_sidecar.run.state import RunState
from smartsearch_sidecar.web.capabilities import Capabilities
from smartsearch_sidecar.web.edge.connection import EdgeServer
from smartsearch_sidecar.web.edge.request import EdgeRequest, Reply, response_head
from smartsearch_sidecar.web.edge.server import listen
from smartsearch_sidecar.web.routes import read_body
from tests.benchmarks.instant import Instant
from tests.fakes.served import ENVIRONMENT, INTERNAL_CAPABILITY

BARE, EDGE, PARSE, ADMISSION, SEARCH, RECORDS, CHAIN, WRITE, HAND_OVER, SYNC = range(10)

NAMES: Final = (
    "a bare aiohttp handler",
    "+ the edge: bounded body, capability, headers, delivery",
    "+ parse: strict JSON, the literal call, the query",
    "+ admission: a slot, the quota",
    "+ search: identity twice, sharing, cache, documents checked",
    "+ records: requested and answered, encoded and folded",
    "+ chain: two lines, two sums",
    "+ write: one append a request, on the loop",
    "+ hand-over: to the ledger's thread and back, receipts, metrics (the daemon, unsynced)",
    "+ sync: one a batch (the daemon as it is served)",
)
DEADLINE_SECONDS: Final = 9.0
BODY_BYTES_MAX: Final = 262_144


class Observer:
    """Hears what no handler sees: here it should be nothing, so it is printed."""

    def malformed(self, reason: str, authenticated: bool) -> None:
        if reason != "abandoned":  # how a load generator leaves
            print("malformed:", reason, file=sys.stderr)

    def crashed(self, exc: BaseException) -> None:
        print("crashed:", repr(exc), file=sys.stderr)

    def overflow(self) -> None:
        print("overflow", file=sys.stderr)

    def exhausted(self) -> None:
        print("exhausted", file=sys.stderr)


class Stack:
    """The layers up to ``number``."""

    def __init__(self, number: int, capability: str, payload: bytes, folder: Path) -> None:
        self._number = number
        self._payload = payload
        self.capabilities = Capabilities(capability, INTERNAL_CAPABILITY)
        self._rules = ExecuteRules(ENVIRONMENT, frozenset())
        self._slots = Slots(8, 512)
        self._state = RunState(max_calls=10**9)
        guard = Guard(Instant(), top_n=5, retries=2, drop_tagged=True, watch_drift=True)
        self._retrieval = CachedSearch(guard, cache_bytes=64 << 20)
        self._files = RunFiles(folder / "layers", sync=False)
        self._seq, self._head = 0, "0" * 64

    async def open(self) -> None:
        """What happens once, before the first request."""
        await self._retrieval.guard.claim_identity()
        self._files.create()
        self._files.start_segment(1)

    async def handle(self, request: EdgeRequest) -> Reply:
        """One request, as ``web/app.py`` takes it."""
        if not self.capabilities.is_execute(request.raw_target):
            return request.refuse(401, b"{}")
        body = await read_body(request, BODY_BYTES_MAX, 10)
        payload = self._payload
        if self._number >= PARSE:
            payload = await self._answer(parse_execute(body, self._rules), request.began)
        head = response_head(200, len(payload), close=not request.keep_alive)
        return request.deliver(head, payload, lambda stage: None)

    async def _answer(self, call: ExecuteCall, began: float) -> bytes:
        if self._number < ADMISSION:
            return self._payload
        deadline = began + DEADLINE_SECONDS
        await self._slots.take(deadline)
        try:
            self._state.admit_search()
            if self._number < SEARCH:
                return self._payload
            return await self._search(call, deadline)
        finally:
            self._slots.give()

    async def _search(self, call: ExecuteCall, deadline: float) -> bytes:
        await self._retrieval.guard.check_identity()
        if self._number < RECORDS:
            found, _ = await self._retrieval.find(call.query.strip(), deadline)
            return render_execute(found.text)
        number = self._state.admit_search()
        words = NativeCall(call.env, call.call, call.query)
        asked = self._fold(draft(RetrievalRequested(number, words)))
        began = asyncio.get_running_loop().time()
        found, outcome = await self._retrieval.find(call.query.strip(), deadline)
        took = int((asyncio.get_running_loop().time() - began) * 1e6)
        record = RetrievalAnswered(number, found.documents_json, outcome, took)
        answered = self._fold(draft(record))
        if self._number >= CHAIN:
            blob = self._chain(asked) + self._chain(answered)
            if self._number >= WRITE:
                self._files.append(blob, sync=False)
        return render_execute(found.text)

    def _fold(self, item: Draft) -> Draft:
        self._state.fold(item.record)
        return item

    def _chain(self, item: Draft) -> bytes:
        self._seq += 1
        record, at = item.record, wall_clock()
        line, self._head = encode_line(
            record.kind, record.number, item.data_json, seq=self._seq, at=at, prev=self._head
        )
        return line


async def serve(
    number: int, capability: str, payload: bytes, folder: Path
) -> tuple[asyncio.Server, int]:
    """Serves the layers up to ``number`` on a free port."""
    stack = Stack(number, capability, payload, folder)
    await stack.open()
    server = EdgeServer(
        stack.handle,
        observer=Observer(),
        capabilities=stack.capabilities,
        keepalive_seconds=75,
        connections_max=4096,
    )
    sock = bind("127.0.0.1", 0)
    port: int = sock.getsockname()[1]
    return await listen(server, sock), port

"""The handlers: from an edge request to the service and back, for both capabilities.

A handler raises only named errors; ``App.handle`` turns them into the answers of the table in
``routes.py``. Until the provider is loaded there is no service: rollouts wait for it within their
deadline, and whoever could not be served then closes the latch as soon as there is one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import orjson
import structlog
from aiohttp import web

from smartsearch_sidecar import errors
from smartsearch_sidecar.metrics import Observer
from smartsearch_sidecar.scoring.service import Scoring
from smartsearch_sidecar.search.service import Answer, Service
from smartsearch_sidecar.web.edge import EdgeRequest, Reply, response_head
from smartsearch_sidecar.web.internal import InternalRoutes
from smartsearch_sidecar.web.operator import OperatorRoutes
from smartsearch_sidecar.web.other_clients import SearchRoutes
from smartsearch_sidecar.web.routes import (
    Capabilities,
    declared_length,
    error_payload,
    require_json,
    status_of,
)

if TYPE_CHECKING:
    from smartsearch_sidecar.gate.cluster import ClusterRun

PROBES = frozenset({"/livez", "/readyz"})


class App:
    """One run's routes. The service comes once, when the provider is loaded and the run claimed."""

    def __init__(
        self,
        capabilities: Capabilities,
        *,
        body_bytes_max: int,
        body_seconds: float,
        deadline_seconds: float,
        routes: Collection[str] = ("execute",),
        retrieve_topk: int = 3,
        observer: Observer | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """``routes`` and ``retrieve_topk`` are the keys of ``[execute]``; ``about`` names the run
        on its page.
        """
        self.observer = observer or Observer()
        self.operator = OperatorRoutes(self.observer, about or {})
        self._capabilities = capabilities
        self._body_bytes_max = body_bytes_max
        self._body_seconds = body_seconds
        self._deadline_seconds = deadline_seconds
        self._service: Service | None = None
        self._ready = asyncio.Event()
        self._early: errors.SidecarError | None = None
        self._log = structlog.get_logger("web")
        self._internal = InternalRoutes(self._read_body, _json, self.operator)
        self._serves_execute = "execute" in routes
        self._searches = SearchRoutes(
            routes,
            retrieve_topk=retrieve_topk,
            body_bytes_max=body_bytes_max,
            read_body=self._read_body,
            ready=self._serving,
            hand_over=self._hand_over,
            refuse=self._refuse_search,
        )

    def serve_with(
        self,
        service: Service,
        scoring: Scoring | None = None,
        cluster_run: ClusterRun | None = None,
    ) -> None:
        """Opens the door. Refusals from before close the latch now, the first one first."""
        self._service = service
        self._internal.service = service
        self._internal.scoring = scoring
        self._internal.cluster_run = cluster_run
        if self._early is not None and self._early.cause is not None:
            service.run.recorder.close_latch(
                self._early.cause, detail=f"while loading: {self._early.message}"
            )
        self._ready.set()

    # --- what the edge observes -------------------------------------------------------------------

    def malformed(self, reason: str, authenticated: bool) -> None:
        """Bytes the parser refused; only those of our own client touch the run."""
        self.observer.requests["unknown", "bad_message"] += 1
        if authenticated:
            self._close(errors.BAD_MESSAGE(f"bytes that are not HTTP ({reason})"))

    def overflow(self) -> None:
        """A connection over ``server.connections_max`` was refused: every one that is open carries
        our capability or awaits an answer, so the one refused was a rollout's or the trainer's.
        """
        self._log.error("connections_max reached; a connection was refused")
        self._close(errors.BUSY("server.connections_max was reached and a connection refused"))

    def crashed(self, exc: BaseException) -> None:
        """A handler broke; the run is over, because nobody knows what was answered."""
        self._log.error("handler failed", exception=type(exc).__name__, exc_info=exc)
        self._close(errors.INTERNAL_ERROR(f"a handler ended in {type(exc).__name__}"))

    def _close(self, exc: errors.SidecarError) -> None:
        if exc.cause is None:
            return
        if self._service is None:
            self._early = self._early or exc
        else:
            self._service.run.recorder.refused[exc.cause] += 1
            self._service.run.recorder.close_latch(exc.cause, detail=exc.message)

    # --- dispatch ---------------------------------------------------------------------------------

    async def handle(self, request: EdgeRequest) -> Reply | web.StreamResponse:
        """Every request of every route."""
        raw = request.raw_target
        if self._capabilities.is_execute(raw) and request.method == "POST" and self._serves_execute:
            return await self._execute(request)
        if raw in PROBES:
            return self._probe(request, raw)
        try:
            target = self._capabilities.read(raw)
            if target.internal:
                return await self._internal.dispatch(request, target)
            if request.method != "POST":
                raise errors.METHOD_NOT_ALLOWED("rollouts post")
            (segment,) = target.segments
            if self._searches.serves(segment):
                return await self._searches.answer(request, segment)
            raise errors.NOT_FOUND("a rollout asked for a route that is not served")
        except errors.SidecarError as exc:
            return await self._refused(request, exc)

    @property
    def capability_marker(self) -> bytes:
        """What the bytes of a rollout's connection carry."""
        return self._capabilities.capability_marker

    async def handle_probe(self, request: EdgeRequest) -> Reply:
        """The second listener's routes: ``/livez`` and ``/readyz`` alone."""
        if request.raw_target in PROBES:
            return self._probe(request, request.raw_target)
        return self._error(request, errors.UNAUTHORIZED("only probes are served here"))

    async def _execute(self, request: EdgeRequest) -> Reply:
        try:
            body = await self._read_body(request, self._body_bytes_max)
            service = self._service or await self._serving(request)
        except errors.SidecarError as exc:
            return await self._refused(request, exc)
        try:
            answer = await service.execute(body, began=request.began, gone=request.gone)
        except errors.SidecarError as exc:
            return await self._refused(request, exc)
        return self._hand_over(request, service, answer)

    async def _read_body(self, request: EdgeRequest, bytes_max: int) -> bytes:
        headers = request.headers
        length = declared_length(
            "Transfer-Encoding" in headers, headers.getall("Content-Length", []), bytes_max
        )
        require_json(headers.get("Content-Type", ""))
        return await request.body(length, self._body_seconds)

    def _hand_over(self, request: EdgeRequest, service: Service, answer: Answer) -> Reply:
        number, others = answer.number, answer.others
        route = request.raw_target.rpartition("/")[2]  # served, so one of few
        outcome = "ok" if number is not None else "declined"
        self.observer.requests[route, outcome] += 1
        self.observer.service.observe(asyncio.get_running_loop().time() - request.began)
        head = response_head(200, len(answer.payload), close=not request.keep_alive)
        return request.deliver(
            head, answer.payload, lambda stage: service.undelivered(number, stage, others)
        )

    async def _serving(self, request: EdgeRequest) -> Service:
        """The service, once there is one; a rollout waits for it within its deadline."""
        try:
            async with asyncio.timeout_at(request.began + self._deadline_seconds):
                await self._ready.wait()
        except TimeoutError:
            raise errors.BUSY("the index was still loading at the request's deadline") from None
        if self._service is None:
            raise errors.INTERNAL_ERROR("ready without a service")
        return self._service

    async def _refused(self, request: EdgeRequest, exc: errors.SidecarError) -> Reply:
        """An answer of the table; a refusal that closes the latch is durable before it is sent."""
        return self._error(request, await self._settle_refusal(exc))

    async def _settle_refusal(self, exc: errors.SidecarError) -> errors.SidecarError:
        """Counts a refusal, and closes the latch where it must; what is to be answered."""
        if self._service is not None:
            try:
                await self._service.run.recorder.refuse(exc)
            except errors.LedgerFailed as failure:
                return failure
        elif exc.cause is not None:
            self._early = self._early or exc
        return exc

    async def _refuse_search(self, exc: errors.SidecarError, segment: str) -> errors.SidecarError:
        answered = await self._settle_refusal(exc)
        self.observer.requests[segment, answered.code] += 1
        return answered

    def _error(self, request: EdgeRequest, exc: errors.SidecarError) -> Reply:
        self.observer.requests[self._route(request.raw_target), exc.code] += 1
        # Who holds the internal capability is told what is wrong: those sentences are constant.
        return request.refuse(status_of(exc), error_payload(exc))

    def _route(self, raw: str) -> str:
        """What a refused request asked for, as one of few words."""
        if raw in PROBES:
            return "probe"
        try:
            target = self._capabilities.read(raw)
        except errors.Unauthorized:
            return "unknown"
        if target.internal:
            return self._internal.route(target)
        return "execute" if target.segments == ("execute",) else "unserved"

    def _probe(self, request: EdgeRequest, raw: str) -> Reply:
        if request.method != "GET":
            return self._error(request, errors.METHOD_NOT_ALLOWED("probes are read"))
        if raw == "/livez":
            return _json(request, 200, {"status": "alive"})
        ready = self._service is not None and not self._service.run.state.closed
        return _json(request, 200 if ready else 503, {"status": "ready" if ready else "not_ready"})


def _json(request: EdgeRequest, status: int, value: Any) -> Reply:
    payload = orjson.dumps(value)
    return request.deliver(
        response_head(status, len(payload), close=not request.keep_alive), payload
    )

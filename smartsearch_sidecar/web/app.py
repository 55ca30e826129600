"""Every request of a run: dispatch by capability, rollouts, the probes, what the edge observes.

A handler raises only named errors; `errors` says how each is answered. Until the run is claimed a
rollout waits for it within its deadline; one that could not be served closes the latch as soon as
there is a run.

The routes of other trainers' clients serve as ``/execute`` does, with two differences. A batch's
body may be large, so it is parsed before its slot and off the loop. And some clients turn every
error status into an empty text: such a client is told of a failure in the one way that reaches its
log (``Form.surfaces`` of the contract).

Apart from the daemon, its one user: routes here, the process there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import structlog
from aiohttp import web

from smartsearch_sidecar import errors
from smartsearch_sidecar.contract.execute import TOP_N
from smartsearch_sidecar.contract.json import strict_json
from smartsearch_sidecar.contract.other_clients import (
    BATCH_BYTES_MAX,
    Form,
    read_form,
    read_searches,
    render_failure,
)
from smartsearch_sidecar.metrics import Observer
from smartsearch_sidecar.search.service import search_many
from smartsearch_sidecar.web.edge.request import EdgeRequest, Reply
from smartsearch_sidecar.web.internal import InternalRoutes
from smartsearch_sidecar.web.operator import OperatorRoutes
from smartsearch_sidecar.web.ready import Ready, ServedRun
from smartsearch_sidecar.web.routes import (
    Capabilities,
    answer_json,
    answer_search,
    error_payload,
    parse,
    read_body,
    refuse,
)

PROBES = frozenset({"/livez", "/readyz"})
# What stands after the capability, by the name in `execute.routes`.
SEGMENTS = {"search": ("search", "batch_search"), "retrieve": ("retrieve",)}


class App:
    """One run's routes; they serve from `serve` on."""

    def __init__(
        self,
        capabilities: Capabilities,
        *,
        body_bytes_max: int,
        body_seconds: float,
        deadline_seconds: float,
        routes: Collection[str] = ("execute",),
        retrieve_topk: int = 3,
        observer: Observer,
        about: Mapping[str, Any],
    ) -> None:
        """Build the routes.

        Args:
            capabilities: the run's two secrets.
            body_bytes_max: of a rollout's body; a batch of searches has the contract's bound.
            body_seconds: that any body may take to arrive.
            deadline_seconds: from a rollout's first byte to its answer.
            routes: the key of ``[execute]``: which routes a rollout may ask.
            retrieve_topk: the key of ``[execute]``: passages of ``/retrieve`` without ``topk``.
            observer: counts what is answered.
            about: names the run on its page.
        """
        self.observer = observer
        self._capabilities = capabilities
        self._body_bytes_max = body_bytes_max
        self._body_seconds = body_seconds
        self._log = structlog.get_logger("web")
        self._serves_execute = "execute" in routes
        self._ready = Ready(deadline_seconds)
        self.operator = OperatorRoutes(self._ready, observer, about)
        self._internal = InternalRoutes(
            self._ready, observer, self.operator, body_seconds=body_seconds
        )
        self._segments = {name for route in routes for name in SEGMENTS.get(route, ())}
        self._top_n = {"search": TOP_N, "batch_search": TOP_N, "retrieve": retrieve_topk}

    def serve(self, run: ServedRun) -> None:
        """Open the door to the claimed run. A failure from before closes its latch now."""
        self._ready.claimed(run)
        self.operator.watch(run)

    async def close(self) -> None:
        """End the page's ticks and streams."""
        await self.operator.close()

    # --- what the edge observes -------------------------------------------------------------------

    def malformed(self, reason: str, authenticated: bool) -> None:
        """Bytes the parser refused; only those of our own client touch the run."""
        self.observer.requests["unknown", "bad_message"] += 1
        if authenticated:
            self._ready.close_latch(errors.BAD_MESSAGE(f"bytes that are not HTTP ({reason})"))

    def overflow(self) -> None:
        """A connection over ``server.connections_max`` was refused: every one that is open carries
        our capability or awaits an answer, so the one refused was a rollout's or the trainer's.
        """
        self._log.error("connections_max reached; a connection was refused")
        self._ready.close_latch(
            errors.BUSY("server.connections_max was reached and a connection refused")
        )

    def crashed(self, exc: BaseException) -> None:
        """A handler broke; the run is over, because what was answered is not known."""
        self._log.error("handler failed", exception=type(exc).__name__, exc_info=exc)
        self._ready.close_latch(errors.INTERNAL_ERROR(f"a handler ended in {type(exc).__name__}"))

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
            if segment in self._segments:
                return await self._search(request, segment)
            raise errors.NOT_FOUND("a rollout asked for a route that is not served")
        except errors.SidecarError as exc:
            return await self._settled(request, exc)

    @property
    def capability_marker(self) -> bytes:
        """What the bytes of a rollout's connection carry."""
        return self._capabilities.capability_marker

    async def handle_probe(self, request: EdgeRequest) -> Reply:
        """The second listener's routes: ``/livez`` and ``/readyz`` alone."""
        if request.raw_target in PROBES:
            return self._probe(request, request.raw_target)
        return self._refused(request, errors.UNAUTHORIZED("only probes are served here"))

    async def _execute(self, request: EdgeRequest) -> Reply:
        try:
            body = await read_body(request, self._body_bytes_max, self._body_seconds)
            run = await self._ready.wait(request.began)
            found = await run.service.execute(body, began=request.began, gone=request.gone)
        except errors.SidecarError as exc:
            return await self._settled(request, exc)
        return answer_search(request, run, found, "execute")

    async def _search(self, request: EdgeRequest, segment: str) -> Reply:
        """Serves another client's request, or refuses it in the form that client notices."""
        form: Form | None = None
        try:
            bytes_max = self._body_bytes_max if segment == "search" else BATCH_BYTES_MAX
            body = await read_body(request, bytes_max, self._body_seconds)
            value = await parse(body, strict_json)
            form = read_form(segment, value)
            asked = read_searches(form, value, self._top_n[segment])
            run = await self._ready.wait(request.began)
            found = await search_many(run.service, asked, began=request.began, gone=request.gone)
        except errors.SidecarError as exc:
            answered = await self._ready.settle(exc)
            self.observer.requests[segment, answered.code] += 1
            if form is not None and form.surfaces:
                return request.refuse(200, render_failure(error_payload(answered)))
            return refuse(request, answered)
        return answer_search(request, run, found, segment)

    def _probe(self, request: EdgeRequest, raw: str) -> Reply:
        if request.method != "GET":
            return self._refused(request, errors.METHOD_NOT_ALLOWED("probes are read"))
        if raw == "/livez":
            return answer_json(request, 200, {"status": "alive"})
        ready = self._ready.healthy()
        status = "ready" if ready else "not_ready"
        return answer_json(request, 200 if ready else 503, {"status": status})

    # --- refusals ---------------------------------------------------------------------------------

    async def _settled(self, request: EdgeRequest, exc: errors.SidecarError) -> Reply:
        """A refusal that closes the latch is durable before it is sent."""
        return self._refused(request, await self._ready.settle(exc))

    def _refused(self, request: EdgeRequest, exc: errors.SidecarError) -> Reply:
        self.observer.requests[self._route(request.raw_target), exc.code] += 1
        return refuse(request, exc)

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

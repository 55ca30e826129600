"""Every request of a run: of rollouts, trainer, operator, probes; and what the edge observes.

A handler raises only named errors; `errors` says how each is answered. Until the run is claimed a
rollout waits for it within its deadline; one that could not be served closes the latch as soon as
there is a run.

The routes of other trainers' clients serve as ``/execute`` does, with two differences. A batch's
body may be large, so it is parsed before its slot and off the loop. And some clients turn every
error status into an empty text: such a client is told of a failure in the one way that reaches its
log (``Form.surfaces`` of the contract).

A slip of the operator changes nothing. What holds a capability and is not served closes the latch,
since it may be a rollout's, and so does the internal capability where a rollout would ask. A failed
reward closes the latch even when the trainer made the slip: the pinned trainer swallows the first
exception and scores the batch again.

Apart from the daemon, its one user: routes here, the process there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any
from urllib.parse import unquote

import orjson
import structlog
from aiohttp import web

from smartsearch_sidecar import errors
from smartsearch_sidecar.contract import other_clients
from smartsearch_sidecar.contract.execute import TOP_N
from smartsearch_sidecar.contract.json import strict_json
from smartsearch_sidecar.contract.reward import RewardItem, parse_reward, parse_reward_batch
from smartsearch_sidecar.gate.checkpoints import SETTLE_SECONDS, parse_checkpoint, take_checkpoint
from smartsearch_sidecar.gate.health import health_report
from smartsearch_sidecar.gate.receipts import compare
from smartsearch_sidecar.metrics import Observer
from smartsearch_sidecar.scoring.service import Scoring, as_reward_failure
from smartsearch_sidecar.search.service import search_many
from smartsearch_sidecar.web.capabilities import Capabilities, Target
from smartsearch_sidecar.web.edge.request import EdgeRequest, Reply
from smartsearch_sidecar.web.edge.server import descriptor_left
from smartsearch_sidecar.web.operator import OperatorRoutes
from smartsearch_sidecar.web.ready import Ready, ServedRun
from smartsearch_sidecar.web.routes import (
    answer_json,
    answer_search,
    error_payload,
    may_repeat,
    parse,
    read_body,
    refuse,
)

PROBES = frozenset({"/livez", "/readyz"})
# What stands after the capability, by the name in `execute.routes`.
SEGMENTS = {"search": ("search", "batch_search"), "retrieve": ("retrieve",)}
ROLLOUT_SEGMENTS = frozenset({"execute", *(name for names in SEGMENTS.values() for name in names)})

SETTLE_SECONDS_MAX = 600.0  # a gate that waits longer is a hung trainer
OPERATOR_BYTES_MAX = 65536  # a reason, a path
ESCAPES = 2  # bytes of JSON per byte of text: quotes, newlines and what a client escapes besides
REWARDS_BYTES_MAX = 256 * 1024 * 1024  # held in memory until the whole batch is in

LATCHED_BY = {"operator": errors.OPERATOR.closes_as, "trainer": errors.TRAINER_REPORTED.closes_as}

Handler = Callable[[EdgeRequest, Target], Awaitable[tuple[int, Any]]]


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
        declines_calls: bool = False,
        observer: Observer,
        about: Mapping[str, Any],
    ) -> None:
        """``body_bytes_max`` bounds a rollout's body (a batch of searches has the contract's own),
        ``body_seconds`` the time any body may take to arrive, ``deadline_seconds`` the time from a
        rollout's first byte to its answer. ``routes`` and ``retrieve_topk`` are the keys of
        ``[execute]``, ``declines_calls`` its ``on_invalid_call``; ``about`` names the run on its
        page.
        """
        self.observer = observer
        self.capabilities = capabilities
        self._body_bytes_max = body_bytes_max
        self._body_seconds = body_seconds
        self._log = structlog.get_logger("web")
        self._serves_execute = "execute" in routes
        self._ready = Ready(deadline_seconds)
        self.operator = OperatorRoutes(self._ready, observer, about)
        self._segments = {name for route in routes for name in SEGMENTS.get(route, ())}
        self._declines_calls = declines_calls
        self._top_n = {"search": TOP_N, "batch_search": TOP_N, "retrieve": retrieve_topk}
        self._internal_routes: dict[tuple[str, ...], tuple[str, Handler]] = {
            ("health",): ("GET", self._health),
            ("status",): ("GET", self._status),
            ("latch",): ("POST", self._latch),
            ("checkpoints",): ("POST", self._checkpoint),
            ("checkpoints", "verify"): ("POST", self._verify),
            ("reward",): ("POST", self._reward),
            ("reward", "batch"): ("POST", self._reward_batch),
        }

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
        """A connection over ``server.connections_max`` was refused: a rollout's or the trainer's,
        since it has shown a capability.
        """
        self._ready.close_latch(
            errors.BUSY("server.connections_max was reached and a connection refused")
        )
        self._log.error("connections_max reached; a connection was refused")

    def exhausted(self) -> None:
        """Connections may have been dropped before any code of ours has seen them."""
        self._ready.close_latch(
            errors.OUT_OF_DESCRIPTORS("no file descriptor was left to accept a connection with")
        )
        self._log.error("no file descriptor is left; connections may have been dropped")

    def look(self) -> bool:
        """Whether a connection could be accepted now; if not, the run has failed."""
        left = descriptor_left()
        if not left:
            self.exhausted()
        return left

    def crashed(self, exc: BaseException) -> None:
        """A handler broke; the run is over, because what was answered is not known."""
        # First, for what kept the handler from its end may keep the log from its line.
        self._ready.close_latch(errors.INTERNAL_ERROR(f"a handler ended in {type(exc).__name__}"))
        self._log.error("handler failed", exception=type(exc).__name__, exc_info=exc)

    # --- dispatch ---------------------------------------------------------------------------------

    async def handle(self, request: EdgeRequest) -> Reply | web.StreamResponse:
        """Every request of every route."""
        raw = request.raw_target
        if self.capabilities.is_execute(raw) and request.method == "POST" and self._serves_execute:
            return await self._execute(request)
        if raw in PROBES:
            return self._probe(request, raw)
        try:
            target = self._read(request)
            if target.internal:
                return await self._internal(request, target)
            if request.method != "POST":
                raise errors.ROLLOUT_METHOD("a rollout's route was asked by another method")
            (segment,) = target.segments
            if segment == "execute" and self._serves_execute:
                return await self._execute(request)
            if segment in self._segments:
                return await self._search(request, segment)
            raise errors.NOT_FOUND("a rollout asked for a route that is not served")
        except errors.SidecarError as exc:
            return await self._settled(request, exc)

    async def handle_probe(self, request: EdgeRequest) -> Reply:
        """The second listener's routes: ``/livez`` and ``/readyz`` alone."""
        if request.raw_target in PROBES:
            return self._probe(request, request.raw_target)
        exc: errors.SidecarError = errors.UNAUTHORIZED("only probes are served here")
        if self.capabilities.carried(request.raw_target, request.headers):
            exc = errors.MISDIRECTED("a capability was sent to the listener of the probes")
        return await self._settled(request, exc)

    def _read(self, request: EdgeRequest) -> Target:
        """The target of a request. Raises ``Unauthorized``, or ``MISDIRECTED`` where it holds a
        capability all the same.
        """
        try:
            return self.capabilities.read(request.raw_target)
        except errors.Unauthorized:
            if self.capabilities.carried(request.raw_target, request.headers):
                raise errors.MISDIRECTED(
                    "a request held a capability in another place or spelling than is served"
                ) from None
            raise

    async def _execute(self, request: EdgeRequest) -> Reply:
        try:
            body = await read_body(request, self._body_bytes_max, self._body_seconds)
            run = await self._ready.wait(request.began)
            ask = may_repeat(request, run, "execute", body)
            found = await run.service.execute(body, began=request.began, gone=request.gone, ask=ask)
        except errors.SidecarError as exc:
            return await self._settled(request, exc)
        return answer_search(request, run, found, "execute")

    async def _search(self, request: EdgeRequest, segment: str) -> Reply:
        """Serves another client's request, or refuses it in the form that client notices."""
        form: other_clients.Form | None = None
        try:
            bytes_max = (
                self._body_bytes_max if segment == "search" else other_clients.BATCH_BYTES_MAX
            )
            body = await read_body(request, bytes_max, self._body_seconds)
            value = await parse(body, strict_json)
            form = other_clients.read_form(segment, value)
            asked = other_clients.read_searches(
                form, value, self._top_n[segment], declines_calls=self._declines_calls
            )
            run = await self._ready.wait(request.began)
            ask = may_repeat(request, run, segment, body)
            found = await search_many(
                run.service, asked, began=request.began, gone=request.gone, ask=ask
            )
        except errors.SidecarError as exc:
            answered = await self._ready.settle(exc)
            self.observer.requests[segment, answered.code] += 1
            if form is not None and form.surfaces:
                return request.refuse(200, other_clients.render_failure(error_payload(answered)))
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

    async def _internal(self, request: EdgeRequest, target: Target) -> Reply | web.StreamResponse:
        page = self.operator.pages.get(target.segments)
        if page is not None:
            if request.method == "POST" and not any(target.segments):
                raise errors.ROLLOUT_METHOD("a rollout posted to the internal URL")
            if request.method != "GET":
                raise errors.METHOD_NOT_ALLOWED("pages are read")
            shown = await page(request, target.query)
            self.observer.requests[self._internal_route(target), "ok"] += 1
            return shown
        route = self._internal_routes.get(target.segments)
        if route is None:
            if not ROLLOUT_SEGMENTS.isdisjoint(unquote(one).lower() for one in target.segments):
                raise errors.NOT_FOUND("a rollout's route was asked under the internal capability")
            raise errors.NO_SUCH_PAGE("no internal route of this name")
        method, handler = route
        if request.method != method:
            raise errors.METHOD_NOT_ALLOWED("not with this method")
        status, value = await handler(request, target)
        outcome = "ok" if status < 400 else f"status_{status}"
        self.observer.requests[self._internal_route(target), outcome] += 1
        return answer_json(request, status, value)

    # --- the gate and the operator ----------------------------------------------------------------

    async def _health(self, request: EdgeRequest, target: Target) -> tuple[int, Any]:
        run = self._ready.now()
        seconds = _settle_seconds(target.query)
        self.look()
        if run.cluster_run is None:
            report = await health_report(run.service, settle_seconds=seconds)
        else:
            report = await run.cluster_run.health(run.service, seconds)
        return (200 if report["state"] == "healthy" else 503), report

    async def _status(self, request: EdgeRequest, target: Target) -> tuple[int, Any]:
        return 200, self._ready.now().status()

    async def _latch(self, request: EdgeRequest, target: Target) -> tuple[int, Any]:
        run = self._ready.now()
        value = await self._operator_json(request)
        asked = value if isinstance(value, dict) else {}
        reason, cause = asked.get("reason"), LATCHED_BY.get(str(asked.get("by", "operator")))
        if not isinstance(reason, str) or not reason.strip() or cause is None:
            raise errors.OPERATOR_REQUEST(
                'send {"reason": "why"}, and of a trainer "by": "trainer"'
            )
        run.service.run.recorder.close_latch(cause, detail=reason)
        await run.service.run.recorder.latch_durable()
        return 200, run.status()

    async def _checkpoint(self, request: EdgeRequest, target: Target) -> tuple[int, Any]:
        run = self._ready.now()
        wanted = parse_checkpoint(await self._operator_json(request))
        seconds = _settle_seconds(target.query, SETTLE_SECONDS)
        self.look()
        accepted, answer = await take_checkpoint(
            run.service, wanted, settle_seconds=seconds, cluster_run=run.cluster_run
        )
        return (201 if accepted else 409), answer

    async def _verify(self, request: EdgeRequest, target: Target) -> tuple[int, Any]:
        """Holds a receipt against the ledger. The run is not touched by it."""
        run = self._ready.now()
        receipt = await self._operator_json(request)
        return 200, await asyncio.to_thread(compare, run.directory, receipt)

    async def _operator_json(self, request: EdgeRequest) -> Any:
        """An internal body. A slip in it must not close the latch under an edge refusal's name."""
        try:
            return orjson.loads(await read_body(request, OPERATOR_BYTES_MAX, self._body_seconds))
        except (errors.EdgeRefusal, orjson.JSONDecodeError):
            raise errors.OPERATOR_REQUEST(
                "send one JSON object, declared as application/json, with its Content-Length"
            ) from None

    # --- rewards ----------------------------------------------------------------------------------

    def _need_scoring(self) -> Scoring:
        scoring = self._ready.now().scoring
        if scoring is None:
            raise errors.NO_SUCH_PAGE("rewards are off: set reward.enabled")
        return scoring

    async def _reward(self, request: EdgeRequest, target: Target) -> tuple[int, Any]:
        scoring = self._need_scoring()
        bound = scoring.section.max_input_bytes * ESCAPES + OPERATOR_BYTES_MAX
        (scored,) = await self._score(request, scoring, bound, lambda body: (parse_reward(body),))
        return 200, scored

    async def _reward_batch(self, request: EdgeRequest, target: Target) -> tuple[int, Any]:
        scoring = self._need_scoring()
        rows_max = scoring.section.batch_max
        scored = await self._score(
            request, scoring, REWARDS_BYTES_MAX, lambda body: parse_reward_batch(body, rows_max)
        )
        return 200, {"rewards": scored}

    async def _score(
        self,
        request: EdgeRequest,
        scoring: Scoring,
        bytes_max: int,
        rule: Callable[[bytes], tuple[RewardItem, ...]],
    ) -> list[dict[str, Any]]:
        try:
            items = await parse(await read_body(request, bytes_max, self._body_seconds), rule)
        except errors.SidecarError as exc:
            raise as_reward_failure(exc) from exc
        return [row.as_json() for row in await scoring.score(items, began=request.began)]

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
            target = self.capabilities.read(raw)
        except errors.Unauthorized:
            return "unknown"
        if target.internal:
            return self._internal_route(target)
        return "execute" if target.segments == ("execute",) else "unserved"

    def _internal_route(self, target: Target) -> str:
        """The route a target names, as one of few words."""
        if target.segments in self.operator.pages:
            return target.segments[0] or "page" if target.segments else "page"
        return "/".join(target.segments) if target.segments in self._internal_routes else "unserved"


def _settle_seconds(query: str, absent: float = 0.0) -> float:
    """``settle=SECONDS`` of a query string."""
    if not query:
        return absent
    name, _, value = query.partition("=")
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if name != "settle" or not 0 <= seconds <= SETTLE_SECONDS_MAX:
        raise errors.OPERATOR_REQUEST(
            f"settle must be a number of seconds from 0 to {SETTLE_SECONDS_MAX:g}"
        )
    return seconds

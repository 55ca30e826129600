"""The routes under the internal capability: the trainer's and the operator's.

Apart from `app`, its one importer, because its callers are others: a file a caller.
A slip of the operator changes nothing. A failed reward closes the latch even when the trainer made
the slip: the pinned trainer swallows the first exception and scores the batch again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

from smartsearch_sidecar import errors
from smartsearch_sidecar.contract.reward import RewardItem, parse_reward, parse_reward_batch
from smartsearch_sidecar.gate.checkpoints import SETTLE_SECONDS, parse_checkpoint, take_checkpoint
from smartsearch_sidecar.gate.health import health_report
from smartsearch_sidecar.metrics import Observer
from smartsearch_sidecar.scoring.service import Scoring, as_reward_failure
from smartsearch_sidecar.web.edge.request import EdgeRequest, Reply
from smartsearch_sidecar.web.operator import OperatorRoutes
from smartsearch_sidecar.web.ready import Ready
from smartsearch_sidecar.web.routes import Target, answer_json, parse, read_body

SETTLE_SECONDS_MAX = 600.0  # a gate that waits longer is a hung trainer
OPERATOR_BYTES_MAX = 65536  # a reason, a path
ESCAPES = 2  # bytes of JSON per byte of text: quotes, newlines and what a client escapes besides
BATCH_BYTES_MAX = 256 * 1024 * 1024  # held in memory until the whole batch is in

Handler = Callable[[EdgeRequest, Target], Awaitable[tuple[int, Any]]]


class InternalRoutes:
    """Health, status, latch, checkpoints and rewards; the operator's pages are dispatched here."""

    def __init__(
        self, ready: Ready, observer: Observer, operator: OperatorRoutes, *, body_seconds: float
    ) -> None:
        self._ready = ready
        self._observer = observer
        self._operator = operator
        self._body_seconds = body_seconds
        self._routes: dict[tuple[str, ...], dict[str, Handler]] = {
            ("health",): {"GET": self._health},
            ("status",): {"GET": self._status},
            ("latch",): {"POST": self._latch},
            ("checkpoints",): {"POST": self._checkpoint},
            ("reward",): {"POST": self._reward},
            ("reward", "batch"): {"POST": self._reward_batch},
        }

    async def dispatch(self, request: EdgeRequest, target: Target) -> Reply | web.StreamResponse:
        """Serves an authenticated internal request; raises the named error that answers it."""
        page = self._operator.pages.get(target.segments)
        if page is not None:
            if request.method != "GET":
                raise errors.METHOD_NOT_ALLOWED("pages are read")
            shown = await page(request, target.query)
            self._observer.requests[self.route(target), "ok"] += 1
            return shown
        methods = self._routes.get(target.segments)
        if methods is None:
            raise errors.NO_SUCH_PAGE("no internal route of this name")
        handler = methods.get(request.method)
        if handler is None:
            raise errors.METHOD_NOT_ALLOWED("not with this method")
        status, value = await handler(request, target)
        outcome = "ok" if status < 400 else f"status_{status}"
        self._observer.requests[self.route(target), outcome] += 1
        return answer_json(request, status, value)

    def route(self, target: Target) -> str:
        """The route a target names, as one of few words."""
        if target.segments in self._operator.pages:
            return target.segments[0] or "page" if target.segments else "page"
        return "/".join(target.segments) if target.segments in self._routes else "unserved"

    # --- the gate and the operator ----------------------------------------------------------------

    async def _health(self, request: EdgeRequest, target: Target) -> tuple[int, Any]:
        run = self._ready.now()
        seconds = _settle_seconds(target.query)
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
        reason = value.get("reason") if isinstance(value, dict) else None
        if not isinstance(reason, str) or not reason.strip():
            raise errors.OPERATOR_REQUEST('send {"reason": "why"}')
        run.service.run.recorder.close_latch("operator", detail=reason)
        await run.service.run.recorder.latch_durable()
        return 200, run.status()

    async def _checkpoint(self, request: EdgeRequest, target: Target) -> tuple[int, Any]:
        run = self._ready.now()
        wanted = parse_checkpoint(await self._operator_json(request))
        seconds = _settle_seconds(target.query, SETTLE_SECONDS)
        accepted, answer = await take_checkpoint(
            run.service, wanted, settle_seconds=seconds, cluster_run=run.cluster_run
        )
        return (201 if accepted else 409), answer

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
            request, scoring, BATCH_BYTES_MAX, lambda body: parse_reward_batch(body, rows_max)
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

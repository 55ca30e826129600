"""The trainer's and the operator's routes, under the internal capability.

A slip of the operator changes nothing; a failed reward closes the latch, whoever made the slip,
because the pinned trainer swallows the first exception and scores the batch again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from smartsearch_sidecar import errors
from smartsearch_sidecar.contract.reward import RewardItem, parse_reward, parse_reward_batch
from smartsearch_sidecar.gate.checkpoints import SETTLE_SECONDS, parse_checkpoint, take_checkpoint
from smartsearch_sidecar.gate.health import health_report, status_report
from smartsearch_sidecar.scoring.service import Scoring, as_reward_failure
from smartsearch_sidecar.search.service import Service
from smartsearch_sidecar.web.edge import EdgeRequest, Reply
from smartsearch_sidecar.web.operator import OperatorRoutes
from smartsearch_sidecar.web.routes import Target

if TYPE_CHECKING:
    from smartsearch_sidecar.gate.cluster import ClusterRun

SETTLE_SECONDS_MAX = 600.0  # a gate that waits longer is a hung trainer
OPERATOR_BYTES_MAX = 65536  # a reason, a path
PARSE_ON_LOOP_BYTES_MAX = 65536  # strict parsing of more would hold the loop for milliseconds
ESCAPES = 2  # bytes of JSON per byte of text: quotes, newlines and what a client escapes besides
BATCH_BYTES_MAX = 256 * 1024 * 1024  # held in memory until the whole batch is in

ReadBody = Callable[[EdgeRequest, int], Awaitable[bytes]]
AnswerJson = Callable[[EdgeRequest, int, Any], Reply]
Handler = Callable[[EdgeRequest, Target], Awaitable[tuple[int, Any]]]


class InternalRoutes:
    """``service`` is set once the run is claimed, ``scoring`` with it where rewards are enabled,
    ``cluster_run`` where the run has other nodes: then what is said is said of the run.
    """

    def __init__(
        self, read_body: ReadBody, answer_json: AnswerJson, operator: OperatorRoutes
    ) -> None:
        self.service: Service | None = None
        self.scoring: Scoring | None = None
        self.cluster_run: ClusterRun | None = None
        self._read_body = read_body
        self._answer_json = answer_json
        self._operator = operator
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
            self._operator.count(self.route(target), "ok")
            return shown
        methods = self._routes.get(target.segments)
        if methods is None:
            raise errors.NO_SUCH_PAGE("no internal route of this name")
        handler = methods.get(request.method)
        if handler is None:
            raise errors.METHOD_NOT_ALLOWED("not with this method")
        status, value = await handler(request, target)
        outcome = "ok" if status < 400 else f"status_{status}"
        self._operator.count(self.route(target), outcome)
        return self._answer_json(request, status, value)

    def route(self, target: Target) -> str:
        """The route a target names, as one of few words."""
        if target.segments in self._operator.pages:
            return target.segments[0] or "page" if target.segments else "page"
        return "/".join(target.segments) if target.segments in self._routes else "unserved"

    def _need_service(self) -> Service:
        if self.service is None:
            raise errors.NOT_READY("the index is still loading")
        return self.service

    # --- the gate and the operator ----------------------------------------------------------------

    async def _health(self, request: EdgeRequest, target: Target) -> tuple[int, Any]:
        service = self._need_service()
        seconds = _settle_seconds(target.query)
        if self.cluster_run is None:
            report = await health_report(service, settle_seconds=seconds)
        else:
            report = await self.cluster_run.health(service, seconds)
        return (200 if report["state"] == "healthy" else 503), report

    async def _status(self, request: EdgeRequest, target: Target) -> tuple[int, Any]:
        return 200, self._report(self._need_service())

    async def _latch(self, request: EdgeRequest, target: Target) -> tuple[int, Any]:
        service = self._need_service()
        value = await self._operator_json(request)
        reason = value.get("reason") if isinstance(value, dict) else None
        if not isinstance(reason, str) or not reason.strip():
            raise errors.OPERATOR_REQUEST('send {"reason": "why"}')
        service.run.recorder.close_latch("operator", detail=reason)
        await service.run.recorder.latch_durable()
        return 200, self._report(service)

    def _report(self, service: Service) -> dict[str, Any]:
        return (
            status_report(service) if self.cluster_run is None else self.cluster_run.status(service)
        )

    async def _checkpoint(self, request: EdgeRequest, target: Target) -> tuple[int, Any]:
        service = self._need_service()
        wanted = parse_checkpoint(await self._operator_json(request))
        seconds = _settle_seconds(target.query, SETTLE_SECONDS)
        accepted, answer = await take_checkpoint(
            service, wanted, settle_seconds=seconds, cluster_run=self.cluster_run
        )
        return (201 if accepted else 409), answer

    async def _operator_json(self, request: EdgeRequest) -> Any:
        """An internal body. A slip in it must not close the latch under an edge refusal's name."""
        try:
            return orjson.loads(await self._read_body(request, OPERATOR_BYTES_MAX))
        except (errors.EdgeRefusal, orjson.JSONDecodeError):
            raise errors.OPERATOR_REQUEST(
                "send one JSON object, declared as application/json, with its Content-Length"
            ) from None

    # --- rewards ----------------------------------------------------------------------------------

    def _need_scoring(self) -> Scoring:
        self._need_service()
        if self.scoring is None:
            raise errors.NO_SUCH_PAGE("rewards are off: set reward.enabled")
        return self.scoring

    async def _reward(self, request: EdgeRequest, target: Target) -> tuple[int, Any]:
        scoring = self._need_scoring()
        bound = scoring.policy.max_input_bytes * ESCAPES + OPERATOR_BYTES_MAX
        (scored,) = await self._score(request, scoring, bound, lambda body: (parse_reward(body),))
        return 200, scored

    async def _reward_batch(self, request: EdgeRequest, target: Target) -> tuple[int, Any]:
        scoring = self._need_scoring()
        rows_max = scoring.policy.batch_max
        scored = await self._score(
            request, scoring, BATCH_BYTES_MAX, lambda body: parse_reward_batch(body, rows_max)
        )
        return 200, {"rewards": scored}

    async def _score(
        self,
        request: EdgeRequest,
        scoring: Scoring,
        bytes_max: int,
        parse: Callable[[bytes], tuple[RewardItem, ...]],
    ) -> list[dict[str, Any]]:
        try:
            body = await self._read_body(request, bytes_max)
            if len(body) > PARSE_ON_LOOP_BYTES_MAX:
                items = await asyncio.to_thread(parse, body)
            else:
                items = parse(body)
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

"""The routes of other trainers' clients, under the execute capability.

As ``/execute``, with two differences. A batch's body may be large, so it is parsed before its slot
and off the loop. And a client that turns every error status into an empty text is told of a failure
in the one way it does not swallow (``contract_search.Form.surfaces``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Final

from smartsearch_sidecar import errors
from smartsearch_sidecar.contract.call_syntax import TOP_N
from smartsearch_sidecar.contract.json import strict_json
from smartsearch_sidecar.contract.other_clients import (
    BATCH_BYTES_MAX,
    Form,
    read_form,
    read_searches,
    render_failure,
)
from smartsearch_sidecar.search.batch import search_many
from smartsearch_sidecar.search.service import Answer, Service
from smartsearch_sidecar.web.edge import EdgeRequest, Reply
from smartsearch_sidecar.web.routes import error_payload, status_of

PARSE_ON_LOOP_BYTES_MAX: Final = 65_536  # strict parsing of more would hold the loop for long
SEGMENTS: Final = {"search": ("search", "batch_search"), "retrieve": ("retrieve",)}

ReadBody = Callable[[EdgeRequest, int], Awaitable[bytes]]
Ready = Callable[[EdgeRequest], Awaitable[Service]]
HandOver = Callable[[EdgeRequest, Service, Answer], Reply]
Refuse = Callable[[errors.SidecarError, str], Awaitable[errors.SidecarError]]


class SearchRoutes:
    """Serves the segments of the routes that ``execute.routes`` names."""

    def __init__(
        self,
        routes: Collection[str],
        *,
        retrieve_topk: int,
        body_bytes_max: int,
        read_body: ReadBody,
        ready: Ready,
        hand_over: HandOver,
        refuse: Refuse,
    ) -> None:
        """``ready`` gives the service once it serves; ``refuse`` counts a refusal, durably where
        it closes the latch, and returns what is to be answered.
        """
        self._top_n = {"search": TOP_N, "batch_search": TOP_N, "retrieve": retrieve_topk}
        self._segments = {name for route in routes for name in SEGMENTS.get(route, ())}
        self._body_bytes_max = body_bytes_max
        self._read_body = read_body
        self._ready = ready
        self._hand_over = hand_over
        self._refuse = refuse

    def serves(self, segment: str) -> bool:
        """Whether a POST to this segment is answered here."""
        return segment in self._segments

    async def answer(self, request: EdgeRequest, segment: str) -> Reply:
        """Serves one request, or refuses it in the form its client notices."""
        form: Form | None = None
        try:
            bytes_max = self._body_bytes_max if segment == "search" else BATCH_BYTES_MAX
            body = await self._read_body(request, bytes_max)
            if len(body) > PARSE_ON_LOOP_BYTES_MAX:
                value = await asyncio.to_thread(strict_json, body)
            else:
                value = strict_json(body)
            form = read_form(segment, value)
            asked = read_searches(form, value, self._top_n[segment])
            service = await self._ready(request)
            answer = await search_many(service, asked, began=request.began, gone=request.gone)
        except errors.SidecarError as exc:
            return self._error(request, await self._refuse(exc, segment), form)
        return self._hand_over(request, service, answer)

    def _error(self, request: EdgeRequest, exc: errors.SidecarError, form: Form | None) -> Reply:
        payload = error_payload(exc)
        if form is not None and form.surfaces:
            return request.refuse(200, render_failure(payload))
        return request.refuse(status_of(exc), payload)

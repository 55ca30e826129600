"""The routes of other trainers' clients, under the execute capability.

Apart from `app`, its one importer, because its callers are others: a file a caller.
They serve as ``/execute`` does, with two differences. A batch's body may be large, so it is parsed
before its slot and off the loop. And some clients turn every error status into an empty text: such
a client is told of a failure in the one way that reaches its log (``Form.surfaces`` of the
contract).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

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
from smartsearch_sidecar.web.exchange import answer_search, parse, read_body, refuse
from smartsearch_sidecar.web.ready import Ready
from smartsearch_sidecar.web.routes import error_payload

SEGMENTS: Final = {"search": ("search", "batch_search"), "retrieve": ("retrieve",)}


class SearchRoutes:
    """Serves the segments of the routes that ``execute.routes`` names."""

    def __init__(
        self,
        ready: Ready,
        observer: Observer,
        routes: Collection[str],
        *,
        retrieve_topk: int,
        body_bytes_max: int,
        body_seconds: float,
    ) -> None:
        """``body_bytes_max`` bounds a single search; a batch has the contract's bound."""
        self._ready = ready
        self._observer = observer
        self._top_n = {"search": TOP_N, "batch_search": TOP_N, "retrieve": retrieve_topk}
        self._segments = {name for route in routes for name in SEGMENTS.get(route, ())}
        self._body_bytes_max = body_bytes_max
        self._body_seconds = body_seconds

    def serves(self, segment: str) -> bool:
        """Whether a POST to this segment is answered here."""
        return segment in self._segments

    async def answer(self, request: EdgeRequest, segment: str) -> Reply:
        """Serves one request, or refuses it in the form its client notices."""
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
            self._observer.requests[segment, answered.code] += 1
            if form is not None and form.surfaces:
                return request.refuse(200, render_failure(error_payload(answered)))
            return refuse(request, answered)
        return answer_search(request, run, found, segment)

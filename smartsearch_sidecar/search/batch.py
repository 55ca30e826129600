"""One request of another trainer's client: one or many searches, in the order of any search.

A batch holds one slot and one deadline. Its searches are numbered in their order, each counted and
recorded as if it had come alone, and run side by side; all of them are answered or none. The first
failure closes the latch, and a closed latch admits nothing more; what is under way settles.

Apart from ``web/other_clients.py``, its one user: the order of searches is no matter of a route.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Final

from smartsearch_sidecar import errors
from smartsearch_sidecar.contract.execute import DECLINED_RESULT
from smartsearch_sidecar.contract.other_clients import (
    DECLINED_SCORES,
    Query,
    Searches,
    render_answer,
    render_declined,
    render_found,
    render_scores,
)
from smartsearch_sidecar.ledger.writer import Receipt
from smartsearch_sidecar.run.line import Draft
from smartsearch_sidecar.run.record import ClientQuery
from smartsearch_sidecar.search.service import Answer, Service, refuse_as_reference

AT_ONCE: Final = 256
"""Searches of one request under way: enough to fill a retriever's calls while others are out, and
few enough that a search that comes alone does not wait behind thousands."""
AHEAD_RECORDS: Final = 256
"""Records a batch may be ahead of the ledger; beyond, its searches wait for their own. Answers from
the cache come without a pause: this is also where they let others have a turn."""


async def search_many(
    service: Service, asked: Searches, *, began: float, gone: Callable[[], bool]
) -> Answer:
    """Serves one request; ``began`` is the loop's clock at its first byte.

    Raises a ``SidecarError`` whose latch, if any, is closed and durable by then.
    """
    return await service.in_turn(
        began, gone, lambda deadline: _SearchBatch(service, asked, deadline).answer()
    )


class _SearchBatch:
    """One request under way; what its searches come to stands at their index."""

    def __init__(self, service: Service, asked: Searches, deadline: float) -> None:
        self._service = service
        self._asked = asked
        self._deadline = deadline
        self._left = count = len(asked.queries)
        self._parts = [b""] * count
        self._scores = [b""] * count
        # Only the unmodified environment's rollouts are rewarded here: it joins what `/search` and
        # `/batch_search` answer. Provenance has no use for what `/retrieve` answers.
        self._on_answer = service.on_answer if asked.form.route != "retrieve" else None
        self._texts = [""] * count
        self._numbers: list[int] = []
        self._failure: errors.SidecarError | None = None

    async def answer(self) -> Answer:
        """The whole answer, once every search is settled and its record on the medium."""
        service, queries = self._service, self._asked.queries
        problems = [query.problem for query in queries if query.problem is not None]
        if not service.policy.decline:
            for problem in problems:
                refuse_as_reference(problem)
        try:
            await self._run(searched=not service.policy.decline or len(problems) < len(queries))
        except asyncio.CancelledError:
            # Searches under way have recorded their loss; those already answered are lost as well.
            if self._left < len(queries):
                service.undelivered(self._first, "cancelled before the answer", self._others)
            raise
        if self._on_answer is not None:
            for text in self._texts:
                self._on_answer(text)
        payload = render_answer(self._asked, self._parts, self._scores)
        return Answer(payload, self._first, self._others)

    @property
    def _first(self) -> int | None:
        return min(self._numbers, default=None)

    @property
    def _others(self) -> tuple[int, ...]:
        return tuple(sorted(self._numbers)[1:])

    async def _run(self, *, searched: bool) -> None:
        if searched and self._asked.queries:
            await self._service.check_identity(self._deadline)
        todo = iter(enumerate(self._asked.queries))
        workers = min(len(self._asked.queries), AT_ONCE)
        if workers <= 1:
            await self._work(todo)
        else:
            # Never cancelled by each other, and all of them awaited: each has something to settle.
            ended = await asyncio.gather(
                *(self._work(todo) for _ in range(workers)), return_exceptions=True
            )
            for end in ended:
                if isinstance(end, BaseException):
                    raise end
        if self._failure is not None:
            raise self._failure

    async def _work(self, todo: Iterator[tuple[int, Query]]) -> None:
        for index, query in todo:
            try:
                await self._one(index, query)
            except errors.SidecarError as exc:
                self._failure = self._failure or exc
                return

    async def _one(self, index: int, query: Query) -> None:
        service, form, top_n = self._service, self._asked.form, self._asked.top_n
        place = (index + 1, len(self._asked.queries)) if form.many else (None, None)
        asked = ClientQuery(form.route, query.text, top_n, *place)
        if query.problem is not None and service.policy.decline:
            receipt = self._post(service.decline(query.problem, asked))
            self._keep(index, render_declined(form), DECLINED_SCORES, DECLINED_RESULT)
        else:
            number, found, item = await service.search(
                query.text, query.problem, asked, self._deadline, top_n
            )
            self._numbers.append(number)
            receipt = self._post(item)
            documents = found.documents()
            scores = render_scores(documents) if self._asked.scores else b""
            self._keep(index, render_found(form, documents), scores, found.text)
        if receipt is not None:
            await receipt

    def _post(self, item: Draft) -> asyncio.Future[Receipt] | None:
        """Hands a settlement over. The last one's receipt covers those before it."""
        self._left -= 1
        writer = self._service.run.writer
        if self._left == 0 or writer.queued >= AHEAD_RECORDS:
            return writer.post_for_receipt(item)
        writer.post(item)
        return None

    def _keep(self, index: int, part: bytes, scores: bytes, text: str) -> None:
        self._parts[index], self._scores[index], self._texts[index] = part, scores, text

"""How searches become calls of a FlashRAG retriever, and a refused batch becomes smaller ones.

A lone search goes through ``/search``, several through ``/batch_search``. The retriever's word for
"this query is not one" is 400 or 422, and it refuses a whole batch for one query: a refused batch
is halved until the refused query stands alone, so the others are answered. Where ``/batch_search``
is missing (404, 405) the caller is told, and the searches go side by side through ``/search``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from smartsearch_sidecar import errors
from smartsearch_sidecar.retrieval.flashrag.batcher import Failed
from smartsearch_sidecar.retrieval.flashrag.wire import (
    MISSING,
    REFUSED,
    Documents,
    answered,
    parse_documents,
    parse_lists,
)

Post = Callable[[str, str | list[str], int, int], Awaitable[tuple[int, object]]]
"""Route, query or queries, top-n and the number of searches, to status and JSON value."""

_T = TypeVar("_T")


class Calls:
    """``ask`` turns the searches of one call into an outcome each; it raises no retrieval error.

    ``where`` begins the messages; ``batch_missing`` is told when ``/batch_search`` is not served.
    """

    def __init__(self, post: Post, *, where: str, batch_missing: Callable[[], None]) -> None:
        self._post = post
        self._where = where
        self._batch_missing = batch_missing

    async def ask(self, top_n: int, queries: Sequence[str]) -> list[Documents | Failed]:
        """One outcome per query, in order."""
        if len(queries) == 1:
            return [await _outcome(self._alone(top_n, queries[0]))]
        answer = await _outcome(self._together(top_n, queries))
        if isinstance(answer, Failed):
            return [answer] * len(queries)
        if isinstance(answer, list):
            return [*answer]
        if answer in REFUSED:
            half = len(queries) // 2
            return [
                *await self.ask(top_n, queries[:half]),
                *await self.ask(top_n, queries[half:]),
            ]
        self._batch_missing()
        return await asyncio.gather(*(_outcome(self._alone(top_n, query)) for query in queries))

    async def _alone(self, top_n: int, query: str) -> Documents:
        status, value = await self._post("search", query, top_n, 1)
        if status in REFUSED:
            raise errors.PROVIDER_FAULT(f"{self._where} refused the query (status {status})")
        if status in MISSING:
            raise errors.PROVIDER_FAULT(
                f"{self._where} does not serve /search (status {status}); "
                "correct retrieval.flashrag.url"
            )
        return parse_documents(value, answered(self._where, "search"))

    async def _together(self, top_n: int, queries: Sequence[str]) -> list[Documents] | int:
        """An answer per query, or the status that says refused or missing."""
        status, value = await self._post("batch_search", list(queries), top_n, len(queries))
        if status != 200:
            return status
        return parse_lists(value, len(queries), answered(self._where, "batch_search"))


async def _outcome(call: Coroutine[Any, Any, _T]) -> _T | Failed:
    try:
        return await call
    except errors.RetrievalError as error:
        return Failed(error)

"""The pinned trainer's own retriever service, asked over HTTP.

What it speaks (``retriever_serving.py`` of the pinned trainer, FastAPI over FlashRAG)::

    POST /search        {"query": str,   "top_n": int} -> [{"id", "contents"}, ...]
    POST /batch_search  {"query": [str], "top_n": int} -> [[{"id", "contents"}, ...], ...]
    GET  /health

It answers one call at a time, so concurrent searches travel as one ``/batch_search``
(``batcher.py``); a lone one goes through ``/search``. The retriever refuses a query with 400 or
422, and a whole batch for one such query: a refused batch is halved until the refused query stands
alone, so the others are answered. Where ``/batch_search`` is missing (404, 405), the searches go
side by side through ``/search``.

Corpus and index are declared by the operator; ``canaries`` defend the declaration.

Apart from ``registry.py``, which opens it by its name: one backend a folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.config import Config, FlashRagSection
from smartsearch_sidecar.outbound_http import ExchangeFailed, ExchangeFault, OutboundHttp
from smartsearch_sidecar.retrieval import canaries as canary_file
from smartsearch_sidecar.retrieval.canaries import CANARY_SECONDS, CanaryWatch
from smartsearch_sidecar.retrieval.flashrag.batcher import Failed, Gather
from smartsearch_sidecar.retrieval.flashrag.wire import (
    MISSING,
    REFUSED,
    Documents,
    answered,
    parse_documents,
    parse_json,
    parse_lists,
    parse_status,
    parse_url,
)
from smartsearch_sidecar.run.json_values import has_utf8_form, is_sha256

ANSWER_BYTES_PER_SEARCH = 1024 * 1024
"""Times the searches of a call. Five passages are some 5 KB: what is over this is not passages."""

KEEPALIVE_SECONDS = 3.0
"""Under the 5 s after which uvicorn closes an idle connection: reusing one it is just closing would
look like a lost search."""

_T = TypeVar("_T")


class _Exchange:
    """HTTP to one retriever, every failure named as a retrieval error."""

    def __init__(self, url: str, *, timeout_seconds: float, connections_max: int) -> None:
        self._url, address = parse_url(url)
        self.where = f"the retriever at {address}"
        self._timeout = timeout_seconds
        self._http = OutboundHttp(
            connections_max=connections_max,
            keepalive_seconds=KEEPALIVE_SECONDS,
            connect_seconds=None,
        )

    def open(self) -> None:
        """Makes the pool; no connection yet."""
        self._http.open()

    async def close(self) -> None:
        """Closes the pool; connections in use are broken off."""
        await self._http.close()

    async def call(
        self, method: str, route: str, payload: object | None, *, bytes_max: int
    ) -> tuple[int, object]:
        """Status and, with 200, the JSON value.

        Statuses 400, 404, 405 and 422 are returned for the caller to judge; every other is raised
        as ``ProviderFault``. An exchange that did not complete raises ``ProviderTransport``.
        """
        subject = answered(self.where, route)
        try:
            answer = await self._http.exchange(
                method,
                f"{self._url}/{route}",
                None if payload is None else orjson.dumps(payload),
                until=asyncio.get_running_loop().time() + self._timeout,
                bytes_max=bytes_max,
            )
        except ExchangeFailed as error:
            raise self._fault(error, route, bytes_max) from error
        if parse_status(answer.status, subject) != 200:
            return answer.status, None
        return 200, parse_json(answer.body, answer.media, subject)

    def _fault(
        self, error: ExchangeFailed, route: str, bytes_max: int
    ) -> errors.ProviderFault | errors.ProviderTransport:
        """What an exchange without a usable answer is to a search."""
        subject = answered(self.where, route)
        match error.failure:
            case ExchangeFault.LATE:
                return errors.PROVIDER_TRANSPORT(
                    f"{self.where} did not answer /{route} within {self._timeout:g} s"
                )
            case ExchangeFault.CERTIFICATE:
                return errors.PROVIDER_FAULT(
                    f"{self.where} has no certificate this machine accepts"
                )
            case ExchangeFault.NO_CONNECTION:
                return errors.PROVIDER_TRANSPORT(
                    f"{self.where} takes no connection ({error.why}): "
                    "start it, or correct retrieval.flashrag.url"
                )
            case ExchangeFault.BROKEN_OFF:
                return errors.PROVIDER_TRANSPORT(f"{self.where} broke off /{route}: {error.why}")
            case ExchangeFault.COMPRESSED:
                return errors.PROVIDER_FAULT(
                    f"{subject} a compressed body, though none was asked for"
                )
            case ExchangeFault.TOO_LONG:
                return errors.PROVIDER_FAULT(f"{subject} more than {bytes_max} bytes")
            case _:
                return errors.PROVIDER_FAULT(f"{subject} something that is not HTTP ({error.why})")


async def open_configured(config: Config, _progress: object = None) -> FlashragProvider:
    """The provider of ``[retrieval.flashrag]``, started; nothing of it is verified here."""
    return await from_config(config.retrieval.flashrag)


async def from_config(settings: FlashRagSection) -> FlashragProvider:
    """A started provider. Raises ``ConfigError`` for a missing key, and what ``start`` raises."""
    for key in ("url", "corpus_sha256", "index_sha256"):
        if getattr(settings, key) is None:
            raise errors.CONFIG_INVALID(
                f"retrieval.flashrag.{key} is not set: the flashrag provider needs it"
            )
    provider = FlashragProvider(
        str(settings.url),
        corpus_sha256=str(settings.corpus_sha256),
        index_sha256=str(settings.index_sha256),
        batch_max=settings.batch_max,
        timeout_seconds=settings.timeout_seconds,
        canaries=settings.canaries,
    )
    try:
        await provider.start()
    except BaseException:
        await provider.close()
        raise
    return provider


class FlashragProvider:
    """Searches a remote FlashRAG retriever.

    Args:
        url: where the retriever listens, without a route: ``http://host:port`` and perhaps a path.
        corpus_sha256, index_sha256: the operator's declaration, 64 lower-case hex digits each.
        batch_max: distinct queries in one call.
        timeout_seconds: bound of one call, from connecting to the last byte of its answer.
        canaries: file of recorded searches; ``None`` leaves the declaration undefended.
        canary_seconds: time between two rounds of canaries; only tests have their own.

    Raises ``ConfigError`` for a value that cannot be used.

    Attributes:
        on_fault: may be set at any time; called on the loop after a round of canaries that found a
            fault, so that the latch closes without waiting for the next search.
        statistics: counts of searches and gathered calls.
        requests: what was posted, the parts of a refused batch included.
    """

    name = "flashrag"
    remote = True

    def __init__(
        self,
        url: str,
        *,
        corpus_sha256: str,
        index_sha256: str,
        batch_max: int,
        timeout_seconds: float,
        canaries: Path | None,
        canary_seconds: float = CANARY_SECONDS,
    ) -> None:
        self._exchange = _Exchange(url, timeout_seconds=timeout_seconds, connections_max=batch_max)
        for key, digest in (("corpus_sha256", corpus_sha256), ("index_sha256", index_sha256)):
            if not is_sha256(digest):
                raise errors.CONFIG_INVALID(
                    f"retrieval.flashrag.{key} must be 64 lower-case hex digits: the sha256 of "
                    "what the retriever was started with"
                )
        self._identity = {
            "provider": self.name,
            "corpus_sha256": corpus_sha256,
            "index_sha256": index_sha256,
        }
        self._batch_max = batch_max
        self._canaries = canaries
        self._canary_seconds = canary_seconds
        self.on_fault: Callable[[errors.RetrievalError], None] | None = None
        self._watch: CanaryWatch | None = None
        self._gather: Gather[int, str, Documents] = Gather(self._ask, batch_max=batch_max)
        self.statistics = self._gather.statistics
        self.requests = 0

    async def start(self) -> None:
        """Opens the client and asks the canaries, or ``/health`` where there are none.

        Raises ``ConfigError`` (canary file), ``IdentityChanged`` (a canary differs),
        ``ProviderTransport`` (not reached: ``start`` may be called again) or ``ProviderFault``.
        """
        recorded: Sequence[canary_file.Canary] = ()
        if self._canaries is not None:
            recorded = await asyncio.to_thread(canary_file.load, self._canaries)
        self._exchange.open()
        if not recorded:
            # Any answer but a failure will do: other retrievers of this shape have no such route.
            await self._exchange.call("GET", "health", None, bytes_max=ANSWER_BYTES_PER_SEARCH)
            return
        differences = await canary_file.check(self, recorded)
        if differences:
            raise canary_file.changed(differences, len(recorded))
        if self._watch is None:
            self._watch = CanaryWatch(
                self, recorded, seconds=self._canary_seconds, on_fault=self._tell
            )
            self._watch.start()

    async def identity(self) -> Mapping[str, Any]:
        """The declared identity; raises the canaries' fault while there is one."""
        if self._watch is not None and (fault := self._watch.fault) is not None:
            raise fault.failure(fault.message) from fault
        return dict(self._identity)

    def _tell(self, fault: errors.RetrievalError) -> None:
        if self.on_fault is not None:
            self.on_fault(fault)

    async def search(self, query: str, top_n: int) -> Sequence[Mapping[str, Any]]:
        """What the retriever answers, as parsed: a list of objects, not yet checked.

        Raises ``ProviderTransport`` (not reached, broken off, or late) or ``ProviderFault`` (the
        query was refused, or what came is not an answer).
        """
        if not has_utf8_form(query):
            # One such text would keep the whole batch it travels in from being written.
            raise errors.PROVIDER_FAULT("the query has no UTF-8 form; it was not sent")
        # A list of its own for each search: those that shared a query share nothing else.
        return list(await self._gather.submit(top_n, query))

    async def close(self) -> None:
        """Ends the canaries, fails what is still out and closes the connections."""
        watch, self._watch = self._watch, None
        try:
            if watch is not None:
                await watch.close()
        finally:
            await self._gather.close()
            await self._exchange.close()

    async def _ask(self, top_n: int, queries: Sequence[str]) -> list[Documents | Failed]:
        """One outcome per query of one call, in order; raises no retrieval error."""
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
                *await self._ask(top_n, queries[:half]),
                *await self._ask(top_n, queries[half:]),
            ]
        # ``/batch_search`` is missing. From the next call on each search is a call of its own,
        # several at once.
        self._gather.reshape(batch_max=1, calls_max=self._batch_max)
        return await asyncio.gather(*(_outcome(self._alone(top_n, query)) for query in queries))

    async def _alone(self, top_n: int, query: str) -> Documents:
        where = self._exchange.where
        status, value = await self._post("search", query, top_n, 1)
        if status in REFUSED:
            raise errors.PROVIDER_FAULT(f"{where} refused the query (status {status})")
        if status in MISSING:
            raise errors.PROVIDER_FAULT(
                f"{where} does not serve /search (status {status}); correct retrieval.flashrag.url"
            )
        return parse_documents(value, answered(where, "search"))

    async def _together(self, top_n: int, queries: Sequence[str]) -> list[Documents] | int:
        """An answer per query, or the status that says refused or missing."""
        status, value = await self._post("batch_search", list(queries), top_n, len(queries))
        if status != 200:
            return status
        return parse_lists(value, len(queries), answered(self._exchange.where, "batch_search"))

    async def _post(
        self, route: str, query: str | list[str], top_n: int, searches: int
    ) -> tuple[int, object]:
        self.requests += 1
        payload = {"query": query, "top_n": top_n}
        bytes_max = ANSWER_BYTES_PER_SEARCH * searches
        return await self._exchange.call("POST", route, payload, bytes_max=bytes_max)


async def _outcome(call: Coroutine[Any, Any, _T]) -> _T | Failed:
    try:
        return await call
    except errors.RetrievalError as error:
        return Failed(error)

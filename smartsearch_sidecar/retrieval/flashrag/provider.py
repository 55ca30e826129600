"""The pinned trainer's own retriever service, asked over HTTP.

What it speaks (``retriever_serving.py`` of the pinned trainer, FastAPI over FlashRAG)::

    POST /search        {"query": str,   "top_n": int} -> [{"id", "contents"}, ...]
    POST /batch_search  {"query": [str], "top_n": int} -> [[{"id", "contents"}, ...], ...]
    GET  /health

It answers one call at a time, so concurrent searches travel as one ``/batch_search``
(``batcher.py``); a lone one goes through ``/search``. The retriever refuses a query with 400 or
422, and a whole batch for one such query: a refused batch is halved until the refused query stands
alone, so the others are answered. Where ``/batch_search`` is missing (404, 405), the searches go
side by side through ``/search``. No message quotes a body: it may hold anything, passages included.

Corpus and index are declared by the operator; ``canaries`` defend the declaration.

Apart from ``retrieval/provider.py``, which opens it by its name: one backend a folder.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.config import Config, FlashRagSection
from smartsearch_sidecar.outbound_http import ExchangeFailed, ExchangeFault, OutboundHttp
from smartsearch_sidecar.retrieval import canaries
from smartsearch_sidecar.retrieval.flashrag.batcher import Failed, Gather
from smartsearch_sidecar.run.json_values import has_utf8_form

ANSWER_BYTES_PER_SEARCH: Final = 1024 * 1024  # five passages are some 5 KB
KEEPALIVE_SECONDS: Final = 3.0
"""Under the 5 s after which uvicorn closes an idle connection: reusing one it is just closing would
look like a lost search."""
REFUSED: Final = (400, 422)  # how FastAPI refuses a query: by its handler, by its request model
MISSING: Final = (404, 405)  # the route is not served
PASSING: Final = (429, 500, 502, 503, 504)
"""It, or what stands before it, is overloaded or restarts: the same search may be asked again."""

Documents = list[dict[str, Any]]
_T = TypeVar("_T")
_MEDIA_TYPE: Final = re.compile(r"[a-z0-9.+-]{1,40}/[a-z0-9.+-]{1,40}")
_TRANSPORT, _FAULT = errors.PROVIDER_TRANSPORT, errors.PROVIDER_FAULT
_NOT_HTTP: Final = (_FAULT, "answered /{route} with something that is not HTTP ({why})")
_FAULTS: Final[Mapping[ExchangeFault, tuple[errors.Failure[Any], str]]] = {
    ExchangeFault.LATE: (_TRANSPORT, "did not answer /{route} within {seconds:g} s"),
    ExchangeFault.CERTIFICATE: (_FAULT, "has no certificate this machine accepts"),
    ExchangeFault.NO_CONNECTION: (
        _TRANSPORT,
        "takes no connection ({why}): start it, or correct retrieval.flashrag.url",
    ),
    ExchangeFault.BROKEN_OFF: (_TRANSPORT, "broke off /{route}: {why}"),
    ExchangeFault.COMPRESSED: (
        _FAULT,
        "answered /{route} with a compressed body, though none was asked for",
    ),
    ExchangeFault.TOO_LONG: (_FAULT, "answered /{route} with more than {bytes_max} bytes"),
}
"""What an exchange without a usable answer is to a search."""


async def open_configured(config: Config, _progress: object = None) -> FlashragProvider:
    """The provider of ``[retrieval.flashrag]``, started. Raises what ``start`` raises."""
    provider = FlashragProvider(config.retrieval.flashrag)
    try:
        await provider.start()
    except BaseException:
        await provider.close()
        raise
    return provider


class FlashragProvider:
    """Searches a remote FlashRAG retriever; ``url`` and both digests of the section are set.

    ``canary_seconds`` is the time between two rounds of canaries; only tests have their own. Raises
    ``ConfigError`` for a URL with a route.

    Attributes:
        on_fault: may be set at any time; called on the loop after a round of canaries that found a
            fault, so that the latch closes without waiting for the next search.
    """

    name = "flashrag"
    remote = True

    def __init__(
        self, settings: FlashRagSection, *, canary_seconds: float = canaries.CANARY_SECONDS
    ) -> None:
        self._url = str(settings.url).rstrip("/")
        if self._url.endswith(("/search", "/batch_search")):
            raise errors.CONFIG_INVALID(
                "retrieval.flashrag.url cannot be used: it must name the service, without the route"
            )
        self._where = f"the retriever at {urlsplit(self._url).netloc}"
        self._identity = {
            "provider": self.name,
            "corpus_sha256": settings.corpus_sha256,
            "index_sha256": settings.index_sha256,
        }
        self._settings = settings
        self._canary_seconds = canary_seconds
        self._http = OutboundHttp(
            connections_max=settings.batch_max,
            keepalive_seconds=KEEPALIVE_SECONDS,
            connect_seconds=None,
        )
        self._gather: Gather[Documents] = Gather(self._ask, batch_max=settings.batch_max)
        self._watch: canaries.CanaryWatch | None = None
        self.on_fault: Callable[[errors.RetrievalError], None] = lambda _fault: None

    async def start(self) -> None:
        """Opens the client and asks the canaries, or ``/health`` where there are no canaries.

        Raises ``ConfigError`` (canary file), ``IdentityChanged`` (a canary differs),
        ``ProviderTransport`` (not reached: ``start`` may be called again) or ``ProviderFault``.
        """
        recorded: Sequence[canaries.Canary] = ()
        if self._settings.canaries is not None:
            recorded = await asyncio.to_thread(canaries.load, self._settings.canaries)
        if not recorded:
            # Any answer but a failure will do: other retrievers of this shape have no such route.
            await self._call("GET", "health", None, bytes_max=ANSWER_BYTES_PER_SEARCH)
            return
        await canaries.check(self, recorded)
        if self._watch is None:
            # `on_fault` is set by the process later: it is looked up when a fault is found.
            self._watch = canaries.CanaryWatch(
                self, recorded, self._canary_seconds, lambda fault: self.on_fault(fault)
            )
            self._watch.start()

    async def identity(self) -> Mapping[str, Any]:
        """The declared identity; raises the canaries' fault while there is one."""
        if self._watch is not None and (fault := self._watch.fault) is not None:
            raise fault.failure(fault.message) from fault
        return dict(self._identity)

    async def search(self, query: str, top_n: int) -> Sequence[Mapping[str, Any]]:
        """What the retriever answers, as parsed: a list of objects, not yet checked.

        Raises ``ProviderTransport`` (not reached, broken off, late, or ``PASSING``) or
        ``ProviderFault`` (the query was refused, or what came is not an answer).
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
            await self._http.close()

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
            first = await self._ask(top_n, queries[:half])
            return first + await self._ask(top_n, queries[half:])
        # ``/batch_search`` is missing. From the next call on each search is a call of its own,
        # several at once.
        self._gather.reshape(batch_max=1, calls_max=self._settings.batch_max)
        return await asyncio.gather(*(_outcome(self._alone(top_n, query)) for query in queries))

    async def _alone(self, top_n: int, query: str) -> Documents:
        status, value = await self._post("search", query, top_n, 1)
        if status in REFUSED:
            raise errors.PROVIDER_FAULT(f"{self._where} refused the query (status {status})")
        if status in MISSING:
            why = f"does not serve /search (status {status}); correct retrieval.flashrag.url"
            raise errors.PROVIDER_FAULT(f"{self._where} {why}")
        return self._documents(value, "search")

    async def _together(self, top_n: int, queries: Sequence[str]) -> list[Documents] | int:
        """An answer per query, or the status that says refused or missing."""
        route = "batch_search"
        status, value = await self._post(route, list(queries), top_n, len(queries))
        if status != 200:
            return status
        if not isinstance(value, list):
            raise self._fault(route, f"{_kind(value)} instead of a list of lists")
        if len(value) != len(queries):
            raise self._fault(route, f"{len(value)} lists for {len(queries)} queries")
        return [self._documents(documents, route) for documents in value]

    def _documents(self, value: object, route: str) -> Documents:
        """The answer to one search. What a document holds is the guard's to check."""
        if not isinstance(value, list):
            raise self._fault(route, f"{_kind(value)} instead of a list of documents")
        for document in value:
            if not isinstance(document, dict):
                raise self._fault(route, f"{_kind(document)} instead of a document")
        return value

    async def _post(
        self, route: str, query: str | list[str], top_n: int, searches: int
    ) -> tuple[int, object]:
        body = orjson.dumps({"query": query, "top_n": top_n})
        return await self._call("POST", route, body, bytes_max=ANSWER_BYTES_PER_SEARCH * searches)

    async def _call(
        self, method: str, route: str, body: bytes | None, *, bytes_max: int
    ) -> tuple[int, object]:
        """Status and, with 200, the JSON value; ``REFUSED`` and ``MISSING`` are the caller's to
        judge. Raises ``ProviderFault``, or ``ProviderTransport`` where it may be asked again.
        """
        seconds = self._settings.timeout_seconds
        until = asyncio.get_running_loop().time() + seconds
        try:
            answer = await self._http.exchange(
                method, f"{self._url}/{route}", body, until=until, bytes_max=bytes_max
            )
        except ExchangeFailed as error:
            row, sentence = _FAULTS.get(error.failure, _NOT_HTTP)
            said = sentence.format(route=route, why=error.why, seconds=seconds, bytes_max=bytes_max)
            raise row(f"{self._where} {said}") from error
        status = answer.status
        if status in REFUSED or status in MISSING:
            return status, None
        if 300 <= status < 400:
            raise self._fault(route, f"a redirect ({status}), which is not followed")
        if status in PASSING:
            raise errors.PROVIDER_TRANSPORT(f"{self._where} answered /{route} with status {status}")
        if status != 200:
            raise self._fault(route, f"status {status}")
        try:
            return 200, orjson.loads(answer.body)
        except orjson.JSONDecodeError as error:
            raise self._fault(route, _described(answer.body, answer.media)) from error

    def _fault(self, route: str, what: str) -> errors.ProviderFault:
        return errors.PROVIDER_FAULT(f"{self._where} answered /{route} with {what}")


async def _outcome(call: Coroutine[Any, Any, _T]) -> _T | Failed:
    try:
        return await call
    except errors.RetrievalError as error:
        return Failed(error)


def _kind(value: object) -> str:
    if value is None:
        return "null"
    for kind, name in ((dict, "an object"), (list, "a list"), (str, "a string")):
        if isinstance(value, kind):
            return name
    return "a number or boolean"


def _described(body: bytes, media: str) -> str:
    """What a body with status 200 is that is not JSON; an error page of a proxy is named as one."""
    if "html" in media or body.lstrip()[:1] == b"<":
        return (
            f"an HTML page of {len(body)} bytes and status 200: "
            "a proxy or another service stands at retrieval.flashrag.url"
        )
    named = media if _MEDIA_TYPE.fullmatch(media) else "an unreadable media type"
    return f"{len(body)} bytes of {named} that are not JSON"

"""The pinned trainer's own retriever service, asked over HTTP.

What it speaks (``retriever_serving.py`` of the pinned trainer, FastAPI over FlashRAG)::

    POST /search        {"query": str,   "top_n": int} -> [{"id", "contents"}, ...]
    POST /batch_search  {"query": [str], "top_n": int} -> [[{"id", "contents"}, ...], ...]
    GET  /health

It answers one call at a time, so concurrent searches travel as one ``/batch_search`` (``gather``);
``flashrag_calls`` knows which route a call takes and what a refusal means.

Corpus and index are declared by the operator; ``canaries`` defend the declaration.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.config import FlashRagSection
from smartsearch_sidecar.retrieval import canaries as canary_file
from smartsearch_sidecar.retrieval.canary_watch import CANARY_SECONDS, CanaryWatch
from smartsearch_sidecar.retrieval.flashrag.batcher import Failed, Gather
from smartsearch_sidecar.retrieval.flashrag.calls import Calls
from smartsearch_sidecar.retrieval.flashrag.wire import (
    Documents,
    answered,
    parse_json,
    parse_status,
    parse_url,
)

ANSWER_BYTES_PER_SEARCH = 1024 * 1024
"""Times the searches of a call. Five passages are some 5 KB: what is over this is not passages."""

KEEPALIVE_SECONDS = 3.0
"""Under the 5 s after which uvicorn closes an idle connection: reusing one it is just closing would
look like a lost search."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


class _Exchange:
    """HTTP to one retriever: pooled, bounded in time and bytes, every failure named."""

    def __init__(self, url: str, *, timeout_seconds: float, connections_max: int) -> None:
        self._url, address = parse_url(url)
        self.where = f"the retriever at {address}"
        self._timeout = timeout_seconds
        self._connections_max = connections_max
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        """Makes the pool, once; no connection yet."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=self._connections_max, keepalive_timeout=KEEPALIVE_SECONDS
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                # One deadline over the whole exchange, below; aiohttp's own would be a second.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
                # Nothing is inflated, so a bound in bytes is a bound.
                headers={"Accept": "application/json", "Accept-Encoding": "identity"},
                auto_decompress=False,
                trust_env=False,
            )

    async def close(self) -> None:
        """Closes the pool; connections in use are broken off."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def call(
        self, method: str, route: str, payload: object | None, *, bytes_max: int
    ) -> tuple[int, object]:
        """Status and, with 200, the JSON value.

        Statuses 400, 404, 405 and 422 are returned for the caller to judge; every other is raised
        as ``ProviderFault``. An exchange that did not complete raises ``ProviderTransport``.
        """
        if self._session is None:
            raise errors.INTERNAL_ERROR("the retriever was asked before start or after close")
        try:
            async with (
                asyncio.timeout(self._timeout),
                self._session.request(
                    method,
                    f"{self._url}/{route}",
                    data=None if payload is None else orjson.dumps(payload),
                    headers={"Content-Type": "application/json"},
                    allow_redirects=False,
                ) as response,
            ):
                if parse_status(response.status, answered(self.where, route)) != 200:
                    return response.status, None
                body = await self._read(response, route, bytes_max)
                media = response.content_type
        except TimeoutError as error:
            raise errors.PROVIDER_TRANSPORT(
                f"{self.where} did not answer /{route} within {self._timeout:g} s"
            ) from error
        except aiohttp.ClientSSLError as error:
            raise errors.PROVIDER_FAULT(
                f"{self.where} has no certificate this machine accepts"
            ) from error
        except aiohttp.ClientConnectorError as error:
            raise errors.PROVIDER_TRANSPORT(
                f"{self.where} takes no connection ({error.strerror or type(error).__name__}): "
                "start it, or correct retrieval.flashrag.url"
            ) from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            why = getattr(error, "strerror", None) or type(error).__name__
            raise errors.PROVIDER_TRANSPORT(f"{self.where} broke off /{route}: {why}") from error
        except aiohttp.ClientError as error:
            raise self._strange(route, f"what is not HTTP ({type(error).__name__})") from error
        return 200, parse_json(body, media, answered(self.where, route))

    def _strange(self, route: str, what: str) -> errors.ProviderFault:
        return errors.PROVIDER_FAULT(f"{answered(self.where, route)} {what}")

    async def _read(self, response: aiohttp.ClientResponse, route: str, bytes_max: int) -> bytes:
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise self._strange(route, "a compressed body, though none was asked for")
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > bytes_max:
                raise self._strange(route, f"more than {bytes_max} bytes")
        return bytes(body)


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

    ``on_fault`` may be set at any time: it is told, on the loop, after a round of canaries that
    found a fault, so that a latch closes without waiting for the next search. ``statistics`` counts
    searches and gathered calls, ``requests`` what was posted, a refused batch's parts included.
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
            if not _DIGEST.fullmatch(digest):
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
        self._calls = Calls(
            self._post, where=self._exchange.where, batch_missing=self._batch_missing
        )
        self._gather: Gather[int, str, Documents] = Gather(self._ask, batch_max=batch_max)
        self.statistics = self._gather.statistics
        self.requests = 0

    async def start(self) -> None:
        """Opens the client and asks the canaries, or ``/health`` where there are none.

        Raises ``ConfigError`` (canary file), ``IdentityChanged`` (a canary differs),
        ``ProviderTransport`` (nobody answers: may be called again) or ``ProviderFault``.
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
        try:
            query.encode()
        except UnicodeEncodeError as error:
            # One such text would keep the whole batch it travels in from being written.
            raise errors.PROVIDER_FAULT("the query has no UTF-8 form; it was not sent") from error
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

    async def _ask(self, top_n: int, queries: Sequence[str]) -> Sequence[Documents | Failed]:
        return await self._calls.ask(top_n, queries)

    def _batch_missing(self) -> None:
        # From the next call on each search is one of its own, several at once.
        self._gather.reshape(batch_max=1, calls_max=self._batch_max)

    async def _post(
        self, route: str, query: str | list[str], top_n: int, searches: int
    ) -> tuple[int, object]:
        self.requests += 1
        payload = {"query": query, "top_n": top_n}
        bytes_max = ANSWER_BYTES_PER_SEARCH * searches
        return await self._exchange.call("POST", route, payload, bytes_max=bytes_max)

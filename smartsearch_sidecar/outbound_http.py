"""HTTP to a service the operator runs: the retriever, and the reward helper.

One pooled client with bounds on everything. It follows no redirect and uses no proxy, because a
prompt holds reference answers and a query belongs to the run; it keeps no cookie; it sends each
request once: a second attempt is made only where no connection was got, so nothing was sent. What a
failure means is for the caller to say: here it only gets a name.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Final

import aiohttp

from smartsearch_sidecar import errors

CONNECT_PAUSE_SECONDS: Final = 0.25
"""Before a second attempt at a connection; it grows by itself with each. A restarting proxy is back
by then, and a dead service is reported within a second."""

_OK: Final = 200
_JSON: Final = "application/json"


class ExchangeFault(enum.Enum):
    """Why an exchange has no usable answer."""

    NO_CONNECTION = enum.auto()
    """Nothing was sent, so the same request may be sent again."""
    CERTIFICATE = enum.auto()
    """The other end shows no certificate that this machine accepts. Nothing was sent."""
    LATE = enum.auto()
    """The time was up."""
    BROKEN_OFF = enum.auto()
    """The connection was lost before the last byte of the answer."""
    NOT_HTTP = enum.auto()
    OTHER_MEDIA = enum.auto()
    """The answer says that it is something else than JSON."""
    COMPRESSED = enum.auto()
    """Asked for was ``identity``: of an inflated body the bound in bytes would be no bound."""
    TOO_LONG = enum.auto()


class ExchangeFailed(Exception):
    """An exchange without a usable answer.

    ``sent``: a connection was handed to the request, so it may have arrived and may have cost
    money. ``answered``: the status line of an answer has arrived. ``why``: a few words of the
    system's, or the name of an exception; no address and no body.
    """

    def __init__(self, failure: ExchangeFault, *, sent: bool, answered: bool, why: str) -> None:
        super().__init__(why)
        self.failure = failure
        self.sent = sent
        self.answered = answered
        self.why = why


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """An answer: its status and, of a 200 only, its media type (lower case) and its body."""

    status: int
    media: str = ""
    body: bytes = b""


@dataclass(slots=True)
class _Reached:
    """How far one exchange has come."""

    sent: bool = False
    answered: bool = False


@dataclass(eq=False, kw_only=True, slots=True)
class OutboundHttp:
    """A pool of connections.

    Keep ``keepalive_seconds`` under the time after which the other end drops an idle connection
    (uvicorn: 5 s): a request that is written into a connection just being closed counts as sent,
    and cannot be sent again.
    """

    connections_max: int  # 0 is no bound, for a caller that has one of its own
    keepalive_seconds: float
    connect_seconds: float | None  # for one attempt; None leaves the exchange's own bound
    connect_tries: int = 1
    pause: Callable[[float], Awaitable[object]] = asyncio.sleep  # between attempts, in seconds
    _session: aiohttp.ClientSession | None = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)

    def pool(self) -> aiohttp.ClientSession:
        """Makes the pool, once, on the running loop; no connection yet. Raises ``InvariantBroken``
        where it was closed before.
        """
        if self._closed:
            raise errors.INTERNAL_ERROR("a service was asked after its client had been closed")
        if self._session is not None:
            return self._session
        trace = aiohttp.TraceConfig()
        # The one public sign that a request has got a connection, new or pooled.
        trace.on_connection_create_end.append(_connected)
        trace.on_connection_reuseconn.append(_connected)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=self.connections_max, keepalive_timeout=self.keepalive_seconds
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            # The exchange has one deadline, ``until``; a total of aiohttp's would be a second.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.connect_seconds),
            headers={"Accept": _JSON, "Accept-Encoding": "identity"},
            auto_decompress=False,
            trust_env=False,
            trace_configs=[trace],
        )
        return self._session

    async def close(self) -> None:
        """Closes the pool for good; exchanges that are under way are broken off."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def exchange(
        self,
        method: str,
        url: str,
        body: bytes | None,
        *,
        until: float,
        bytes_max: int,
        json_only: bool = False,
    ) -> HttpAnswer:
        """Sends one request, once; its ``body`` is JSON.

        The whole exchange ends at ``until``, in seconds of the loop's clock. ``bytes_max`` bounds
        the answer's body; ``json_only`` refuses another declared media type before reading it.

        Raises:
            ExchangeFailed: there is no usable answer.
            InvariantBroken: the pool was closed before.
        """
        session = self.pool()
        reached = _Reached()
        request = partial(
            session.request,
            method,
            url,
            data=body,
            headers=None if body is None else {"Content-Type": _JSON},
            allow_redirects=False,
            trace_request_ctx=reached,
        )
        try:
            async with asyncio.timeout_at(until):
                for attempt in range(1, self.connect_tries):
                    try:
                        return await _once(request(), reached, bytes_max, json_only=json_only)
                    except ExchangeFailed:
                        if reached.sent:
                            raise
                    await self.pause(CONNECT_PAUSE_SECONDS * attempt)
                return await _once(request(), reached, bytes_max, json_only=json_only)
        except TimeoutError as error:
            raise _failed(ExchangeFault.LATE, reached, error) from error


async def _connected(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
    context.trace_request_ctx.sent = True


async def _once(
    request: AbstractAsyncContextManager[aiohttp.ClientResponse],
    reached: _Reached,
    bytes_max: int,
    *,
    json_only: bool,
) -> HttpAnswer:
    try:
        async with request as response:
            reached.answered = True
            if response.status != _OK:
                response.close()  # unread: an error page is of no use, and has no bound
                return HttpAnswer(response.status)
            return await _read(response, bytes_max, json_only=json_only)
    except aiohttp.ClientSSLError as error:
        raise _failed(ExchangeFault.CERTIFICATE, reached, error) from error
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
        failure = ExchangeFault.BROKEN_OFF if reached.sent else ExchangeFault.NO_CONNECTION
        raise _failed(failure, reached, error) from error
    except aiohttp.ClientError as error:
        raise _failed(ExchangeFault.NOT_HTTP, reached, error) from error


async def _read(response: aiohttp.ClientResponse, bytes_max: int, *, json_only: bool) -> HttpAnswer:
    """The answer of a 200. A body that is refused goes unread, and its connection with it."""
    media = response.content_type.lower()
    if json_only and "Content-Type" in response.headers and media != _JSON:
        raise _refused(response, ExchangeFault.OTHER_MEDIA)
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise _refused(response, ExchangeFault.COMPRESSED)
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > bytes_max:
            raise _refused(response, ExchangeFault.TOO_LONG)
    return HttpAnswer(response.status, media, bytes(body))


def _refused(response: aiohttp.ClientResponse, failure: ExchangeFault) -> ExchangeFailed:
    response.close()
    return ExchangeFailed(failure, sent=True, answered=True, why=failure.name.lower())


def _failed(failure: ExchangeFault, reached: _Reached, error: Exception) -> ExchangeFailed:
    why = getattr(error, "strerror", None) or type(error).__name__
    return ExchangeFailed(failure, sent=reached.sent, answered=reached.answered, why=why)

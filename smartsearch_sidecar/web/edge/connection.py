"""One connection: segments in, requests one after the other, and whether answers were taken.

Apart from ``server.py``, its one user: one connection here, what they share there.
"""

from __future__ import annotations

import asyncio
import select
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol, cast

from aiohttp import EMPTY_PAYLOAD, StreamReader, web, web_protocol

from smartsearch_sidecar import errors
from smartsearch_sidecar.web.edge.request import EdgeRequest
from smartsearch_sidecar.web.edge.response import (
    AFTER_WRITE,
    BAD_MESSAGE,
    HANDED_OVER,
    INTERNAL_ERROR,
    Reply,
)

HALF_CLOSE_SECONDS: Final = 1.0  # for the client to close first: that tells whether it has read
# By attribute, not by import: where it is gone, the check at start names it.
_ErrInfo: Any = getattr(web_protocol, "_ErrInfo", None)


class EdgeObserver(Protocol):
    """Is told of what no handler sees; called on the loop, must neither raise nor block."""

    def malformed(self, reason: str, authenticated: bool) -> None:
        """A connection brought bytes that are no request, or left within one; once a connection.

        ``authenticated``: its bytes carried the execute capability. ``reason``: the name of the
        parser's error, ``cut_off`` (left within headers), ``abandoned`` (left with whole requests
        no handler has seen) or ``behind_upgrade`` (bytes after a request for another protocol).
        """

    def crashed(self, exc: BaseException) -> None:
        """A handler or a callback of its raised what it must not; the client got a 500 if any."""

    def overflow(self) -> None:
        """A connection over ``connections_max`` was closed unread. Strangers' connections had made
        room before, so the one refused was a rollout's or the trainer's.
        """


class Shared(Protocol):
    """What the connections of one server share."""

    observer: EdgeObserver
    capability_marker: bytes
    connections_max: int
    draining: bool
    open: int
    tasks: set[asyncio.Task[Any]]

    def settle(self) -> None: ...
    def make_room(self) -> bool: ...


class EdgeConnection(web.RequestHandler):
    """One connection, as an asyncio protocol; aiohttp calls the methods it overrides."""

    __slots__ = (
        *("server", "authenticated", "streaming", "unread"),
        *("_arrived", "_began", "_bye", "_fault", "_first", "_poller", "_reported", "_tail"),
        *("_taking",),
    )

    def __init__(self, server: Shared, **options: Any) -> None:
        super().__init__(cast("web.Server", server), **options)
        self.server = server
        self.authenticated = False  # sticky: the bytes so far carried the capability
        self.streaming = False  # a StreamResponse is under way
        self.unread: list[Callable[[str], None]] = []  # of answers not yet proved taken
        self._arrived = 0.0  # loop time of the latest segment
        self._began: deque[float] = deque()  # first bytes of the requests in `_messages`
        self._first: float | None = None  # first byte of a request whose headers are not whole
        self._taking: StreamReader | None = None  # the body that next bytes belong to
        self._fault: str | None = None  # why nothing more of this connection is parsed
        self._reported = False
        self._tail = b""
        self._bye: asyncio.Future[None] | None = None
        self._poller: select.poll | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop it runs on."""
        return self._loop

    @property
    def draining(self) -> bool:
        """Whether its server is ending its connections."""
        return self.server.draining

    # --- connection ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        server = self.server
        if server.open >= server.connections_max and not server.make_room():
            self._force_close = True
            server.observer.overflow()
            transport.close()
            return
        server.open += 1
        self._poller = select.poll()
        self._poller.register(transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        super().connection_made(transport)

    async def start(self) -> None:
        """Serve the connection's requests one after the other; counted until it has ended."""
        server, task = self.server, asyncio.current_task()
        if task is None:
            raise errors.INTERNAL_ERROR("A connection is served outside a task.")
        server.tasks.add(task)
        try:
            if not self._force_close:  # else it was lost before this first step
                await super().start()
        except Exception as exc:  # noqa: BLE001  # classified: the connection ends unanswered
            server.observer.crashed(exc)
            self.force_close()
        finally:
            server.tasks.discard(task)
            server.settle()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self.unread and exc is not None:
            self.lost(AFTER_WRITE)
        if self._fault is None and (self._first is not None or self._messages):
            self._fault = "cut_off" if self._first is not None else "abandoned"
        self._report()
        counted, self._poller = self._poller is not None, None
        super().connection_lost(exc)
        if self._bye is not None and not self._bye.done():
            self._bye.set_result(None)
        if counted:
            self.server.open -= 1
            self.server.settle()

    def eof_received(self) -> None:
        if self.unread and self.polled() & select.POLLERR:  # a reset behind the FIN
            self.lost(AFTER_WRITE)

    async def half_close(self) -> None:
        """Half-close and let the client close first, for then it shows whether it has read."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        self._bye = self._loop.create_future()
        try:
            transport.write_eof()
        except OSError:
            self.lost(AFTER_WRITE)  # reset, and closed by us before the loop would have read it
            return
        await asyncio.wait([self._bye], timeout=HALF_CLOSE_SECONDS)

    async def leave(self) -> None:
        """End an idle connection."""
        if self.unread:
            await self.half_close()
        self.force_close()

    def cut(self) -> None:
        """End the connection at once; what is not sent yet is lost."""
        transport = self.transport
        if transport is not None:
            if transport.get_write_buffer_size():
                self.lost(AFTER_WRITE)
            transport.abort()

    def has_deadline(self) -> bool:
        """Whether aiohttp ends it if its next request does not come whole in time."""
        return self._keepalive_handle is not None

    def dispensable(self) -> bool:
        """Whether it is a stranger's that has not asked yet: idle, or still within its headers."""
        if self.authenticated or self._current_request is not None or self.closing():
            return False
        return self._first is not None or self.idle()

    def unanswered_since(self) -> float:
        """Loop time of the first byte of a rollout's request not yet answered; else infinite."""
        request = self._current_request
        if not self.authenticated or not isinstance(request, EdgeRequest) or request.delivered:
            return float("inf")
        target = request.raw_target.encode("utf-8", "surrogateescape")
        return request.began if target.startswith(self.server.capability_marker) else float("inf")

    def idle(self) -> bool:
        """Whether it waits for a request and no byte of one is here or in the kernel."""
        waiting = self._waiter is not None and not self._waiter.done()
        if not waiting or self._first is not None or self.transport is None or self.closing():
            return False
        pending = select.poll()
        pending.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not pending.poll(0)

    # --- bytes in --------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse a segment, or what the parser held back when ``data`` is empty."""
        if data:
            if self.unread:
                self.unread.clear()
            self._arrived = self._loop.time()
            if not self.authenticated:
                self._look(data)
            if self._first is None and (self._taking is None or self._taking.is_eof()):
                # Some clients end a body with a line end of its own; it begins no request.
                self._first = self._arrived if data.lstrip(b"\r\n") else None
        if self._fault is not None:
            return
        count = self._request_count
        try:
            super().data_received(data)
        except Exception as exc:  # noqa: BLE001  # the parser's callbacks raise what yarl raises
            # A target such as `http://[::1]@/` does so. aiohttp would close without an answer and
            # without a call of `handle_error`, so the fault is queued as its own faults are.
            self._request_count += 1
            self._messages.append((_ErrInfo(400, exc, ""), EMPTY_PAYLOAD))
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
        if self._request_count != count:
            self._arrivals(self._request_count - count)
        if self._message_tail:
            self._message_tail = b""
            self._blame("behind_upgrade")

    def _look(self, data: bytes) -> None:
        capability_marker = self.server.capability_marker
        seen = self._tail + data
        if capability_marker in seen:
            self.authenticated, self._tail = True, b""
            self._report()
        else:
            self._tail = seen[1 - len(capability_marker) :]

    def _arrivals(self, count: int) -> None:
        self._began.append(self._arrived if self._first is None else self._first)
        self._began.extend([self._arrived] * (count - 1))
        self._first = None
        message, payload = self._messages[-1]
        # Here, not in `handle_error`: aiohttp calls that only while the client stays.
        if type(message) is _ErrInfo:
            if self._taking is not None:
                self._taking.feed_eof()  # a bad chunk: the parser would let its reader wait
            self._blame(type(cast("Any", message).exc).__name__)
        self._taking = None if payload.is_eof() else payload

    def next_began(self) -> float:
        """Loop time of the first byte of the request taken next."""
        return self._began.popleft() if self._began else self._arrived

    def _blame(self, reason: str) -> None:
        if self._fault is None:
            self._fault = reason
        if self.authenticated:
            self._report()

    def _report(self) -> None:
        # A stranger is reported when the connection ends: the capability may still be on its way.
        if self._fault is not None and not self._reported:
            self._reported = True
            self.server.observer.malformed(self._fault, self.authenticated)

    # --- bytes out -------------------------------------------------------------------------------

    def closing(self) -> bool:
        """Whether the transport knows that no byte can be sent any more."""
        return self.transport is None or self.transport.is_closing()

    def polled(self) -> int:
        """What the kernel knows of the peer, as poll(2) bits; 0 while it is there."""
        if self._poller is None:
            return select.POLLHUP
        events = self._poller.poll(0)
        return events[0][1] if events else 0

    def write(self, data: bytes) -> None:
        """Send, or leave to the transport what the socket does not take at once."""
        if self.transport is not None:
            self.transport.write(data)

    def lost(self, stage: str) -> None:
        """Report as lost the answers that are not proved taken."""
        callbacks, self.unread = self.unread, []
        for on_lost in callbacks:
            self.tell(on_lost, stage)

    def tell(self, on_lost: Callable[[str], None], stage: str) -> None:
        """Call ``on_lost``; raised here, its failure would tear the connection's own accounting."""
        try:
            on_lost(stage)
        except Exception as exc:  # noqa: BLE001  # classified: the observer latches it
            self.server.observer.crashed(exc)

    async def finish_response(
        self, request: web.BaseRequest, resp: Any, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Wait until the answer is on its way; its slot is already free."""
        edge_request = cast("EdgeRequest", request)
        try:
            if type(resp) is not Reply or not edge_request.delivered:
                resp, reset = await self._finish_stream(edge_request, resp, start_time)
                if reset:
                    return resp, True
            elif self.writing_paused:
                await request.writer.drain()
        except ConnectionError:
            return resp, True  # `connection_lost` has reported it
        if not resp.keep_alive and (self.unread or self._fault is not None):
            await self.half_close()
        return resp, False

    async def _finish_stream(
        self, request: EdgeRequest, resp: Any, start_time: float | None
    ) -> tuple[Any, bool]:
        try:
            stream = isinstance(resp, web.StreamResponse) and not isinstance(
                resp, web.HTTPException
            )
            if request.delivered or not stream:
                raise errors.INTERNAL_ERROR(
                    f"A handler ended with {type(resp).__name__}, no answer."
                )
            return await super().finish_response(request, resp, start_time)
        except ConnectionError:
            return resp, True
        except Exception as exc:  # noqa: BLE001  # as if the handler itself had raised it
            return self.handle_error(request, 500, exc), False
        finally:
            self.streaming = False

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer with a constant, where the stock one echoes and logs the request line.

        Raises:
            ConnectionError: an answer has begun already; aiohttp then ends the connection.
        """
        edge_request = cast("EdgeRequest", request)
        begun = edge_request.delivered or request.writer.output_size > 0
        parsing = status == 400
        if not parsing:
            exc = (
                exc or sys.exc_info()[1] or errors.INTERNAL_ERROR(f"aiohttp gave up with {status}.")
            )
            viewer_left = begun and self.closing() and isinstance(exc, ConnectionError)
            if not viewer_left:
                self.server.observer.crashed(exc)
        if begun:
            raise ConnectionError(HANDED_OVER)
        reply = (
            edge_request.refuse(400, BAD_MESSAGE, close=True)
            if parsing
            else edge_request.refuse(500, INTERNAL_ERROR, close=True)
        )
        return cast("web.StreamResponse", reply)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Hand to the observer what aiohttp would log."""
        # The stock one writes a traceback that holds the request line, and so the capability.
        exc = kw.get("exc_info")
        if not isinstance(exc, BaseException):
            exc = errors.INTERNAL_ERROR("aiohttp reported a failure without its exception.")
        self.server.observer.crashed(exc)

"""A connection: segments in, requests in turn, answers taken or not; and what they all share."""

from __future__ import annotations

import asyncio
import select
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

from aiohttp import EMPTY_PAYLOAD, StreamReader, web, web_protocol

from smartsearch_sidecar import errors
from smartsearch_sidecar.stalls import LoopWatch
from smartsearch_sidecar.web.capabilities import LONGEST, Capabilities
from smartsearch_sidecar.web.edge.request import (
    AFTER_WRITE,
    BAD_MESSAGE,
    HANDED_OVER,
    INTERNAL_ERROR,
    EdgeObserver,
    EdgeRequest,
    Reply,
    unread_seconds,
)

HALF_CLOSE_SECONDS: Final = 1.0  # for the client to close first: that tells whether it has read
LINGERING_SECONDS: Final = 2.0  # for the rest of a refused body, so that its sender reads why
STALL_SECONDS: Final = 10.0  # TCP_USER_TIMEOUT: a peer that takes nothing for as long is dropped
STRANGERS_MAX: Final = 128  # connections that they keep where all others have shown a capability
LOOKED_BYTES: Final = 8192  # where a capability is looked for: a client's head begins a segment
# By attribute, not by import: where it is gone, the check at start names it.
_ErrInfo: Any = getattr(web_protocol, "_ErrInfo", None)

Handler = Callable[[EdgeRequest], Awaitable[Reply | web.StreamResponse]]


class EdgeConnection(web.RequestHandler):
    """One connection, as an asyncio protocol; aiohttp calls the methods it overrides."""

    __slots__ = (
        *("server", "authenticated", "stranger", "streaming", "unread"),
        *("_arrived", "_began", "_bye", "_fault", "_first", "_left", "_poller", "_reported"),
        *("_tail", "_taking"),
    )

    def __init__(self, server: EdgeServer, **options: Any) -> None:
        super().__init__(server, **options)
        self.server = server
        self.authenticated = False  # sticky: the bytes so far carried the execute capability
        self.stranger = True  # until they carry either capability
        self.streaming = False  # a StreamResponse is under way
        self.unread: list[Callable[[str], None]] = []  # of answers not yet proved taken
        self._arrived = 0.0  # loop time of the latest segment
        self._began: deque[float] = deque()  # first bytes of the requests in `_messages`
        self._first: float | None = None  # first byte of a request whose headers are not whole
        self._taking: StreamReader | None = None  # the body that next bytes belong to
        self._left: float | None = None  # loop time at which the peer was found gone
        self._fault: str | None = None  # why nothing more of this connection is parsed
        self._reported = False
        self._tail = b""
        self._bye: asyncio.Future[None] | None = None
        self._poller: select.poll | None = None

    @property
    def ending(self) -> bool:
        """Whether its next answer is its last: its server drains, or a stranger asks on and on
        without waiting for answers.
        """
        return self.server.draining or (self.stranger and bool(self._messages))

    # --- connection ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        server = self.server
        descriptor = transport.get_extra_info("socket").fileno()
        server.make_room(descriptor)
        server.open += 1
        server.strangers[self] = None
        self._poller = select.poll()
        self._poller.register(descriptor, select.POLLRDHUP)
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
        self._leaves()
        if self.unread and exc is not None:
            self.lost(AFTER_WRITE)
        self.unread.clear()  # a callback may hold the request, and that this connection
        if self._fault is None and (self._first is not None or self._messages):
            self._fault = "cut_off" if self._first is not None else "abandoned"
        self._report()
        counted, self._poller = self._poller is not None, None
        if self._taking is not None and self._current_request is None:
            self._taking.feed_eof()  # the rest of a refused body: aiohttp would wait for it
        super().connection_lost(exc)
        if self._bye is not None and not self._bye.done():
            self._bye.set_result(None)
        if counted:
            self.server.open -= 1
            if not self.stranger:
                self.server.known -= 1
            self.server.strangers.pop(self, None)
            self.server.settle()

    def eof_received(self) -> None:
        self._leaves()
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

    def unanswered_since(self) -> float:
        """Loop time of the first byte of a rollout's request not yet answered; else infinite."""
        request = self._current_request
        if not self.authenticated or not isinstance(request, EdgeRequest) or request.delivered:
            return float("inf")
        capabilities = self.server.capabilities
        target = request.raw_target.encode("utf-8", "surrogateescape")
        ours = capabilities is not None and target.startswith(capabilities.execute_prefix)
        return request.began if ours else float("inf")

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
        within_body = self._taking is not None and not self._taking.is_eof()
        if data:
            if self.unread:
                self.unread.clear()
            self._arrived = self._loop.time()
            if self._arrived > self.server.loop_watch.trusted_until:
                self._arrived -= unread_seconds(self.transport)
            if not within_body:
                if not self.authenticated:
                    self._look(data)
                if self._first is None:
                    # Some clients end a body with a line end of its own; it begins no request.
                    self._first = self._arrived if data.lstrip(b"\r\n") else None
        if self._fault is not None:
            return
        count = self._request_count
        try:
            super().data_received(data)
        except Exception as exc:  # noqa: BLE001  # the parser's callbacks raise what yarl raises
            self._unparsed(exc)
        if self._request_count != count:
            if within_body and not self.authenticated:
                self._look(data)  # what came behind the end of the body
            self._arrivals(self._request_count - count)
        if self._message_tail:
            self._message_tail = b""
            self._blame("behind_upgrade")

    def _unparsed(self, exc: Exception) -> None:
        """Queue it as aiohttp queues its own: it would close unanswered (`http://[::1]@/`)."""
        if isinstance(exc, MemoryError):  # no fault of the bytes, however they look
            self.server.observer.crashed(exc)
        self._request_count += 1
        self._messages.append((_ErrInfo(400, exc, ""), EMPTY_PAYLOAD))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _look(self, data: bytes) -> None:
        """See whether it shows a capability at its beginning. A body is not looked at: it may be
        megabytes, and what strangers send must cost little.
        """
        capabilities = self.server.capabilities
        if capabilities is None:
            return
        seen = self._tail + data[:LOOKED_BYTES]
        self.authenticated, internal = capabilities.shown(seen)
        if self.stranger and (self.authenticated or internal):
            self.stranger = False
            if not self.server.admit(self):
                self._reported = True  # by `overflow`
                self.force_close()
        if self.authenticated:
            self._tail = b""
            self._report()
        else:
            self._tail = (data if len(data) > LONGEST else seen)[-LONGEST - 1 :]

    def show(self) -> bool:
        """Whether what it has sent and no code has read yet shows a capability."""
        if self.transport is None or self.closing():
            return False
        # Not a second descriptor: there may be none left. It is detached, and stays open.
        descriptor = self.transport.get_extra_info("socket").fileno()
        kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
        peeking = socket.socket(socket.AF_INET, kind, fileno=descriptor)
        try:
            self._look(peeking.recv(LOOKED_BYTES, socket.MSG_PEEK))
        except OSError:  # nothing is there
            return False
        finally:
            peeking.detach()
        return not self.stranger

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

    def left_at(self) -> float | None:
        """Loop time at which the peer was first found gone; ``None`` while it is here."""
        if self._left is None and (self.closing() or self.polled()):
            self._leaves()
        return self._left

    def _leaves(self) -> None:
        if self._left is None:
            self._left = self._loop.time()

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
            stream = isinstance(resp, web.StreamResponse)
            if request.delivered or not stream or isinstance(resp, web.HTTPException):
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
        told = (400, BAD_MESSAGE) if status == 400 else (500, INTERNAL_ERROR)
        if status != 400:
            exc = exc or sys.exc_info()[1]
            exc = exc or errors.INTERNAL_ERROR(f"aiohttp gave up with {status}.")
            viewer_left = begun and self.closing() and isinstance(exc, ConnectionError)
            if not viewer_left:
                self.server.observer.crashed(exc)
        if begun:
            raise ConnectionError(HANDED_OVER)
        return cast("web.StreamResponse", edge_request.refuse(*told, close=True))

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Hand to the observer what aiohttp would log."""
        # The stock one writes a traceback that holds the request line, and so the capability.
        exc = kw.get("exc_info")
        if not isinstance(exc, BaseException):
            exc = errors.INTERNAL_ERROR("aiohttp reported a failure without its exception.")
        self.server.observer.crashed(exc)


class EdgeServer(web.Server):
    """The factory of connections, and what they share; made on the running loop."""

    def __init__(
        self,
        handler: Handler,
        *,
        observer: EdgeObserver,
        capabilities: Capabilities | None,
        keepalive_seconds: float,
        connections_max: int,
        strangers_max: int = STRANGERS_MAX,
        descriptors_max: int = sys.maxsize,
        stall_seconds: float = STALL_SECONDS,
        loop_watch: LoopWatch | None = None,
    ) -> None:
        """Make a server that no connection can reach before `listen`.

        What ``handler`` raises is answered with a constant 500. A connection whose bytes hold one
        of the ``capabilities`` is no stranger's; without them every one is.
        ``keepalive_seconds`` bounds idle connections, and headers that do not become whole; the
        kernel drops a peer that takes no byte for ``stall_seconds``. Where ``loop_watch`` says that
        the loop stood still, the kernel is asked when a request came.

        At most ``connections_max`` connections that have shown a capability are open, and
        ``strangers_max`` more in all. A stranger's is ended for a newcomer, the oldest first, also
        where a newcomer's descriptor is ``descriptors_max`` or higher.

        Raises ``InvariantBroken`` where a bound is zero.
        """
        if min(keepalive_seconds, connections_max, strangers_max, stall_seconds) <= 0:
            raise errors.INTERNAL_ERROR("The edge needs bounds that are over zero.")
        super().__init__(
            cast("Any", handler),
            request_factory=cast("Any", EdgeRequest),
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=keepalive_seconds,
            lingering_time=LINGERING_SECONDS,
            tcp_keepalive=False,
        )
        self.observer = observer
        self.capabilities = capabilities
        self.connections_max = connections_max
        self.strangers_max = strangers_max
        self.descriptors_max = descriptors_max
        self.stall_seconds = stall_seconds
        self.loop_watch = loop_watch or LoopWatch()
        self.draining = False
        self.open = 0  # connections
        self.known = 0  # of them: those that have shown a capability
        self.strangers: dict[EdgeConnection, None] = {}  # those that are not ending, oldest first
        self.tasks: set[asyncio.Task[Any]] = set()  # one a connection, until its work has ended
        self._settled = asyncio.Event()

    def __call__(self) -> EdgeConnection:
        # Not the inherited one: at an option it does not know it drops all of them.
        return EdgeConnection(self, loop=self._loop, **self._kwargs)

    def settle(self) -> None:
        """Called whenever a connection or its work has ended."""
        if self.draining and not self.open and not self.tasks:
            self._settled.set()

    async def settled(self, seconds: float) -> bool:
        """Wait at most so long, while draining, until every connection and all work has ended."""
        self.settle()
        try:
            async with asyncio.timeout(seconds):
                return await self._settled.wait()
        except TimeoutError:
            return False

    def make_room(self, descriptor: int) -> None:
        """End the oldest stranger's connection where a newcomer needs its place, in whatever state
        it is. What a stranger has sent is looked at first: it may be a rollout's first request.
        """
        scarce = descriptor >= self.descriptors_max
        if scarce or self.open >= self.connections_max + self.strangers_max:
            while self.strangers:
                oldest = next(iter(self.strangers))
                if oldest.show():
                    continue  # it is admitted, and no longer among them
                del self.strangers[oldest]
                oldest.cut()
                break
        if scarce and self.open == self.known:
            self.observer.exhausted()

    def admit(self, edge: EdgeConnection) -> bool:
        """Count a connection that has shown a capability; False where there are too many."""
        self.strangers.pop(edge, None)
        self.known += 1
        if self.known <= self.connections_max:
            return True
        self.observer.overflow()
        return False

    def oldest_began(self) -> float:
        """Loop time of the first byte of the oldest unanswered request under the execute
        capability; infinite where every one is answered.
        """
        return min((edge.unanswered_since() for edge in self.edges()), default=float("inf"))

    def edges(self) -> list[EdgeConnection]:
        """The connections that are open, or whose work goes on without their client."""
        return [edge for edge in self.connections if isinstance(edge, EdgeConnection)]

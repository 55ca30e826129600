"""What an operator looks at: the page, its live events, recent requests, the metrics.

One task takes a tick a second, with viewers or without, so that the page shows what went before it
was opened. A tick is told to viewers as one server-sent event, encoded once; a viewer that is slow
misses ticks, and its memory stays bounded. These routes only read.

Apart from `app`, its one importer: what is shown lives apart from what is decided.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Final

import orjson
from aiohttp import web

from smartsearch_sidecar import __version__, errors
from smartsearch_sidecar.errors import GOING_ON, remedy
from smartsearch_sidecar.ledger.describe import printable, readable_query
from smartsearch_sidecar.ledger.recorder import utf8_safe
from smartsearch_sidecar.metrics import ANSWER_SECONDS, USUAL, Observer, Recent
from smartsearch_sidecar.web.edge.request import EdgeRequest, Reply
from smartsearch_sidecar.web.exposition import exposition
from smartsearch_sidecar.web.page import HEADERS, HTML
from smartsearch_sidecar.web.ready import Ready, ServedRun
from smartsearch_sidecar.web.routes import answer

VIEWERS_MAX: Final = 16  # each costs a few KB a second and a connection
LISTED_A_TICK: Final = 4  # requests; a list of every one would change too fast to be read
LISTED: Final = 50
KEPT: Final = 4 * LISTED  # so that what a page lists can still be opened for a while
QUERY_CHARACTERS: Final = 200  # of a query in the list; the whole one comes with its passages
RETRY_MILLISECONDS: Final = 2000  # until a browser asks again after a lost stream
TICK_SECONDS: Final = 1.0
LATEST_ROWS: Final = 600  # ten minutes of ticks
WHOLE_ROWS: Final = 360
RATE_SECONDS: Final = 10.0  # a shorter time is too little to say when a quota ends
WHOLE_STEP_SECONDS: Final = 5.0  # at first: half an hour, then doubled

COLUMNS: Final = ("at", "answers", "p50", "p95", "waiting", "in_service", "scores", "left")

Page = Callable[[EdgeRequest, str], Awaitable[Reply | web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Running totals at a moment; ``waiting`` and ``in_service`` are the most since the one before.

    ``at`` is in seconds of the wall clock; ``service`` the counts of a histogram of seconds;
    ``used`` and ``left`` are those of the run's quotas, in one order.
    """

    at: float
    answers: int
    service: tuple[int, ...]
    waiting: int
    in_service: int
    scores: int
    used: tuple[int, ...]
    left: tuple[int, ...]


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value under which ``share`` of the counted ones lie, even within a bucket, or None.

    ``counts`` has one more than ``bounds``; what lies over the last is taken to lie at it.
    """
    left = sum(counts) * share
    if not left:
        return None
    low = 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and left <= count:
            return low + (bound - low) * left / count
        left -= count
        low = bound
    return low


class PageSeries:
    """What the page's charts show: a run over time, in a fixed amount of memory.

    Two series of the same rows. The last ten minutes keep every tick; the whole run keeps at most
    ``WHOLE_ROWS``, and where they are used up every second one goes and the step doubles: after a
    day a row stands for some minutes. A row is computed from two snapshots of running totals, so
    that rows can be merged without a loss.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds`` are those of the histogram in every snapshot."""
        self._bounds = tuple(bounds)
        self._latest: deque[Snapshot] = deque(maxlen=LATEST_ROWS + 1)
        self._whole: list[Snapshot] = []
        self.step_seconds = WHOLE_STEP_SECONDS
        self._waiting = self._in_service = 0

    def add(self, snapshot: Snapshot) -> bool:
        """Takes a tick; returns whether the series of the whole run has grown by a row."""
        self._latest.append(snapshot)
        self._waiting = max(self._waiting, snapshot.waiting)
        self._in_service = max(self._in_service, snapshot.in_service)
        if self._whole and snapshot.at - self._whole[-1].at < self.step_seconds:
            return False
        self._whole.append(replace(snapshot, waiting=self._waiting, in_service=self._in_service))
        self._waiting = self._in_service = 0
        if len(self._whole) > WHOLE_ROWS + 1:
            self._halve()
        return True

    def _halve(self) -> None:
        """Every second row goes; the first and the last stay."""
        first, *rest = self._whole
        kept = [first]
        for before, after in zip(rest[::2], rest[1::2], strict=False):
            most = max(before.waiting, after.waiting)
            busiest = max(before.in_service, after.in_service)
            kept.append(replace(after, waiting=most, in_service=busiest))
        if len(rest) % 2:
            kept.append(rest[-1])
        self._whole = kept
        self.step_seconds *= 2

    def latest(self) -> list[list[Any]]:
        """Rows of ``COLUMNS``, one a tick, oldest first."""
        return [self._row(before, after) for before, after in pairwise(self._latest)]

    def newest(self) -> list[Any] | None:
        """The last row of ``latest``."""
        return self._row(self._latest[-2], self._latest[-1]) if len(self._latest) > 1 else None

    def whole(self) -> list[list[Any]]:
        """Rows of ``COLUMNS`` of the whole run, oldest first."""
        return [self._row(before, after) for before, after in pairwise(self._whole)]

    def rates(self) -> list[float]:
        """How fast each quota is used, per second, over the latest rows; 0 while they are few."""
        first, last = self._latest[0], self._latest[-1]
        seconds = last.at - first.at
        if seconds < RATE_SECONDS:
            return [0.0] * len(last.used)
        return [(b - a) / seconds for a, b in zip(first.used, last.used, strict=True)]

    def _row(self, before: Snapshot, after: Snapshot) -> list[Any]:
        seconds = max(after.at - before.at, 1e-3)
        counts = [b - a for a, b in zip(before.service, after.service, strict=True)]
        p50, p95 = (quantile(self._bounds, counts, share) for share in (0.5, 0.95))
        return [
            round(after.at, 1),
            round((after.answers - before.answers) / seconds, 2),
            None if p50 is None else round(p50, 5),
            None if p95 is None else round(p95, 5),
            after.waiting,
            after.in_service,
            round((after.scores - before.scores) / seconds, 3),
            list(after.left),
        ]


class OperatorRoutes:
    """The operator's pages of one process; handlers raise ``NotReady`` before ``watch``."""

    def __init__(self, ready: Ready, observer: Observer, about: Mapping[str, Any]) -> None:
        """``about`` holds what names the run: strings for a person, never a capability."""
        self._ready = ready
        self._observer = observer
        self._about = dict(about)
        self._series = PageSeries(ANSWER_SECONDS)
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._kept: deque[Recent] = deque(maxlen=KEPT)
        self._seen = 0  # serial of the newest request that was looked at
        self._tick = b""
        self.viewers: set[asyncio.Event] = set()
        self.pages: dict[tuple[str, ...], Page] = {
            (): self._page,
            ("",): self._page,
            ("events",): self._events,
            ("recent",): self._recent,
            ("metrics",): self._metrics,
        }

    def watch(self, run: ServedRun) -> None:
        """Begins to take ticks."""
        self._take(run)
        self._task = asyncio.get_running_loop().create_task(self._ticks(run), name="operator")
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and isinstance(exc := task.exception(), MemoryError):
            self._ready.close_latch(errors.INTERNAL_ERROR(f"a tick ended in {type(exc).__name__}"))

    async def close(self) -> None:
        """Ends the ticks and every viewer's stream."""
        self._closing.set()
        for viewer in self.viewers:
            viewer.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    # --- ticks ------------------------------------------------------------------------------------

    async def _ticks(self, run: ServedRun) -> None:
        latched = run.service.run.recorder.latched
        known = latched.is_set()
        while True:
            try:
                async with asyncio.timeout(TICK_SECONDS):
                    # A failure is told at once; afterwards every tick only waits for its time.
                    await (asyncio.sleep(2 * TICK_SECONDS) if known else latched.wait())
            except TimeoutError:
                pass
            known = latched.is_set()
            self._take(run)

    def _take(self, run: ServedRun) -> None:
        service = run.service
        state = service.run.state
        if state.closed and self._observer.latched_at is None and self._task is not None:
            self._observer.latched_at = time.time()  # a ledger that failed could not say so
        chosen = self._choose()
        self._kept.extend(chosen)
        found = run.quotas()
        grown = self._series.add(
            Snapshot(
                at=time.time(),
                answers=state.responses + state.declined,
                service=tuple(self._observer.service.counts),
                waiting=service.slots.waiting,
                in_service=service.slots.in_service,
                scores=sum(one.score_responses for one in state.scores.splits.values()),
                used=tuple(quota.used for quota in found),
                left=tuple(quota.left for quota in found),
            )
        )
        if self.viewers:
            value = {**self._now(run), "row": self._series.newest()}
            if grown:
                value["whole"] = self._series.whole()
            value["recent"] = [_listed(one) for one in chosen]
            self._tick = _event("tick", value)
            for viewer in self.viewers:
                viewer.set()

    def _choose(self) -> list[Recent]:
        """The requests of this tick that pages list: what failed, and the newest of the rest."""
        fresh = [one for one in self._observer.recent if one.serial > self._seen]
        self._seen = self._observer.serial
        usual = [one.serial for one in fresh if one.outcome in USUAL]
        left_out = set(usual[:-LISTED_A_TICK])
        return [one for one in fresh if one.serial not in left_out]

    def _now(self, run: ServedRun) -> dict[str, Any]:
        """What a tick says, for ``orjson``."""
        service, observer = run.service, self._observer
        cause = service.run.state.cause
        found = zip(run.quotas(), self._series.rates(), strict=True)
        return {
            "at": time.time(),
            "status": run.status(),
            "failure": None
            if cause is None
            else {
                **cause.to_data(),
                "at": observer.latched_at,
                "remedy": remedy(cause.cause),
                "going_on": GOING_ON,
            },
            "helper_failures": dict(observer.helper_failures),
            "quotas": [
                {
                    **asdict(quota),
                    "rate": round(rate, 4),
                    "seconds_left": round(quota.left / rate) if rate > 0 else None,
                }
                for quota, rate in found
            ],
            "checkpoints": list(reversed(observer.checkpoints)),
        }

    # --- pages ------------------------------------------------------------------------------------

    async def _page(self, request: EdgeRequest, query: str) -> Reply:
        return answer(request, HTML, content_type="text/html; charset=utf-8", extra=HEADERS)

    async def _metrics(self, request: EdgeRequest, query: str) -> Reply:
        body, content_type = exposition(self._ready.now(), request.headers.get("Accept", ""))
        return answer(request, body, content_type=content_type)

    async def _recent(self, request: EdgeRequest, query: str) -> Reply:
        """``recent?serial=N``: one of the last requests, its whole query and its passages."""
        self._ready.now()
        name, _, value = query.partition("=")
        if name != "serial" or not (value.isascii() and value.isdigit() and len(value) < 16):
            raise errors.OPERATOR_REQUEST("name one request: recent?serial=NUMBER")
        for one in self._kept:
            if one.serial == int(value):
                head = orjson.dumps({**_listed(one), "query": _query(one)})
                body = head[:-1] + b',"documents":' + (one.documents_json or b"null") + b"}"
                return answer(request, body)
        raise errors.NO_SUCH_PAGE(
            "this request is no longer among the last ones; the ledger has it"
        )

    async def _events(self, request: EdgeRequest, query: str) -> web.StreamResponse:
        run = self._ready.now()
        if len(self.viewers) >= VIEWERS_MAX or self._closing.is_set():
            raise errors.TOO_MANY_VIEWERS(f"{VIEWERS_MAX} pages are open already")
        viewer = asyncio.Event()
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        self.viewers.add(viewer)
        try:
            await stream.prepare(request)
            await stream.write(b"retry: %d\n\n" % RETRY_MILLISECONDS + self._hello(run))
            while not self._closing.is_set():
                await viewer.wait()
                viewer.clear()
                if not self._closing.is_set():
                    await stream.write(self._tick)
            await stream.write_eof()
        except ConnectionError:
            pass  # the page was closed: that is how every viewer ends
        finally:
            self.viewers.discard(viewer)
        return stream

    def _hello(self, run: ServedRun) -> bytes:
        return _event(
            "hello",
            {
                **self._now(run),
                "about": {
                    **self._about,
                    "version": __version__,
                    "started_at": self._observer.started_at,
                    "claim_sha256": run.service.run.state.claim_sha256,
                },
                "facts": run.facts,
                "columns": COLUMNS,
                "latest": self._series.latest(),
                "whole": self._series.whole(),
                "recent": [_listed(one) for one in list(self._kept)[-LISTED:]],
            },
        )


def _event(name: str, value: Any) -> bytes:
    """One server-sent event; compact JSON holds no line end."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(value))


def _listed(one: Recent) -> dict[str, Any]:
    return {
        "serial": one.serial,
        "at": one.at,
        "number": one.number,
        "query": printable(_query(one), QUERY_CHARACTERS),
        "outcome": one.outcome,
        "took": one.took,
        "passages": one.documents_json is not None,
    }


def _query(one: Recent) -> str:
    return utf8_safe(readable_query(one.asked)) if one.asked is not None else ""

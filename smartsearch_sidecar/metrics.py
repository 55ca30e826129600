"""Every metric of a run: name, type, meaning; and the one observer of what no state keeps.

Theory. What the state of a run counts is read off it at each scrape, so a request pays for nothing
twice. The rest (how long things took, the last few requests, which HTTP route was answered how)
reaches the ``Observer``: once an answer, and once a batch of the ledger with the records that are
now on the medium. Each record takes about a microsecond. Label values are names out of this
program's own tables, so their number is bounded for any policy and any stranger.

The observer decides nothing and keeps a fixed amount.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, NamedTuple

from smartsearch_sidecar.run import record as kinds

# Seconds. The first is under one search of an embedded index, the last over every deadline.
ANSWER_SECONDS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
HELPER_SECONDS: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 600.0)
BATCH_RECORDS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
ROLLOUT_SEARCHES: Final = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0)

RECENT_REQUESTS: Final = 50
USUAL: Final = frozenset(
    {"miss", "shared", "hit", "declined", "repeated"}
)  # outcomes that are no failure
RECENT_CHECKPOINTS: Final = 20
# Routes that say nothing of a trainer: a stranger, an orchestrator, the operator and Prometheus.
LOOKED_ONLY: Final = frozenset(
    {"unknown", "probe", "page", "events", "recent", "metrics", "status"}
)
PREFIX: Final = "smartsearch_"


class Metric(NamedTuple):
    """One row of the table; ``name`` as it is scraped, without a histogram's endings."""

    name: str
    type: str
    meaning: str
    labels: tuple[str, ...]


def _row(
    name: str, type_: Literal["counter", "gauge", "histogram"], meaning: str, *labels: str
) -> Metric:
    return Metric(PREFIX + name, type_, meaning, labels)


TABLE: Final = (
    _row("build_info", "gauge", "1, labelled with the version that serves.", "version"),
    # --- what was asked and how it was answered
    _row("requests_total", "counter", "HTTP requests of this process.", "route", "outcome"),
    _row("failures_total", "counter", "Refusals and failures of this process.", "cause"),
    _row("service_seconds", "histogram", "/execute: first byte to answer handed over."),
    _row("waiting_seconds", "histogram", "Time waited for a slot, 0 included.", "route"),
    _row("slots", "gauge", "Requests that may be in service at once.", "route"),
    _row("slots_in_service", "gauge", "Requests in service.", "route"),
    _row("slots_waiting", "gauge", "Requests waiting for a slot.", "route"),
    _row("oldest_request_seconds", "gauge", "Age of the oldest one unanswered.", "route"),
    _row("connections", "gauge", "Open connections."),
    _row("loop_stood_still_seconds_total", "counter", "Times over a second without a turn."),
    # --- searches
    _row("search_attempts_total", "counter", "Searches admitted; each counts against the quota."),
    _row("searches_total", "counter", "Searches settled.", "outcome"),
    _row("searches_under_way", "gauge", "Searches admitted and not settled."),
    _row("search_retries_total", "counter", "Further calls that answered searches took."),
    _row("search_seconds", "histogram", "Time of a search that was no cache hit."),
    _row("search_cache_total", "counter", "Answers by cost: miss, shared, hit.", "outcome"),
    _row("search_cache_bytes", "gauge", "Bytes of answers held in the cache."),
    _row("declined_total", "counter", "Queries and calls that were declined.", "reason"),
    _row("declined_share", "gauge", "Declined queries as a share of declined and admitted ones."),
    _row("passages_dropped_total", "counter", "Passages left out: a tag, blank, a second time."),
    _row("answers_emptied_total", "counter", "Answers that lost every passage to a tag."),
    _row("answers_emptied_share", "gauge", "Of the last 200 searches that repeated no other."),
    _row("answers_lost_total", "counter", "Answers whose client had gone."),
    _row("answers_repeated_total", "counter", "Lost answers whose client asked again."),
    _row("answers_awaited", "gauge", "Lost answers whose client is to ask again."),
    # --- rewards
    _row("score_attempts_total", "counter", "Rollouts admitted for a score.", "split"),
    _row("scores_total", "counter", "Rollouts scored.", "split"),
    _row("scores_failed_total", "counter", "Scores that failed."),
    _row("scores_reused_total", "counter", "Rewards repeated for an identical rollout."),
    _row("score_seconds", "histogram", "Admission of a rollout to its reward."),
    _row("rollout_searches", "histogram", "Answered searches in each scored rollout."),
    _row("result_blocks_total", "counter", "Result blocks of rollouts.", "kind"),
    _row(
        "verdicts_total",
        "counter",
        "Helper verdicts; `other` and `empty` are neither 0 nor 1.",
        "verdict",
    ),
    _row("verdicts_unparsed_share", "gauge", "Verdicts not understood, of the last 200."),
    # --- the helper
    _row("helper_calls_total", "counter", "Helper calls recorded and sent.", "split"),
    _row("helper_failures_total", "counter", "Helper calls that failed.", "code"),
    _row("helper_calls_under_way", "gauge", "Helper calls not settled.", "split"),
    _row("helper_seconds", "histogram", "A helper call from its record to its settlement."),
    _row("helper_tokens_total", "counter", "Measured tokens.", "split", "direction"),
    _row("helper_tokens_reserved", "gauge", "Output tokens of calls of unknown usage.", "split"),
    # --- quotas, latch, checkpoints
    _row("quota_max", "gauge", "What the run may use.", "quota", "split"),
    _row("quota_left", "gauge", "What is left of it.", "quota", "split"),
    _row("latch_closed", "gauge", "1 once the run has failed."),
    _row("latch_cause", "gauge", "1 for the first cause of a failed run.", "cause"),
    _row("checkpoints_total", "counter", "Checkpoints asked for.", "outcome"),
    _row("searches_unaccepted", "gauge", "Searches since the last accepted checkpoint."),
    _row("restarts_total", "counter", "Times this run was resumed."),
    # --- the ledger
    _row("ledger_records_total", "counter", "Records of the run on the medium."),
    _row("ledger_bytes_total", "counter", "Journal bytes written by this process."),
    _row("ledger_queue_records", "gauge", "Records posted and not yet being written."),
    _row("ledger_batch_records", "histogram", "Records a write carried."),
    _row("ledger_sync_seconds", "histogram", "Time of a write and its sync."),
)


class Histogram:
    """Counts under upper bounds, and their sum; ``observe`` costs a bisection."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Counts one value; a value that equals a bound is under it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def sample(self, zeros: int = 0) -> tuple[list[tuple[str, float]], float]:
        """Pairs of bound and count as Prometheus writes them, with so many more of 0; the sum."""
        pairs, count = [], zeros
        for bound, own in zip((*self.bounds, float("inf")), self.counts, strict=True):
            count += own
            pairs.append(("+Inf" if bound == float("inf") else str(bound), float(count)))
        return pairs, self.total


class Recent(NamedTuple):
    """A request that was settled: what the page shows of it.

    ``asked`` is what its record says of the query, if it is known; ``took`` is in seconds;
    ``documents_json`` are the passages as they were recorded.
    """

    serial: int
    at: float
    number: int | None
    asked: kinds.Asked | None
    outcome: str
    took: float | None
    documents_json: bytes | None


@dataclass(frozen=True, slots=True)
class Accepted:
    """A checkpoint that was asked for."""

    at: float
    number: int | None
    step: int
    accepted: bool


class Observer:
    """Takes every answer and written record of a process. Called on the loop; never raises."""

    def __init__(self, *, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self.started_at = wall()
        self.requests: Counter[tuple[str, str]] = Counter()
        self.service = Histogram(ANSWER_SECONDS)
        self.waited = {route: Histogram(ANSWER_SECONDS) for route in ("execute", "reward")}
        self.search = Histogram(ANSWER_SECONDS)
        self.score = Histogram(HELPER_SECONDS)
        self.helper = Histogram(HELPER_SECONDS)
        self.sync = Histogram(ANSWER_SECONDS)
        self.batches = Histogram(BATCH_RECORDS)
        self.rollout_searches = Histogram(ROLLOUT_SEARCHES)
        self.journal_bytes = 0
        self.helper_failures: Counter[str] = Counter()
        self.recent: deque[Recent] = deque(maxlen=RECENT_REQUESTS)
        self.checkpoints: deque[Accepted] = deque(maxlen=RECENT_CHECKPOINTS)
        self.latched_at: float | None = None
        self.serial = 0
        # Begun and not settled: bounded by slots, rows of a batch and helper concurrency.
        self._searches: dict[int, tuple[float, kinds.Asked]] = {}
        self._scores: dict[tuple[str, int], float] = {}
        self._calls: dict[tuple[str, int], float] = {}

    def batch(self, records: Sequence[kinds.Record], size: int, seconds: float) -> None:
        """A batch of the ledger is on the medium."""
        self.batches.observe(len(records))
        self.sync.observe(seconds)
        self.journal_bytes += size
        for record in records:
            step = self._STEPS.get(type(record))
            if step is not None:
                step(self, record)

    @property
    def asked(self) -> bool:
        """Whether a rollout, a trainer or its gate has asked this process anything."""
        return any(route not in LOOKED_ONLY for route, _ in self.requests)

    # --- one step a kind --------------------------------------------------------------------------

    def _settled(
        self,
        number: int | None,
        asked: kinds.Asked | None,
        outcome: str,
        took: float | None = None,
        documents_json: bytes | None = None,
    ) -> None:
        self.serial += 1
        self.recent.append(
            Recent(self.serial, self._wall(), number, asked, outcome, took, documents_json)
        )

    def _requested(self, record: kinds.RetrievalRequested) -> None:
        self._searches[record.number] = (time.monotonic(), record.asked)

    def _answered(self, record: kinds.RetrievalAnswered) -> None:
        _, asked = self._searches.pop(record.number, (0.0, None))
        took = record.took_us / 1e6
        if record.cache != "hit":
            self.search.observe(took)
        self._settled(record.number, asked, record.cache, took, record.documents_json)

    def _failed(self, record: kinds.RetrievalFailed) -> None:
        began, asked = self._searches.pop(record.number, (time.monotonic(), None))
        self._settled(record.number, asked, record.cause, time.monotonic() - began)

    def _declined(self, record: kinds.RetrievalDeclined) -> None:
        self._settled(None, record.asked, "declined")

    def _lost(self, record: kinds.DeliveryLost) -> None:
        self._settled(record.number, None, "response_undelivered")

    def _repeated(self, record: kinds.DeliveryRepeated) -> None:
        self._settled(record.number, None, "repeated")

    def _score_requested(self, record: kinds.RewardRequested) -> None:
        self._scores[record.split, record.number] = time.monotonic()
        if record.judged_blocks is not None:
            self.rollout_searches.observe(record.judged_blocks)

    def _score_answered(self, record: kinds.RewardAnswered) -> None:
        began = self._scores.pop((record.split, record.number), None)
        if began is not None:
            self.score.observe(time.monotonic() - began)

    def _score_failed(self, record: kinds.RewardFailed) -> None:
        self._scores.pop((record.split, record.number), None)

    def _call_requested(self, record: kinds.HelperRequested) -> None:
        self._calls[record.split, record.number] = time.monotonic()

    def _call_settled(self, record: kinds.HelperAnswered | kinds.HelperFailed) -> None:
        began = self._calls.pop((record.split, record.number), None)
        if began is not None:
            self.helper.observe(time.monotonic() - began)
        if isinstance(record, kinds.HelperFailed):
            self.helper_failures[record.code] += 1

    def _latched(self, record: kinds.LatchClosed) -> None:
        self.latched_at = self._wall()

    def _checkpoint(self, record: kinds.CheckpointAccepted | kinds.CheckpointRefused) -> None:
        accepted = isinstance(record, kinds.CheckpointAccepted)
        self.checkpoints.append(Accepted(self._wall(), record.number, record.step, accepted))

    _STEPS: ClassVar[Mapping[type[kinds.Record], Callable[[Observer, Any], None]]] = {
        kinds.RetrievalRequested: _requested,
        kinds.RetrievalAnswered: _answered,
        kinds.RetrievalFailed: _failed,
        kinds.RetrievalDeclined: _declined,
        kinds.DeliveryLost: _lost,
        kinds.DeliveryRepeated: _repeated,
        kinds.RewardRequested: _score_requested,
        kinds.RewardAnswered: _score_answered,
        kinds.RewardFailed: _score_failed,
        kinds.HelperRequested: _call_requested,
        kinds.HelperAnswered: _call_settled,
        kinds.HelperFailed: _call_settled,
        kinds.LatchClosed: _latched,
        kinds.CheckpointAccepted: _checkpoint,
        kinds.CheckpointRefused: _checkpoint,
    }

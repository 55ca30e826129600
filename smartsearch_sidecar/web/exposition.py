"""The metrics as Prometheus reads them: what the state counts and the observer heard, at a scrape.

One registry a run, so that two runs in one process (as in tests) do not mix. Every sample is of a
row of ``metrics.TABLE``; a name that is not there cannot be given one.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from smartsearch_sidecar import __version__
from smartsearch_sidecar.gate.health import status_report
from smartsearch_sidecar.metrics import PREFIX, TABLE, Histogram, Observer
from smartsearch_sidecar.run.slots import Slots
from smartsearch_sidecar.scoring.service import Scoring
from smartsearch_sidecar.search.service import Service

if TYPE_CHECKING:
    from smartsearch_sidecar.gate.cluster import ClusterRun

# Labels' values, and the sample: a number, or a histogram with so many further values of 0.
Sample = tuple[tuple[str, ...], float | tuple[Histogram, int]]


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the figures of a run stand. ``oldest_began`` is loop time, infinite if none waits."""

    service: Service
    scoring: Scoring | None
    observer: Observer
    connections: Callable[[], int]
    oldest_began: Callable[[], float]
    cluster_run: ClusterRun | None = None

    def status(self) -> dict[str, Any]:
        """What ``/status`` says of the run."""
        if self.cluster_run is None:
            return status_report(self.service)
        return self.cluster_run.status(self.service)

    def quotas(self) -> list[Quota]:
        """Every allowance and what the run has used of it, all its nodes together."""
        own = quotas(self.service)
        if self.cluster_run is None:
            return own
        used = self.cluster_run.used()
        return [replace(quota, used=used.get(quota.resource, quota.used)) for quota in own]

    def oldest_seconds(self) -> float:
        """Age of the oldest rollout request that is not answered; 0 if there is none."""
        return max(0.0, asyncio.get_running_loop().time() - self.oldest_began())


@dataclass(frozen=True, slots=True)
class Quota:
    """One allowance of the run; ``split`` is empty for what is not a split's."""

    name: str
    split: str
    unit: str
    used: int
    most: int

    @property
    def resource(self) -> str:
        """Its name between the nodes of a run."""
        return f"{self.split}.{self.name}" if self.split else "searches"

    @property
    def left(self) -> int:
        """What may still be used."""
        return max(0, self.most - self.used)


def quotas(service: Service) -> list[Quota]:
    """Every allowance of a run, always in the same order."""
    state = service.run.state
    found = [Quota("retrieval_calls", "", "searches", state.attempts, state.max_calls)]
    for split, meter in state.scores.splits.items():
        if meter.max_scores is not None:
            used, most = meter.score_attempts, meter.max_scores
            found.append(Quota("scores", split, "rollouts", used, most))
        found.append(Quota("helper_calls", split, "calls", meter.model_attempts, meter.max_calls))
        spent = meter.committed_output_tokens
        found.append(Quota("output_tokens", split, "tokens", spent, meter.max_output_tokens))
    return found


def exposition(sources: Sources, accept: str) -> tuple[bytes, str]:
    """The scrape's body and its content type, in the format ``accept`` asks for."""
    registry = CollectorRegistry()
    registry.register(_Run(sources))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class _Run(Collector):
    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        samples: dict[str, list[Sample]] = defaultdict(list)
        for name, sample in _samples(self._sources):
            samples[PREFIX + name].append(sample)
        for row in TABLE:
            given = samples.pop(row.name, [])
            if row.type == "histogram":
                family: Metric = _histogram(row.name, row.meaning, row.labels, given)
            else:
                make = CounterMetricFamily if row.type == "counter" else GaugeMetricFamily
                family = simple = make(row.name, row.meaning, labels=row.labels)
                for labels, value in given:
                    if not isinstance(value, tuple):
                        simple.add_metric(labels, value)
            yield family
        if samples:
            raise KeyError(f"no row of the table is named {', '.join(sorted(samples))}")


def _histogram(
    name: str, meaning: str, labels: tuple[str, ...], given: list[Sample]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, meaning, labels=labels)
    for values, value in given:
        if isinstance(value, tuple):
            histogram, zeros = value
            family.add_metric(values, histogram.cumulative(zeros), histogram.total)
    return family


def _samples(sources: Sources) -> Iterator[tuple[str, Sample]]:
    yield "build_info", ((__version__,), 1.0)
    yield from _requests(sources)
    yield from _searches(sources)
    if sources.service.run.state.scores.splits:
        yield from _rewards(sources)
    yield from _run(sources)
    yield from _ledger(sources)


def _requests(sources: Sources) -> Iterator[tuple[str, Sample]]:
    service, observer = sources.service, sources.observer
    for labels, count in observer.requests.items():
        yield "requests_total", (labels, count)
    for cause, count in service.run.recorder.refused.items():
        yield "failures_total", ((cause,), count)
    yield "service_seconds", ((), (observer.service, 0))
    rooms: dict[str, Slots] = {"execute": service.slots}
    if sources.scoring is not None:
        rooms["reward"] = sources.scoring.slots
    for route, slots in rooms.items():
        waited = observer.waited[route]
        yield "waiting_seconds", ((route,), (waited, slots.taken - sum(waited.counts)))
        yield "slots", ((route,), slots.slots)
        yield "slots_in_service", ((route,), slots.in_service)
        yield "slots_waiting", ((route,), slots.waiting)
    yield "oldest_request_seconds", (("execute",), sources.oldest_seconds())
    if sources.scoring is not None:
        yield "oldest_request_seconds", (("reward",), observer.oldest_score())
    yield "connections", ((), sources.connections())


def _searches(sources: Sources) -> Iterator[tuple[str, Sample]]:
    service = sources.service
    state = service.run.state
    yield "search_attempts_total", ((), state.attempts)
    yield "searches_total", (("answered",), state.responses)
    yield "searches_total", (("failed",), state.failed)
    yield "searches_under_way", ((), len(state.searching))
    yield "search_seconds", ((), (sources.observer.search, 0))
    for outcome, count in state.cache.items():
        yield "search_cache_total", ((outcome,), count)
    yield "search_cache_bytes", ((), service.retrieval.cache.bytes)
    for reason, count in state.declined_by.items():
        yield "declined_total", ((reason,), count)
    asked = state.declined + state.attempts
    yield "declined_share", ((), state.declined / asked if asked else 0.0)
    yield "passages_dropped_total", ((), state.dropped_passages)
    yield "answers_lost_total", ((), state.lost)


def _rewards(sources: Sources) -> Iterator[tuple[str, Sample]]:
    scores, observer = sources.service.run.state.scores, sources.observer
    for split, meter in scores.splits.items():
        yield "score_attempts_total", ((split,), meter.score_attempts)
        yield "scores_total", ((split,), meter.score_responses)
        yield "helper_calls_total", ((split,), meter.model_attempts)
        yield "helper_calls_under_way", ((split,), len(meter.unsettled))
        yield "helper_tokens_total", ((split, "input"), meter.input_tokens)
        yield "helper_tokens_total", ((split, "output"), meter.output_tokens)
        reserved = meter.unknown_output_token_reservations
        yield "helper_tokens_reserved", ((split,), reserved)
    yield "scores_failed_total", ((), scores.failed)
    yield "scores_reused_total", ((), scores.reused)
    yield "score_seconds", ((), (observer.score, 0))
    yield "rollout_searches", ((), (observer.rollout_searches, 0))
    yield "result_blocks_total", (("policy",), scores.policy_blocks)
    yield "result_blocks_total", (("broken",), scores.broken_blocks)
    for verdict, count in scores.verdicts.items():
        yield "verdicts_total", ((verdict,), count)
    yield "verdicts_unparsed_share", ((), scores.unparsed_share)
    yield "helper_seconds", ((), (observer.helper, 0))
    for code, count in observer.helper_failures.items():
        yield "helper_failures_total", ((code,), count)


def _run(sources: Sources) -> Iterator[tuple[str, Sample]]:
    state = sources.service.run.state
    for quota in quotas(sources.service):
        yield "quota_max", ((quota.name, quota.split), quota.most)
        yield "quota_left", ((quota.name, quota.split), quota.left)
    yield "latch_closed", ((), float(state.closed))
    if state.cause is not None:
        yield "latch_cause", ((state.cause.cause,), 1.0)
    yield "checkpoints_total", (("accepted",), state.checkpoints_accepted)
    yield "checkpoints_total", (("refused",), state.checkpoints_refused)
    yield "restarts_total", ((), state.restarts)


def _ledger(sources: Sources) -> Iterator[tuple[str, Sample]]:
    writer, observer = sources.service.run.writer, sources.observer
    yield "ledger_records_total", ((), writer.seq)
    yield "ledger_bytes_total", ((), observer.journal_bytes)
    yield "ledger_queue_records", ((), writer.queued)
    yield "ledger_batch_records", ((), (observer.batches, 0))
    yield "ledger_sync_seconds", ((), (observer.sync, 0))

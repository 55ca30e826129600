"""The metrics as Prometheus reads them: what the state and the observer count, at a scrape.

Apart from `operator`, its one importer, so that the Prometheus client stays behind one file. One
registry a scrape, so that two runs in one process (as in tests) do not mix. Every sample is of a
row of ``metrics.TABLE``; a name that is not there cannot be given one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry, metrics_core
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from smartsearch_sidecar import __version__
from smartsearch_sidecar.metrics import PREFIX, TABLE
from smartsearch_sidecar.run.slots import Slots
from smartsearch_sidecar.web.ready import ServedRun, quotas

# A name, the labels' values, and what `add_metric` takes: a number, or a histogram's `sample`.
Sample = tuple[Any, ...]
FAMILIES: Final[dict[str, Any]] = {
    "counter": metrics_core.CounterMetricFamily,
    "gauge": metrics_core.GaugeMetricFamily,
    "histogram": metrics_core.HistogramMetricFamily,
}


def exposition(run: ServedRun, accept: str) -> tuple[bytes, str]:
    """The scrape's body and its content type, in the format ``accept`` asks for."""
    registry = CollectorRegistry()
    registry.register(_Run(run))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class _Run(Collector):
    def __init__(self, run: ServedRun) -> None:
        self._served = run

    def collect(self) -> Iterator[metrics_core.Metric]:
        samples: dict[str, list[Sample]] = defaultdict(list)
        for name, *sample in _samples(self._served):
            samples[PREFIX + name].append(tuple(sample))
        for row in TABLE:
            family = FAMILIES[row.type](row.name, row.meaning, labels=row.labels)
            for given in samples.pop(row.name, ()):
                family.add_metric(*given)
            yield family
        if samples:
            raise KeyError(f"no row of the table is named {', '.join(sorted(samples))}")


def _samples(run: ServedRun) -> Iterator[Sample]:
    yield "build_info", (__version__,), 1.0
    yield from _requests(run)
    yield from _searches(run)
    if run.service.run.state.scores.splits:
        yield from _rewards(run)
    yield from _latch_and_ledger(run)


def _requests(run: ServedRun) -> Iterator[Sample]:
    service, observer = run.service, run.observer
    for labels, count in observer.requests.items():
        yield "requests_total", labels, count
    for cause, count in service.run.recorder.refused.items():
        yield "failures_total", (cause,), count
    yield "service_seconds", (), *observer.service.sample()
    rooms: dict[str, Slots] = {"execute": service.slots}
    if run.scoring is not None:
        rooms["reward"] = run.scoring.slots
    for route, slots in rooms.items():
        waited = observer.waited[route]
        yield "waiting_seconds", (route,), *waited.sample(slots.taken - sum(waited.counts))
        yield "slots", (route,), slots.slots
        yield "slots_in_service", (route,), slots.in_service
        yield "slots_waiting", (route,), slots.waiting
    stalls = service.run.stalls
    yield "oldest_request_seconds", ("execute",), stalls.oldest_seconds("rollout")
    if run.scoring is not None:
        yield "oldest_request_seconds", ("reward",), stalls.oldest_seconds("reward")
    yield "connections", (), run.connections()
    yield "loop_stood_still_seconds_total", (), stalls.loop.total_seconds


def _searches(run: ServedRun) -> Iterator[Sample]:
    service = run.service
    state = service.run.state
    yield "search_attempts_total", (), state.attempts
    yield "searches_total", ("answered",), state.responses
    yield "searches_total", ("failed",), state.failed
    yield "searches_under_way", (), len(state.searching)
    yield "search_retries_total", (), state.retries
    yield "search_seconds", (), *run.observer.search.sample()
    for outcome, count in state.cache.items():
        yield "search_cache_total", (outcome,), count
    yield "search_cache_bytes", (), service.retrieval.cache.currsize
    for reason, count in state.declined_by.items():
        yield "declined_total", (reason,), count
    asked = state.declined + state.attempts
    yield "declined_share", (), state.declined / asked if asked else 0.0
    yield "passages_dropped_total", (), state.dropped_passages
    yield "answers_emptied_total", (), state.emptied.count
    yield "answers_emptied_share", (), state.emptied.share
    yield "answers_lost_total", (), state.lost
    yield "answers_repeated_total", (), state.repeated
    yield "answers_awaited", (), len(state.awaited)


def _rewards(run: ServedRun) -> Iterator[Sample]:
    scores, observer = run.service.run.state.scores, run.observer
    for split, meter in scores.splits.items():
        yield "score_attempts_total", (split,), meter.score_attempts
        yield "scores_total", (split,), meter.score_responses
        yield "helper_calls_total", (split,), meter.model_attempts
        yield "helper_calls_under_way", (split,), len(meter.unsettled)
        yield "helper_tokens_total", (split, "input"), meter.input_tokens
        yield "helper_tokens_total", (split, "output"), meter.output_tokens
        yield "helper_tokens_reserved", (split,), meter.unknown_output_token_reservations
    yield "scores_failed_total", (), scores.failed
    yield "scores_reused_total", (), scores.reused
    yield "score_seconds", (), *observer.score.sample()
    yield "rollout_searches", (), *observer.rollout_searches.sample()
    for kind, count in scores.result_blocks().items():
        yield "result_blocks_total", (kind,), count
    for verdict, count in scores.verdicts.items():
        yield "verdicts_total", (verdict,), count
    yield "verdicts_unparsed_share", (), scores.unparsed_share
    yield "helper_seconds", (), *observer.helper.sample()
    for code, count in observer.helper_failures.items():
        yield "helper_failures_total", (code,), count


def _latch_and_ledger(run: ServedRun) -> Iterator[Sample]:
    state, writer = run.service.run.state, run.service.run.writer
    for quota in quotas(run.service):
        yield "quota_max", (quota.name, quota.split), quota.most
        yield "quota_left", (quota.name, quota.split), quota.left
    yield "latch_closed", (), float(state.closed)
    if state.cause is not None:
        yield "latch_cause", (state.cause.cause,), 1.0
    yield "checkpoints_total", ("accepted",), state.checkpoints_accepted
    yield "checkpoints_total", ("refused",), state.checkpoints_refused
    yield "searches_unaccepted", (), run.covered().unaccepted
    yield "restarts_total", (), state.restarts
    yield "ledger_records_total", (), writer.seq
    yield "ledger_bytes_total", (), run.observer.journal_bytes
    yield "ledger_queue_records", (), writer.queued
    yield "ledger_batch_records", (), *run.observer.batches.sample()
    yield "ledger_sync_seconds", (), *run.observer.sync.sample()

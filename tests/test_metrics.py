"""Metrics: the table is what is scraped, the figures are the run's, and their number is bounded."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from smartsearch_sidecar.metrics import RECENT_REQUESTS, TABLE, Histogram, Observer
from smartsearch_sidecar.run.record import (
    CLASSES,
    HelperFailed,
    HelperRequested,
    NativeCall,
    RetrievalAnswered,
    RetrievalRequested,
    RewardFailed,
    RewardRequested,
    record_of,
)
from tests.fakes.each import each
from tests.fakes.helper import FakeHelper
from tests.fakes.provider import FakeProvider
from tests.fakes.rewarded import rewarded
from tests.fakes.served import EXECUTE_CAPABILITY, INTERNAL_CAPABILITY, Served, served
from tests.fakes.until import until

ROOT = Path(__file__).resolve().parent.parent

Labels = frozenset[tuple[str, str]]


class Scrape:
    """What one scrape said: families by name, and every sample."""

    def __init__(self, text: str) -> None:
        self.text = text
        families = list(text_string_to_metric_families(text))
        self.types = {family.name: family.type for family in families}
        self.samples = {
            (one.name, frozenset(one.labels.items())): one.value
            for family in families
            for one in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples["smartsearch_" + name, frozenset(labels.items())]


async def scrape(run: Served, accept: str = "") -> Scrape:
    """Asks as Prometheus does."""
    headers = {"Accept": accept} if accept else {}
    async with run.session.get(run.endpoints.internal_url + "/metrics", headers=headers) as answer:
        assert answer.status == 200
        return Scrape(await answer.text())


async def test_table_is_what_is_scraped(tmp_path: Path) -> None:
    """Every row of the table is scraped under its name and type, and nothing else is."""
    async with rewarded(tmp_path) as on:
        await on.reward(await on.rollout("q"))
        found = await scrape(on.run)
        # The parser names a counter without its ending.
        expected = {row.name.removesuffix("_total"): row.type for row in TABLE}
        assert found.types == expected
        labels = {row.name: frozenset(row.labels) for row in TABLE}
        for name, given in found.samples:
            row = re.sub(r"_(bucket|sum|count)$", "", name) if name not in labels else name
            assert {key for key, _ in given} - {"le"} == labels[row], name


async def test_figures_are_the_runs(tmp_path: Path) -> None:
    """A rollout of two searches, a declined query, a score and a checkpoint are counted once."""
    async with rewarded(tmp_path) as on:
        solution = await on.rollout("a", "b")
        await on.told("a")
        await on.run.execute(" ")
        assert (await on.reward(solution))[0] == 200
        assert (await on.reward(solution))[1]["reused"]
        await on.run.internal("POST", "/checkpoints", {"step": 1})
        found = await scrape(on.run)
        assert found("requests_total", route="execute", outcome="ok") == 3
        assert found("requests_total", route="execute", outcome="declined") == 1
        assert found("requests_total", route="reward", outcome="ok") == 2
        assert found("requests_total", route="checkpoints", outcome="ok") == 1
        assert found("search_attempts_total") == 3
        assert found("searches_total", outcome="answered") == 3
        assert found("search_cache_total", outcome="hit") == 1
        assert found("search_seconds_count") == 2
        assert found("service_seconds_count") == 4
        assert found("waiting_seconds_count", route="execute") == 4
        assert found("declined_total", reason="empty") == 1
        assert found("declined_share") == 0.25
        assert found("scores_total", split="train") == 1
        assert found("scores_reused_total") == 1
        assert found("score_seconds_count") == 1
        assert found("rollout_searches_sum") == 2
        assert found("helper_seconds_count") == found("helper_calls_total", split="train") == 2
        assert found("helper_tokens_total", split="train", direction="output") > 0
        assert found("verdicts_total", verdict="1") == 2
        assert found("quota_left", quota="retrieval_calls", split="") == 10_000 - 3
        assert found("quota_left", quota="scores", split="train") == 10_000 - 1
        assert found("checkpoints_total", outcome="accepted") == 1
        assert found("latch_closed") == 0
        records = on.run.records()
        assert found("ledger_records_total") == len(records)
        assert found("ledger_batch_records_sum") == len(records)
        journal = on.run.directory / "journal"
        assert found("ledger_bytes_total") == sum(one.stat().st_size for one in journal.iterdir())


async def test_what_waits_is_seen(tmp_path: Path) -> None:
    """While one search is held, it and the one that waits for its slot are in the gauges."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    async with served(tmp_path / "run", provider=provider, execute__slots=1) as run:
        asking = [asyncio.create_task(run.execute(query)) for query in ("a", "b")]
        await until(lambda: run.service.slots.waiting == 1)
        found = await scrape(run)
        assert found("slots_in_service", route="execute") == 1
        assert found("slots_waiting", route="execute") == 1
        assert found("searches_under_way") == 1
        assert found("oldest_request_seconds", route="execute") > 0
        provider.gate.set()
        await asyncio.gather(*asking)
        found = await scrape(run)
        assert found("oldest_request_seconds", route="execute") == 0
        assert found("waiting_seconds_count", route="execute") == 2
        assert found("waiting_seconds_sum", route="execute") > 0


async def test_failed_run_says_why(tmp_path: Path) -> None:
    """After a provider's fault the latch, its cause and the class of the failure are told."""
    provider = FakeProvider()
    async with served(tmp_path / "run", provider=provider) as run:
        provider.fault = RuntimeError("gone")
        assert (await run.execute("q"))[0] == 502
        found = await scrape(run)
        assert found("latch_closed") == 1
        assert found("latch_cause", cause="retrieval_failed") == 1
        assert found("failures_total", cause="retrieval_failed") == 1
        assert found("requests_total", route="execute", outcome="retrieval_failed") == 1
        assert found("searches_total", outcome="failed") == 1


async def test_failed_helper_call_is_counted_by_code(tmp_path: Path) -> None:
    """A helper that answers with an error is named by its code."""
    helper = FakeHelper()
    await helper.start()
    try:
        async with rewarded(tmp_path, helper=helper) as on:
            solution = await on.rollout("q")
            helper.failure = "error_500"
            assert (await on.reward(solution))[0] == 502
            found = await scrape(on.run)
            assert found("helper_failures_total", code="helper_status") >= 1
            assert found("scores_failed_total") == 1
            assert found("oldest_request_seconds", route="reward") == 0
    finally:
        await helper.stop()


async def test_strangers_do_not_grow_the_scrape(tmp_path: Path) -> None:
    """Whatever paths, methods and bytes are sent, the labels are words of ours."""
    async with served(tmp_path / "run") as run:
        base = f"http://127.0.0.1:{run.port}"
        for name in range(30):
            for path in (f"/{name}", f"/{INTERNAL_CAPABILITY}/{name}", f"/x/{name}/execute"):
                async with run.session.post(base + path, data=b"x") as answer:
                    assert answer.status in {401, 404}
            async with run.session.request(f"M{name}", f"{base}/livez") as answer:
                assert answer.status in {400, 405}
        found = await scrape(run)
        routes = [labels for name, labels in found.samples if name.endswith("_requests_total")]
        assert len(routes) < 10
        assert found("requests_total", route="unknown", outcome="unauthorized") == 60
        assert found("requests_total", route="unserved", outcome="not_found") == 30
        for secret in (INTERNAL_CAPABILITY, EXECUTE_CAPABILITY):
            assert secret not in found.text


async def test_scrape_speaks_openmetrics_where_asked(tmp_path: Path) -> None:
    """Prometheus asks for OpenMetrics by its Accept header and gets it, ended by its mark."""
    async with served(tmp_path / "run") as run:
        headers = {"Accept": "application/openmetrics-text; version=1.0.0"}
        url = run.endpoints.internal_url + "/metrics"
        async with run.session.get(url, headers=headers) as answer:
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
            assert (await answer.text()).endswith("# EOF\n")


# --- the observer itself --------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "place"), [(0.0, 0), (1.0, 0), (1.5, 1), (2.0, 1), (9.0, 2)])
def test_histogram_counts_a_bound_as_under_it(value: float, place: int) -> None:
    """``le`` means less or equal, and what is over every bound has a place of its own."""
    histogram = Histogram((1.0, 2.0))
    histogram.observe(value)
    assert histogram.counts[place] == 1
    assert histogram.total == value
    assert histogram.sample(zeros=2)[0][-1] == ("+Inf", 3.0)
    assert histogram.sample(zeros=2)[0][0][1] == 2.0 + (place == 0)


def test_observer_keeps_a_fixed_amount() -> None:
    """A million settled requests leave no more behind than fifty."""
    observer = Observer()
    asked = NativeCall("e", "c", "q")
    for number in range(1, 2_000):
        observer.batch(
            [
                RetrievalRequested(number, asked),
                RetrievalAnswered(number, b"[]", "miss", 5),
                RewardRequested(number, "train", str(number), "s"),
                RewardFailed(number, "train", "x", "d"),
                HelperRequested(number, "train", 1, "", 0, 1),
                HelperFailed(number, "train", 1, "helper_status", "d", None, sent=True),
            ],
            1,
            0.001,
        )
    assert len(observer.recent) == RECENT_REQUESTS
    assert observer.recent[-1].number == 1_999
    assert (observer._searches, observer._scores, observer._calls) == ({}, {}, {})
    assert observer.helper_failures == {"helper_status": 1_999}


@each("kind", CLASSES)
def test_observer_takes_every_kind(kind: str) -> None:
    """A settlement whose beginning was before a restart is counted without a fault."""
    words = "cause code detail split key text model state reason ending solution_str prompt_sha256"
    counts = "took_us step score of loss occurrence max_calls seed prompt_bytes input_tokens"
    data: dict[str, Any] = {
        **dict.fromkeys([*words.split(), "finish_reason", "stage", "claim_sha256"], "x"),
        **dict.fromkeys([*counts.split(), "output_tokens", "torn_bytes"], 1),
        **dict.fromkeys(["path", "manifest_sha256", "set_aside", "usage"], None),
        **dict.fromkeys(["sent", "clean", "latched"], True),
        "verdicts": [],
        "unsettled": [],
        "cache": "hit",
        "env": "e",
        "call": "c",
    }
    data |= {} if kind == "run.claimed" else {"reward": 1.0}
    Observer().batch([record_of(kind, 7, data)], 1, 0.001)


# --- the dashboard --------------------------------------------------------------------------------


def expressions(value: Any) -> Iterator[str]:
    """Every query of a dashboard, its variables' included."""
    if isinstance(value, dict):
        for key, one in value.items():
            if key in {"expr", "query"} and isinstance(one, str):
                yield one
            else:
                yield from expressions(one)
    elif isinstance(value, list):
        for one in value:
            yield from expressions(one)


def test_dashboard_asks_for_what_there_is() -> None:
    """Every metric and label the dashboard names exists, and every row of the table is shown."""
    dashboard = json.loads((ROOT / "config" / "grafana.json").read_text(encoding="utf-8"))
    names = {row.name for row in TABLE if row.type != "histogram"}
    for row in TABLE:
        if row.type == "histogram":
            names |= {row.name + ending for ending in ("_bucket", "_sum", "_count")}
    labels = {label for row in TABLE for label in row.labels} | {"le", "instance"}
    asked: set[str] = set()
    for expression in expressions(dashboard):
        found = set(re.findall(r"smartsearch_\w+", expression))
        assert found <= names, expression
        asked |= found
        for group in re.findall(r"by \(([^)]*)\)", expression):
            assert {label.strip() for label in group.split(",")} <= labels, expression
    for legend in re.findall(r"\{\{(\w+)\}\}", json.dumps(dashboard)):
        assert legend in labels
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    assert {row.name for row in TABLE} <= shown | asked


def test_dashboards_panels_do_not_overlap() -> None:
    """Every panel has a place and a number of its own."""
    dashboard = json.loads((ROOT / "config" / "grafana.json").read_text(encoding="utf-8"))
    cells: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells, panel["title"]
        assert max(x for x, _ in own) < 24
        cells |= own
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])

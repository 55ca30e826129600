"""What an operator's page stands on: events, recent requests, history, remedies."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.web.operator import (
    COLUMNS,
    KEPT,
    LISTED_A_TICK,
    VIEWERS_MAX,
    WHOLE_ROWS,
    PageSeries,
    Snapshot,
    quantile,
)
from tests.fakes.disk import ReadOnlyDisk
from tests.fakes.provider import FakeProvider
from tests.fakes.served import EXECUTE_CAPABILITY, INTERNAL_CAPABILITY, Served, served
from tests.fakes.until import until
from tests.web.rawclient import PATIENCE

PACKAGE = Path(__file__).resolve().parent.parent.parent / "smartsearch_sidecar"


class Events:
    """The events of one viewer, as a browser reads them."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.answer = answer

    async def next(self) -> tuple[str, Any]:
        """The next event: its name and its value."""
        name = ""
        async with asyncio.timeout(PATIENCE):
            while line := await self.answer.content.readline():
                field, _, value = line.decode().rstrip("\n").partition(": ")
                if field == "event":
                    name = value
                elif field == "data":
                    return name, json.loads(value)
        return "", None

    async def ended(self) -> bool:
        """Waits for the end of the stream."""
        while (await self.next())[0]:
            pass
        return True


@asynccontextmanager
async def watching(run: Served) -> AsyncIterator[Events]:
    """A viewer with a connection of its own."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(run.endpoints.internal_url + "/events") as answer,
    ):
        assert answer.status == 200
        assert answer.content_type == "text/event-stream"
        yield Events(answer)


async def test_first_event_tells_what_was_before(tmp_path: Path) -> None:
    """A page opened late knows the run: what it is, what it used, its last requests."""
    async with served(tmp_path / "run") as run:
        await run.execute("Where is Faust?")
        await run.execute(" ")
        async with watching(run) as events:
            name, hello = await events.next()
            assert name == "hello"
            assert hello["about"]["run"] == "run"
            assert hello["about"]["profile"] == "training"
            assert hello["columns"] == list(COLUMNS)
            assert hello["status"]["retrieval_responses"] == 1
            assert hello["facts"]["retrieval"]["corpus_sha256"] == "c" * 64
            assert hello["quotas"][0]["used"] == 1
            listed = list(hello["recent"])
            while len(listed) < 2:  # the rest comes with the next tick
                _, tick = await events.next()
                listed += tick["recent"]
            assert [one["outcome"] for one in listed] == ["miss", "declined"]
            assert listed[0]["query"] == "Where is Faust?"
            text = json.dumps(hello)
            assert INTERNAL_CAPABILITY not in text
            assert EXECUTE_CAPABILITY not in text


async def test_ticks_hold_rows_of_the_charts(tmp_path: Path) -> None:
    """Every tick brings one row, and what was answered since the one before is in one of them."""
    async with served(tmp_path / "run") as run, watching(run) as events:
        await events.next()
        await run.execute("q")
        while True:
            name, tick = await events.next()
            row = dict(zip(COLUMNS, tick["row"], strict=True))
            assert (name, row["waiting"]) == ("tick", 0)
            if row["answers"]:
                assert row["p50"] is not None
                assert row["left"] == [10_000 - 1]
                break


async def test_failure_is_told_with_cause_and_remedy(tmp_path: Path) -> None:
    """A viewer hears of the latch with its cause, its time and what to do."""
    async with served(tmp_path / "run") as run, watching(run) as events:
        _, hello = await events.next()
        assert hello["failure"] is None
        await run.internal("POST", "/latch", {"reason": "wrong corpus"})
        while True:
            _, tick = await events.next()
            if tick["failure"] is not None:
                break
        assert tick["status"]["state"] == "failed"
        assert tick["failure"]["cause"] == "operator"
        assert tick["failure"]["detail"] == "wrong corpus"
        assert tick["failure"]["at"] > hello["about"]["started_at"]
        assert tick["failure"]["remedy"] == errors.remedy("operator")


async def test_failed_ledger_has_a_time_as_well(tmp_path: Path) -> None:
    """A disk that cannot take the latch's record leaves the page its moment all the same."""
    disk = ReadOnlyDisk()
    async with served(tmp_path / "run", disk=disk) as run, watching(run) as events:
        await events.next()
        disk.read_only = True
        assert (await run.execute("q"))[0] == 503
        while True:
            _, tick = await events.next()
            if tick["failure"] is not None:
                break
        assert tick["failure"]["cause"] == "ledger_failed"
        assert tick["failure"]["at"] is not None


async def test_viewers_are_bounded_and_leave_room(tmp_path: Path) -> None:
    """One viewer too many is told so; once another has left, there is room, and nothing latched."""
    async with served(tmp_path / "run") as run:
        async with watching(run) as first:
            await first.next()
            others = [
                asyncio.create_task(run.session.get(run.endpoints.internal_url + "/events"))
                for _ in range(VIEWERS_MAX - 1)
            ]
            answers = await asyncio.gather(*others)
            assert {answer.status for answer in answers} == {200}
            status, value = await run.internal("GET", "/events")
            assert (status, value["error"]["code"]) == (503, "too_many_viewers")
            for answer in answers:
                answer.close()
        await until(lambda: not run.daemon.app.operator.viewers)
        async with watching(run) as again:
            assert (await again.next())[0] == "hello"
        assert (await run.health())[0] == 200


async def test_streams_end_when_the_run_does(tmp_path: Path) -> None:
    """An open page does not hold up an orderly end, and its stream ends with it."""
    async with served(tmp_path / "run") as run, watching(run) as events:
        await events.next()
        stopping = asyncio.create_task(run.stop())
        assert await events.ended()
        assert await stopping == 0


async def test_recent_request_with_its_passages(tmp_path: Path) -> None:
    """A listed request is fetched with its whole query and its documents as recorded."""
    async with served(tmp_path / "run") as run, watching(run) as events:
        query = "x" * 1000
        await run.execute(query)
        listed: list[Any] = (await events.next())[1]["recent"]
        while not listed:
            listed = (await events.next())[1]["recent"]
        assert len(listed[0]["query"]) == 200
        serial = listed[0]["serial"]
        status, value = await run.internal("GET", f"/recent?serial={serial}")
        assert (status, value["query"], value["number"]) == (200, query, 1)
        assert value["documents"] == run.records()[-1]["data"]["documents"]
        for bad in (
            "",
            "?serial=",
            "?serial=x",
            "?serial=1&x=2",
            "?serial=-1",
            f"?serial={10**20}",
        ):
            status, value = await run.internal("GET", "/recent" + bad)
            assert (status, value["error"]["code"]) == (400, "operator_request")
        status, value = await run.internal("GET", "/recent?serial=999")
        assert (status, value["error"]["code"]) == (404, "not_found")
        assert (await run.health())[0] == 200


async def test_busy_run_lists_what_can_still_be_opened(tmp_path: Path) -> None:
    """Of a hundred answers a tick only a few are listed, with every failure, and those are kept."""
    provider = FakeProvider()
    async with served(tmp_path / "run", provider=provider) as run, watching(run) as events:
        await events.next()
        for number in range(120):
            await run.execute(f"q{number}")
        provider.fault = RuntimeError("gone")
        await run.execute("the last")
        listed: list[Any] = []
        ticks = 0
        while not any(one["outcome"] == "retrieval_failed" for one in listed):
            ticks += 1
            listed += (await events.next())[1]["recent"]
        assert len(listed) <= LISTED_A_TICK * ticks + 1
        for one in listed:
            status, _ = await run.internal("GET", f"/recent?serial={one['serial']}")
            assert status == 200
        assert run.daemon.app.operator._kept.maxlen == KEPT


async def test_hostile_query_is_listed_as_letters(tmp_path: Path) -> None:
    """Control characters, a lone surrogate and direction marks arrive spelled out."""
    async with served(tmp_path / "run") as run, watching(run) as events:
        body = {"env": "agentinputlab:smartsearch-fixed-wikipedia-v1"}
        body["call"] = r"wikipedia_search(query='a\nb\x1b\ud800 \u202ec', top_n=5)"
        status, _ = await run.post(json.dumps(body).encode())
        assert status == 200
        listed: list[Any] = (await events.next())[1]["recent"]
        while not listed:
            listed = (await events.next())[1]["recent"]
        assert listed[0]["query"].isprintable()
        assert listed[0]["outcome"] == "declined"


async def test_page_before_the_run_is_loaded(tmp_path: Path) -> None:
    """While the index loads the page is there, and says so by what its events answer."""
    opened = asyncio.Event()

    class SlowToOpen(FakeProvider):
        async def identity(self) -> Any:
            await opened.wait()
            return await super().identity()

    serving = asyncio.create_task(_serve_slowly(tmp_path / "run", SlowToOpen(), opened))
    assert await serving == {"": 200, "events": 503, "metrics": 503, "recent?serial=1": 503}


async def _serve_slowly(
    directory: Path, provider: FakeProvider, opened: asyncio.Event
) -> dict[str, int]:
    from smartsearch_sidecar.process.daemon import Daemon
    from tests.fakes.served import configured

    daemon = Daemon(configured(directory), provider=provider)
    task = asyncio.create_task(daemon.run())
    await until(lambda: daemon.port is not None)
    statuses = {}
    async with aiohttp.ClientSession() as session:
        for page in ("", "events", "metrics", "recent?serial=1"):
            url = f"http://127.0.0.1:{daemon.port}/{INTERNAL_CAPABILITY}/{page}"
            async with session.get(url) as answer:
                statuses[page] = answer.status
    opened.set()
    await until(lambda: daemon.app._ready.run is not None)
    daemon.stop()
    assert await task == 0
    return statuses


async def test_page_is_closed_to_the_world(tmp_path: Path) -> None:
    """The page names its script and style by digest, sends its address nowhere, is never framed."""
    async with served(tmp_path / "run") as run:
        async with run.session.get(run.endpoints.internal_url) as answer:
            assert answer.status == 200  # as well: the script goes on to the one with the slash
        async with run.session.get(run.endpoints.internal_url + "/") as answer:
            headers, text = answer.headers, await answer.text()
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert "unsafe" not in policy
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["Cache-Control"] == "no-store"
        assert INTERNAL_CAPABILITY not in text
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), "an outside address"
        status, value = await run.internal("POST", "/")
        assert (status, value["error"]["code"]) == (405, "method_not_allowed")


# --- history --------------------------------------------------------------------------------------


def snapshot(at: float, answers: int = 0, **other: Any) -> Snapshot:
    """A tick of a run with one quota of a million."""
    values: dict[str, Any] = {"service": (answers, 0), "waiting": 0, "in_service": 0, "scores": 0}
    used = {"used": (answers,), "left": (1_000_000 - answers,)}
    return Snapshot(at=at, answers=answers, **{**values, **used, **other})


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ((0, 0, 0), 0.5, None),
        ((10, 0, 0), 0.5, 0.5),
        ((5, 5, 0), 0.5, 1.0),
        ((0, 10, 0), 0.95, 1.95),
        ((0, 0, 3), 0.5, 2.0),
    ],
)
def test_quantile_lies_in_its_bucket(
    counts: tuple[int, ...], share: float, expected: float | None
) -> None:
    """Within a bucket values lie evenly; over the last bound nothing is known but the bound."""
    found = quantile((1.0, 2.0), counts, share)
    assert found == (expected if expected is None else pytest.approx(expected))


def test_history_of_days_takes_a_fixed_amount() -> None:
    """After three days the whole run is there in few rows, its peaks and its sums kept."""
    history = PageSeries((1.0,))
    seconds = 3 * 86_400
    for at in range(0, seconds, 10):
        history.add(snapshot(float(at), at, waiting=7 if at == 100_000 else 0))
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in history.whole()]
    assert WHOLE_ROWS / 2 <= len(rows) <= WHOLE_ROWS
    assert rows[0]["at"] < 3_000
    assert rows[-1]["at"] > seconds - 3_000
    assert {round(row["answers"], 6) for row in rows} == {1.0}
    assert max(row["waiting"] for row in rows) == 7
    assert len(history.latest()) <= 600


def test_rates_wait_for_enough_to_go_by() -> None:
    """A run that has just begun projects no end; later the rate is that of the latest rows."""
    history = PageSeries((1.0,))
    history.add(snapshot(0.0))
    history.add(snapshot(5.0, 500))
    assert history.rates() == [0.0]
    history.add(snapshot(20.0, 1_000))
    assert history.rates() == [50.0]


# --- remedies -------------------------------------------------------------------------------------


def test_every_cause_has_a_remedy() -> None:
    """Each cause that closes the latch has one remedy, a sentence; the page shows it."""
    causes = [row.cause for row in errors.TABLE.values() if row.cause is not None]
    for row in errors.TABLE.values():
        assert (row.cause is None) == (row.remedy == ""), row
        assert not row.remedy or row.remedy.endswith("."), row
        if row.cause is not None:
            assert errors.remedy(row.cause) == row.remedy
    shared = {cause for cause in causes if causes.count(cause) > 1}
    assert shared == {"retrieval_failed"}  # one sentence for a provider, a transport and a tag


def test_one_code_has_one_status_and_one_sentence() -> None:
    """A caller can rely on the code alone: rows that share it answer alike."""
    told: dict[str, errors.Told] = {}
    for row in errors.TABLE.values():
        assert told.setdefault(row.answer.code, row.answer) == row.answer


def test_causes_named_in_the_code_are_known() -> None:
    """A cause that stands in the code as a word is one of those above."""
    known = {row.cause for row in errors.TABLE.values()}
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for cause in re.findall(r"close_latch\(\s*\"(\w+)\"|cause=\"(\w+)\"", text):
            assert set(filter(None, cause)) <= known, path.name

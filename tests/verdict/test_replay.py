"""Row "a client that repeats a lost answer": the repeat settles the loss, and nothing else does.

Clients are sockets that leave at a chosen moment, against a real daemon. Where a test needs a loss
that stays open, the deadline is long; where it needs one that is given up, it is short.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from smartsearch_sidecar.ledger.verify import verify
from smartsearch_sidecar.search.repeats import Repeats
from tests.fakes.helper import FakeHelper
from tests.fakes.provider import FakeProvider
from tests.fakes.rewarded import rewarded
from tests.fakes.served import EXECUTE_CAPABILITY, Served, native_body, read_records, served
from tests.fakes.soaked import soaked
from tests.fakes.until import until
from tests.web.rawclient import RawClient

REPLAY: dict[str, Any] = {"execute__on_undelivered": "replay", "execute__deadline_seconds": 60.0}
SHORT: dict[str, Any] = {"execute__deadline_seconds": 2.0}
QUERY = "Ada"
STEP = ["Ada", "Bob"]
TRIES = 10  # as many as SkyRL and verl make


def request(value: Any, *, path: str = "execute", key: str = "") -> bytes:
    """One request as it stands on the wire."""
    body = json.dumps(value).encode()
    more = f"Idempotency-Key: {key}\r\n" if key else ""
    head = (
        f"POST /{EXECUTE_CAPABILITY}/{path} HTTP/1.1\r\nHost: x\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    )
    return head.encode() + body


async def asks(run: Served, value: Any = None, **more: Any) -> RawClient:
    """A client that has sent its request, and nothing else yet."""
    client = await RawClient.connect(("127.0.0.1", run.port))
    await client.send(request(native_body(QUERY) if value is None else value, **more))
    return client


async def answered(run: Served, value: Any = None, **more: Any) -> Any:
    """What a client is told that stays for its answer."""
    client = await asks(run, value, **more)
    answer = await client.answer()
    client.sock.close()
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


def handed_over(run: Served) -> int:
    """How many answers were written."""
    return sum(run.daemon.observer.service.counts)


async def loses(run: Served, value: Any = None, **more: Any) -> None:
    """A request whose answer is written and never read: its client resets the connection."""
    lost, answers = run.service.run.state.lost, handed_over(run)
    client = await asks(run, value, **more)
    await until(lambda: handed_over(run) > answers)
    client.sock.close()
    await until(lambda: run.service.run.state.lost == lost + 1)


def replaying(path: Path, **keys: Any) -> AbstractAsyncContextManager[Served]:
    """A run that gives lost answers again; a loss is open for a minute unless ``keys`` differ."""
    return served(path, **{**REPLAY, **keys})


async def pending(run: Served) -> None:
    """Neither healthy nor failed: a checkpoint is refused, and the latch is open."""
    status, answer = await run.internal("POST", "/checkpoints?settle=0", {"step": 1})
    assert (status, answer["state"]) == (409, "pending")
    status, health = await run.health()
    assert (status, health["state"], health["cause"]) == (503, "pending", None)


async def healthy(run: Served, **counts: int) -> None:
    """A checkpoint is accepted; counts of health by name; nothing is kept of any request."""
    status, health = await run.health(settle=2)
    assert (status, health["state"]) == (200, "healthy")
    assert {name: health[name] for name in counts} == counts
    assert (await run.internal("POST", "/checkpoints", {"step": 1}))[0] == 201
    assert isinstance(run.service.repeats, Repeats)
    assert run.service.repeats._asks == {}


async def given_up(run: Served) -> None:
    """At its end the run has failed for a loss that is still open."""
    assert run.service.run.state.cause is None
    assert await run.stop() == 4
    latch = json.loads((run.directory / "latch.json").read_bytes())
    assert latch["cause"] == "response_undelivered"
    assert "the run ended before it could ask again" in latch["detail"]


async def latched(run: Served, detail: str) -> None:
    await until(lambda: run.service.run.state.closed)
    _, health = await run.health()
    assert (health["state"], health["cause"]["cause"]) == ("failed", "response_undelivered")
    assert detail in health["cause"]["detail"]
    assert (await run.execute("after"))[0] == 502
    assert await run.stop() == 4


def of_kind(run: Served, kind: str) -> list[tuple[int | None, dict[str, Any]]]:
    return [(r["number"], r["data"]) for r in read_records(run.directory) if r["kind"] == kind]


@pytest.mark.both_loops
async def test_a_repeat_settles_its_loss(tmp_path: Path) -> None:
    """The second request gets the recorded answer: no search, no attempt, one more record."""
    async with replaying(tmp_path / "run", execute__max_calls=1) as run:
        await loses(run)
        await pending(run)
        told = await answered(run)
        assert "about Ada" in told["result"]
        await healthy(
            run,
            retrieval_attempts=1,
            retrieval_responses=1,
            delivery_lost=1,
            delivery_repeated=1,
            delivery_awaited=0,
        )
        assert run.provider.queries == [QUERY]
        assert await run.stop() == 0
    assert of_kind(run, "delivery.lost") == [(1, {"stage": "after_write", "awaits_repeat": True})]
    assert of_kind(run, "delivery.repeated") == [(1, {"loss": 1})]
    report = await asyncio.to_thread(verify, run.directory)
    assert report.ok, report


@pytest.mark.both_loops
async def test_one_that_is_never_repeated_latches(tmp_path: Path) -> None:
    """After the bound the run has failed, whatever else was asked meanwhile."""
    async with replaying(tmp_path / "run", **SHORT) as run:
        await loses(run)
        await run.execute("Bob")
        await latched(run, "did not ask again within 2 s")


async def test_a_checkpoint_waits_for_the_repeat(tmp_path: Path) -> None:
    """Asked meanwhile it is answered once the loss is settled, or given up."""
    async with replaying(tmp_path / "run") as run:
        await loses(run)
        waiting = asyncio.create_task(run.internal("POST", "/checkpoints?settle=30", {"step": 1}))
        await answered(run)
        assert (await waiting)[0] == 201
    async with replaying(tmp_path / "other", **SHORT) as run:
        await loses(run)
        status, answer = await run.internal("POST", "/checkpoints?settle=30", {"step": 1})
        assert (status, answer["cause"]["cause"]) == (409, "response_undelivered")


async def test_a_client_that_left_before_its_answer(tmp_path: Path) -> None:
    """Its own time-out ends sooner than the search: the repeat waits for that search's answer."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    async with replaying(tmp_path / "run", provider=provider) as run:
        first = await asks(run)
        await until(lambda: provider.under_way == 1)
        first.sock.close()
        second = await asks(run)
        await until(lambda: run.service.slots.in_service == 2)
        provider.gate.set()
        answer = await second.answer()
        assert "about Ada" in json.loads(answer.body)["result"]
        second.sock.close()
        await healthy(run, retrieval_attempts=1, delivery_lost=1, delivery_repeated=1)
        assert provider.queries == [QUERY]


async def test_two_in_flight_are_two_rollouts(tmp_path: Path) -> None:
    """One that was in flight when the other left is no repeat of it: the loss stays open."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    async with replaying(tmp_path / "run", provider=provider) as run:
        first, second = await asks(run), await asks(run)
        await until(lambda: run.service.run.state.attempts == 2)
        first.sock.close()
        await until(lambda: run.daemon._edges[0].open == 1)
        provider.gate.set()
        assert (await second.answer()).status == 200
        await until(lambda: run.service.run.state.lost == 1)
        await pending(run)
        await answered(run)
        second.sock.close()
        await healthy(run, retrieval_attempts=2, delivery_repeated=1)


async def test_a_repeat_that_is_lost_as_well(tmp_path: Path) -> None:
    """Three tries of one rollout are lost: one loss is open after each, and the fourth settles."""
    async with replaying(tmp_path / "run") as run:
        for number in (1, 2, 3):
            await loses(run)
            assert run.service.run.state.awaited == {number}
        await answered(run)
        await healthy(run, retrieval_attempts=1, delivery_lost=3, delivery_repeated=3)


async def test_two_rollouts_that_lose_alike_need_two_repeats(tmp_path: Path) -> None:
    """Both were in flight when they were lost; after one repeat the run is still pending."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    async with replaying(tmp_path / "run", provider=provider) as run:
        clients = [await asks(run), await asks(run)]
        await until(lambda: run.service.run.state.attempts == 2)
        for client in clients:
            client.sock.close()
        provider.gate.set()
        await until(lambda: run.service.run.state.awaited == {1, 2})
        await answered(run)
        await pending(run)
        await answered(run)
        await healthy(run, retrieval_attempts=2, delivery_lost=2, delivery_repeated=2)
    async with replaying(tmp_path / "other", provider=FakeProvider()) as run:
        run.provider.gate = asyncio.Event()
        clients = [await asks(run), await asks(run)]
        await until(lambda: run.service.run.state.attempts == 2)
        for client in clients:
            client.sock.close()
        run.provider.gate.set()
        await until(lambda: run.service.run.state.awaited == {1, 2})
        await answered(run)
        await given_up(run)


async def test_another_request_settles_nothing(tmp_path: Path) -> None:
    """Another query, another number of passages or another route is another request."""
    async with replaying(tmp_path / "run", execute__routes=["execute", "search"]) as run:
        await loses(run)
        await answered(run, native_body("Bob"))
        await answered(run, {"query": QUERY, "top_n": 5}, path="search")
        assert run.service.run.state.awaited == {1}
        await pending(run)
        await answered(run)
        await healthy(run, retrieval_attempts=3)


async def test_a_key_tells_rollouts_apart(tmp_path: Path) -> None:
    """With ``Idempotency-Key`` the same words of another rollout never settle a loss."""
    async with replaying(tmp_path / "run") as run:
        await loses(run, key="rollout-1")
        await answered(run, key="rollout-2")
        await answered(run)
        await pending(run)
        await answered(run, key="rollout-1")
        await healthy(run, retrieval_attempts=3, delivery_repeated=1)


async def test_a_client_that_left_while_it_waited(tmp_path: Path) -> None:
    """Nothing was searched for it: its repeat is the search, and settles the loss."""
    async with replaying(tmp_path / "run", execute__slots=1) as run:
        await run.service.slots.take(1e9)
        client = await asks(run)
        await until(lambda: run.service.slots.waiting == 1)
        client.sock.close()
        run.service.slots.give()
        await until(lambda: run.service.run.state.awaited == {1})
        await answered(run)
        await healthy(run, retrieval_attempts=1, delivery_repeated=1)
        assert of_kind(run, "delivery.lost")[0][0] is None
        assert of_kind(run, "delivery.repeated") == [(1, {"loss": 1})]


@asynccontextmanager
async def left_while_searched(tmp_path: Path) -> AsyncIterator[tuple[Served, asyncio.Event]]:
    """A client has left while its search goes on until the gate opens; no slot is free."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    async with replaying(tmp_path / "run", provider=provider, execute__slots=2) as run:
        first = await asks(run)
        await until(lambda: provider.under_way == 1)
        await run.service.slots.take(1e9)
        first.sock.close()
        yield run, provider.gate


async def test_a_repeat_that_leaves_while_the_first_is_searched(tmp_path: Path) -> None:
    """Three tries of one rollout, the second gone from the room: one loss, settled by the third."""
    async with left_while_searched(tmp_path) as (run, gate):
        second = await asks(run)
        await until(lambda: run.service.slots.waiting == 1)
        second.sock.close()
        await until(lambda: run.daemon._edges[0].open == 0)
        run.service.slots.give()
        await until(lambda: run.service.run.state.lost == 1)
        assert run.service.run.state.awaited == set()
        third = await asks(run)
        await until(lambda: run.service.slots.in_service == 2)
        gate.set()
        assert (await third.answer()).status == 200
        third.sock.close()
        await healthy(run, retrieval_attempts=1, delivery_lost=2, delivery_repeated=1)


async def test_a_third_try_stands_behind_one_that_left_the_room(tmp_path: Path) -> None:
    """The second try is gone before its slot and the third waits behind it: still one loss."""
    async with left_while_searched(tmp_path) as (run, gate):
        await until(lambda: run.daemon._edges[0].open == 0)
        second = await asks(run)
        await until(lambda: run.service.slots.waiting == 1)
        second.sock.close()
        await until(lambda: run.daemon._edges[0].open == 0)
        third = await asks(run)
        await until(lambda: run.service.slots.waiting == 2)
        run.service.slots.give()
        await until(lambda: run.service.slots.in_service == 2)
        assert (run.service.run.state.lost, run.service.run.state.awaited) == (1, set())
        gate.set()
        assert (await third.answer()).status == 200
        third.sock.close()
        await healthy(run, retrieval_attempts=1, delivery_lost=2, delivery_repeated=1)


async def test_a_declined_query_counts_once(tmp_path: Path) -> None:
    """Its answer is lost and given again, and the query was declined once."""
    async with replaying(tmp_path / "run") as run:
        await loses(run, native_body(""))
        told = await answered(run, native_body(""))
        assert told["result"] == "invalid query"
        await healthy(run, retrieval_declined=1, retrieval_attempts=0, delivery_repeated=1)


async def test_a_batch_is_repeated_whole(tmp_path: Path) -> None:
    """SkyRL's and verl's request: all of its searches are counted once."""
    value = {"queries": STEP, "topk": 3, "return_scores": True}
    async with replaying(tmp_path / "run", execute__routes=["retrieve"]) as run:
        await loses(run, value, path="retrieve")
        await pending(run)
        told = await answered(run, value, path="retrieve")
        assert [len(found) for found in told["result"]] == [3, 3]
        await healthy(run, retrieval_attempts=2, retrieval_responses=2, delivery_repeated=1)
        assert of_kind(run, "delivery.lost")[0][1]["others"] == [2]


async def test_the_end_of_the_run_gives_up(tmp_path: Path) -> None:
    """Stopped in order with a loss open, the run has failed: no repeat can reach it any more."""
    async with replaying(tmp_path / "run") as run:
        await loses(run)
        await given_up(run)


async def test_a_restart_forgets_no_open_loss(tmp_path: Path) -> None:
    """Killed between loss and repeat, the run has failed, also where restarts are reported only."""
    helper = FakeHelper()
    await helper.start()
    keys = {**REPLAY, "run__on_unclean_restart": "report", "helper": helper}
    try:
        async with rewarded(tmp_path, **keys) as scored:
            run = scored.run
            client = await asks(run)
            await until(lambda: handed_over(run) == 1)
            client.sock.close()
            await until(lambda: run.service.run.writer.idle and run.service.run.state.lost == 1)
            await asyncio.to_thread(shutil.copytree, run.directory, tmp_path / "killed")
        # What a process that was killed leaves behind: no end, and no word of one.
        await asyncio.to_thread(shutil.rmtree, tmp_path / "run")
        await asyncio.to_thread((tmp_path / "killed").rename, tmp_path / "run")
        async with rewarded(tmp_path, resume=True, **keys) as scored:
            cause = scored.run.service.run.state.cause
            assert cause is not None
            assert cause.cause == "unresolved_after_restart"
            assert "lost answers" in cause.detail
            assert (await scored.run.execute(QUERY))[0] == 502
    finally:
        await helper.stop()


async def test_rewards_do_not_settle_a_loss(tmp_path: Path) -> None:
    """A reward that arrives meanwhile is given; the checkpoint over it waits for the repeat."""
    async with rewarded(tmp_path, **REPLAY) as scored:
        run = scored.run
        solution = await scored.rollout("Bob")
        client = await asks(run)
        await until(lambda: handed_over(run) == 2)
        client.sock.close()
        await until(lambda: run.service.run.state.awaited == {1})
        assert (await scored.reward(solution))[0] == 200
        await pending(run)
        repeated = await scored.rollout(QUERY)
        assert (await scored.reward(repeated))[0] == 200
        await healthy(run, delivery_repeated=1)


async def test_after_the_latch_no_loss_is_awaited(tmp_path: Path) -> None:
    """A loss behind another failure changes neither its cause nor the end."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    async with replaying(tmp_path / "run", provider=provider) as run:
        client = await asks(run)
        await until(lambda: provider.under_way == 1)
        await run.internal("POST", "/latch", {"reason": "by hand"})
        client.sock.close()
        provider.gate.set()
        await until(lambda: run.service.slots.idle)
        assert run.service.run.state.awaited == set()
        assert await run.stop() == 4
    (latch,) = of_kind(run, "latch.closed")
    assert latch[1]["cause"] == "operator"


async def test_a_client_as_skyrl_has_it(tmp_path: Path) -> None:
    """`requests` with a time-out of its own, up to ten tries and a pause: every try times out until
    the search is let go, and the rollout gets its passages.
    """
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    async with replaying(tmp_path / "run", provider=provider, execute__routes=["retrieve"]) as run:
        url = run.endpoints.sandbox_url + "/retrieve"
        value = {"queries": [QUERY], "topk": 3, "return_scores": True}
        asked = asyncio.create_task(asyncio.to_thread(_persistently, url, value))
        await until(lambda: run.service.slots.in_service >= 3)
        provider.gate.set()
        found = await asked
        assert "about Ada" in found["result"][0][0]["document"]["contents"]
        status, health = await run.health(settle=5)
        assert (status, health["retrieval_attempts"]) == (200, 1)
        assert health["delivery_lost"] == health["delivery_repeated"] >= 2
        assert provider.queries == [QUERY]


def _persistently(url: str, value: Any) -> Any:
    session = requests.Session()
    session.trust_env = False
    for _ in range(TRIES):
        try:
            return session.post(url, json=value, timeout=1).json()
        except (requests.ConnectionError, requests.Timeout):
            time.sleep(0.02)
    raise AssertionError("ten tries were lost")


@pytest.mark.parametrize("on_undelivered", ["latch", "record"])
async def test_the_other_two_are_as_they_were(tmp_path: Path, on_undelivered: str) -> None:
    """Without ``replay`` a repeat is a search of its own, and only ``record`` goes on."""
    async with replaying(tmp_path / "run", execute__on_undelivered=on_undelivered) as run:
        await loses(run)
        if on_undelivered == "latch":
            await until(lambda: run.service.run.state.closed)
            return
        await answered(run)
        status, health = await run.health(settle=2)
        assert (status, health["retrieval_attempts"], health["delivery_repeated"]) == (200, 2, 0)
        assert of_kind(run, "delivery.lost") == [(1, {"stage": "after_write"})]


# --- by chance ------------------------------------------------------------------------------------


async def rollout(run: Served, chance: random.Random, query: str, key: str, tries: int) -> None:
    """One search of a rollout that loses its answer until the last of its tries, each time at
    another moment: before the search, during it, or with the answer unread.
    """
    for _ in range(tries - 1):
        client = await asks(run, native_body(query), key=key)
        await asyncio.sleep(chance.choice([0, 0, 0.001, 0.003, 0.01]))
        client.sock.close()
        await asyncio.sleep(chance.choice([0, 0.002, 0.02]))
    await answered(run, native_body(query), key=key)


@pytest.mark.both_loops
@pytest.mark.parametrize("keyed", [True, False], ids=["with keys", "without"])
@pytest.mark.parametrize("seed", [0, 1, *soaked(range(2, 50))])
async def test_every_rollout_that_asks_again_is_answered(
    tmp_path: Path, seed: int, keyed: bool
) -> None:
    """Whenever clients leave, in whatever company: once each has its answer, no loss is open."""
    chance = random.Random(seed)
    provider = FakeProvider(seconds=0.004)
    async with replaying(tmp_path / "run", provider=provider, execute__slots=3) as run:
        rollouts = [
            rollout(
                run,
                random.Random(seed * 1000 + number),
                chance.choice(["Ada", "Bob", ""]),
                f"rollout-{number}" if keyed else "",
                chance.randint(1, TRIES),
            )
            for number in range(24)
        ]
        await asyncio.gather(*rollouts)
        status, health = await run.health(settle=5)
        assert (status, health["state"], health["cause"]) == (200, "healthy", None)
        assert health["delivery_awaited"] == 0
        if keyed:  # each rollout was searched for, or declined, exactly once
            assert health["retrieval_attempts"] + health["retrieval_declined"] == 24
        assert (await run.internal("POST", "/checkpoints", {"step": 1}))[0] == 201


@pytest.mark.parametrize("seed", range(3))
async def test_one_that_gives_up_among_many_is_found(tmp_path: Path, seed: int) -> None:
    """Told apart by their keys, one rollout that never got its answer ends the run."""
    chance = random.Random(seed)
    provider = FakeProvider(seconds=0.004)
    async with replaying(tmp_path / "run", provider=provider, execute__slots=3) as run:
        asking = [
            rollout(run, random.Random(number), "Ada", f"rollout-{number}", chance.randint(1, 3))
            for number in range(8)
        ]
        client = await asks(run, key="given up")
        client.sock.close()
        await asyncio.gather(*asking)
        await until(lambda: len(run.service.run.state.awaited) == 1)
        await given_up(run)

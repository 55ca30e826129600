"""A run that was stopped and goes on: what rollouts asked in between is in no record.

The gap itself is known: its two ends stand in the journal, receipts name it, and without enforced
provenance the run has failed unless the resume was told that the trainer stood still.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.client import Answered
from smartsearch_sidecar.ledger.receipt import CheckpointReceipt
from smartsearch_sidecar.ledger.verify import verify
from tests.cluster.test_rewards import scoring
from tests.fakes import journals, rollouts
from tests.fakes.bus import Ground
from tests.fakes.cluster_run import joined
from tests.fakes.helper import FakeHelper
from tests.fakes.native_client import ask
from tests.fakes.nats_cluster import free_ports
from tests.fakes.process import DaemonProcess, running, start
from tests.fakes.provider import FakeProvider
from tests.fakes.rewarded import QUESTION, rewarded
from tests.fakes.served import EXECUTE_CAPABILITY, INTERNAL_CAPABILITY, read_records, served
from tests.fakes.until import until, wait_until

CLIENTS = 4
TOLD = "--trainer-stopped"


def now() -> str:
    """The wall clock, as records write it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Trainer:
    """Rollouts that ask one search after the other; refusals are text to them, as to the pinned
    client.
    """

    def __init__(self, sandbox_url: str) -> None:
        self.answered = 0
        self.refused: list[str] = []
        self._url = sandbox_url
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self, name: int) -> None:
        turn = 0
        while not self._over.is_set():
            turn += 1
            if ask(self._url, f"client {name} turn {turn}").startswith("result: "):
                self.answered += 1
            else:
                self.refused.append(now())
                self._over.wait(0.005)

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


@contextmanager
def training(sandbox_url: str) -> Iterator[Trainer]:
    """A trainer at work until the block ends."""
    trainer = Trainer(sandbox_url)
    try:
        yield trainer
    finally:
        trainer.stop()


def keys() -> dict[str, Any]:
    """The same address at each start, as a trainer is wired."""
    return {
        "server__port": free_ports(1)[0],
        "server__execute_capability": EXECUTE_CAPABILITY,
        "server__internal_capability": INTERNAL_CAPABILITY,
    }


def checkpoint(daemon: DaemonProcess, step: int = 1) -> Answered:
    return daemon.internal().call("POST", "/checkpoints?settle=5", {"step": step})


def of_kind(directory: Path, kind: str) -> list[dict[str, Any]]:
    return [record["data"] for record in read_records(directory) if record["kind"] == kind]


@pytest.mark.process
@pytest.mark.timeout(90)
def test_sigterm_under_load_then_a_resume(tmp_path: Path) -> None:
    """Rollouts were refused in between: the resumed run has failed by a cause of its own."""
    same = keys()
    with running(tmp_path, **same) as daemon, training(daemon.sandbox_url) as trainer:
        wait_until(lambda: trainer.answered > 50)
        assert daemon.stop() == 0
        wait_until(lambda: len(trainer.refused) > 50)
        with running(tmp_path, "--resume", **same) as again:
            health = again.internal().health()
            assert (health.status, health.value["cause"]["cause"]) == (503, "unjudged_restart")
            assert TOLD in health.value["cause"]["detail"]
            refusal = checkpoint(again)
            assert (refusal.status, refusal.value["state"]) == (409, "failed")
            assert again.stop() == 4
    end = of_kind(daemon.directory, "run.closed")[0]
    (resumed,) = of_kind(daemon.directory, "run.resumed")
    assert end["deaf_from"] == resumed["gap_from"] < resumed["gap_to"]
    assert (resumed["clean"], resumed["trainer_stopped"]) == (True, False)
    within = [at for at in trainer.refused if resumed["gap_from"] <= at <= resumed["gap_to"]]
    assert len(within) > 50


@pytest.mark.process
@pytest.mark.timeout(60)
def test_a_resume_that_is_told_goes_on(tmp_path: Path) -> None:
    """The trainer stood still: the run goes on, the receipt names the gap, the next one does not,
    and ``ledger verify`` holds what the receipt says of it.
    """
    with running(tmp_path) as daemon:
        assert ask(daemon.sandbox_url, "one").startswith("result: ")
        assert daemon.stop() == 0
    with running(tmp_path, "--resume", TOLD) as daemon:
        assert ask(daemon.sandbox_url, "two").startswith("result: ")
        receipt = checkpoint(daemon)
        assert receipt.status == 201
        assert ask(daemon.sandbox_url, "three").startswith("result: ")
        assert "gaps" not in checkpoint(daemon, 2).value
        assert daemon.stop() == 0
    (gap,) = receipt.value["gaps"]
    (resumed,) = of_kind(daemon.directory, "run.resumed")
    assert (gap["from"], gap["to"]) == (resumed["gap_from"], resumed["gap_to"])
    told = {"clean": True, "trainer_stopped": True, "judged_blocks": 0}
    assert {name: gap[name] for name in told} == told
    whole = CheckpointReceipt.parse(json.dumps(receipt.value).encode())
    assert verify(daemon.directory, receipt=whole).ok
    changed = {**receipt.value, "gaps": [{**gap, "to": gap["from"]}]}
    other = CheckpointReceipt.parse(json.dumps(changed).encode())
    assert "another gaps" in str(verify(daemon.directory, receipt=other).receipt_problem)


@pytest.mark.process
@pytest.mark.timeout(60)
def test_no_word_excuses_a_crash(tmp_path: Path) -> None:
    """A trainer that was stopped after a crash had met it: the latch closes as ever, and the gap
    is in the journal, from the last record on.
    """
    with running(tmp_path) as daemon:
        assert ask(daemon.sandbox_url, "one").startswith("result: ")
        daemon.kill()
    last = read_records(daemon.directory)[-1]
    with running(tmp_path, "--resume", TOLD) as daemon:
        health = daemon.internal().health()
        assert (health.status, health.value["cause"]["cause"]) == (503, "unclean_restart")
    (resumed,) = of_kind(daemon.directory, "run.resumed")
    assert (resumed["clean"], resumed["trainer_stopped"]) == (False, True)
    assert last["at"] == resumed["gap_from"] < resumed["gap_to"]


@pytest.mark.process
@pytest.mark.timeout(60)
@pytest.mark.parametrize("heard", [True, False])
def test_a_run_that_answered_nothing(tmp_path: Path, heard: bool) -> None:
    """Once a trainer's gate has asked, training may have begun: the resume must be told. A run that
    nothing ever asked goes on as one that begins, and its receipt names the gap all the same.
    """
    with running(tmp_path) as daemon:
        if heard:
            assert daemon.internal().health().status == 200
        assert daemon.stop() == 0
    assert of_kind(daemon.directory, "run.closed")[-1]["asked"] is heard
    with running(tmp_path, "--resume") as daemon:
        assert daemon.internal().health().status == (503 if heard else 200)
        answer = ask(daemon.sandbox_url, "one")
        taken = checkpoint(daemon)
        if heard:
            assert answer == "error: 502"
            assert taken.value["cause"]["cause"] == "unjudged_restart"
        else:
            assert taken.status == 201
            assert len(taken.value["gaps"]) == 1


@pytest.mark.process
def test_the_word_needs_a_resume(tmp_path: Path) -> None:
    """Without ``--resume`` there is no gap to speak of: exit 2, and no run is made."""
    daemon = start(tmp_path, TOLD)
    assert daemon.process.wait(30) == 2
    assert "it goes with --resume" in daemon.log.read_text()
    assert not daemon.directory.exists()


# --- enforced provenance --------------------------------------------------------------------------


@pytest.fixture
async def helper() -> AsyncIterator[FakeHelper]:
    """One helper for a run and its resumption: its address is part of the claim."""
    async with FakeHelper() as fake:
        yield fake


async def test_enforced_provenance_needs_no_word(tmp_path: Path, helper: FakeHelper) -> None:
    """The run goes on, and its receipt names the gap with the blocks judged since: those that were
    judged before it do not count.
    """
    async with rewarded(tmp_path, helper=helper) as on:
        assert (await on.reward(await on.rollout("before")))[0] == 200
    async with rewarded(tmp_path, helper=helper, resume=True) as on:
        assert (await on.run.health())[0] == 200
        assert (await on.reward(await on.rollout("one", "two")))[0] == 200
        _, status = await on.run.internal("GET", "/status")
        _, receipt = await on.run.internal("POST", "/checkpoints", {"step": 1})
        (gap,) = receipt["gaps"]
        assert (gap["judged_blocks"], gap["trainer_stopped"]) == (2, False)
        assert status["gaps"] == receipt["gaps"]
        assert receipt["result_blocks"]["judged"] == 3


async def test_a_rollout_that_met_the_gap_is_found(tmp_path: Path, helper: FakeHelper) -> None:
    """A refusal stands where only the rollout writes: its reward closes the latch."""
    async with rewarded(tmp_path, helper=helper) as on:
        met = await on.rollout("before")
    async with rewarded(tmp_path, helper=helper, resume=True) as on:
        text = "HTTPConnectionPool(host='127.0.0.1', port=1): Max retries exceeded"
        turns = [rollouts.Turn(query="during", text=text)]
        lost = rollouts.rollout(QUESTION, turns, rollouts.final("Paris"))
        assert (await on.reward(met))[0] == 200
        assert (await on.reward(lost))[1]["error"]["code"] == "provenance_broken"
        assert (await on.run.internal("POST", "/checkpoints", {"step": 1}))[0] == 409


async def test_a_reported_crash_is_named(tmp_path: Path, helper: FakeHelper) -> None:
    """With ``run.on_unclean_restart = "report"`` a crash is a gap that receipts name as such."""
    report: dict[str, Any] = {"run__on_unclean_restart": "report"}
    async with rewarded(tmp_path, helper=helper, **report) as on:
        await on.rollout("before")
    segment = tmp_path / "run" / "journal" / "000001.jsonl"
    lines = segment.read_bytes().splitlines(keepends=True)
    await asyncio.to_thread(segment.write_bytes, b"".join(lines[:-1]))
    async with rewarded(tmp_path, helper=helper, resume=True, **report) as on:
        _, receipt = await on.run.internal("POST", "/checkpoints", {"step": 1})
        (gap,) = receipt["gaps"]
        assert (gap["clean"], gap["from"]) == (False, json.loads(lines[-2])["at"])


async def test_answers_that_are_not_rewarded_here_are_not_judged(
    tmp_path: Path, helper: FakeHelper
) -> None:
    """With ``/retrieve`` served, enforced provenance does not see every rollout: the word is
    needed, and a crash cannot be reported only.
    """
    routes: dict[str, Any] = {"execute__routes": ("execute", "retrieve")}
    async with rewarded(tmp_path, helper=helper, **routes) as on:
        await on.rollout("before")
    async with rewarded(tmp_path, helper=helper, resume=True, **routes) as on:
        assert (await on.run.health())[1]["cause"]["cause"] == "unjudged_restart"
    with pytest.raises(errors.ConfigError, match=r'no "retrieve" in execute\.routes'):
        async with rewarded(tmp_path, name="b", run__on_unclean_restart="report", **routes):
            pass


async def test_every_gap_is_named_until_a_checkpoint_is_accepted(tmp_path: Path) -> None:
    """A refused checkpoint names none for good, and neither does a restart."""
    again: dict[str, Any] = {"resume": True, "trainer_stopped": True}
    async with served(tmp_path / "run") as run:
        assert (await run.execute("one"))[0] == 200
        assert (await run.internal("POST", "/checkpoints", {"step": 1}))[0] == 201
    for _ in range(2):
        async with served(tmp_path / "run", **again) as run:
            refused, _ = await run.internal("POST", "/checkpoints", {"step": 2})
            assert refused == 409
    async with served(tmp_path / "run", **again) as run:
        assert (await run.execute("two"))[0] == 200
        _, receipt = await run.internal("POST", "/checkpoints", {"step": 2})
    resumed = of_kind(run.directory, "run.resumed")
    named = [(gap["from"], gap["to"]) for gap in receipt["gaps"]]
    assert named == [(data["gap_from"], data["gap_to"]) for data in resumed]
    assert len(named) == 3


@pytest.mark.parametrize(
    ("key", "value"),
    [("gaps", []), ("searches", 2), ("result_blocks", {"judged": 1, "policy": 0, "broken": 0})],
)
def test_a_record_that_states_otherwise_is_no_history(tmp_path: Path, key: str, value: Any) -> None:
    """What an accepted checkpoint says of gaps, searches and blocks is what the records before it
    come to; one that does not say it, as of an older version, is read.
    """
    times = {"gap_from": journals.AT, "gap_to": journals.AT, "trainer_stopped": True}
    kind, number, data = journals.resumed()
    usage = {"retrieval_attempts": 1, "retrieval_responses": 1}
    accepted = {"step": 1, "path": None, "manifest_sha256": None, "occurrence": 1, "usage": usage}
    gap = {"from": journals.AT, "to": journals.AT, "clean": True, "trainer_stopped": True}
    right = {
        "gaps": [{**gap, "judged_blocks": 0}],
        "searches": 1,
        "result_blocks": {"judged": 0, "policy": 0, "broken": 0},
    }
    before = [*journals.searches(1), journals.closed(1), (kind, number, {**data, **times})]
    for name, said in {"right": right, "silent": {}, "wrong": {**right, key: value}}.items():
        event = ("checkpoint.accepted", 1, {**accepted, **said})
        found = verify(journals.write_run(tmp_path / name, [*before, event]).directory)
        assert (found.problem is None) == (name != "wrong")
        assert name != "wrong" or f"states other {key} than" in str(found.problem)


# --- many nodes -----------------------------------------------------------------------------------


async def test_a_receipt_names_the_gaps_of_every_node(tmp_path: Path, helper: FakeHelper) -> None:
    """A node that was resumed is named by the checkpoint of another one, once."""
    ground = Ground()
    async with scoring(tmp_path, ground, helper, "a") as first:
        async with scoring(tmp_path, ground, helper, "b") as second:
            assert (await second.execute("one"))[0] == 200
            assert await second.stop() == 0
        async with scoring(tmp_path, ground, helper, "b", resume=True) as second:
            assert (await second.execute("two"))[0] == 200
            _, receipt = await first.internal("POST", "/checkpoints?settle=5", {"step": 1})
            (gap,) = receipt["gaps"]
            (resumed,) = of_kind(second.directory, "run.resumed")
            assert (gap["node"], gap["from"], gap["to"]) == (
                *("b", resumed["gap_from"]),
                resumed["gap_to"],
            )
            assert (await second.execute("three"))[0] == 200
            _, receipt = await first.internal("POST", "/checkpoints?settle=5", {"step": 2})
            assert (receipt["accepted"], receipt.get("gaps")) == (True, None)
        assert await first.stop() == 0
    assert (await asyncio.to_thread(verify, first.directory)).ok


async def test_a_node_that_ended_is_a_gap_that_lasts(tmp_path: Path, helper: FakeHelper) -> None:
    """Its rollouts may go on asking. Where each block is judged, receipts name the gap; where not,
    the run waits for the node, and says so.
    """
    ground = Ground()
    async with scoring(tmp_path, ground, helper, "a") as first:
        async with scoring(tmp_path, ground, helper, "b") as second:
            assert (await second.execute("one"))[0] == 200
            assert await second.stop() == 0
        _, receipt = await first.internal("POST", "/checkpoints?settle=5", {"step": 1})
        (gap,) = receipt["gaps"]
        (end,) = of_kind(second.directory, "run.closed")
        assert (gap["node"], gap["from"], gap["to"]) == ("b", end["deaf_from"], None)
    ground = Ground()
    async with joined(tmp_path, ground, "c", 2) as first:
        async with joined(tmp_path, ground, "d", 2) as second:
            assert (await second.execute("one"))[0] == 200
            assert (await first.health(5))[0] == 200
            assert await second.stop() == 0
        status, report = await first.health(1)
        assert (status, report["state"]) == (503, "pending")
        assert "node d has ended" in report["cluster"]["detail"]
        assert (await first.internal("POST", "/checkpoints?settle=0", {"step": 1}))[0] == 409
        again: dict[str, Any] = {"resume": True, "trainer_stopped": True}
        async with joined(tmp_path, ground, "d", 2, **again):
            assert (await first.internal("POST", "/checkpoints?settle=5", {"step": 1}))[0] == 201


async def test_no_checkpoint_while_the_run_stops(tmp_path: Path) -> None:
    """From the moment on which no connection is taken, a checkpoint that is under way is not
    accepted: rollouts beside it are refused already.
    """
    provider = FakeProvider()
    async with served(tmp_path / "run", provider=provider) as run:
        assert (await run.execute("one"))[0] == 200
        provider.gate = asyncio.Event()
        asking = asyncio.create_task(run.execute("held"))
        await until(lambda: provider.under_way == 1)
        taking = asyncio.create_task(run.internal("POST", "/checkpoints?settle=30", {"step": 1}))
        await until(lambda: run.daemon.observer.requests["execute", "ok"] == 1)
        stopping = asyncio.create_task(run.stop())
        await until(lambda: run.service.stopping)
        provider.gate.set()
        assert (await asking)[0] == 200
        with pytest.raises(aiohttp.ClientError):
            await taking
        assert await stopping == 0
    assert not of_kind(run.directory, "checkpoint.accepted")


async def test_one_node_that_is_not_told_fails_the_run(tmp_path: Path) -> None:
    """Where blocks are not judged, a node that was asked and comes back closes every latch."""
    ground = Ground()
    async with joined(tmp_path, ground, "a", 2) as first:
        async with joined(tmp_path, ground, "b", 2) as second:
            assert (await second.execute("one"))[0] == 200
            assert await second.stop() == 0
        async with joined(tmp_path, ground, "b", 2, resume=True):
            await until(lambda: first.service.run.state.closed)
            cause = first.service.run.state.cause
            assert cause is not None
            assert (cause.cause, cause.detail[:10]) == ("unjudged_restart", "on node b:")

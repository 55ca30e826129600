"""A checkpoint after no search at all: rollouts that ask a wrong address look just so."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from smartsearch_sidecar.commands import app
from smartsearch_sidecar.integrations import smartsearch_reward
from smartsearch_sidecar.ledger.receipt import CheckpointReceipt
from smartsearch_sidecar.ledger.verify import verify
from tests.fakes.bus import Ground
from tests.fakes.cluster_run import cluster, joined
from tests.fakes.native_client import ask
from tests.fakes.nats_cluster import free_ports
from tests.fakes.process import running
from tests.fakes.served import Served, served


async def take(run: Served, step: int, **more: Any) -> tuple[int, Any]:
    """Asks for a checkpoint."""
    return await run.internal("POST", "/checkpoints?settle=5", {"step": step, **more})


async def command(*words: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, words)


@pytest.mark.process
@pytest.mark.timeout(60)
def test_rollouts_that_ask_elsewhere(tmp_path: Path) -> None:
    """Every rollout's call fails, none reaches the sidecar: no checkpoint is accepted, the sentence
    says what to compare, and the run has not failed, so that a mended address goes on.
    """
    with running(tmp_path) as daemon:
        right = daemon.sandbox_url
        wrong = f"http://127.0.0.1:{free_ports(1)[0]}/{right.rpartition('/')[2]}"
        assert all("refused" in ask(wrong, f"query {turn}") for turn in range(20))
        taken = daemon.internal().call("POST", "/checkpoints", {"step": 1})
        assert (taken.status, taken.value["accepted"]) == (409, False)
        assert taken.value["state"] == "idle"
        for words in ("in this run so far", "sandbox_url", "smartsearch-sidecar url", "allow_idle"):
            assert words in taken.value["reason"]
        assert daemon.internal().health().status == 200
        assert ask(right, "at last").startswith("result: ")
        assert daemon.internal().call("POST", "/checkpoints", {"step": 1}).status == 201
        assert daemon.stop() == 0


async def test_each_checkpoint_needs_a_search_since_the_last(tmp_path: Path) -> None:
    """Searches before the last accepted checkpoint do not count again, also after a restart; a
    refused one takes nothing away; the same step needs the word as well.
    """
    async with served(tmp_path / "run") as run:
        assert (await run.execute("one"))[0] == 200
        assert (await take(run, 1))[0] == 201
        for step in (1, 2):
            status, refusal = await take(run, step)
            assert (status, refusal["state"]) == (409, "idle")
            assert "since the last accepted checkpoint" in refusal["reason"]
        assert run.records()[-1]["data"]["state"] == "idle"
    again: dict[str, Any] = {"resume": True, "trainer_stopped": True}
    async with served(tmp_path / "run", **again) as run:
        assert (await take(run, 2))[0] == 409
        assert (await run.execute("two"))[0] == 200
        status, receipt = await take(run, 2)
        assert (status, receipt["searches"], receipt.get("idle")) == (201, 2, None)


async def test_a_declined_query_is_a_search_that_came(tmp_path: Path) -> None:
    """The policy asked badly, and it asked here."""
    async with served(tmp_path / "run") as run:
        assert (await run.execute(""))[1]["result"] == "invalid query"
        assert (await take(run, 1))[0] == 201
        assert (await take(run, 2))[0] == 409


async def test_the_caller_may_mean_it(tmp_path: Path) -> None:
    """With ``allow_idle`` it is accepted, and receipt and record say so for good."""
    async with served(tmp_path / "run") as run:
        status, receipt = await take(run, 0, allow_idle=True)
        assert (status, receipt["idle"], receipt["searches"]) == (201, True, 0)
        assert run.records()[-1]["data"]["idle"] is True
        # What does not need the word is not marked by it.
        assert (await run.execute("one"))[0] == 200
        assert "idle" not in (await take(run, 1, allow_idle=True))[1]
        assert await run.stop() == 0
    raw = json.dumps({**receipt, "idle": False}).encode()
    found = await asyncio.to_thread(verify, run.directory, receipt=CheckpointReceipt.parse(raw))
    assert "another idle" in str(found.receipt_problem)


async def test_the_word_excuses_nothing_else(tmp_path: Path) -> None:
    """A failed run accepts no checkpoint, whatever the caller says."""
    async with served(tmp_path / "run") as run:
        await run.internal("POST", "/latch", {"reason": "enough"})
        status, refusal = await take(run, 1, allow_idle=True)
        assert (status, refusal["state"]) == (409, "failed")


async def test_the_command(tmp_path: Path) -> None:
    """Exit 1 with the sentence and no receipt; ``--allow-idle`` is the word. ``check`` stays the
    gate before training: healthy, and it says what a checkpoint would meet.
    """
    receipt = tmp_path / "receipt.json"
    async with served(tmp_path / "run") as run:
        where = ("--run-dir", str(run.directory))
        words = ("checkpoint", "--step", "1", "--receipt", str(receipt), *where)
        told = await command(*words)
        assert told.exit_code == 1
        assert told.output.startswith(
            "idle: 0 of 0 searches answered\n  no search came in this run"
        )
        assert not receipt.exists()
        told = await command("check", *where)
        assert told.exit_code == 0
        first, second = told.output.splitlines()
        assert first == "healthy: 0 of 0 searches answered"
        assert (
            second
            == "  no search since the last checkpoint: one is refused now without --allow-idle"
        )
        told = await command(*words, "--allow-idle")
        assert told.exit_code == 0
        assert json.loads(receipt.read_bytes())["idle"] is True


async def test_the_pinned_trainers_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its refusal carries the sentence and leaves the latch open; it may be told to mean it."""
    async with served(tmp_path / "run") as run:
        endpoints = run.directory / "endpoints.json"
        monkeypatch.setenv("SMARTSEARCH_SIDECAR_ENDPOINTS", str(endpoints))
        with pytest.raises(smartsearch_reward._Refusal, match="the run is idle, no search came"):
            await asyncio.to_thread(smartsearch_reward._take_receipt, 1, "folder")
        receipt = await asyncio.to_thread(smartsearch_reward._take_receipt, 1, "folder", True)
        assert receipt["idle"] is True
        assert (await run.health())[0] == 200


async def test_a_search_on_any_node_counts(tmp_path: Path) -> None:
    """Of many nodes all searches count, and the last accepted checkpoint is that of any node."""
    async with cluster(tmp_path, 2) as (first, second):
        assert (await take(first, 1))[1]["state"] == "idle"
        assert (await second.execute("one"))[0] == 200
        status, receipt = await take(first, 1)
        assert (status, receipt["searches"]) == (201, 1)
        for run in (first, second):
            status, refusal = await take(run, 2)
            assert (status, refusal["state"]) == (409, "idle")
            assert refusal["cluster"]["searches_unaccepted"] == 0
        assert (await first.execute("two"))[0] == 200
        assert (await take(second, 2))[0] == 201


async def test_a_node_that_is_resumed_remembers(tmp_path: Path) -> None:
    """What the last accepted checkpoint covered is in the journal of the node that accepted it."""
    ground = Ground()
    async with joined(tmp_path, ground, "a", 2) as first:
        async with joined(tmp_path, ground, "b", 2) as second:
            assert (await first.execute("one"))[0] == 200
            assert (await take(second, 1))[0] == 201
            assert await second.stop() == 0
        again: dict[str, Any] = {"resume": True, "trainer_stopped": True}
        async with joined(tmp_path, ground, "b", 2, **again) as second:
            assert (await take(first, 2))[1]["state"] == "idle"
            assert (await take(second, 2))[1]["state"] == "idle"

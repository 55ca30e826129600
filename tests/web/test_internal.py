"""The trainer's and the operator's routes over real HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from smartsearch_sidecar.process.daemon import Daemon
from tests.fakes.provider import FakeProvider
from tests.fakes.served import (
    EXECUTE_CAPABILITY,
    INTERNAL_CAPABILITY,
    configured,
    native_body,
    served,
)
from tests.fakes.until import until


async def test_probes_need_no_capability_and_say_nothing(tmp_path: Path) -> None:
    """``/livez`` and ``/readyz`` hold one word each."""
    async with served(tmp_path / "run") as run:
        for path, word in [("/livez", "alive"), ("/readyz", "ready")]:
            async with run.session.get(f"http://127.0.0.1:{run.port}{path}") as answer:
                assert (answer.status, await answer.json()) == (200, {"status": word})


async def test_readyz_is_503_once_latched(tmp_path: Path) -> None:
    """A failed run is not ready, and still alive: restarting it cures nothing."""
    async with served(tmp_path / "run") as run:
        await run.internal("POST", "/latch", {"reason": "by hand"})
        for path, status in [("/livez", 200), ("/readyz", 503)]:
            async with run.session.get(f"http://127.0.0.1:{run.port}{path}") as answer:
                assert answer.status == status


async def test_probe_listener_serves_probes_alone(tmp_path: Path) -> None:
    """The second listener serves no capability, and a rollout that asks there has failed."""
    keys: dict[str, Any] = {"server__probe_host": "127.0.0.1", "server__probe_port": 0}
    async with served(tmp_path / "run", **keys) as run:
        port = run.daemon.probe_port
        base = f"http://127.0.0.1:{port}"
        async with run.session.get(f"{base}/readyz") as answer:
            assert answer.status == 200
        for path in (f"/{INTERNAL_CAPABILITY}/health", f"/{EXECUTE_CAPABILITY}/execute"):
            async with run.session.post(base + path) as answer:
                assert answer.status == 401
        status, health = await run.health()
        assert (status, health["cause"]["cause"]) == (503, "http_unauthorized")


async def test_latch_by_hand(tmp_path: Path) -> None:
    """The operator closes the latch with a reason, which is the first cause for good."""
    async with served(tmp_path / "run") as run:
        status, value = await run.internal("POST", "/latch", {"reason": "wrong corpus"})
        assert (status, value["state"]) == (200, "failed")
        assert value["cause"]["detail"] == "wrong corpus"
        status, value = await run.internal("POST", "/latch", {"reason": "second"})
        assert value["cause"]["detail"] == "wrong corpus"
        latch = json.loads((run.directory / "latch.json").read_bytes())
        assert (latch["cause"], latch["detail"]) == ("operator", "wrong corpus")
        assert await run.stop() == 4


async def test_status_counts_what_is_under_way(tmp_path: Path) -> None:
    """``/status`` is health's report and the work of the moment; it waits for nothing."""
    provider = FakeProvider()
    async with served(tmp_path / "run", provider=provider) as run:
        await run.execute("done")
        provider.gate = asyncio.Event()
        held = asyncio.create_task(run.execute("held"))
        await until(lambda: provider.under_way == 1)
        status, value = await run.internal("GET", "/status")
        assert (status, value["state"], value["searching"]) == (200, "pending", 1)
        assert value["slots"] == {"total": 8, "in_service": 1, "waiting": 0, "most_waiting": 0}
        assert (value["retrieval_attempts"], value["retrieval_responses"]) == (2, 1)
        assert value["identity"]["corpus_sha256"] == "c" * 64
        assert (await run.internal("POST", "/status", {}))[0] == 405
        provider.gate.set()
        assert (await held)[0] == 200


@pytest.mark.parametrize("value", [None, {}, {"reason": ""}, {"reason": 5}, [], "x"])
async def test_slips_of_the_operator_change_nothing(tmp_path: Path, value: Any) -> None:
    """A latch request without a reason is refused and the run stays good."""
    async with served(tmp_path / "run") as run:
        status, answer = await run.internal("POST", "/latch", value)
        assert (status, answer["error"]["code"]) == (400, "operator_request")
        assert (await run.health())[0] == 200


async def test_what_is_not_served_says_why(tmp_path: Path) -> None:
    """A trainer that asks for rewards where they are off is told the key to set."""
    async with served(tmp_path / "run") as run:
        status, answer = await run.internal("POST", "/reward", {"solution_str": "x"})
        assert (status, answer["error"]["code"]) == (404, "not_found")
        assert answer["error"]["message"] == "rewards are off: set reward.enabled"
        status, answer = await run.internal("POST", "/checkpoints", {"step": -1})
        assert (status, answer["error"]["code"]) == (400, "operator_request")
        assert answer["error"]["message"] == "step must be a whole number from 0"
        assert (await run.health())[0] == 200


@pytest.mark.parametrize("query", ["settle=x", "settle=-1", "settle=nan", "wait=1", "settle=601"])
async def test_health_refuses_other_parameters(tmp_path: Path, query: str) -> None:
    """A mistyped gate must not pass for one that waited."""
    async with served(tmp_path / "run") as run:
        status, answer = await run.internal("GET", f"/health?{query}")
        assert (status, answer["error"]["code"]) == (400, "operator_request")


async def test_health_asks_the_provider_who_it_is(tmp_path: Path) -> None:
    """A corpus that changed between searches is found by the gate, and closes the latch."""
    async with served(tmp_path / "run") as run:
        run.provider.identity_values["index_sha256"] = "2" * 64
        status, health = await run.health()
        assert (status, health["cause"]["cause"]) == (503, "identity_changed")


async def test_identity_digest_is_the_references(tmp_path: Path) -> None:
    """``retrieval_identity_sha256`` is the digest of the identity's canonical JSON."""
    async with served(tmp_path / "run") as run:
        _, health = await run.health()
        text = json.dumps(run.provider.identity_values, sort_keys=True, separators=(",", ":"))
        assert health["retrieval_identity_sha256"] == hashlib.sha256(text.encode()).hexdigest()


async def test_checkpoint_receipt_names_the_history(tmp_path: Path) -> None:
    """An accepted checkpoint is a record, and its receipt names that record, claim and usage."""
    async with served(tmp_path / "run") as run:
        await run.execute("q")
        status, receipt = await run.internal("POST", "/checkpoints", {"step": 10, "path": "/ckpt"})
        assert (status, receipt["accepted"], receipt["occurrence"]) == (201, True, 1)
        record = run.records()[-1]
        assert record["kind"] == "checkpoint.accepted"
        assert (receipt["seq"], receipt["head"]) == (record["seq"], record["sum"])
        assert receipt["usage"]["retrieval_responses"] == 1
        assert receipt["claim_sha256"] == run.records()[0]["data"]["claim_sha256"]
        again = {"step": 10, "allow_idle": True}
        _, again = await run.internal("POST", "/checkpoints", again)
        assert (again["number"], again["occurrence"]) == (2, 2)


async def test_checkpoint_waits_for_work_and_is_refused_while_pending(tmp_path: Path) -> None:
    """Work in flight delays a checkpoint; if it does not end, the refusal does not latch."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    async with served(tmp_path / "run", provider=provider) as run:
        asking = asyncio.create_task(run.execute("q"))
        await until(lambda: provider.under_way == 1)
        status, refusal = await run.internal("POST", "/checkpoints?settle=0", {"step": 1})
        assert (status, refusal["state"]) == (409, "pending")
        taking = asyncio.create_task(run.internal("POST", "/checkpoints", {"step": 1}))
        provider.gate.set()
        assert (await asking)[0] == 200
        assert (await taking)[0] == 201
        assert await run.stop() == 0


async def test_checkpoint_of_a_failed_run_is_refused_with_its_cause(tmp_path: Path) -> None:
    """No checkpoint is accepted after the first failure."""
    async with served(tmp_path / "run") as run:
        await run.internal("POST", "/latch", {"reason": "by hand"})
        status, refusal = await run.internal("POST", "/checkpoints", {"step": 1})
        assert (status, refusal["state"], refusal["cause"]["cause"]) == (409, "failed", "operator")
        assert run.records()[-1]["kind"] == "checkpoint.refused"


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"step": "1"},
        {"step": True},
        {"step": -1},
        {"step": 1, "x": 2},
        {"step": 1, "path": ""},
        {"step": 1, "manifest_sha256": "A" * 64},
        {"step": 1, "allow_idle": 1},
        [],
    ],
)
async def test_checkpoint_slips_are_400(tmp_path: Path, value: Any) -> None:
    """A malformed checkpoint request is told so, recorded nowhere, and closes nothing."""
    async with served(tmp_path / "run") as run:
        status, answer = await run.internal("POST", "/checkpoints", value)
        assert (status, answer["error"]["code"]) == (400, "operator_request")
        assert len(run.records()) == 1


async def test_while_loading(tmp_path: Path) -> None:
    """Before the provider is open: alive, not ready, and a rollout waits until it is served."""
    opened = asyncio.Event()

    class SlowToOpen(FakeProvider):
        async def identity(self) -> Any:
            await opened.wait()
            return await super().identity()

    provider = SlowToOpen()
    ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    daemon = Daemon(
        configured(tmp_path / "run"),
        provider=provider,
        on_ready=lambda endpoints, service: ready.set_result(endpoints),
    )
    task = asyncio.create_task(daemon.run())
    await until(lambda: daemon.port is not None)
    base = f"http://127.0.0.1:{daemon.port}"
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{base}/livez") as answer:
            assert answer.status == 200
        async with session.get(f"{base}/readyz") as answer:
            assert answer.status == 503
        async with session.get(f"{base}/{INTERNAL_CAPABILITY}/health") as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (503, "not_ready")
        assert not (tmp_path / "run" / "endpoints.json").exists()
        asking = asyncio.create_task(
            session.post(f"{base}/{EXECUTE_CAPABILITY}/execute", json=native_body("q"))
        )
        await asyncio.sleep(0.05)
        assert not asking.done()
        opened.set()
        await ready
        assert (await asking).status == 200
        daemon.stop()
        assert await task == 0

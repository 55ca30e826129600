"""What stands still: a provider, a helper, a scorer, a disk, the event loop; and memory that ends.

A call that is waited for is shown with its age and its bound, and is a failure once it has outlived
that. A loop that stood still is told of afterwards; requests count from when the kernel took them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.nats.connection import Dialer
from smartsearch_sidecar.commands import app
from smartsearch_sidecar.config.sections import HelperSection
from smartsearch_sidecar.gate import health as health_module
from smartsearch_sidecar.retrieval import guard as guard_module
from smartsearch_sidecar.reward.helper import HelperClient
from smartsearch_sidecar.stalls import Stalls
from tests.fakes.faults import HeldDisk
from tests.fakes.helper import MODEL
from tests.fakes.process import DaemonProcess, environment, running, start, toml, wait_ready
from tests.fakes.provider import FakeProvider
from tests.fakes.rewarded import SOURCE, rewarded
from tests.fakes.served import Served, native_body, served
from tests.fakes.until import until, wait_until

MIB = 1024 * 1024


class Stubborn:
    """A wait that swallows every cancellation until it is released."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.waiting = 0

    async def wait(self, _: object = None) -> None:
        self.waiting += 1
        while not self.released.is_set():
            try:
                await self.released.wait()
            except asyncio.CancelledError:
                continue
        self.waiting -= 1


class StubbornProvider(FakeProvider):
    """A provider that does not come back where it was told so, and heeds no cancellation."""

    def __init__(self) -> None:
        super().__init__()
        self.stubborn = Stubborn()
        self.in_identity = self.in_search = False

    async def identity(self) -> Any:
        if self.in_identity:
            await self.stubborn.wait()
        return await super().identity()

    async def search(self, query: str, top_n: int) -> Any:
        if self.in_search:
            await self.stubborn.wait()
        return await super().search(query, top_n)


def row(value: dict[str, Any], on: str) -> dict[str, Any]:
    """What health or status says of the wait on one thing."""
    (found,) = [one for one in value["waiting_for"] if one["on"] == on]
    return dict(found)


async def failed(run: Served) -> tuple[str, str]:
    """Cause and detail, once the run has failed."""
    await until(lambda: run.service.run.state.closed)
    _, value = await run.health()
    assert value["state"] == "failed"
    return value["cause"]["cause"], value["cause"]["detail"]


# --- a provider -----------------------------------------------------------------------------------


def what_is_left(seconds: float, value: dict[str, Any]) -> Any:
    """The bound of a call to the provider in a request of so many seconds: what the request took
    before the call is no part of it, however busy the machine is.
    """
    before = value["oldest_request_seconds"] - row(value, "provider")["seconds"]
    return pytest.approx(seconds - before, abs=0.02)


async def test_provider_standing_still_is_pending_with_its_age_then_failed(tmp_path: Path) -> None:
    """A search that never ends: named with age and bound while it may last, failed at its bound."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    async with served(tmp_path / "run", provider=provider, execute__deadline_seconds=1) as run:
        asking = asyncio.create_task(run.execute("q"))
        await until(lambda: provider.under_way == 1)
        status, value = await run.health(settle=0.1)
        assert (status, value["state"]) == (503, "pending")
        waits = row(value, "provider")
        assert 0.1 <= waits["seconds"] <= value["oldest_request_seconds"]
        assert (waits["call"], waits["bound_seconds"]) == ("search", what_is_left(1, value))
        answered, error = await asking
        assert (answered, error["error"]["code"]) == (504, "deadline")
        assert (await failed(run))[0] == "deadline"


async def test_identity_that_swallows_its_cancellation_is_a_failure(tmp_path: Path) -> None:
    """A provider that does not say what it serves, and heeds no deadline: pending, then failed, and
    the daemon ends in time.
    """
    provider = StubbornProvider()
    async with served(tmp_path / "run", provider=provider, execute__deadline_seconds=0.5) as run:
        provider.in_identity = True
        asking = asyncio.create_task(run.execute("q"))
        try:
            await until(lambda: provider.stubborn.waiting == 1)
            value = (await run.internal("GET", "/status"))[1]
            waits = row(value, "provider")
            assert (waits["call"], waits["bound_seconds"]) == ("identity", what_is_left(0.5, value))
            cause, detail = await failed(run)
            assert cause == "deadline"
            told = re.search(r"has not ended for [\d.]+ s, where (0\.\d) s were allowed", detail)
            assert told
            assert float(told[1]) == pytest.approx(waits["bound_seconds"], abs=0.06)
            assert await asyncio.wait_for(run.stop(), 20) == 4
        finally:
            provider.stubborn.released.set()
            await asyncio.gather(asking, return_exceptions=True)


async def test_the_gate_does_not_wait_for_a_provider_that_heeds_no_cancellation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Health answers within its own bound, and says no."""
    monkeypatch.setattr(health_module, "IDENTITY_SECONDS", 0.05)
    provider = StubbornProvider()
    async with served(tmp_path / "run", provider=provider) as run:
        provider.in_identity = True
        try:
            status, value = await asyncio.wait_for(run.health(), 5)
            assert (status, value["cause"]["cause"]) == (503, "retrieval_failed")
            assert "did not confirm its identity" in value["cause"]["detail"]
        finally:
            provider.stubborn.released.set()


async def test_a_search_that_heeds_no_cancellation_does_not_hold_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has failed at the deadline, and its process ends."""
    monkeypatch.setattr(guard_module, "CLOSE_SECONDS", 0.2)
    provider = StubbornProvider()
    provider.in_search = True
    async with served(tmp_path / "run", provider=provider, execute__deadline_seconds=0.3) as run:
        try:
            assert (await run.execute("q"))[0] == 504
            waits = row((await run.internal("GET", "/status"))[1], "provider")
            assert waits["seconds"] >= waits["bound_seconds"]
            assert await asyncio.wait_for(run.stop(), 10) == 4
            assert provider.stubborn.waiting == 1
        finally:
            provider.stubborn.released.set()
            await until(lambda: provider.stubborn.waiting == 0)


@pytest.mark.process
def test_threads_that_do_not_come_back_fail_the_run(tmp_path: Path) -> None:
    """An operator's retriever that hangs in its threads: failed, and SIGTERM ends the process."""
    with running(
        tmp_path,
        retrieval__provider="tests.fakes.plugin:hanging",
        execute__deadline_seconds=1.0,
    ) as daemon:
        with asking(daemon) as first:
            assert status(first) == 504
        answer = daemon.internal().health()
        assert (answer.value["state"], answer.value["cause"]["cause"]) == ("failed", "deadline")
        assert row(answer.value, "provider")["seconds"] >= 0.9
        assert daemon.stop() == 4


# --- a helper, a scorer ---------------------------------------------------------------------------


async def test_helper_standing_still_is_pending_with_its_age_then_failed(tmp_path: Path) -> None:
    """A helper that does not answer: named with age and bound, then the score fails."""
    async with rewarded(tmp_path, reward__helper__timeout_seconds=1) as on:
        solution = await on.rollout("q")
        on.helper.gate.clear()
        scoring = asyncio.create_task(on.reward(solution))
        await on.helper.until_calls(1)
        _, value = await on.run.health(settle=0.1)
        assert value["state"] == "pending"
        waits = row(value, "helper")
        assert (waits["call"], waits["bound_seconds"]) == ("/generate", pytest.approx(1, abs=0.2))
        assert 0.1 <= waits["seconds"] <= value["oldest_request_seconds"]
        assert (await scoring)[0] == 502
        assert (await failed(on.run))[0] == "helper_timeout"


async def test_helper_call_that_heeds_no_cancellation_is_given_up() -> None:
    """A call that is not over a second after its time is left behind, and named a timeout."""
    stubborn, stalls = Stubborn(), Stalls()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        section = HelperSection(
            url=f"http://127.0.0.1:{closed.getsockname()[1]}",
            model=MODEL,
            model_sha256="a" * 64,
            timeout_seconds=0.2,
        )
        async with HelperClient(section, pause=stubborn.wait, stalls=stalls) as helper:
            call = asyncio.create_task(helper.ask("prompt", seed=1))
            await until(lambda: stubborn.waiting == 1)
            assert [wait.on for wait in stalls.waits()] == ["helper"]
            done, _ = await asyncio.wait([call], timeout=10)
            stubborn.released.set()
            assert done
            with pytest.raises(errors.HelperFault) as caught:
                await call
            assert errors.HELPER_TIMEOUT.matches(caught.value)
            await until(lambda: not stalls.calls)


HANGING = """

def compute_score_with_format(tokenizer, solution_str, ground_truth):
    import os, time
    while not os.path.exists({flag!r}):
        time.sleep(0.01)
    return 1.0
"""


@pytest.mark.parametrize("side_by_side", [True, False])
async def test_scorer_that_does_not_come_back_is_pending_then_failed(
    tmp_path: Path, side_by_side: bool
) -> None:
    """A pinned scorer that hangs: named with its age, failed at the deadline, the slot given back,
    and the daemon ends in time.
    """
    flag, source = tmp_path / "go", tmp_path / "scorer.py"
    source.write_text(SOURCE.read_text() + HANGING.format(flag=str(flag)))
    keys: dict[str, Any] = {
        "reward__source_sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
        "reward__deadline_seconds": 0.5,
        "reward__side_by_side": side_by_side,
    }
    async with rewarded(tmp_path, **keys) as on:
        try:
            solution = await on.rollout("q")
            scoring = asyncio.create_task(on.reward(solution))
            await until(lambda: on.run.service.run.stalls.calls)
            _, value = await on.run.health()
            assert value["state"] == "pending"
            assert row(value, "scorer")["bound_seconds"] >= 0.3
            done, _ = await asyncio.wait([scoring], timeout=10)
            assert done
            status, answer = await scoring
            assert (status, answer["error"]["code"]) == (502, "reward_failed")
            assert (await failed(on.run))[0] == "reward_deadline"
            assert await asyncio.wait_for(on.run.stop(), 10) == 4
        finally:
            flag.touch()


# --- the disk -------------------------------------------------------------------------------------


async def test_batch_on_its_way_to_the_disk_is_pending_with_its_age(tmp_path: Path) -> None:
    """A sync that does not end: named with age and bound, then failed."""
    disk = HeldDisk()
    async with served(tmp_path / "run", disk=disk, ledger__stall_seconds=2) as run:
        disk.let_through.clear()
        asked = asyncio.create_task(run.execute("held"))
        await until(lambda: not run.service.run.writer.idle)
        _, value = await run.health(settle=0.2)
        assert value["state"] == "pending"
        waits = row(value, "disk")
        assert waits["bound_seconds"] == 2
        assert 0.2 <= waits["seconds"] <= value["oldest_request_seconds"]
        assert (await asked)[0] == 503
        assert (await failed(run))[0] == "ledger_stalled"
        disk.let_through.set()


async def test_a_loop_that_stood_still_is_not_a_disk_that_does(tmp_path: Path) -> None:
    """While the loop stands, its time for the disk does not pass: the disk's word is unread."""
    disk = HeldDisk()
    keys: dict[str, Any] = {"ledger__stall_seconds": 1, "execute__deadline_seconds": 30}
    async with served(tmp_path / "run", disk=disk, **keys) as run:
        disk.let_through.clear()
        asked = asyncio.create_task(run.execute("held"))
        writer = run.service.run.writer
        await until(lambda: not writer.idle and writer.looking > 0)
        time.sleep(1.5)  # noqa: ASYNC251 - the loop stands still
        disk.let_through.set()
        assert (await asked)[0] == 200
        assert (await run.health(settle=5))[1]["state"] == "healthy"


# --- how old the oldest request is ----------------------------------------------------------------


async def test_the_age_of_the_oldest_request_is_shown(tmp_path: Path) -> None:
    """In health, status and check; a request counts from its first byte, its body not yet here."""
    async with served(tmp_path / "run") as run:
        for path in ("/health", "/status"):
            assert (await run.internal("GET", path))[1]["oldest_request_seconds"] == 0
        reader, writer = await asyncio.open_connection("127.0.0.1", run.port)
        body = json.dumps(native_body("slow")).encode()
        writer.write(head(run.endpoints.sandbox_url, body))
        await until(lambda: run.daemon.stalls.oldest_seconds() > 0.1)
        for path in ("/health", "/status"):
            assert (await run.internal("GET", path))[1]["oldest_request_seconds"] > 0.1
        provider: FakeProvider = run.provider
        provider.gate = asyncio.Event()
        writer.write(body)
        await until(lambda: provider.under_way == 1)
        words = ["check", "--run-dir", str(run.directory)]
        said = await asyncio.to_thread(CliRunner().invoke, app, words)
        first, *others = said.output.splitlines()
        assert re.fullmatch(r"pending: 0 of 1 searches answered, oldest request \d\.\d s", first)
        assert any(
            re.search(r"waiting for \d\.\d s on: provider \(search, ", one) for one in others
        )
        provider.gate.set()
        assert b" 200 " in await reader.readline()
        writer.close()
        assert (await run.health(settle=5))[1]["oldest_request_seconds"] == 0


# --- the event loop -------------------------------------------------------------------------------


def head(url: str, body: bytes) -> bytes:
    """The head of a rollout's request."""
    path = "/" + url.split("/", 3)[3] + "/execute"
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()


def status(connection: socket.socket) -> int:
    """The status of the answer, all of which is read; 0 where the connection ends without one."""
    answer = b""
    while part := connection.recv(65536):
        answer += part
    return int(answer.split(b" ", 2)[1]) if answer else 0


@contextmanager
def asking(daemon: DaemonProcess, query: str = "q") -> Iterator[socket.socket]:
    """A connection on which a rollout's request was sent; the kernel has it."""
    port = int(daemon.sandbox_url.split(":")[2].split("/")[0])
    body = json.dumps(native_body(query)).encode()
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall(head(daemon.sandbox_url, body) + body)
        yield connection


def halt(daemon: DaemonProcess) -> None:
    """SIGSTOP; returns once every thread of the process is stopped."""
    daemon.process.send_signal(signal.SIGSTOP)
    tasks = Path(f"/proc/{daemon.process.pid}/task")
    wait_until(
        lambda: all(
            re.search(r"^State:\s+T", (task / "status").read_text(), re.MULTILINE)
            for task in tasks.iterdir()
        )
    )


@pytest.mark.process
def test_a_process_stopped_with_no_request_open_stays_healthy(tmp_path: Path) -> None:
    """Stopped and continued: health says for how long, and a good run goes on."""
    with running(tmp_path) as daemon:
        before = daemon.internal().health(5).value["loop"]["stood_still"]
        halt(daemon)
        time.sleep(2)
        daemon.process.send_signal(signal.SIGCONT)
        answer = daemon.internal().health(5)
        assert (answer.status, answer.value["state"]) == (200, "healthy")
        loop = answer.value["loop"]
        assert loop["stood_still"] > before
        assert loop["longest_seconds"] >= 1.7
        with asking(daemon) as connection:
            assert status(connection) == 200
        assert daemon.internal().call("POST", "/checkpoints", {"step": 1}).status == 201
        assert daemon.stop() == 0


@pytest.mark.process
def test_a_request_counts_from_when_the_kernel_took_it(tmp_path: Path) -> None:
    """Sent to a stopped process and answered past its deadline: late, and the run has failed."""
    with running(tmp_path, execute__deadline_seconds=1.0) as daemon:
        halt(daemon)
        with asking(daemon) as connection:
            time.sleep(1.5)
            daemon.process.send_signal(signal.SIGCONT)
            assert status(connection) == 504
        answer = daemon.internal().health()
        assert (answer.status, answer.value["cause"]["cause"]) == (503, "deadline")
        assert daemon.stop() == 4


@pytest.mark.process
def test_a_client_that_left_a_stopped_process_fails_the_run(tmp_path: Path) -> None:
    """The gate is asked at once after it, and first reads what came meanwhile."""
    with running(tmp_path) as daemon:
        halt(daemon)
        for number in range(8):
            with asking(daemon, str(number)):
                pass
        time.sleep(1.5)
        daemon.process.send_signal(signal.SIGCONT)
        answer = daemon.internal().health()
        assert (answer.status, answer.value["state"]) == (503, "failed")
        assert answer.value["cause"]["cause"] == "response_undelivered"
        assert daemon.stop() == 4


async def test_where_a_loop_stands_still_is_said(tmp_path: Path) -> None:
    """A callback that blocks is named by its line, while it blocks and afterwards; the gate waits
    until the loop has caught up.
    """
    async with served(tmp_path / "run") as run:
        watch = run.daemon.stalls.loop

        def block() -> None:
            wait_until(lambda: watch._where, seconds=30)

        asyncio.get_running_loop().call_soon(block)
        await asyncio.sleep(0)
        _, value = await run.health()
        assert value["state"] == "healthy"
        last = value["loop"]["last"]
        assert "test_stalls.py" in last["where"]
        assert last["seconds"] > 1
        assert watch.last is not None


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.process
def test_memory_limited_at_the_start_is_a_sentence(tmp_path: Path) -> None:
    """Under `ulimit -v` of 300 MiB: exit 2, the limit and the remedy, no traceback."""
    config = tmp_path / "run.toml"
    config.write_text(toml({"server.port": 0, "retrieval.provider": "tests.fakes.plugin:instant"}))
    words = ["serve", "--config", str(config), "--run-dir", str(tmp_path / "run")]
    limit = 300 * MIB
    done = subprocess.run(
        [sys.executable, "-m", "smartsearch_sidecar", *words],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert "limited to 300 MiB (ulimit -v)" in last
    assert "ulimit -v unlimited" in last
    assert "Traceback" not in done.stderr


@pytest.mark.process
def test_memory_that_ends_while_serving_fails_the_run(tmp_path: Path) -> None:
    """A process that gets no more memory has failed: by its latch, or by the next start's."""
    keys: dict[str, Any] = {"execute__body_bytes_max": 16 * MIB}
    with running(tmp_path, **keys) as daemon:
        with asking(daemon) as connection:
            assert status(connection) == 200
        size = re.search(r"VmSize:\s+(\d+)", Path(f"/proc/{daemon.process.pid}/status").read_text())
        assert size is not None
        limit = int(size[1]) * 1024 + 16 * MIB
        resource.prlimit(daemon.process.pid, resource.RLIMIT_AS, (limit, limit))
        try:
            with asking(daemon, "x" * 12_000_000) as connection:
                assert status(connection) != 200
        except OSError:
            pass  # the connection was reset, which a rollout would read as its result
        if daemon.process.poll() is None:
            answer = daemon.internal().health()
            assert (answer.value["state"], answer.value["cause"]["cause"]) == (
                "failed",
                "internal_error",
            )
            assert daemon.stop() == 4
    again = start(tmp_path, "--resume", **keys)
    try:
        wait_ready(again)
        assert again.internal().health().value["state"] == "failed"
    finally:
        again.kill()


async def test_memory_that_ends_beside_the_requests_fails_the_run(tmp_path: Path) -> None:
    """Raised in a callback of the loop, where no request is served: an internal error."""
    async with served(tmp_path / "run") as run:

        def fails() -> None:
            raise MemoryError

        asyncio.get_running_loop().call_soon(fails)
        cause, detail = await failed(run)
        assert (cause, "MemoryError" in detail) == ("internal_error", True)


# --- the link to other nodes ----------------------------------------------------------------------


class EarlyLoop(asyncio.SelectorEventLoop):
    """A loop whose timers fire a little before their time, as timers of other loops may."""

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return super().call_at(when - 0.01, callback, *args, context=context)


def test_a_lost_link_is_told_by_a_timer_that_fires_early() -> None:
    """The one timer that looks at a reason marks it due, whatever the clock says by then."""
    told: list[bool] = []

    async def prove(_: object) -> None:
        pass

    async def lose() -> None:
        dialer = Dialer(["nats://127.0.0.1:1"], "a", told.append, patience=60, pulse=0.05)
        dialer.begin(prove)
        dialer.note("connection", 0.05)
        await asyncio.sleep(0.2)
        assert (told, dialer.connected) == ([False], False)
        dialer.clear("connection")
        assert told == [False, True]

    with asyncio.Runner(loop_factory=EarlyLoop) as runner:
        runner.run(lose())

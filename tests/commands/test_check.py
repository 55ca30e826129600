"""``check``, ``checkpoint``, ``latch`` and ``serve``'s last words: a run as a shell meets it."""

from __future__ import annotations

import asyncio
import json
import re
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from smartsearch_sidecar import errors
from smartsearch_sidecar.commands import app
from smartsearch_sidecar.errors import GOING_ON, remedy
from tests.fakes.process import running
from tests.fakes.provider import FakeProvider
from tests.fakes.served import Served, served


async def command(*words: str, run: Served | None = None) -> Result:
    """Runs the command line in a thread, while the run is served on this loop."""
    where = () if run is None else ("--run-dir", str(run.directory))
    return await asyncio.to_thread(CliRunner().invoke, app, [*words, *where])


async def test_check_says_good(tmp_path: Path) -> None:
    """A healthy run is exit 0 and one line."""
    async with served(tmp_path / "run") as run:
        await run.execute("q")
        result = await command("check", "--settle", "5", run=run)
        assert (result.exit_code, result.output) == (0, "healthy: 1 of 1 searches answered\n")


async def test_check_says_why_and_what_to_do(tmp_path: Path) -> None:
    """A failed run is exit 1, its first cause, what to look at, and how to go on."""
    async with served(tmp_path / "run") as run:
        await run.internal("POST", "/latch", {"reason": "wrong corpus"})
        result = await command("check", run=run)
        assert result.exit_code == 1
        first, second, third = result.output.splitlines()
        assert first == "failed: operator: wrong corpus (0 of 0 searches answered)"
        assert second.strip() == remedy("operator")
        assert third.strip() == GOING_ON


async def test_checkpoint_leaves_a_receipt_that_verifies(tmp_path: Path) -> None:
    """``ledger verify --receipt`` accepts the file that is written."""
    receipt = tmp_path / "receipt.json"
    async with served(tmp_path / "run") as run:
        await run.execute("q")
        digest = "d" * 64
        result = await command(
            *("checkpoint", "--step", "10", "--path", "ckpt/10", "--manifest-sha256", digest),
            *("--receipt", str(receipt)),
            run=run,
        )
        assert result.exit_code == 0, result.output
        assert result.output.startswith("accepted: step 10, record 4; the receipt is ")
    value = json.loads(receipt.read_bytes())
    assert (value["step"], value["path"], value["manifest_sha256"]) == (10, "ckpt/10", digest)
    result = await command("ledger", "verify", str(tmp_path / "run"), "--receipt", str(receipt))
    assert result.exit_code == 0
    assert "is of this history" in result.output


async def test_checkpoint_without_a_file_is_printed(tmp_path: Path) -> None:
    """Standard output then holds the receipt and nothing else."""
    async with served(tmp_path / "run") as run:
        result = await command("checkpoint", "--step", "0", "--allow-idle", run=run)
        value = json.loads(result.output)
        assert (value["accepted"], value["step"]) == (True, 0)


async def test_refused_checkpoint_is_exit_one_with_the_cause(tmp_path: Path) -> None:
    """A failed run accepts nothing, writes no receipt, and says why."""
    receipt = tmp_path / "receipt.json"
    provider = FakeProvider()
    async with served(tmp_path / "run", provider=provider) as run:
        provider.fault = RuntimeError("gone")
        await run.execute("q")
        result = await command("checkpoint", "--step", "1", "--receipt", str(receipt), run=run)
        assert result.exit_code == 1
        assert result.output.startswith("failed: retrieval_failed: ")
        assert GOING_ON in result.output
        assert not receipt.exists()


async def test_checkpoint_that_cannot_be_kept_says_so(tmp_path: Path) -> None:
    """An accepted step whose receipt has no place is wrong use, and asking again mends it."""
    async with served(tmp_path / "run") as run:
        await run.execute("q")
        words = ("checkpoint", "--step", "1", "--receipt")
        result = await command(*words, str(tmp_path / "no" / "r.json"), run=run)
        assert isinstance(result.exception, errors.UsageError)
        assert "ask again with another --receipt, and --allow-idle" in result.exception.message
        result = await command(*words, str(tmp_path / "r.json"), "--allow-idle", run=run)
        assert result.exit_code == 0


async def test_slip_of_a_checkpoint_is_named(tmp_path: Path) -> None:
    """An invalid option is refused by the name of its parameter, and the run stays good."""
    async with served(tmp_path / "run") as run:
        result = await command("checkpoint", "--step", "1", "--manifest-sha256", "X", run=run)
        assert isinstance(result.exception, errors.UsageError)
        assert "manifest_sha256 must be 64 lower-case hex digits" in result.exception.message
        assert (await run.health())[0] == 200


async def test_url_is_the_one_that_was_asked_for(tmp_path: Path) -> None:
    """The rollouts' address, or with --internal the trainer's and operator's; nothing else."""
    async with served(tmp_path / "run") as run:
        result = await command("url", run=run)
        assert result.output == f"{run.endpoints.sandbox_url}\n"
        result = await command("url", "--internal", run=run)
        assert result.output == f"{run.endpoints.internal_url}\n"


async def test_latch_is_closed_from_a_shell(tmp_path: Path) -> None:
    """The reason becomes the first cause; a second one changes nothing."""
    async with served(tmp_path / "run") as run:
        result = await command("latch", "--reason", "wrong corpus", run=run)
        assert (result.exit_code, result.output) == (0, "closed: operator: wrong corpus\n")
        result = await command("latch", "--reason", "other", run=run)
        assert result.output == "closed: operator: wrong corpus\n"
        assert (await run.health())[0] == 503
        result = await command("latch", "--reason", " ", run=run)
        assert isinstance(result.exception, errors.UsageError)
        assert 'send {"reason": "why"}' in result.exception.message


async def test_a_run_that_is_not_served_is_unreachable(tmp_path: Path) -> None:
    """A run that is not served, and a file that is no sidecar's, are refused with what to do."""
    for words in (["check"], ["checkpoint", "--step", "1"], ["url"]):
        result = await command(*words, "--run-dir", str(tmp_path))
        assert isinstance(result.exception, errors.Unreachable)
        assert "no sidecar serves this run" in result.exception.message
    (tmp_path / "endpoints.json").write_text("{")
    result = await command("check", "--run-dir", str(tmp_path))
    assert isinstance(result.exception, errors.Unreachable)
    assert "name the file `serve` wrote" in result.exception.message


@pytest.mark.process
@pytest.mark.timeout(60)
def test_addresses_are_made_for_each_start_and_gone_at_its_end(tmp_path: Path) -> None:
    """Without capabilities of its own a run gets two fresh ones, which only its user can read."""
    seen: set[str] = set()
    for resume in ((), ("--resume",)):
        with running(tmp_path, *resume) as run:
            file = run.directory / "endpoints.json"
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            found = {run.endpoints()[name] for name in ("sandbox_url", "internal_url")}
            secrets = {url.rpartition("/")[2] for url in found}
            assert all(re.fullmatch(r"[A-Za-z0-9_-]{43}", secret) for secret in secrets)
            assert len(secrets) == 2
            assert not secrets & seen
            seen |= secrets
            assert run.stop() == 0
            assert not file.exists()
            assert not any(secret in run.log.read_text() for secret in secrets)


@pytest.mark.process
@pytest.mark.timeout(60)
def test_serve_says_that_the_run_has_failed(tmp_path: Path) -> None:
    """At the end of a failed run, and whenever it is resumed, serve says why and how to go on."""
    with running(tmp_path) as run:
        run.internal().call("POST", "/latch", {"reason": "wrong corpus"})
        assert run.stop() == 4
    words = "this run has failed and answers nothing more (operator: wrong corpus)"
    assert run.log.read_text().count(words) == 1
    with running(tmp_path, "--resume") as run:
        assert run.stop() == 4
    log = run.log.read_text()
    assert log.count(words) == 3
    assert log.count(GOING_ON) == 3

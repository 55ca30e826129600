"""The rows of the table about what is kept on disk: one test each, against both services."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from smartsearch_sidecar.ledger.verify import verify
from tests.fakes.disk import CountingDisk, ReadOnlyDisk
from tests.parity.retriever import Plan
from tests.parity.sides import needs_reference, ours, pair, reference
from tests.parity.wire import asking, exchange

pytestmark = needs_reference


@pytest.mark.parametrize(
    ("limit", "plan", "cause"),
    [(1, Plan(), "quota_exhausted"), (9, Plan(before="another index"), "identity_changed")],
    ids=["quota", "identity"],
)
async def test_differs_failures_on_disk(tmp_path: Path, limit: int, plan: Plan, cause: str) -> None:
    """A used-up quota and another identity are written down here, and nowhere there."""
    async with pair(tmp_path, limit=limit) as both:
        ports = (both.reference.port, both.ours.port)
        said = [await exchange(port, asking("first")) for port in ports]
        both.play(plan)
        said += [await exchange(port, asking("second")) for port in ports]
        assert said[2].code == said[3].code
        assert both.reference.state().cause == "in memory only"
        latch = json.loads((both.ours.run.directory / "latch.json").read_bytes())
        assert latch["cause"] == cause
        theirs, mine = both.reference.files(), await both.ours.files()
        rejected = mine.pop("transport-rejected.json")
        assert (rejected["code"], rejected["retrieval_attempt_consumed"]) == (cause, False)
        assert theirs == mine


async def test_differs_ledger_failed(tmp_path: Path) -> None:
    """A record that cannot be written is the retriever's failure there, and named here."""
    with reference(tmp_path / "reference") as theirs:
        (theirs.directory / "request-000001.json").write_text("{}")  # create-only: it cannot write
        said = await exchange(theirs.port, asking("Ada"))
        assert (said.status, said.code) == (502, "retrieval_failed")
        state = theirs.state()
        assert (state.cause, state.attempts) == ("http_retrieval_failed", 1)
    disk = ReadOnlyDisk()
    async with ours(tmp_path, disk=disk) as mine:
        disk.read_only = True
        said = await exchange(mine.port, asking("Ada"))
        assert (said.status, said.code) == (503, "ledger_failed")
        await mine.state()
        assert mine.cause is not None
        assert mine.cause["cause"] == "ledger_failed"


async def test_differs_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer is synced and chained here; there it is neither, and a changed file goes unseen."""
    synced: list[int] = []
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, synced.append)
    with reference(tmp_path / "reference") as theirs:
        assert (await exchange(theirs.port, asking("Ada"))).status == 200
        assert synced == []
        answer = theirs.directory / "response-000001.json"
        answer.write_text(answer.read_text().replace("Ada", "Eve"))
        assert (await exchange(theirs.port, asking("Ada"))).status == 200
        assert theirs.state().healthy
    monkeypatch.undo()
    disk = CountingDisk()
    async with ours(tmp_path, disk=disk) as mine:
        before = disk.calls["sync"]
        assert (await exchange(mine.port, asking("Ada"))).status == 200
        assert disk.calls["sync"] > before
        await mine.run.stop()
    directory = mine.run.directory
    assert (await asyncio.to_thread(verify, directory)).ok
    journal = directory / "journal" / "000001.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b"Ada", b"Eve"))
    assert not (await asyncio.to_thread(verify, directory)).ok


async def test_differs_resume(tmp_path: Path) -> None:
    """A run that was stopped is over there; here it goes on, and no number comes twice."""
    with reference(tmp_path / "reference") as theirs:
        assert (await exchange(theirs.port, asking("one"))).status == 200
    with pytest.raises(ValueError, match="create-only"), reference(tmp_path / "reference"):
        pass
    async with ours(tmp_path) as mine:
        assert (await exchange(mine.port, asking("one"))).status == 200
    async with ours(tmp_path, resume=True, trainer_stopped=True) as mine:
        assert (await exchange(mine.port, asking("two"))).status == 200
        state = await mine.state()
        assert (bool(state.healthy), state.attempts, state.responses) == (True, 2, 2)
        assert {"response-000001.json", "response-000002.json"} <= (await mine.files()).keys()

"""A checkpoint is loaded only with a receipt that a ledger has.

The pinned trainer's own order of loading, its file of ``integrations/`` and real daemons: what the
file says of itself is not enough, the served run (or one that it follows) must have recorded it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import trainer
from tests.fakes.reward_server import reward_server
from tests.fakes.served import Served, served
from tests.fakes.tool_loop import FILE

PINNED_FILE = FILE.with_name("smartsearch_reward.py")
VARIABLE = "SMARTSEARCH_SIDECAR_ENDPOINTS"
UNCOMPARED = "SMARTSEARCH_SIDECAR_LOAD_UNCOMPARED"


@pytest.fixture(autouse=True)
def _pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has imported the pinned trainer's modules, fresh for every test."""
    monkeypatch.delenv(UNCOMPARED, raising=False)
    monkeypatch.delitem(sys.modules, "custom_module", raising=False)
    for name, module in trainer.modules(trainer.PINNED).items():
        monkeypatch.setitem(sys.modules, name, module)


@asynccontextmanager
async def beside(
    directory: Path, monkeypatch: pytest.MonkeyPatch, **keys: Any
) -> AsyncIterator[Served]:
    """A daemon, and the variable that names its endpoints."""
    async with served(directory, **keys) as run:
        monkeypatch.setenv(VARIABLE, str(directory / "endpoints.json"))
        yield run


async def saved(run: Served, folder: Path, steps: range) -> list[dict[str, Any]]:
    """Trains and saves these steps; the receipts beside them."""
    made = await asyncio.to_thread(
        trainer.pinned_run, str(PINNED_FILE), str(folder), sandbox_url="sidecar"
    )
    receipts = []
    for made.global_steps in steps:
        await run.execute("Ada")
        await asyncio.to_thread(made._save_checkpoint)
        receipts.append(json.loads(receipt_file(folder, made.global_steps).read_text()))
    return receipts


def receipt_file(folder: Path, step: int) -> Path:
    return folder / f"global_step_{step}" / "sidecar_receipt.json"


async def load(folder: Path, step: int) -> list[str]:
    """What the workers of a new trainer have loaded, once it was told to go on from ``step``."""
    sys.modules.pop("custom_module", None)
    for name, module in trainer.modules(trainer.PINNED).items():
        sys.modules[name] = module
    (folder / "latest").write_text(str(step))
    made = await asyncio.to_thread(
        trainer.pinned_run, str(PINNED_FILE), str(folder), sandbox_url="sidecar"
    )
    await asyncio.to_thread(made._load_checkpoint)
    loaded: list[str] = made.actor_rollout_wg.loaded
    return loaded


async def expect_loaded(folder: Path, step: int) -> None:
    assert await load(folder, step) == [str(folder / f"global_step_{step}" / "actor")]


async def expect_refused(folder: Path, step: int, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        await load(folder, step)


# --- the run that is served -----------------------------------------------------------------------


async def test_a_receipt_of_the_served_run_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every accepted checkpoint of the run, before and after a resume."""
    folder = tmp_path / "checkpoints"
    async with beside(tmp_path / "run", monkeypatch) as run:
        await saved(run, folder, range(1, 4))
        await expect_loaded(folder, 2)
    again = {"resume": True, "trainer_stopped": True}
    async with beside(tmp_path / "run", monkeypatch, **again) as run:
        for step in (1, 3):
            await expect_loaded(folder, step)
        assert (await run.health())[1]["state"] == "healthy"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head": "a" * 64}, "another sum"),
        ({"seq": 1}, "another sum"),
        ({"seq": 10_000}, "its end is missing"),
        ({"step": 2}, "says another step"),
        ({"number": 9}, "says another number"),
        ({"usage": {}}, "says another usage"),
        ({"format": 99}, "written by a newer version"),
        ({"seq": "2"}, "names no seq"),
    ],
)
async def test_any_json_of_a_receipts_shape_is_not_loaded(
    changes: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step, head, place and values must be those that the ledger recorded."""
    folder = tmp_path / "checkpoints"
    async with beside(tmp_path / "run", monkeypatch) as run:
        (receipt,) = await saved(run, folder, range(1, 2))
        step = changes.get("step", 1)
        (folder / "global_step_2").mkdir()
        receipt_file(folder, step).write_text(json.dumps({**receipt, **changes}))
        # The way by hand around a contradiction is none.
        monkeypatch.setenv(UNCOMPARED, str(changes.get("head", receipt["head"])))
        await expect_refused(folder, step, words)
        assert (await run.health())[1]["state"] == "healthy"


async def test_a_receipt_made_up_whole_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that no ledger knows vouches for nothing."""
    folder = tmp_path / "checkpoints"
    async with beside(tmp_path / "run", monkeypatch) as run:
        (receipt,) = await saved(run, folder, range(1, 2))
        made_up = {**receipt, "head": "a" * 64, "claim_sha256": "b" * 64, "seq": 3}
        receipt_file(folder, 1).write_text(json.dumps(made_up))
        await expect_refused(folder, 1, "can be compared with no ledger: .*run.previous")
        receipt_file(folder, 1).write_text(json.dumps({**made_up, "seq": 0}))
        await expect_refused(folder, 1, "names no seq")


# --- a run that it follows ------------------------------------------------------------------------


async def chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs that have ended: steps 1 and 2 of the first, 3 of the second, which follows it."""
    folder = tmp_path / "checkpoints"
    async with beside(tmp_path / "one", monkeypatch) as run:
        await saved(run, folder, range(1, 3))
    keys = {"run__previous": str(tmp_path / "one")}
    async with beside(tmp_path / "two", monkeypatch, **keys) as run:
        await saved(run, folder, range(3, 4))
    return folder


async def test_a_receipt_of_a_run_before_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every checkpoint along ``run.previous``, the first run's included."""
    folder = await chain(tmp_path, monkeypatch)
    async with beside(tmp_path / "three", monkeypatch, run__previous=str(tmp_path / "two")):
        for step in (1, 2, 3):
            await expect_loaded(folder, step)
        other = json.loads(receipt_file(folder, 1).read_text())
        receipt_file(folder, 1).write_text(json.dumps({**other, "head": "c" * 64}))
        await expect_refused(folder, 1, "another sum")


async def test_a_run_that_follows_nothing_loads_nothing_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ``run.previous`` the receipt is of a stranger, and the sentence says what to give."""
    folder = await chain(tmp_path, monkeypatch)
    async with beside(tmp_path / "three", monkeypatch) as run:
        await expect_refused(folder, 3, "run.previous of this one")
        assert (await run.health())[1]["state"] == "healthy"


async def test_a_history_that_was_changed_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run before must end where the claim of the next one says."""
    folder = await chain(tmp_path, monkeypatch)
    async with beside(tmp_path / "three", monkeypatch, run__previous=str(tmp_path / "two")):
        journal = tmp_path / "one" / "journal" / "000001.jsonl"
        lines = journal.read_bytes().splitlines(keepends=True)
        journal.write_bytes(b"".join(lines[:-1]))
        await expect_refused(folder, 1, "another end than when the next run began")
        journal.write_bytes(b"".join(lines).replace(b"Article", b"article"))
        await expect_refused(folder, 1, "is no whole history|is of another history|end is missing")


async def test_a_ledger_that_is_gone_is_said_loudly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rule: the last checkpoint is in the next run's claim; any other is refused, unless the
    variable names its head, and then a warning says that it was not compared.
    """
    folder = await chain(tmp_path, monkeypatch)
    async with beside(tmp_path / "three", monkeypatch, run__previous=str(tmp_path / "two")) as run:
        shutil.rmtree(tmp_path / "one")
        await expect_loaded(folder, 3)
        await expect_loaded(folder, 2)  # the last of the first run
        await expect_refused(folder, 1, f"can be compared with no ledger: .*set {UNCOMPARED}")
        receipts = [json.loads(receipt_file(folder, step).read_text()) for step in (1, 2)]
        monkeypatch.setenv(UNCOMPARED, receipts[1]["head"])
        await expect_refused(folder, 1, "can be compared with no ledger")
        capsys.readouterr()
        monkeypatch.setenv(UNCOMPARED, receipts[0]["head"])
        await expect_loaded(folder, 1)
        assert "WARNING" in capsys.readouterr().err
        assert (await run.health())[1]["state"] == "healthy"


async def test_another_run_in_the_old_ones_place_is_not_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim in the directory must be the one that the next run's claim names."""
    folder = await chain(tmp_path, monkeypatch)
    shutil.rmtree(tmp_path / "one")
    async with served(tmp_path / "one"):
        pass
    async with beside(tmp_path / "three", monkeypatch, run__previous=str(tmp_path / "two")):
        await expect_refused(folder, 1, "no longer there")
        await expect_loaded(folder, 2)


# --- a sidecar that cannot say --------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        (404, {"error": {"code": "no_such_page", "message": "no"}}),
        (200, {"verdict": "perhaps"}),
        (200, ["known"]),
        (503, {"verdict": "known"}),
        b"<html>",
    ],
)
async def test_a_sidecar_that_does_not_compare_loads_nothing(
    answer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older version, another program, an error: each is a sentence, and nothing is loaded."""
    folder = tmp_path / "checkpoints"
    with reward_server(tmp_path) as server:
        monkeypatch.setenv(VARIABLE, str(server.endpoints))
        made = await asyncio.to_thread(
            trainer.pinned_run, str(PINNED_FILE), str(folder), sandbox_url="sidecar"
        )
        made.global_steps = 1
        await asyncio.to_thread(made._save_checkpoint)
        server.answers["/checkpoints/verify"] = answer
        await expect_refused(folder, 1, r"is not loaded: ")

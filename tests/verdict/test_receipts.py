"""Receipts: exactly what the record says, and the one thing that shows another history.

A run directory can be put back from a backup, cut back to an earlier end, or forged whole: it is
then a valid history, and only what is kept outside of it tells that it is not the run's.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from smartsearch_sidecar import errors
from smartsearch_sidecar.commands import app
from smartsearch_sidecar.ledger.file import CLAIM
from smartsearch_sidecar.ledger.receipt import CheckpointReceipt
from smartsearch_sidecar.run.json_values import encode_json
from smartsearch_sidecar.run.line import encode_line
from tests.fakes.journals import Event, Written, answered, requested, searches, write_run
from tests.fakes.process import running, start
from tests.fakes.raised import raises
from tests.fakes.served import Served, read_records, served

USAGE = {"retrieval_attempts": 2, "retrieval_responses": 2}
NODES = {
    "a": {"claim_sha256": "a" * 64, "seq": 3, "head": "b" * 64},
    "b": {"claim_sha256": "c" * 64, "seq": 9, "head": "d" * 64},
}


def checkpoint(**data: Any) -> Event:
    """A checkpoint after two searches."""
    values = {"step": 5, "path": "ckpt", "manifest_sha256": None, "occurrence": 1, "usage": USAGE}
    return "checkpoint.accepted", 1, {**values, **data}


def receipt_of(run: Written) -> dict[str, Any]:
    """The receipt of the run's last record."""
    line = json.loads(run.lines[-1])
    head = {"format": 1, "accepted": True, "number": line["number"]}
    place = {"seq": line["seq"], "head": line["sum"], "claim_sha256": run.heads[0]}
    return {**head, **line["data"], **place}


def verified(tmp_path: Path, run: Path, receipt: Any) -> tuple[int, str]:
    """The exit code of ``ledger verify --receipt``, and all it says."""
    file = tmp_path / "receipt.json"
    file.write_text(json.dumps(receipt))
    told = CliRunner().invoke(app, ["ledger", "verify", str(run), "--receipt", str(file)])
    if isinstance(told.exception, errors.UsageError):
        return 2, told.exception.message
    return told.exit_code, told.stdout


# --- exactly the record's keys and values ---------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Written:
    """A node's run whose last record accepts a checkpoint of all nodes."""
    return write_run(
        tmp_path / "run", [*searches(2), checkpoint(nodes=NODES, read_back_bytes=7, searches=2)]
    )


KEYS = (
    *("format", "accepted", "number", "step", "path", "manifest_sha256", "occurrence", "usage"),
    *("nodes", "read_back_bytes", "searches", "seq", "head", "claim_sha256"),
)


@pytest.mark.parametrize("key", KEYS)
def test_receipt_without_a_key_is_refused(tmp_path: Path, run: Written, key: str) -> None:
    """Each of them is asked for by its name."""
    receipt = receipt_of(run)
    del receipt[key]
    code, said = verified(tmp_path, run.directory, receipt)
    assert code != 0
    assert f"lacks {key}" in said or f"names no {key}" in said


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("accepted", False, "accepted"),
        ("accepted", 1, "accepted"),
        ("accepted", None, "accepted"),
        ("format", 99, "the receipt was written by a newer version (format 99"),
        ("format", True, "the receipt was written by a newer version (format True"),
        ("format", 0, "format 0, which no version has written"),
        ("number", 2, "another number"),
        ("number", 1.0, "another number"),
        ("step", True, "another step"),
        ("step", 5.0, "another step"),
        ("path", None, "another path"),
        ("manifest_sha256", "", "another manifest_sha256"),
        ("occurrence", 2, "another occurrence"),
        ("usage", {**USAGE, "retrieval_failed": 0}, "another usage"),
        ("usage", {}, "another usage"),
        ("nodes", {"a": NODES["a"]}, "another nodes"),
        ("nodes", {**NODES, "c": NODES["a"]}, "another nodes"),
        ("nodes", {"a": NODES["a"], "b": {**NODES["b"], "seq": 8}}, "another nodes"),
        ("nodes", None, "nodes"),
        ("read_back_bytes", 8, "another read_back_bytes"),
        ("signed", True, "says signed, and record 6 does not"),
    ],
)
def test_receipt_with_another_value_is_refused(
    tmp_path: Path, run: Written, key: str, value: Any, said: str
) -> None:
    """A value that is not the record's, one of another type, and a key that the record lacks."""
    code, told = verified(tmp_path, run.directory, {**receipt_of(run), key: value})
    assert code != 0
    assert said in told


def test_receipt_that_names_fewer_nodes_proves_nothing(tmp_path: Path, run: Written) -> None:
    """Which nodes there were is the accepting node's record's to say: without that directory
    another node's is no proof, whatever the receipt leaves out.
    """
    other = write_run(tmp_path / "other", searches(1), run_id="cd" * 16)
    place = {"claim_sha256": other.heads[0], "seq": 3, "head": other.heads[3]}
    receipt = {**receipt_of(run), "nodes": {"b": place}}
    code, said = verified(tmp_path, other.directory, receipt)
    assert code == 1
    assert "not proven" in said
    assert "that accepted the checkpoint" in said


async def test_what_the_gate_gives_is_what_is_asked_for(tmp_path: Path) -> None:
    """A real receipt holds, and has no key that is not held against the record."""
    async with served(tmp_path / "run") as live:
        assert (await live.execute("one"))[0] == 200
        status, receipt = await live.internal("POST", "/checkpoints", {"step": 1})
        assert status == 201
    assert set(receipt) == set(KEYS) - {"nodes"}
    code, _ = await asyncio.to_thread(verified, tmp_path, tmp_path / "run", receipt)
    assert code == 0


# --- the last receipt the trainer holds -----------------------------------------------------------

# A copy of a run is the same run: no key may name where it lies.
PLACELESS: dict[str, Any] = {"retrieval__bm25__index": "never-opened"}


async def step(run: Served, number: int) -> CheckpointReceipt:
    """A search and a checkpoint after it."""
    assert (await run.execute(f"query {number}"))[0] == 200
    status, receipt = await run.internal("POST", "/checkpoints", {"step": number})
    assert status == 201
    return CheckpointReceipt.parse(json.dumps(receipt).encode())


async def resumed(directory: Path, receipt: CheckpointReceipt | None = None) -> int:
    """Goes on with a run, which is healthy then; the status of its health."""
    async with served(
        directory, resume=True, trainer_stopped=True, receipt=receipt, **PLACELESS
    ) as live:
        return (await live.health())[0]


def cut_back(directory: Path, kept: Path) -> None:
    """Back to the orderly end before the last, with the marks of a failure removed."""
    segment = directory / "journal" / "000001.jsonl"
    lines = segment.read_bytes().splitlines(keepends=True)
    ends = [at for at, line in enumerate(lines) if b'"kind":"run.closed"' in line]
    segment.write_bytes(b"".join(lines[: ends[-2] + 1]))
    (directory / "latch.json").unlink(missing_ok=True)


def put_back(directory: Path, kept: Path) -> None:
    """The copy of the day before, in its place."""
    shutil.rmtree(directory)
    shutil.copytree(kept, directory)


def forge(directory: Path, kept: Path) -> None:
    """As many records under the same claim, each of them with a right sum."""
    records = read_records(directory)
    head, lines = records[0]["prev"], []
    for one in records:
        data = one["data"] | ({"query": "another"} if "query" in one["data"] else {})
        place = {"seq": one["seq"], "at": one["at"], "prev": head}
        line, head = encode_line(one["kind"], one["number"], encode_json(data), **place)
        lines.append(line)
    (directory / "journal" / "000001.jsonl").write_bytes(b"".join(lines))


def remove(directory: Path, kept: Path) -> None:
    """The whole directory is gone, which a resume without a receipt begins anew."""
    shutil.rmtree(directory)


def replace_by_another(directory: Path, kept: Path) -> None:
    """Another run of the same configuration lies there."""
    shutil.rmtree(directory)
    shutil.copytree(kept.with_name("other"), directory)


ACTS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "a backup put back": (put_back, "its end is missing"),
    "cut back to an earlier run.closed": (cut_back, "its end is missing"),
    "a forged history": (forge, "of another history"),
    "another run": (replace_by_another, "of another run"),
    "no directory": (remove, "its history is lost"),
}


@pytest.mark.parametrize("name", sorted(ACTS))
async def test_resume_over_another_history_is_refused(tmp_path: Path, name: str) -> None:
    """Each of them is a valid run, which goes on without the receipt, and never with it."""
    act, said = ACTS[name]
    directory, kept = tmp_path / "run", tmp_path / "kept"
    async with served(tmp_path / "other", **PLACELESS) as live:
        await step(live, 0)
    async with served(directory, **PLACELESS) as live:
        await step(live, 1)
    await asyncio.to_thread(shutil.copytree, directory, kept)
    async with served(directory, resume=True, trainer_stopped=True, **PLACELESS) as live:
        receipt = await step(live, 2)
    await asyncio.to_thread(act, directory, kept)
    before = await asyncio.to_thread(contents_of, directory)
    with pytest.raises(errors.SidecarError, match=said):
        await resumed(directory, receipt)
    assert await asyncio.to_thread(contents_of, directory) == before
    assert await resumed(directory) == 200


def contents_of(directory: Path) -> dict[str, bytes]:
    """Every file of a run that may not be there."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


async def test_resume_with_a_receipt_of_this_run(tmp_path: Path) -> None:
    """The last receipt, and an earlier one, are of the run that goes on."""
    directory = tmp_path / "run"
    async with served(directory, **PLACELESS) as live:
        receipts = [await step(live, 1), await step(live, 2)]
        assert (await live.execute("behind the last"))[0] == 200
    for receipt in receipts:
        assert await resumed(directory, receipt) == 200


@pytest.mark.process
def test_serve_takes_the_receipt(tmp_path: Path) -> None:
    """From the shell: of this run it goes on, of a shorter one it does not begin, exit 2."""
    receipt = tmp_path / "receipt.json"
    with running(tmp_path) as daemon:
        kept = tmp_path / "kept"
        shutil.copytree(daemon.directory, kept)
        answer = daemon.internal().call("POST", "/checkpoints", {"step": 1, "allow_idle": True})
        assert answer.status == 201
        receipt.write_text(json.dumps(answer.value))
        assert daemon.stop() == 0
    resume = ("--resume", "--trainer-stopped")
    with running(tmp_path, *resume, "--receipt", str(receipt)) as daemon:
        assert daemon.stop() == 0
    put_back(daemon.directory, kept)
    for words, said in (
        (("--resume", "--receipt", str(receipt)), "its end is missing"),
        (("--receipt", str(receipt)), "give --resume with it"),
        (("--resume", "--receipt", str(tmp_path / "none")), "cannot be read"),
    ):
        again = start(tmp_path, *words)
        assert again.process.wait(30) == 2
        assert said in again.log.read_text()


# --- two of one run -------------------------------------------------------------------------------


async def test_two_copies_are_not_served_at_once(tmp_path: Path) -> None:
    """On one machine the second is refused, whichever of the two it is."""
    async with served(tmp_path / "run", **PLACELESS) as live:
        await step(live, 1)
    await asyncio.to_thread(shutil.copytree, tmp_path / "run", tmp_path / "copy")
    for first, second in (("run", "copy"), ("copy", "run")):
        async with served(tmp_path / first, resume=True, trainer_stopped=True, **PLACELESS):
            with raises(errors.RUN_DIRECTORY, match="served from another directory"):
                await resumed(tmp_path / second)


# --- a newer version ------------------------------------------------------------------------------


async def test_newer_claim_is_not_resumed(tmp_path: Path) -> None:
    """Also one without a record, which no line's reading would tell."""
    directory = tmp_path / "run"
    async with served(directory, **PLACELESS):
        pass
    value = json.loads((directory / CLAIM).read_bytes())
    (directory / CLAIM).write_text(json.dumps({**value, "format": 2}))
    with pytest.raises(errors.LedgerCorrupt, match="written by a newer version"):
        await resumed(directory)
    (directory / "journal" / "000001.jsonl").unlink()
    (directory / "latch.room").unlink()
    with pytest.raises(errors.LedgerCorrupt, match="written by a newer version"):
        await resumed(directory)


def test_newer_node_s_claim_is_named_in_a_verification(tmp_path: Path) -> None:
    """A verification names the version, and judges nothing else of the run."""
    run = write_run(tmp_path / "run", [requested(1, "q"), answered(1, "q")], format=99)
    code, said = verified(tmp_path, run.directory, receipt_of_any(run))
    assert code == 1
    assert "claim.json: claim.json was written by a newer version (format 99" in said


def receipt_of_any(run: Written) -> dict[str, Any]:
    """A receipt with every key, of no record."""
    place = {"seq": 1, "head": run.heads[1], "claim_sha256": run.heads[0]}
    return {"format": 1, "accepted": True, "number": 1, **checkpoint()[2], **place}

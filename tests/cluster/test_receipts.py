"""The receipt of a run of many nodes, held against each node's ledger."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from smartsearch_sidecar.commands import app
from tests.fakes.cluster_run import cluster

NODES = ("node-0", "node-1", "node-2")


@pytest.fixture
async def receipt(tmp_path: Path) -> dict[str, Any]:
    """A run of three nodes that has ended; the receipt of its one checkpoint."""
    async with cluster(tmp_path, 3) as runs:
        for run in runs:
            assert (await run.execute("a question"))[0] == 200
        status, value = await runs[1].internal("POST", "/checkpoints", {"step": 7})
        assert status == 201
        assert (await runs[0].execute("after the checkpoint"))[0] == 200
    return dict(value)


async def verified(tmp_path: Path, receipt: dict[str, Any], *nodes: str) -> tuple[int, str]:
    """``ledger verify --receipt`` over some nodes' directories: exit code and words."""
    path = tmp_path / "receipt.json"
    path.write_text(json.dumps(receipt))
    directories = [str(tmp_path / node) for node in nodes]
    words = ["ledger", "verify", "--receipt", str(path), *directories]
    told = await asyncio.to_thread(CliRunner().invoke, app, words)
    return told.exit_code, told.output


async def test_every_nodes_ledger_proves_it(tmp_path: Path, receipt: dict[str, Any]) -> None:
    """With every node's directory, in any order, the receipt is proven."""
    code, words = await verified(tmp_path, receipt, *reversed(NODES))
    assert (code, words.count("is of this history")) == (0, 3)


async def test_a_missing_node_is_named(tmp_path: Path, receipt: dict[str, Any]) -> None:
    """Without a node's directory the receipt is not proven, and that node is named."""
    code, words = await verified(tmp_path, receipt, "node-0", "node-1")
    assert code == 1
    assert "give the run directory of node node-2" in words
    code, words = await verified(tmp_path, receipt, "node-1")
    assert "node-0, node-2" in words


@pytest.mark.parametrize(
    ("node", "key", "said"),
    [
        ("node-0", "head", "record 3 has another sum"),
        ("node-0", "seq", "has another sum"),
        ("node-1", "head", "the receipt says another nodes"),
        ("node-2", "claim_sha256", "give the run directory of node node-2"),
    ],
)
async def test_what_a_receipt_says_of_a_node_is_held(
    tmp_path: Path, receipt: dict[str, Any], node: str, key: str, said: str
) -> None:
    """A receipt that says otherwise of any node is refused, by what differs."""
    was = receipt["nodes"][node][key]
    receipt["nodes"][node][key] = was - 1 if key == "seq" else "0" * 64
    code, words = await verified(tmp_path, receipt, *NODES)
    assert code == 1
    assert said in words.replace("\n", " ")


async def test_a_nodes_end_that_is_missing_shows(tmp_path: Path, receipt: dict[str, Any]) -> None:
    """A node's journal cut before the checkpoint is whole by itself, and no proof."""
    journal = tmp_path / "node-2" / "journal" / "000001.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:2]))
    code, words = await verified(tmp_path, receipt, *NODES)
    assert code == 1
    assert "this history ends at 2" in words


async def test_a_node_with_work_in_flight_is_no_proof(
    tmp_path: Path, receipt: dict[str, Any]
) -> None:
    """A receipt that names a record at which a node was not settled is refused."""
    journal = tmp_path / "node-0" / "journal" / "000001.jsonl"
    requested = json.loads(journal.read_bytes().splitlines()[1])
    assert requested["kind"] == "retrieval.requested"
    receipt["nodes"]["node-0"] |= {"seq": 2, "head": requested["sum"]}
    code, words = await verified(tmp_path, receipt, "node-0")
    assert code == 1
    assert "at record 2 this node was not healthy" in words

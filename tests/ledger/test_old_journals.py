"""Journals of earlier versions: read, verified, shown, exported and replayed as they were then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from smartsearch_sidecar import errors
from smartsearch_sidecar.commands import app
from smartsearch_sidecar.ledger.export import export_reference
from smartsearch_sidecar.ledger.file import CLAIM
from smartsearch_sidecar.ledger.reader import History, RunReader, Scan
from smartsearch_sidecar.ledger.receipt import CheckpointReceipt
from smartsearch_sidecar.ledger.replay import replay
from smartsearch_sidecar.ledger.verify import verify
from smartsearch_sidecar.retrieval.guard import Guard
from smartsearch_sidecar.run.line import Draft, decode_line, draft, encode_line
from smartsearch_sidecar.run.record import KINDS, NativeCall, RetrievalAnswered, RetrievalRequested
from tests.fakes.journals import requested, write_run
from tests.fakes.provider import FakeProvider

JOURNALS = Path(__file__).parent.parent / "data" / "journals"
RUNS = ("searches", "native", "rewards")
RECEIPTS = ("searches", "rewards")


def old(name: str, tmp_path: Path) -> Path:
    """A copy of a run, as it lay on the disk."""
    directory = tmp_path / name
    shutil.copytree(JOURNALS / name, directory)
    (directory / "lock").touch()
    return directory


def expected(name: str) -> Any:
    """What the version that wrote the runs said of them."""
    return json.loads((JOURNALS / name).read_text(encoding="utf-8"))


def drafts(name: str) -> list[tuple[bytes, Draft]]:
    """Every line of a run, and the same record encoded anew."""
    lines = (JOURNALS / name / "journal" / "000001.jsonl").read_bytes().splitlines(keepends=True)
    return [(line, draft(decode_line(line).record)) for line in lines]


def test_every_kind_is_there() -> None:
    """The three runs hold each kind that their version wrote, and all are still read."""
    found = {item.record.kind for name in RUNS for _, item in drafts(name)}
    assert found == set(expected("kinds.json")) <= KINDS


@pytest.mark.parametrize("name", RUNS)
def test_same_bytes_are_written(name: str) -> None:
    """What is read and encoded again is the very line, key by key: no key was moved or renamed."""
    for line, item in drafts(name):
        value = json.loads(line)
        again, _ = encode_line(
            item.record.kind,
            item.record.number,
            item.data_json,
            seq=value["seq"],
            at=value["at"],
            prev=value["prev"],
        )
        assert again == line


def test_query_is_the_only_key_that_was_added() -> None:
    """The old keys of a request stand before it, in their order."""
    asked = RetrievalRequested(1, NativeCall("e", "c", "q"))
    assert list(asked.to_data()) == ["env", "call", "query"]
    assert list(RetrievalRequested(1, NativeCall("e", "c")).to_data()) == ["env", "call"]


@pytest.mark.parametrize("name", RUNS)
def test_verified_as_it_was(name: str, tmp_path: Path) -> None:
    """Counts, head, ending and cause are those that were reported then."""
    found = verify(old(name, tmp_path), documents=True)
    assert found.as_json() == expected(f"{name}.verify.json")


@pytest.mark.parametrize("name", RECEIPTS)
def test_receipts_hold(name: str, tmp_path: Path) -> None:
    """A receipt that was given then is still of the history it names."""
    receipt = CheckpointReceipt.parse((JOURNALS / f"{name}.receipt.json").read_bytes())
    assert verify(old(name, tmp_path), receipt=receipt).ok


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize(("option", "ending"), [((), "txt"), (("--json",), "jsonl")])
def test_shown_as_it_was(name: str, option: tuple[str, ...], ending: str, tmp_path: Path) -> None:
    """Each line is the one that was shown then, the queries read from the calls included."""
    directory = str(old(name, tmp_path))
    shown = CliRunner().invoke(app, ["ledger", "show", directory, *option])
    wanted = (JOURNALS / f"{name}.show.{ending}").read_text(encoding="utf-8")
    assert shown.stdout.splitlines() == wanted.splitlines()


@pytest.mark.parametrize("name", ["native", "rewards"])
def test_exported_as_it_was(name: str, tmp_path: Path) -> None:
    """The same files with the same values."""
    out = tmp_path / "out"
    export_reference(old(name, tmp_path), out)
    files = {path.name: json.loads(path.read_bytes()) for path in out.iterdir()}
    assert files == expected("export.json")[name]


async def test_replayed_as_it_was(tmp_path: Path) -> None:
    """The same queries are asked, and the same answers differ."""
    guard = Guard(FakeProvider(), top_n=5, retries=0, drop_tagged=True, watch_drift=False)
    await guard.claim_identity()
    for name, wanted in expected("replay.json").items():
        found = await replay(old(name, tmp_path), guard.search)
        assert {key.value: count for key, count in found.counts.items()} == wanted["counts"]
        assert [
            [one.number, one.query, one.outcome.value, one.detail] for one in found.differences
        ] == wanted["differences"]


# --- newer ----------------------------------------------------------------------------------------


def read(directory: Path) -> Scan:
    """Reads a run to its end, or to its first problem."""
    reader = RunReader(directory)
    scan = Scan(reader, History(reader.read(CLAIM)))
    scan.drain()
    return scan


def test_newer_claim_is_named(tmp_path: Path) -> None:
    """A run of a newer format is refused as such before anything else in it is judged."""
    run = write_run(tmp_path / "run", [requested(1, "q")], format=2)
    sentence = "claim.json was written by a newer version (format 2; this version reads up to 1)"
    problem = read(run.directory).problem
    assert problem is not None
    assert problem.reason == sentence
    assert sentence in str(verify(run.directory).problem)
    with pytest.raises(errors.LedgerCorrupt, match="was written by a newer version"):
        export_reference(run.directory, tmp_path / "out")


def test_unknown_kind_is_of_a_newer_version(tmp_path: Path) -> None:
    """A record whose kind this version does not know was written by one that does."""
    run = write_run(tmp_path / "run", [])
    line, _ = encode_line("run.unheard_of", None, b"{}", seq=2, at="2026", prev=run.heads[1])
    run.segment.write_bytes(run.lines[0] + line + line)
    problem = read(run.directory).problem
    assert problem is not None
    assert "'run.unheard_of' was written by a newer version" in problem.reason


@pytest.mark.parametrize("stated", [2, "x", None])
def test_newer_receipt_is_named(stated: Any) -> None:
    """A receipt of another format is refused before it is held against a journal."""
    value = expected("searches.receipt.json")
    value["format"] = stated
    with pytest.raises(errors.UsageError, match="the receipt was written by a newer version"):
        CheckpointReceipt.parse(json.dumps(value).encode())


def test_further_keys_are_kept_for_a_reader(tmp_path: Path) -> None:
    """A key of a later version is ignored by the fold, and shown as it was recorded."""
    kind, number, data = requested(1, "q")
    run = write_run(tmp_path / "run", [(kind, number, {**data, "extra": [1]})])
    reader = RunReader(run.directory)
    *_, last = Scan(reader, History(run.claim))
    assert last.data["extra"] == [1]
    assert last.record == RetrievalRequested(1, NativeCall(data["env"], data["call"]))


def test_an_answer_without_documents_is_named() -> None:
    """Documents that were not read, or are no list, are no documents."""
    for found in (None, b"7"):
        with pytest.raises(errors.LedgerCorrupt, match="an answer without documents"):
            RetrievalAnswered(1, found, "miss", 1).documents()

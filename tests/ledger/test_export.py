"""``ledger export``: the reference implementation's own files, from our records."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from smartsearch_sidecar import errors
from smartsearch_sidecar.commands import ledger
from smartsearch_sidecar.ledger.export import Exported, export_reference
from tests.fakes.journals import (
    answered,
    closed,
    contents,
    failed,
    latched,
    requested,
    searches,
    write_latch,
    write_run,
)
from tests.fakes.provider import FakeProvider, documents_for
from tests.fakes.served import configured, native_body, served

Documents = Callable[[str], Sequence[Mapping[str, Any]]]
# What the reference says in its own words, and we in ours.
SENTENCES = ("error", "error_type")


def exported(directory: Path) -> dict[str, Any]:
    """An exported directory as JSON values by name."""
    return {path.name: json.loads(path.read_bytes()) for path in sorted(directory.iterdir())}


def written(tmp_path: Path, events: Any, **keys: Any) -> dict[str, Any]:
    """The export of a run of these events."""
    run = write_run(tmp_path / "run", events, **keys)
    export_reference(run.directory, tmp_path / "out")
    return exported(tmp_path / "out")


# --- beside the reference -------------------------------------------------------------------------


class SyncRetriever:
    """The same documents behind the reference's own protocol."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents

    def fingerprint(self) -> dict[str, Any]:
        return dict(FakeProvider().identity_values)

    def search(self, query: str, top_n: int = 5) -> list[Mapping[str, Any]]:
        return list(self._documents(query))


def reference_files(directory: Path, documents: Documents, bodies: Sequence[Any]) -> dict[str, Any]:
    """What the reference leaves after these bodies, one after the other."""
    from agentinputlab.recipes.smartsearch_grpo_tools import SmartSearchGRPORetrievalService

    service = SmartSearchGRPORetrievalService(
        SyncRetriever(documents), output_root=directory, max_retrieval_calls=50
    )
    for body in bodies:
        with contextlib.suppress(Exception):  # its failures are in its files
            service.execute(body)  # type: ignore[no-untyped-call]
    return exported(directory)


async def our_files(tmp_path: Path, documents: Documents, bodies: Sequence[Any]) -> dict[str, Any]:
    """What our export leaves after the same bodies, in the reference profile."""
    provider = FakeProvider()
    provider.answer = documents
    directory = tmp_path / "ours"
    config = configured(directory, "reference", execute__max_calls=50)
    async with served(directory, provider=provider, config=config) as run:
        for body in bodies:
            await run.post(json.dumps(body).encode())
        await run.stop()
    await asyncio.to_thread(export_reference, directory, tmp_path / "out")
    return exported(tmp_path / "out")


def without_sentences(files: dict[str, Any]) -> dict[str, Any]:
    """Everything that has to agree."""
    return {
        name: {key: value for key, value in file.items() if key not in SENTENCES}
        for name, file in files.items()
    }


def odd_documents(query: str) -> list[dict[str, Any]]:
    """Scores of every kind, text beyond ASCII, white space to be stripped, and fewer than five."""
    if query == "none":
        return []
    return [
        {"id": " a ", "contents": '"Ä"\n\u2028line \U0001f600 ' + query + "\n", "score": 3},
        {"id": "b", "contents": "\tplain", "score": 0.1 + 0.2},
        {"id": "c", "contents": "none given"},
        {"id": "d", "contents": "nothing", "score": None},
        {"id": "e", "contents": "tiny", "score": -1e-7},
    ]


GOOD = [
    native_body("who wrote it"),
    native_body("  spaced  "),
    native_body("\u4e2d\u6587 \U0001f600 \u00e9"),
    native_body("none"),
    native_body("who wrote it"),
    {**native_body("x"), "call": "wikipedia_search(top_n=5, query='''other\\x20spelling''')"},
]


def tagged_document(query: str) -> list[dict[str, Any]]:
    """A passage that would forge a turn."""
    return [{"id": "1", "contents": "an </search> inside", "score": 1.0}]


def broken(query: str) -> list[dict[str, Any]]:
    """A provider that fails."""
    raise RuntimeError("no index")


@pytest.mark.parametrize(
    ("documents", "bodies"),
    [
        pytest.param(documents_for, GOOD, id="good"),
        pytest.param(odd_documents, GOOD, id="odd documents"),
        pytest.param(documents_for, [*GOOD[:2], native_body("a <search> tag")], id="tag in query"),
        pytest.param(tagged_document, GOOD[:1], id="tag in document"),
        pytest.param(broken, GOOD[:2], id="provider fails"),
        pytest.param(documents_for, [GOOD[0], {"env": "e", "call": "f()"}, GOOD[1]], id="call"),
        pytest.param(documents_for, [native_body(" ")], id="blank query"),
        pytest.param(documents_for, [], id="nothing asked"),
    ],
)
async def test_files_are_the_references_own(
    tmp_path: Path, documents: Documents, bodies: list[Any]
) -> None:
    """Names and every JSON value but its sentences, driven with the same bodies."""
    wanted = await asyncio.to_thread(reference_files, tmp_path / "reference", documents, bodies)
    ours = await our_files(tmp_path, documents, bodies)
    assert without_sentences(ours) == without_sentences(wanted)
    assert {name for name in ours if name.startswith("failed")} == {
        name for name, value in ours.items() if "error_type" in value
    }


async def test_bytes_are_the_references_own(tmp_path: Path) -> None:
    """Not only the values: for an answer the very bytes are the same."""
    await asyncio.to_thread(reference_files, tmp_path / "reference", odd_documents, GOOD)
    await our_files(tmp_path, odd_documents, GOOD)
    assert contents(tmp_path / "out") == contents(tmp_path / "reference")


# --- what belongs where ---------------------------------------------------------------------------


def test_failed_attempt_is_the_only_file_of_its_failure(tmp_path: Path) -> None:
    """The latch of a failed attempt writes nothing besides ``failed-…``."""
    files = written(
        tmp_path, [*searches(1), requested(2, "b"), failed(2), latched("retrieval_failed", 2)]
    )
    assert sorted(files) == [
        "claim.json",
        "failed-000002.json",
        "request-000001.json",
        "request-000002.json",
        "response-000001.json",
    ]
    assert files["failed-000002.json"] == {
        "error_type": "retrieval_failed",
        "error": "the provider failed",
        "attempt_consumed": True,
        "no_automatic_retry": True,
    }


@pytest.mark.parametrize(
    ("cause", "number", "consumed"),
    [
        ("http_busy", None, False),
        ("quota_exhausted", None, False),
        ("response_undelivered", 1, True),
        ("unclean_restart", None, False),
        ("operator", None, False),
    ],
)
def test_other_latches_are_a_rejected_run(
    tmp_path: Path, cause: str, number: int | None, consumed: bool
) -> None:
    """Whatever closed the latch, a failed run never looks like a healthy one."""
    files = written(tmp_path, [*searches(1), latched(cause, number, consumed=consumed)])
    assert files["transport-rejected.json"] == {
        "code": cause,
        "retrieval_attempt_consumed": consumed,
        "no_automatic_retry": True,
        "accept_checkpoint": False,
    }


@pytest.mark.parametrize(
    ("raw", "code"), [(b'{"cause": "operator"}', "operator"), (b"", "ledger_failed")]
)
def test_latch_the_journal_could_not_take_is_exported(
    tmp_path: Path, raw: bytes, code: str
) -> None:
    """``latch.json`` alone is enough to make it a failed run."""
    run = write_run(tmp_path / "run", searches(1))
    (run.directory / "latch.json").write_bytes(raw)
    assert export_reference(run.directory, tmp_path / "out").rejected
    assert exported(tmp_path / "out")["transport-rejected.json"]["code"] == code


def test_first_failure_is_the_transport_s_although_an_attempt_fails_later(tmp_path: Path) -> None:
    """Work that was under way when the latch closed keeps its own file beside the cause's."""
    files = written(tmp_path, [requested(1, "a"), latched("http_busy"), failed(1)])
    assert {"failed-000001.json", "transport-rejected.json"} <= files.keys()


def test_declined_queries_leave_no_file(tmp_path: Path) -> None:
    """They are counted in what the export reports."""
    data = {"reason": "empty", "env": "e", "call": "c"}
    run = write_run(tmp_path / "run", [*searches(2), ("retrieval.declined", 1, data), closed(2)])
    told = export_reference(run.directory, tmp_path / "out")
    assert told == Exported(
        requests=2, responses=2, failed=0, rejected=False, declined=1, torn=False
    )
    assert len(exported(tmp_path / "out")) == 5


def test_unsettled_search_is_a_request_alone(tmp_path: Path) -> None:
    """As a crash of the reference leaves it."""
    assert sorted(written(tmp_path, [requested(1, "a")])) == ["claim.json", "request-000001.json"]


def test_torn_line_is_left_out(tmp_path: Path) -> None:
    """Nobody was answered from it."""
    run = write_run(tmp_path / "run", searches(1))
    run.segment.write_bytes(run.segment.read_bytes() + b'{"seq":')
    assert export_reference(run.directory, tmp_path / "out").torn
    assert len(exported(tmp_path / "out")) == 3


# --- whole or not at all --------------------------------------------------------------------------


def test_existing_directory_is_refused(tmp_path: Path) -> None:
    """Nothing is mixed with what was there."""
    run = write_run(tmp_path / "run", searches(1))
    (tmp_path / "out").mkdir()
    with pytest.raises(errors.UsageError, match="exists already"):
        export_reference(run.directory, tmp_path / "out")
    with pytest.raises(errors.UsageError, match="cannot be made"):
        export_reference(run.directory, tmp_path / "missing" / "out")


def test_damaged_run_is_not_exported(tmp_path: Path) -> None:
    """What was written by then is taken away again, and the run was not touched."""
    run = write_run(tmp_path / "run", searches(3))
    data = bytearray(run.segment.read_bytes())
    data[len(b"".join(run.lines[:4])) + 20] ^= 1
    run.segment.write_bytes(bytes(data))
    before = contents(run.directory)
    with pytest.raises(errors.LedgerCorrupt, match="line 5"):
        export_reference(run.directory, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert contents(run.directory) == before


def test_export_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    """A disk that takes no more is a sentence, and no half of a directory is left."""
    run = write_run(tmp_path / "run", searches(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, before[1]))  # bytes a file: an answer is more
    try:
        with pytest.raises(errors.UsageError, match="cannot be written: File too large"):
            export_reference(run.directory, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_call_the_contract_does_not_take_is_damage(tmp_path: Path) -> None:
    """A request that this run could not have admitted is no record of it."""
    event = ("retrieval.requested", 1, {"env": "another", "call": "wikipedia_search()"})
    run = write_run(tmp_path / "run", [event])
    with pytest.raises(errors.LedgerCorrupt, match="own contract refuses a recorded request"):
        export_reference(run.directory, tmp_path / "out")


def test_search_by_another_route_is_not_exported(tmp_path: Path) -> None:
    """The reference knows no other route: a gap in its numbers would look like a lost request."""
    data = {"route": "search", "query": "q", "top_n": 3}
    run = write_run(tmp_path / "run", [("retrieval.requested", 1, data), answered(1, "q")])
    with pytest.raises(errors.UsageError, match="search 1 came by /search"):
        export_reference(run.directory, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("data", [{"route": 7}, {"route": None}, {"env": 1}, {}])
def test_request_of_no_known_shape_is_damage(tmp_path: Path, data: dict[str, Any]) -> None:
    """A sentence, not a traceback."""
    run = write_run(tmp_path / "run", [("retrieval.requested", 1, data)])
    with pytest.raises(errors.LedgerCorrupt):
        export_reference(run.directory, tmp_path / "out")


@pytest.mark.parametrize(
    "claim", [{"retrieval": None}, {"environment": None, "accepted_environment_sha256": 3}]
)
def test_claim_without_what_is_exported_is_damage(tmp_path: Path, claim: dict[str, Any]) -> None:
    """A sentence, not a traceback."""
    run = write_run(tmp_path / "run", searches(1), **claim)
    with pytest.raises(errors.LedgerCorrupt, match=r"claim\.json"):
        export_reference(run.directory, tmp_path / "out")


def test_answer_without_documents_is_damage(tmp_path: Path) -> None:
    """Its place is named."""
    bare = ("retrieval.answered", 1, {"cache": "miss", "took_us": 1})
    run = write_run(tmp_path / "run", [requested(1, "a"), bare])
    with pytest.raises(errors.LedgerCorrupt, match=r"line 3 .*cannot be exported"):
        export_reference(run.directory, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- from a shell ---------------------------------------------------------------------------------


def test_shell_exports_and_says_what(tmp_path: Path) -> None:
    """Exit 0 with counts; a damaged run is exit 1, without a directory."""
    run = write_run(
        tmp_path / "run", [*searches(1), requested(2, "b"), answered(2, "b"), latched("http_busy")]
    )
    write_latch(run, 6)
    words = ["export", "--layout", "reference", str(run.directory), str(tmp_path / "out")]
    told = CliRunner().invoke(ledger.app, words)
    assert told.exit_code == 0
    assert "2 requests, 2 responses, 0 failed, rejected" in told.stdout
    run.segment.write_bytes(b"x" + run.segment.read_bytes()[1:])
    told = CliRunner().invoke(ledger.app, ["export", str(run.directory), str(tmp_path / "again")])
    assert told.exit_code == 1
    assert "line 1" in told.stderr
    assert not (tmp_path / "again").exists()

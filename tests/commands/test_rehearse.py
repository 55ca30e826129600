"""``rehearse``: the load of N ranks, its result, and the report."""

from __future__ import annotations

import importlib
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from smartsearch_sidecar import errors
from smartsearch_sidecar.client import Client
from smartsearch_sidecar.commands import app
from smartsearch_sidecar.commands.rehearse import questions_of_corpus, questions_of_file
from smartsearch_sidecar.config import Config, load
from smartsearch_sidecar.load_test.client_worker import ANSWERED, DECLINED, Workload, questions_of
from smartsearch_sidecar.load_test.processes import (
    CallStats,
    LoadTestResult,
    reasons,
    scratch_text,
    suggestions,
)
from tests.fakes.process import ROOT, toml
from tests.fakes.served import configured, served


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scratch sidecar is a process of its own and must find the fakes."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def written(tmp_path: Path, **keys: Any) -> Path:
    values: dict[str, Any] = {
        "run.directory": str(tmp_path / "runs" / "001"),
        "retrieval.provider": "tests.fakes.plugin:instant",
    }
    values.update({key.replace("__", "."): value for key, value in keys.items()})
    path = tmp_path / "sidecar.toml"
    path.write_text(toml(values))
    (tmp_path / "runs").mkdir(exist_ok=True)
    return path


def rehearse(config: Path, *words: str) -> Result:
    return CliRunner().invoke(
        app, ["rehearse", "--config", str(config), "--ranks", "1", "--seconds", "1", *words]
    )


# --- played for real -----------------------------------------------------------------------------


@pytest.mark.process
def test_a_node_that_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call is answered, every question is one of the file's, and nothing is left behind. On a
    terminal a table of calls, slots, latency and failures stands while they call.
    """
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    asked = tmp_path / "questions.txt"
    asked.write_text("who wrote faust\n\nwhere is paris\n" + "tagged </search> one\n")
    # Thirty milliseconds a search: without them the ranks use all of the machine for a second.
    config = written(tmp_path, retrieval__provider="tests.fakes.plugin:slow")
    result = rehearse(config, "--questions", str(asked), "--json")
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    assert (value["holds"], value["reasons"], value["state"]) == (True, [], "healthy")
    assert value["outcomes"][ANSWERED] > 8
    assert value["declined"] > 0
    assert value["calls_at_once"] == 8
    assert sum(value["histogram"].values()) == value["calls"]
    assert value["questions"] == str(asked)
    assert list((tmp_path / "runs").iterdir()) == []
    for words in ("1, 8 calls at once", "a second", "in service", "p99", "declined", "failed"):
        assert words in result.stderr


@pytest.mark.process
def test_a_node_that_does_not_hold(tmp_path: Path) -> None:
    """One slot and no room: the second call closes the latch, and the room it needs is named."""
    config = written(
        tmp_path,
        retrieval__provider="tests.fakes.plugin:slow",
        retrieval__on_drift="off",  # the fake names a long question by its beginning
        execute__slots=1,
        execute__waiting_max=0,
    )
    result = rehearse(config)
    assert result.exit_code == 1
    assert "questions: passages of the corpus" in result.stdout
    assert "does not hold:" in result.stdout
    assert "429 busy" in result.stdout
    assert "the sidecar ended failed: http_busy" in result.stdout
    assert "execute.waiting_max = 7  # now 0" in result.stdout


def test_a_file_is_read_before_anything_is_started(tmp_path: Path) -> None:
    """Questions that cannot be read end it at once."""
    result = rehearse(written(tmp_path), "--questions", str(tmp_path / "no.txt"))
    assert isinstance(result.exception, errors.UsageError)
    assert "no.txt cannot be read as questions" in result.exception.message
    assert "starting" not in result.stderr


@pytest.mark.process
def test_what_cannot_start_says_why(tmp_path: Path) -> None:
    """A sidecar that does not start ends the rehearsal with its own sentence."""
    result = rehearse(written(tmp_path, retrieval__provider="tests.fakes.plugin:missing"))
    assert isinstance(result.exception, errors.UsageError)
    assert "did not start" in result.exception.message
    assert "missing" in result.exception.message
    assert "smartsearch-sidecar:" not in result.exception.message
    assert list((tmp_path / "runs").iterdir()) == []


# --- the copy and the ranks ----------------------------------------------------------------------


def test_the_copy_changes_only_what_it_must(tmp_path: Path) -> None:
    """Provider, slots, deadline and ledger are the run's; port, allowance and rewards are not."""
    config = configured(
        tmp_path,
        execute__slots=5,
        execute__deadline_seconds=4.5,
        execute__routes=("execute", "search"),
        server__port=8765,
        server__probe_host="127.0.0.1",
        server__probe_port=8766,
        run__nodes=2,
        ledger__sync=False,
    )
    path = tmp_path / "copy.toml"
    path.write_text(scratch_text(config), encoding="utf-8")
    copy = load(path, environ={})
    changed: set[str] = set()
    ours, theirs = config.public(), copy.public()
    for section, keys in ours.items():
        if isinstance(keys, dict):
            changed |= {f"{section}.{key}" for key in keys if keys[key] != theirs[section][key]}
    assert changed == {
        "execute.max_calls",
        "reward.provenance",  # its preset, for two nodes; rewards are off
        "run.directory",
        "run.nodes",
        "server.port",
        "server.probe_host",
        "server.probe_port",
    }
    text = scratch_text(config)
    assert "capability" not in text


def test_no_two_calls_ask_alike() -> None:
    """Threads of all ranks walk apart, and a lap later a question is another."""
    workload = Workload("http://127.0.0.1:1/x", "env", ["a", "b", "c"], 0, 2, 1.0)
    asked = [
        question
        for rank in (0, 1)
        for thread in range(8)
        for question in itertools.islice(questions_of(replace(workload, rank=rank), thread), 5)
    ]
    assert len(set(asked)) == len(asked)
    assert asked[0] == "a"


# --- questions -----------------------------------------------------------------------------------


def test_questions_come_as_the_trainer_has_them(tmp_path: Path) -> None:
    """Lines, JSONL and Parquet all give their questions, blank ones left out."""
    lines, rows, table = tmp_path / "a.txt", tmp_path / "b.jsonl", tmp_path / "c.parquet"
    lines.write_text("one\n \ntwo\n")
    rows.write_text('{"question": "one"}\n{"question": " "}\n{"question": "two", "x": 1}\n')
    pyarrow = importlib.import_module("pyarrow")
    importlib.import_module("pyarrow.parquet").write_table(
        pyarrow.table({"question": ["one", "", "two"], "other": [1, 2, 3]}), table
    )
    assert [questions_of_file(path) for path in (lines, rows, table)] == [["one", "two"]] * 3


@pytest.mark.parametrize("content", [b"", b'{"query": "x"}\n', b"\xff\xfe\n"])
def test_a_file_without_questions_is_refused(tmp_path: Path, content: bytes) -> None:
    """Nothing to ask, or no text, is wrong use that names the file."""
    path = tmp_path / "questions"
    path.write_bytes(content)
    with pytest.raises(errors.UsageError, match=str(path)):
        questions_of_file(path)


async def test_a_corpus_gives_questions_of_its_own(tmp_path: Path) -> None:
    """Without a file or references, pieces of passages are asked, as long as questions are."""
    import asyncio

    async with served(tmp_path / "run") as run:
        client = Client(run.endpoints.sandbox_url)
        config = configured(tmp_path)
        made = await asyncio.to_thread(questions_of_corpus, client, config)
    assert len(made) > 10
    assert {len(question.split()) for question in made} == {9}


# --- the verdict ---------------------------------------------------------------------------------


def played(config_seconds: dict[str, list[float]], **keys: Any) -> LoadTestResult:
    stats = CallStats()
    for outcome, every in config_seconds.items():
        for seconds in every:
            stats.add(outcome, seconds)
    values: dict[str, Any] = {
        "ranks": 8,
        "took_seconds": 10.0,
        "unloaded_seconds": 0.05,
        "stats": stats,
        "most_waiting": 0,
        "state": "healthy",
        "cause": None,
        "cache": {},
        "journal_bytes": 0,
    }
    return LoadTestResult(**{**values, **keys})


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return configured(tmp_path)


@pytest.mark.parametrize(
    ("outcomes", "keys", "words"),
    [
        ({ANSWERED: [0.1] * 9, DECLINED: [0.1]}, {}, None),
        ({ANSWERED: [0.1] * 9 + [6.7]}, {}, None),
        ({ANSWERED: [0.1] * 9 + [6.8]}, {}, "slowest call took 6.8 s of the 9 s"),
        ({}, {}, "no call was answered"),
        ({ANSWERED: [0.1], "429 busy": [0.1] * 2, "lost": [0.1]}, {}, "3 calls failed: 2 429 busy"),
        ({ANSWERED: [0.1], "timeout": [10.0]}, {}, "1 calls failed: 1 timeout"),
        ({ANSWERED: [0.1]}, {"state": "failed", "cause": "deadline: x"}, "failed: deadline: x"),
        ({ANSWERED: [0.1]}, {"state": "pending"}, "work did not settle"),
    ],
)
def test_a_node_holds_where_nothing_failed_and_nothing_was_close(
    config: Config, outcomes: dict[str, list[float]], keys: dict[str, Any], words: str | None
) -> None:
    """Each way not to hold has its sentence; declined queries are the policy's own affair."""
    found = reasons(played(outcomes, **keys), config)
    if words is None:
        assert found == []
    else:
        assert len(found) == 1
        assert words in found[0]


def suggested(played_: LoadTestResult, config: Config) -> dict[str, float]:
    pairs = (line.partition("#")[0].split(" = ") for line in suggestions(played_, config))
    return {key: float(value) for key, value in pairs}


def test_more_slots_are_suggested_where_they_help(config: Config) -> None:
    """A provider that serves eight as fast as one is given more; one that does not is not."""
    side_by_side = played({ANSWERED: [0.4] * 1500}, most_waiting=56)  # 150/s of the ideal 160
    assert suggested(side_by_side, config)["execute.slots"] == 16
    one_at_a_time = played({ANSWERED: [3.0] * 200}, most_waiting=56)  # 20/s: as fast as alone
    assert suggested(one_at_a_time, config)["execute.slots"] == 8
    assert suggested(played({ANSWERED: [0.1] * 1500}), config)["execute.slots"] == 8


def test_the_room_follows_the_ranks(tmp_path: Path) -> None:
    """The waiting room has a place for each call without a slot."""
    small = configured(tmp_path, execute__waiting_max=10)
    assert suggested(played({ANSWERED: [0.1]}), small)["execute.waiting_max"] == 56


@pytest.mark.parametrize(
    ("deadline", "slowest", "suggestion"), [(9, 1.0, 9), (2, 1.9, 3), (9, 8.9, 9), (12, 1.0, 9)]
)
def test_the_deadline_stays_under_the_clients_patience(
    tmp_path: Path, deadline: float, slowest: float, suggestion: float
) -> None:
    """Room above the slowest call is suggested, never ten seconds or more."""
    config = configured(tmp_path, execute__deadline_seconds=deadline)
    found = suggested(played({ANSWERED: [slowest]}), config)
    assert found["execute.deadline_seconds"] == suggestion


def test_the_histogram_counts_every_call_once() -> None:
    """Buckets run from the first used one to the last, bounds excluded."""
    stats = CallStats()
    for seconds in (0.0005, 0.001, 0.004, 9.999, 10.0):
        stats.add(ANSWERED, seconds)
    names = stats.histogram()
    assert names[0] == ("under 1 ms", 1)
    assert names[-2:] == [("under 10000 ms", 1), ("longer", 1)]
    assert sum(count for _, count in names) == 5
    assert CallStats().histogram() == []

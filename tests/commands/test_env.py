"""``env digest`` as a person types it: what a dataset holds, shown and never run."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from smartsearch_sidecar import errors
from smartsearch_sidecar.commands import app
from smartsearch_sidecar.commands import env as command
from smartsearch_sidecar.contract.execute import environment_digest
from tests.fakes.served import native_body, served

SOURCE = """import requests

def wikipedia_search(query: str, top_n: int = 5):
    url = "<search-url-placeholder>/search"
    return requests.post(url, json={'query': query, 'top_n': top_n}).json()"""
FILLED = SOURCE.replace("<search-url-placeholder>", "http://10.0.0.7:8080")
OTHER = "def get_weather(city):\n\treturn '\x1b[2J\u202e'  # \\x1b is a letter here"


def row(env: str | None) -> dict[str, Any]:
    """A row as the pinned trainer's script writes it."""
    return {
        "data_source": "re_call",
        "question": "who?",
        "extra_info": {"env": env, "func_schemas": "[]"},
    }


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return path


def parquet(path: Path, rows: list[Any]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=1500)
    return path


def run(*words: str | Path) -> tuple[int, str]:
    """Exit code and standard output; a named error is raised, for ``main`` to print."""
    result = CliRunner().invoke(app, ["env", "digest", *map(str, words)], catch_exceptions=False)
    return result.exit_code, result.stdout


def sentence(*words: str | Path) -> str:
    result = CliRunner().invoke(app, ["env", "digest", *map(str, words)])
    assert isinstance(result.exception, errors.UsageError)
    return result.exception.message


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_a_dataset_is_counted_and_shown(tmp_path: Path, write: Any) -> None:
    """Rows by environment, the search URL left out, most frequent first, and the line to copy."""
    rows = [row(OTHER), *[row(SOURCE)] * 2000, row(FILLED), row(None)]
    code, text = run(write(tmp_path / "train", rows))
    lines = text.splitlines()
    digest, other = environment_digest(SOURCE), environment_digest(OTHER)
    assert code == 0
    assert lines[:2] == [
        "2,003 rows, 2 environments",
        "1 row without one (no extra_info.env, no env)",
    ]
    assert f"{digest}  2,001 rows" in lines
    assert f"{other}  1 row" in lines
    assert lines.index(f"{digest}  2,001 rows") < lines.index(f"{other}  1 row")
    for line in SOURCE.splitlines():
        assert f"    {line}".rstrip() in lines
    assert tomllib.loads(lines[-1]) == {"accepted_environment_sha256": [digest]}


def test_the_most_frequent_comes_first(tmp_path: Path) -> None:
    """The order is by frequency, not by digest or by place in the file."""
    sources = sorted((f"source {n}" for n in range(4)), key=environment_digest)
    rows = [row(source) for times, source in enumerate(sources, 1) for _ in range(times)]
    _, text = run("--json", jsonl(tmp_path / "d.jsonl", rows))
    assert [one["rows"] for one in json.loads(text)["environments"]] == [4, 3, 2, 1]


def test_a_text_reaches_the_terminal_as_letters(tmp_path: Path) -> None:
    """Control characters of a dataset are spelled out; no part of a line is hidden."""
    long = "x" * 5000 + "# end"
    _, text = run(jsonl(tmp_path / "d.jsonl", [row(OTHER), row(long)]))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "\\treturn '\\x1b[2J\\u202e'" in text
    assert long in text


def test_nothing_is_run(tmp_path: Path) -> None:
    """Source that would write a file, and text that is not source, are only shown."""
    mark = tmp_path / "mark"
    source = f"open({str(mark)!r}, 'w')\ndef wikipedia_search("
    code, text = run(jsonl(tmp_path / "d.jsonl", [row(source)]))
    assert code == 0
    assert not mark.exists()
    assert environment_digest(source) in text.splitlines()[-1]


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_a_column_of_its_own_is_read_too(tmp_path: Path, write: Any) -> None:
    """``env`` counts where ``extra_info`` has none; where both are there the trainer's is taken."""
    rows = [
        {"env": SOURCE, "extra_info": {"env": None, "index": 1}},
        {"env": SOURCE, "extra_info": {"env": OTHER, "index": 2}},
    ]
    _, text = run("--json", write(tmp_path / "train", rows))
    value = json.loads(text)
    assert {one["text"]: one["rows"] for one in value["environments"]} == {SOURCE: 1, OTHER: 1}


def test_json_is_everything(tmp_path: Path) -> None:
    """For a script: rows, texts as they are, digests, and what the configuration takes."""
    code, text = run("--json", jsonl(tmp_path / "d.jsonl", [row(OTHER), row(SOURCE), {}]))
    digests = [environment_digest(SOURCE), environment_digest(OTHER)]
    value = json.loads(text)
    assert code == 0
    assert (value["rows"], value["rows_without"]) == (3, 1)
    assert sorted(one["sha256"] for one in value["environments"]) == sorted(digests)
    assert {one["text"]: one["defines_wikipedia_search"] for one in value["environments"]} == {
        SOURCE: True,
        OTHER: False,
    }
    assert value["accepted_environment_sha256"] == digests[:1]


def test_what_answers_nothing_is_not_in_the_line(tmp_path: Path) -> None:
    """The sidecar serves wikipedia_search alone: accepting another environment would be no use."""
    code, text = run(jsonl(tmp_path / "d.jsonl", [row(OTHER), row("# def wikipedia_search(q)")]))
    assert code == 0
    assert text.count("left out of the line below") == 2
    assert "accepted_environment_sha256" not in text


@pytest.mark.parametrize("rows", [[{"question": "q"}], [{"extra_info": "text"}], [row("")], []])
def test_none_is_the_answer_no(tmp_path: Path, rows: list[Any]) -> None:
    """Exit 1 where there is no environment to accept."""
    code, text = run(jsonl(tmp_path / "d.jsonl", rows))
    assert (code, text.splitlines()[0]) == (
        1,
        f"{len(rows)} row{'' if len(rows) == 1 else 's'}, 0 environments",
    )


def test_rows_of_a_parquet_file_without_the_columns_are_counted(tmp_path: Path) -> None:
    """A file of another dataset says how many rows were looked through."""
    code, text = run(parquet(tmp_path / "d.parquet", [{"question": "q"}] * 3))
    assert (code, text.splitlines()[1]) == (
        1,
        "3 rows without one (no extra_info.env, no env)",
    )


def test_many_environments_are_shown_on_demand(tmp_path: Path) -> None:
    """The first ones, and all with --all; the line always names every one."""
    sources = [SOURCE + f"\n# {number}" for number in range(command.SHOWN + 5)]
    dataset = jsonl(tmp_path / "d.jsonl", [row(source) for source in sources])
    _, some = run(dataset)
    _, every = run("--all", dataset)
    shown = re.compile(r"^[0-9a-f]{64}  1 row$", re.MULTILINE)
    assert len(shown.findall(some)) == command.SHOWN
    assert "... and 5 environments more" in some
    assert len(shown.findall(every)) == command.SHOWN + 5
    for text in (some, every):
        (line,) = [one for one in text.splitlines() if one.startswith("accepted_")]
        assert len(tomllib.loads(line)["accepted_environment_sha256"]) == command.SHOWN + 5


def test_one_environment_per_row_is_said_to_be_none_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dataset of thousands of tools is refused before it fills the memory."""
    monkeypatch.setattr(command, "ENVIRONMENTS_MAX", 3)
    dataset = jsonl(tmp_path / "d.jsonl", [row(f"tool {number}") for number in range(9)])
    assert sentence(dataset).startswith("more than 3 different environments in 4 rows")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"extra_info": {}}\n{"a": 1\n', "line 2 is not a JSON object in UTF-8"),
        (b"[1]\n", "line 1 is not a JSON object"),
        (b"\xff\xfe\n", "line 1 is not a JSON object in UTF-8"),
        (b"[" * 100_000 + b"\n", "line 1 is not a JSON object"),
        (b"PAR1 and no more", "damaged Parquet file"),
        (b'{"env": "\\ud800"}\n', "row 1: its environment has no UTF-8 form"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, data: bytes, words: str) -> None:
    """A sentence that names the place, and no traceback."""
    dataset = tmp_path / "d"
    dataset.write_bytes(data)
    assert words in sentence(dataset)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    """It names the file."""
    assert sentence(tmp_path / "nothing").endswith("cannot be read: No such file or directory")


def test_parquet_without_pyarrow_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra is named, and the way around it."""
    dataset = parquet(tmp_path / "d.parquet", [row(SOURCE)])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = CliRunner().invoke(app, ["env", "digest", str(dataset)])
    assert errors.NOT_AVAILABLE.matches(result.exception)
    assert "smartsearch-sidecar[parquet]" in str(result.exception)


async def test_the_line_makes_a_run_accept_the_dataset(tmp_path: Path) -> None:
    """The printed line, put into the configuration, serves the rollouts of that dataset."""
    dataset = parquet(tmp_path / "d.parquet", [row(SOURCE)] * 2)
    _, text = await asyncio.to_thread(run, dataset)
    accepted = tomllib.loads(text.splitlines()[-1])["accepted_environment_sha256"]
    async with served(tmp_path / "run", execute__accepted_environment_sha256=accepted) as sidecar:
        for source in (SOURCE, FILLED):
            body = json.dumps(native_body("Ada", environment=source)).encode()
            assert (await sidecar.post(body))[0] == 200
        body = json.dumps(native_body("Ada", environment=SOURCE + " ")).encode()
        assert (await sidecar.post(body))[0] == 400

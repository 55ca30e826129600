"""``index build`` as a person types it: words in, exit code and sentences out."""

from __future__ import annotations

import json
import os
import pty
import re
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from smartsearch_sidecar import errors
from smartsearch_sidecar.commands import app, main
from smartsearch_sidecar.commands.index import build_if_missing, stage_lines
from smartsearch_sidecar.retrieval.bm25 import manifest as manifests
from smartsearch_sidecar.retrieval.bm25.provider import verify_and_open
from tests.fakes.forked import Forked
from tests.fakes.process import environment

CORPORA = Path(__file__).parents[1] / "data" / "corpora"


def built(corpus: Path, folder: Path, *, terminal: int | None = None) -> tuple[int, str, str]:
    """Builds ``folder/index``: exit code, standard output and error; an open terminal is both
    standard input and error.
    """
    out, err = folder / "out", folder / "err"
    with out.open("wb") as said, err.open("wb") as complained, open(os.devnull, "rb") as nothing:
        ends = (nothing.fileno(), complained.fileno()) if terminal is None else (terminal, terminal)
        process = Forked(
            "smartsearch_sidecar",
            ["index", "build", str(corpus), str(folder / "index")],
            environ={**environment(), "TERM": "xterm-256color", "COLUMNS": "120"},
            folder=folder,
            streams=(ends[0], said.fileno(), ends[1]),
        )
    return process.wait(30), out.read_text(), err.read_text()


@pytest.mark.process
def test_a_build_says_what_it_made(tmp_path: Path) -> None:
    """The last lines name the passages, those left out, and both digests."""
    corpus = tmp_path / "corpus.jsonl"
    bad = json.dumps({"id": "bad", "contents": "x </result>"})
    corpus.write_text((CORPORA / "flashrag.jsonl").read_text("utf-8") + bad + "\n", "utf-8")
    code, out, err = built(corpus, tmp_path)
    manifest = manifests.read(tmp_path / "index")
    assert (code, err) == (0, "")
    first, *digests = out.splitlines()
    assert first.startswith(
        f"built {tmp_path / 'index'}: 7 passages (1 left out for protocol tags), 0.0 MiB, "
    )
    assert digests == [
        f"corpus_sha256 {manifest.corpus_sha256} (flashrag)",
        f"index_sha256  {manifest.index_sha256}",
    ]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["missing"], "there is no corpus at"),
        (["flashrag.jsonl", "--format", "beir"], "line 1: there is no _id"),
    ],
)
def test_what_cannot_be_built_is_one_sentence(
    given: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A corpus that cannot be used ends with one sentence, exit code 2, and nothing made."""
    corpus, *options = given
    words = ["index", "build", str(CORPORA / corpus), str(tmp_path / "index"), *options]
    monkeypatch.setattr(sys, "argv", ["smartsearch-sidecar", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capfd.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("smartsearch-sidecar: ")
    assert sentence in line
    assert list(tmp_path.iterdir()) == []


def test_a_named_format_is_used(tmp_path: Path) -> None:
    """Columns without a header are read when their format is named."""
    corpus = tmp_path / "corpus.tsv"
    corpus.write_text("1\tStones without mortar.\tWall\n")
    result = CliRunner().invoke(
        app, ["index", "build", str(corpus), str(tmp_path / "index"), "--format", "dpr"]
    )
    assert (result.exit_code, "1 passages" in result.output) == (0, True)
    found = verify_and_open(tmp_path / "index").search("mortar", 5)
    assert found[0]["contents"] == '"Wall"\nStones without mortar.'


def test_an_unknown_format_is_refused_with_those_known() -> None:
    """A format that does not exist is refused, and the known ones are listed."""
    result = CliRunner().invoke(app, ["index", "build", "x", "y", "--format", "parquet"])
    assert result.exit_code == 2
    for name in ("flashrag", "dpr", "beir", "vital"):
        assert name in result.output


@pytest.mark.process
def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    """On a terminal each stage shows a bar, and nothing of it stays on the screen's last lines."""
    ours, theirs = pty.openpty()
    shown = bytearray()

    def read() -> None:
        with suppress(OSError):  # how Linux reports that the other end of a terminal is closed
            while part := os.read(ours, 65_536):
                shown.extend(part)

    reader = threading.Thread(target=read)
    reader.start()
    code, out, _ = built(CORPORA / "vital.json", tmp_path, terminal=theirs)
    os.close(theirs)
    reader.join(30)
    os.close(ours)
    assert code == 0
    assert out.startswith("built ")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    for stage in ("reading the corpus", "hashing the index"):
        assert stage in text
    assert "━" in text


def test_no_terminal_gets_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal progress is a line of text every two seconds, in every stage."""
    now = 0.0
    tell = stage_lines(lambda: now)
    for tenth in range(100):
        now = tenth / 10
        stage = ["reading", "indexing", "merging", "hashing"][tenth // 25]
        total = 0 if stage == "merging" else 64 * 1024 * 1024
        tell(stage, tenth * 1024 * 1024 // 2, total)
    assert capsys.readouterr().err.splitlines() == [
        "reading the corpus 10 of 64 MiB",
        "indexing 20,971,520 of 67,108,864 passages",
        "merging into one segment",
        "hashing the index 40 of 64 MiB",
    ]


def test_the_demo_builds_once(tmp_path: Path) -> None:
    """The demo's index is built where it is missing and left alone where it is there; without a
    corpus the sentence says how to fetch one.
    """
    with pytest.raises(errors.UsageError, match="fetch it with `make setup`"):
        build_if_missing(tmp_path / "missing.json", tmp_path / "index")
    build_if_missing(CORPORA / "vital.json", tmp_path / "index")
    built = (tmp_path / "index" / manifests.NAME).read_bytes()
    build_if_missing(tmp_path / "missing.json", tmp_path / "index")
    assert (tmp_path / "index" / manifests.NAME).read_bytes() == built

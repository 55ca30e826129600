"""``canaries record`` as an operator types it: one file, with the retriever's present answers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from smartsearch_sidecar import errors
from smartsearch_sidecar.commands import app
from smartsearch_sidecar.commands.canaries import QUESTIONS_MAX
from smartsearch_sidecar.retrieval import canaries
from tests.fakes.process import toml
from tests.fakes.retriever import FakeRetriever

QUESTIONS = "Who wrote Faust?\n\n  Where is Paris?  \nWho wrote Faust?\n"


class Desk:
    """A folder with questions and a configuration, and the command over both."""

    def __init__(self, folder: Path, url: str) -> None:
        self.out = folder / "canaries.jsonl"
        self.questions = folder / "questions.txt"
        self.questions.write_text(QUESTIONS)
        self.config = folder / "sidecar.toml"
        self.configure(url=url, canaries=str(self.out))

    def configure(self, **changes: Any) -> None:
        """``[retrieval.flashrag]`` with its digests; ``None`` leaves a key out."""
        given = {"corpus_sha256": "c" * 64, "index_sha256": "1" * 64, **changes}
        keys = {f"retrieval.flashrag.{name}": value for name, value in given.items() if value}
        self.config.write_text(toml({"retrieval.provider": "flashrag", **keys}))

    async def record(self) -> Any:
        """Runs the command, off the loop that serves the retriever."""
        words = ["canaries", "record", str(self.questions), str(self.out)]
        return await asyncio.to_thread(
            CliRunner().invoke, app, [*words, "--config", str(self.config)]
        )

    async def refused(self, kind: type[errors.SidecarError], words: str) -> None:
        """The command ends in one sentence, and a file at its output path stays as it is."""
        before = self.out.read_bytes() if self.out.exists() else None
        result = await self.record()
        assert type(result.exception) is kind
        assert words in result.exception.message
        assert (self.out.read_bytes() if self.out.exists() else None) == before


async def test_each_question_is_recorded_once(tmp_path: Path) -> None:
    """White space is no question, and the configuration may name the file that is to be written."""
    async with FakeRetriever() as retriever:
        desk = Desk(tmp_path, retriever.url)
        result = await desk.record()
        assert (result.exit_code, result.output) == (0, f"2 canaries written to {desk.out}\n")
        recorded = await asyncio.to_thread(canaries.load, desk.out)
        assert [(one.query, one.top_n) for one in recorded] == [
            ("Who wrote Faust?", 5),
            ("Where is Paris?", 5),
        ]
        names = [document["id"] for document in retriever.documents("Where is Paris?")]
        assert [name for name, _ in recorded[1].documents] == names
        assert json.loads(desk.out.read_bytes().splitlines()[0])["query"] == "Who wrote Faust?"


async def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    """The canaries of a run are not replaced by a slip: nothing is even asked."""
    async with FakeRetriever() as retriever:
        desk = Desk(tmp_path, retriever.url)
        desk.out.write_text("those of the run")
        await desk.refused(errors.UsageError, "exists already")
        assert retriever.calls == []


@pytest.mark.parametrize(
    ("questions", "words"),
    [
        (b"", "holds 0 questions"),
        (b" \n\n", "holds 0 questions"),
        (b"q\n" * (QUESTIONS_MAX + 1), f"holds {QUESTIONS_MAX + 1} questions"),
        (b"caf\xe9\n", "lines of UTF-8"),
        (None, "cannot be read"),
    ],
)
async def test_a_bad_questions_file_is_refused(
    tmp_path: Path, questions: bytes | None, words: str
) -> None:
    """Each refusal is one sentence about the file, before the retriever is asked."""
    async with FakeRetriever() as retriever:
        desk = Desk(tmp_path, retriever.url)
        desk.questions.unlink()
        if questions is not None:
            desk.questions.write_bytes(questions)
        await desk.refused(errors.UsageError, words)
        assert retriever.calls == []


@pytest.mark.parametrize("key", ["url", "corpus_sha256", "index_sha256"])
async def test_a_retriever_that_is_not_declared(tmp_path: Path, key: str) -> None:
    """The keys it needs are named."""
    async with FakeRetriever() as retriever:
        desk = Desk(tmp_path, retriever.url)
        desk.configure(**{"url": retriever.url, key: None})
        await desk.refused(errors.ConfigError, key)


async def test_what_defends_nothing_is_not_written(tmp_path: Path) -> None:
    """A retriever that is gone, fails, or finds nothing leaves no file behind."""
    async with FakeRetriever() as retriever:
        desk = Desk(tmp_path, retriever.url)
        await retriever.kill()
        await desk.refused(errors.ProviderTransport, "takes no connection")
        await retriever.start()
        retriever.failure = "500"
        await desk.refused(errors.ProviderTransport, "status 500")
        retriever.failure = "empty"
        await desk.refused(errors.UsageError, "query 1 is answered with no document")
        assert not desk.out.exists()

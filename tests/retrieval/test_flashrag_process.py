"""A served run in front of a retriever in a process of its own, and what may become of that one.

Each ends the run with a cause that names it, in the latch on disk as in health, and exit code 4.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from smartsearch_sidecar.client import Answered, Client
from smartsearch_sidecar.config import FlashRagSection
from smartsearch_sidecar.retrieval.flashrag.provider import FlashragProvider
from tests.fakes.process import DaemonProcess, command, running, start, toml
from tests.fakes.retriever_process import RetrieverProcess
from tests.fakes.served import ENVIRONMENT, read_records, served

pytestmark = pytest.mark.process

CORPUS, INDEX = "c" * 64, "1" * 64


def flashrag(retriever: RetrieverProcess, **keys: Any) -> dict[str, Any]:
    """The configuration of a run in front of it; keys with ``__`` for the dot."""
    return {
        "retrieval__provider": "flashrag",
        "retrieval__flashrag__url": retriever.url,
        "retrieval__flashrag__corpus_sha256": CORPUS,
        "retrieval__flashrag__index_sha256": INDEX,
        **keys,
    }


@contextmanager
def in_front(
    retriever: RetrieverProcess, tmp_path: Path, **keys: Any
) -> Iterator[tuple[DaemonProcess, Client]]:
    """``serve`` in a process of its own, whose first search was answered; and the rollout's end."""
    with running(tmp_path, **flashrag(retriever, **keys)) as daemon:
        rollout = Client(daemon.sandbox_url)
        assert rollout.execute("good", ENVIRONMENT).status == 200
        yield daemon, rollout


def code(answered: Answered) -> tuple[int, str]:
    return answered.status, answered.value["error"]["code"]


def ended_by(daemon: DaemonProcess, cause: str, *words: str) -> None:
    """Health, latch and exit code all say so."""
    health = daemon.internal().health()
    latch = json.loads((daemon.directory / "latch.json").read_bytes())
    assert health.status == 503
    for said in (health.value["cause"], latch):
        assert said["cause"] == cause
        for word in words:
            assert word in said["detail"], said["detail"]
    assert daemon.stop() == 4


def test_killed(tmp_path: Path) -> None:
    """A killed retriever takes no connection in all of the profile's tries, so the run fails."""
    with RetrieverProcess() as retriever, in_front(retriever, tmp_path) as (daemon, rollout):
        retriever.kill()
        assert code(rollout.execute("next", ENVIRONMENT)) == (502, "retrieval_failed")
        ended_by(daemon, "retrieval_failed", f"127.0.0.1:{retriever.port}", "takes no connection")


def test_killed_and_back_before_the_next_search(tmp_path: Path) -> None:
    """A restart between two searches is no failure: kept connections are opened anew."""
    with RetrieverProcess() as retriever, in_front(retriever, tmp_path) as (daemon, rollout):
        retriever.kill()
        retriever.start()
        assert rollout.execute("next", ENVIRONMENT).status == 200
        assert daemon.internal().health().status == 200
        assert daemon.stop() == 0


def test_hung(tmp_path: Path) -> None:
    """A process that takes connections and answers nothing is named by the call's own time, not by
    the rollout's deadline, although another try would still have begun before that.
    """
    keys: dict[str, Any] = {
        "retrieval__flashrag__timeout_seconds": 1.5,
        "execute__deadline_seconds": 2.8,
    }
    with (
        RetrieverProcess() as retriever,
        in_front(retriever, tmp_path, **keys) as (daemon, rollout),
    ):
        retriever.freeze()
        assert code(rollout.execute("next", ENVIRONMENT)) == (502, "retrieval_failed")
        ended_by(daemon, "retrieval_failed", "did not answer /search within 1.5 s")


def test_slow(tmp_path: Path) -> None:
    """Answers that would come, but after the rollout has left, end the run by the deadline."""
    keys: dict[str, Any] = {"execute__deadline_seconds": 1.5}
    with (
        RetrieverProcess() as retriever,
        in_front(retriever, tmp_path, **keys) as (daemon, rollout),
    ):
        retriever.turn(latency=30.0)
        assert code(rollout.execute("next", ENVIRONMENT)) == (504, "deadline")
        ended_by(daemon, "deadline", "still running at the deadline")


def test_restarted_with_other_passages(tmp_path: Path) -> None:
    """Another corpus under the same ids shows in the first document that was seen before."""
    keys: dict[str, Any] = {"retrieval__cache_mib": 0}
    with (
        RetrieverProcess() as retriever,
        in_front(retriever, tmp_path, **keys) as (daemon, rollout),
    ):
        retriever.kill()
        retriever.start(revision=2)
        assert code(rollout.execute("good", ENVIRONMENT)) == (502, "retrieval_failed")
        ended_by(daemon, "document_drift", "other contents than earlier in this run")


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ("proxy", ("answered /search with status 502",)),
        ("html", ("an HTML page", "status 200", "retrieval.flashrag.url")),
    ],
)
def test_behind_an_error_page(tmp_path: Path, failure: str, words: tuple[str, ...]) -> None:
    """A proxy's page, with its own status or with 200, is never passages."""
    with RetrieverProcess() as retriever, in_front(retriever, tmp_path) as (daemon, rollout):
        retriever.turn(failure=failure)
        assert code(rollout.execute("next", ENVIRONMENT)) == (502, "retrieval_failed")
        ended_by(daemon, "retrieval_failed", *words)
        failed = [r for r in read_records(daemon.directory) if r["kind"] == "retrieval.failed"]
        assert [r["data"]["cause"] for r in failed] == ["retrieval_failed"]


def recorded(tmp_path: Path, retriever: RetrieverProcess) -> Path:
    """Canaries, recorded by the command in a process of its own."""
    questions, out, config = (tmp_path / name for name in ("q.txt", "canaries.jsonl", "c.toml"))
    questions.write_text("Who wrote Faust?\nWhere is Paris?\n")
    values = {key.replace("__", "."): value for key, value in flashrag(retriever).items()}
    config.write_text(toml(values))
    words = ["canaries", "record", str(questions), str(out), "--config", str(config)]
    said = tmp_path / "canaries.log"
    recording = command("smartsearch_sidecar", *words, folder=tmp_path, out=said)
    assert recording.wait(30) == 0, said.read_text()
    return out


def test_another_index_is_not_served(tmp_path: Path) -> None:
    """``serve`` asks the canaries before anything else, and says which differ."""
    with RetrieverProcess() as retriever:
        canaries = recorded(tmp_path, retriever)
        keys = flashrag(retriever, retrieval__flashrag__canaries=str(canaries))
        with running(tmp_path, name="right", **keys) as daemon:
            assert daemon.stop() == 0
        retriever.turn(edition="wiki19")
        refused = start(tmp_path, name="wrong", **keys)
        assert refused.process.wait(30) == 2
        assert "2 of 2 canaries differ" in refused.log.read_text()
        assert not (refused.directory / "endpoints.json").exists()


async def test_restarted_with_another_index(tmp_path: Path) -> None:
    """Killed, and back with an index of other passages: the next round of canaries finds it, and
    no search has to.
    """
    with RetrieverProcess() as retriever:
        settings = FlashRagSection(
            url=retriever.url,
            corpus_sha256=CORPUS,
            index_sha256=INDEX,
            timeout_seconds=5.0,
            canaries=await asyncio.to_thread(recorded, tmp_path, retriever),
        )
        provider = FlashragProvider(settings)
        await provider.start()
        async with served(tmp_path / "run", provider=provider) as run:
            assert (await run.execute("good"))[0] == 200
            await asyncio.to_thread(retriever.kill)
            await asyncio.to_thread(retriever.start, edition="wiki19")
            assert (await run.health())[0] == 200  # nothing has looked yet
            assert provider._watch is not None
            await provider._watch.round()
            status, health = await run.health()
            assert (status, health["cause"]["cause"]) == (503, "identity_changed")
            assert "2 of 2 canaries differ" in health["cause"]["detail"]
            assert health["cause"]["detail"].count("missing ids") == 2
            assert (await run.execute("next"))[0] == 502
            assert await run.stop() == 4

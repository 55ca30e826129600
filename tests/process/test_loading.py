"""A daemon that loads: verification shows its progress, and every request gets an answer."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import aiohttp
import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.process.daemon import EXIT_LATCHED, Daemon
from smartsearch_sidecar.retrieval.bm25 import manifest as manifests
from smartsearch_sidecar.retrieval.bm25.build import build
from smartsearch_sidecar.retrieval.bm25.manifest import Manifest
from smartsearch_sidecar.search.service import Service
from tests.fakes.raised import raises
from tests.fakes.served import EXECUTE_CAPABILITY, configured, native_body
from tests.fakes.until import until

PASSAGES = 2_000


class Held:
    """Progress that stops the verifying thread in its middle until it is let go."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []
        self.go = threading.Event()

    @property
    def in_the_middle(self) -> bool:
        return bool(self.told) and 0 < self.told[-1][0] < self.told[-1][1]

    def __call__(self, done: int, total: int) -> None:
        self.told.append((done, total))
        if self.in_the_middle:
            self.go.wait(30)


@pytest.fixture
def index(tmp_path: Path) -> tuple[Path, Manifest]:
    """An index of several files, and what it is said to be."""
    corpus, folder = tmp_path / "corpus.jsonl", tmp_path / "index"
    with corpus.open("w") as file:
        for number in range(PASSAGES):
            words = " ".join(f"w{number * step % 9973}" for step in range(1, 9))
            file.write(f'{{"id": "{number}", "contents": "Title {number}\\n{words}"}}\n')
    build(corpus, folder)
    return folder, manifests.read(folder)


@pytest.fixture
def damaged(index: tuple[Path, Manifest]) -> tuple[Path, str]:
    """The same with one bit turned, and the file it is in."""
    folder, manifest = index
    name, facts = max(manifest.files.items(), key=lambda item: item[1].bytes)
    with (folder / name).open("r+b") as file:
        file.seek(facts.bytes - 1)
        last = file.read(1)
        file.seek(facts.bytes - 1)
        file.write(bytes([last[0] ^ 1]))
    return folder, name


@pytest.mark.both_loops
async def test_verifying_an_index_does_not_silence_the_daemon(
    tmp_path: Path, index: tuple[Path, Manifest]
) -> None:
    """While the bytes of an index are hashed it is alive and not ready, a rollout that comes early
    waits for its answer, and the operator is told how far it is.
    """
    folder, manifest = index
    held = Held()
    ready = asyncio.Event()
    daemon = Daemon(
        configured(tmp_path / "run", retrieval__bm25__index=str(folder)),
        progress=held,
        on_ready=lambda endpoints, service: ready.set(),
    )
    task = asyncio.create_task(daemon.run())
    async with aiohttp.ClientSession() as session:
        await until(lambda: held.in_the_middle or task.done())
        base = f"http://127.0.0.1:{daemon.port}"

        async def probe(path: str) -> int:
            async with session.get(base + path) as answer:
                return answer.status

        assert [await probe(path) for path in ("/livez", "/readyz", "/livez")] == [200, 503, 200]
        early = asyncio.create_task(
            session.post(f"{base}/{EXECUTE_CAPABILITY}/execute", json=native_body("Title 7"))
        )
        assert await probe("/livez") == 200
        assert not early.done()
        assert not ready.is_set()
        held.go.set()
        answer = await early
        assert answer.status == 200
        assert "Title 7\n" in (await answer.json())["result"]
        assert await probe("/readyz") == 200
    daemon.stop()
    assert await task == 0
    done = [pair[0] for pair in held.told]
    total = sum(facts.bytes for facts in manifest.files.values())
    assert done == sorted(done)
    assert {pair[1] for pair in held.told} == {total}
    assert done[-1] == total


async def test_an_index_found_damaged_while_it_is_verified(
    tmp_path: Path, damaged: tuple[Path, str]
) -> None:
    """The daemon that was alive ends with the sentence that names the file, and claims no run."""
    folder, name = damaged
    config = configured(tmp_path / "run", retrieval__bm25__index=str(folder))
    with raises(errors.INDEX_UNUSABLE, match=name):
        await Daemon(config).run()
    assert not await asyncio.to_thread((tmp_path / "run" / "claim.json").exists)


async def test_a_failure_while_it_loads_closes_the_latch_of_the_run_to_come(
    tmp_path: Path, index: tuple[Path, Manifest]
) -> None:
    """There is no run yet to end; the first failure is kept, and the claimed run begins latched."""
    folder, _ = index
    held = Held()
    ready: asyncio.Future[Service] = asyncio.get_running_loop().create_future()
    daemon = Daemon(
        configured(tmp_path / "run", retrieval__bm25__index=str(folder)),
        progress=held,
        on_ready=lambda endpoints, service: ready.set_result(service),
    )
    task = asyncio.create_task(daemon.run())
    await until(lambda: held.in_the_middle or task.done())
    for target in (f"/{EXECUTE_CAPABILITY}/execute", "/a-strangers/execute"):
        reader, writer = await asyncio.open_connection("127.0.0.1", daemon.port)
        writer.write(f"POST {target} HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n".encode())
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()
    assert not ready.done()
    held.go.set()
    service = await ready
    cause = service.run.state.cause
    assert cause is not None
    assert cause.cause == errors.BAD_MESSAGE.closes_as
    assert cause.detail.startswith("while loading: bytes that are not HTTP")
    daemon.stop()
    assert await task == EXIT_LATCHED

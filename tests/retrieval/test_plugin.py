"""``module:factory``: the operator's own retriever, imported from a file and run in threads."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.retrieval.plugin import THREADS, PluginProvider, open_plugin
from smartsearch_sidecar.retrieval.provider import Provider

GOOD = """
    import threading

    class Retriever:
        index = "b" * 64
        searched_in = []

        def fingerprint(self):
            return {"corpus_sha256": "a" * 64, "index_sha256": self.index, "depth": (1, 2.5, None)}

        def search(self, query, top_n=5):
            self.searched_in.append(threading.current_thread())
            return tuple({"id": f"{query}-{n}", "contents": "text"} for n in range(top_n))

    made_in = []

    def make():
        made_in.append(threading.current_thread())
        return Retriever()
"""

Write = Callable[[str], Any]
Open = Callable[[str], Awaitable[PluginProvider]]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a module named ``mine`` where it can be imported; forgets it afterwards."""
    monkeypatch.syspath_prepend(tmp_path)

    def write_module(source: str) -> None:
        (tmp_path / "mine.py").write_text(textwrap.dedent(source))

    yield write_module
    sys.modules.pop("mine", None)


@pytest.fixture
async def opened() -> AsyncIterator[Open]:
    """Opens providers and closes them."""
    async with AsyncExitStack() as stack:

        async def open_one(spec: str) -> PluginProvider:
            provider = await open_plugin(spec)
            stack.push_async_callback(provider.close)
            return provider

        yield open_one


def mine() -> Any:
    return sys.modules["mine"]


@pytest.mark.both_loops
async def test_a_retriever_of_ones_own_is_a_provider(write: Write, opened: Open) -> None:
    """Any object with the reference's two methods identifies itself and searches, off the loop."""
    write(GOOD)
    provider = await opened("mine:make")
    assert isinstance(provider, Provider)
    assert (provider.name, provider.remote) == ("mine:make", True)
    assert await provider.identity() == {
        "corpus_sha256": "a" * 64,
        "index_sha256": "b" * 64,
        "depth": [1, 2.5, None],
    }
    found = await provider.search("q", 2)
    assert found == [{"id": "q-0", "contents": "text"}, {"id": "q-1", "contents": "text"}]
    threads = {*mine().made_in, *mine().Retriever.searched_in}
    assert threading.main_thread() not in threads
    assert all(thread.daemon for thread in threads)


async def test_the_identity_is_asked_each_time(write: Write, opened: Open) -> None:
    """A fingerprint that changes is seen, so that the guard can compare it."""
    write(GOOD)
    provider = await opened("mine:make")
    mine().Retriever.index = "c" * 64
    assert (await provider.identity())["index_sha256"] == "c" * 64


async def test_searches_run_side_by_side_in_a_bounded_number_of_threads(
    write: Write, opened: Open
) -> None:
    """Eight searches are inside the object at once, and never a ninth."""
    write(
        GOOD
        + """
    class Meeting(Retriever):
        inside = most = 0
        lock = threading.Lock()
        everyone = threading.Barrier(8)

        def search(self, query, top_n=5):
            with self.lock:
                Meeting.inside += 1
                Meeting.most = max(self.most, self.inside)
            self.everyone.wait(30)
            with self.lock:
                Meeting.inside -= 1
            return []
    """
    )
    provider = await opened("mine:Meeting")
    await asyncio.gather(*(provider.search("q", 5) for _ in range(THREADS * 2)))
    assert mine().Meeting.most == THREADS == 8


async def test_a_retriever_may_say_that_its_passages_cannot_change(
    write: Write, opened: Open
) -> None:
    """Unless it says so itself, a retriever is watched for drift."""
    write(GOOD + "\n    class Local(Retriever):\n        remote = False\n")
    assert (await opened("mine:Local")).remote is False


# --- what cannot be used --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec", ["mine", "mine:", ":make", "mine:make()", "a b:c", "os.system(1):x"]
)
async def test_words_that_are_no_factory_are_refused(spec: str) -> None:
    """Anything but module:factory is refused before anything is imported."""
    with pytest.raises(errors.ConfigError, match="module:factory"):
        await open_plugin(spec)


PRINT_BOTH = '{"corpus_sha256": "a" * 64, "index_sha256": "b" * 64}'


@pytest.mark.parametrize(
    "source, said",
    [
        ("import faiss_of_nowhere", "cannot be imported (ModuleNotFoundError: No module named"),
        ("def broken(:", "cannot be imported (SyntaxError"),
        ("raise SystemExit(3)", "cannot be imported (SystemExit: 3)"),
        ("pass", "module mine has no make"),
        ("make = 7", "make is a int, not a factory"),
        ("def make(): raise RuntimeError('no index\\nline two')", "raised RuntimeError: no index"),
        ("def make(): raise SystemExit", "make() raised SystemExit"),
        ("def make(path): pass", "make() raised TypeError"),
        ("make = dict", "returned has no method fingerprint"),
        ("class make:\n    def fingerprint(self): return {}", "has no method search"),
        (
            "class make:\n    def fingerprint(self): return {}\n    async def search(self): pass",
            "search is a coroutine",
        ),
    ],
)
async def test_a_factory_that_makes_no_retriever_is_refused(
    write: Write, source: str, said: str
) -> None:
    """Import, name, call and methods: each failure is one sentence with the words of the key."""
    write(source)
    with pytest.raises(errors.ConfigError) as refused:
        await open_plugin("mine:make")
    assert refused.value.message.startswith("retrieval.provider = 'mine:make' cannot be used: ")
    assert said in refused.value.message
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    "fingerprint, said",
    [
        ("None", "a NoneType, not a mapping"),
        ("{}", "no corpus_sha256"),
        ("{'corpus_sha256': 'a' * 64, 'index_sha256': 'B' * 64}", "no index_sha256"),
        (f"{PRINT_BOTH} | {{'x': object()}}", "holds a object"),
        (f"{PRINT_BOTH} | {{'x': [float('nan')]}}", "holds a float"),
        (f"{PRINT_BOTH} | {{'x': {{1: 2}}}}", "holds a dict"),
        ("1 / 0", "raised ZeroDivisionError"),
        ("next(iter([]))", "raised StopIteration"),
    ],
)
async def test_a_fingerprint_that_names_nothing_is_refused_at_start(
    write: Write, fingerprint: str, said: str
) -> None:
    """Corpus and index must be named, in JSON values, before anything is served."""
    write(
        f"class make:\n    def fingerprint(self): return {fingerprint}\n"
        "    def search(self, query, top_n=5): return []"
    )
    with pytest.raises(errors.ConfigError) as refused:
        await open_plugin("mine:make")
    assert said in refused.value.message


# --- while it runs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raised, arrives",
    [
        ("KeyError('k')", KeyError),
        ("TimeoutError()", TimeoutError),
        ("StopIteration()", errors.ProviderFault),
        ("SystemExit(1)", errors.ProviderFault),
        ("asyncio.CancelledError()", errors.ProviderFault),
        ("concurrent.futures.CancelledError()", errors.ProviderFault),
    ],
)
async def test_what_a_search_raises_arrives_and_nothing_else_happens(
    write: Write, opened: Open, raised: str, arrives: type[Exception]
) -> None:
    """Exceptions pass as they are; those that would stop a future, a task or the loop are named."""
    write(
        "import asyncio, concurrent.futures\n"
        + textwrap.dedent(GOOD)
        + "\nclass Raising(Retriever):\n"
        + f"    def search(self, query, top_n=5): raise {raised}\n"
    )
    provider = await opened("mine:Raising")
    for _ in range(THREADS + 1):
        with pytest.raises(arrives):
            await provider.search("q", 5)


async def test_what_is_no_list_is_left_to_the_guard(write: Write, opened: Open) -> None:
    """Document checks are in one place: a string or a generator passes through as it is."""
    write(
        GOOD
        + "\n    class Text(Retriever):\n        def search(self, query, top_n=5): return 'x'\n"
    )
    provider = await opened("mine:Text")
    passed: object = await provider.search("q", 5)
    assert passed == "x"


@pytest.mark.both_loops
async def test_a_search_that_hangs_holds_its_thread_and_no_more(write: Write, opened: Open) -> None:
    """Callers may leave hung searches, queued ones are never begun, and closing does not wait."""
    write(
        GOOD
        + """
    class Hung(Retriever):
        begun = []
        go_on = threading.Event()
        full = threading.Semaphore(0)

        def search(self, query, top_n=5):
            self.begun.append(query)
            self.full.release()
            self.go_on.wait(30)
            return []
    """
    )
    provider = await opened("mine:Hung")
    hung = [asyncio.ensure_future(provider.search(f"hung {n}", 5)) for n in range(THREADS)]
    for _ in range(THREADS):
        await asyncio.to_thread(mine().Hung.full.acquire)
    queued = [asyncio.ensure_future(provider.search(f"queued {n}", 5)) for n in range(2)]
    await asyncio.sleep(0)
    for search in (hung[0], queued[0]):
        search.cancel()
    await asyncio.wait([hung[0], queued[0]])
    await provider.close()
    with pytest.raises(errors.ProviderFault, match="closed"):
        await queued[1]
    mine().Hung.go_on.set()
    assert await asyncio.gather(*hung[1:]) == [[]] * (THREADS - 1)
    assert sorted(mine().Hung.begun) == [f"hung {n}" for n in range(THREADS)]
    with pytest.raises(errors.ProviderFault, match="closed"):
        await provider.search("q", 5)


async def test_the_objects_own_close_is_called(write: Write) -> None:
    """What the object opened it may close; closing twice calls it once."""
    write(
        GOOD
        + "\n    class Closing(Retriever):\n        def close(self): made_in.append('closed')\n"
    )
    provider = await open_plugin("mine:Closing")
    await provider.close()
    await provider.close()
    assert mine().made_in == ["closed"]


@pytest.mark.process
def test_a_hung_search_does_not_hold_the_end_of_the_process(tmp_path: Path) -> None:
    """A process whose retriever never returns still ends when it is done."""
    (tmp_path / "mine.py").write_text(
        textwrap.dedent(GOOD)
        + "\nclass Never(Retriever):\n"
        + "    def search(self, query, top_n=5):\n"
        + "        print('inside', flush=True)\n"
        + "        threading.Event().wait()\n"
    )
    (tmp_path / "main.py").write_text(
        textwrap.dedent("""
            import asyncio
            from smartsearch_sidecar.retrieval.plugin import open_plugin

            async def main():
                provider = await open_plugin("mine:Never")
                try:
                    async with asyncio.timeout(0.05):
                        await provider.search("q", 5)
                except TimeoutError:
                    await provider.close()

            asyncio.run(main())
        """)
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "main.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{root}"},
        timeout=30,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "inside\n"

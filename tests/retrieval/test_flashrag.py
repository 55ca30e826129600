"""The flashrag provider against a retriever that speaks the pinned protocol over real HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from smartsearch_sidecar import errors
from smartsearch_sidecar.config import FlashRagSection, load
from smartsearch_sidecar.retrieval import canaries
from smartsearch_sidecar.retrieval.canaries import CANARY_SECONDS
from smartsearch_sidecar.retrieval.flashrag.provider import (
    ANSWER_BYTES_PER_SEARCH,
    PASSING,
    FlashragProvider,
    open_configured,
)
from smartsearch_sidecar.retrieval.provider import Provider
from tests.fakes.each import each
from tests.fakes.raised import raises
from tests.fakes.retriever import FakeRetriever
from tests.fakes.until import until

Open = Callable[..., Awaitable[FlashragProvider]]
CORPUS, INDEX = "a" * 64, "b" * 64


def provider_for(
    url: str, *, canary_seconds: float = CANARY_SECONDS, **changes: Any
) -> FlashragProvider:
    """A provider that is not started yet."""
    settings: dict[str, Any] = {
        "url": url,
        "corpus_sha256": CORPUS,
        "index_sha256": INDEX,
        "batch_max": 32,
        "timeout_seconds": 20.0,
        **changes,
    }
    return FlashragProvider(FlashRagSection(**settings), canary_seconds=canary_seconds)


@pytest.fixture
async def retriever() -> AsyncIterator[FakeRetriever]:
    async with FakeRetriever() as fake:
        yield fake


@pytest.fixture
async def opened(retriever: FakeRetriever) -> AsyncIterator[Open]:
    """Starts providers for the retriever and closes them."""
    async with AsyncExitStack() as stack:

        async def open_one(**changes: Any) -> FlashragProvider:
            provider = provider_for(retriever.url, **changes)
            stack.push_async_callback(provider.close)
            await provider.start()
            return provider

        yield open_one


Answers = list[Sequence[Mapping[str, Any]] | BaseException]


async def search_all(provider: FlashragProvider, queries: Sequence[str]) -> Answers:
    return await asyncio.gather(
        *(provider.search(query, 5) for query in queries), return_exceptions=True
    )


async def search_behind(
    retriever: FakeRetriever, provider: FlashragProvider, queries: Sequence[str]
) -> Answers:
    """Searches that gather behind a call that is held, so that they travel as one."""
    before = len(retriever.calls)
    retriever.gate.clear()
    held = asyncio.ensure_future(provider.search("held", 5))
    await retriever.arrived(before + 1)
    rest = asyncio.ensure_future(search_all(provider, queries))
    await until(lambda: len(provider._gather._waiting) == len(set(queries)))
    retriever.gate.set()
    assert await held == retriever.documents("held")
    return await rest


# --- good answers ---------------------------------------------------------------------------------


@pytest.mark.both_loops
async def test_a_lone_search_is_one_plain_search(retriever: FakeRetriever, opened: Open) -> None:
    """An idle retriever gets the query at once through /search, and its answer comes as it is."""
    provider = await opened()
    assert isinstance(provider, Provider)
    assert (provider.name, provider.remote) == ("flashrag", True)
    query = 'Who wrote "Œdipe"? 誰\n'
    assert await provider.search(query, 3) == retriever.documents(query, 3)
    [call] = retriever.calls
    assert (call.route, call.queries, call.top_n) == ("search", (query,), 3)
    assert call.headers["Content-Type"] == "application/json"
    assert call.headers["Accept-Encoding"] == "identity"


async def test_the_declared_identity_is_given(opened: Open) -> None:
    """Corpus and index are what the operator declared, under the provider's name."""
    provider = await opened()
    identity = {"provider": "flashrag", "corpus_sha256": CORPUS, "index_sha256": INDEX}
    assert await provider.identity() == identity


@pytest.mark.both_loops
async def test_sixty_four_clients_share_the_calls(retriever: FakeRetriever, opened: Open) -> None:
    """At a retriever that answers one call at a time in 30 ms, 64 clients make at least four
    searches of each call, each gets its own answer, and no two calls are out at once.
    """
    retriever.latency = 0.03
    provider = await opened()

    async def client(number: int) -> None:
        for turn in range(3):
            query = f"client {number} turn {turn}"
            assert await provider.search(query, 5) == retriever.documents(query)

    await asyncio.gather(*(client(number) for number in range(64)))
    assert sum(len(call.queries) for call in retriever.calls) == 64 * 3
    assert 64 * 3 / len(retriever.calls) >= 4
    assert retriever.busiest == 1
    assert max(len(call.queries) for call in retriever.calls) == 32


async def test_identical_concurrent_searches_are_asked_once(
    retriever: FakeRetriever, opened: Open
) -> None:
    """64 clients with eight questions cost one call of eight queries, and every one is answered."""
    retriever.latency = 0.03
    provider = await opened()
    queries = [f"question {number % 8}" for number in range(64)]
    assert await search_all(provider, queries) == [retriever.documents(q) for q in queries]
    assert set(retriever.asked.values()) == {1}
    assert retriever.shapes == [("batch_search", 8)]


async def test_searches_with_another_top_n_travel_apart(
    retriever: FakeRetriever, opened: Open
) -> None:
    """A call has one top-n; a search never gets another number of documents than it asked for."""
    provider = await opened()
    asked = [(f"q{number}", 3 + number % 2) for number in range(8)]
    answers = await asyncio.gather(*(provider.search(query, top_n) for query, top_n in asked))
    assert answers == [retriever.documents(query, top_n) for query, top_n in asked]
    assert [(call.top_n, len(call.queries)) for call in retriever.calls] == [(3, 4), (4, 4)]


async def test_searches_that_share_a_query_share_no_list(
    retriever: FakeRetriever, opened: Open
) -> None:
    """What one search does to its list does not reach its twin's."""
    provider = await opened()
    one, two = await asyncio.gather(provider.search("q", 5), provider.search("q", 5))
    assert retriever.asked == {"q": 1}
    assert one is not two


async def test_connections_are_kept(retriever: FakeRetriever, opened: Open) -> None:
    """One call after the other uses one connection."""
    provider = await opened()
    for number in range(5):
        await provider.search(f"q{number}", 5)
    assert retriever._runner is not None
    assert retriever._runner.server is not None
    assert len(retriever._runner.server.connections) == 1


# --- routes and refusals --------------------------------------------------------------------------


@pytest.mark.both_loops
async def test_without_batch_search_the_searches_go_side_by_side(
    retriever: FakeRetriever, opened: Open
) -> None:
    """A missing /batch_search is asked once in a run; then /search serves all, several at once."""
    retriever.routes.discard("batch_search")
    retriever.side_by_side = True
    provider = await opened()
    queries = [f"q{number}" for number in range(40)]
    answers = await search_behind(retriever, provider, queries)
    assert answers == [retriever.documents(query) for query in queries]
    retriever.routes.add("batch_search")
    assert await search_all(provider, queries) == answers
    assert {call.route for call in retriever.calls} == {"search"}
    assert retriever.missed == ["batch_search"]
    assert 1 < retriever.busiest <= 32


@pytest.mark.parametrize("status", [400, 422])
async def test_one_refused_query_does_not_fail_the_others(
    retriever: FakeRetriever, opened: Open, status: int
) -> None:
    """A batch refused for two of its queries is asked in parts until they stand alone."""
    retriever.refused_status = status
    retriever.refused = {"q3", "q17"}
    provider = await opened()
    queries = [f"q{number}" for number in range(32)]
    answers = await search_behind(retriever, provider, queries)
    for query, answer in zip(queries, answers, strict=True):
        if query in retriever.refused:
            assert type(answer) is errors.ProviderFault
            assert f"refused the query (status {status})" in answer.message
        else:
            assert answer == retriever.documents(query)
    assert len(retriever.calls) < 1 + 32


async def test_a_lone_refused_query_is_told_apart_from_a_fault(
    retriever: FakeRetriever, opened: Open
) -> None:
    """The retriever's own word on a blank query is a refusal, named as one and not retryable."""
    provider = await opened()
    with pytest.raises(errors.ProviderFault, match="refused the query") as refused:
        await provider.search("  ", 5)
    assert not isinstance(refused.value, errors.ProviderTransport)
    assert len(retriever.calls) == 1


async def test_a_query_without_a_utf8_form_hurts_only_itself(
    retriever: FakeRetriever, opened: Open
) -> None:
    """Text that cannot be written as JSON never reaches the batch it would have travelled in."""
    provider = await opened()
    good, bad = await search_all(provider, ["good", "lone \ud800 surrogate"])
    assert good == retriever.documents("good")
    assert isinstance(bad, errors.ProviderFault)
    assert "UTF-8" in bad.message


async def test_a_url_that_is_no_retriever_says_so(retriever: FakeRetriever, opened: Open) -> None:
    """404 to /search is a fault that names the key to correct."""
    retriever.routes -= {"search", "batch_search"}
    provider = await opened()
    with pytest.raises(errors.ProviderFault, match=r"retrieval\.flashrag\.url"):
        await provider.search("q", 5)


# --- faults ---------------------------------------------------------------------------------------

FAULTS = {
    "403": "status 403",
    "501": "status 501",
    "redirect": "a redirect (307), which is not followed",
    "html": "an HTML page",
    "html_as_json": "an HTML page",
    "text": "14 bytes of text/plain that are not JSON",
    "cut": "bytes of application/json that are not JSON",
    "error_object": "an object instead of a list",
    "strings": "instead of a",
    "scores": "a list instead of a document",
    "gzip": "a compressed body",
    "not_http": "something that is not HTTP",
}
BATCH_FAULTS = FAULTS | {"short": "2 lists for 3 queries", "scores": "2 lists for 3 queries"}


@pytest.mark.parametrize(
    "queries, failure, said",
    [
        *((["a"], failure, said) for failure, said in FAULTS.items()),
        *((["a", "b", "c"], failure, said) for failure, said in BATCH_FAULTS.items()),
    ],
)
async def test_an_answer_that_is_none_is_a_fault_that_says_what_came(
    retriever: FakeRetriever, opened: Open, queries: list[str], failure: str, said: str
) -> None:
    """Each is named by kind, quotes nothing of the body, may not be retried, and passes."""
    provider = await opened()
    retriever.failure = failure
    for outcome in await search_all(provider, queries):
        assert type(outcome) is errors.ProviderFault
        assert retriever.url.removeprefix("http://") in outcome.message
        assert said in outcome.message
        assert "SECRET" not in outcome.message
    retriever.failure = None
    assert await search_all(provider, queries) == [retriever.documents(q) for q in queries]


@pytest.mark.parametrize("queries", [["a"], ["a", "b", "c"]])
@pytest.mark.parametrize("status", PASSING)
async def test_a_status_that_passes_may_be_retried(
    retriever: FakeRetriever, opened: Open, status: int, queries: list[str]
) -> None:
    """Overloaded or restarting, alone or in a batch: a transport fault that quotes nothing."""
    provider = await opened()
    retriever.failure = str(status)
    for outcome in await search_all(provider, queries):
        assert type(outcome) is errors.ProviderTransport
        assert f"status {status}" in outcome.message
        assert "SECRET" not in outcome.message
    retriever.failure = None
    assert await search_all(provider, queries) == [retriever.documents(q) for q in queries]


@pytest.mark.both_loops
@pytest.mark.parametrize("failure", ["closed", "closed_midway", "hang", "drip"])
async def test_an_exchange_that_did_not_complete_may_be_retried(
    retriever: FakeRetriever, opened: Open, failure: str
) -> None:
    """A closed connection, an answer cut off and one that never ends are transport faults."""
    provider = await opened(timeout_seconds=0.2)
    retriever.failure = failure
    for outcome in await search_all(provider, ["a", "b"]):
        assert type(outcome) is errors.ProviderTransport
        if failure in ("hang", "drip"):
            assert "within 0.2 s" in outcome.message
    retriever.failure = None
    provider._settings = provider._settings.model_copy(update={"timeout_seconds": 20.0})
    assert await provider.search("a", 5) == retriever.documents("a")


async def test_an_endless_answer_is_cut_at_its_bound(
    retriever: FakeRetriever, opened: Open
) -> None:
    """Bytes over the bound of a call are never collected."""
    provider = await opened()
    retriever.failure = "huge"
    with pytest.raises(errors.ProviderFault, match=f"more than {ANSWER_BYTES_PER_SEARCH} bytes"):
        await provider.search("a", 5)


@pytest.mark.both_loops
async def test_a_killed_retriever_is_a_transport_fault_until_it_is_back(
    retriever: FakeRetriever, opened: Open
) -> None:
    """Killed with calls out, then gone, then back: reset, refused, answered."""
    provider = await opened()
    retriever.gate.clear()
    searches = asyncio.ensure_future(search_all(provider, ["a", "b"]))
    await retriever.arrived(1)
    await retriever.kill()
    assert [type(outcome) for outcome in await searches] == [errors.ProviderTransport] * 2
    with pytest.raises(errors.ProviderTransport, match="takes no connection"):
        await provider.search("a", 5)
    await retriever.start()
    assert await provider.search("a", 5) == retriever.documents("a")


async def test_proxy_variables_are_ignored(
    retriever: FakeRetriever, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the environment says about proxies does not concern the retriever's address."""
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        trap = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, trap)
            monkeypatch.setenv(name.lower(), trap)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        provider = await opened()
        assert await provider.search("q", 5) == retriever.documents("q")


# --- cancellation and closing ---------------------------------------------------------------------


@pytest.mark.both_loops
async def test_searches_that_are_cancelled_do_not_hurt_their_batch(
    retriever: FakeRetriever, opened: Open
) -> None:
    """Searches that leave, waiting or out, take only themselves away."""
    provider = await opened()
    retriever.gate.clear()
    out = [asyncio.ensure_future(provider.search(query, 5)) for query in ("a", "b")]
    await retriever.arrived(1)
    waiting = [asyncio.ensure_future(provider.search(query, 5)) for query in ("c", "d")]
    await until(lambda: len(provider._gather._waiting) == 2)
    out[0].cancel()
    waiting[0].cancel()
    await asyncio.wait([out[0], waiting[0]])
    retriever.gate.set()
    assert await out[1] == retriever.documents("b")
    assert await waiting[1] == retriever.documents("d")
    assert retriever.shapes == [("batch_search", 2), ("search", 1)]


@pytest.mark.both_loops
async def test_a_call_that_everyone_has_left_is_broken_off(
    retriever: FakeRetriever, opened: Open
) -> None:
    """A hung call does not outlive its searches, and the next one is asked."""
    provider = await opened()
    retriever.gate.clear()
    search = asyncio.ensure_future(provider.search("a", 5))
    await retriever.arrived(1)
    search.cancel()
    await asyncio.wait([search])
    following = asyncio.ensure_future(provider.search("b", 5))
    await retriever.arrived(2)
    retriever.gate.set()
    assert await following == retriever.documents("b")


@pytest.mark.both_loops
async def test_closing_fails_what_is_out(retriever: FakeRetriever, opened: Open) -> None:
    """Nobody waits for a provider that is closed, and closing it again does nothing."""
    provider = await opened()
    retriever.gate.clear()
    searches = asyncio.ensure_future(search_all(provider, ["a", "b"]))
    await retriever.arrived(1)
    await provider.close()
    assert [type(outcome) for outcome in await searches] == [errors.ProviderFault] * 2
    with pytest.raises(errors.ProviderFault):
        await provider.search("c", 5)
    await provider.close()


# --- start and canaries ---------------------------------------------------------------------------


@pytest.fixture
async def canary_path(retriever: FakeRetriever, opened: Open, tmp_path: Path) -> Path:
    """Canaries recorded from the retriever as it is now."""
    path = tmp_path / "canaries.jsonl"
    recorded = await canaries.record(await opened(), ["who", "where", "when"], top_n=5)
    path.write_bytes(canaries.dump(recorded))
    retriever.calls.clear()
    return path


async def test_start_without_canaries_asks_whether_anybody_is_there(
    retriever: FakeRetriever, opened: Open
) -> None:
    """A dead retriever is found at start; one of the same shape without /health is not refused."""
    retriever.routes.discard("health")
    await opened()
    await retriever.kill()
    with pytest.raises(errors.ProviderTransport):
        await opened()
    retriever.failure = "html"
    retriever.routes.add("health")
    await retriever.start()
    with pytest.raises(errors.ProviderFault, match="HTML"):
        await opened()


async def test_start_asks_every_canary(
    retriever: FakeRetriever, opened: Open, canary_path: Path
) -> None:
    """Each recorded query is asked at start, and a good retriever has its identity."""
    provider = await opened(canaries=canary_path)
    assert retriever.asked == {"who": 1, "where": 1, "when": 1}
    assert (await provider.identity())["index_sha256"] == INDEX


@pytest.mark.parametrize("what", ["edition", "revision"])
async def test_start_refuses_another_index(
    retriever: FakeRetriever, opened: Open, canary_path: Path, what: str
) -> None:
    """Other ids, or other contents under the same ids, are not the recorded index."""
    setattr(retriever, what, "other" if what == "edition" else 2)
    with raises(errors.IDENTITY_CHANGED, match="3 of 3 canaries differ") as refused:
        await opened(canaries=canary_path)
    assert ("changed ids" in refused.value.message) is (what == "revision")
    assert ("missing ids" in refused.value.message) is (what == "edition")


async def test_start_may_be_called_again_after_a_transport_fault(
    retriever: FakeRetriever, canary_path: Path
) -> None:
    """A retriever that is still loading is no reason to build everything anew."""
    provider = provider_for(retriever.url, canaries=canary_path)
    await retriever.kill()
    with pytest.raises(errors.ProviderTransport):
        await provider.start()
    await retriever.start()
    await provider.start()
    assert await provider.search("q", 5) == retriever.documents("q")
    await provider.close()


async def test_a_missing_canary_file_is_a_configuration_fault(opened: Open, tmp_path: Path) -> None:
    """The file that is to defend the identity must be there."""
    with pytest.raises(errors.ConfigError, match="cannot be read"):
        await opened(canaries=tmp_path / "none.jsonl")


@pytest.mark.both_loops
async def test_a_retriever_restarted_with_another_index_is_found_out(
    retriever: FakeRetriever, opened: Open, canary_path: Path
) -> None:
    """Killed and back with another index: the timer finds it, tells it, and identity raises."""
    provider = await opened(canaries=canary_path, canary_seconds=0.005)
    told: asyncio.Queue[errors.RetrievalError] = asyncio.Queue()
    provider.on_fault = told.put_nowait
    assert (await provider.identity())["corpus_sha256"] == CORPUS
    retriever.edition = "wiki24"
    await retriever.kill()
    await retriever.start()
    while not errors.IDENTITY_CHANGED.matches(await told.get()):
        pass  # rounds that met the kill itself may have been told before
    with raises(errors.IDENTITY_CHANGED, match="canaries differ") as changed:
        await provider.identity()
    assert (
        hashlib.sha256(canaries.load(canary_path)[0].query.encode()).hexdigest()[:16]
        in changed.value.message
    )
    retriever.edition = "wiki18"
    with raises(errors.IDENTITY_CHANGED):
        await provider.identity()


@pytest.mark.both_loops
async def test_canaries_that_cannot_be_asked_are_a_fault(
    retriever: FakeRetriever, opened: Open, canary_path: Path
) -> None:
    """A retriever that stays away is told after a row of rounds; back again, identity holds."""
    provider = await opened(canaries=canary_path, canary_seconds=0.005)
    told: asyncio.Queue[errors.RetrievalError] = asyncio.Queue()
    provider.on_fault = told.put_nowait
    await retriever.kill()
    fault = await told.get()
    assert type(fault) is errors.ProviderFault
    assert "could not be asked 3 times in a row" in fault.message
    with pytest.raises(errors.ProviderFault, match="in a row"):
        await provider.identity()
    await retriever.start()
    await until(lambda: provider._watch is not None and provider._watch.fault is None)
    assert (await provider.identity())["index_sha256"] == INDEX


# --- configuration --------------------------------------------------------------------------------


@each(
    "url",
    [
        "127.0.0.1:9000",
        "ftp://host:21",
        "http://",
        "http://host:99999",
        "http://[::1",
        "http://user:password@host:9000",
        "http://host:9000/?q=1",
        "http://host:9000/#top",
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url: str) -> None:
    """No provider is made of it, and the refusal holds no credential."""
    with pytest.raises(ValidationError, match="url") as refused:
        provider_for(url)
    assert [fault["type"] for fault in refused.value.errors()] == ["value_error"]
    assert "password" not in str(refused.value)


@pytest.mark.parametrize("url", ["http://host:9000/search", "http://host:9000/v1/batch_search/"])
def test_a_url_with_a_route_is_refused(url: str) -> None:
    """The sentence names the key and what is wrong."""
    with pytest.raises(errors.ConfigError, match=r"retrieval\.flashrag\.url .* without the route"):
        provider_for(url)


@each("key", ["corpus_sha256", "index_sha256"])
@each("digest", ["", "a" * 63, "A" * 64, "wiki18"])
def test_a_digest_that_is_none_is_refused(key: str, digest: str) -> None:
    """An identity that names nothing is refused with the key."""
    with pytest.raises(ValidationError, match=key):
        FlashRagSection.model_validate({"url": "http://host", key: digest})


async def test_a_path_before_the_routes_is_kept(opened: Open, retriever: FakeRetriever) -> None:
    """A retriever behind a path is asked under it."""
    retriever.routes.add("wiki/v1/health")
    provider = provider_for(f"{retriever.url}/wiki/v1/")
    await provider.start()
    with pytest.raises(errors.ProviderFault, match="does not serve /search"):
        await provider.search("q", 5)
    await provider.close()


async def test_the_configuration_makes_a_started_provider(retriever: FakeRetriever) -> None:
    """Every key of the section arrives."""
    section: dict[str, Any] = {"url": retriever.url, "corpus_sha256": CORPUS, "index_sha256": INDEX}
    section |= {"batch_max": 2, "timeout_seconds": 5}
    config = load(
        None,
        overrides={"retrieval.provider": "flashrag"}
        | {f"retrieval.flashrag.{key}": value for key, value in section.items()},
        environ={},
    )
    provider = await open_configured(config)
    await search_all(provider, ["a", "b", "c"])
    assert max(size for _, size in retriever.shapes) == 2
    await provider.close()
    await retriever.kill()
    with pytest.raises(errors.ProviderTransport):
        await open_configured(config)

"""Cache and sharing: repeats are saved, each caller gets its own answer, nothing leaks."""

from __future__ import annotations

import asyncio

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.retrieval.guard import CachedSearch, Guard
from tests.fakes.provider import FakeProvider
from tests.fakes.raised import raises

FAR = 1e9


async def fronted(provider: FakeProvider, cache_bytes: int = 1 << 20) -> CachedSearch:
    guard = Guard(provider, top_n=5, retries=0, drop_tagged=True, watch_drift=True)
    await guard.claim_identity()
    return CachedSearch(guard, cache_bytes=cache_bytes)


async def test_repeat_is_a_hit_and_costs_no_search() -> None:
    """A frozen search asked twice is searched once."""
    provider = FakeProvider()
    retrieval = await fronted(provider)
    first, outcome = await retrieval.find("q", FAR)
    again, repeated = await retrieval.find("q", FAR)
    assert (outcome, repeated) == ("miss", "hit")
    assert first is again
    assert provider.queries == ["q"]


async def test_identical_searches_in_flight_are_shared() -> None:
    """Eight rollouts that ask alike at once cost one search."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    retrieval = await fronted(provider)
    tasks = [asyncio.create_task(retrieval.find("q", FAR)) for _ in range(8)]
    await asyncio.sleep(0)
    provider.gate.set()
    outcomes = [outcome for _, outcome in await asyncio.gather(*tasks)]
    assert sorted(outcomes) == ["miss"] + ["shared"] * 7
    assert provider.queries == ["q"]


async def test_another_number_of_passages_is_another_search() -> None:
    """The same words for three passages are neither shared with nor kept for those for five."""
    provider = FakeProvider()
    retrieval = await fronted(provider)
    five, _ = await retrieval.find("q", FAR)
    three, outcome = await retrieval.find("q", FAR, 3)
    assert (outcome, len(five.documents()), len(three.documents())) == ("miss", 5, 3)
    assert await retrieval.find("q", FAR, 3) == (three, "hit")
    assert await retrieval.find("q", FAR, 5) == (five, "hit")
    gate = provider.gate = asyncio.Event()
    tasks = [asyncio.create_task(retrieval.find("r", FAR, top_n)) for top_n in (3, 5, 3)]
    await asyncio.sleep(0)
    gate.set()
    assert [outcome for _, outcome in await asyncio.gather(*tasks)] == ["miss", "miss", "shared"]


async def test_nothing_is_shared_or_kept_without_a_cache() -> None:
    """The reference profile asks the provider for every request."""
    provider = FakeProvider()
    retrieval = await fronted(provider, 0)
    results = await asyncio.gather(*(retrieval.find("q", FAR) for _ in range(4)))
    assert [outcome for _, outcome in results] == ["miss"] * 4
    assert provider.queries == ["q"] * 4


async def test_deadline_ends_the_wait_and_drops_the_late_result() -> None:
    """A search over its deadline fails for its caller, and its late result is dropped."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    retrieval = await fronted(provider)
    with raises(errors.DEADLINE_PASSED):
        await retrieval.find("q", asyncio.get_running_loop().time() + 0.01)
    provider.gate.set()
    await retrieval.close()
    assert provider.closed


async def test_a_cancelled_caller_does_not_hurt_those_who_share() -> None:
    """One of two callers leaves; the other is answered."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    retrieval = await fronted(provider)
    leaver = asyncio.create_task(retrieval.find("q", FAR))
    stayer = asyncio.create_task(retrieval.find("q", FAR))
    await asyncio.sleep(0)
    leaver.cancel()
    provider.gate.set()
    assert (await stayer)[1] == "shared"
    with pytest.raises(asyncio.CancelledError):
        await leaver


async def test_a_failure_is_told_to_all_and_not_kept() -> None:
    """A failed search fails every caller that shares it and is not cached."""
    provider = FakeProvider()
    provider.gate, provider.fault = asyncio.Event(), ValueError("x")
    retrieval = await fronted(provider)
    tasks = [asyncio.create_task(retrieval.find("q", FAR)) for _ in range(3)]
    await asyncio.sleep(0)
    provider.gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [errors.ProviderFault] * 3
    provider.fault = None
    assert (await retrieval.find("q", FAR))[1] == "miss"


async def test_cache_is_bounded_by_bytes_and_forgets_the_oldest() -> None:
    """The cache never holds more than its bound; what is asked again stays."""
    provider = FakeProvider()
    provider.answer = lambda query: [
        {"id": "1", "contents": "x" * (100_000 if query == "huge" else 1000)}
    ]
    found, _ = await (await fronted(provider)).find("a", FAR)
    entry = found.size + 1
    retrieval = await fronted(provider, 4 * entry)

    async def outcome(query: str) -> str:
        return (await retrieval.find(query, FAR))[1]

    assert [await outcome(query) for query in "abcd"] == ["miss"] * 4
    assert await outcome("a") == "hit"
    assert await outcome("e") == "miss"
    assert {query for query, _ in retrieval.cache} == set("acde")
    assert retrieval.cache.currsize == 4 * entry
    assert [await outcome("huge") for _ in range(2)] == ["miss", "miss"]
    assert [await outcome(query) for query in "cdae"] == ["hit"] * 4
    assert await outcome("b") == "miss"

"""The guard: everything a provider does becomes documents or one named error."""

from __future__ import annotations

import asyncio
import unicodedata
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartsearch_sidecar import errors
from smartsearch_sidecar.retrieval.guard import (
    RETRY_GROWTH,
    RETRY_SECONDS,
    RETRY_SECONDS_MAX,
    Guard,
)
from smartsearch_sidecar.retrieval.passages import found_of, read_passage
from smartsearch_sidecar.run.json_values import is_text
from tests.fakes.each import each
from tests.fakes.key_table import meaning
from tests.fakes.provider import FakeProvider
from tests.fakes.raised import raises
from tests.fakes.until import until

FAR = 1e9


async def guarded(provider: FakeProvider, **keys: Any) -> Guard:
    settings: dict[str, Any] = {
        "top_n": 5,
        "retries": 0,
        "drop_tagged": True,
        "watch_drift": True,
        **keys,
    }
    guard = Guard(provider, **settings)
    await guard.claim_identity()
    return guard


def doc(**fields: Any) -> dict[str, Any]:
    return {"id": "1", "contents": "text", **fields}


class SizedOnly:
    """Has a length, and nothing else of a sequence."""

    def __len__(self) -> int:
        return 1


class Unreadable(UserDict[str, Any]):
    """A document that fails while it is read."""

    def __iter__(self) -> Iterator[str]:
        raise OSError("the page is gone")


async def test_passages_are_stripped_and_joined_by_one_blank_line() -> None:
    """The answer's text is the stripped contents joined by one blank line."""
    provider = FakeProvider()
    provider.answer = [doc(id="\ta\n", contents=" one\n"), doc(id="b", contents="two", score=0.5)]
    found = await (await guarded(provider)).search("q", FAR)
    assert found.text == "one\n\ntwo"
    assert found.documents() == [
        {"id": "a", "contents": "one", "score": None},
        {"id": "b", "contents": "two", "score": 0.5},
    ]


async def test_scores_of_a_numerical_library_are_plain_numbers() -> None:
    """A float or integer of a library's own type is recorded as the number it is."""

    class Real(float):
        pass

    class Whole(int):
        pass

    provider = FakeProvider()
    provider.answer = [doc(score=Real(0.1)), doc(id="2", score=Whole(2**64 - 1))]
    found = await (await guarded(provider)).search("q", FAR)
    assert [item["score"] for item in found.documents()] == [0.1, 2**64 - 1]


async def test_nothing_found_is_an_empty_answer() -> None:
    """No documents are an answer, not a failure."""
    provider = FakeProvider()
    provider.answer = []
    found = await (await guarded(provider)).search("q", FAR)
    assert (found.text, found.documents()) == ("", [])


@pytest.mark.parametrize(
    "answer",
    [
        lambda _query: None,
        "text",
        b"bytes",
        {"id": "1", "contents": "x"},
        7,
        [doc(id=str(n)) for n in range(6)],
        ["not a mapping"],
        [doc(title="x")],
        [{"id": "1"}],
        [{"contents": "x"}],
        [doc(id=1)],
        [doc(contents=None)],
        [doc(id="  ", title="x")],
        [doc(id="\ud800", contents="\n ")],
        [doc(score="0.5")],
        [doc(score=True)],
        [doc(score=float("nan"))],
        [doc(score=float("inf"))],
        [doc(score=2**64)],
        [doc(score=-(10**400))],
        [doc(), doc(contents="other")],
        [doc(id="1 "), doc(contents="other")],
        [doc(contents="\ud800")],
        [doc(contents="x" * (8 * 1024 * 1024 + 1))],
        lambda _query: SizedOnly(),
        [UserDict(doc()), Unreadable()],
    ],
    ids=lambda value: "made by code" if callable(value) else repr(value)[:40],
)
async def test_unusable_documents_are_named(answer: Any) -> None:
    """Each broken rule of a document is ``document_invalid``, never a crash, never an answer."""
    provider = FakeProvider()
    provider.answer = answer
    with raises(errors.DOCUMENT_INVALID) as caught:
        await (await guarded(provider)).search("q", FAR)
    assert caught.value.cause == "document_invalid"


@pytest.mark.parametrize(
    "text", ["</result>", "a <SEARCH> b", "<think>", "</Answer>", "x<|im_end|>y", "<|endoftext|>"]
)
async def test_tagged_passages_are_dropped_or_latch(text: str) -> None:
    """A passage that would forge or end a block is left out and named, or is a failure."""
    provider = FakeProvider()
    provider.answer = [doc(id="bad", contents=f"x {text} y"), doc(id="good", contents="kept")]
    found = await (await guarded(provider)).search("q", FAR)
    assert found.text == "kept"
    assert [item["id"] for item in found.dropped] == ["bad"]
    with raises(errors.DOCUMENT_INVALID):
        await (await guarded(provider, drop_tagged=False)).search("q", FAR)


@pytest.mark.parametrize(
    ("faulty", "dropped"),
    [
        ([doc(id="2", contents="\n ")], [{"id": "2", "reason": "blank"}]),
        ([doc(id=" "), doc(id="", contents="")], [{"id": "", "reason": "blank"}] * 2),
        ([doc(id="good", contents="kept ")], [{"id": "good", "reason": "repeated_id"}]),
        ([doc(id=" good", contents="kept", score=1.5)], [{"id": "good", "reason": "repeated_id"}]),
    ],
)
async def test_blank_and_repeated_passages_are_dropped_or_latch(
    faulty: list[Any], dropped: list[Any]
) -> None:
    """One unusable document of an answer is left out and named where a tagged one would be."""
    provider = FakeProvider()
    good = doc(id="good", contents="kept", score=2.5)
    provider.answer = [good, *faulty, doc(id="last", contents="too")]
    found = await (await guarded(provider)).search("q", FAR)
    assert (found.text, list(found.dropped)) == ("kept\n\ntoo", dropped)
    assert found.documents()[0] == good
    with raises(errors.DOCUMENT_INVALID):
        await (await guarded(provider, drop_tagged=False)).search("q", FAR)


@pytest.mark.parametrize("composed_first", [True, False])
async def test_drift_in_normal_form_is_named(composed_first: bool) -> None:
    """A corpus that was normalised anew has drifted, and the detail says in what."""
    provider = FakeProvider(remote=True)
    guard = await guarded(provider)
    text = "\u0152uvre d\u2019\u00e9t\u00e9"
    first, second = unicodedata.normalize("NFC", text), unicodedata.normalize("NFD", text)
    if not composed_first:
        first, second = second, first
    provider.answer = [doc(contents=first)]
    await guard.search("q", FAR)
    provider.answer = [doc(contents=second)]
    with raises(errors.DOCUMENT_DRIFT, match="another Unicode normal form of the same text"):
        await guard.search("q", FAR)
    provider.answer = [doc(contents=first + " more")]
    with raises(errors.DOCUMENT_DRIFT) as caught:
        await guard.search("q", FAR)
    assert "normal form" not in caught.value.message


@pytest.mark.parametrize("text", ["<searching>", "a < b", "<results>", "< think >", "|<>|", "<||>"])
async def test_other_angle_brackets_are_text(text: str) -> None:
    """Only the four tags and special tokens are dropped."""
    provider = FakeProvider()
    provider.answer = [doc(contents=text)]
    assert (await (await guarded(provider)).search("q", FAR)).text == text


@pytest.mark.parametrize("fault", [ValueError("x"), KeyError("x"), TimeoutError(), MemoryError()])
async def test_provider_exceptions_become_provider_faults(fault: Exception) -> None:
    """Whatever type a provider raises, the caller is told ``retrieval_failed``."""
    provider = FakeProvider()
    provider.fault = fault
    with pytest.raises(errors.ProviderFault) as caught:
        await (await guarded(provider)).search("q", FAR)
    assert (caught.value.code, caught.value.cause) == ("retrieval_failed", "retrieval_failed")


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop that never sleeps: where it would, its clock jumps."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = 0.0
        selector: Any = vars(self)["_selector"]
        look = selector.select

        def select(timeout: float | None = None) -> Any:
            ready = look(0)
            if not ready and timeout:
                self.clock += timeout
            return ready

        selector.select = select

    def time(self) -> float:
        return self.clock


class Timed(FakeProvider):
    """Notes when it is asked; each search that fails takes ``lasts`` seconds."""

    def __init__(self, fault: Exception, faults_left: int, lasts: float = 0.0) -> None:
        super().__init__(seconds=lasts)
        self.fault, self.faults_left = fault, faults_left
        self.asked: list[float] = []

    async def search(self, query: str, top_n: int) -> Sequence[Mapping[str, Any]]:
        self.asked.append(round(asyncio.get_running_loop().time(), 3))
        return await super().search(query, top_n)


def tries(provider: Timed, *, retries: int, deadline: float = FAR) -> tuple[list[float], float]:
    """When ``provider`` was asked, and when the search ended; raises what it raised."""

    async def search() -> float:
        guard = await guarded(provider, retries=retries)
        assert (await guard.search("q", deadline)).documents()
        return round(asyncio.get_running_loop().time(), 3)

    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        return provider.asked, runner.run(search())


RESET = errors.PROVIDER_TRANSPORT("reset")


def test_transport_faults_are_tried_again_after_growing_pauses() -> None:
    """A retriever that restarts gets a moment, then a longer one, up to the pause that is most."""
    asked, ended = tries(Timed(RESET, 5), retries=10)
    assert asked == [0.0, 0.25, 1.25, 3.25, 5.25, 7.25]
    assert ended == 7.25


def test_the_configuration_says_how_long_the_pauses_are() -> None:
    """They have no keys, so the key of their number names them."""
    said = meaning("retrieval.retries")
    pauses = RETRY_SECONDS, RETRY_SECONDS * RETRY_GROWTH, RETRY_SECONDS_MAX
    assert "{:g} s, {:g} s, then {:g} s".format(*pauses) in said


def test_no_more_tries_than_the_profile_says() -> None:
    """The last fault is raised at once, and a search without retries is tried once."""
    assert tries(Timed(RESET, 2), retries=2)[0] == [0.0, 0.25, 1.25]
    for retries in (0, 2):
        provider = Timed(RESET, 3)
        with pytest.raises(errors.ProviderTransport):
            tries(provider, retries=retries)
        assert provider.asked == [0.0, 0.25, 1.25][: retries + 1]


def test_only_transport_faults_are_tried_again() -> None:
    """What a provider did answer, or did itself, it would answer or do again."""
    for fault in (ValueError("no"), errors.PROVIDER_FAULT("status 500")):
        provider = Timed(fault, 1)
        with pytest.raises(errors.ProviderFault):
            tries(provider, retries=2)
        assert provider.asked == [0.0]


@each(
    ("lasts", "deadline", "asked"),
    [
        (0.0, -1.0, [0.0]),
        (0.0, 0.25, [0.0]),
        (0.0, 0.26, [0.0, 0.25]),
        (0.0, 1.25, [0.0, 0.25]),
        (8.0, 9.0, [0.0]),
        (4.0, 9.0, [0.0, 4.25]),
        (5.0, 9.0, [0.0]),
    ],
)
def test_no_try_that_the_deadline_would_cut(
    lasts: float, deadline: float, asked: list[float]
) -> None:
    """Neither a pause nor a try as long as the last one may pass it: the fault is named in time,
    and is the provider's own, not the deadline.
    """
    provider = Timed(RESET, 9, lasts)
    with pytest.raises(errors.ProviderTransport, match="reset"):
        tries(provider, retries=2, deadline=deadline)
    assert provider.asked == asked


async def test_cancelled_in_the_pause_it_asks_nothing_more() -> None:
    """Nobody waits for a search that is cancelled between two tries."""
    provider = FakeProvider()
    provider.fault = RESET
    guard = await guarded(provider, retries=2)
    search = asyncio.create_task(guard.search("q", asyncio.get_running_loop().time() + FAR))
    await until(lambda: bool(provider.queries) and not provider.under_way)
    search.cancel()
    await asyncio.wait([search])
    assert search.cancelled()
    assert len(provider.queries) == 1


async def test_identity_is_held_to_the_claim() -> None:
    """A changed, missing or added identity value is named, before and after a search."""
    provider = FakeProvider()
    guard = await guarded(provider)
    provider.after_search = lambda: provider.identity_values.update(index_sha256="2" * 64)
    with raises(errors.IDENTITY_CHANGED, match="index_sha256"):
        await guard.search("q", FAR)
    with raises(errors.IDENTITY_CHANGED):
        await guard.check_identity()
    provider.identity_fault = RuntimeError("gone")
    with pytest.raises(errors.ProviderFault):
        await guard.check_identity()


@pytest.mark.parametrize(("claimed", "now"), [(1, 2), (None, {}), ({"a": 1}, {"b": 1}), ([1], [])])
async def test_a_changed_value_of_an_identity_is_named(claimed: Any, now: Any) -> None:
    """What differs from the claimed identity is named by its key."""
    provider = FakeProvider()
    provider.identity_values["shards"] = claimed
    guard = await guarded(provider)
    provider.identity_values["shards"] = now
    with raises(errors.IDENTITY_CHANGED, match=r"changed during the run: shards"):
        await guard.check_identity()


@pytest.mark.parametrize(("claimed", "now"), [(1, True), (0, False), (1, 1.0)])
async def test_an_identity_in_other_words_is_the_same(claimed: Any, now: Any) -> None:
    """The reference compares identities by Python's equality, and so does a run of ours."""
    provider = FakeProvider()
    provider.identity_values["shards"] = claimed
    guard = await guarded(provider)
    provider.identity_values["shards"] = now
    await guard.check_identity()


@pytest.mark.parametrize("digest", [None, "", "A" * 64, "c" * 63, 7])
async def test_provider_without_digests_is_refused(digest: Any) -> None:
    """A corpus that cannot be named cannot be frozen."""
    provider = FakeProvider()
    provider.identity_values["corpus_sha256"] = digest
    with pytest.raises(errors.ConfigError, match="corpus_sha256"):
        await guarded(provider)


async def test_drift_is_seen_for_remote_providers_only() -> None:
    """An id with other contents than before is drift where the passages live elsewhere."""
    for remote, watched, drifts in [(True, True, True), (True, False, False), (False, True, False)]:
        provider = FakeProvider(remote=remote)
        guard = await guarded(provider, watch_drift=watched)
        provider.answer = [doc(contents="before")]
        await guard.search("q", FAR)
        await guard.search("q", FAR)
        provider.answer = [doc(contents="after")]
        if drifts:
            with raises(errors.DOCUMENT_DRIFT):
                await guard.search("q", FAR)
        else:
            await guard.search("q", FAR)


@given(
    st.lists(
        st.tuples(st.text(min_size=1), st.text(min_size=1)), max_size=5, unique_by=lambda pair: pair
    )
)
def test_put_together_answers_are_those_encoded_whole(pairs: list[tuple[str, str]]) -> None:
    """Passages encoded one by one give the very bytes of a record encoded at once, and its text."""
    documents = [
        {"id": name.strip(), "contents": text.strip(), "score": 0.5}
        for name, text in pairs
        if name.strip() and text.strip()
    ]
    documents = [d for d in documents if is_text(d["id"]) and is_text(d["contents"])]
    found = found_of([read_passage(item, 1) for item in documents], [])
    assert found.documents_json == orjson.dumps(documents)
    joined = "\n\n".join(str(item["contents"]) for item in documents)
    assert found.text == joined

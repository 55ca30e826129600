"""The guard: whatever a provider does becomes documents or one named error."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartsearch_sidecar import errors
from smartsearch_sidecar.contract import render_execute
from smartsearch_sidecar.retrieval.guard import Guard, canonical_digest
from smartsearch_sidecar.retrieval.passages import found_of, read_passage
from tests.fakes.provider import FakeProvider

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
    provider.answer = [doc(id=" a ", contents=" one\n"), doc(id="b", contents="two", score=0.5)]
    found = await (await guarded(provider)).search("q", FAR)
    assert found.result == "one\n\ntwo"
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
    assert (found.result, found.documents()) == ("", [])


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
        [doc(id="  ")],
        [doc(contents="\n ")],
        [doc(score="0.5")],
        [doc(score=True)],
        [doc(score=float("nan"))],
        [doc(score=float("inf"))],
        [doc(score=2**64)],
        [doc(score=-(10**400))],
        [doc(), doc()],
        [doc(id="1 "), doc()],
        [doc(contents="\ud800")],
        [doc(contents="x" * (8 * 1024 * 1024 + 1))],
        lambda _query: SizedOnly(),
        [UserDict(doc()), Unreadable()],
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_unusable_documents_are_named(answer: Any) -> None:
    """Each broken rule of a document is ``document_invalid``, never a crash, never an answer."""
    provider = FakeProvider()
    provider.answer = answer
    with pytest.raises(errors.DocumentInvalid) as caught:
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
    assert found.result == "kept"
    assert [item["id"] for item in found.dropped] == ["bad"]
    with pytest.raises(errors.DocumentInvalid):
        await (await guarded(provider, drop_tagged=False)).search("q", FAR)


@pytest.mark.parametrize("text", ["<searching>", "a < b", "<results>", "< think >", "|<>|", "<||>"])
async def test_other_angle_brackets_are_text(text: str) -> None:
    """Only the four tags and special tokens are dropped."""
    provider = FakeProvider()
    provider.answer = [doc(contents=text)]
    assert (await (await guarded(provider)).search("q", FAR)).result == text


@pytest.mark.parametrize("fault", [ValueError("x"), KeyError("x"), TimeoutError(), MemoryError()])
async def test_provider_exceptions_become_provider_faults(fault: Exception) -> None:
    """Whatever type a provider raises, the caller is told ``retrieval_failed``."""
    provider = FakeProvider()
    provider.fault = fault
    with pytest.raises(errors.ProviderFault) as caught:
        await (await guarded(provider)).search("q", FAR)
    assert (caught.value.code, caught.value.cause) == ("retrieval_failed", "retrieval_failed")


async def test_transport_faults_are_retried_within_bounds() -> None:
    """Only transport faults are tried again, and only as often as the profile says."""
    provider = FakeProvider()
    provider.fault, provider.faults_left = errors.ProviderTransport("reset"), 2
    guard = await guarded(provider, retries=2)
    assert (await guard.search("q", FAR)).documents()
    assert len(provider.queries) == 3
    provider.queries.clear()
    provider.faults_left = 3
    with pytest.raises(errors.ProviderTransport):
        await guard.search("q", FAR)
    assert len(provider.queries) == 3
    provider.queries.clear()
    provider.fault, provider.faults_left = ValueError("no"), 1
    with pytest.raises(errors.ProviderFault):
        await guard.search("q", FAR)
    assert len(provider.queries) == 1


async def test_no_retry_after_the_deadline() -> None:
    """A transport fault past the deadline is final."""
    provider = FakeProvider()
    provider.fault = errors.ProviderTransport("reset")
    with pytest.raises(errors.ProviderTransport):
        await (await guarded(provider, retries=2)).search("q", -1.0)
    assert len(provider.queries) == 1


async def test_identity_is_held_to_the_claim() -> None:
    """A changed, missing or added identity value is named, before and after a search."""
    provider = FakeProvider()
    guard = await guarded(provider)
    provider.after_search = lambda: provider.identity_values.update(index_sha256="2" * 64)
    with pytest.raises(errors.IdentityChanged, match="index_sha256"):
        await guard.search("q", FAR)
    with pytest.raises(errors.IdentityChanged):
        await guard.check_identity()
    provider.identity_fault = RuntimeError("gone")
    with pytest.raises(errors.ProviderFault):
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
            with pytest.raises(errors.DocumentDrift):
                await guard.search("q", FAR)
        else:
            await guard.search("q", FAR)


def test_canonical_digest_is_the_references() -> None:
    """Sorted keys, no spaces, UTF-8: a value worked out by hand."""
    import hashlib

    value = {"b": "é", "a": [1, None, 1e16]}
    assert (
        canonical_digest(value)
        == hashlib.sha256('{"a":[1,null,1e+16],"b":"é"}'.encode()).hexdigest()
    )


@given(
    st.lists(
        st.tuples(st.text(min_size=1), st.text(min_size=1)), max_size=5, unique_by=lambda pair: pair
    )
)
def test_put_together_answers_are_those_encoded_whole(pairs: list[tuple[str, str]]) -> None:
    """Passages escaped one by one give the very bytes of an answer and a record encoded at once."""
    documents = [
        {"id": name.strip(), "contents": text.strip(), "score": 0.5}
        for name, text in pairs
        if name.strip() and text.strip()
    ]
    documents = [d for d in documents if _encodable(d["id"]) and _encodable(d["contents"])]
    found = found_of([read_passage(item, 1) for item in documents], [])
    assert found.documents_json == orjson.dumps(documents)
    joined = "\n\n".join(str(item["contents"]) for item in documents)
    assert found.payload == render_execute(joined)
    assert found.result == joined


def _encodable(text: object) -> bool:
    try:
        str(text).encode()
    except UnicodeEncodeError:
        return False
    return True

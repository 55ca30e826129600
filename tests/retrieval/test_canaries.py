"""Canary files, recording, comparing, and the watch on a timer."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.retrieval import canaries
from smartsearch_sidecar.retrieval.canaries import (
    CANARY_SECONDS,
    Canary,
    CanaryWatch,
)
from tests.fakes.key_table import meaning
from tests.fakes.raised import raises


class Shelf:
    """A provider over a dictionary; an entry may be an exception to raise."""

    name = "shelf"
    remote = True

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.asking = 0
        self.most = 0

    async def identity(self) -> Mapping[str, Any]:
        return {"corpus_sha256": "a" * 64, "index_sha256": "b" * 64}

    async def search(self, query: str, top_n: int) -> Sequence[Mapping[str, Any]]:
        self.asked.append(query)
        self.asking += 1
        self.most = max(self.most, self.asking)
        await asyncio.sleep(0)
        self.asking -= 1
        answer = self.answers[query]
        if isinstance(answer, Exception):
            raise answer
        if callable(answer):
            answer = answer(self.most)
        return [{"id": name, "contents": text} for name, text in answer][:top_n]

    async def close(self) -> None:
        pass


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def shelf() -> Shelf:
    return Shelf({"who": [("1", "one"), ("2", "two")], "where": [("3", "drei ü")]})


# --- the file -------------------------------------------------------------------------------------


async def test_a_recorded_file_reads_back_as_it_was_recorded(tmp_path: Path) -> None:
    """What record found is what load returns, contents as digests and the query verbatim."""
    recorded = await canaries.record(shelf(), ["who", "where", "who"], top_n=5)
    assert recorded == [
        Canary("who", 5, (("1", sha("one")), ("2", sha("two")))),
        Canary("where", 5, (("3", sha("drei ü")),)),
    ]
    path = tmp_path / "canaries.jsonl"
    path.write_bytes(canaries.dump(recorded) + b"\n")
    assert canaries.load(path) == tuple(recorded)


GOOD = f'{{"id": "1", "contents_sha256": "{"a" * 64}"}}'


@pytest.mark.parametrize(
    "line, said",
    [
        ("{", "not JSON"),
        ("[]", "not an object"),
        (f'{{"query": "q", "documents": [{GOOD}]}}', "exactly query, top_n and documents"),
        (f'{{"query": " ", "top_n": 5, "documents": [{GOOD}]}}', "query"),
        (f'{{"query": "q", "top_n": 0, "documents": [{GOOD}]}}', "top_n"),
        (f'{{"query": "q", "top_n": true, "documents": [{GOOD}]}}', "top_n"),
        ('{"query": "q", "top_n": 5, "documents": []}', "1 to top_n"),
        (f'{{"query": "q", "top_n": 1, "documents": [{GOOD}, {GOOD}]}}', "1 to top_n"),
        (f'{{"query": "q", "top_n": 5, "documents": [{GOOD}, {GOOD}]}}', "repeated"),
        ('{"query": "q", "top_n": 5, "documents": [{"id": "1"}]}', "exactly id"),
        (
            '{"query": "q", "top_n": 5, "documents": [{"id": "1", "contents_sha256": "A"}]}',
            "64 lower-case",
        ),
    ],
)
def test_a_bad_line_is_named_by_number_and_reason(tmp_path: Path, line: str, said: str) -> None:
    """A file that is not one of canaries is refused with the line and what is wrong with it."""
    good = canaries.dump([Canary("q", 5, (("1", "a" * 64),))])
    path = tmp_path / "canaries.jsonl"
    path.write_bytes(good + line.encode())
    with pytest.raises(errors.ConfigError, match="line 2") as refused:
        canaries.load(path)
    assert said in refused.value.message


def test_a_file_that_is_missing_empty_or_endless_is_refused(tmp_path: Path) -> None:
    """Nothing to defend with is a configuration's fault, never an undefended run."""
    with pytest.raises(errors.ConfigError, match="cannot be read"):
        canaries.load(tmp_path / "none.jsonl")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    with pytest.raises(errors.ConfigError, match="no canary"):
        canaries.load(empty)
    endless = tmp_path / "endless.jsonl"
    with endless.open("wb") as file:
        file.truncate(canaries.FILE_BYTES_MAX + 1)
    with pytest.raises(errors.ConfigError, match="over"):
        canaries.load(endless)


# --- asking ---------------------------------------------------------------------------------------


async def test_answers_are_compared_as_sets_and_one_after_the_other() -> None:
    """Another order is no difference, and a round never has two canaries out at once."""
    provider = shelf()
    recorded = await canaries.record(provider, ["who", "where"], top_n=5)
    provider.answers["who"].reverse()
    provider.most = 0
    await canaries.check(provider, recorded)
    assert provider.most == 1


async def test_differences_name_missing_new_and_changed_ids() -> None:
    """What differs is told by id, and the canary by the digest of its query."""
    provider = shelf()
    recorded = await canaries.record(provider, ["who", "where"], top_n=5)
    provider.answers["who"] = [("1", "one, edited"), ("9", "nine")]
    with raises(errors.IDENTITY_CHANGED, match="1 of 2 canaries differ: ") as refused:
        await canaries.check(provider, recorded)
    assert refused.value.message.endswith(
        f"differ: canary {sha('who')[:16]}, missing ids '2', new ids '9', changed ids '1'"
    )


async def test_a_message_is_bounded_for_any_ids() -> None:
    """Ids come from the other end: few are shown, cut and quoted."""
    shelf = {str(n): [(f"{k}\n" + "x" * 500, "y") for k in range(50)] for n in range(9)}
    recorded = [
        Canary(query, 50, tuple(("r" + name, "a" * 64) for name, _ in documents))
        for query, documents in shelf.items()
    ]
    with raises(errors.IDENTITY_CHANGED) as refused:
        await canaries.check(Shelf(shelf), recorded)
    message = refused.value.message
    assert ("missing ids" in message, "new ids" in message) == (True, True)
    assert len(message) < 2000
    assert "\n" not in message
    assert "47 more" in message
    assert "and 6 more" in message


@pytest.mark.parametrize(
    "answer, said",
    [([], "no document"), (lambda beside: [("1", "one" if beside == 1 else "two")], "differently")],
)
async def test_record_refuses_a_query_that_would_be_no_canary(answer: object, said: str) -> None:
    """A query without documents, or whose answer depends on company, is refused by number."""
    provider = Shelf({"steady": [("7", "seven")], "bad": answer})
    with pytest.raises(errors.UsageError, match="query 2") as refused:
        await canaries.record(provider, ["steady", "bad"], top_n=5)
    assert said in refused.value.message


async def test_what_the_provider_raises_passes_untouched() -> None:
    """Neither recording nor checking turns a fault into an answer."""
    provider = Shelf({"q": errors.PROVIDER_FAULT("broken")})
    with pytest.raises(errors.ProviderFault, match="broken"):
        await canaries.record(provider, ["q"], top_n=5)
    with pytest.raises(errors.ProviderFault, match="broken"):
        await canaries.check(provider, [Canary("q", 5, (("1", "a" * 64),))])


@pytest.mark.parametrize(
    "documents", [[{"id": 1, "contents": "x"}], [{"id": "1"}], [{"id": "1", "contents": "x"}] * 2]
)
async def test_a_document_that_is_none_is_a_fault(documents: list[dict[str, Any]]) -> None:
    """A canary answered with something that cannot be compared is a fault, not a difference."""

    class Odd(Shelf):
        async def search(self, query: str, top_n: int) -> Sequence[Mapping[str, Any]]:
            return documents

    with pytest.raises(errors.ProviderFault):
        await canaries.check(Odd({}), [Canary("q", 5, (("1", "a" * 64),))])


# --- the watch ------------------------------------------------------------------------------------


async def watched(answers: dict[str, Any]) -> tuple[Shelf, CanaryWatch, list[str]]:
    """A watch over one canary, ``who``, and what it has told."""
    provider = shelf()
    recorded = await canaries.record(provider, ["who"], top_n=5)
    provider.answers.update(answers)
    told: list[str] = []
    watch = CanaryWatch(provider, recorded, 0.001, lambda fault: told.append(fault.message))
    return provider, watch, told


async def test_a_good_round_leaves_no_fault() -> None:
    """While the answers are the recorded ones there is nothing to tell."""
    provider, watch, told = await watched({})
    asked = len(provider.asked)
    await watch.round()
    assert (watch.fault, told) == (None, [])
    assert len(provider.asked) == asked + 1


async def test_a_changed_answer_is_a_fault_for_good() -> None:
    """Once the identity has changed, neither the old answers nor an outage make it whole."""
    provider, watch, told = await watched({"who": [("1", "one")]})
    await watch.round()
    assert watch.fault is not None
    assert watch.fault.failure is errors.IDENTITY_CHANGED
    assert sha("who")[:16] in watch.fault.message
    assert "missing ids '2'" in watch.fault.message
    for answer in ([("1", "one"), ("2", "two")], errors.PROVIDER_FAULT("down")):
        provider.answers["who"] = answer
        await watch.round()
        assert errors.IDENTITY_CHANGED.matches(watch.fault)
    assert told == [watch.fault.message]


async def test_only_a_row_of_unreached_rounds_is_a_fault() -> None:
    """A lost connection is no verdict; the third round in a row is, until a round succeeds."""
    provider, watch, told = await watched({"who": errors.PROVIDER_TRANSPORT("refused")})
    good, down = [("1", "one"), ("2", "two")], provider.answers["who"]
    kinds = []
    for answer in (down, down, good, down, down, down, good):
        provider.answers["who"] = answer
        await watch.round()
        kinds.append(type(watch.fault))
    assert kinds == [type(None)] * 5 + [errors.ProviderFault, type(None)]
    assert told == ["the canaries could not be asked 3 times in a row: refused"]


@pytest.mark.parametrize(
    "raised, said",
    [(errors.PROVIDER_FAULT("status 500"), "status 500"), (KeyError("oops"), "raised KeyError")],
)
async def test_any_other_failure_is_a_fault_at_once(raised: Exception, said: str) -> None:
    """What is not a lost connection is told in its first round, a broken provider included."""
    _, watch, told = await watched({"who": raised})
    await watch.round()
    assert type(watch.fault) is errors.ProviderFault
    assert said in told[0]


@pytest.mark.both_loops
async def test_the_timer_asks_again_and_again_until_the_identity_has_changed() -> None:
    """Rounds follow each other without being asked for, and end with the run's identity."""
    provider, watch, _ = await watched({})
    changed = asyncio.Event()
    watch.on_fault = lambda _: changed.set()
    before = len(provider.asked)

    def answer(_: int) -> object:
        rounds = len(provider.asked) - before
        return [("1", "one"), ("2", "two")] if rounds < 4 else [("1", "one")]

    provider.answers["who"] = answer
    watch.start()
    await changed.wait()
    assert len(provider.asked) - before == 4
    await watch.close()


def test_the_configuration_says_how_often() -> None:
    """The time between two rounds has no key, so the key of the file names it."""
    assert f"every {CANARY_SECONDS:g} s" in meaning("retrieval.flashrag.canaries")


async def test_closing_ends_the_rounds_in_the_middle_of_one() -> None:
    """A watch is closed while its canary hangs, and before it was ever started."""
    provider, watch, told = await watched({})
    asked = asyncio.Event()

    class Hung(Shelf):
        async def search(self, query: str, top_n: int) -> Sequence[Mapping[str, Any]]:
            asked.set()
            await asyncio.Event().wait()
            return []

    watch.provider = Hung({})
    await watch.close()
    watch.start()
    await asked.wait()
    await watch.close()
    assert told == []
    assert provider.asking == 0

"""The BM25 provider: words only, verified before it is opened, watched while it is served."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartsearch_sidecar import errors
from smartsearch_sidecar.retrieval.bm25 import manifest as manifests
from smartsearch_sidecar.retrieval.bm25.analysis import ANALYZER
from smartsearch_sidecar.retrieval.bm25.build import build
from smartsearch_sidecar.retrieval.bm25.provider import (
    TOP_N_MAX,
    WORDS_MAX,
    Bm25Index,
    Bm25Provider,
    verify_and_open,
)
from smartsearch_sidecar.retrieval.guard import Guard
from smartsearch_sidecar.retrieval.provider import Provider
from smartsearch_sidecar.run.json_values import canonical_digest
from tests.fakes.each import each
from tests.fakes.raised import raises

CORPUS = Path(__file__).parents[1] / "data" / "corpora" / "flashrag.jsonl"
FAR = 1e9


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of the small corpus; tests that change it copy it first."""
    out = tmp_path_factory.mktemp("bm25") / "index"
    build(CORPUS, out)
    return out


@pytest.fixture(scope="session")
def small(built: Path) -> Bm25Index:
    """The small index, open."""
    return verify_and_open(built)


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    """A copy of the small index, as its owner may write to it."""
    out = tmp_path / "index"
    shutil.copytree(built, out)
    for path in out.iterdir():
        path.chmod(0o644)
    return out


@pytest.fixture(scope="session")
def vital(vital_articles: Path, tmp_path_factory: pytest.TempPathFactory) -> Bm25Index:
    """The 10,033 real articles, indexed."""
    out = tmp_path_factory.mktemp("vital") / "index"
    build(vital_articles, out)
    return verify_and_open(out)


async def opened(folder: Path) -> Bm25Provider:
    """The provider over the index in ``folder``."""
    return Bm25Provider(await asyncio.to_thread(verify_and_open, folder))


def ids(documents: list[dict[str, Any]]) -> list[str]:
    """The ids, in order."""
    return [document["id"] for document in documents]


def segment_file(folder: Path, ending: str) -> Path:
    """The segment's file of that ending."""
    (path,) = folder.glob(f"*.{ending}")
    return path


# --- what is found -------------------------------------------------------------------------------


def test_documents_are_id_contents_and_score(small: Bm25Index) -> None:
    """A found passage comes with its id, its contents as the corpus has them, and its score, best
    first.
    """
    found = small.search("water tide ocean", 5)
    lines = [json.loads(line) for line in CORPUS.read_text("utf-8").splitlines()]
    corpus = {line["id"]: line["contents"] for line in lines}
    assert ids(found) == ["3", "0"]
    assert all(set(document) == {"id", "contents", "score"} for document in found)
    assert all(document["contents"] == corpus[document["id"]] for document in found)
    scores = [document["score"] for document in found]
    assert scores == sorted(scores, reverse=True)
    assert scores[-1] > 0


@each(
    ("question", "first"),
    [
        ("LANTERN fishes", "0"),
        ("cafe", "2"),
        ("paintings", "2"),
        ("naive", "2"),
        ("nai\u0308ve", "2"),
        ("灯台", "5"),
        ("港", "5"),
        ("to be or not to be", "6"),
        ("1957", "3"),
        ('title:"lantern fish" AND NOT -organs*', "0"),
    ],
)
def test_words_find_their_passage(question: str, first: str, small: Bm25Index) -> None:
    """Case, endings, diacritics, composition and the lack of spaces do not hide a passage."""
    assert ids(small.search(question, 5))[0] == first


@each(
    ("question", "words"),
    [
        ("The Who", {"who": 1}),
        ("to be or not to be", {"to": 2, "be": 2, "or": 1, "not": 1}),
        ("Who wrote the play?", {"who": 1, "wrote": 1, "play": 1}),
        ("tide TIDES tidal", {"tide": 2, "tidal": 1}),
        ("A AND B OR NOT id:1", {"b": 1, "id": 1, "1": 1}),
        ("東京タワー", {"東": 1, "京": 1, "タ": 1, "ワ": 1, "ー": 1}),
        ("1,234.5 U.S. C++", {"1": 1, "234": 1, "5": 1, "u": 1, "s": 1, "c": 1}),
        ("\ud800lone\udfff", {"lone": 1}),
        ("", {}),
        ("😀 !?\0 […]", {}),
        ("x" * 40, {}),
    ],
)
def test_a_question_is_its_words(question: str, words: dict[str, int], small: Bm25Index) -> None:
    """Stop words count only where nothing else is said; marks and operators mean nothing. Whoever
    changes this table must give the analyzer another name, or old indexes would be misread.
    """
    assert ANALYZER == "english-1"
    assert dict(small.words(question)) == words
    assert bool(small.search(question, 5)) <= bool(words)


def test_a_word_said_twice_counts_twice(small: Bm25Index) -> None:
    """Saying a word again doubles what it adds to a score."""
    once, twice = (small.search(question, 1)[0]["score"] for question in ("tide", "tide tides"))
    assert twice == pytest.approx(2 * once)


def test_of_many_words_the_rarest_are_searched(tmp_path: Path) -> None:
    """At most 32 distinct words are searched, the rarest, and none that no passage has."""
    corpus = tmp_path / "corpus.jsonl"
    # Word k is in the passages up to k: w0 in one alone, w59 in all.
    with corpus.open("w") as file:
        for number in range(60):
            words = " ".join(f"w{k}" for k in range(number, 60))
            file.write(json.dumps({"id": str(number), "contents": words}) + "\n")
    build(corpus, tmp_path / "index")
    index = verify_and_open(tmp_path / "index")
    unknown = [f"u{k}" for k in range(100)]
    asked = unknown + [f"w{k}" for k in range(60)]
    random.Random(4).shuffle(asked)
    assert set(index.words(" ".join(asked))) == {f"w{k}" for k in range(WORDS_MAX)}
    assert ids(index.search(" ".join(asked), 1)) == ["0"]
    few = [*unknown[: WORDS_MAX - 1], "w0"]
    assert len(index.words(" ".join(few))) == WORDS_MAX


@pytest.mark.parametrize("top_n", [0, -1, TOP_N_MAX + 1, 10**12])
def test_top_n_is_bounded(top_n: int, small: Bm25Index) -> None:
    """A number the library would panic or run out of memory over is refused before it is passed."""
    with pytest.raises(errors.InvariantBroken):
        small.search("tide", top_n)


# --- no question raises --------------------------------------------------------------------------

NASTY = [
    "AND OR NOT + - * ? ~ ^ \\ / ( ) [ ] { } < > : ; ' \"",
    '"to be',
    "a [ {",
    "c:\\temp OR AND NOT (",
    "id:1 title:* text:[a TO b]",
    "\0\x01\x7f\u200b\u2028\ufeff",
    "👩‍👩‍👧‍👦 🏳️‍🌈",
    "\ud83d",
    "𠀀𠀁 ﾊﾝｶｸ 한국어 ภาษาไทย हिन्दी العربية",
    "a" * 9_000,
    "word " * 2_000,
    " ".join(f"tide{n}" for n in range(900)),
    "水" * 3_000,
    "e\u0301" * 2_000,
    "\u0301" * 4_096,
]


def well_formed(found: list[dict[str, Any]]) -> bool:
    """At most five distinct documents with falling scores."""
    scores = [document["score"] for document in found]
    distinct = len(set(ids(found))) == len(found) <= 5
    return distinct and scores == sorted(scores, reverse=True)


@each("question", NASTY, ids=lambda text: ascii(text)[:30])
def test_nasty_questions_are_words(question: str, small: Bm25Index) -> None:
    """Operators, marks, emoji, other scripts, NUL, halves of surrogate pairs: words, or nothing."""
    assert well_formed(small.search(question, 5))


EVERY_CHARACTER = st.characters(exclude_categories=[])
PIECES = st.sampled_from(
    ["tide", "the", " ", "AND", '"', ":", "(", "]", "*", "~2", "^", "\\", "水"]
)


@given(st.text(EVERY_CHARACTER, max_size=300) | st.lists(PIECES, max_size=200).map("".join))
def test_no_question_raises(small: Bm25Index, question: str) -> None:
    """Any text at all is answered, twice alike."""
    found = small.search(question, 5)
    assert well_formed(found)
    assert small.search(question, 5) == found


# --- real articles -------------------------------------------------------------------------------


# Every article is asked for by `make soak`, every eighth by `make test`: no branch is their own.
EVERY = [pytest.param(1, marks=pytest.mark.soak), 8]


@pytest.mark.parametrize("every", EVERY)
def test_titles_find_their_article(vital: Bm25Index, vital_articles: Path, every: int) -> None:
    """Over 10,033 real articles, the article is among the five for 98 of 100 titles."""
    titles = list(json.loads(vital_articles.read_bytes()))
    assert len(titles) == 10_033
    asked = titles[::every]
    hits = sum(f"vital:{title}" in ids(vital.search(title, 5)) for title in asked)
    assert hits >= 0.98 * len(asked)


@pytest.mark.parametrize("every", EVERY)
def test_sentences_find_their_article(vital: Bm25Index, vital_articles: Path, every: int) -> None:
    """The article is among the five for 99 of 100 sentences out of the middle of one."""
    asked = hits = 0
    for title, article in list(json.loads(vital_articles.read_bytes()).items())[::every]:
        sentences = re.split(r"(?<=[.!?])\s+", article["extract"])
        if len(sentences) >= 3:
            asked += 1
            found = vital.search(sentences[len(sentences) // 2], 5)
            hits += f"vital:{title}" in ids(found)
    assert asked > 7_000 / every
    assert hits >= 0.99 * asked


# --- the provider --------------------------------------------------------------------------------


async def test_it_is_a_provider(built: Path) -> None:
    """It serves through the guard, and its identity is that of corpus and index."""
    provider = await opened(built)
    assert isinstance(provider, Provider)
    guard = Guard(provider, top_n=5, retries=0, drop_tagged=True, watch_drift=True)
    manifest = provider.index.manifest
    assert await guard.claim_identity() == {
        "provider": "bm25",
        "corpus_sha256": manifest.corpus_sha256,
        "index_sha256": manifest.index_sha256,
        "passages": 7,
        "analyzer": ANALYZER,
        "engine": manifests.tantivy_version(),
    }
    found = await guard.search("mortar", FAR)
    assert found.text.startswith('"Dry-stone wall"\n')
    await provider.close()


@pytest.mark.both_loops
async def test_searches_run_side_by_side_off_the_loop(built: Path) -> None:
    """Many searches at once are answered as they are one by one, in threads of the provider."""
    provider = await opened(built)
    questions = ["tide", "mortar", "café", "灯台", "be", "", "night"] * 20
    together = await asyncio.gather(*(provider.search(question, 5) for question in questions))
    assert together == [provider.index.search(question, 5) for question in questions]
    names = {thread.name for thread in threading.enumerate() if thread.name.startswith("bm25")}
    assert len(names) >= 2
    await provider.close()
    assert not any(thread.name in names for thread in threading.enumerate())


@pytest.mark.both_loops
async def test_a_search_that_is_given_up_harms_no_other(built: Path) -> None:
    """Cancelled searches leave the provider whole, and closing it does not wait for ever."""
    provider = await opened(built)
    long = " ".join(f"tide{n} water" for n in range(500))
    tasks = [asyncio.create_task(provider.search(long, 5)) for _ in range(20)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ended[::2])
    assert all(isinstance(end, list) for end in ended[1::2])
    assert ids(await provider.search("mortar", 5)) == ["1"]
    await provider.close()


async def test_closing_gives_back_every_descriptor(built: Path) -> None:
    """An opened and closed provider holds no file, and a failed opening none either."""
    before = len(os.listdir("/proc/self/fd"))
    provider = await opened(built)
    await provider.search("tide", 5)
    await provider.close()
    with raises(errors.INDEX_UNUSABLE):
        await opened(built / "missing")
    assert len(os.listdir("/proc/self/fd")) == before


# --- opening -------------------------------------------------------------------------------------


def unusable(folder: Path, *words: str) -> None:
    """The index is refused with one sentence that holds the words."""
    with raises(errors.INDEX_UNUSABLE) as caught:
        verify_and_open(folder)
    assert all(word in caught.value.message for word in words), caught.value.message
    assert "\n" not in caught.value.message


def test_what_is_no_index_is_refused(tmp_path: Path) -> None:
    """A missing folder, a file and a folder without a manifest are told apart, with the remedy."""
    command = f"smartsearch-sidecar index build CORPUS {tmp_path}"
    unusable(tmp_path / "missing", "there is no index at", f"{command}/missing")
    unusable(CORPUS, "there is no index at")
    unusable(tmp_path, "holds no manifest.json", command)


HARM: dict[str, Callable[[Path], object]] = {
    "removed": Path.unlink,
    "emptied": lambda path: os.truncate(path, 0),
    "cut by a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "longer by a byte": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "flipped at the start": lambda path: flip(path, 0),
    "flipped in the middle": lambda path: flip(path, path.stat().st_size // 2),
    "flipped at the end": lambda path: flip(path, -1),
    "a folder": lambda path: as_folder(path),
}
ENDINGS = ["fast", "fieldnorm", "idx", "pos", "store", "term"]


def as_folder(path: Path) -> None:
    """A folder where a file should be."""
    path.unlink()
    path.mkdir()


def flip(path: Path, at: int) -> None:
    """Flips one bit."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("ending", [*ENDINGS, "meta.json", ".managed.json"])
@pytest.mark.parametrize("harm", HARM)
def test_a_file_that_differs_is_named(harm: str, ending: str, folder: Path) -> None:
    """Whatever happened to a file of an index, it is found before anything is opened, by name."""
    path = segment_file(folder, ending) if ending in ENDINGS else folder / ending
    HARM[harm](path)
    unusable(folder, str(path))


def test_any_flipped_bit_of_the_manifest_is_found(folder: Path) -> None:
    """The manifest protects itself: no bit of it can change unseen."""
    path = folder / manifests.NAME
    whole = path.read_bytes()
    for at in range(0, len(whole) - 1, 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        with raises(errors.INDEX_UNUSABLE):
            manifests.read(folder)
    for length in range(0, len(whole) - 2, 50):
        path.write_bytes(whole[:length])
        unusable(folder, "manifest.json is damaged", "index build CORPUS")


def rewritten(folder: Path, **values: Any) -> None:
    """Writes other values into the manifest, with a sum that fits."""
    path = folder / manifests.NAME
    value = {**json.loads(path.read_bytes()), **values}
    del value["sum"]
    path.write_text(json.dumps({**value, "sum": canonical_digest(value)}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", 0),
        ("format", "2"),
        ("tantivy", "tantivy v0.99.0, index_format v9"),
        ("analyzer", "klingon-1"),
    ],
)
def test_an_index_of_another_version_is_refused(key: str, value: Any, folder: Path) -> None:
    """An index that other code wrote is refused with both versions and what to build instead."""
    ours = json.loads((folder / manifests.NAME).read_bytes())[key]
    rewritten(folder, **{key: value})
    command = "smartsearch-sidecar index build CORPUS NEW_FOLDER"
    unusable(folder, f"is of {key} {value!r}", repr(ours), command)


def test_an_index_of_a_newer_format_is_refused_as_newer(folder: Path) -> None:
    """A later version may sum and spell its manifest otherwise: the format is read before both."""
    path = folder / manifests.NAME
    path.write_text(json.dumps({"format": manifests.FORMAT + 1, "shards": [], "sum": "other"}))
    unusable(
        folder,
        f"{folder} was written by a newer version (format 2, this version reads up to 1): upgrade, "
        "or build the index again",
        "smartsearch-sidecar index build CORPUS NEW_FOLDER",
    )


@pytest.mark.parametrize(
    "values",
    [
        {"passages": 8},
        {"content_sha256": "0" * 64},
        {"index_sha256": "0" * 64},
        {"files": {}},
        {"files": {"../index/meta.json": {"sha256": "0" * 64, "bytes": 1}}},
        {"corpus_sha256": "C" * 64},
        {"more": 1},
    ],
    ids=lambda values: next(iter(values)),
)
def test_a_manifest_that_does_not_fit_is_refused(values: dict[str, Any], folder: Path) -> None:
    """A manifest with a fitting sum but other contents than its files is refused."""
    rewritten(folder, **values)
    unusable(folder, "manifest")


def test_opening_writes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index is opened without a file being made or touched in its folder, or left in the
    temporary one; so it may be read-only.
    """
    room = folder.parent / "room"
    room.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(room))
    folder.chmod(0o555)
    before = {path: path.stat() for path in (folder, *folder.iterdir())}
    index = verify_and_open(folder)
    assert ids(index.search("mortar", 5)) == ["1"]
    now = {path: path.stat() for path in (folder, *folder.iterdir())}
    assert {path: found.st_ctime_ns for path, found in now.items()} == {
        path: found.st_ctime_ns for path, found in before.items()
    }
    assert list(room.iterdir()) == []


def test_opening_needs_no_writable_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no temporary folder can be written, memory serves."""
    monkeypatch.setattr(tempfile, "tempdir", str(folder.parent / "missing"))
    assert ids(verify_and_open(folder).search("mortar", 5)) == ["1"]


def test_verification_tells_its_progress(built: Path) -> None:
    """Progress rises to the number of bytes of all files."""
    told: list[tuple[int, int]] = []
    verify_and_open(built, progress=lambda done, total: told.append((done, total)))
    total = sum(file.bytes for file in manifests.read(built).files.values())
    assert [total for _, total in told] == [total] * len(told)
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert told[-1] == (total, total)


def test_several_may_open_at_once(built: Path) -> None:
    """Processes and threads may open one index at the same time."""
    with ThreadPoolExecutor(4) as threads:
        opened = list(threads.map(lambda _: verify_and_open(built), range(8)))
    assert all(ids(index.search("mortar", 5)) == ["1"] for index in opened)


# --- while it is served --------------------------------------------------------------------------


def replaced(path: Path) -> None:
    """Another file of the same content and times under the same name."""
    other = path.with_name("other")
    shutil.copy2(path, other)
    other.replace(path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "removed": Path.unlink,
    "replaced": replaced,
    "touched": os.utime,
    "written to": lambda path: flip(path, -1),
    "grown": lambda path: os.truncate(path, path.stat().st_size + 1),
    "renamed": lambda path: path.rename(path.with_name("elsewhere")),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("ending", ENDINGS)
async def test_a_change_under_a_served_index_is_seen(
    ending: str, change: str, folder: Path
) -> None:
    """Whatever happens to a file while it is served, the next look at the identity names it."""
    provider = await opened(folder)
    path = segment_file(folder, ending)
    await provider.identity()
    CHANGES[change](path)
    for _ in range(2):
        with raises(errors.IDENTITY_CHANGED, match=path.name):
            await provider.identity()
    await provider.close()


async def test_another_index_in_its_place_is_seen(folder: Path, built: Path) -> None:
    """A served folder that was moved aside for another one is noticed, even for its own copy."""
    provider = await opened(folder)
    os.rename(folder, folder.with_name("aside"))
    with raises(errors.IDENTITY_CHANGED, match="went away"):
        await provider.identity()
    shutil.copytree(built, folder)
    with raises(errors.IDENTITY_CHANGED, match="was replaced"):
        await provider.identity()
    await provider.close()


async def test_what_does_not_matter_changes_nothing(folder: Path) -> None:
    """A file beside those of the index, or another mode of the folder, is no other identity; and a
    link to the folder may be pointed elsewhere, for the next run.
    """
    link = folder.with_name("current")
    link.symlink_to(folder)
    provider = await opened(link)
    before = await provider.identity()
    shutil.copy(CORPUS, folder)
    os.chmod(folder, 0o700)
    os.unlink(link)
    assert await provider.identity() == before
    await provider.close()


def overwrite(path: Path, seed: int | None) -> None:
    """Other bytes in the same file: all ones, or random ones."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(b"\xff" * size if seed is None else random.Random(seed).randbytes(size))


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize(
    ("ending", "cause"),
    [("term", "ValueError"), ("store", "PanicException"), ("idx", "PanicException")],
)
async def test_damage_that_comes_later_is_a_fault(
    ending: str, cause: str, seed: int | None, folder: Path
) -> None:
    """A verified file that is overwritten under a search is a named fault, never an empty answer
    and never something that passes by `except Exception`.
    """
    provider = await opened(folder)
    path = segment_file(folder, ending)
    overwrite(path, seed)
    for question in ("tide", "be"):
        with pytest.raises(errors.ProviderFault, match="failed in a search") as caught:
            await provider.search(question, 5)
        assert str(folder) in caught.value.message
        assert type(caught.value.__cause__).__name__ == cause
    with raises(errors.IDENTITY_CHANGED, match=path.name):
        await provider.identity()
    await provider.close()


def test_provider_needs_no_loop_to_be_made(built: Path) -> None:
    """A provider may be opened in a thread, before or beside the loop."""
    provider = Bm25Provider(verify_and_open(built))
    assert isinstance(provider, Bm25Provider)
    asyncio.run(provider.close())

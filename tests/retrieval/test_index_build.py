"""Building an index: reproducible, and after any interruption whole or absent."""

from __future__ import annotations

import gzip
import json
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartsearch_sidecar import errors
from smartsearch_sidecar.retrieval.bm25 import manifest as manifests
from smartsearch_sidecar.retrieval.bm25.build import FANOUT, Sizing, build, plan
from smartsearch_sidecar.retrieval.bm25.corpus import Format
from smartsearch_sidecar.retrieval.bm25.provider import Bm25Index, verify_and_open
from tests.fakes.forked import Forked
from tests.fakes.process import command
from tests.fakes.raised import raises
from tests.fakes.until import wait_until

CORPORA = Path(__file__).parents[1] / "data" / "corpora"
FLASHRAG = CORPORA / "flashrag.jsonl"
LEVELLED = Sizing(single_commit_passages=0)  # eight commits however small the corpus
# A build in a process of its own, and the file of what it says.
Build = tuple[Forked, Path]
VOCABULARY = [f"{first}{second}" for first in "bdfgklmn" for second in ("amber", "ochre", "umber")]


def corpus_of(folder: Path, count: int, *, seed: int = 1, name: str = "corpus.jsonl") -> Path:
    """A synthetic corpus of short passages out of few words, so that many scores tie."""
    draw = random.Random(seed)
    path = folder / name
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            words = " ".join(draw.choices(VOCABULARY, k=draw.randint(3, 9)))
            file.write(json.dumps({"id": f"p{number}", "contents": f'"{number}"\n{words}'}) + "\n")
    return path


def long_corpus(folder: Path, count: int, *, words: int) -> Path:
    """A corpus of few passages and many bytes: quick to make and to read, not to index."""
    text = " ".join(random.Random(4).choices(VOCABULARY, k=words))
    lines = (json.dumps({"id": f"p{number}", "contents": text}) for number in range(count))
    path = folder / "corpus.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def written(folder: Path, *entries: tuple[str, str]) -> Path:
    """A corpus of those ids and contents."""
    path = folder / "corpus.jsonl"
    lines = [json.dumps({"id": identifier, "contents": text}) for identifier, text in entries]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def ranking(index: Bm25Index, questions: list[str]) -> list[list[tuple[str, str]]]:
    """Ids in order, with their scores to five digits."""
    return [
        [(found["id"], f"{found['score']:.5g}") for found in index.search(question, 5)]
        for question in questions
    ]


def questions(count: int) -> list[str]:
    """One to four words of the vocabulary, in any order."""
    draw = random.Random(2)
    return [" ".join(draw.choices(VOCABULARY, k=draw.randint(1, 4))) for _ in range(count)]


# --- what is built -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", list(Format))
def test_every_form_becomes_an_index(form: Format, tmp_path: Path) -> None:
    """An index of each corpus form holds all its passages and says what it was made from."""
    path = next(CORPORA.glob(f"{form}.*"))
    manifest = build(path, tmp_path / "index")
    assert (manifest.passages, manifest.dropped, manifest.corpus_format) == (7, 0, form.value)
    assert manifests.read(tmp_path / "index") == manifest
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
    found = verify_and_open(tmp_path / "index").search("stones without mortar", 5)[0]
    assert found["contents"].startswith('"Dry-stone wall"\nA dry-stone wall is built without')


@pytest.mark.parametrize("sizing", [Sizing(), LEVELLED], ids=["one commit", "eight commits"])
def test_two_builds_are_one_index(sizing: Sizing, tmp_path: Path) -> None:
    """Two builds of one corpus agree in content, name, ranking and ties, though not in file names,
    and what varies is in no digest.
    """
    corpus = corpus_of(tmp_path, 2_000)
    first, second = (build(corpus, tmp_path / out, sizing=sizing) for out in ("a", "b"))
    assert first.content_sha256 == second.content_sha256
    assert first.index_sha256 == second.index_sha256
    assert set(first.files) != set(second.files)
    asked = questions(100)
    one, other = (verify_and_open(tmp_path / out) for out in ("a", "b"))
    assert ranking(one, asked) == ranking(other, asked)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_sixty_four_commits_are_one_index_too(tmp_path: Path) -> None:
    """Segments that merge in two levels end in one segment, alike in every build."""
    corpus = corpus_of(tmp_path, 330_000)
    sizing = Sizing(slice_characters=1)
    assert len(plan(330_000, 10_000_000, sizing)) == FANOUT**2
    first, second = (build(corpus, tmp_path / out, sizing=sizing) for out in ("a", "b"))
    assert first.content_sha256 == second.content_sha256


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    """Compressing a corpus changes its own digest but not the index; changing one word does."""
    packed = tmp_path / "packed.gz"
    packed.write_bytes(gzip.compress(FLASHRAG.read_bytes()))
    changed = tmp_path / "changed.jsonl"
    changed.write_bytes(FLASHRAG.read_bytes().replace(b"mortar", b"cement"))
    plain, same, other = (
        build(path, tmp_path / f"index{number}")
        for number, path in enumerate((FLASHRAG, packed, changed))
    )
    assert plain.index_sha256 == same.index_sha256 != other.index_sha256
    assert len({plain.corpus_sha256, same.corpus_sha256, other.corpus_sha256}) == 3


@pytest.mark.parametrize("sizing", [Sizing(), LEVELLED], ids=["one commit", "eight commits"])
def test_ties_are_in_the_corpus_order(sizing: Sizing, tmp_path: Path) -> None:
    """Passages that score alike come in the order of the corpus, across every commit and merge."""
    alike = [f"{number:04}" for number in range(1_000)]
    corpus = written(tmp_path, *((name, "the very same words") for name in alike))
    build(corpus, tmp_path / "index", sizing=sizing)
    found = verify_and_open(tmp_path / "index").search("same words", 100)
    assert [document["id"] for document in found] == alike[:100]


def test_tagged_passages_are_left_out_and_counted(tmp_path: Path) -> None:
    """A passage that would forge or end a block of a rollout is in no index, and is counted."""
    bad = ["</result> x", "a <SEARCH>", "<think>", "</Answer>", "x<|im_end|>", "<|endoftext|>"]
    corpus = written(
        tmp_path,
        *((f"bad{number}", f"basalt {text}") for number, text in enumerate(bad)),
        ("good", "basalt < granite <b> a|b"),
    )
    manifest = build(corpus, tmp_path / "index")
    assert (manifest.passages, manifest.dropped) == (1, len(bad))
    found = verify_and_open(tmp_path / "index").search("basalt im_end think result", 10)
    assert [document["id"] for document in found] == ["good"]


# --- the plan of commits -------------------------------------------------------------------------


@given(
    passages=st.integers(1, 75_000_000),
    characters_each=st.integers(1, 100_000),
    slice_characters=st.integers(1, 10**9),
    single=st.integers(0, 100_000),
)
def test_commits_shrink_and_merge_by_level(
    passages: int, characters_each: int, slice_characters: int, single: int
) -> None:
    """Commits take every passage, each fewer than the one before, a power of eight of them; and at
    each level eight neighbours are of a like size, which those of the next level are not.
    """
    sizing = Sizing(slice_characters=slice_characters, single_commit_passages=single)
    sizes = plan(passages, passages * characters_each, sizing)
    assert sum(sizes) == passages
    assert sizes[-1] > 0
    assert all(after < before for before, after in pairwise(sizes))
    # As tantivy's policy tells levels apart: by 0.75 in the logarithm, small segments being 10,000.
    while len(sizes) > 1:
        assert len(sizes) % FANOUT == 0
        merged = [sum(sizes[at : at + FANOUT]) for at in range(0, len(sizes), FANOUT)]
        assert max(sizes[0], 10_000) < max(sizes[-1], 10_000) * 2**0.75
        if len(merged) > 1:
            assert min(merged) > max(sizes[0], 10_000) * 2**0.75
        sizes = merged


def test_memory_is_bounded_by_more_commits() -> None:
    """Twenty-one million passages take no more text per commit than the bound says."""
    sizing = Sizing()
    sizes = plan(21_000_000, 21_000_000 * 640, sizing)
    assert sizes[0] * 640 <= sizing.slice_characters


# --- what is refused -----------------------------------------------------------------------------


def refused(corpus: Path, out: Path, kind: errors.Failure[Any], *words: str) -> None:
    """The build is refused with one sentence that holds the words, and leaves nothing behind."""
    before = sorted(out.parent.iterdir())
    with raises(kind) as caught:
        build(corpus, out)
    assert all(word in caught.value.message for word in words), caught.value.message
    assert "\n" not in caught.value.message
    assert sorted(out.parent.iterdir()) == before


def test_repeated_ids_are_refused(tmp_path: Path) -> None:
    """An id that comes twice, white space apart, is named with both its lines."""
    corpus = written(tmp_path, ("a", "x"), ("b", "y"), ("c", "z"), (" b ", "w"), ("a", "v"))
    refused(corpus, tmp_path / "index", errors.CORPUS_INVALID, "line 4: the id 'b'", "in line 2")


def test_repeated_articles_on_one_line_are_refused(tmp_path: Path) -> None:
    """A title that comes twice is found where all articles stand on one line."""
    corpus = tmp_path / "one_line.json"
    corpus.write_text('{"A": {"extract": "x"}, "B": {"extract": "y"}, "B": {"extract": "z"}}')
    refused(corpus, tmp_path / "index", errors.CORPUS_INVALID, "line 1: the id 'vital:B'")


def test_a_corpus_of_tags_alone_is_refused(tmp_path: Path) -> None:
    """A corpus of which no passage can be kept makes no index."""
    corpus = written(tmp_path, ("a", "<think>"), ("b", "</result>"))
    refused(corpus, tmp_path / "index", errors.CORPUS_INVALID, "all its 2 passages carry")
    header = tmp_path / "header.tsv"
    header.write_text("id\ttext\ttitle\n")
    refused(header, tmp_path / "index", errors.CORPUS_INVALID, "it has no passage")


def test_a_bad_line_is_found_before_anything_is_indexed(tmp_path: Path) -> None:
    """The corpus is looked through first, so a bad last line costs no hour of indexing."""
    corpus = corpus_of(tmp_path, 5_000)
    with corpus.open("a") as file:
        file.write('{"id": "x"}\n')
    stages: list[str] = []
    with raises(errors.CORPUS_INVALID, match="line 5001"):
        build(corpus, tmp_path / "index", progress=lambda stage, done, total: stages.append(stage))
    assert set(stages) == {"reading"}


@pytest.mark.parametrize("there", ["folder", "file", "dangling link"])
def test_what_exists_is_not_touched(there: str, tmp_path: Path) -> None:
    """Whatever is at the index's place already is refused and left alone."""
    out = tmp_path / "index"
    if there == "folder":
        out.mkdir()
    elif there == "file":
        out.write_text("mine")
    else:
        out.symlink_to(tmp_path / "nowhere")
    refused(FLASHRAG, out, errors.USAGE, str(out), "exists", "name another")


def test_a_place_that_cannot_be_is_refused(tmp_path: Path) -> None:
    """A path that leads through a file is one sentence."""
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "index", tmp_path / "file" / "deeper" / "index"):
        with pytest.raises(errors.UsageError, match="is not a folder; name another place"):
            build(FLASHRAG, out)


def test_missing_folders_above_are_made(tmp_path: Path) -> None:
    """The index may be asked for in a folder that is not there yet."""
    assert build(FLASHRAG, tmp_path / "new" / "deeper" / "index").passages == 7


@pytest.mark.parametrize("moment", ["between the passes", "in the second"])
def test_a_corpus_that_changes_is_refused(moment: str, tmp_path: Path) -> None:
    """A corpus that is written to while it is read twice makes no index of a mixture."""
    # More passages than the 4,096 after which a build tells first, and then more bytes to come than
    # the mebibyte that is read at once.
    corpus = long_corpus(tmp_path, 7_000, words=50)
    ends = 0

    def change(stage: str, done: int, total: int) -> None:
        nonlocal ends
        # The end is met twice: once with the last bytes, once with none.
        ends += stage == "reading" and done == total
        if ends == 2 and stage == ("reading" if moment == "between the passes" else "indexing"):
            ends += 1
            with corpus.open("r+b") as file:
                file.seek(-6, os.SEEK_END)
                file.write(b"z")

    with raises(errors.CORPUS_INVALID, match="changed while it was read"):
        build(corpus, tmp_path / "index", progress=change)
    assert ends == 3
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_a_heap_that_is_too_small_is_not_believed(tmp_path: Path) -> None:
    """When tantivy flushes by itself the order is lost, and the build says so instead of ranking
    ties by chance.
    """
    draw = random.Random(3)
    corpus = tmp_path / "corpus.jsonl"
    with corpus.open("w") as file:
        for number in range(650):
            words = " ".join(draw.randbytes(4).hex() for _ in range(100))
            file.write(json.dumps({"id": str(number), "contents": words}) + "\n")
    with pytest.raises(errors.UsageError, match=r"came out in \d+ parts"):
        build(corpus, tmp_path / "index", sizing=Sizing(heap_bytes=15_000_000))
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


# --- what stops it -------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["reading", "indexing", "merging", "hashing"])
def test_an_interruption_leaves_nothing(stage: str, tmp_path: Path) -> None:
    """Ctrl-C at any stage leaves neither the index nor what it was made in."""
    corpus = corpus_of(tmp_path, 500)

    def interrupt(now: str, done: int, total: int) -> None:
        if now == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(corpus, tmp_path / "index", progress=interrupt, sizing=LEVELLED)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


@pytest.fixture
def running(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Build]:
    """A build in a process of its own that has begun to index, and would take a while."""
    corpus = long_corpus(tmp_path, 2_000, words=700)
    said = tmp_path_factory.mktemp("said") / "log"
    words = ("index", "build", str(corpus), str(tmp_path / "index"))
    process = command("smartsearch_sidecar", *words, folder=tmp_path, out=said)

    def begun() -> bool:
        true = (tmp_path / ".index.building" / "meta.json").exists()
        assert true or process.poll() is None, said.read_text()
        return true

    try:
        wait_until(begun, seconds=30)
        yield process, said
    finally:
        process.kill()


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_signal_leaves_nothing(number: signal.Signals, running: Build, tmp_path: Path) -> None:
    """A stopped build leaves nothing, says so, and its exit code names the signal; a second signal
    does not disturb it.
    """
    process, said = running
    process.send_signal(number)
    process.send_signal(number)
    assert process.wait(30) == 128 + number
    sentence = f"stopped: {tmp_path / 'index'} was not made, and nothing was left behind"
    assert said.read_text().splitlines()[-1] == sentence
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


@pytest.mark.process
def test_leavings_of_a_killed_build_are_cleared(tmp_path: Path) -> None:
    """A build that was killed outright leaves a hidden folder, which the next build clears."""
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from smartsearch_sidecar.retrieval.bm25.build import build\n"
        "def kill(stage, done, total):\n"
        "    if stage == 'indexing': os.kill(os.getpid(), signal.SIGKILL)\n"
        "build(Path(sys.argv[1]), Path(sys.argv[2]), progress=kill)\n"
    )
    words = [sys.executable, "-c", program, str(FLASHRAG), str(tmp_path / "index")]
    assert subprocess.run(words, check=False).returncode == -signal.SIGKILL
    leavings = tmp_path / ".index.building"
    assert (leavings / "meta.json").exists()
    # It may have come as far as its manifest.
    (leavings / manifests.NAME).write_text("{}")
    assert not (tmp_path / "index").exists()
    build(FLASHRAG, tmp_path / "index")
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
    assert verify_and_open(tmp_path / "index").manifest.passages == 7
    endings = [path.suffix for path in (tmp_path / "index").iterdir() if path.suffix != ".json"]
    assert sorted(endings) == [".fast", ".fieldnorm", ".idx", ".pos", ".store", ".term"]


def test_two_builds_of_one_place_do_not_meet(tmp_path: Path) -> None:
    """A second build of a place that is being built is refused and does not harm the first."""

    def second(stage: str, done: int, total: int) -> None:
        if stage == "hashing":
            with pytest.raises(errors.UsageError, match="another build is writing"):
                build(FLASHRAG, tmp_path / "index")

    build(FLASHRAG, tmp_path / "index", progress=second)
    assert verify_and_open(tmp_path / "index").manifest.passages == 7


@pytest.fixture(scope="module")
def read_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus that is only read."""
    return corpus_of(tmp_path_factory.mktemp("corpus"), 5_000)


@contextmanager
def files_at_most(size: int) -> Iterator[None]:
    """No file of this process grows beyond that many bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limit", [0, 1_000, 20_000, 100_000])
@pytest.mark.parametrize("sizing", [LEVELLED, Sizing()], ids=["eight commits", "one commit"])
def test_a_full_disk_leaves_nothing(
    limit: int, sizing: Sizing, read_only: Path, tmp_path: Path
) -> None:
    """When files cannot grow any more, wherever that is met, the build ends with one sentence."""
    with raises(errors.USAGE) as caught, files_at_most(limit):
        build(read_only, tmp_path / "index", sizing=sizing)
    assert "\n" not in caught.value.message
    assert "make room" in caught.value.message
    assert str(tmp_path) in caught.value.message
    assert not list(tmp_path.iterdir())

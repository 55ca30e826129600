"""A document of a provider, checked and encoded once, however often it is found.

Rollouts of one group ask alike and popular articles come back all day: what a passage costs (strip,
look for tags, escape) is paid when it is first seen, and remembered for the most recent ones.
"""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.run.json_values import has_utf8_form

TEXT_CHARACTERS_MAX = 8 * 1024 * 1024  # one document field; the reference's bound
REMEMBERED_PASSAGES = 4096  # a few MB of usual passages
REMEMBERED_CHARACTERS_MAX = 16384  # longer ones are not worth keeping
_FIELDS = frozenset({"id", "contents", "score"})
# A closing or opening protocol tag would end or forge a block of the rollout; a special token such
# as <|im_end|> would end the turn once the trainer's tokenizer sees it.
PASSAGE_TAG = re.compile(r"</?(?:search|result|answer|think)>|<\|[^|<>\s]{1,64}\|>", re.IGNORECASE)
_BETWEEN = "\n\n"  # passages are joined by one blank line: the redundancy penalty splits there


def carries_tag(contents: str) -> bool:
    """Whether a passage would forge or end a block of the rollout."""
    # Every tag begins with "<", which most passages lack: looking for that first is much cheaper.
    return "<" in contents and PASSAGE_TAG.search(contents) is not None


class Found(NamedTuple):
    """What one search found, encoded once and recorded as often as it is asked. ``documents_json``
    is the JSON list of ``{"id", "contents", "score"}`` in rank order; ``text`` the contents joined,
    as a rollout gets them; ``dropped`` names the passages left out, with the reason; ``tries`` are
    the calls to the provider that it took.
    """

    documents_json: bytes
    text: str
    dropped: tuple[Mapping[str, str], ...]
    tries: int = 1

    @property
    def emptied(self) -> bool:
        """Whether passages were found and every one was left out."""
        return bool(self.dropped) and not self.text

    @property
    def size(self) -> int:
        """Bytes this holds in a cache, objects included, roughly."""
        text = len(self.text) * (1 if self.text.isascii() else 4)
        return len(self.documents_json) + text + 512

    def documents(self) -> list[dict[str, Any]]:
        value: list[dict[str, Any]] = orjson.loads(self.documents_json)
        return value


class Passage(NamedTuple):
    """A usable passage: ``json`` is its record up to the score; ``key`` and ``digest`` tell it from
    others for drift.
    """

    id: str
    json: bytes
    contents: str
    tagged: bool
    key: bytes
    digest: bytes


def read_passage(item: Any, position: int) -> tuple[Passage, bytes]:
    """One document of a provider, and its score as JSON; ``DocumentInvalid`` names its position."""
    if type(item) is dict and len(item) == 3:  # the usual form, and nothing else about it unusual
        name: Any = item.get("id")
        contents: Any = item.get("contents")
        score: Any = item.get("score")
        short = type(name) is str and type(contents) is str and type(score) is float
        if short and len(name) + len(contents) <= REMEMBERED_CHARACTERS_MAX:
            passage, score_json = _remembered(name, contents), orjson.dumps(score)
            if type(passage) is Passage and score_json != b"null":  # which is not a finite one
                return passage, score_json
    return _read_any(item, position)


def _read_any(item: Any, position: int) -> tuple[Passage, bytes]:
    """Any answer of a provider, checked in full."""
    if not (type(item) is dict or isinstance(item, Mapping)):  # the first is the usual and cheap
        raise _invalid(position, f"is a {type(item).__name__}, not a mapping")
    if not _FIELDS.issuperset(item):
        raise _invalid(position, "has a field besides id, contents, score")
    name = _bounded(item.get("id"), position, "id")
    contents = _bounded(item.get("contents"), position, "contents")
    long = len(contents) + len(name) > REMEMBERED_CHARACTERS_MAX
    passage = _passage(name, contents) if long else _remembered(name, contents)
    if isinstance(passage, str):
        raise _invalid(position, passage)
    return passage, _score(item.get("score"), position)


def _bounded(text: Any, position: int, field: str) -> str:
    if not isinstance(text, str) or len(text) > TEXT_CHARACTERS_MAX:
        raise _invalid(position, f"has no bounded text in {field}")
    return text


def _passage(name: str, contents: str) -> Passage | str:
    """The passage, or what is wrong with it: a fault is remembered as well."""
    name, contents = name.strip(), contents.strip()
    if not name or not contents:
        return f"has an empty {'contents' if name else 'id'}"
    try:
        name_json, text_json = orjson.dumps(name), orjson.dumps(contents)
    except TypeError:
        return "holds text that has no UTF-8 form"
    return Passage(
        id=name,
        json=b'{"id":%s,"contents":%s,"score":' % (name_json, text_json),
        contents=contents,
        tagged=carries_tag(contents),
        key=_digest(name_json),
        digest=_digest(text_json),
    )


_remembered: Callable[[str, str], Passage | str] = lru_cache(REMEMBERED_PASSAGES)(_passage)


def blank_id(item: Any) -> str | None:
    """The id of a document whose only fault is that id or contents are blank; else ``None``."""
    if not isinstance(item, Mapping) or not _FIELDS.issuperset(item):
        return None
    name, contents = item.get("id"), item.get("contents")
    if not (isinstance(name, str) and isinstance(contents, str) and has_utf8_form(name)):
        return None
    return name.strip() if not name.strip() or not contents.strip() else None


def digests_of_normal_forms(contents: str) -> set[bytes]:
    """What ``Passage.digest`` is of the same text composed (NFC) and decomposed (NFD)."""
    forms = (unicodedata.normalize("NFC", contents), unicodedata.normalize("NFD", contents))
    return {_digest(orjson.dumps(text)) for text in forms}


def _digest(text_json: bytes) -> bytes:
    return hashlib.blake2b(text_json, digest_size=8).digest()


def _score(score: Any, position: int) -> bytes:
    """A plain number: what a numerical library calls a float is one, but no encoder's."""
    if score is None:
        return b"null"
    if isinstance(score, float) and math.isfinite(score):
        return orjson.dumps(float(score))
    # Wider ones have no form in the records.
    if isinstance(score, int) and not isinstance(score, bool) and -(2**63) <= score < 2**64:
        return orjson.dumps(int(score))
    raise _invalid(position, "has a score that is no finite number of 64 bits")


def _invalid(position: int, what: str) -> errors.RetrievalError:
    return errors.DOCUMENT_INVALID(f"document {position} {what}")


def found_of(
    passages: Sequence[tuple[Passage, bytes]], dropped: Sequence[Mapping[str, str]]
) -> Found:
    """An answer, put together from passages that are encoded already."""
    records = b",".join([passage.json + score + b"}" for passage, score in passages])
    text = _BETWEEN.join([passage.contents for passage, _ in passages])
    return Found(b"[%s]" % records, text, tuple(dropped))

"""The one retriever both services ask: each side holds its own, both play the same plan.

It has the reference's surface (``fingerprint()`` and ``search(query, top_n=5)``), so the reference
takes it as it is and ours takes it as ``module:factory``, the way an operator would plug it in.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tests.fakes.provider import CORPUS_SHA256, INDEX_SHA256
from tests.fakes.provider import documents_for as documents_naming

FACTORY = "tests.parity.retriever:chosen"
IDENTITY: dict[str, Any] = {
    "corpus_sha256": CORPUS_SHA256,
    "index_sha256": INDEX_SHA256,
    "provider": "scripted",
    "settings": {"k1": 0.9, "fields": ["title", "text"], "lowercase": True},
}


@dataclass(frozen=True)
class Plan:
    """What a retriever does during one request.

    ``search`` names an entry of ``SEARCHES``, or holds the documents themselves; ``before`` and
    ``after`` name entries of ``FINGERPRINTS``: who it says it is before and after the search.
    """

    search: str | tuple[Mapping[str, Any], ...] = "five documents"
    before: str = "same"
    after: str = "same"


GOOD = Plan()


class Scripted:
    """One side's retriever; ``searches`` is what it was asked, ``(query, top_n)`` each."""

    def __init__(self) -> None:
        self.searches: list[tuple[str, int]] = []
        self._plan = GOOD
        self._asked = 0

    def play(self, plan: Plan) -> None:
        """Takes up a plan: the next fingerprint asked for is the one before the search."""
        self._plan, self._asked = plan, 0

    def fingerprint(self) -> Any:
        self._asked += 1
        word = {1: self._plan.before, 2: self._plan.after}.get(self._asked, "same")
        return FINGERPRINTS[word]()

    def search(self, query: str, top_n: int = 5) -> Any:
        self.searches.append((query, top_n))
        if isinstance(self._plan.search, tuple):
            return [dict(document) for document in self._plan.search]
        return SEARCHES[self._plan.search](query)


def documents_for(query: str, top_n: int = 5) -> list[dict[str, Any]]:
    """Documents that name the query, but for special tokens: there the two sides differ."""
    return documents_naming(query.replace("<|", "< |"), top_n)


class Held(Scripted):
    """Every search waits until ``release`` is set; ``entered`` is set by the first.

    ``inside`` counts those that are waiting or working, ``most_inside`` the most at once.
    """

    PATIENCE = 10.0

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.release = threading.Event()
        self.inside = self.most_inside = 0
        self._counting = threading.Lock()

    def search(self, query: str, top_n: int = 5) -> Any:
        with self._counting:
            self.inside += 1
            self.most_inside = max(self.most_inside, self.inside)
        self.entered.set()
        try:
            if not self.release.wait(self.PATIENCE):
                raise TimeoutError("the search was not released")
            return super().search(query, top_n)
        finally:
            with self._counting:
                self.inside -= 1


_CHOICE: list[Any] = []


def choose(retriever: Any) -> str:
    """Hands a retriever to the code that opens the returned ``module:factory`` next."""
    _CHOICE[:] = [retriever]
    return FACTORY


def chosen() -> Any:
    """The factory an operator would write."""
    return _CHOICE.pop()


# --- what a search may bring ----------------------------------------------------------------------


def _one(**fields: Any) -> Callable[[str], Any]:
    """A first document that is right, and a second with these fields put in or (None) left out."""

    def found(query: str) -> Any:
        second = {**documents_for(query)[1], **fields}
        missing = [name for name, value in second.items() if value is _LEFT_OUT]
        for name in missing:
            del second[name]
        return [documents_for(query)[0], second]

    return found


def _drifting(query: str) -> Any:
    """An id whose contents differ from search to search."""
    return [{**documents_for(query)[0], "id": "one", "contents": query or "x"}]


def _raises(error: BaseException) -> Callable[[str], Any]:
    def found(_query: str) -> Any:
        raise error

    return found


def _value(value: Any) -> Callable[[str], Any]:
    return lambda _query: value


class _Real(float):
    """A score as numerical libraries give it: a float, but not exactly one."""


class _Unreadable(Mapping[str, Any]):
    """A document that fails while it is read."""

    def __getitem__(self, key: str) -> Any:
        raise RuntimeError("the page is gone")

    def __iter__(self) -> Iterator[str]:
        return iter(("id", "contents"))

    def __len__(self) -> int:
        return 2


class _Sized:
    """It has a length and nothing else of a sequence."""

    def __len__(self) -> int:
        return 1


_LEFT_OUT = object()

GOOD_SEARCHES: dict[str, Callable[[str], Any]] = {
    "five documents": documents_for,
    "no documents": _value([]),
    "one document": lambda query: documents_for(query)[:1],
    "a tuple": lambda query: tuple(documents_for(query)),
    "read-only documents": lambda query: [MappingProxyType(d) for d in documents_for(query)],
    "ordered documents": lambda query: [OrderedDict(d) for d in documents_for(query)],
    "drifting contents": _drifting,
    "no score": _one(score=_LEFT_OUT),
    "score none": _one(score=None),
    "score zero": _one(score=0),
    "score minus zero": _one(score=-0.0),
    "score integer": _one(score=-7),
    "score 64 bits": _one(score=2**63),
    "score tiny": _one(score=5e-324),
    "score large": _one(score=1.7976931348623157e308),
    "score real": _one(score=_Real(0.1)),
    "white space around": _one(id="\t id \n", contents=" \u3000 text \x85\n\n"),
    "blank lines within": _one(contents="a\n\n\n\nb"),
    "quotes and controls": _one(id='"\\', contents="\x00\x1f\x7f\u2028 \ud7ff \U0010ffff"),
    "near tags": _one(contents="<search > </ think> <searching> < | x|> &lt;result&gt;"),
}

# What cannot be answered from, with the cause our latch names.
BAD_SEARCHES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "raises RuntimeError": ("retrieval_failed", _raises(RuntimeError("broken"))),
    "raises ValueError": ("retrieval_failed", _raises(ValueError("broken"))),
    "raises OSError": ("retrieval_failed", _raises(ConnectionResetError("broken"))),
    "raises TimeoutError": ("retrieval_failed", _raises(TimeoutError("late"))),
    "raises StopIteration": ("retrieval_failed", _raises(StopIteration())),
    "six documents": ("document_invalid", lambda query: documents_for(query, 6)),
    "None": ("document_invalid", _value(None)),
    "a number": ("document_invalid", _value(5)),
    "a text": ("document_invalid", _value("text")),
    "a mapping": ("document_invalid", _value({"id": "1", "contents": "x"})),
    "a generator": ("document_invalid", lambda query: iter(documents_for(query))),
    "sized but no sequence": ("document_invalid", _value(_Sized())),
    "unreadable document": ("document_invalid", _value([_Unreadable()])),
    "a list as document": ("document_invalid", _value([["1", "x"]])),
    "a text as document": ("document_invalid", _value(["x"])),
    "an unknown field": ("document_invalid", _one(title="x")),
    "a field named by a number": ("document_invalid", lambda q: [{**documents_for(q)[0], 1: 2}]),
    "no id": ("document_invalid", _one(id=_LEFT_OUT)),
    "a number as id": ("document_invalid", _one(id=7)),
    "bytes as id": ("document_invalid", _one(id=b"7")),
    "a blank id": ("document_invalid", _one(id=" \u2003\n")),
    "no contents": ("document_invalid", _one(contents=_LEFT_OUT)),
    "contents none": ("document_invalid", _one(contents=None)),
    "blank contents": ("document_invalid", _one(contents="\x1f \xa0")),
    "an id twice": ("document_invalid", lambda query: documents_for(query)[:1] * 2),
    "an id twice once stripped": ("document_invalid", lambda query: _twice(query, " ")),
    "an id with two texts": ("document_invalid", lambda query: _twice(query, "", "other")),
    "a tag": ("document_invalid", _one(contents="x </RESULT> y")),
    "an opening tag": ("document_invalid", _one(contents="<think>")),
    "score bool": ("document_invalid", _one(score=True)),
    "score text": ("document_invalid", _one(score="0.5")),
    "score nan": ("document_invalid", _one(score=math.nan)),
    "score infinite": ("document_invalid", _one(score=-math.inf)),
    "a lone surrogate": ("document_invalid", _one(contents="x \ud800")),
    "a lone surrogate in the id": ("document_invalid", _one(id="\udfff")),
}

# Where the two sides differ, by the row of the difference.
OTHER_SEARCHES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "a special token": ("special_tokens", _one(contents="x <|im_end|> y")),
    "an empty text": ("not_documents", _value("")),
    "an empty mapping": ("not_documents", _value({})),
    "score 65 bits": ("score_range", _one(score=2**64)),
    "score beyond floats": ("score_range", _one(score=-(10**400))),
    "raises SystemExit": ("provider_exit", _raises(SystemExit(3))),
}

# A provider's own ValueError is taken for the caller's mistake there, wherever it comes from.
VALUE_ERRORS = {"score nan", "score infinite", "a lone surrogate", "a lone surrogate in the id"}


def _twice(query: str, more: str, contents: str | None = None) -> list[dict[str, Any]]:
    first = documents_for(query)[0]
    second = {**first, "id": first["id"] + more}
    return [first, second if contents is None else {**second, "contents": contents}]


SEARCHES: dict[str, Callable[[str], Any]] = {
    **GOOD_SEARCHES,
    **{word: found for word, (_, found) in BAD_SEARCHES.items()},
    **{word: found for word, (_, found) in OTHER_SEARCHES.items()},
}


# --- who it says it is ----------------------------------------------------------------------------


def _fails(error: Exception) -> Callable[[], Any]:
    def asked() -> Any:
        raise error

    return asked


_SAME_SETTINGS = MappingProxyType({"lowercase": 1, "fields": ("title", "text"), "k1": 0.9})

FINGERPRINTS: dict[str, Callable[[], Any]] = {
    "same": lambda: dict(IDENTITY),
    "same in other words": lambda: OrderedDict(
        reversed({**IDENTITY, "settings": _SAME_SETTINGS}.items())
    ),
    "another index": lambda: {**IDENTITY, "index_sha256": "2" * 64},
    "another setting": lambda: {**IDENTITY, "settings": {"k1": 0.8}},
    "a key less": lambda: {k: v for k, v in IDENTITY.items() if k != "provider"},
    "a key more": lambda: {**IDENTITY, "reloaded": None},
    "raises RuntimeError": _fails(RuntimeError("gone")),
    "raises ValueError": _fails(ValueError("gone")),
}

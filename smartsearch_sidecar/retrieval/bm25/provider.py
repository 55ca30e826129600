"""The embedded BM25 provider: an index of tantivy, searched in a few threads of its own.

A question is words, never query syntax, so any text of the policy can be searched. Cost is
linear in the postings of the words asked for, so stop words go while another word is left, and of
many words the rarest are asked for.

Apart from ``registry.py``, which opens it: one backend a file.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from tantivy import Occur, Query

from smartsearch_sidecar import errors
from smartsearch_sidecar.config import Config
from smartsearch_sidecar.retrieval.bm25.analysis import (
    CONTENTS,
    ID,
    STOP_WORDS,
    TEXT,
    analyzer,
    prepared,
)
from smartsearch_sidecar.retrieval.bm25.open import Opened, Progress, open_verified
from smartsearch_sidecar.retrieval.threads import RetrieverThreads

WORDS_MAX: Final = 32
"""Distinct words of one question that are searched: 4 KB of text cost 2 ms instead of 222 at two
million passages, at the same recall."""

TOP_N_MAX: Final = 100
"""tantivy sets memory aside by this number before it looks at anything."""

_PANIC: Final = "PanicException"  # not importable; a BaseException that `except Exception` misses


class Bm25Index:
    """A verified index in this process. Searches block; they may run in several threads at once."""

    def __init__(self, opened: Opened) -> None:
        self.manifest = opened.manifest
        self._schema = opened.schema
        self._searcher = opened.searcher
        self._files = opened.files
        self._analyzer = analyzer()
        self._stop_words = frozenset(self._analyzer.analyze(STOP_WORDS))

    def words(self, question: str) -> dict[str, int]:
        """What is searched for ``question``: its words, in its order, and how often each occurs."""
        tokens: list[str] = self._analyzer.analyze(prepared(question))
        counts = Counter(token for token in tokens if token not in self._stop_words)
        if not counts:
            counts = Counter(tokens)
        if len(counts) <= WORDS_MAX:
            return counts
        # Words that no passage has cost nothing and find nothing: they must not take up the places.
        held = {word: self._searcher.doc_freq(TEXT, word) for word in counts}
        rarest = sorted((frequency, word) for word, frequency in held.items() if frequency)
        kept = {word for _, word in rarest[:WORDS_MAX]}
        return {word: count for word, count in counts.items() if word in kept}

    def search(self, question: str, top_n: int) -> list[dict[str, Any]]:
        """The best ``top_n`` passages, best first, ties in corpus order; none for no words.

        Raises ``ProviderFault``, and nothing else, when the index fails under a search: it was
        verified, so an error is damage that came later, never an answer.
        """
        if not 1 <= top_n <= TOP_N_MAX:
            raise errors.INTERNAL_ERROR(f"top_n is {top_n}; 1 to {TOP_N_MAX} can be asked for")
        try:
            words = self.words(question)
            if not words:
                return []
            hits = self._searcher.search(self._query(words), top_n, count=False).hits
            return [self._document(score, address) for score, address in hits]
        except BaseException as error:
            if not isinstance(error, ValueError) and type(error).__name__ != _PANIC:
                raise
            raise errors.PROVIDER_FAULT(
                f"the index at {self._files.folder} failed in a search ({type(error).__name__}); "
                "verify its files before it is served again"
            ) from error

    def _query(self, words: Mapping[str, int]) -> Query:
        clauses = []
        for word, count in words.items():
            # As the schema indexes it: "basic" would leave the frequencies out of the score.
            clause = Query.term_query(self._schema, TEXT, word, index_option="freq")
            if count > 1:
                clause = Query.boost_query(clause, float(count))
            clauses.append((Occur.Should, clause))
        return Query.boolean_query(clauses)

    def _document(self, score: float, address: Any) -> dict[str, Any]:
        stored = self._searcher.doc(address)
        identifier, contents = stored[ID][0], stored[CONTENTS][0]
        return {"id": identifier.decode(), "contents": contents.decode(), "score": score}

    def check_files(self) -> None:
        """Raises ``IdentityChanged`` naming a file that is not the one that was verified."""
        self._files.check()

    def close(self) -> None:
        """Lets go of the files; searches that are running end well, further ones are a mistake."""
        self._files.close()


class Bm25Provider:
    """A ``Provider`` over one ``Bm25Index``: its identity is that of the verified files."""

    name = "bm25"
    remote = False

    def __init__(self, index: Bm25Index) -> None:
        self.index = index
        manifest = index.manifest
        self._identity: Mapping[str, Any] = MappingProxyType(
            {
                "provider": self.name,
                "corpus_sha256": manifest.corpus_sha256,
                "index_sha256": manifest.index_sha256,
                "passages": manifest.passages,
                "analyzer": manifest.analyzer,
                "engine": manifest.tantivy,
            }
        )
        threads = max(2, len(os.sched_getaffinity(0)))
        self._threads = RetrieverThreads(threads, "bm25")

    async def identity(self) -> Mapping[str, Any]:
        """Corpus and index, as verified; a look at every file says that they still are.

        Raises ``IdentityChanged``.
        """
        self.index.check_files()
        return self._identity

    async def search(self, query: str, top_n: int) -> list[dict[str, Any]]:
        """Searches in a thread. One that is cancelled runs to its end, its answer unused."""
        return await self._threads.run(lambda: self.index.search(query, top_n))

    async def close(self) -> None:
        """Lets the searches that are running end, and drops those that wait."""
        self._threads.stop()
        await asyncio.to_thread(self._threads.join)
        self.index.close()


def verify_and_open(folder: str | Path, *, progress: Progress | None = None) -> Bm25Index:
    """Verifies every file of the index in ``folder`` and opens those; blocks: run it in a thread.

    ``progress`` gets bytes verified and bytes in all. Raises ``IndexUnusable``.
    """
    return Bm25Index(open_verified(Path(folder), progress))


async def open_configured(config: Config, progress: Progress | None = None) -> Bm25Provider:
    """The provider of ``[retrieval.bm25]``. Raises ``ConfigError`` or ``IndexUnusable``."""
    index = config.retrieval.bm25.index
    if index is None:
        raise errors.CONFIG_INVALID("retrieval.bm25.index is not set: name the index to serve")
    return await asyncio.to_thread(open_provider, index, progress)


def open_provider(folder: str | Path, progress: Progress | None = None) -> Bm25Provider:
    """The provider over the index in ``folder``. Raises ``IndexUnusable``."""
    return Bm25Provider(verify_and_open(folder, progress=progress))

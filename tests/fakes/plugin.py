"""A retriever as a team would plug one in: ``tests.fakes.plugin:slow`` and ``:instant``."""

from __future__ import annotations

import threading
import time
from typing import Any

from tests.fakes.provider import CORPUS_SHA256, INDEX_SHA256, documents_for


class Retriever:
    """The reference's retriever surface: ``fingerprint()`` and ``search(query, top_n=5)``."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def fingerprint(self) -> dict[str, str]:
        return {"corpus_sha256": CORPUS_SHA256, "index_sha256": INDEX_SHA256}

    def search(self, query: str, top_n: int = 5) -> list[dict[str, Any]]:
        time.sleep(self._seconds)
        return documents_for(query, top_n)


def slow() -> Retriever:
    """Thirty milliseconds a search."""
    return Retriever(0.03)


def instant() -> Retriever:
    """No waiting at all."""
    return Retriever(0.0)


class Hanging(Retriever):
    """A search that does not come back, in foreign code that no cancellation reaches."""

    def search(self, query: str, top_n: int = 5) -> list[dict[str, Any]]:
        threading.Event().wait()
        return []


def hanging() -> Retriever:
    """Every search holds its thread for good."""
    return Hanging(0.0)

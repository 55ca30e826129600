"""A provider that implements the real Protocol, with a knob for every way a backend can behave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

CORPUS_SHA256 = "c" * 64
INDEX_SHA256 = "1" * 64


def documents_for(query: str, top_n: int = 5) -> list[dict[str, Any]]:
    """Five passages that name the query, so that an answer can be told from another's."""
    return [
        {
            "id": f"{query[:40]}#{rank}",
            "contents": f'"Article {rank}"\nText {rank} about {query[:200]}.',
            "score": float(top_n - rank),
        }
        for rank in range(top_n)
    ]


class FakeProvider:
    """Answers ``documents_for`` after ``seconds``; every knob may be turned while it serves.

    ``answer`` replaces the documents (a value, or a function of the query); ``fault`` is raised by
    every search; ``gate`` holds searches until it is set; ``identity_values`` is what it says it
    is.
    """

    def __init__(self, *, seconds: float = 0.0, remote: bool = False) -> None:
        self.name = "fake"
        self.remote = remote
        self.seconds = seconds
        self.answer: Any = None
        self.fault: BaseException | None = None
        self.faults_left: int | None = None
        self.identity_fault: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.identity_values: dict[str, Any] = {
            "corpus_sha256": CORPUS_SHA256,
            "index_sha256": INDEX_SHA256,
            "provider": "fake",
        }
        self.after_search: Callable[[], None] | None = None
        self.queries: list[str] = []
        self.under_way = 0
        self.most_under_way = 0
        self.closed = False

    async def identity(self) -> Mapping[str, Any]:
        if self.identity_fault is not None:
            raise self.identity_fault
        return dict(self.identity_values)

    async def search(self, query: str, top_n: int) -> Sequence[Mapping[str, Any]]:
        self.queries.append(query)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            if self.gate is not None:
                await self.gate.wait()
            if self.seconds:
                await asyncio.sleep(self.seconds)
            self._raise_fault()
            if self.after_search is not None:
                self.after_search()
            if callable(self.answer):
                value: Sequence[Mapping[str, Any]] = self.answer(query)
                return value
            if self.answer is not None:
                fixed: Sequence[Mapping[str, Any]] = self.answer
                return fixed
            return documents_for(query, top_n)
        finally:
            self.under_way -= 1

    def _raise_fault(self) -> None:
        if self.fault is None:
            return
        if self.faults_left is not None:
            if self.faults_left <= 0:
                return
            self.faults_left -= 1
        raise self.fault

    async def close(self) -> None:
        self.closed = True

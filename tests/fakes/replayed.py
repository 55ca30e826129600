"""A plugin that answers as ``FakeProvider`` does, for commands that read a configuration."""

from __future__ import annotations

from typing import Any

from tests.fakes.provider import CORPUS_SHA256, INDEX_SHA256, documents_for


class Frozen:
    """The reference's own protocol: ``fingerprint`` and ``search``."""

    def fingerprint(self) -> dict[str, Any]:
        return {"corpus_sha256": CORPUS_SHA256, "index_sha256": INDEX_SHA256, "provider": "frozen"}

    def search(self, query: str, top_n: int = 5) -> list[dict[str, Any]]:
        return documents_for(query, top_n)


def make() -> Frozen:
    """The factory a configuration names."""
    return Frozen()

"""A retriever of the same corpus under another index: ``tests.fakes.other_index:retriever``."""

from __future__ import annotations

from tests.fakes.plugin import Retriever


class Other(Retriever):
    """As the instant one, but for what it says its index is."""

    def fingerprint(self) -> dict[str, str]:
        return {**super().fingerprint(), "index_sha256": "2" * 64}


def retriever() -> Other:
    """No waiting at all."""
    return Other(0.0)

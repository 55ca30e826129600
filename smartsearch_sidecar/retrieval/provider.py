"""What a retrieval backend is: the Protocol that every provider implements.

The one guard around all of them (limits, retries, classification, document checks) is ``guard.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from smartsearch_sidecar import errors


@runtime_checkable
class Provider(Protocol):
    """A frozen corpus that can be searched.

    Attributes:
        name: what ``status`` shows, e.g. ``bm25``.
        remote: whether the passages live in another process. Only then can a document change under
            a stable identity, so only then does the guard look for drift.
    """

    name: str
    remote: bool

    async def identity(self) -> Mapping[str, Any]:
        """What names corpus and index: JSON values, with at least ``corpus_sha256`` and
        ``index_sha256`` (64 lower-case hex digits each). Cheap: asked around every search.
        """
        ...

    async def search(self, query: str, top_n: int) -> Sequence[Mapping[str, Any]]:
        """At most ``top_n`` documents, best first: mappings with ``id``, ``contents`` and perhaps a
        finite numeric ``score``. May raise anything; the guard classifies it.
        ``errors.ProviderTransport`` marks what may be retried.
        """
        ...

    async def close(self) -> None:
        """Releases what was opened; called once, after the last search."""
        ...


@runtime_checkable
class WatchesItself(Protocol):
    """A provider that looks after its identity between searches as well.

    ``on_fault`` is called on the loop with what it found, so that the latch need not wait for the
    next search.
    """

    on_fault: Callable[[errors.RetrievalError], None] | None

"""What a retrieval backend is: the Protocol that every provider implements, and how one is opened.

The one guard around all of them (limits, retries, classification, document checks) is ``guard.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

from smartsearch_sidecar import errors
from smartsearch_sidecar.config import Config
from smartsearch_sidecar.config.sections import PROVIDERS

Progress = Callable[[int, int], None]  # told bytes verified, and bytes in all


@runtime_checkable
class Provider(Protocol):
    """A frozen corpus that can be searched.

    Every method runs on the event loop of the daemon and must not block it: work that blocks
    belongs in threads (``daemon_threads.py``). Several searches run at once (``execute.slots``),
    and each may be cancelled at any await.

    A provider need not check, bound or retry anything: the guard does that for all of them.

    Attributes:
        name: what ``status`` shows, e.g. ``bm25``.
        remote: whether the passages live in another process. Only then can a document change under
            a stable identity, so only then does the guard look for drift.
    """

    name: str
    remote: bool

    async def identity(self) -> Mapping[str, Any]:
        """What names corpus and index.

        Asked once when a run is claimed and again after every search, so it must be cheap. A value
        that differs from the claim's, in kind too (``1`` and ``true``), closes the latch.

        Returns:
            JSON values, with at least ``corpus_sha256`` and ``index_sha256``, 64 lower-case hex
            digits each.

        Raises:
            IdentityChanged: the provider itself sees that it serves something else.
            Exception: any other is classified as ``ProviderFault``.
        """
        ...

    async def search(self, query: str, top_n: int) -> Sequence[Mapping[str, Any]]:
        """The documents found for a query.

        Args:
            query: the policy's text, not stripped, not blank; at most 4,096 bytes of UTF-8.
            top_n: documents at most, 1 or more.

        Returns:
            Mappings with ``id`` and ``contents`` (text that is not blank) and perhaps a finite
            numeric ``score``; best first, ids distinct. An empty sequence where nothing matches.

        Raises:
            ProviderTransport: the backend was not reached or broke off; the guard may try again.
            Exception: any other fails the search and is not tried again.
        """
        ...

    async def close(self) -> None:
        """Releases what was opened. Called once, after the last search."""
        ...


@runtime_checkable
class WatchesItself(Protocol):
    """A provider that looks after its identity between searches as well.

    Attributes:
        on_fault: set by the process; the provider calls it on the loop with the fault it found, so
            that the latch closes without waiting for the next search.
    """

    on_fault: Callable[[errors.RetrievalError], None]


async def open_configured(config: Config, progress: Progress | None = None) -> Provider:
    """Opens what the configuration names, off the loop where it blocks: a backend's folder has the
    name of its key, and a file ``provider.py``. Raises ``IndexUnusable``, ``ConfigError`` or a
    ``RetrievalError`` with a sentence for the operator.
    """
    name = config.retrieval.provider
    # Only the backend that is used is imported: each brings libraries that take long to load.
    if name not in PROVIDERS:
        from smartsearch_sidecar.retrieval.plugin import open_plugin

        return await open_plugin(name)
    backend = import_module(f"smartsearch_sidecar.retrieval.{name}.provider")
    opened: Provider = await backend.open_configured(config, progress)
    return opened

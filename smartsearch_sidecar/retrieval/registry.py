"""From ``retrieval.provider`` to an open provider. The only place that knows every backend."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from smartsearch_sidecar import errors
from smartsearch_sidecar.config import Config
from smartsearch_sidecar.retrieval.provider import Provider

Progress = Callable[[int, int], None]


async def open_configured(config: Config, progress: Progress | None = None) -> Provider:
    """Opens what the configuration names, off the loop where it blocks.

    ``progress`` gets bytes verified and bytes in all. Raises ``IndexUnusable``, ``ConfigError`` or
    a ``RetrievalError`` with a sentence for the operator.
    """
    retrieval = config.retrieval
    if retrieval.provider == "bm25":
        from smartsearch_sidecar.retrieval.bm25.provider import open_provider

        index = retrieval.bm25.index
        if index is None:
            raise errors.CONFIG_INVALID("retrieval.bm25.index is not set: name the index to serve")
        return await asyncio.to_thread(open_provider, index, progress)
    if retrieval.provider == "flashrag":
        from smartsearch_sidecar.retrieval.flashrag.provider import from_config

        return await from_config(retrieval.flashrag)
    from smartsearch_sidecar.retrieval.plugin import open_plugin

    return await open_plugin(retrieval.provider)

"""From ``retrieval.provider`` to an open provider: a backend's folder has the name of its key."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from smartsearch_sidecar.config import Config
from smartsearch_sidecar.config.sections import PROVIDERS
from smartsearch_sidecar.retrieval.provider import Provider

Progress = Callable[[int, int], None]


async def open_configured(config: Config, progress: Progress | None = None) -> Provider:
    """Opens what the configuration names, off the loop where it blocks.

    ``progress`` gets bytes verified and bytes in all. Raises ``IndexUnusable``, ``ConfigError`` or
    a ``RetrievalError`` with a sentence for the operator.
    """
    name = config.retrieval.provider
    # Only the backend that is used is imported: each brings libraries that take long to load.
    if name not in PROVIDERS:
        from smartsearch_sidecar.retrieval.plugin import open_plugin

        return await open_plugin(name)
    backend = import_module(f"smartsearch_sidecar.retrieval.{name}.provider")
    opened: Provider = await backend.open_configured(config, progress)
    return opened

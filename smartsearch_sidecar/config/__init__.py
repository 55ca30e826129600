"""The configuration: frozen, strict values, each limit with its unit and its reason.

``sections`` declares every key; ``model`` is the whole, the rules between keys, and their table;
``loading`` is the one way in: file, environment, command line.
"""

from __future__ import annotations

from smartsearch_sidecar.config.loading import load
from smartsearch_sidecar.config.model import Config
from smartsearch_sidecar.config.sections import ClusterSection, FlashRagSection, RetrievalSection

__all__ = ["ClusterSection", "Config", "FlashRagSection", "RetrievalSection", "load"]

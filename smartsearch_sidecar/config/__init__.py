"""The configuration: frozen, strict values, each limit with its unit and its reason.

``sections`` declares every key, ``keys`` is what declarations are made of, ``model`` is the whole
and the rules between keys. ``loading`` is the one way in: file, environment, command line.
``schema`` is the flat table of keys, ``messages`` the sentence for each thing that is wrong.
"""

from __future__ import annotations

from smartsearch_sidecar.config.loading import load
from smartsearch_sidecar.config.model import Config
from smartsearch_sidecar.config.sections import (
    Bm25Section,
    ClusterSection,
    ExecuteSection,
    FlashRagSection,
    HelperSection,
    LedgerSection,
    QuotasSection,
    ReferencesSection,
    RetrievalSection,
    RewardSection,
    RunSection,
    ServerSection,
)

__all__ = [
    "Bm25Section",
    "ClusterSection",
    "Config",
    "ExecuteSection",
    "FlashRagSection",
    "HelperSection",
    "LedgerSection",
    "QuotasSection",
    "ReferencesSection",
    "RetrievalSection",
    "RewardSection",
    "RunSection",
    "ServerSection",
    "load",
]

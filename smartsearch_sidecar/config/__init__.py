"""The configuration: frozen, strict values, each limit with its unit and its reason.

``sections_*`` hold the keys and ``model`` the whole; ``profiles`` what a profile presets; ``rules``
what must hold between keys; ``layers`` where values come from (file, environment, command line);
``wording`` the sentence a person gets for each thing that is wrong; ``loading`` the one way in.
"""

from __future__ import annotations

from smartsearch_sidecar.config.loading import load
from smartsearch_sidecar.config.model import Config
from smartsearch_sidecar.config.sections_reward import Helper, Quotas, References, Reward
from smartsearch_sidecar.config.sections_run import Cluster, Ledger, Run, Server
from smartsearch_sidecar.config.sections_search import Bm25, Execute, FlashRag, Retrieval

__all__ = [
    "Bm25",
    "Cluster",
    "Config",
    "Execute",
    "FlashRag",
    "Helper",
    "Ledger",
    "Quotas",
    "References",
    "Retrieval",
    "Reward",
    "Run",
    "Server",
    "load",
]

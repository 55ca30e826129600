"""``Config``: the sections together, as the rest of the package receives them.

Values are strict (a number in quotes is not a number) and frozen. ``loading.load`` is the way to
make one: it also knows files, environment and profiles, and has words for what is wrong.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from smartsearch_sidecar.config import rules
from smartsearch_sidecar.config.keys import Section, key
from smartsearch_sidecar.config.profiles import Profile
from smartsearch_sidecar.config.sections_reward import Reward
from smartsearch_sidecar.config.sections_run import Cluster, Ledger, Run, Server
from smartsearch_sidecar.config.sections_search import Execute, Retrieval

# What never leaves this process, and the files it was read from.
SECRETS: Final[dict[str, set[str]]] = {
    "server": {
        "execute_capability",
        "execute_capability_file",
        "internal_capability",
        "internal_capability_file",
    },
    "cluster": {"nats_url"},
}


class Config(Section):
    """Everything, loaded and checked."""

    profile: Profile = key(
        "training",
        "What presets the keys marked with it: `reference` equals the reference implementation.",
    )
    run: Run = Field(default_factory=Run)
    server: Server = Field(default_factory=Server)
    execute: Execute = Field(default_factory=Execute)
    retrieval: Retrieval = Field(default_factory=Retrieval)
    reward: Reward = Field(default_factory=Reward)
    ledger: Ledger = Field(default_factory=Ledger)
    cluster: Cluster | None = None

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if sentences := rules.broken(self):
            raise PydanticCustomError("rules", "{sentences}", {"sentences": sentences})
        return self

    def public(self) -> dict[str, Any]:
        """JSON values of every key but the secrets; for claim, status and page."""
        return self.model_dump(mode="json", exclude=SECRETS)

    def digest(self) -> str:
        """sha256 of what decides how this run behaves: not where it lies, nor its port."""
        value = self.public()
        del value["run"]["directory"], value["server"]["port"]
        canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode("ascii")).hexdigest()

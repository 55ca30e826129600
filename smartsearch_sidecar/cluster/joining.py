"""How a node becomes one of a run's: the same as the others, within their number, under its name.

In this order, and before anything of the run is written: agree, enrol, register. Whoever is refused
has taken no place, and its name is free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.agreement import (
    capability_digest,
    decode_identities,
    encode_identities,
    require_agreement,
)
from smartsearch_sidecar.cluster.bus import Bus
from smartsearch_sidecar.cluster.nodestate import Registration
from smartsearch_sidecar.cluster.quota_leases import Amounts
from smartsearch_sidecar.config import Config

AGREEMENT: Final = "agreement"
REGISTERED: Final = "node"
WITHDRAWN: Final = ""
"""The instance of a name whose owner never began: anybody may take it."""

# What each node may have of its own. Paths and addresses name places; what is there is named by
# digest. Capabilities are compared by digest, below.
OWN_KEYS: Final = frozenset(
    {
        "cluster.node",
        "run.directory",
        "run.previous",
        "server.host",
        "server.probe_host",
        "server.probe_port",
        "retrieval.bm25.index",
        "retrieval.flashrag.url",
        "retrieval.flashrag.canaries",
        "reward.checkout",
        "reward.source",
        "reward.references.train",
        "reward.references.validation",
        "reward.helper.url",
    }
)


def identities(
    config: Config, facts: Mapping[str, Any], versions: Mapping[str, str], totals: Amounts
) -> dict[str, Any]:
    """What must be the same on every node: no secret, no reference answer, no path.

    ``facts`` are the identities the claim names, ``totals`` the run's quotas.
    """
    execute = config.server.execute_capability
    cluster = config.cluster
    if execute is None or cluster is None:
        raise errors.INTERNAL_ERROR("a node without [cluster] or capability joins no run")
    digest = capability_digest(cluster.run_id, execute.get_secret_value())
    return {
        **_whole(dict(facts)),
        "execute_capability": digest,
        "quotas": dict(totals),
        "versions": dict(versions),
        "config": _whole(_shared(config.public())),
    }


def _shared(value: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """A configuration without the keys that are each node's own."""
    found: dict[str, Any] = {}
    for name, item in value.items():
        key = f"{before}{name}"
        if key in OWN_KEYS:
            continue
        found[name] = _shared(item, f"{key}.") if isinstance(item, Mapping) else item
    return found


def _whole(value: Any) -> Any:
    """Fractions as text: between nodes a number has one form only where it is whole."""
    if isinstance(value, Mapping):
        return {name: _whole(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(item) for item in value]
    return repr(value) if isinstance(value, float) else value


async def agree(bus: Bus, node: str, ours: Mapping[str, Any]) -> None:
    """Raises ``ClusterRefused`` that names what differs from the run's first node."""
    if await bus.create(AGREEMENT, encode_identities(ours)):
        return
    entry = await bus.get(AGREEMENT)
    if entry is None:
        raise errors.CLUSTER_UNREACHABLE("what the run's nodes agreed on has gone")
    require_agreement(node, ours, decode_identities(entry.value))


async def register(bus: Bus, node: str, instance: str) -> None:
    """Takes the name for this run directory. Raises ``ClusterRefused`` where another has it."""
    key, value = f"{REGISTERED}.{node}", Registration(instance)
    while not await bus.create(key, value.encode()):
        entry = await bus.get(key)
        if entry is None:
            continue
        registered = Registration.decode(entry.value)
        if registered.instance != WITHDRAWN:
            registered.require(node, instance)
            return
        if await bus.update(key, value.encode(), entry.revision):
            return


async def withdraw(bus: Bus, node: str, instance: str) -> None:
    """Frees the name of a run that was never begun after all."""
    key = f"{REGISTERED}.{node}"
    entry = await bus.get(key)
    if entry is not None and Registration.decode(entry.value).instance == instance:
        await bus.update(key, Registration(WITHDRAWN).encode(), entry.revision)

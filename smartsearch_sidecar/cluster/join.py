"""How a node joins a run: it equals the other nodes, is within their number, and has a free name.

In this order, and before anything of the run is written: ``agree``, join the leases
(``quota_leases.joined``), ``register``. A node that is refused takes no place of the run, and its
name stays free.

**agree.** The first node of a run writes down its identities; each later one compares its own and
is refused by the names of what differs. Every client of the servers can read them, so no capability
and no reference answer belongs among them, only digests (``capability_digest``).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.bus import Bus
from smartsearch_sidecar.cluster.quota_leases import Amounts
from smartsearch_sidecar.cluster.values import canonical, read_canonical, read_object, unreadable
from smartsearch_sidecar.config import Config
from smartsearch_sidecar.run.json_values import differences, flat

AGREEMENT: Final = "agreement"
REGISTERED: Final = "node"
WITHDRAWN: Final = ""  # instance of a name whose run was never begun: any node may take it

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

OWN_FACTS: Final = frozenset({"reward.source.root", "reward.source.path"})  # of identities

_SHOWN_MAX: Final = 6  # differences shown with both sides; where there are more, only names
_DIGEST: Final = re.compile(r"[0-9a-f]{16,}")
_TEXT_MAX: Final = 40


async def agree(bus: Bus, node: str, ours: Mapping[str, Any]) -> None:
    """Raises ``ClusterRefused`` that names what differs from the run's first node."""
    if await bus.update(AGREEMENT, canonical(dict(ours)), 0):
        return
    entry = await bus.get(AGREEMENT)
    if entry is None:
        raise errors.CLUSTER_UNREACHABLE("what the run's nodes agreed on has gone")
    if why := sentence(node, ours, decode_identities(entry.value)):
        raise errors.CLUSTER_REFUSED(why)


async def register(bus: Bus, node: str, instance: str) -> None:
    """Takes the name for this run directory. Raises ``ClusterRefused`` where another has it."""
    key, value = f"{REGISTERED}.{node}", encode_registration(instance)
    while not await bus.update(key, value, 0):
        entry = await bus.get(key)
        if entry is None:
            continue
        registered = decode_registration(entry.value)
        if registered == instance:
            return
        if registered != WITHDRAWN:
            raise errors.CLUSTER_REFUSED(
                f"another run directory has joined this run as node {node}: give each node a "
                "cluster.node of its own, or resume that directory"
            )
        if await bus.update(key, value, entry.revision):
            return


async def withdraw(bus: Bus, node: str, instance: str) -> None:
    """Frees the name of a run that was not begun after all."""
    key = f"{REGISTERED}.{node}"
    entry = await bus.get(key)
    if entry is not None and decode_registration(entry.value) == instance:
        await bus.update(key, encode_registration(WITHDRAWN), entry.revision)


def encode_registration(instance: str) -> bytes:
    """The value of the key ``node.NAME``: which run directory the name belongs to."""
    return canonical({"instance": instance})


def decode_registration(data: bytes) -> str:
    """Its instance. Raises ``ClusterUnreadable``."""
    what = "a node's registration"
    instance = read_object(data, what, {"instance"})["instance"]
    if type(instance) is not str:
        raise unreadable(what, "its instance is not text")
    return instance


def identities(
    config: Config, facts: Mapping[str, Any], versions: Mapping[str, str], totals: Amounts
) -> dict[str, Any]:
    """What must be the same on every node: no secret, no reference answer, no path. ``facts`` are
    the identities that the claim names, ``versions`` those of this process' packages.
    """
    execute = config.server.execute_capability
    if execute is None or (cluster := config.cluster) is None:
        raise errors.INTERNAL_ERROR("a node without [cluster] or capability joins no run")
    return {
        **_whole(_shared(facts, OWN_FACTS)),
        "execute_capability": capability_digest(cluster.run_id, execute.get_secret_value()),
        "quotas": dict(totals),
        "versions": dict(versions),
        "config": _whole(_shared(config.public(), OWN_KEYS)),
    }


def capability_digest(run_id: str, capability: str) -> str:
    """What other clients of the servers may read of a capability: 16 hex digits, salted by the run.
    Only 8 bytes: enough to tell two capabilities apart, too few to confirm a guess by.
    """
    key = hashlib.sha256(run_id.encode()).digest()
    return hashlib.blake2b(capability.encode(), digest_size=8, key=key).hexdigest()


def decode_identities(data: bytes) -> dict[str, Any]:
    """Reads the key ``agreement``. Raises ``ClusterUnreadable``."""
    what = "what the run's first node is"
    value = read_canonical(data, what)
    if type(value) is not dict:
        raise unreadable(what, "it is not an object")
    return value


def _shared(value: Mapping[str, Any], own: Collection[str], before: str = "") -> dict[str, Any]:
    """Without the dotted keys that are each node's own."""
    found: dict[str, Any] = {}
    for name, item in value.items():
        key = f"{before}{name}"
        if key not in own:
            found[name] = _shared(item, own, f"{key}.") if isinstance(item, Mapping) else item
    return found


def _whole(value: Any) -> Any:
    """Fractions as text: canonical bytes hold whole numbers only."""
    if isinstance(value, Mapping):
        return {name: _whole(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(item) for item in value]
    return repr(value) if isinstance(value, float) else value


def sentence(node: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Why ``node`` cannot join, or ``None`` where nothing differs. Digests are shortened."""
    names = differences(ours, theirs)
    if not names:
        return None
    own, other = flat(ours), flat(theirs)
    shown = [
        name
        if "capability" in name or len(names) > _SHOWN_MAX
        else f"{name} (here {_shown(own, name)}, there {_shown(other, name)})"
        for name in names
    ]
    return (
        f"node {node} differs from the run's first node in {', '.join(shown)}: give every node "
        "the same corpus, index, references, versions and configuration"
    )


def _shown(side: Mapping[str, Any], name: str) -> str:
    if name not in side:
        return "nothing"
    value = side[name]
    if isinstance(value, str):
        if _DIGEST.fullmatch(value):
            return f"{value[:8]}…"
        return repr(value if len(value) <= _TEXT_MAX else f"{value[: _TEXT_MAX - 1]}…")
    if isinstance(value, bool | int) or value is None:
        return orjson.dumps(value).decode()
    return f"a {type(value).__name__}"

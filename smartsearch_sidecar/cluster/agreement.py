"""What every node of a run must be alike in, and by what names one that differs is refused.

The first node of a run writes down its identities; each later one compares its own and is refused
by the names of what differs. Everybody who reaches the servers can read them: no capability and no
reference answer belongs among them, only digests (``capability_digest``).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.canonical import canonical, read_canonical, unreadable
from smartsearch_sidecar.run.json_values import differences, flat

_SHOWN_MAX: Final = 6
"""Differences whose two sides are spelt out; more are named only."""
_DIGEST: Final = re.compile(r"[0-9a-f]{16,}")
_TEXT_MAX: Final = 40
_ABSENT: Final = "nothing"


def encode_identities(identities: Mapping[str, Any]) -> bytes:
    """The value of the key ``agreement``."""
    return canonical(dict(identities))


def decode_identities(data: bytes) -> dict[str, Any]:
    """Reads it. Raises ``ClusterUnreadable``."""
    value = read_canonical(data, "what the run's first node is")
    if type(value) is not dict:
        raise unreadable("what the run's first node is", "it is not an object")
    return value


def sentence(node: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Why ``node`` cannot join, or ``None`` where nothing differs. Digests are shown shortened."""
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


def require_agreement(node: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raises ``ClusterRefused`` with that sentence."""
    why = sentence(node, ours, theirs)
    if why is not None:
        raise errors.CLUSTER_REFUSED(why)


def capability_digest(run_id: str, capability: str) -> str:
    """What may be said of a capability where others read it: 16 hex digits, salted by the run.

    Half of a digest: enough to tell two capabilities apart, too little to confirm a guess by.
    """
    salted = hashlib.blake2b(
        capability.encode(), digest_size=8, key=hashlib.sha256(run_id.encode()).digest()
    )
    return salted.hexdigest()


def _shown(side: Mapping[str, Any], name: str) -> str:
    if name not in side:
        return _ABSENT
    value = side[name]
    if isinstance(value, str):
        if _DIGEST.fullmatch(value):
            return f"{value[:8]}…"
        return repr(value if len(value) <= _TEXT_MAX else f"{value[: _TEXT_MAX - 1]}…")
    if isinstance(value, bool | int) or value is None:
        return orjson.dumps(value).decode()
    return f"a {type(value).__name__}"

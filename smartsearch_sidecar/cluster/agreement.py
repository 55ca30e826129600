"""What every node of a run must be alike in, and by what names one that differs is refused.

The first node of a run writes down its identities; each later one compares its own and is refused
by the names of what differs. Everybody who reaches the servers can read them: no capability and no
reference answer belongs among them, only digests (``capability_digest``).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.canonical import canonical, read_canonical, unreadable

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


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[str, ...]:
    """The dotted names of everything that is not the same on both sides, sorted."""
    own, other = dict(_flat(ours)), dict(_flat(theirs))
    missing = object()
    return tuple(
        name
        for name in sorted(own.keys() | other.keys())
        if not _same(own.get(name, missing), other.get(name, missing))
    )


def sentence(node: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Why ``node`` cannot join, or ``None`` where nothing differs. Digests are shown shortened."""
    names = differences(ours, theirs)
    if not names:
        return None
    own, other = dict(_flat(ours)), dict(_flat(theirs))
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


def _flat(value: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        # An object without keys is a value of its own, else it could not be told from none.
        if isinstance(item, Mapping) and item:
            yield from _flat(item, f"{before}{key}.")
        else:
            yield f"{before}{key}", item


def _same(one: Any, other: Any) -> bool:
    """Equal as JSON: 1 and true are two values, a tuple and a list are one."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)


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

"""What a node publishes about itself: two small values and their bytes."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.canonical import canonical, read_canonical, unreadable

_KEYS: Final = frozenset(
    {
        *("instance", "restarts", "beat", "status", "ended", "admitted"),
        *("counts", "seq", "head", "cause"),
    }
)


class RunStatus(enum.StrEnum):
    """How a node, or the whole run, is."""

    HEALTHY = "healthy"
    """The latch is open, everything is settled, the ledger can be written, identities hold."""
    PENDING = "pending"
    """The same, but with work in flight, or with something about a node not known."""
    FAILED = "failed"
    """The latch is closed, or has to be."""


@dataclass(frozen=True, slots=True)
class NodeState:
    """The value of the key ``state.NAME``, and a node's answer when all are asked.

    Attributes:
        instance: the run directory's own random id: a resumed directory is the same node.
        restarts, beat: the node's restarts, and the number of this state since the last of them.
            The pair only grows, so a state that is delivered twice is recognised as old.
        status: how the node is.
        ended: closed cleanly; this is its last state until it resumes.
        admitted: whether it has ever admitted anything.
        counts: whole numbers for the page, by name.
        seq, head: sequence number and sum of the journal's last record.
        cause: why it failed; present exactly where ``status`` is ``failed``.
    """

    instance: str
    restarts: int
    beat: int
    status: RunStatus
    ended: bool
    admitted: bool
    counts: Mapping[str, int]
    seq: int
    head: str
    cause: str | None = None

    def __post_init__(self) -> None:
        if (self.cause is not None) is not (self.status is RunStatus.FAILED):
            raise errors.INTERNAL_ERROR("a node states a cause exactly when it has failed")
        if self.ended and self.status is RunStatus.PENDING:
            raise errors.INTERNAL_ERROR("a node with work in flight has not ended")
        whole = (self.restarts, self.beat, self.seq, *self.counts.values())
        if any(type(number) is not int or number < 0 for number in whole):
            raise errors.INTERNAL_ERROR("a number in a node's state is not a count")

    def encode(self) -> bytes:
        """Canonical bytes."""
        return canonical(
            {
                "instance": self.instance,
                "restarts": self.restarts,
                "beat": self.beat,
                "status": self.status.value,
                "ended": self.ended,
                "admitted": self.admitted,
                "counts": dict(self.counts),
                "seq": self.seq,
                "head": self.head,
                "cause": self.cause,
            }
        )

    @classmethod
    def decode(cls, data: bytes) -> NodeState:
        """Reads exactly what ``encode`` writes. Raises ``ClusterUnreadable`` for anything else."""
        what = "a node's state"
        value = _object(data, what, _KEYS)
        texts = [value["instance"], value["head"], value["status"]]
        texts += [] if value["cause"] is None else [value["cause"]]
        flags = (value["ended"], value["admitted"])
        if any(type(text) is not str for text in texts) or type(value["counts"]) is not dict:
            raise unreadable(what, "a text or the counts are of the wrong type")
        if value["status"] not in set(RunStatus) or any(type(flag) is not bool for flag in flags):
            raise unreadable(what, "its status or a flag has another value")
        try:
            return cls(**{**value, "status": RunStatus(value["status"])})
        except errors.InvariantBroken as exc:
            raise unreadable(what, exc.message) from None


@dataclass(frozen=True, slots=True)
class Registration:
    """The value of the key ``node.NAME``: which run directory the name belongs to."""

    instance: str

    def encode(self) -> bytes:
        """Canonical bytes."""
        return canonical({"instance": self.instance})

    @classmethod
    def decode(cls, data: bytes) -> Registration:
        """Reads exactly what ``encode`` writes. Raises ``ClusterUnreadable`` for anything else."""
        what = "a node's registration"
        value = _object(data, what, frozenset({"instance"}))
        if type(value["instance"]) is not str:
            raise unreadable(what, "its instance is not text")
        return cls(value["instance"])

    def require(self, name: str, instance: str) -> None:
        """Raises ``ClusterRefused`` where the name belongs to another than ``instance``."""
        if self.instance != instance:
            raise errors.CLUSTER_REFUSED(
                f"another run directory has joined this run as node {name}: give each node a "
                "cluster.node of its own, or resume that directory"
            )


def _object(data: bytes, what: str, keys: frozenset[str]) -> dict[str, Any]:
    value = read_canonical(data, what)
    if type(value) is not dict or value.keys() != keys:
        raise unreadable(what, "it has other keys")
    return value

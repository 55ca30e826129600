"""Values between nodes as bytes: one form each, and no other is read.

Canonical JSON: compact, sorted keys, UTF-8, whole numbers only. What a reader decodes must encode
to the very bytes it came in. So a key given twice, a number written as a fraction, white space or a
value cut short is refused, and equal values are equal bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

import orjson

from smartsearch_sidecar import errors

VALUE_BYTES_MAX: Final = 512 * 1024  # half of what NATS takes by default: headers always fit
DEPTH_MAX: Final = 16  # objects and lists within each other

_PLAIN: Final = frozenset({str, int, bool, type(None)})


def canonical(value: Any) -> bytes:
    """The one form of a value of objects, lists, text, whole numbers, booleans and null. Raises
    ``InvariantBroken`` for anything else, and for a value over ``VALUE_BYTES_MAX``.
    """
    _refuse_other(value)
    try:
        data = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError as exc:  # what is left: text with no UTF-8 form, a number over 64 bits
        raise errors.INTERNAL_ERROR(f"a value for other nodes has no bytes: {exc}") from None
    if len(data) > VALUE_BYTES_MAX:
        size = f"{len(data)} bytes, over the bound of {VALUE_BYTES_MAX}"
        raise errors.INTERNAL_ERROR(f"a value for other nodes has {size}")
    return data


def read_canonical(data: bytes, what: str) -> Any:
    """Reads what ``canonical`` made; ``what`` names it for the message. Raises
    ``ClusterUnreadable`` for any other bytes.
    """
    if len(data) > VALUE_BYTES_MAX:
        raise unreadable(what, f"it has {len(data)} bytes, over the bound of {VALUE_BYTES_MAX}")
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise unreadable(what, "it is not JSON") from None
    with suppress(errors.InvariantBroken):
        if canonical(value) == data:
            return value
    raise unreadable(what, "its bytes are not the one form of its value")


def read_object(data: bytes, what: str, keys: Collection[str]) -> dict[str, Any]:
    """The same for an object of exactly these keys."""
    value = read_canonical(data, what)
    if type(value) is not dict or value.keys() != set(keys):
        raise unreadable(what, "it has other keys")
    return value


def unreadable(what: str, why: str) -> errors.ClusterUnreadable:
    """The error for bytes that no node of this version has written."""
    return errors.CLUSTER_UNREADABLE(
        f"{what} cannot be read ({why}): use one version of the sidecar on every node, and a "
        "cluster.run_id that no other run has"
    )


def _refuse_other(value: Any, depth: int = DEPTH_MAX) -> None:
    """Raises for what has not one form everywhere: a fraction may be written in two ways."""
    kind = type(value)
    if depth < 0:
        raise errors.INTERNAL_ERROR(f"a value for other nodes is nested over {DEPTH_MAX} deep")
    if kind is dict:
        for key, item in value.items():
            _refuse_other(item, depth - 1)
            if type(key) is not str:
                raise errors.INTERNAL_ERROR("a value for other nodes has a key that is no text")
    elif kind is list:
        for item in value:
            _refuse_other(item, depth - 1)
    elif kind not in _PLAIN:
        raise errors.INTERNAL_ERROR(f"a value for other nodes holds a {kind.__name__}")


class RunStatus(enum.StrEnum):
    """How a node, or the whole run, is."""

    HEALTHY = "healthy"  # latch open, all settled, the ledger can be written, identities hold
    PENDING = "pending"  # the same, but with work in flight, or something of a node not known
    FAILED = "failed"  # the latch is closed, or has to be


@dataclass(frozen=True, slots=True)
class NodeState:
    """What a node says about itself: the value of the key ``state.NAME``, and its live answer.
    ``restarts`` and ``beat`` together only grow: a state that is delivered twice is seen to be old.
    """

    instance: str  # the run directory's own random id: a resumed directory is the same node
    restarts: int
    beat: int  # the number of this state since the last restart
    status: RunStatus
    ended: bool  # closed cleanly; this is its last state until it resumes
    admitted: bool  # whether it has ever admitted anything
    counts: Mapping[str, int]  # for the page, by name
    seq: int  # of the journal's last record
    head: str  # the sum of that record
    cause: str | None = None  # why it failed; present exactly where ``status`` is ``failed``
    detail: str = ""  # of that cause
    deaf_from: str | None = None  # of one that has ended and was asked before: took no call since
    accepted_searches: int = 0  # of all nodes, at the last checkpoint that this one accepted
    gaps: Sequence[Mapping[str, Any]] = ()  # the last of this journal, as receipts name them

    def __post_init__(self) -> None:
        if (self.cause is not None) is not (self.status is RunStatus.FAILED):
            raise errors.INTERNAL_ERROR("a node states a cause exactly when it has failed")
        if self.ended and self.status is RunStatus.PENDING:
            raise errors.INTERNAL_ERROR("a node with work in flight has not ended")
        whole = (self.restarts, self.beat, self.seq, self.accepted_searches, *self.counts.values())
        if any(type(number) is not int or number < 0 for number in whole):
            raise errors.INTERNAL_ERROR("a number in a node's state is not a count")

    def encode(self) -> bytes:
        gaps = [dict(gap) for gap in self.gaps]
        return canonical({**asdict(self), "status": self.status.value, "gaps": gaps})

    @classmethod
    def decode(cls, data: bytes) -> NodeState:
        """Reads exactly what ``encode`` writes. Raises ``ClusterUnreadable`` for anything else."""
        what = "a node's state"
        value = read_object(data, what, {field.name for field in fields(cls)})
        cause = "" if value["cause"] is None else value["cause"]
        deaf_from = "" if value["deaf_from"] is None else value["deaf_from"]
        texts = (
            value["instance"],
            value["head"],
            value["status"],
            cause,
            value["detail"],
            deaf_from,
        )
        flags = (value["ended"], value["admitted"])
        if any(type(text) is not str for text in texts) or type(value["counts"]) is not dict:
            raise unreadable(what, "a text or the counts are of the wrong type")
        gaps = value["gaps"]
        if type(gaps) is not list or any(type(gap) is not dict for gap in gaps):
            raise unreadable(what, "its gaps are no list of objects")
        if value["status"] not in set(RunStatus) or any(type(flag) is not bool for flag in flags):
            raise unreadable(what, "its status or a flag has another value")
        try:
            return cls(**{**value, "status": RunStatus(value["status"]), "gaps": tuple(gaps)})
        except errors.InvariantBroken as exc:
            raise unreadable(what, exc.message) from None

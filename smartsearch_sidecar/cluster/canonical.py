"""Values between nodes as bytes: one form each, and no other is read.

Canonical JSON: compact, sorted keys, UTF-8, whole numbers only. What a reader decodes must encode
to the very bytes it came in. So a key given twice, a number written as a fraction, white space or a
value cut short is refused, and equal values are equal bytes.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from smartsearch_sidecar import errors

VALUE_BYTES_MAX: Final = 512 * 1024
"""Bytes of one value: half of what a NATS server takes by default, so headers always fit."""
DEPTH_MAX: Final = 16
"""Objects and lists within each other."""

_PLAIN: Final = frozenset({str, int, bool, type(None)})


def canonical(value: Any) -> bytes:
    """The one form of a value of objects, lists, text, whole numbers, booleans and null.

    Raises ``InvariantBroken`` for anything else, and for a value over ``VALUE_BYTES_MAX``.
    """
    _refuse_other(value)
    try:
        data = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError as exc:  # what is left: text with no UTF-8 form, a number over 64 bits
        raise errors.INTERNAL_ERROR(f"a value for other nodes has no bytes: {exc}") from None
    if len(data) > VALUE_BYTES_MAX:
        raise errors.INTERNAL_ERROR(
            f"a value for other nodes has {len(data)} bytes, over the bound of {VALUE_BYTES_MAX}"
        )
    return data


def read_canonical(data: bytes, what: str) -> Any:
    """Reads what ``canonical`` made; ``what`` names it for the message.

    Raises ``ClusterUnreadable`` for any other bytes.
    """
    if len(data) > VALUE_BYTES_MAX:
        raise unreadable(what, f"it has {len(data)} bytes, over the bound of {VALUE_BYTES_MAX}")
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise unreadable(what, "it is not JSON") from None
    try:
        same = canonical(value) == data
    except errors.InvariantBroken:
        same = False
    if not same:
        raise unreadable(what, "its bytes are not the one form of its value")
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

"""What nodes tell each other is read to the byte: one form, or a refusal by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.answer_digests import decode_batch, encode_batch
from smartsearch_sidecar.cluster.join import (
    decode_identities,
    decode_registration,
    encode_registration,
    sentence,
)
from smartsearch_sidecar.cluster.quota_leases import Leases, joined, leased
from smartsearch_sidecar.cluster.values import NodeState, RunStatus, canonical, read_canonical
from smartsearch_sidecar.run.json_values import differences

STATE = NodeState(
    "ab12", 1, 27, RunStatus.FAILED, True, True, {"x": 3, "y": 0}, 9, "cd", "deadline"
)
LEASES, _ = leased(joined(joined(Leases(2, {"searches": 99, "t": 7}), "a"), "b"), "b", {"t": 5})

READERS: dict[str, tuple[bytes, Callable[[bytes], Any], Callable[[Any], bytes]]] = {
    "state": (STATE.encode(), NodeState.decode, lambda value: bytes(value.encode())),
    "registration": (
        encode_registration("ab12"),
        decode_registration,
        encode_registration,
    ),
    "leases": (LEASES.encode(), Leases.decode, lambda value: bytes(value.encode())),
    "identities": (
        canonical({"a": "b", "c": {"d": 1, "e": None}}),
        decode_identities,
        canonical,
    ),
    "digests": (encode_batch([b"0" * 28, b"1" * 28]), decode_batch, encode_batch),
}


def read_or_refused(name: str, data: bytes) -> None:
    """Reads bytes as themselves, or refuses them as ``ClusterUnreadable`` and nothing else."""
    _, decode, encode = READERS[name]
    try:
        value = decode(data)
    except errors.ClusterUnreadable:
        return
    assert encode(value) == data


@pytest.mark.parametrize("name", READERS)
def test_every_byte_counts(name: str) -> None:
    """A value with one byte changed, lost or too many is another one, or none."""
    whole = READERS[name][0]
    read_or_refused(name, whole)
    for at in range(len(whole)):
        for byte in (*b' "0,-}{]', 0, 0xFF, whole[at] ^ 1, whole[at] ^ 0x20):
            read_or_refused(name, whole[:at] + bytes([byte]) + whole[at + 1 :])
        read_or_refused(name, whole[:at])
        read_or_refused(name, whole[:at] + whole[at + 1 :])
        read_or_refused(name, whole[:at] + whole[at : at + 1] + whole[at:])
    read_or_refused(name, whole + b" ")
    read_or_refused(name, whole + b"\n")


@pytest.mark.parametrize("name", READERS)
@given(data=st.binary(max_size=200))
@example(data=b"[]")
@example(data=b"{}")
def test_any_bytes_are_read_or_refused(name: str, data: bytes) -> None:
    """Nothing a stranger writes under a key is anything but a refusal by name."""
    read_or_refused(name, data)
    read_or_refused(name, data + READERS[name][0])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text(max_size=5), JSON, max_size=5)


@given(value=JSON)
def test_a_value_comes_back_as_itself(value: Any) -> None:
    """Writing and reading are inverse, and the order of keys is of no account."""
    data = canonical(value)
    back = read_canonical(data, "the thing")
    assert back == value
    assert canonical(back) == data


@given(ours=OBJECTS, theirs=OBJECTS)
@example(ours={"a": "0" * 64}, theirs={"a": "x" * 500})
@example(ours={"a": [1]}, theirs={"a": {"b": None}})
@example(ours={"a": 1, "b": True}, theirs={"b": 1})
def test_nothing_differs_exactly_where_the_bytes_agree(
    ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    """No difference of identities goes unnamed, and each is named alike from both sides."""
    names = differences(ours, theirs)
    assert names == differences(theirs, ours)
    assert (not names) == (canonical(ours) == canonical(theirs))
    said = sentence("n", ours, theirs)
    assert (said is None) == (not names)


@given(
    counts=st.dictionaries(st.text(max_size=8), st.integers(0, 2**63), max_size=4),
    status=st.sampled_from(RunStatus),
    numbers=st.tuples(*[st.integers(0, 2**63)] * 3),
    texts=st.tuples(*[st.text(max_size=20)] * 3),
    flags=st.tuples(st.booleans(), st.booleans()),
)
def test_a_state_comes_back_as_itself(
    counts: dict[str, int],
    status: RunStatus,
    numbers: tuple[int, ...],
    texts: tuple[str, ...],
    flags: tuple[bool, bool],
) -> None:
    """Every state that a node can publish is read by the others as it was."""
    said = NodeState(
        instance=texts[0],
        restarts=numbers[0],
        beat=numbers[1],
        status=status,
        ended=flags[0] and status is not RunStatus.PENDING,
        admitted=flags[1],
        counts=counts,
        seq=numbers[2],
        head=texts[1],
        cause=texts[2] if status is RunStatus.FAILED else None,
    )
    assert NodeState.decode(said.encode()) == said


@given(digests=st.lists(st.binary(min_size=28, max_size=28), min_size=1, max_size=40))
def test_digests_come_back_as_themselves(digests: list[bytes]) -> None:
    """Order and repetitions included."""
    assert decode_batch(encode_batch(digests)) == digests

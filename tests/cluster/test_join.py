"""What every node must be alike in, and the bytes in which nodes tell each other anything."""

from __future__ import annotations

from typing import Any

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.join import (
    AGREEMENT,
    agree,
    capability_digest,
    decode_identities,
    sentence,
)
from smartsearch_sidecar.cluster.values import (
    DEPTH_MAX,
    VALUE_BYTES_MAX,
    canonical,
    read_canonical,
)
from smartsearch_sidecar.run.json_values import differences
from tests.fakes.bus import Ground
from tests.fakes.each import each

OURS: dict[str, Any] = {
    "profile": "training",
    "retrieval": {"corpus_sha256": "a" * 64, "index_sha256": "b" * 64},
    "quotas": {"searches": 10_000},
    "versions": {"python": "3.12.4"},
    "accepted": ["c" * 64],
    "scorer": None,
}


def changed(**changes: Any) -> dict[str, Any]:
    """Another node's identities."""
    return {**OURS, **changes}


# --- differences ----------------------------------------------------------------------------------


def test_equal_identities_do_not_differ() -> None:
    """Neither the order of keys nor the way over the servers makes a difference."""
    there = decode_identities(canonical(dict(reversed(OURS.items()))))
    assert differences(OURS, there) == ()
    assert sentence("n2", OURS, there) is None


@each(
    "theirs, names",
    [
        (changed(profile="reference"), ("profile",)),
        (
            changed(retrieval={"corpus_sha256": "a" * 64, "index_sha256": "d" * 64}),
            ("retrieval.index_sha256",),
        ),
        (changed(retrieval={"corpus_sha256": "a" * 64}), ("retrieval.index_sha256",)),
        (changed(retrieval={}), ("retrieval.corpus_sha256", "retrieval.index_sha256")),
        (changed(quotas={"searches": 10_000, "train": 1}), ("quotas.train",)),
        (changed(accepted=["c" * 64, "d" * 64]), ("accepted",)),
        (changed(accepted=[]), ("accepted",)),
        (changed(scorer="e" * 64), ("scorer",)),
        (changed(scorer=False), ("scorer",)),
        (changed(quotas={"searches": True}), ("quotas.searches",)),
    ],
)
def test_what_differs_is_named(theirs: dict[str, Any], names: tuple[str, ...]) -> None:
    """Every difference is named by its dotted name, whichever side lacks it, both ways alike."""
    assert differences(OURS, theirs) == names
    assert differences(theirs, OURS) == names


def test_one_is_not_true() -> None:
    """Values are compared as JSON: a number is no boolean, absent is not null."""
    assert differences({"x": 1}, {"x": True}) == ("x",)
    assert differences({"x": None}, {}) == ("x",)
    assert differences({"x": [1]}, {"x": [True]}) == ("x",)
    assert differences({"x": [{"y": 1}]}, {"x": [{"y": 1}]}) == ()


def test_the_sentence_shows_both_sides_and_shortens_digests() -> None:
    """It names the values of both sides, and shows no digest in full."""
    said = sentence("n2", OURS, changed(profile="reference", retrieval={"corpus_sha256": "f" * 64}))
    assert said == (
        "node n2 differs from the run's first node in "
        "profile (here 'training', there 'reference'), "
        "retrieval.corpus_sha256 (here aaaaaaaa…, there ffffffff…), "
        "retrieval.index_sha256 (here bbbbbbbb…, there nothing): give every node the same corpus, "
        "index, references, versions and configuration"
    )


def test_nothing_is_shown_of_capabilities() -> None:
    """Not even a digest of one, and not in a message of many differences either."""
    theirs = {"execute_capability": "1" * 16, "n": 1}
    said = sentence("n2", {"execute_capability": "2" * 16, "n": 2}, theirs)
    assert said is not None
    assert "execute_capability, n (here 2, there 1)" in said
    assert "11" not in said
    assert "22" not in said


def test_many_differences_are_named_only() -> None:
    """A node of another run differs in everything: the sentence stays one."""
    said = sentence("n2", {f"key{at}": "x" * 99 for at in range(9)}, {})
    assert said is not None
    assert "key0, key1" in said
    assert "xx" not in said


def test_long_text_is_cut() -> None:
    """A value of any length leaves the sentence readable."""
    said = sentence("n2", {"model": "m" * 500, "list": [1], "flag": True}, {})
    assert said is not None
    assert "m" * 39 + "…" in said
    assert "m" * 40 not in said
    assert "flag (here true, there nothing), list (here a list, there nothing)" in said


async def test_a_node_that_differs_is_refused() -> None:
    """The refusal is misuse: it ends a command with exit 2. What was agreed on stays."""
    ground = Ground()
    bus = ground.bus()
    await agree(bus, "n1", changed(profile="reference"))
    first = ground.keys[AGREEMENT]
    with pytest.raises(errors.ClusterRefused, match="profile"):
        await agree(bus, "n2", OURS)
    await agree(bus, "n3", dict(reversed(changed(profile="reference").items())))
    assert ground.keys[AGREEMENT] == first
    assert issubclass(errors.ClusterRefused, errors.UsageError)


def test_a_capability_is_compared_by_a_salted_digest() -> None:
    """Equal capabilities of one run are seen to be equal, and of two runs are not."""
    one = capability_digest("run", "c" * 43)
    assert one == capability_digest("run", "c" * 43)
    assert one != capability_digest("run", "d" * 43)
    assert one != capability_digest("other", "c" * 43)
    assert len(one) == 16
    assert "ccc" not in one


@pytest.mark.parametrize("data", [b"[]", b"1", b'"x"', b"null", b"{", b'{"a": 1}'])
def test_identities_are_an_object(data: bytes) -> None:
    """Anything else under the key is not this run's."""
    with pytest.raises(errors.ClusterUnreadable):
        decode_identities(data)


# --- canonical bytes ------------------------------------------------------------------------------


def test_equal_values_are_equal_bytes() -> None:
    """A value is written in one order of keys, in whichever it was made."""
    assert canonical({"b": [1, None, True], "a": {"ü": "x"}}) == canonical(
        {"a": {"ü": "x"}, "b": [1, None, True]}
    )
    assert canonical({"b": 1, "a": "ü"}) == '{"a":"ü","b":1}'.encode()


def deep(levels: int) -> Any:
    """A list in a list in a list."""
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@each(
    "value",
    [1.5, 1.0, float("nan"), (1,), {1: 2}, "\ud800", 2**64, b"x", deep(DEPTH_MAX + 1), {"k": {1}}],
)
def test_what_has_no_one_form_is_not_written(value: Any) -> None:
    """Fractions, other keys than text, tuples and text without UTF-8 are our own mistakes."""
    with pytest.raises(errors.InvariantBroken):
        canonical({"x": value})


@each(
    "data",
    [
        b"",
        b" 1",
        b"1 ",
        b"1.0",
        b"1e2",
        b"-0",
        b"01",
        b'{"a":1,"a":1}',
        b'{"b":1,"a":1}',
        b'{"a" :1}',
        b'"\\u0041"',
        b'"\\ud800"',
        b'"\xff"',
        b"\xef\xbb\xbf1",
        b"NaN",
        b"18446744073709551616",
        b"[" * 900 + b"]" * 900,
        b"[" * 5000,
        b"1\n",
        b"1,2",
    ],
)
def test_a_second_form_is_not_read(data: bytes) -> None:
    """One value, one form: everything else is refused, however deep or odd, with the same error."""
    with pytest.raises(errors.ClusterUnreadable, match="the thing cannot be read"):
        read_canonical(data, "the thing")


def test_values_are_bounded() -> None:
    """What a server would refuse is refused here, by name, written or read."""
    with pytest.raises(errors.InvariantBroken):
        canonical("x" * VALUE_BYTES_MAX)
    with pytest.raises(errors.ClusterUnreadable):
        read_canonical(b'"' + b"x" * VALUE_BYTES_MAX + b'"', "the thing")
    assert read_canonical(canonical(deep(DEPTH_MAX)), "the thing") == deep(DEPTH_MAX)

"""Which configurations may continue a run, and what the others are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.recovery import compare_claims, require_same_claim
from tests.fakes.journals import claim_bytes
from tests.fakes.raised import raises


def claims(**changes: Any) -> bytes:
    """A claim with a configuration in it."""
    values: dict[str, Any] = {
        "run_id": "00" * 16,
        "created_at": "2026-12-02T04:13:00Z",
        "versions": {"python": "3.11.7"},
        "profile": "training",
        "config_sha256": "d" * 64,
        "config": {
            "run": {"directory": "runs/a"},
            "server": {"port": 8765},
            "execute": {"max_calls": 100},
        },
    }
    return claim_bytes(**{**values, **changes})


def test_same_claim_goes_on() -> None:
    """Name, time, versions, place and port of a run may differ from one start to the next."""
    new = claims(
        run_id="11" * 16,
        created_at="2026-12-03T00:00:00Z",
        versions={"python": "3.14.0"},
        config={
            "run": {"directory": "elsewhere"},
            "server": {"port": 0},
            "execute": {"max_calls": 100},
        },
    )
    assert compare_claims(claims(), new) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"profile": "reference"}, ['profile: "training" -> "reference"']),
        ({"max_retrieval_calls": 5}, ["max_retrieval_calls: 1000 -> 5"]),
        (
            {"retrieval": {"corpus_sha256": "e" * 64, "index_sha256": "1" * 64}},
            [f'retrieval.corpus_sha256: "{"c" * 64}" -> "{"e" * 64}"'],
        ),
        (
            {"config": {"run": {}, "server": {}, "execute": {"max_calls": 7}}},
            ["execute.max_calls: 100 -> 7"],
        ),
        (
            {"config": {"run": {}, "server": {}, "execute": {}, "new": {"key": None}}},
            [
                "execute.max_calls: 100 -> absent",
                "new.key: absent -> null",
            ],
        ),
        (
            {"config_sha256": "f" * 64},
            ["config_sha256: the configuration differs in a key that the claim does not show"],
        ),
    ],
)
def test_other_claim_is_told_key_by_key(changes: dict[str, Any], told: list[str]) -> None:
    """Whoever resumes with another configuration reads what to change back."""
    assert compare_claims(claims(), claims(**changes)) == told


def test_claim_of_another_kind_is_no_claim() -> None:
    """Bytes that are no claim are named, not compared."""
    assert compare_claims(b"[]", claims()) == ["claim.json: it is not readable as a claim"]
    assert compare_claims(claims(), b"{") == ["the new claim: it is not readable as a claim"]


def test_other_claim_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """One sentence: what differs, and what to do."""
    with raises(errors.RUN_DIRECTORY, match=r"calls: 1000 -> 5\): resume it with that"):
        require_same_claim(tmp_path, claims(), claims(max_retrieval_calls=5))
    require_same_claim(tmp_path, claims(), claims())


def test_a_flag_that_became_a_number_is_another_configuration() -> None:
    """A claim is compared as JSON, where ``1`` is not ``true``, as between nodes."""
    assert compare_claims(claims(x=1), claims(x=True)) == ["x: 1 -> true"]


def test_an_absent_section_is_not_an_empty_one() -> None:
    """A section without keys is a value of its own, as between nodes."""
    assert compare_claims(claims(), claims(x={})) == ["x: absent -> {}"]

"""Eight ranks of the pinned rollout's client against a daemon, as a trainer node runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes import native_client, native_ranks
from tests.fakes.process import running
from tests.fakes.provider import documents_for
from tests.fakes.served import read_records

pytestmark = pytest.mark.process

RANKS = 8
TURNS = 40  # five a thread; every rank sends each of the six kinds of wrong query


def expected_text(query: str) -> str:
    """What a rollout must read for a query."""
    if query in native_client.WRONG:
        return "result: \ninvalid query"
    passages = "\n\n".join(document["contents"] for document in documents_for(query))
    return f"result: \n{passages}"


def test_eight_ranks_of_the_native_client(tmp_path: Path) -> None:
    """64 callers, policy errors among them: every text is right and every count exact."""
    with running(tmp_path, retrieval__provider="tests.fakes.plugin:slow") as daemon:
        ranks = native_ranks.begin(tmp_path, [daemon.sandbox_url] * RANKS, TURNS)
        said = native_ranks.texts(ranks)
        health = daemon.internal().health(settle_seconds=5)
        assert daemon.stop() == 0
    assert len(said) == RANKS * TURNS
    wrong = [(query, text) for query, text in said if text != expected_text(query)]
    assert wrong == []
    declined = sum(query in native_client.WRONG for query, _ in said)
    assert declined == RANKS * TURNS // 5
    assert (health.status, health.value["state"]) == (200, "healthy")
    assert health.value["retrieval_attempts"] == RANKS * TURNS - declined
    assert health.value["retrieval_responses"] == RANKS * TURNS - declined
    assert health.value["retrieval_declined"] == declined
    kinds = [record["kind"] for record in read_records(daemon.directory)]
    assert kinds.count("retrieval.answered") == RANKS * TURNS - declined
    assert kinds.count("retrieval.declined") == declined
    assert kinds[-1] == "run.closed"

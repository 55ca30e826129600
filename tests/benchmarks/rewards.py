"""Scenarios of ``/reward``: one batch of rollouts, beside the reference scoring the same rows."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from smartsearch_sidecar.client import Client
from tests.benchmarks.processes import Target, ours, peer, probe, require_reference
from tests.benchmarks.results import Case, Goal, Metrics, Scenario
from tests.benchmarks.settings import Settings, Unmeasured
from tests.fakes import rollouts
from tests.fakes.helper import MODEL
from tests.fakes.rewarded import QUESTION, SOURCE_SHA256, TRUTH, item, write_files
from tests.fakes.served import ENVIRONMENT

# Rows, rounds, milliseconds a helper call: each varied from the case of the goal.
SHAPES = ((1, 5, 100), (4, 5, 100), (32, 1, 100), (32, 5, 100), (32, 5, 0))
QUICK_SHAPES = ((1, 2, 20), (4, 2, 20))
PATIENCE_SECONDS = 600.0


def reward(settings: Settings) -> Scenario:
    """By rows, rounds and the helper's latency."""
    shapes = QUICK_SHAPES if settings.quick else SHAPES
    cases, goals = [], []
    for rows, rounds, milliseconds in shapes:
        what = f"{rows} rows x {rounds} rounds, {milliseconds} ms helper"
        own, theirs = f"ours, {what}", f"reference, {what}"
        cases.append(Case(own, partial(_ours, settings, rows, rounds, milliseconds)))
        cases.append(Case(theirs, partial(_reference, settings, rows, rounds, milliseconds)))
        least = 25.0 if (rows, rounds, milliseconds) == (32, 5, 100) else None
        goals.append(Goal(f"/reward, {what}: faster", theirs, "seconds", own, least=least))
    return Scenario(
        "reward",
        "/reward/batch, one batch, ledger synced (the reference: one row after another)",
        ("seconds", "helper_calls"),
        tuple(cases),
        tuple(goals),
    )


def _ours(settings: Settings, rows: int, rounds: int, milliseconds: int) -> Metrics:
    with settings.scratch() as folder, peer(folder, "helper", str(milliseconds)) as helper:
        source, train, validation = write_files(folder)
        keys: dict[str, Any] = {
            "reward__enabled": True,
            "reward__source": str(source),
            "reward__source_sha256": SOURCE_SHA256,
            "reward__references__train": str(train),
            "reward__references__validation": str(validation),
            "reward__helper__url": helper.url,
            "reward__helper__model": MODEL,
            "reward__helper__model_sha256": "a" * 64,
        }
        with ours(folder, **keys) as target:
            items = [item(_rollout(target, row, rounds), TRUTH) for row in range(rows)]
            internal = target.internal()
            began = time.monotonic()
            answer = internal.call(
                "POST", "/reward/batch", {"items": items}, timeout_seconds=PATIENCE_SECONDS
            )
            took = time.monotonic() - began
            if answer.status != 200 or len(answer.value["rewards"]) != rows:
                raise Unmeasured(f"the batch was answered {answer.status}")
            calls = internal.call("GET", "/status").value["reward"]["train"]["model_responses"]
            return {"seconds": took, "helper_calls": calls}


def _rollout(target: Target, row: int, rounds: int) -> str:
    """A rollout whose every passage this very run has answered: anything else is refused."""
    client = Client(target.url.removesuffix("/execute"))
    turns = []
    for number in range(rounds):
        query = f"row {row} round {number}"
        text = client.execute(query, ENVIRONMENT).value["result"]
        turns.append(rollouts.answered(query, text))
    return rollouts.rollout(QUESTION, turns, rollouts.final("Paris"))


def _reference(settings: Settings, rows: int, rounds: int, milliseconds: int) -> Metrics:
    require_reference()
    with settings.scratch() as folder:
        return probe(folder, "score", str(folder), str(rows), str(rounds), str(milliseconds))

"""`make bench` end to end, tiny: that it measures and what it writes, never how fast it was."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import corpora, load, plot, results
from tests.benchmarks.__main__ import main
from tests.benchmarks.load import NUMBER
from tests.benchmarks.processes import peer
from tests.benchmarks.results import Case, Goal, Outcome, Scenario
from tests.benchmarks.settings import Settings, Unmeasured
from tests.fakes.process import ROOT, environment
from tests.parity.sides import needs_reference

needs_wrk = pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed")
CI_MAY_LACK_WRK = pytest.mark.may_skip("wrk is a program of the system's, not of this project")


def bench(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs the command as `make bench` does."""
    command = [sys.executable, "-m", "tests.benchmarks", "--out", str(out), *words]
    return subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )


@needs_wrk
@CI_MAY_LACK_WRK
@pytest.mark.process
def test_a_tiny_run_measures_and_writes(tmp_path: Path) -> None:
    """One command leaves each case's figures, what they are compared with, a plot; no ledgers."""
    out = tmp_path / "bench"
    done = bench(out, "growth", "--quick", "--seconds", "1", "--clients", "2")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in out.iterdir()) == ["plot.svg", "results.json", "tables.md"]
    value = json.loads((out / "results.json").read_bytes())
    assert value["format"] == 1
    assert value["facts"]["cores"] >= 1
    assert (value["asked"]["clients"], value["asked"]["quick"]) == ([2], True)
    (growth,) = value["scenarios"]
    assert [case["name"] for case in growth["cases"]] == ["500 requests", "2,000 requests"]
    first, second = (case["median"] for case in growth["cases"])
    assert 500 <= first["answers"] < 2000 <= second["answers"]
    assert first["journal_mb"] < second["journal_mb"]
    for figures in (first, second):
        assert (figures["refused"], figures["broken"], figures["latched"]) == (0, 0, 0)
        assert min(figures[name] for name in ("per_second", "p50_ms", "p99_ms", "cpu_us")) > 0
    assert [goal["median"] > 0 for goal in value["goals"]] == [True, True]
    assert "2,000 requests" in done.stdout
    assert "| 2,000 requests" in (out / "tables.md").read_text()


@needs_wrk
@CI_MAY_LACK_WRK
@pytest.mark.parametrize(
    "kind, words",
    [("bare", ()), ("layer", ("7",)), pytest.param("reference", ("0",), marks=needs_reference)],
)
@pytest.mark.process
def test_peers_answer_the_same_load(tmp_path: Path, kind: str, words: tuple[str, ...]) -> None:
    """What stands beside us takes the very requests we take, and refuses none."""
    with peer(tmp_path, kind, *words) as target:
        bodies = corpora.plain_bodies(tmp_path)
        found = load.wrk(target, bodies, clients=2, seconds=30, limit=50)
    assert found["answers"] >= 50
    assert (found["refused"], found["broken"]) == (0, 0)


def test_an_unknown_scenario_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A scenario that does not exist is wrong use, and nothing is measured."""
    with pytest.raises(SystemExit) as ended:
        main(["nosuch", "--out", str(tmp_path / "bench")])
    assert ended.value.code == 2
    assert "nosuch" in capsys.readouterr().err
    assert not (tmp_path / "bench").exists()


def scripted(*values: dict[str, float] | None) -> Any:
    """A measurement that finds these values, one a run; ``None`` cannot be measured."""
    left = list(values)

    def measure() -> dict[str, float]:
        found = left.pop(0)
        if found is None:
            raise Unmeasured("it is not installed")
        return found

    return measure


def outcome_of(cases: list[Case], *goals: Goal, runs: int = 3) -> Outcome:
    """The cases measured so often."""
    scenario = Scenario("made", "made up", ("per_second",), tuple(cases), goals)
    return results.measure(scenario, runs, lambda _: None)


def test_cases_alternate() -> None:
    """Every case is measured once before any is measured again."""
    order: list[str] = []

    def noted(name: str) -> Any:
        def measure() -> dict[str, float]:
            order.append(name)
            return {"per_second": 1.0}

        return measure

    outcome_of([Case("a", noted("a")), Case("b", noted("b"))], runs=2)
    assert order == ["a", "b", "a", "b"]


def test_ratios_are_taken_within_a_run() -> None:
    """A goal's figure is the median of each run's own ratio, and of runs that have both."""
    own = scripted({"per_second": 10.0}, {"per_second": 30.0}, {"per_second": 8.0})
    peer = scripted({"per_second": 5.0}, {"per_second": 10.0}, None)
    goal = Goal("over", "own", "per_second", "peer", least=2.6)
    outcome = outcome_of([Case("own", own), Case("peer", peer)], goal)
    assert outcome.goal_values(goal) == [2.0, 3.0]
    assert outcome.notes == ["peer: it is not installed"]
    (written,) = results.as_json([outcome], {}, {})["goals"]
    assert (written["median"], written["met"]) == (2.5, False)


@pytest.mark.parametrize(
    "goal, value, met",
    [
        (Goal("", "c", "lost", most=0), 0.0, True),
        (Goal("", "c", "lost", most=0), 1.0, False),
        (Goal("", "c", "per_second", least=6), 6.0, True),
        (Goal("", "c", "per_second"), 1.0, None),
    ],
)
def test_a_goal_is_met_missed_or_informs(goal: Goal, value: float, met: bool | None) -> None:
    """A bound is included; without one there is nothing to miss."""
    assert goal.met(value) is met


def test_a_peer_that_is_missing_leaves_the_rest(tmp_path: Path) -> None:
    """What could not be measured is a dash in the tables, nothing in JSON, no line in the plot."""
    cases = [
        Case("own, 8", scripted({"per_second": 10.0, "p99_ms": 2.0}), "own", 8),
        Case("peer, 8", scripted(None), "peer", 8),
    ]
    outcome = outcome_of(cases, Goal("over", "own, 8", "per_second", "peer, 8"), runs=1)
    value = results.as_json([outcome], {}, {})
    assert value["goals"][0]["median"] is None
    assert [case["median"] for case in value["scenarios"][0]["cases"]][1] == {}
    picture = ET.fromstring(plot.svg([outcome]))  # noqa: S314 - our own text
    words = "".join(picture.itertext())
    assert "own" in words
    assert "peer" not in words


def test_scratch_is_on_the_measured_disk_and_goes(tmp_path: Path) -> None:
    """Ledgers lie under the folder of the figures while they are measured, and nowhere after."""
    settings = Settings(out=tmp_path)
    with settings.scratch() as first, settings.scratch() as second:
        assert first != second
        assert first.parent == second.parent == tmp_path.resolve()
    assert list(tmp_path.iterdir()) == []


def test_the_script_knows_the_place_of_the_number() -> None:
    """The load script and the bodies agree on where a query's number goes."""
    assert f'"{NUMBER}"' in (ROOT / "tests/benchmarks/load.lua").read_text()

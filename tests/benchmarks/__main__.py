"""``make bench``, or ``python -m tests.benchmarks [NAME ...]``: figures beside those of our peers.

Without names everything but ``profile`` is measured. Tables go to the terminal, as each scenario is
done; figures to ``results.json``, ``tables.md`` and ``plot.svg`` in the folder ``--out``.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.benchmarks import clustered, disks, execute, machine, plot, profiling, results, rewards
from tests.benchmarks.results import Outcome, Scenario
from tests.benchmarks.settings import CLIENTS, Settings, Unmeasured
from tests.fakes.process import ROOT

SCENARIOS: dict[str, Callable[[Settings], Scenario]] = {
    "instant": execute.instant,
    "slow": execute.slow,
    "bm25": execute.bm25,
    "bm25-large": execute.bm25_large,
    "repeated": execute.repeated,
    "native": execute.native,
    "keepalive": execute.keepalive,
    "flashrag": execute.flashrag,
    "reward": rewards.reward,
    "growth": disks.growth,
    "verify": disks.verify,
    "build": disks.build,
    "start": disks.startup,
    "clustered": clustered.clustered,
    "profile": profiling.profile,
}
APART = {"profile"}  # asked for by name
QUICK_CLIENTS = (1, 8, 32)
WIDTH = 170


def parser() -> argparse.ArgumentParser:
    """The words of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        description="Measure the sidecar beside its peers. See tests/benchmarks/README.md.",
    )
    made.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SCENARIOS))
    made.add_argument("--out", type=Path, default=Path("bench"), help="folder of the figures")
    made.add_argument("--runs", type=int, help="repetitions (3)")
    made.add_argument("--seconds", type=float, help="of one load (3)")
    made.add_argument("--native-seconds", type=float, help="of the native client's (60)")
    made.add_argument("--clients", type=int, nargs="+", help="numbers of clients (1 8 64 256 512)")
    made.add_argument("--passages", type=int, help="of the large corpus (300000)")
    made.add_argument("--growth", type=int, default=100_000, help="longest history, to 1000000")
    made.add_argument("--checkout", type=Path, help="the pinned trainer's, for its sandbox")
    made.add_argument(
        "--sandbox-python",
        default=sys.executable,
        help="an interpreter with fastapi, uvicorn and requests, for the sandbox",
    )
    made.add_argument("--quick", action="store_true", help="a short look at everything")
    return made


def settings_of(asked: argparse.Namespace) -> Settings:
    """What was asked, with what a short or a whole run takes for the rest."""
    quick = bool(asked.quick)

    def chosen(value: Any, short: Any, whole: Any) -> Any:
        return value if value is not None else short if quick else whole

    return Settings(
        out=asked.out.resolve(),
        runs=chosen(asked.runs, 1, 3),
        seconds=chosen(asked.seconds, 1.0, 3.0),
        native_seconds=chosen(asked.native_seconds, 3.0, 60.0),
        passages=chosen(asked.passages, 20_000, 300_000),
        growth=asked.growth,
        clients=tuple(chosen(asked.clients, QUICK_CLIENTS, CLIENTS)),
        checkout=None if asked.checkout is None else asked.checkout.resolve(),
        sandbox_python=asked.sandbox_python,
        quick=quick,
    )


def write(settings: Settings, outcomes: Sequence[Outcome], facts: dict[str, Any]) -> None:
    """Writes the figures so far: a run that is cut short leaves what it has."""
    asked = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(settings).items()
        if not name.startswith("_") and name not in ("out", "sandbox_python", "checkout")
    }
    value = results.as_json(outcomes, facts, asked)
    (settings.out / "results.json").write_text(json.dumps(value, indent=1) + "\n")
    (settings.out / "plot.svg").write_text(plot.svg(outcomes), encoding="utf-8")
    (settings.out / "tables.md").write_text(_markdown(outcomes, facts), encoding="utf-8")


def _markdown(outcomes: Sequence[Outcome], facts: dict[str, Any]) -> str:
    """The tables as they can be put into a README."""
    text = io.StringIO()
    console = Console(file=text, width=400, highlight=False)
    console.print(
        f"{facts['cpu']}, {facts['cores']} cores, Python {facts['python']}, {facts['at']}"
    )
    for outcome in outcomes:
        console.print(f"\n{outcome.scenario.title}")
        console.print(results.table(outcome, markdown=True))
        if outcome.scenario.name == "profile":
            console.print(profiling.differences(outcome, markdown=True))
        for note in outcome.notes:
            console.print(note)
    console.print(results.goals_table(outcomes, markdown=True))
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def main(words: Sequence[str] | None = None) -> int:
    """Measures; 0 however the goals came out, 2 for wrong use."""
    asked = parser().parse_args(words)
    unknown = sorted(set(asked.names) - set(SCENARIOS))
    if unknown:
        parser().error(f"no scenario is called {unknown[0]!r}: {', '.join(SCENARIOS)}")
    if shutil.which("wrk") is None:
        parser().error("wrk is not installed (Debian: apt-get install wrk)")
    settings = settings_of(asked)
    settings.out.mkdir(parents=True, exist_ok=True)
    console, stderr = Console(width=WIDTH), Console(stderr=True)
    facts = machine.facts(settings.out)
    outcomes: list[Outcome] = []
    began = time.monotonic()
    for name in asked.names or [name for name in SCENARIOS if name not in APART]:
        try:
            scenario = SCENARIOS[name](settings)
        except Unmeasured as why:
            stderr.print(f"{name} is left out: {why}")
            continue
        with stderr.status(name) as status:
            outcome = results.measure(scenario, settings.runs, status.update)
        outcomes.append(outcome)
        console.print(results.table(outcome), "")
        if name == "profile":
            console.print(profiling.differences(outcome), "")
        facts["seconds"] = round(time.monotonic() - began)
        write(settings, outcomes, facts)
    console.print(results.goals_table(outcomes))
    where = settings.out.relative_to(ROOT) if settings.out.is_relative_to(ROOT) else settings.out
    console.print(f"{facts['seconds']} s; results.json, tables.md and plot.svg are in {where}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""From measurements to what a person reads: cases, runs that alternate, medians, ratios, goals."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.box import MARKDOWN
from rich.table import Table

from tests.benchmarks.settings import Unmeasured

Metrics = dict[str, float]

# What a metric is called in a table, and how it is written there.
COLUMNS: Mapping[str, tuple[str, str]] = {
    "per_second": ("answers/s", ",.0f"),
    "p50_ms": ("p50 ms", ",.2f"),
    "p99_ms": ("p99 ms", ",.1f"),
    "cpu_us": ("CPU us", ",.0f"),
    "most_waiting": ("most waiting", ",.0f"),
    "refused": ("refused", ",.0f"),
    "broken": ("broken", ",.0f"),
    "lost": ("lost", ",.0f"),
    "latched": ("latched", ",.0f"),
    "answers": ("answers", ",.0f"),
    "repeats": ("hit or shared", ".1%"),
    "per_call": ("searches a call", ",.2f"),
    "seconds": ("seconds", ",.3f"),
    "helper_calls": ("helper calls", ",.0f"),
    "resident_mib": ("resident MiB", ",.1f"),
    "resident_share": ("of what is allowed", ".2f"),
    "peak_mib": ("peak MiB", ",.0f"),
    "journal_mb": ("journal MB", ",.1f"),
    "journal_bytes": ("bytes a request", ",.0f"),
    "mb_per_second": ("MB/s", ",.0f"),
    "passages_per_second": ("passages/s", ",.0f"),
    "index_mib": ("index MiB", ",.1f"),
    "same_index": ("same as before", ",.0f"),
    "wall_us": ("wall us", ",.1f"),
    "user_us": ("user us", ",.1f"),
    "system_us": ("system us", ",.1f"),
}


@dataclass(frozen=True)
class Case:
    """One thing measured; ``measure`` is called once a run.

    ``series`` and ``clients`` place it in the plot: a line, and where on it.
    """

    name: str
    measure: Callable[[], Metrics]
    series: str = ""
    clients: int = 0


@dataclass(frozen=True)
class Goal:
    """A figure of a case, or its ratio to the same figure ``against`` another one of the same run.

    With ``least`` or ``most`` it can be met or missed; with neither it only informs.
    """

    what: str
    case: str
    metric: str
    against: str | None = None
    least: float | None = None
    most: float | None = None

    def wanted(self) -> str:
        """The bound in words."""
        if self.least is not None:
            return f"at least {self.least:g}"
        return "" if self.most is None else f"at most {self.most:g}"

    def met(self, value: float) -> bool | None:
        """Whether ``value`` is within the bound; ``None`` without one."""
        if self.least is not None:
            return value >= self.least
        return None if self.most is None else value <= self.most


@dataclass(frozen=True)
class Scenario:
    """A table: what is measured, which figures are shown, what is compared."""

    name: str
    title: str
    columns: tuple[str, ...]
    cases: tuple[Case, ...]
    goals: tuple[Goal, ...] = ()
    once: bool = False  # too long to repeat, or absolute: one run says it
    finish: Callable[[], None] | None = None


@dataclass
class Outcome:
    """A scenario and what came of it: for each case the metrics of each run."""

    scenario: Scenario
    runs: dict[str, list[Metrics]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def values(self, case: str, metric: str) -> list[float]:
        """A metric of a case in every run that has it."""
        return [run[metric] for run in self.runs.get(case, []) if metric in run]

    def goal_values(self, goal: Goal) -> list[float]:
        """A goal's figure in every run; ratios are taken within a run."""
        if goal.against is None:
            return self.values(goal.case, goal.metric)
        pairs = zip(self.runs.get(goal.case, []), self.runs.get(goal.against, []), strict=False)
        return [
            own[goal.metric] / other[goal.metric]
            for own, other in pairs
            if goal.metric in own and other.get(goal.metric)
        ]


def measure(scenario: Scenario, runs: int, tell: Callable[[str], None]) -> Outcome:
    """Every case once, then every case again: what slows the machine down slows them all."""
    outcome = Outcome(scenario, {case.name: [] for case in scenario.cases})
    try:
        for number in range(1, 2 if scenario.once else runs + 1):
            for case in scenario.cases:
                tell(f"{scenario.name}, run {number}: {case.name}")
                try:
                    found = case.measure()
                except Unmeasured as why:
                    note, found = f"{case.name}: {why}", {}
                    if note not in outcome.notes:
                        outcome.notes.append(note)
                outcome.runs[case.name].append(found)
    finally:
        if scenario.finish is not None:
            scenario.finish()
    return outcome


# --- words ---------------------------------------------------------------------------------------


def spread(values: Sequence[float], form: str) -> str:
    """The median, and from where to where when they differ as written."""
    if not values:
        return "-"
    middle = format(statistics.median(values), form)
    low, high = format(min(values), form), format(max(values), form)
    return middle if low == high else f"{middle} ({low}-{high})"


def table(outcome: Outcome, *, markdown: bool = False) -> Table:
    """One scenario's table."""
    scenario = outcome.scenario
    made = Table(
        title=None if markdown else scenario.title,
        title_justify="left",
        caption=None if markdown else "\n".join(outcome.notes) or None,
        caption_justify="left",
        box=MARKDOWN if markdown else None,
        header_style="bold",
    )
    made.add_column(scenario.name, no_wrap=not markdown)
    for metric in scenario.columns:
        made.add_column(COLUMNS[metric][0], justify="right")
    for case in scenario.cases:
        cells = [
            spread(outcome.values(case.name, metric), COLUMNS[metric][1])
            for metric in scenario.columns
        ]
        made.add_row(case.name, *cells)
    return made


def goals_table(outcomes: Sequence[Outcome], *, markdown: bool = False) -> Table:
    """Every ratio and every bound, of all scenarios."""
    made = Table(
        title=None if markdown else "Beside the peers, and the goals",
        title_justify="left",
        box=MARKDOWN if markdown else None,
        header_style="bold",
    )
    for name in ("figure", "found", "goal", ""):
        made.add_column(name)
    for _, goal, values in goals_of(outcomes):
        middle = statistics.median(values) if values else None
        met = None if middle is None else goal.met(middle)
        word = "" if met is None else "met" if met else "missed"
        form = ".2f" if goal.against else COLUMNS[goal.metric][1]
        times = " x" if goal.against else ""
        made.add_row(goal.what, spread(values, form) + times, goal.wanted(), word)
    return made


def goals_of(outcomes: Sequence[Outcome]) -> Iterator[tuple[Outcome, Goal, list[float]]]:
    """Every goal with its scenario and its figure in each run."""
    for outcome in outcomes:
        for goal in outcome.scenario.goals:
            yield outcome, goal, outcome.goal_values(goal)


# --- JSON ----------------------------------------------------------------------------------------


def as_json(
    outcomes: Sequence[Outcome], facts: Mapping[str, Any], asked: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything, with each run's figures: medians can be taken again."""
    return {
        "format": 1,
        "facts": dict(facts),
        "asked": dict(asked),
        "scenarios": [_scenario_json(outcome) for outcome in outcomes],
        "goals": [
            {
                "scenario": outcome.scenario.name,
                "what": goal.what,
                "runs": values,
                "median": statistics.median(values) if values else None,
                "least": goal.least,
                "most": goal.most,
                "met": goal.met(statistics.median(values)) if values else None,
            }
            for outcome, goal, values in goals_of(outcomes)
        ],
    }


def _scenario_json(outcome: Outcome) -> dict[str, Any]:
    scenario = outcome.scenario
    cases = [
        {
            "name": case.name,
            "series": case.series,
            "clients": case.clients,
            "runs": outcome.runs[case.name],
            "median": {
                metric: statistics.median(outcome.values(case.name, metric))
                for metric in dict.fromkeys(name for run in outcome.runs[case.name] for name in run)
            },
        }
        for case in sorted(scenario.cases, key=operator.attrgetter("series", "clients"))
    ]
    named = {"name": scenario.name, "title": scenario.title, "notes": outcome.notes}
    return {**named, "cases": cases}

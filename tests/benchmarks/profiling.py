"""Where the microseconds of one request go, by measured subtraction: a row a layer."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from rich.box import MARKDOWN
from rich.table import Table

from tests.benchmarks import corpora, layers, load
from tests.benchmarks.processes import made_up, peer
from tests.benchmarks.results import COLUMNS, Case, Goal, Metrics, Outcome, Scenario
from tests.benchmarks.settings import Settings

SHOWN = ("wall_us", "cpu_us", "user_us", "system_us")


def profile(settings: Settings) -> Scenario:
    """Every layer under the same load; the differences are ``differences``'."""
    whole, bare = layers.NAMES[layers.SYNC], layers.NAMES[layers.BARE]
    return Scenario(
        "profile",
        f"one request, {settings.few} clients, instant provider: all of it up to this layer",
        ("per_second", *SHOWN),
        tuple(
            Case(name, partial(_layer, settings, number))
            for number, name in enumerate(layers.NAMES)
        ),
        (Goal("a request: wall time over a bare handler's", whole, "wall_us", bare),),
    )


def _layer(settings: Settings, number: int) -> Metrics:
    with settings.scratch() as folder:
        bodies = corpora.plain_bodies(folder)
        keys: dict[str, Any] = {"ledger__sync": number == layers.SYNC}
        if number >= layers.HAND_OVER:
            server = made_up(folder, 0, **keys)
        elif number == layers.BARE:
            server = peer(folder, "bare")
        else:
            server = peer(folder, "layer", str(number))
        with server as target:
            return load.wrk(target, bodies, clients=settings.few, seconds=settings.seconds)


def differences(outcome: Outcome, *, markdown: bool = False) -> Table:
    """What each layer adds to the one before: medians of differences within a run.

    Wall time is that of the whole server for one request: 1 / throughput. It can be more than the
    CPU's (waiting for the disk) and, with a second thread, less.
    """
    made = Table(
        title=None if markdown else "one request: what each layer adds",
        title_justify="left",
        box=MARKDOWN if markdown else None,
        header_style="bold",
    )
    made.add_column("layer")
    for metric in SHOWN:
        made.add_column(COLUMNS[metric][0], justify="right")
    before: list[Metrics] = []
    for case in outcome.scenario.cases:
        runs = outcome.runs[case.name]
        cells = []
        for metric in SHOWN:
            earlier = [run.get(metric, 0.0) for run in before] or [0.0] * len(runs)
            added = [
                run[metric] - base
                for run, base in zip(runs, earlier, strict=False)
                if metric in run
            ]
            cells.append(f"{statistics.median(added):,.1f}" if added else "-")
        made.add_row(case.name, *cells)
        before = runs
    return made

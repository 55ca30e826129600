"""``rehearse``: the pinned client's load against a scratch copy, before a run depends on it."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from smartsearch_sidecar.client import Client, Endpoints
from smartsearch_sidecar.commands import questions as asked
from smartsearch_sidecar.commands.progress import PLAIN_SECONDS
from smartsearch_sidecar.config import Config, load
from smartsearch_sidecar.load_test.client_worker import Part, ask
from smartsearch_sidecar.load_test.processes import Cast, scratch_sidecar
from smartsearch_sidecar.load_test.report import (
    Played,
    Tally,
    as_json,
    reasons,
    suggestions,
)
from smartsearch_sidecar.load_test.scratch import scratch_text
from smartsearch_sidecar.load_test.shape import DECLINED, THREADS_PER_RANK

ALONE = 20  # searches asked one at a time before the ranks begin
LOOK_SECONDS = 0.5
SETTLE_SECONDS = 15.0
BAR_WIDTH = 40


def rehearse(
    *,
    config: Annotated[Path, typer.Option("--config", help="The configuration `serve` will get.")],
    ranks: Annotated[
        int,
        typer.Option("--ranks", min=1, max=64, help="Rollout ranks of this node; 8 calls each."),
    ],
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, max=3600, help="How long they call.")
    ] = 20.0,
    questions: Annotated[
        Path | None,
        typer.Option(
            "--questions", help="Lines, JSONL or Parquet; without it the references, or the corpus."
        ),
    ] = None,
    as_json_: Annotated[bool, typer.Option("--json", help="Print JSON at the end.")] = False,
) -> None:
    """Play N ranks of the pinned rollout against a scratch copy of the configuration.

    Eight threads a rank, a new connection a call, ten seconds of patience, for as long as asked.
    The copy has a directory of its own (beside the run's, on the same disk, removed at the end), a
    port of its own, and rewards off. Exit codes: 0 the node would hold, 1 it would not, 2 it did
    not come to that.
    """
    loaded = load(config)
    found = asked.named(loaded, questions)  # before anything is started for them
    with _folder(loaded) as folder:
        played, source = _play(loaded, folder, ranks, seconds, found)
    why = reasons(played, loaded)
    if as_json_:
        typer.echo(json.dumps({**as_json(played, loaded), "questions": source}, indent=2))
    else:
        _report(played, loaded, why, source)
    raise typer.Exit(1 if why else 0)


@contextmanager
def _folder(config: Config) -> Iterator[Path]:
    """A private folder, on the run's own disk where that can be written: syncs cost what they will
    cost there.
    """
    directory = config.run.directory
    parent = None if directory is None else directory.parent
    if parent is not None and not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        parent = None
    folder = Path(tempfile.mkdtemp(prefix="smartsearch-rehearsal-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _play(
    config: Config, folder: Path, ranks: int, seconds: float, found: tuple[list[str], str] | None
) -> tuple[Played, str]:
    scratch, run = folder / "scratch.toml", folder / "run"
    scratch.write_text(scratch_text(config), encoding="utf-8")
    environment = config.execute.environment
    print("starting a scratch sidecar (a large index takes a while)", file=sys.stderr, flush=True)
    with scratch_sidecar(scratch, run) as endpoints, Cast() as cast:
        client = Client(endpoints.sandbox_url)
        chosen, source = asked.choose(config, found, client)
        alone = [ask(client, question, environment)[1] for question in (chosen * ALONE)[:ALONE]]
        parts = [
            Part(endpoints.sandbox_url, environment, chosen, rank, ranks, seconds)
            for rank in range(ranks)
        ]
        began = time.monotonic()
        cast.rehearse(parts)
        with _view(cast.tally, endpoints, ranks) as look:
            cast.wait(seconds, look, every=LOOK_SECONDS)
        took = time.monotonic() - began
        internal = Client(endpoints.internal_url)
        health = internal.health(SETTLE_SECONDS).value
        status = internal.call("GET", "/status").value
        cause = health.get("cause")
        played = Played(
            ranks=ranks,
            took_seconds=min(took, max(seconds, LOOK_SECONDS)),
            alone_seconds=statistics.median(alone),
            tally=cast.tally,
            most_waiting=status["slots"]["most_waiting"],
            state=health["state"],
            cause=None if cause is None else f"{cause['cause']}: {cause['detail']}",
            cache=status["cache"],
            journal_bytes=sum(file.stat().st_size for file in (run / "journal").iterdir()),
        )
    return played, source


# --- what is shown -------------------------------------------------------------------------------


@contextmanager
def _view(tally: Tally, endpoints: Endpoints, ranks: int) -> Iterator[Callable[[], None]]:
    """A table on a terminal, a line every few seconds elsewhere."""
    console = Console(stderr=True)
    internal = Client(endpoints.internal_url)
    began = time.monotonic()
    if not console.is_terminal:
        yield _plain(tally, began)
        return
    with Live(console=console, transient=True, auto_refresh=False) as live:

        def look() -> None:
            slots = internal.call("GET", "/status").value["slots"]
            live.update(_table(tally, slots, ranks, time.monotonic() - began), refresh=True)

        yield look


def _plain(tally: Tally, began: float) -> Callable[[], None]:
    last = began

    def look() -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= PLAIN_SECONDS:
            last = now
            failed = sum(tally.failures.values())
            print(
                f"rehearsing: {now - began:.0f} s, {tally.calls:,} calls, {failed:,} failed",
                file=sys.stderr,
                flush=True,
            )

    return look


def _table(tally: Tally, slots: dict[str, Any], ranks: int, seconds: float) -> Table:
    table = Table.grid(padding=(0, 2))
    rows = {
        "ranks": f"{ranks}, {ranks * THREADS_PER_RANK} calls at once, {seconds:.0f} s",
        "calls": f"{tally.calls:,}, {tally.calls / seconds:,.0f} a second",
        "slots": f"{slots['in_service']} of {slots['total']} in service, "
        f"{slots['waiting']} waiting (most {slots['most_waiting']})",
        "latency": _latency(Tally(seconds=tally.seconds[-2000:])),
        "declined": f"{tally.outcomes[DECLINED]:,}",
        "failed": ", ".join(f"{count} {name}" for name, count in tally.failures.items()) or "none",
    }
    for name, text in rows.items():
        bad = name == "failed" and text != "none"
        table.add_row(Text(name, style="dim"), Text(text, style="bold red" if bad else ""))
    return table


def _latency(tally: Tally) -> str:
    shares = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("slowest", 1.0))
    return ", ".join(f"{name} {tally.percentile(share) * 1000:,.0f} ms" for name, share in shares)


def _report(played: Played, config: Config, why: list[str], source: str) -> None:
    console = Console(highlight=False, soft_wrap=True)
    tally = played.tally
    console.print(
        f"{played.ranks} ranks, {played.at_once} calls at once, {tally.calls:,} calls "
        f"({played.rate:,.0f} a second); questions: {source}"
    )
    most = max((count for _, count in tally.histogram()), default=1)
    for name, count in tally.histogram():
        bar = "█" * max(1, round(BAR_WIDTH * count / most)) if count else ""
        console.print(Text(f"  {name:<15} {bar:<{BAR_WIDTH}} {count:,}"))
    console.print(f"  latency   {_latency(tally)}; alone {played.alone_seconds * 1000:,.1f} ms")
    console.print(f"  waiting   at most {played.most_waiting} of {config.execute.waiting_max}")
    console.print(f"  declined  {tally.outcomes[DECLINED]:,}")
    refused = ", ".join(f"{count:,} {name}" for name, count in tally.failures.items())
    console.print(f"  failed    {refused or 'none'}")
    cache = ", ".join(f"{count:,} {name}" for name, count in played.cache.items())
    console.print(f"  cache     {cache or 'off'}")
    console.print(f"  journal   {played.journal_bytes / 2**20:,.1f} MiB")
    if why:
        for sentence in why:
            console.print(Text("does not hold: ", style="bold red").append(sentence, "default"))
    else:
        console.print(Text("holds", style="bold green").append(f" {played.ranks} ranks", "default"))
    for line in suggestions(played, config):
        console.print(Text(f"  {line}"))

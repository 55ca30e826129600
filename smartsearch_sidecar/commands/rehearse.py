"""``rehearse``: a load test of this node with the pinned client's calls, before a run needs it."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from typer import Option

from smartsearch_sidecar import errors
from smartsearch_sidecar.client import Client
from smartsearch_sidecar.commands.env import is_parquet, parquet_rows
from smartsearch_sidecar.commands.progress import plain_lines
from smartsearch_sidecar.config import Config, load
from smartsearch_sidecar.load_test.client_worker import (
    DECLINED,
    STOCK_QUESTIONS,
    THREADS_PER_RANK,
    Workload,
    ask,
)
from smartsearch_sidecar.load_test.processes import (
    CallStats,
    LoadTestResult,
    as_json,
    play,
    reasons,
    scratch_sidecar,
    scratch_text,
    suggestions,
)

UNLOADED = 20  # searches asked one at a time before the ranks begin
SETTLE_SECONDS = 15.0
BAR_WIDTH = 40
QUESTIONS_MAX = 5000
"""So many that the caches see what they see in a run; more only cost memory."""
_WORDS = 9  # of a passage, as long as a question


def rehearse(
    *,
    config: Annotated[Path, Option(help="The configuration `serve` will get.")],
    ranks: Annotated[int, Option(min=1, max=64, help="Rollout ranks of this node; 8 calls each.")],
    seconds: Annotated[float, Option(min=1, max=3600, help="How long they call.")] = 20.0,
    questions: Annotated[
        Path | None,
        Option(help="Lines, JSONL or Parquet; without it the references, or the corpus."),
    ] = None,
    as_json_: Annotated[bool, Option("--json", help="Print JSON at the end.")] = False,
) -> None:
    """Load-test this node: N ranks of the pinned rollout against a scratch copy of the run.

    Each rank calls from eight threads, with a new connection for each call and a timeout of ten
    seconds. The scratch copy has its own directory (beside the run's, on the same disk, removed at
    the end), its own port, and rewards off. Exit codes: 0 the node would hold, 1 it would not, 2
    the test could not run.
    """
    loaded = load(config)
    references = loaded.reward.references
    path = questions or references.train or references.validation
    # Read before anything is started.
    found = None if path is None else (questions_of_file(path), str(path))
    with _folder(loaded) as folder:
        result, source = _run(loaded, Path(folder), ranks, seconds, found)
    why = reasons(result, loaded)
    if as_json_:
        typer.echo(json.dumps({**as_json(result, loaded), "questions": source}, indent=2))
    else:
        _report(result, loaded, why, source)
    raise typer.Exit(1 if why else 0)


def _folder(config: Config) -> TemporaryDirectory[str]:
    """A private folder, on the run's own disk where that can be written: a sync there costs what it
    costs in the run.
    """
    directory = config.run.directory
    parent = None if directory is None else directory.parent
    if parent is not None and not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        parent = None
    return TemporaryDirectory(prefix="smartsearch-rehearsal-", dir=parent)


def _run(
    config: Config, folder: Path, ranks: int, seconds: float, found: tuple[list[str], str] | None
) -> tuple[LoadTestResult, str]:
    scratch, run = folder / "scratch.toml", folder / "run"
    scratch.write_text(scratch_text(config), encoding="utf-8")
    environment = config.execute.environment
    stats = CallStats()
    print("starting a scratch sidecar (a large index takes a while)", file=sys.stderr, flush=True)
    with scratch_sidecar(scratch, run) as endpoints:
        client, internal = Client(endpoints.sandbox_url), Client(endpoints.internal_url)
        chosen, source = found or (questions_of_corpus(client, config), "passages of the corpus")
        unloaded = [
            ask(client, question, environment)[1] for question in (chosen * UNLOADED)[:UNLOADED]
        ]
        workloads = [
            Workload(endpoints.sandbox_url, environment, chosen, rank, ranks, seconds)
            for rank in range(ranks)
        ]
        with _view(stats, internal, ranks) as look:
            play(workloads, stats, look)
        health = internal.health(SETTLE_SECONDS).value
        status = internal.call("GET", "/status").value
        cause = health.get("cause")
        result = LoadTestResult(
            ranks=ranks,
            took_seconds=seconds,
            unloaded_seconds=statistics.median(unloaded),
            stats=stats,
            most_waiting=status["slots"]["most_waiting"],
            state=health["state"],
            cause=None if cause is None else f"{cause['cause']}: {cause['detail']}",
            cache=status["cache"],
            journal_bytes=sum(file.stat().st_size for file in (run / "journal").iterdir()),
        )
    return result, source


@contextmanager
def _view(stats: CallStats, internal: Client, ranks: int) -> Iterator[Callable[[float], None]]:
    """A table on a terminal, a line every few seconds elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        show = plain_lines()

        def tell(seconds: float) -> None:
            failed = sum(stats.failures.values())
            show(lambda: f"load test: {seconds:.0f} s, {stats.calls:,} calls, {failed:,} failed")

        yield tell
        return
    with Live(console=console, transient=True, auto_refresh=False) as live:

        def look(seconds: float) -> None:
            slots = internal.call("GET", "/status").value["slots"]
            live.update(_table(stats, slots, ranks, seconds), refresh=True)

        yield look


def _table(stats: CallStats, slots: dict[str, Any], ranks: int, seconds: float) -> Table:
    table = Table.grid(padding=(0, 2))
    rows = {
        "ranks": f"{ranks}, {ranks * THREADS_PER_RANK} calls at once, {seconds:.0f} s",
        "calls": f"{stats.calls:,}, {stats.calls / seconds:,.0f} a second",
        "slots": f"{slots['in_service']} of {slots['total']} in service, "
        f"{slots['waiting']} waiting (most {slots['most_waiting']})",
        "latency": _latency(CallStats(seconds=stats.seconds[-2000:])),
        "declined": f"{stats.outcomes[DECLINED]:,}",
        "failed": ", ".join(f"{count} {name}" for name, count in stats.failures.items()) or "none",
    }
    for name, text in rows.items():
        bad = name == "failed" and text != "none"
        table.add_row(Text(name, style="dim"), Text(text, style="bold red" if bad else ""))
    return table


def _latency(stats: CallStats) -> str:
    return ", ".join(f"{name} {value:,.0f} ms" for name, value in stats.percentiles().items())


def _report(result: LoadTestResult, config: Config, why: list[str], source: str) -> None:
    console = Console(highlight=False, soft_wrap=True)
    stats = result.stats
    console.print(
        f"{result.ranks} ranks, {result.calls_at_once} calls at once, {stats.calls:,} calls "
        f"({result.rate:,.0f} a second); questions: {source}"
    )
    most = max((count for _, count in stats.histogram()), default=1)
    for name, count in stats.histogram():
        bar = "█" * max(1, round(BAR_WIDTH * count / most)) if count else ""
        console.print(Text(f"  {name:<15} {bar:<{BAR_WIDTH}} {count:,}"))
    console.print(f"  latency   {_latency(stats)}; alone {result.unloaded_seconds * 1000:,.1f} ms")
    console.print(f"  waiting   at most {result.most_waiting} of {config.execute.waiting_max}")
    console.print(f"  declined  {stats.outcomes[DECLINED]:,}")
    refused = ", ".join(f"{count:,} {name}" for name, count in stats.failures.items())
    console.print(f"  failed    {refused or 'none'}")
    cache = ", ".join(f"{count:,} {name}" for name, count in result.cache.items())
    console.print(f"  cache     {cache or 'off'}")
    console.print(f"  journal   {result.journal_bytes / 2**20:,.1f} MiB")
    if why:
        for sentence in why:
            console.print(Text("does not hold: ", style="bold red").append(sentence, "default"))
    else:
        console.print(Text("holds", style="bold green").append(f" {result.ranks} ranks", "default"))
    for line in suggestions(result, config):
        console.print(Text(f"  {line}"))


# --- the questions --------------------------------------------------------------------------------


def questions_of_file(path: Path) -> list[str]:
    """The first questions of a file: the trainer's Parquet, JSONL with ``question``, or lines.

    Raises ``UsageError`` where it has no questions.
    """
    found: list[str] = []
    try:
        for question in _each_question(path):
            if isinstance(question, str) and question.strip():
                found.append(question.strip())
            if len(found) == QUESTIONS_MAX:
                break
    except (OSError, UnicodeDecodeError) as exc:
        raise errors.USAGE(f"{path} cannot be read as questions ({type(exc).__name__})") from None
    if not found:
        raise errors.USAGE(
            f"{path} holds no questions: Parquet or JSONL with a column `question`, or plain lines"
        )
    return found


def _each_question(path: Path) -> Iterator[Any]:
    if is_parquet(path):
        yield from (row.get("question") for row in parquet_rows(path, ["question"]))
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            question = line
            if line.lstrip().startswith("{"):
                with suppress(ValueError):  # then it is a plain line
                    question = json.loads(line).get("question")
            yield question


def questions_of_corpus(client: Client, config: Config) -> list[str]:
    """Pieces of the passages that plain questions find: as long as questions, in its own words.

    Raises ``UsageError`` where nothing is found.
    """
    found: dict[str, None] = {}
    for question in STOCK_QUESTIONS:
        answer = client.execute(question, config.execute.environment)
        if answer.status != 200:
            raise errors.USAGE(
                f"the scratch sidecar refused a plain question: {answer.value['error']['message']}"
            )
        words = answer.value["result"].split()
        for at in range(0, len(words) - _WORDS, _WORDS):
            found[" ".join(words[at : at + _WORDS])] = None
    if not found:
        raise errors.USAGE(
            "plain English questions find no passage to make questions of: name a file with "
            "--questions"
        )
    return list(found)[:QUESTIONS_MAX]

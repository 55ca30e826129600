"""``serve``: one run, until SIGTERM or Ctrl-C. ``demo``, which ``make run`` starts, does it all:
index if missing, daemon, one question, both URLs, serve.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from smartsearch_sidecar import errors
from smartsearch_sidecar.client import Client, Endpoints
from smartsearch_sidecar.commands.progress import verification
from smartsearch_sidecar.config import Config, load
from smartsearch_sidecar.errors import GOING_ON, remedy
from smartsearch_sidecar.process import memory
from smartsearch_sidecar.run.record import Cause

if TYPE_CHECKING:
    from smartsearch_sidecar.search.service import Service

QUESTION = "Who discovered penicillin?"


def serve(
    *,
    config: Annotated[Path, Option(help="The configuration (TOML), e.g. config/training.toml.")],
    run_dir: Annotated[
        Path | None, Option(help="A directory that does not exist yet: this run's ledger.")
    ] = None,
    resume: Annotated[
        bool, Option("--resume", help="Continue the run of an existing directory, or start it.")
    ] = False,
    receipt: Annotated[
        Path | None,
        Option(help="With --resume: a receipt that this very run has given, the last one kept."),
    ] = None,
    trainer_stopped: Annotated[
        bool,
        Option("--trainer-stopped", help="With --resume: no trainer was at work since the stop."),
    ] = False,
    port: Annotated[int | None, Option(min=0, max=65535, help="0 takes any free port.")] = None,
) -> None:
    """Serve a run. Writes endpoints.json into the run directory when ready; SIGTERM drains.

    A run that was asked before and is resumed after an orderly stop fails, unless it enforces
    provenance or is told --trainer-stopped: what rollouts asked meanwhile was refused. Exit codes:
    0 ended well, 2 could not begin, 4 the run had failed (its latch is closed).
    """
    from smartsearch_sidecar.ledger.receipt import CheckpointReceipt

    if trainer_stopped and not resume:
        raise errors.USAGE(
            "--trainer-stopped says what was while a run was stopped: it goes with --resume"
        )
    loaded = load(config, overrides={"run.directory": run_dir, "server.port": port})
    if receipt is not None and not resume:
        raise errors.USAGE("--receipt is of a run that goes on: give --resume with it")
    given = None if receipt is None else CheckpointReceipt.load(receipt)
    served: list[Service] = []

    def ready(endpoints: Endpoints, service: Service) -> None:
        served.append(service)
        if service.run.state.closed:
            _print_failed(service.run.state.cause)
        # The URLs hold capabilities: they go to the file (0600) and, on request, to `url`.
        print(f"ready: {loaded.run.directory}/endpoints.json", file=sys.stderr, flush=True)

    with _naming_memory(), verification() as progress:
        from smartsearch_sidecar.process import daemon

        code = daemon.serve_until_stopped(
            loaded,
            resume=resume,
            receipt=given,
            trainer_stopped=trainer_stopped,
            progress=progress,
            on_ready=ready,
        )
    if served and served[0].run.state.closed:
        _print_failed(served[0].run.state.cause)
    raise typer.Exit(code)


@contextmanager
def _naming_memory() -> Iterator[None]:
    """Memory that runs out shows in many ways, and none of them names the limit."""
    try:
        yield
    except (MemoryError, RuntimeError, ImportError, OSError, errors.UsageError) as exc:
        if not memory.ran_out(exc):
            raise
        raise memory.refusal(exc) from exc


def _print_failed(cause: Cause | None) -> None:
    """Prints what the log does not say: the run answers nothing more, and how to go on."""
    named = "unknown" if cause is None else f"{cause.cause}: {cause.detail}"
    todo = "" if cause is None else f"{remedy(cause.cause)} "
    print(
        f"this run has failed and answers nothing more ({named})\n  {todo}{GOING_ON}",
        file=sys.stderr,
        flush=True,
    )


def demo(
    config: Annotated[Path, Option(help="The demo's configuration.")] = Path("config/demo.toml"),
    corpus: Annotated[Path, Option(help="The vital articles, fetched by make setup.")] = Path(
        ".cache/vital/summaries_en-us.json"
    ),
    port: Annotated[int | None, Option(min=0, max=65535, help="Without it, any.")] = None,
    question: Annotated[str, Option(help="Asked once, as a rollout asks.")] = QUESTION,
    once: Annotated[
        bool, Option("--once", help="Stop after the example instead of serving on.")
    ] = False,
) -> None:
    """Show the sidecar at work on real Wikipedia text, then serve until Ctrl-C."""
    from smartsearch_sidecar.commands.index import build_if_missing
    from smartsearch_sidecar.process import daemon

    if not config.is_file():
        raise errors.USAGE(
            f"there is no {config} here: start the demo in the repository (`make run`), or name a "
            "configuration with --config"
        )
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    directory = Path("runs") / f"demo-{stamp}"
    loaded = load(config, overrides={"run.directory": directory, "server.port": port})
    if loaded.retrieval.bm25.index is not None:
        build_if_missing(corpus, loaded.retrieval.bm25.index)

    failures: list[errors.SidecarError] = []

    def ready(endpoints: Endpoints, _service: Service) -> None:
        # The question goes over HTTP, as a rollout's does; the loop's thread must not wait for it.
        def ask() -> None:
            try:
                _show(loaded, endpoints, question)
            except errors.SidecarError as exc:
                failures.append(exc)
            if once or failures:
                os.kill(os.getpid(), signal.SIGTERM)  # the daemon's own handler stops it in order

        threading.Thread(target=ask, name="demo-question", daemon=True).start()

    with verification() as progress:
        code = daemon.serve_until_stopped(
            loaded, progress=progress, on_ready=ready, pretty_logs=True
        )
    if failures:
        raise failures[0]
    raise typer.Exit(code)


def _show(config: Config, endpoints: Endpoints, question: str) -> None:
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    answer = Client(endpoints.sandbox_url).execute(question, config.execute.environment)
    if answer.status != 200:
        raise errors.INTERNAL_ERROR(
            f"the example question was refused: {answer.value['error']['message']}"
        )
    console = Console()
    console.print()
    console.print(Text("A rollout asks: ", style="dim").append(question, style="bold"))
    for position, passage in enumerate(answer.value["result"].split("\n\n"), 1):
        title, _, text = passage.partition("\n")
        console.print(Panel(Text(text), title=Text(f"{position}. {title}"), title_align="left"))
    console.print("[green]Recorded before it was answered[/], and ready for more:")
    # Plain prints: a terminal that wraps a URL must not break it for copying.
    print(f"  sandbox_url  (rollouts)           {endpoints.sandbox_url}")
    print(f"  internal_url (trainer, operator)  {endpoints.internal_url}")
    print(f"  ledger                            {config.run.directory}")
    print("Ctrl-C stops it.", flush=True)

"""``serve``: one run, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from smartsearch_sidecar.client import Endpoints
from smartsearch_sidecar.commands.progress import verification
from smartsearch_sidecar.config import load
from smartsearch_sidecar.errors import GOING_ON, remedy
from smartsearch_sidecar.run.record import Cause

if TYPE_CHECKING:
    from smartsearch_sidecar.search.service import Service


def serve(
    config: Annotated[Path, Option(help="The configuration (TOML), e.g. config/training.toml.")],
    run_dir: Annotated[
        Path | None, Option(help="A directory that does not exist yet: this run's ledger.")
    ] = None,
    resume: Annotated[
        bool, Option("--resume", help="Continue the run of an existing directory, or start it.")
    ] = False,
    port: Annotated[int | None, Option(min=0, max=65535, help="0 takes any free port.")] = None,
) -> None:
    """Serve a run. Writes endpoints.json into the run directory when ready; SIGTERM drains.

    Exit codes: 0 ended well, 2 could not begin, 4 the run had failed (its latch is closed).
    """
    from smartsearch_sidecar.process import daemon

    loaded = load(config, overrides={"run.directory": run_dir, "server.port": port})
    served: list[Service] = []

    def ready(endpoints: Endpoints, service: Service) -> None:
        served.append(service)
        if service.run.state.closed:
            _print_failed(service.run.state.cause)
        # The URLs hold capabilities: they go to the file (0600) and, on request, to `url`.
        print(f"ready: {loaded.run.directory}/endpoints.json", file=sys.stderr, flush=True)

    with verification() as progress:
        code = daemon.serve_until_stopped(loaded, resume=resume, progress=progress, on_ready=ready)
    if served and served[0].run.state.closed:
        _print_failed(served[0].run.state.cause)
    raise typer.Exit(code)


def _print_failed(cause: Cause | None) -> None:
    """Prints what the log does not say: the run answers nothing more, and how to go on."""
    named = "unknown" if cause is None else f"{cause.cause}: {cause.detail}"
    todo = "" if cause is None else f"{remedy(cause.cause)} "
    print(
        f"this run has failed and answers nothing more ({named})\n  {todo}{GOING_ON}",
        file=sys.stderr,
        flush=True,
    )

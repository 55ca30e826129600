"""``doctor``: checks everything a run needs, before the GPUs are reserved."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text
from typer import Option

from smartsearch_sidecar import errors
from smartsearch_sidecar.commands.progress import verification
from smartsearch_sidecar.config import load
from smartsearch_sidecar.doctor.machine import Finding, Level, error

MOUNTS = Path("/proc/self/mounts")
STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "bold red"}


def doctor(
    *,
    config: Annotated[Path, Option(help="The configuration `serve` will get.")],
    run_dir: Annotated[Path | None, Option(help="The run directory `serve` will get.")] = None,
    ranks: Annotated[
        int | None, Option(min=1, max=1024, help="Rollout ranks of this node; 8 calls each.")
    ] = None,
    question: Annotated[str | None, Option(help="One that must find its passage.")] = None,
    passage: Annotated[str | None, Option(help="Text that one of its passages must hold.")] = None,
    trial_call: Annotated[
        bool, Option("--trial-call", help="Ask the reward helper once; it costs tokens.")
    ] = False,
    trainer_uid: Annotated[int | None, Option(min=0, help="The user the trainer runs as.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Check everything a run needs: ok, warning or error for each thing, with the remedy.

    Run it as the sidecar's user, in the environment the trainer is started in (proxy variables).
    Creates nothing, and costs nothing without --trial-call. Exit codes: 0 fine (warnings allowed),
    1 an error, 2 wrong use.
    """
    from smartsearch_sidecar.doctor.examination import Options, examine

    if passage is not None and question is None:
        raise errors.USAGE("--passage says what --question must find: pass both")
    if not config.is_file():
        raise errors.USAGE(f"there is no configuration at {config}: `init` writes one")
    options = Options(ranks, question, passage, trial_call, trainer_uid)
    try:
        loaded = load(config, overrides={"run.directory": run_dir})
    except errors.ConfigError as exc:
        findings = [error("configuration", exc.message)]
    else:
        # Not on every system: the finding then says that the filesystem is not known.
        mounts = MOUNTS.read_text("utf-8", "surrogateescape") if MOUNTS.exists() else ""
        with verification() as progress:
            findings = examine(
                loaded, options, environ=os.environ, mounts=mounts, progress=progress
            )
    bad = any(finding.level is Level.ERROR for finding in findings)
    if as_json:
        value = {"ok": not bad, "findings": [finding._asdict() for finding in findings]}
        typer.echo(json.dumps(value, indent=2))
    else:
        _print(findings)
    raise typer.Exit(1 if bad else 0)


def _print(findings: Sequence[Finding]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for finding in findings:
        lines = f"\n{'':24}".join(finding.text.splitlines())
        console.print(
            Text(f"{finding.level.value:<8}", style=STYLES[finding.level])
            .append(f"{finding.name:<16}", style="bold")
            .append(lines, style="default")
        )
        if finding.remedy is not None:
            console.print(Text(f"{'':24}-> ", style="dim").append(finding.remedy, style="default"))
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    console.print(
        f"{counts[Level.OK]} ok, {counts[Level.WARNING]} warnings, {counts[Level.ERROR]} errors"
    )

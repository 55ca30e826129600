"""The command line: words to exit code. One file per group; rules live in the modules they call.

A command imports aiohttp, tantivy and the daemon when it runs: so `check` and `--help` start fast.

Exit codes: 0 fine, 1 the answer is no, 2 wrong use or unreachable, 4 ``serve`` ended latched.
"""

from __future__ import annotations

import sys

import typer
from typer import Option

from smartsearch_sidecar import __version__, errors
from smartsearch_sidecar.commands import (
    canaries,
    check,
    doctor,
    env,
    index,
    init,
    ledger,
    rehearse,
    serve,
)

_ORDER = (
    "A run, in order: index build, init, doctor, rehearse, serve, check (or checkpoint) before "
    "each checkpoint, ledger verify. Exit codes: 0 fine, 1 the answer is no, 2 wrong use or "
    "unreachable, 4 the served run had failed."
)

app = typer.Typer(
    name="smartsearch-sidecar",
    help="Search and rewards beside a trainer node: recorded first, failing closed.",
    epilog=_ORDER,
    rich_markup_mode="markdown",  # "rich" would swallow the name of a section: [execute]
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and stop."
    ),
) -> None:
    """The words above are Typer's ``help``: this callback only takes --version."""


for command in (
    *(serve.serve, serve.demo, init.init, doctor.doctor, rehearse.rehearse),
    *(check.url, check.check, check.checkpoint, check.latch),
):
    app.command()(command)
for group in (canaries.app, env.app, index.app, ledger.app):
    app.add_typer(group)


def main() -> None:
    """The console script: a named error is one sentence on standard error and exit 2."""
    try:
        app()
    except errors.SidecarError as exc:
        for line in exc.message.splitlines():
            print(f"smartsearch-sidecar: {line}", file=sys.stderr)
        sys.exit(2)

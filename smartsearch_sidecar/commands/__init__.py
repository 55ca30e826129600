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
    demo,
    doctor,
    env,
    index,
    init,
    ledger,
    rehearse,
    serve,
)

_HELP = "Search and rewards beside a trainer node: recorded first, failing closed."
_ORDER = (
    "A run, in order: index build, init, doctor, rehearse, serve, check (or checkpoint) before "
    "each checkpoint, ledger verify. Exit codes: 0 fine, 1 the answer is no, 2 wrong use or "
    "unreachable, 4 the served run had failed."
)

app = typer.Typer(
    name="smartsearch-sidecar",
    help=_HELP,
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


app.command("serve")(serve.serve)
app.command("demo")(demo.demo)
app.command("init")(init.init)
app.command("doctor")(doctor.doctor)
app.command("rehearse")(rehearse.rehearse)
app.command("url")(check.url)
app.command("check")(check.check)
app.command("checkpoint")(check.checkpoint)
app.command("latch")(check.latch)
app.add_typer(canaries.app, name="canaries")
app.add_typer(env.app, name="env")
app.add_typer(index.app, name="index")
app.add_typer(ledger.app, name="ledger")


def main() -> None:
    """The console script: a named error is one sentence on standard error and exit 2."""
    try:
        app()
    except errors.SidecarError as exc:
        for line in exc.message.splitlines():
            print(f"smartsearch-sidecar: {line}", file=sys.stderr)
        sys.exit(2)

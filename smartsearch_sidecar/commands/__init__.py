"""The command line: words to exit code. One file per group; rules live in the modules they call.

A command imports aiohttp, tantivy and the daemon when it runs: so `check` and `--help` start fast.

Exit codes: 0 fine, 1 the answer is no, 2 wrong use or unreachable, 4 ``serve`` ended latched.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, Final

import typer
from typer import Option
from typer.core import TyperGroup
from typer.main import get_group

from smartsearch_sidecar import __version__, errors

FILES: Final = {
    "serve": "serve",
    "demo": "serve",
    "init": "init",
    "doctor": "doctor",
    "rehearse": "rehearse",
    "url": "check",
    "check": "check",
    "checkpoint": "check",
    "latch": "check",
    "canaries": "canaries",
    "env": "env",
    "index": "index",
    "ledger": "ledger",
}
"""Each command or group, in the order of `--help`, and the file that has it."""


class _OnDemand(TyperGroup):
    """Imports the file of the command that is asked for: all of them take half a second."""

    def __init__(self, **words: Any) -> None:
        super().__init__(**words)
        names: dict[str, Any] = dict.fromkeys(FILES)
        self.commands = names  # what a mistyped word is compared with

    def list_commands(self, ctx: Any) -> list[str]:
        return list(FILES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in FILES:
            return None
        module = import_module(f"smartsearch_sidecar.commands.{FILES[cmd_name]}")
        one = typer.Typer(rich_markup_mode=app.rich_markup_mode)
        if (function := getattr(module, cmd_name, None)) is None:
            one.add_typer(module.app)
        else:
            one.command()(function)
        return get_group(one).commands[cmd_name]


_ORDER = (
    "A run, in order: index build, init, doctor, rehearse, serve, check (or checkpoint) before "
    "each checkpoint, ledger verify. Exit codes: 0 fine, 1 the answer is no, 2 wrong use or "
    "unreachable, 4 the served run had failed."
)

app = typer.Typer(
    name="smartsearch-sidecar",
    cls=_OnDemand,
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


def main() -> None:
    """The console script: a named error is one sentence on standard error and exit 2."""
    try:
        app()
    except errors.SidecarError as exc:
        for line in exc.message.splitlines():
            print(f"smartsearch-sidecar: {line}", file=sys.stderr)
        sys.exit(2)

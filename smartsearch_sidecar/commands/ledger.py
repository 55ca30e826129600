"""``ledger verify | show | export | replay``: a finished or a live run, read and never written to.

Exit codes: 0 fine, 1 the answer is no (damaged, torn, another receipt, another document), 2 wrong
use or nothing there to read.
"""

from __future__ import annotations

import asyncio
import enum
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from smartsearch_sidecar import errors
from smartsearch_sidecar.commands.ledger_output import (
    replayed_json,
    replayed_words,
    reports,
    verified_json,
)
from smartsearch_sidecar.commands.progress import verification
from smartsearch_sidecar.config import Config, load
from smartsearch_sidecar.contract.call_syntax import TOP_N
from smartsearch_sidecar.ledger.describe import Filter, Shown, Tone, json_line, printable, shown
from smartsearch_sidecar.ledger.export import export_reference
from smartsearch_sidecar.ledger.file import CLAIM
from smartsearch_sidecar.ledger.reader import History, Progress, RunReader, Scan
from smartsearch_sidecar.ledger.replay import Replayed
from smartsearch_sidecar.ledger.replay import replay as replay_run
from smartsearch_sidecar.ledger.verify import CheckpointReceipt
from smartsearch_sidecar.ledger.verify import verify as verify_run

app = typer.Typer(
    no_args_is_help=True, help="Read a run's ledger: verify, show, export, replay. Never writes."
)

STYLES = {
    Tone.PLAIN: "default",
    Tone.GOOD: "green",
    Tone.WARN: "yellow",
    Tone.BAD: "bold red",
    Tone.RUN: "cyan",
}

RunDir = Annotated[Path, typer.Argument(help="The run's directory.", metavar="RUN")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of words.")]


class ExportLayout(enum.StrEnum):
    """Layouts a run can be exported in."""

    REFERENCE = "reference"


@contextmanager
def _no_history() -> Iterator[None]:
    """A damaged ledger is an answer, not wrong use: exit 1."""
    try:
        yield
    except errors.LedgerCorrupt as exc:
        typer.echo(f"smartsearch-sidecar: {printable(exc.message, 2000)}", err=True)
        raise typer.Exit(1) from None


# --- verify ---------------------------------------------------------------------------------------


@app.command()
def verify(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="The run's directory; of a run of many nodes, each node's.", metavar="RUN..."
        ),
    ],
    receipt: Annotated[
        Path | None,
        typer.Option("--receipt", help="A checkpoint's receipt: is it of this very history?"),
    ] = None,
    documents: Annotated[
        bool,
        typer.Option("--documents", help="Read every passage as JSON too; slower."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check every record's sum, the chain, the counts, the latch: exit 0 whole, 1 not.

    The receipt of a run of many nodes holds where every node's directory is given with it.
    A run that is being served may be verified; only then may its last line be incomplete.
    """
    given = None if receipt is None else CheckpointReceipt.parse(_receipt(receipt))
    all_found = []
    for run in runs:
        with verification("verifying the ledger") as progress:
            found = verify_run(run, receipt=given, documents=documents, progress=progress)
        all_found.append(found)
    missing = [] if given is None else given.missing({found.claim_sha256 for found in all_found})
    if as_json:
        typer.echo(json.dumps(verified_json(all_found, missing), indent=2, sort_keys=True))
    else:
        console = Console(highlight=False, soft_wrap=True)
        for line in reports(all_found, given, missing):
            console.print(line)
    raise typer.Exit(0 if all(found.ok for found in all_found) and not missing else 1)


def _receipt(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise errors.USAGE(f"receipt {path} cannot be read: {exc.strerror or exc}") from None


# --- show -----------------------------------------------------------------------------------------


@app.command()
def show(
    run: RunDir,
    *,
    kind: Annotated[
        list[str] | None,
        typer.Option("--kind", help="A kind of record, or the part before its dot; repeatable."),
    ] = None,
    number: Annotated[
        list[int] | None,
        typer.Option("--number", help="The number of a search (or score, or call); repeatable."),
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", help="From this time on, e.g. 2026-12-02T04:13 (UTC).")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", help="Before this time.")] = None,
    as_json: AsJson = False,
) -> None:
    """List records, one a line; with --json as recorded, one JSON value a line."""
    wanted = Filter(kinds=kind or (), numbers=number or (), since=since, until=until)
    reader = RunReader(run)
    scan = Scan(reader, History(reader.read(CLAIM), documents=True))
    console = Console(highlight=False, soft_wrap=True)
    for line in scan:
        if not wanted.wants(line):
            continue
        if as_json:
            typer.echo(json_line(line))
        elif console.is_terminal:
            console.print(_styled(shown(line)))
        else:
            typer.echo(_styled(shown(line)).plain)
    with _no_history():
        if scan.problem is not None:
            raise errors.LEDGER_CORRUPT(f"the history ends here: {scan.problem}")
    if scan.torn_bytes:
        typer.echo("smartsearch-sidecar: the last line is incomplete and not shown", err=True)


def _styled(row: Shown) -> Text:
    number = "" if row.number is None else f"#{row.number}"
    return (
        Text(f"{row.seq:>7}  {row.at}  ", style="dim")
        .append(f"{row.kind:<20}", style=STYLES[row.tone])
        .append(f" {number:<8} ", style="bold")
        .append(row.text, style="default")
    )


# --- export ---------------------------------------------------------------------------------------


@app.command()
def export(
    run: RunDir,
    out: Annotated[Path, typer.Argument(help="A directory that does not exist yet.")],
    layout: Annotated[
        ExportLayout, typer.Option("--layout", help="Whose files: the reference implementation's.")
    ] = ExportLayout.REFERENCE,
) -> None:
    """Write the run's searches as the reference implementation keeps them: a file for each."""
    with _no_history(), verification(f"exporting ({layout.value})") as progress:
        written = export_reference(run, out, progress=progress)
    typer.echo(
        f"{out}: {written.requests:,} requests, {written.responses:,} responses, "
        f"{written.failed:,} failed{', rejected' if written.rejected else ''}"
    )
    if written.declined:
        typer.echo(f"{written.declined:,} declined queries have no file in this layout")
    if written.torn:
        typer.echo("the journal's last line is torn and was left out", err=True)


# --- replay ---------------------------------------------------------------------------------------


@app.command()
def replay(
    run: RunDir,
    config: Annotated[
        Path, typer.Option("--config", help="The configuration that names the provider to ask.")
    ],
    as_json: AsJson = False,
) -> None:
    """Ask every recorded search again and compare documents: exit 0 the same, 1 not.

    Near ties (scores within 1e-5 of each other) are reported and allowed.
    """
    loaded = load(config)
    with _no_history(), verification("replaying") as progress:
        result, strange = asyncio.run(_replay(run, loaded, progress))
    if as_json:
        typer.echo(json.dumps(replayed_json(result, strange), indent=2, sort_keys=True))
    else:
        for sentence in replayed_words(result, strange):
            typer.echo(sentence)
    raise typer.Exit(0 if result.same else 1)


async def _replay(run: Path, config: Config, progress: Progress) -> tuple[Replayed, list[str]]:
    from smartsearch_sidecar.retrieval.guard import Guard
    from smartsearch_sidecar.retrieval.registry import open_configured

    claim = await asyncio.to_thread(lambda: RunReader(run).read(CLAIM))
    claimed = json.loads(claim or b"{}").get("retrieval", {})
    provider = await open_configured(config)
    try:
        guard = Guard(
            provider,
            top_n=TOP_N,
            retries=config.retrieval.retries,
            drop_tagged=config.retrieval.on_protocol_tag == "drop",
            watch_drift=False,  # a changed document is an answer of replay, not a fault
        )
        identity = await guard.claim_identity()
        names = sorted(identity.keys() | claimed.keys())
        strange = [name for name in names if identity.get(name) != claimed.get(name)]
        result = await replay_run(
            run, guard.search, concurrency=config.execute.slots, progress=progress
        )
    finally:
        await provider.close()
    return result, strange

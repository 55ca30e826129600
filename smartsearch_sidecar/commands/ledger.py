"""``ledger verify | show | export | replay``: a finished or a live run, read and never written to.

Exit codes: 0 fine, 1 the answer is no (damaged, torn, another receipt, another document), 2 wrong
use or nothing there to read.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from smartsearch_sidecar import errors
from smartsearch_sidecar.commands.progress import verification
from smartsearch_sidecar.config import Config, load
from smartsearch_sidecar.contract.execute import TOP_N
from smartsearch_sidecar.ledger.describe import Filter, Shown, Tone, json_line, printable, shown
from smartsearch_sidecar.ledger.export import export_reference
from smartsearch_sidecar.ledger.file import CLAIM
from smartsearch_sidecar.ledger.reader import History, Progress, RunReader, Scan
from smartsearch_sidecar.ledger.receipt import CheckpointReceipt
from smartsearch_sidecar.ledger.replay import Outcome, Replayed
from smartsearch_sidecar.ledger.replay import replay as replay_run
from smartsearch_sidecar.ledger.verify import Verification
from smartsearch_sidecar.ledger.verify import verify as verify_run

app = typer.Typer(
    name="ledger",
    no_args_is_help=True,
    help="Read a run's ledger: verify, show, export, replay. Never writes.",
)

STYLES = {
    Tone.PLAIN: "default",
    Tone.GOOD: "green",
    Tone.WARN: "yellow",
    Tone.BAD: "bold red",
    Tone.RUN: "cyan",
}

RunDir = Annotated[Path, Argument(help="The run's directory.", metavar="RUN")]
AsJson = Annotated[bool, Option("--json", help="Print JSON instead of words.")]


@contextmanager
def _no_history() -> Iterator[None]:
    """A damaged ledger is an answer, not wrong use: exit 1."""
    try:
        yield
    except errors.LedgerCorrupt as exc:
        typer.echo(f"smartsearch-sidecar: {printable(exc.message, 2000)}", err=True)
        raise typer.Exit(1) from None


@app.command()
def verify(
    runs: Annotated[
        list[Path],
        Argument(
            help="The run's directory; of a run of many nodes, each node's.", metavar="RUN..."
        ),
    ],
    receipt: Annotated[
        Path | None, Option(help="A checkpoint's receipt: is it of this very history?")
    ] = None,
    documents: Annotated[
        bool, Option("--documents", help="Read every passage as JSON too; slower.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check every record's sum, the chain, the counts, the latch: exit 0 whole, 1 not.

    The receipt of a run of many nodes holds where every node's directory is given with it.
    A run that is being served may be verified; only then may its last line be incomplete.
    """
    given = None if receipt is None else CheckpointReceipt.load(receipt)
    all_found = []
    for run in runs:
        with verification("verifying the ledger") as progress:
            found = verify_run(run, receipt=given, documents=documents, progress=progress)
        all_found.append(found)
    missing = [] if given is None else given.missing({found.claim_sha256 for found in all_found})
    ok = all(found.ok for found in all_found) and not missing
    if as_json:
        # Of one directory its own report, of several one for each.
        each = [{"directory": str(one.directory), **one.as_json()} for one in all_found]
        value = {"ok": ok, "missing_nodes": missing, "runs": each}
        if len(all_found) == 1 and not missing:
            value = all_found[0].as_json()
        typer.echo(json.dumps(value, indent=2, sort_keys=True))
    else:
        console = Console(highlight=False, soft_wrap=True)
        for found in all_found:
            if len(all_found) > 1:
                console.print(Text(printable(str(found.directory)), style="bold"))
            for line in _report(found, given):
                console.print(line)
        if missing:
            text = (
                f"the receipt names {len(missing)} more: give the run directory of node "
                + printable(", ".join(missing), 500)
            )
            console.print(Text("not proven: ", style="bold red").append(text, "default"))
    raise typer.Exit(0 if ok else 1)


def _report(found: Verification, receipt: CheckpointReceipt | None) -> Iterator[Text]:
    """A verification, line by line; everything that was read is printable."""
    if found.problem is None:
        yield Text("whole: ", style="green").append(_size(found), style="default")
    else:
        yield Text("not whole: ", style="bold red").append(
            printable(str(found.problem), 2000), style="default"
        )
        yield _row("before it", _size(found))
    state = found.state
    if found.seq:
        yield _row("time", f"{_clock(found.first_at)} to {_clock(found.last_at)} UTC")
        yield _row("head", found.head)
    yield _row("claim", found.claim_sha256 or "missing")
    usage = state.usage()
    yield _row(
        "searches",
        f"{usage['retrieval_responses']:,} answered of {usage['retrieval_attempts']:,}, "
        f"{usage['retrieval_failed']:,} failed, {len(state.searching):,} unsettled, "
        f"{usage['retrieval_declined']:,} queries declined",
    )
    cause = found.cause
    if cause is not None:
        yield _row("latch", printable(f"closed: {cause.cause}: {cause.detail}", 500), "red")
    else:
        yield _row("latch", "open")
    yield _row("end", _ending(found))
    if found.checkpoint is not None:
        step, seq = found.checkpoint["step"], found.checkpoint["seq"]
        yield _row("checkpoint", f"step {printable(str(step))}, record {seq:,}")
    if receipt is not None:
        if found.receipt_problem is None:
            seq = receipt.place(found.claim_sha256).seq
            yield _row("receipt", f"is of this history: record {seq:,}", "green")
        else:
            yield _row("receipt", printable(found.receipt_problem, 500), "bold red")
    for note in found.notes:
        yield _row("note", note, "yellow")


def _row(name: str, text: str, style: str = "default") -> Text:
    return Text(f"  {name:<11}", style="dim").append(text, style=style)


def _size(found: Verification) -> str:
    files = "segment" if found.segments == 1 else "segments"
    return f"{found.seq:,} records, {found.segments:,} {files}, {found.bytes / 2**20:,.1f} MiB"


def _clock(at: str | None) -> str:
    try:
        moment = datetime.fromisoformat(at or "")
    except ValueError:
        return printable(at or "unknown")
    return moment.strftime("%Y-%m-%d %H:%M:%S")


def _ending(found: Verification) -> str:
    if found.live:
        rest = f"; {found.torn_bytes} bytes are being written" if found.torn_bytes else ""
        return f"the run is being served{rest}"
    restarts = found.state.restarts
    again = f", {restarts} restarts" if restarts else ""
    if found.state.closed_cleanly:
        return f"in order (run.closed){again}"
    return f"without run.closed: the process was killed or its machine stopped{again}"


@app.command()
def show(
    run: RunDir,
    *,
    kind: Annotated[
        list[str] | None, Option(help="A kind of record, or the part before its dot; repeatable.")
    ] = None,
    number: Annotated[
        list[int] | None, Option(help="The number of a search (or score, or call); repeatable.")
    ] = None,
    since: Annotated[
        str | None, Option(help="From this time on, e.g. 2026-12-02T04:13 (UTC).")
    ] = None,
    until: Annotated[str | None, Option(help="Before this time.")] = None,
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


@app.command()
def export(
    run: RunDir,
    out: Annotated[Path, Argument(help="A directory that does not exist yet.")],
    layout: Annotated[
        Literal["reference"], Option(help="Whose files: the reference implementation's.")
    ] = "reference",
) -> None:
    """Write the run's searches as the reference implementation keeps them: a file for each."""
    with _no_history(), verification(f"exporting ({layout})") as progress:
        written = export_reference(run, out, progress=progress)
    typer.echo(
        f"{out}: {written.requests:,} requests, {written.responses:,} responses, "
        f"{written.failed:,} failed{', rejected' if written.rejected else ''}"
    )
    if written.declined:
        typer.echo(f"{written.declined:,} declined queries have no file in this layout")
    if written.torn:
        typer.echo("the journal's last line is torn and was left out", err=True)


@app.command()
def replay(
    run: RunDir,
    config: Annotated[Path, Option(help="The configuration that names the provider to ask.")],
    as_json: AsJson = False,
) -> None:
    """Ask every recorded search again and compare documents: exit 0 the same, 1 not.

    Near ties (scores within 1e-5 of each other) are reported and allowed.
    """
    loaded = load(config)
    with _no_history(), verification("replaying") as progress:
        result, strange = asyncio.run(_replay(run, loaded, progress))
    if as_json:
        value = {
            "same": result.same,
            "searches": result.searches,
            "counts": result.counts,
            "identity_differs": strange,
            "first_differences": [asdict(item) for item in result.differences],
        }
        typer.echo(json.dumps(value, indent=2, sort_keys=True))
    else:
        if strange:
            names = printable(", ".join(strange))
            typer.echo(f"another provider than the claim's: {names} differ")
        counts = result.counts
        typer.echo(
            f"{result.searches:,} searches asked again: {counts[Outcome.EQUAL]:,} equal, "
            f"{counts[Outcome.NEAR_TIE]:,} near ties, {counts[Outcome.REORDERED]:,} reordered, "
            f"{counts[Outcome.DIFFERENT]:,} different, {counts[Outcome.FAILED]:,} failed"
        )
        for item in result.differences:
            told = f"{item.outcome.value}: {printable(item.detail)}"
            typer.echo(f"  #{item.number} {told}  “{printable(item.query, 80)}”")
        if result.torn:
            typer.echo("the journal's last line is torn and was left out")
    raise typer.Exit(0 if result.same else 1)


async def _replay(run: Path, config: Config, progress: Progress) -> tuple[Replayed, list[str]]:
    from smartsearch_sidecar.retrieval.guard import Guard
    from smartsearch_sidecar.retrieval.provider import open_configured

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

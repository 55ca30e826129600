"""The output of the ledger commands: lines for a person, and JSON values.

Apart from ``ledger`` because it is pure: it takes results and gives text, without a command line.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from rich.text import Text

from smartsearch_sidecar.ledger.describe import printable
from smartsearch_sidecar.ledger.replay import Outcome, Replayed
from smartsearch_sidecar.ledger.verify import CheckpointReceipt, Verification


def verified_json(all_found: list[Verification], missing: list[str]) -> dict[str, Any]:
    """The JSON value of a verification: of one directory its own, of several one for each.

    ``missing`` are the nodes a receipt names whose directory was not given.
    """
    if len(all_found) == 1 and not missing:
        return all_found[0].as_json()
    return {
        "ok": all(found.ok for found in all_found) and not missing,
        "missing_nodes": missing,
        "runs": [{"directory": str(one.directory), **one.as_json()} for one in all_found],
    }


def reports(
    all_found: list[Verification], receipt: CheckpointReceipt | None, missing: list[str]
) -> Iterator[Text]:
    """Every directory's report, and the nodes of the receipt whose directory is missing."""
    for found in all_found:
        if len(all_found) > 1:
            yield Text(printable(str(found.directory)), style="bold")
        yield from report(found, receipt)
    if missing:
        yield Text("not proven: ", style="bold red").append(
            f"the receipt names {len(missing)} more: give the run directory of node "
            + printable(", ".join(missing), 500),
            style="default",
        )


def report(found: Verification, receipt: CheckpointReceipt | None) -> Iterator[Text]:
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
    cause = state.cause
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


def replayed_json(result: Replayed, strange: list[str]) -> dict[str, Any]:
    """The JSON value of a replay; ``strange``: parts of the provider's identity that differ."""
    return {
        "same": result.same,
        "searches": result.searches,
        "counts": {outcome.value: count for outcome, count in result.counts.items()},
        "identity_differs": strange,
        "first_differences": [
            {
                "number": item.number,
                "query": item.query,
                "outcome": item.outcome.value,
                "detail": item.detail,
            }
            for item in result.differences
        ],
    }


def replayed_words(result: Replayed, strange: list[str]) -> Iterator[str]:
    """A replay, line by line."""
    if strange:
        yield f"another provider than the claim's: {printable(', '.join(strange))} differ"
    counts = result.counts
    yield (
        f"{result.searches:,} searches asked again: {counts[Outcome.EQUAL]:,} equal, "
        f"{counts[Outcome.NEAR_TIE]:,} near ties, {counts[Outcome.REORDERED]:,} reordered, "
        f"{counts[Outcome.DIFFERENT]:,} different, {counts[Outcome.FAILED]:,} failed"
    )
    for item in result.differences:
        query = printable(item.query, 80)
        yield f"  #{item.number} {item.outcome.value}: {printable(item.detail)}  “{query}”"
    if result.torn:
        yield "the journal's last line is torn and was left out"

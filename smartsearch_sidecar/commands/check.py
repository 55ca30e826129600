"""``check``, ``checkpoint``, ``latch`` and ``url``: a served run from a shell."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from smartsearch_sidecar import errors
from smartsearch_sidecar.client import ENDPOINTS_VARIABLE, TIMEOUT_SECONDS, Client, find_endpoints
from smartsearch_sidecar.errors import GOING_ON, remedy

RunDir = Annotated[
    Path | None,
    Option(
        help=f"The served run's directory; without it {ENDPOINTS_VARIABLE} names endpoints.json."
    ),
]

Settle = Annotated[float, Option(min=0, max=600, help="Seconds to wait for work in flight.")]


def url(
    run_dir: RunDir = None,
    internal: Annotated[
        bool, Option("--internal", help="The trainer's and operator's URL instead.")
    ] = False,
) -> None:
    """Print the sandbox_url rollouts are configured with. It holds a capability: do not log it."""
    endpoints = find_endpoints(run_dir)
    typer.echo(endpoints.internal_url if internal else endpoints.sandbox_url)


def check(
    run_dir: RunDir = None,
    settle: Settle = 0.0,
    as_json: Annotated[bool, Option("--json", help="Print the whole answer.")] = False,
) -> None:
    """The checkpoint gate: exit 0 healthy, 1 not, 2 unreachable.

    Use --settle 30: without it a run with work in flight is not healthy yet (pending). For a failed
    run it prints the cause, what to look at and how to go on.
    """
    answer = Client(find_endpoints(run_dir).internal_url).health(settle)
    value = answer.value
    if not isinstance(value, dict) or "state" not in value:
        code = value.get("error", {}).get("code") if isinstance(value, dict) else None
        if code == "not_ready":
            typer.echo("not ready: the index is still loading")
            raise typer.Exit(1)
        raise errors.UNREACHABLE(
            "got an answer that is not a health report: is another program on this run's port?"
        )
    if as_json:
        typer.echo(json.dumps(value, indent=2, sort_keys=True))
    else:
        _print_state(value)
    raise typer.Exit(0 if answer.status == 200 else 1)


def _print_state(value: dict[str, Any]) -> None:
    """Prints the state, a line for each node of many, and for a failed run what to do."""
    cluster = value.get("cluster")
    if cluster is None:
        detail = ""
        counted = (
            f"{value['retrieval_responses']} of {value['retrieval_attempts']} searches answered"
        )
    else:
        used, detail = cluster["counts"], f" ({cluster['detail']})" if cluster["detail"] else ""
        counted = (
            f"{used.get('answered', 0)} of {used.get('searches', 0)} searches answered, "
            f"{len(cluster['nodes'])} of {cluster['expected']} nodes joined"
        )
    cause = value.get("cause") if value["state"] == "failed" else None
    if cause is not None:
        typer.echo(f"failed: {cause['cause']}: {cause['detail']} ({counted})")
    else:
        oldest = value.get("oldest_request_seconds", 0.0)
        age = f", oldest request {oldest:.1f} s" if oldest else ""
        typer.echo(f"{value['state']}{detail}: {counted}{age}")
        for note in _notes(value):
            typer.echo(f"  {note}")
    for row in value.get("waiting_for", ()):
        typer.echo(
            f"  waiting for {row['seconds']:.1f} s on: {row['on']} ({row['call']}, "
            f"{row['bound_seconds']:g} s allowed)"
        )
    last = value.get("loop", {}).get("last")
    if last is not None and value["state"] != "healthy":
        typer.echo(
            f"  the event loop stood still {value['loop']['stood_still']} times, last for "
            f"{last['seconds']:.1f} s, {last['ago']:.0f} s ago, at: {last['where']}"
        )
    for name, node in cluster["nodes"].items() if cluster is not None else ():
        counts = node.get("counts", {})
        why = f": {node['cause']}" if node.get("cause") else ""
        typer.echo(
            f"  {name}: {node.get('state', 'joining')}{why}, {counts.get('answered', 0)} of "
            f"{counts.get('searches', 0)} answered, record {node.get('seq', 0)}, "
            f"{node['hearing']} ({node['silent_seconds']:.1f} s)"
        )
    if cause is not None:
        typer.echo(f"  {remedy(cause['cause'])}\n  {GOING_ON}")


def _notes(value: dict[str, Any]) -> Iterator[str]:
    """What does not make a run bad, and the reader of its state has to know."""
    said = value.get("cluster") or value
    if (reason := value.get("reason")) is not None:
        yield reason
    elif said.get("searches_unaccepted") == 0:
        yield "no search since the last checkpoint: one is refused now without --allow-idle"
    for gap in said.get("gaps", ()):
        told = "the trainer stood still" if gap["trainer_stopped"] else "what was asked was refused"
        where = f"node {gap['node']}: " if "node" in gap else ""
        judged = f"{gap['judged_blocks']:,} result blocks judged since"
        until = gap["to"] or "now"
        yield f"{where}not served from {gap['from']} to {until} ({told}; {judged})"
    broken = said.get("result_blocks", {}).get("broken", 0)
    if broken:
        yield f"{broken:,} result blocks of scored rollouts are no answer of this run"


def checkpoint(
    *,
    step: Annotated[int, Option(min=0, help="The trainer's step.")],
    run_dir: RunDir = None,
    path: Annotated[
        str | None, Option(help="Where the checkpoint is; kept in the receipt.")
    ] = None,
    manifest_sha256: Annotated[str | None, Option(help="Of its manifest, if it has one.")] = None,
    settle: Settle = 30.0,
    allow_idle: Annotated[
        bool, Option("--allow-idle", help="Also where no search came since the last one.")
    ] = False,
    receipt: Annotated[Path | None, Option(help="Write it here, not to standard output.")] = None,
) -> None:
    """Have a checkpoint accepted, and keep its receipt: exit 0 accepted, 1 refused, 2 unreachable.

    A checkpoint without any search since the last one is refused: rollouts that ask a wrong address
    look just so. `ledger verify RUN --receipt FILE` proves later which history it was trained on.
    """
    wanted = {"step": step, "path": path, "manifest_sha256": manifest_sha256}
    wanted |= {"allow_idle": allow_idle or None}
    answer = Client(find_endpoints(run_dir).internal_url).call(
        "POST",
        f"/checkpoints?settle={settle:g}",
        {name: value for name, value in wanted.items() if value is not None},
        timeout_seconds=TIMEOUT_SECONDS + settle,
    )
    value = answer.value
    if not isinstance(value, dict) or "accepted" not in value:
        raise errors.USAGE(f"the checkpoint was not judged: {_refusal(value)}")
    if not value["accepted"]:
        _print_state(value)
        raise typer.Exit(1)
    text = json.dumps(value, indent=2)
    if receipt is None:
        typer.echo(text)
        return
    try:
        receipt.write_text(text + "\n", encoding="utf-8")
    except OSError as exc:
        raise errors.USAGE(
            f"step {step} is accepted, but the receipt cannot be written to {receipt} "
            f"({exc.strerror or exc}): ask again with another --receipt, and --allow-idle"
        ) from None
    typer.echo(f"accepted: step {step}, record {value['seq']}; the receipt is {receipt}")


def _refusal(value: object) -> str:
    found = value.get("error") if isinstance(value, dict) else None
    if isinstance(found, dict):
        return str(found["message"])
    return "got no error message: is another program on this port?"


def latch(
    reason: Annotated[str, Option(help="Why; it is recorded.")], run_dir: RunDir = None
) -> None:
    """Close the run's latch by hand: no search, reward or checkpoint is accepted any more.

    Nothing opens it again: training goes on from its last accepted checkpoint, with a new run.
    """
    answer = Client(find_endpoints(run_dir).internal_url).call("POST", "/latch", {"reason": reason})
    if answer.status != 200:
        raise errors.USAGE(f"the latch was not closed: {_refusal(answer.value)}")
    cause = answer.value["cause"]
    typer.echo(f"closed: {cause['cause']}: {cause['detail']}")

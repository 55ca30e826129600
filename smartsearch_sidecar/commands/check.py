"""``check``, ``latch`` and ``url``: a served run from a shell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from smartsearch_sidecar import errors
from smartsearch_sidecar.client import ENDPOINTS_VARIABLE, Client, find_endpoints

RunDir = Annotated[
    Path | None,
    typer.Option(
        "--run-dir",
        help=f"The served run's directory; without it {ENDPOINTS_VARIABLE} names endpoints.json.",
    ),
]


def url(
    run_dir: RunDir = None,
    internal: Annotated[
        bool, typer.Option("--internal", help="The trainer's and operator's URL instead.")
    ] = False,
) -> None:
    """Print the sandbox_url rollouts are configured with. It holds a capability: do not log it."""
    endpoints = find_endpoints(run_dir)
    typer.echo(endpoints.internal_url if internal else endpoints.sandbox_url)


def check(
    run_dir: RunDir = None,
    settle: Annotated[
        float,
        typer.Option("--settle", min=0, max=600, help="Seconds to wait for work in flight."),
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole answer.")] = False,
) -> None:
    """The checkpoint gate: exit 0 healthy, 1 not, 2 unreachable."""
    answer = Client(find_endpoints(run_dir).internal_url).health(settle)
    value = answer.value
    if not isinstance(value, dict) or "state" not in value:
        code = value.get("error", {}).get("code") if isinstance(value, dict) else None
        if code == "not_ready":
            typer.echo("not ready: the index is still loading")
            raise typer.Exit(1)
        raise errors.Unreachable(
            "what answers there is not this run's sidecar (another run's endpoints.json?)"
        )
    if as_json:
        typer.echo(json.dumps(value, indent=2, sort_keys=True))
    else:
        typer.echo(_sentence(value))
    raise typer.Exit(0 if answer.status == 200 else 1)


def _sentence(value: dict[str, object]) -> str:
    counted = f"{value['retrieval_responses']} of {value['retrieval_attempts']} searches answered"
    cause = value.get("cause")
    if value["state"] == "failed" and isinstance(cause, dict):
        return f"failed: {cause['cause']}: {cause['detail']} ({counted})"
    return f"{value['state']}: {counted}"


def latch(
    reason: Annotated[str, typer.Option("--reason", help="Why; it is recorded.")],
    run_dir: RunDir = None,
) -> None:
    """Close the run's latch by hand: nothing is answered any more, no checkpoint is accepted."""
    answer = Client(find_endpoints(run_dir).internal_url).call("POST", "/latch", {"reason": reason})
    if answer.status != 200:
        raise errors.UsageError(f"the latch was not closed: {answer.value['error']['message']}")
    cause = answer.value["cause"]
    typer.echo(f"closed: {cause['cause']}: {cause['detail']}")

"""``init``: a configuration with its capabilities, and the lines for the trainer."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

import smartsearch_sidecar
from smartsearch_sidecar import errors
from smartsearch_sidecar.client import ENDPOINTS_VARIABLE
from smartsearch_sidecar.commands.init_plan import (
    CONFIG_NAME,
    EXECUTE_NAME,
    INTERNAL_NAME,
    NODE_VARIABLE,
    RUN_NAME,
    Coordination,
    Plan,
    arithmetic,
    sized,
    written,
)
from smartsearch_sidecar.config import load
from smartsearch_sidecar.doctor.loopback import export_line

REWARD_FILE = Path(smartsearch_sidecar.__file__).parent / "integrations" / "smartsearch_reward.py"


def init(
    directory: Annotated[
        Path, Argument(metavar="DIR", help="Where the files go; made when missing.")
    ],
    *,
    ranks: Annotated[int, Option(min=1, max=1024, help="Rollout ranks (GPUs) of this node.")],
    tensor_parallel: Annotated[
        int, Option(min=1, max=1024, help="rollout.tensor_model_parallel_size.")
    ],
    steps: Annotated[int, Option(min=1, help="Training steps of the run.")] = 1000,
    questions: Annotated[
        int, Option(min=1, help="Questions of a step (data.train_batch_size).")
    ] = 256,
    rollouts: Annotated[int, Option(min=1, help="Rollouts of a question (rollout.n).")] = 8,
    searches: Annotated[int, Option(min=1, help="Searches of a rollout (rollout.max_turns).")] = 5,
    validation_questions: Annotated[int, Option(min=0, help="Questions of the test set.")] = 1000,
    test_every: Annotated[int, Option(min=1, help="Steps between tests (trainer.test_freq).")] = 10,
    nodes: Annotated[int, Option(min=1, max=4096, help="Trainer nodes.")] = 1,
    index: Annotated[Path | None, Option(help="The folder `index build` wrote, or will.")] = None,
    port: Annotated[int, Option(min=1, max=65535, help="The same on every node.")] = 8765,
    nats: Annotated[
        str | None,
        Option(
            envvar="SMARTSEARCH_SIDECAR__CLUSTER__NATS_URL",
            show_envvar=True,
            help="NATS servers, commas between: one run over all nodes, one verdict, one quota.",
        ),
    ] = None,
    run_id: Annotated[
        str | None, Option(help="The run's name on NATS, of this run alone; else made.")
    ] = None,
) -> None:
    """Write a configuration and two capability files (0600), with every quota sized and shown.

    One folder serves every node. Without --nats each node has its share of the searches and its own
    verdict. Defaults are those of the pinned trainer's script. Overwrites nothing. Exit codes: 0
    written, 2 not.
    """
    if ranks % tensor_parallel:
        raise errors.USAGE(
            f"{ranks} ranks cannot be divided into groups of {tensor_parallel} (--tensor-parallel)"
        )
    coordination = _coordination(nodes, nats, run_id)
    plan = Plan(
        ranks=ranks,
        tensor_parallel=tensor_parallel,
        steps=steps,
        questions=questions,
        rollouts=rollouts,
        searches=searches,
        validation_questions=validation_questions,
        test_every=test_every,
        nodes=nodes,
        coordinated=coordination is not None,
    )
    sizes = sized(plan)
    text = written(
        plan,
        sizes,
        index=None if index is None else index.absolute(),
        port=port,
        coordination=coordination,
    )
    folder = directory.absolute()
    _write(
        folder,
        {
            EXECUTE_NAME: secrets.token_urlsafe(32) + "\n",
            INTERNAL_NAME: secrets.token_urlsafe(32) + "\n",
            CONFIG_NAME: text,
        },
    )
    loaded = load(
        folder / CONFIG_NAME,
        # Each node is given its own name, so the file has none.
        overrides={"cluster.node": _node(0)} if plan.coordinated else None,
    )
    typer.echo(f"{folder / CONFIG_NAME} and two capabilities beside it, readable by you alone.")
    for line in arithmetic(plan, sizes):
        typer.echo(f"  {line}")
    for line in _next(folder, loaded.retrieval.bm25.index, plan, loaded.server.host):
        typer.echo(line)


def _write(folder: Path, files: dict[str, str]) -> None:
    """Writes all files; on a failure removes those it made. An existing file is never touched."""
    there = [name for name in files if os.path.lexists(folder / name)]
    if there:
        raise errors.USAGE(
            f"{folder} holds {', '.join(there)} already: name another folder, nothing was written"
        )
    made: list[Path] = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, text in files.items():
            path = folder / name
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                made.append(path)
                file.write(text)
    except OSError as exc:
        for path in made:
            path.unlink()
        raise errors.USAGE(
            f"{folder} cannot be written ({exc.strerror or exc}): nothing was left there"
        ) from None


def _coordination(nodes: int, nats: str | None, run_id: str | None) -> Coordination | None:
    """The NATS address and the run's name, checked before anything is written, and never quoted."""
    if nats is None:
        if run_id is not None:
            raise errors.USAGE("--run-id names the run on NATS: pass --nats as well")
        return None
    if nodes == 1:
        raise errors.USAGE("--nats is for a run of many nodes: pass --nodes as well")
    chosen = Coordination(nats, secrets.token_hex(8) if run_id is None else run_id)
    # Checked by the models: a file that does not load would have to be removed again.
    load(
        None,
        overrides={
            "run.nodes": nodes,
            "retrieval.bm25.index": "index",
            "cluster.nats_url": chosen.nats_url,
            "cluster.run_id": chosen.run_id,
            "cluster.node": _node(0),
        },
        environ={},
    )
    return chosen


def _node(number: int) -> str:
    """A node's name. No two nodes may have the same, and a node keeps its own."""
    return f"node-{number}"


def _next(folder: Path, index: Path | None, plan: Plan, host: str) -> Iterator[str]:
    """The next commands, as lines to copy."""
    config = shlex.quote(str(folder / CONFIG_NAME))
    run = '"$RUN"' if plan.coordinated else shlex.quote(str(folder / RUN_NAME))
    name = f"{NODE_VARIABLE}={_node(0)} " if plan.coordinated else ""
    yield ""
    yield "Now:"
    if index is not None and not index.exists():
        yield f"  smartsearch-sidecar index build CORPUS {shlex.quote(str(index))}"
    yield f"  {name}smartsearch-sidecar doctor --config {config} --ranks {plan.ranks}"
    yield f"  {name}smartsearch-sidecar rehearse --config {config} --ranks {plan.ranks}"
    if not plan.coordinated:
        yield f"  smartsearch-sidecar serve --config {config} --resume"
    yield from _on_every_node(config, plan)
    yield ""
    yield "Where the trainer (Ray) is started:"
    yield f"  export {ENDPOINTS_VARIABLE}={run}/endpoints.json"
    yield f"  {export_line({}, host)}"
    yield "In its command line, with rewards by the sidecar (the URL then appears in no log):"
    yield "  actor_rollout_ref.rollout.sandbox_url=sidecar \\"
    yield f"  custom_reward_function.path={shlex.quote(str(REWARD_FILE))} \\"
    yield "  custom_reward_function.name=compute_score reward_model.reward_manager=re_call"
    yield "or with searches alone (the URL is then in the trainer's logs and trackers):"
    yield (f'  actor_rollout_ref.rollout.sandbox_url="$(smartsearch-sidecar url --run-dir {run})"')


def _on_every_node(config: str, plan: Plan) -> Iterator[str]:
    """The lines for a run of several nodes; no line where there is one node."""
    if plan.coordinated:
        yield ""
        yield f"On each of the {plan.nodes} nodes, from this folder or a copy of it (modes kept),"
        yield f"with its own name ({_node(0)} to {_node(plan.nodes - 1)}), the same at each start:"
        yield "  RUN=/a/folder/of/the/nodes/own/disk/001"
        yield (
            f"  {NODE_VARIABLE}={_node(0)} smartsearch-sidecar serve --config {config} "
            '--run-dir "$RUN" --resume'
        )
        yield "or use config/slurm, config/kubernetes or integrations/ray_sidecars.py."
    elif plan.nodes > 1:
        yield ""
        yield (
            f"On every other of the {plan.nodes} nodes: the same {CONFIG_NAME} and {EXECUTE_NAME} "
            "(one sandbox_url serves all), and an internal capability of each node's own."
        )
        yield "Each node then has its share and its own verdict; --nats makes one run of them."

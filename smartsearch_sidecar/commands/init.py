"""``init``: a configuration with its capabilities and quotas, and the lines for the trainer.

The arithmetic is shown to the operator, because a run ends where a quota is used up, and a wrong
one is found days later.
"""

from __future__ import annotations

import math
import os
import secrets
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import tomli_w
import typer
from typer import Argument, Option

import smartsearch_sidecar
from smartsearch_sidecar import errors
from smartsearch_sidecar.client import ENDPOINTS_VARIABLE
from smartsearch_sidecar.config import load
from smartsearch_sidecar.config.loading import env_name
from smartsearch_sidecar.config.model import FIELDS
from smartsearch_sidecar.doctor.machine import export_line
from smartsearch_sidecar.load_test.client_worker import THREADS_PER_RANK
from smartsearch_sidecar.run.scores import MAX_NEW_TOKENS

REWARD_FILE = Path(smartsearch_sidecar.__file__).parent / "integrations" / "smartsearch_reward.py"
SPARE: Final = 1.25
"""Factor of each quota: for resumed steps, a step more than planned, groups sampled again."""
LEASE_BLOCK: Final[int] = FIELDS["cluster.lease_block"].default
"""The default. In a small run the nodes together would hold too many of its searches."""
LEASED_SHARE: Final = 20
"""The blocks of all nodes together are at most one in this many of the run's searches."""
SLOTS: Final[int] = FIELDS["execute.slots"].default
WAITING_MIN: Final[int] = FIELDS["execute.waiting_max"].default
"""The default; a larger node needs more."""
CONFIG_NAME: Final = "sidecar.toml"
EXECUTE_NAME: Final = "execute.capability"
INTERNAL_NAME: Final = "internal.capability"
RUN_NAME: Final = "runs/001"
NODE_VARIABLE: Final = env_name("cluster.node")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings that the trainer is started with; each is an option of ``init``.

    ``nats_url`` and ``run_id`` are set where the nodes lease from one quota, else each node has a
    share. The address may hold a password.
    """

    ranks: int
    tensor_parallel: int
    steps: int
    questions: int
    rollouts: int
    searches: int
    validation_questions: int
    test_every: int
    nodes: int
    nats_url: str | None = None
    run_id: str | None = None

    @property
    def trained(self) -> int:
        return self.steps * self.questions * self.rollouts

    @property
    def tested(self) -> int:
        """Validation rollouts of the whole run: one a question, before it and at each test."""
        return self.validation_questions * (self.steps // self.test_every + 1)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The quotas that follow from a plan: whole numbers, rounded up to two digits.

    ``rewards`` and ``validation`` hold ``max_scores``, ``max_helper_calls``, ``max_output_tokens``.
    """

    max_calls: int
    waiting_max: int
    rewards: dict[str, int]
    validation: dict[str, int]
    lease_block: int


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
        nats_url=nats,
        run_id=secrets.token_hex(8) if nats is not None and run_id is None else run_id,
    )
    _hold_coordination(plan)
    folder = directory.absolute()
    _write(
        folder,
        {
            EXECUTE_NAME: secrets.token_urlsafe(32) + "\n",
            INTERNAL_NAME: secrets.token_urlsafe(32) + "\n",
            CONFIG_NAME: _text(plan, None if index is None else index.absolute(), port),
        },
    )
    # Each node is given its own name, so the file has none.
    loaded = load(folder / CONFIG_NAME, overrides={"cluster.node": _node(0)} if nats else None)
    typer.echo(f"{folder / CONFIG_NAME} and two capabilities beside it, readable by you alone.")
    for line in _arithmetic(plan):
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


def _hold_coordination(plan: Plan) -> None:
    """Checks the NATS address and the run's name before anything is written; quotes neither."""
    if plan.nats_url is None:
        if plan.run_id is not None:
            raise errors.USAGE("--run-id names the run on NATS: pass --nats as well")
        return
    if plan.nodes == 1:
        raise errors.USAGE("--nats is for a run of many nodes: pass --nodes as well")
    # Checked by the models: a file that does not load would have to be removed again.
    overrides = {
        "run.nodes": plan.nodes,
        "retrieval.bm25.index": "index",
        "cluster.nats_url": plan.nats_url,
        "cluster.run_id": plan.run_id,
        "cluster.node": _node(0),
    }
    load(None, overrides=overrides, environ={})


def _node(number: int) -> str:
    """A node's name. No two nodes may have the same, and a node keeps its own."""
    return f"node-{number}"


# --- quotas ---------------------------------------------------------------------------------------


def rounded(value: float) -> int:
    """Rounds up to two digits: people read a quota."""
    if value <= 0:
        return 0
    unit: int = 10 ** max(0, math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit) * unit


def sized(plan: Plan) -> Sizes:
    """Every quota: the run's where nodes lease from it, else this node's share of the searches.

    Rewards are asked of one node for all rollouts of the run.
    """
    sharing = 1 if plan.nats_url else plan.nodes
    calls = (plan.trained + plan.tested) * plan.searches * plan.tensor_parallel / sharing
    max_calls = max(1, rounded(calls * SPARE))
    return Sizes(
        max_calls=max_calls,
        waiting_max=max(WAITING_MIN, plan.ranks * THREADS_PER_RANK - SLOTS),
        rewards=_reward_quotas(plan.trained, plan.searches),
        validation=_reward_quotas(plan.tested, plan.searches),
        lease_block=max(1, min(LEASE_BLOCK, max_calls // (plan.nodes * LEASED_SHARE))),
    )


def _reward_quotas(rollouts: int, searches: int) -> dict[str, int]:
    """The quotas of one split: a helper call for each search of a score."""
    scores = rounded(rollouts * SPARE)
    calls = scores * searches
    return {
        "max_scores": scores,
        "max_helper_calls": calls,
        "max_output_tokens": calls * MAX_NEW_TOKENS,
    }


def _arithmetic(plan: Plan) -> Iterator[str]:
    sizes, trained = sized(plan), f"{plan.trained:,}"
    places = plan.ranks * THREADS_PER_RANK - SLOTS
    nodes = f" / {plan.nodes} nodes" if plan.nodes > 1 and plan.nats_url is None else ""
    yield (
        f"rollouts      {plan.steps:,} steps x {plan.questions:,} questions x {plan.rollouts} "
        f"= {trained}"
    )
    yield (
        f"validation    {plan.validation_questions:,} questions x "
        f"({plan.steps:,} / {plan.test_every} + 1) tests = {plan.tested:,}"
    )
    yield (
        f"max_calls     ({trained} + {plan.tested:,}) x {plan.searches} searches x "
        f"{plan.tensor_parallel} tensor-parallel{nodes} x {SPARE} = {sizes.max_calls:,}"
    )
    yield (
        f"waiting_max   {plan.ranks} ranks x {THREADS_PER_RANK} calls - {SLOTS} slots = "
        f"{max(0, places):,}, at least {WAITING_MIN}: {sizes.waiting_max:,}"
    )
    yield (
        f"max_scores    {trained} x {SPARE} = {sizes.rewards['max_scores']:,} "
        "(a batch scored again is not counted again)"
    )
    yield (
        f"helper calls  one a search: {sizes.rewards['max_helper_calls']:,}; "
        f"tokens {MAX_NEW_TOKENS:,} each: {sizes.rewards['max_output_tokens']:,}"
    )
    if plan.nats_url is not None:
        yield (
            f"lease_block   {sizes.max_calls:,} / {plan.nodes} nodes / {LEASED_SHARE}, "
            f"at most {LEASE_BLOCK}: {sizes.lease_block:,}"
        )


# --- what is written ------------------------------------------------------------------------------


def _text(plan: Plan, index: Path | None, port: int) -> str:
    """The configuration; paths without a root start at its folder. One text serves every node."""
    sizes = sized(plan)
    sums = "\n".join(f"#   {line}" for line in _arithmetic(plan))
    nodes = f"nodes = {plan.nodes}\n" if plan.nodes > 1 else ""
    if plan.nats_url is None:
        directory = f'directory = "{RUN_NAME}"  # the first run; `--run-dir` names another'
        cluster = provenance = ""
    else:
        directory = "# directory: each node's own, on its own disk; `--run-dir` names it"
        # Enforced, as each node knows the answers of all: it finds a block that no node gave.
        provenance = 'provenance = "enforce"\n'
        cluster = _cluster(plan, sizes)
    return f"""\
# Written by `smartsearch-sidecar init`. Every key: config/README.md of the sidecar.
#
{sums}

profile = "training"

[run]
{directory}
{nodes}
[server]
port = {port}
execute_capability_file = "{EXECUTE_NAME}"
internal_capability_file = "{INTERNAL_NAME}"

[execute]
max_calls = {sizes.max_calls}
slots = {SLOTS}
waiting_max = {sizes.waiting_max}

[retrieval]
provider = "bm25"

[retrieval.bm25]
{tomli_w.dumps({"index": str(index or "index")})}
{cluster}[reward]
enabled = false  # true once the lines with marks below are filled in
{provenance}{tomli_w.dumps(sizes.rewards).rstrip()}
# checkout = "/opt/SmartSearch"  # the pinned trainer, clean, at its commit

[reward.validation]
{tomli_w.dumps(sizes.validation).rstrip()}

# [reward.references]
# train = "/data/train.parquet"
# validation = "/data/test.parquet"
#
# [reward.helper]
# kind = "sglang"
# url = "http://127.0.0.1:30000"
# model = "the name it is served under"
# model_sha256 = "of its weights, as you declare them"
"""


def _cluster(plan: Plan, sizes: Sizes) -> str:
    return f"""\
# One run over all nodes: every quota in this file is the run's, and nodes lease from it in blocks.
# Another run needs another run_id, as it needs another directory.
[cluster]
{tomli_w.dumps({"nats_url": plan.nats_url}).rstrip()}  # may hold a password: this file is 0600
run_id = "{plan.run_id}"  # or {env_name("cluster.run_id")}
lease_block = {sizes.lease_block}
# node: each node's own name. Set {NODE_VARIABLE} where the node is started.

"""


def _next(folder: Path, index: Path | None, plan: Plan, host: str) -> Iterator[str]:
    """The next commands, as lines to copy."""
    config = shlex.quote(str(folder / CONFIG_NAME))
    run = '"$RUN"' if plan.nats_url else shlex.quote(str(folder / RUN_NAME))
    name = f"{NODE_VARIABLE}={_node(0)} " if plan.nats_url else ""
    yield ""
    yield "Now:"
    if index is not None and not index.exists():
        yield f"  smartsearch-sidecar index build CORPUS {shlex.quote(str(index))}"
    yield f"  {name}smartsearch-sidecar doctor --config {config} --ranks {plan.ranks}"
    yield f"  {name}smartsearch-sidecar rehearse --config {config} --ranks {plan.ranks}"
    if not plan.nats_url:
        yield f"  smartsearch-sidecar serve --config {config} --resume"
    if plan.nats_url:
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
    yield ""
    yield "Where the trainer (Ray) is started:"
    yield f"  export {ENDPOINTS_VARIABLE}={run}/endpoints.json"
    yield f"  {export_line({}, host)}"
    yield "In its command line, with rewards by the sidecar (the URL then appears in no log):"
    yield "  actor_rollout_ref.rollout.sandbox_url=sidecar \\"
    yield f"  custom_reward_function.path={shlex.quote(str(REWARD_FILE))} \\"
    yield "  custom_reward_function.name=compute_score reward_model.reward_manager=re_call"
    yield "or with searches alone (the URL is then in the trainer's logs and trackers):"
    yield f'  actor_rollout_ref.rollout.sandbox_url="$(smartsearch-sidecar url --run-dir {run})"'

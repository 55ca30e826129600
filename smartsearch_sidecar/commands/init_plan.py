"""The first configuration of a run: quotas sized from the trainer's settings, and its text.

Apart from ``init`` because it does no I/O: tests ask it for many plans. The arithmetic is shown to
the operator, because a run ends where a quota is used up, and a wrong one is found days later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import tomli_w

from smartsearch_sidecar.config.loading import env_name
from smartsearch_sidecar.config.model import FIELDS
from smartsearch_sidecar.load_test.client_worker import THREADS_PER_RANK
from smartsearch_sidecar.run.state import MAX_NEW_TOKENS

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
RUN_ID_VARIABLE: Final = env_name("cluster.run_id")


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings that the trainer is started with.

    Attributes:
        ranks: rollout processes of this node, one a GPU.
        tensor_parallel: ranks that repeat the same calls (``rollout.tensor_model_parallel_size``).
        steps: training steps of the whole run.
        questions: of a step (``data.train_batch_size``).
        rollouts: of a question (``rollout.n``).
        searches: of a rollout at most (``rollout.max_turns``).
        validation_questions, test_every: of the test set, and the steps between two tests.
        nodes: trainer nodes that share the load.
        coordinated: whether they lease from one quota (``[cluster]``), or have a share each.
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
    coordinated: bool = False


@dataclass(frozen=True, slots=True)
class Coordination:
    """How the nodes of one run find each other. The address may hold a password."""

    nats_url: str
    run_id: str


@dataclass(frozen=True, slots=True)
class Sizes:
    """The quotas that follow from a plan: whole numbers, rounded up to two digits."""

    max_calls: int
    waiting_max: int
    max_scores: int
    max_helper_calls: int
    max_output_tokens: int
    validation_scores: int
    validation_helper_calls: int
    validation_output_tokens: int
    lease_block: int


def rounded(value: float) -> int:
    """Rounds up to two digits: people read a quota."""
    if value <= 0:
        return 0
    unit: int = 10 ** max(0, math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit) * unit


def trained(plan: Plan) -> int:
    """Rollouts of the whole run."""
    return plan.steps * plan.questions * plan.rollouts


def tested(plan: Plan) -> int:
    """Validation rollouts of the whole run: one a question, before training and at each test."""
    return plan.validation_questions * (plan.steps // plan.test_every + 1)


def sized(plan: Plan) -> Sizes:
    """Every quota: the run's where nodes lease from it, else this node's share of the searches.

    Rewards are asked of one node for all rollouts of the run.
    """
    calls = (trained(plan) + tested(plan)) * plan.searches * plan.tensor_parallel / _sharing(plan)
    scores, validation = rounded(trained(plan) * SPARE), rounded(tested(plan) * SPARE)
    max_calls = max(1, rounded(calls * SPARE))
    return Sizes(
        max_calls=max_calls,
        waiting_max=max(WAITING_MIN, plan.ranks * THREADS_PER_RANK - SLOTS),
        max_scores=scores,
        max_helper_calls=scores * plan.searches,
        max_output_tokens=scores * plan.searches * MAX_NEW_TOKENS,
        validation_scores=validation,
        validation_helper_calls=validation * plan.searches,
        validation_output_tokens=validation * plan.searches * MAX_NEW_TOKENS,
        lease_block=max(1, min(LEASE_BLOCK, max_calls // (plan.nodes * LEASED_SHARE))),
    )


def _sharing(plan: Plan) -> int:
    return 1 if plan.coordinated else plan.nodes


def arithmetic(plan: Plan, sizes: Sizes) -> list[str]:
    """The calculation of each quota, a line each."""
    nodes = f" / {plan.nodes} nodes" if _sharing(plan) > 1 else ""
    leased = (
        f"lease_block   {sizes.max_calls:,} / {plan.nodes} nodes / {LEASED_SHARE}, "
        f"at most {LEASE_BLOCK}: {sizes.lease_block:,}"
    )
    return [
        (
            f"rollouts      {plan.steps:,} steps x {plan.questions:,} questions x {plan.rollouts} "
            f"= {trained(plan):,}"
        ),
        (
            f"validation    {plan.validation_questions:,} questions x "
            f"({plan.steps:,} / {plan.test_every} + 1) tests = {tested(plan):,}"
        ),
        (
            f"max_calls     ({trained(plan):,} + {tested(plan):,}) x {plan.searches} searches x "
            f"{plan.tensor_parallel} tensor-parallel{nodes} x {SPARE} = {sizes.max_calls:,}"
        ),
        (
            f"waiting_max   {plan.ranks} ranks x {THREADS_PER_RANK} calls - {SLOTS} slots = "
            f"{max(0, plan.ranks * THREADS_PER_RANK - SLOTS):,}, at least {WAITING_MIN}: "
            f"{sizes.waiting_max:,}"
        ),
        (
            f"max_scores    {trained(plan):,} x {SPARE} = {sizes.max_scores:,} "
            "(a batch scored again is not counted again)"
        ),
        (
            f"helper calls  one a search: {sizes.max_helper_calls:,}; "
            f"tokens {MAX_NEW_TOKENS:,} each: {sizes.max_output_tokens:,}"
        ),
        *([leased] if plan.coordinated else []),
    ]


def written(
    plan: Plan,
    sizes: Sizes,
    *,
    index: Path | None,
    port: int,
    coordination: Coordination | None = None,
) -> str:
    """The configuration; paths without a root start at its folder. One text serves every node."""
    sums = "\n".join(f"#   {line}" for line in arithmetic(plan, sizes))
    where = "index" if index is None else str(index)
    nodes = f"nodes = {plan.nodes}\n" if plan.nodes > 1 else ""
    return f"""\
# Written by `smartsearch-sidecar init`. Every key: config/README.md of the sidecar.
#
{sums}

profile = "training"

[run]
{_directory(coordination)}
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
{tomli_w.dumps({"index": where})}
{_cluster(sizes, coordination)}[reward]
enabled = false  # true once the lines with marks below are filled in
{_provenance(coordination)}max_scores = {sizes.max_scores}
max_helper_calls = {sizes.max_helper_calls}
max_output_tokens = {sizes.max_output_tokens}
# checkout = "/opt/SmartSearch"  # the pinned trainer, clean, at its commit

[reward.validation]
max_scores = {sizes.validation_scores}
max_helper_calls = {sizes.validation_helper_calls}
max_output_tokens = {sizes.validation_output_tokens}

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


def _directory(coordination: Coordination | None) -> str:
    if coordination is None:
        return f'directory = "{RUN_NAME}"  # the first run; `--run-dir` names another'
    return "# directory: each node's own, on its own disk; `--run-dir` names it"


def _provenance(coordination: Coordination | None) -> str:
    """Enforced, because each node knows the answers of all: it finds a block that no node gave."""
    return "" if coordination is None else 'provenance = "enforce"\n'


def _cluster(sizes: Sizes, coordination: Coordination | None) -> str:
    if coordination is None:
        return ""
    address = tomli_w.dumps({"nats_url": coordination.nats_url}).rstrip()
    return f"""\
# One run over all nodes: every quota in this file is the run's, and nodes lease from it in blocks.
# Another run needs another run_id, as it needs another directory.
[cluster]
{address}  # may hold a password: this file is 0600
run_id = "{coordination.run_id}"  # or {RUN_ID_VARIABLE}
lease_block = {sizes.lease_block}
# node: each node's own name. Set {NODE_VARIABLE} where the node is started.

"""

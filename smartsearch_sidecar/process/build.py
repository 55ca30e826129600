"""The parts of a run put together from its configuration, in the order they need each other.

provider and guard (what answers) -> rewards (what scores) -> the run (its claim names both) ->
service and scoring. ``daemon.py`` keeps them and closes them in reverse.

Apart from ``daemon.py``, its one user: parts and their order here, sockets and signals there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from smartsearch_sidecar.config import Config
from smartsearch_sidecar.contract.call_syntax import TOP_N
from smartsearch_sidecar.contract.execute import ExecuteRules
from smartsearch_sidecar.ledger.file import RunFiles
from smartsearch_sidecar.ledger.recorder import Run
from smartsearch_sidecar.ledger.recovery import Reopened
from smartsearch_sidecar.ledger.start import MIB, begin
from smartsearch_sidecar.metrics import Observer
from smartsearch_sidecar.retrieval.cache import CachedSearch
from smartsearch_sidecar.retrieval.guard import Guard
from smartsearch_sidecar.retrieval.provider import Provider, WatchesItself
from smartsearch_sidecar.retrieval.registry import Progress, open_configured
from smartsearch_sidecar.run.slots import Slots
from smartsearch_sidecar.scoring.service import Scoring
from smartsearch_sidecar.search.service import Service, ServicePolicy

if TYPE_CHECKING:
    from smartsearch_sidecar.cluster.bus import Connect
    from smartsearch_sidecar.gate.cluster import ClusterRun
    from smartsearch_sidecar.scoring.build import Rewards


@dataclass(slots=True)
class Parts:
    """A run, assembled; ``scoring`` and ``rewards`` where rewards are on, ``facts`` as claimed,
    ``cluster_run`` where the run has other nodes.
    """

    run: Run
    service: Service
    scoring: Scoring | None
    rewards: Rewards | None
    watching: asyncio.Task[None] | None
    facts: dict[str, Any]
    cluster_run: ClusterRun | None

    async def close(self) -> None:
        """Ends what runs beside the requests; the writer is the daemon's to close, last."""
        if self.watching is not None:
            self.watching.cancel()
            await asyncio.wait([self.watching])
        if self.scoring is not None:
            await self.scoring.close()
        if self.rewards is not None:
            await self.rewards.close()
        await self.service.retrieval.close()


async def assemble(
    config: Config,
    files: RunFiles,
    found: Reopened | None,
    *,
    provider: Provider | None = None,
    progress: Progress | None = None,
    observer: Observer | None = None,
    connect: Connect | None = None,
) -> Parts:
    """Opens provider and rewards, claims or resumes the run, and builds what serves it.

    What was opened is closed again where a later step fails. Raises ``UsageError`` or another
    named error with a sentence for the operator.
    """
    opened = provider or await open_configured(config, progress)
    rewards: Rewards | None = None
    cluster_run: ClusterRun | None = None
    try:
        guard = await _guard(config, opened)
        facts: dict[str, Any] = {
            "retrieval": guard.identity,
            "retrieval_identity_sha256": guard.identity_sha256,
        }
        # Imported where wanted: a run without them does not load their modules.
        if config.cluster is not None:
            from smartsearch_sidecar.gate.cluster import ClusterRun

            cluster_run = await ClusterRun.reach(config, connect)
        if config.reward.enabled:
            from smartsearch_sidecar.scoring.build import open_rewards

            rewards = await open_rewards(config)
            facts["reward"] = rewards.facts
            await rewards.remember(None if found is None else files.directory, cluster_run)
        join = None if cluster_run is None else partial(cluster_run.join, facts)
        run = await begin(
            files, config, found, facts, observer=observer, join=join, quota=cluster_run
        )
    except BaseException:
        if cluster_run is not None:
            await cluster_run.withdraw()
        if rewards is not None:
            await rewards.close()
        await opened.close()
        raise
    own = None if rewards is None else rewards.answers.add
    on_answer = own if cluster_run is None else cluster_run.on_answer
    service = _service(config, run, guard, on_answer)
    if cluster_run is not None:
        await cluster_run.begin(service)
    if rewards is None:
        return Parts(run, service, None, None, None, facts, cluster_run)
    watching = asyncio.create_task(rewards.watch(run), name="helper-identity")
    return Parts(run, service, rewards.scoring(run), rewards, watching, facts, cluster_run)


def _service(
    config: Config, run: Run, guard: Guard, on_answer: Callable[[str], None] | None
) -> Service:
    if isinstance(guard.provider, WatchesItself):
        guard.provider.on_fault = lambda fault: run.recorder.close_latch(
            fault.closes_as, detail=fault.message
        )
    execute = config.execute
    waited = run.observer.waited["execute"].observe
    return Service(
        run=run,
        slots=Slots(execute.slots, execute.waiting_max, waited=waited),
        retrieval=CachedSearch(guard, cache_bytes=config.retrieval.cache_mib * MIB),
        policy=ServicePolicy(
            rules=ExecuteRules(execute.environment, frozenset(execute.accepted_environment_sha256)),
            deadline_seconds=execute.deadline_seconds,
            decline=execute.on_invalid_query == "decline",
            latch_undelivered=execute.on_undelivered == "latch",
        ),
        on_answer=on_answer,
    )


async def _guard(config: Config, provider: Provider) -> Guard:
    retrieval = config.retrieval
    guard = Guard(
        provider,
        top_n=TOP_N,
        retries=retrieval.retries,
        drop_tagged=retrieval.on_protocol_tag == "drop",
        watch_drift=retrieval.on_drift == "latch",
    )
    await guard.claim_identity()
    return guard

"""What a node needs of its own side: the way to the servers, and its own run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from smartsearch_sidecar.cluster.bus import Bus, Linked
from smartsearch_sidecar.cluster.nodestate import NodeState, RunStatus
from smartsearch_sidecar.cluster.quota_leaser import used_of
from smartsearch_sidecar.config import ClusterSection
from smartsearch_sidecar.run.state import RunState


class Connect(Protocol):
    """``cluster.nats.connect``, or what a test has in its place."""

    async def __call__(
        self, cluster: ClusterSection, run_id: str, *, linked: Linked, replicas: int | None = None
    ) -> Bus: ...


@dataclass(frozen=True, slots=True)
class LocalRun:
    """What a node knows of its own run.

    ``busy`` says whether anything is in flight, ``journal`` names the last record (``seq``,
    ``head``), ``settle`` waits for work in flight up to so many seconds and asks the provider who
    it is, ``close`` closes the latch with a cause and a detail.
    """

    state: RunState
    busy: Callable[[], bool]
    journal: Callable[[], tuple[int, str]]
    settle: Callable[[float], Awaitable[object]]
    close: Callable[[str, str], None]
    latched: asyncio.Event
    latch_durable: Callable[[], Awaitable[None]]

    def status(self, *, instance: str, beat: int, ended: bool) -> NodeState:
        """How the run is now, as the other nodes are told."""
        run = self.state
        seq, head = self.journal()
        status = (
            RunStatus.FAILED
            if run.closed
            else RunStatus.PENDING
            if self.busy()
            else RunStatus.HEALTHY
        )
        counts = {
            "answered": run.responses,
            "failed": run.failed,
            "declined": run.declined,
            "lost": run.lost,
            **used_of(run),
        }
        return NodeState(
            instance=instance,
            restarts=run.restarts,
            beat=beat,
            word=status,
            ended=ended and status is not RunStatus.PENDING,
            admitted=run.attempts > 0,
            counts=counts,
            seq=seq,
            head=head,
            cause=None if run.cause is None else run.cause.cause,
        )

"""What a node reads of the run in its own process, and how it closes that run's latch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from smartsearch_sidecar.cluster.node_state import NodeState, RunStatus
from smartsearch_sidecar.cluster.quota_leaser import used_of
from smartsearch_sidecar.run.state import RunState


@dataclass(frozen=True, slots=True)
class LocalRun:
    """The run of this process, as its node uses it.

    Attributes:
        state: the fold of its records.
        busy: whether anything is in flight.
        journal: sequence number and sum of the last record.
        settle: waits up to so many seconds for work in flight, then checks the provider's identity.
        close: closes the latch with a cause and a detail.
        latched: set once the latch is closed.
        latch_durable: returns once the closed latch is on disk.
    """

    state: RunState
    busy: Callable[[], bool]
    journal: Callable[[], tuple[int, str]]
    settle: Callable[[float], Awaitable[object]]
    close: Callable[[str, str], None]
    latched: asyncio.Event
    latch_durable: Callable[[], Awaitable[None]]

    def status(self, *, instance: str, beat: int, ended: bool) -> NodeState:
        """How the run is now, as it is published to the other nodes."""
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
            status=status,
            ended=ended and status is not RunStatus.PENDING,
            admitted=run.attempts > 0,
            counts=counts,
            seq=seq,
            head=head,
            cause=None if run.cause is None else run.cause.cause,
        )

"""The run that the routes serve: there once it is claimed, waited for or missed until then.

The listener answers before the index is loaded. What fails in that time has no run to end yet, so
the first such failure is kept and closes the latch as soon as there is one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smartsearch_sidecar import errors
from smartsearch_sidecar.gate.health import Covered, covered, status_report
from smartsearch_sidecar.metrics import Observer
from smartsearch_sidecar.scoring.service import Scoring
from smartsearch_sidecar.search.service import Service

if TYPE_CHECKING:
    from smartsearch_sidecar.gate.cluster import ClusterRun


@dataclass(frozen=True, slots=True)
class Quota:
    """One allowance of the run; ``split`` is empty for what is not a split's."""

    name: str
    split: str
    unit: str
    used: int
    most: int

    @property
    def resource(self) -> str:
        """Its name between the nodes of a run."""
        return f"{self.split}.{self.name}" if self.split else "searches"

    @property
    def left(self) -> int:
        """What may still be used."""
        return max(0, self.most - self.used)


@dataclass(frozen=True, slots=True)
class ServedRun:
    """A claimed run and where its figures stand.

    ``scoring`` is there where rewards are on, ``cluster_run`` where the run has other nodes: then
    what is said is said of the whole run. ``directory`` holds its ledger. ``facts`` are its
    identities as claimed. ``connections`` counts the open ones.
    """

    service: Service
    directory: Path
    scoring: Scoring | None
    observer: Observer
    connections: Callable[[], int]
    facts: Mapping[str, Any]
    cluster_run: ClusterRun | None = None

    def status(self) -> dict[str, Any]:
        """What ``/status`` says of the run."""
        if self.cluster_run is None:
            return status_report(self.service)
        return self.cluster_run.status(self.service)

    def quotas(self) -> list[Quota]:
        """Every allowance and what the run has used of it, all its nodes together."""
        own = quotas(self.service)
        if self.cluster_run is None:
            return own
        used = self.cluster_run.used()
        return [replace(quota, used=used.get(quota.resource, quota.used)) for quota in own]

    def covered(self) -> Covered:
        """What a receipt would say of it now, all its nodes together."""
        if self.cluster_run is None:
            return covered(self.service.run.state)
        return self.cluster_run.covered(self.service)


def quotas(service: Service) -> list[Quota]:
    """Every allowance of a run and what this node has used, always in the same order."""
    state = service.run.state
    found = [Quota("retrieval_calls", "", "searches", state.attempts, state.max_calls)]
    for split, meter in state.scores.splits.items():
        if meter.max_scores is not None:
            used, most = meter.score_attempts, meter.max_scores
            found.append(Quota("scores", split, "rollouts", used, most))
        found.append(Quota("helper_calls", split, "calls", meter.model_attempts, meter.max_calls))
        spent = meter.committed_output_tokens
        found.append(Quota("output_tokens", split, "tokens", spent, meter.max_output_tokens))
    return found


class Ready:
    """Holds the run from the moment it is claimed; the routes are built with it, and ask it."""

    def __init__(self, deadline_seconds: float) -> None:
        """``deadline_seconds`` is how long a rollout waits for the run, from its first byte."""
        self.run: ServedRun | None = None
        self._deadline_seconds = deadline_seconds
        self._opened = asyncio.Event()
        self._early: errors.SidecarError | None = None

    def claimed(self, run: ServedRun) -> None:
        """Hold this run from now on. The first failure from before closes its latch."""
        self.run = run
        early = self._early
        if early is not None and early.cause is not None:
            detail = f"while loading: {early.message}"
            run.service.run.recorder.close_latch(early.cause, detail=detail)
        self._opened.set()

    def now(self) -> ServedRun:
        """The run.

        Raises:
            NotReady: it is not claimed yet.
        """
        if self.run is None:
            raise errors.NOT_READY("the index is still loading")
        return self.run

    async def wait(self, began: float) -> ServedRun:
        """The run, which a request whose first byte came at ``began`` waits for.

        Raises:
            Busy: the request's deadline passes first.
        """
        if self.run is not None:
            return self.run
        try:
            async with asyncio.timeout_at(began + self._deadline_seconds):
                await self._opened.wait()
        except TimeoutError:
            raise errors.BUSY("the index was still loading at the request's deadline") from None
        return self.now()

    def healthy(self) -> bool:
        """Whether a run is served and its latch open."""
        return self.run is not None and not self.run.service.run.state.closed

    def close_latch(self, exc: errors.SidecarError) -> None:
        """Count a failure that the edge saw, and close the latch if it has a cause."""
        if exc.cause is None:
            return
        if self.run is None:
            self._early = self._early or exc
        else:
            self.run.service.run.recorder.refused[exc.cause] += 1
            self.run.service.run.recorder.close_latch(exc.cause, detail=exc.message)

    async def settle(self, exc: errors.SidecarError) -> errors.SidecarError:
        """Count a refusal, and close the latch where it must; returns what is to be answered.

        A refusal that closes the latch is durable by then; where it cannot be, the answer is the
        ledger's failure.
        """
        if self.run is None:
            self.close_latch(exc)
            return exc
        try:
            await self.run.service.run.recorder.refuse(exc)
        except errors.LedgerFailed as failure:
            return failure
        return exc

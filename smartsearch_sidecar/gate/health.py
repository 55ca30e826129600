"""What ``/health`` and ``/status`` say: a report of the run, read from its state.

Three states: ``healthy`` (the latch is open, everything is settled, the ledger can be written, the
identities hold), ``pending`` (the same, but with work in flight) and ``failed``.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, NamedTuple

from smartsearch_sidecar import errors
from smartsearch_sidecar.run.state import RunState
from smartsearch_sidecar.search.service import Service

_POLL_SECONDS = 0.005
IDENTITY_SECONDS = 5.0  # for a provider without other requests; shorter than any client waits


class Covered(NamedTuple):
    """What a receipt says of the run beside the usage: see ``CheckpointAccepted``.
    ``accepted_searches`` are the ``searches`` of the last accepted checkpoint of any node.
    """

    gaps: tuple[dict[str, Any], ...]
    searches: int
    accepted_searches: int
    result_blocks: dict[str, int]

    @property
    def unaccepted(self) -> int:
        """Searches since the last accepted checkpoint, or since the run began."""
        return max(0, self.searches - self.accepted_searches)


def covered(state: RunState) -> Covered:
    """The same of a run of one node."""
    gaps = state.coverage.since_accepted(state.scores.judged)
    return Covered(gaps, state.searches, state.coverage.searches, state.scores.result_blocks())


def pending(service: Service) -> bool:
    """Whether anything is in flight: a request, a search, a score, a record, the run's own end."""
    if service.stopping:
        return True
    return not (service.slots.idle and service.run.state.settled and service.run.writer.idle)


async def check(service: Service, seconds: float) -> str:
    """The state, after up to ``seconds`` for work in flight, also for what begins while it looks:
    the end of a request whose caller has left, for instance.
    """
    now = asyncio.get_running_loop().time
    end = now() + seconds
    while True:
        status = await _look(service, max(0.0, end - now()))
        if status != "pending" or now() >= end:
            return status


async def _look(service: Service, seconds: float) -> str:
    """The state, after up to ``seconds`` for work in flight and a check of the provider's identity.
    While work is in flight the identity is not asked for: each search checks it too, and the
    provider may answer slowly behind them.
    """
    state, recorder = service.run.state, service.run.recorder
    now = asyncio.get_running_loop().time
    end = now() + seconds
    while pending(service) and not state.closed and now() < end:
        # Polled: slots, searches and writer have to be idle at the same moment.
        left = end - now()
        await asyncio.sleep(min(_POLL_SECONDS, left))
    if not state.closed and not pending(service):
        await service.run.writer.look()
    if not state.closed and not pending(service):
        try:
            async with asyncio.timeout(IDENTITY_SECONDS):
                await service.retrieval.guard.check_identity()
        except errors.RetrievalError as exc:
            recorder.close_latch(exc.closes_as, detail=exc.message)
        except TimeoutError:
            detail = f"the provider did not confirm its identity within {IDENTITY_SECONDS:g} s"
            recorder.close_latch(errors.PROVIDER_FAULT.closes_as, detail=detail)
    if not state.closed and (split := state.scores.unjudged_split) is not None:
        unjudged = errors.NOTHING_JUDGED(
            f"rollouts of the {split} split show {state.scores.unjudged_searches[split]} searches "
            "of this run, and beside none of them a result block that could be judged"
        )
        recorder.close_latch(unjudged.closes_as, detail=unjudged.message)
    if state.closed:
        with contextlib.suppress(errors.LedgerFailed):  # that is a failure as well, and known
            await recorder.latch_durable()
        return "failed"
    return "pending" if pending(service) else "healthy"


async def health_report(service: Service, *, settle_seconds: float) -> dict[str, Any]:
    """The body of ``/health``: the state, the counts the reference gives, and the first cause."""
    return {"state": await check(service, settle_seconds), **counts(service)}


def counts(service: Service) -> dict[str, Any]:
    """Every count of the run, as JSON values."""
    state = service.run.state
    scores = state.scores
    rewards: dict[str, Any] = {}
    if scores.splits:
        rewards = {
            "reward_reused": scores.reused,
            "reward_failed": scores.failed,
            "verdicts": dict(scores.verdicts),
            "verdicts_unparsed_share": scores.unparsed_share,
            "result_blocks": scores.result_blocks(),
        }
    accepted, refused = state.checkpoints_accepted, state.checkpoints_refused
    found = covered(state)
    return {
        **state.usage(),
        "retrieval_identity_sha256": service.retrieval.guard.identity_sha256,
        "retrieval_retries": state.retries,
        "delivery_lost": state.lost,
        "delivery_repeated": state.repeated,
        "delivery_awaited": len(state.awaited),
        "quota": {"retrieval_calls_max": state.max_calls, "retrieval_calls": state.attempts},
        "declined": dict(state.declined_by),
        **rewards,
        "cache": dict(state.cache),
        "refused": dict(service.run.recorder.refused),
        "restarts": state.restarts,
        "gaps": list(found.gaps),
        "emptied": {"answers": state.emptied.count, "share": state.emptied.share},
        "searches_unaccepted": found.unaccepted,
        "checkpoints": {"accepted": accepted, "refused": refused},
        "ledger": {"seq": service.run.writer.seq, "head": service.run.writer.head},
        "cause": None if state.cause is None else state.cause.to_data(),
    }


def status_report(service: Service) -> dict[str, Any]:
    """The body of ``/status``: the counts, and what is under way right now."""
    state, slots = service.run.state, service.slots
    status = "failed" if state.closed else "pending" if pending(service) else "healthy"
    return {
        "state": status,
        **counts(service),
        "slots": {
            "total": slots.slots,
            "in_service": slots.in_service,
            "waiting": slots.waiting,
            "most_waiting": slots.most_waiting,
        },
        "searching": len(state.searching),
        "identity": service.retrieval.guard.identity,
        "dropped_passages": state.dropped_passages,
    }

"""What ``/health`` and ``/status`` say: a report of the run, read from its state.

Three states: ``healthy`` (the latch is open, everything is settled, the ledger can be written, the
identities hold), ``pending`` (the same, but with work in flight) and ``failed``.

What stands still is pending first, with its name and its age, and then failed: the disk after
``ledger.stall_seconds`` (``ledger/writer.py``), a call or a request once it has outlived its own
time. A loop that stood still is pending until it has read what came meanwhile. It is no failure by
itself: without a request nothing was hurt, and a request counts from when the kernel took it, so
an answer that came too late fails by its own deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, NamedTuple

from smartsearch_sidecar import errors
from smartsearch_sidecar.run.state import RunState
from smartsearch_sidecar.search.service import Service
from smartsearch_sidecar.stalls import STILL_SECONDS

_POLL_SECONDS = 0.005
IDENTITY_SECONDS = 5.0  # for a provider without other requests; shorter than any client waits
SOURCES_SECONDS = 5.0  # for the same clients
LOOK_SECONDS = 1.0
LATE_LOOKS = 2
"""Looks at which a call is late before it is a failure. Counted in looks and not in time: after a
loop that stood still, what came meanwhile has its turn first."""


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
    """Whether anything is in flight: a request, a search, a score, a record, the run's own end; or
    may be, unread.
    """
    if service.stopping:
        return True
    run, stalls = service.run, service.run.stalls
    settled = run.state.settled and run.writer.idle and not stalls.requests
    return not (service.slots.idle and settled and stalls.loop.steady) or any(stalls.late())


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
    await service.run.stalls.loop.caught_up()
    while pending(service) and not state.closed and now() < end:
        # Polled: slots, searches and writer have to be idle at the same moment.
        left = end - now()
        await asyncio.sleep(min(_POLL_SECONDS, left))
    if not state.closed and not pending(service):
        await service.run.writer.look()
    if not state.closed and not pending(service):
        await _check_identity(service)
    if not state.closed and (split := state.scores.unjudged_split) is not None:
        unjudged = errors.NOTHING_JUDGED(
            f"rollouts of the {split} split show {state.scores.unjudged_searches[split]} searches "
            "of this run, and beside none of them a result block that could be judged"
        )
        recorder.close_latch(unjudged.closes_as, detail=unjudged.message)
    looked = True
    if service.sources is not None and not state.closed and not pending(service):
        looked = await service.sources.look(SOURCES_SECONDS)
    if state.closed:
        with contextlib.suppress(errors.LedgerFailed):  # that is a failure as well, and known
            await recorder.latch_durable()
        return "failed"
    return "healthy" if looked and not pending(service) else "pending"


async def _check_identity(service: Service) -> None:
    """Closes the latch where the provider is another one now, or does not say what it serves."""
    recorder = service.run.recorder
    asking = asyncio.create_task(service.retrieval.guard.check_identity())
    asking.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        # Waited for and not awaited: a provider may swallow its cancellation.
        await asyncio.wait([asking], timeout=IDENTITY_SECONDS)
        if asking.done() and not asking.cancelled():
            asking.result()
            return
    except errors.RetrievalError as exc:
        recorder.close_latch(exc.closes_as, detail=exc.message)
        return
    finally:
        asking.cancel()
    detail = f"the provider did not confirm its identity within {IDENTITY_SECONDS:g} s"
    recorder.close_latch(errors.PROVIDER_FAULT.closes_as, detail=detail)


def close_for_late(service: Service) -> None:
    """Closes the latch for what is late once again; called once a ``LOOK_SECONDS``."""
    for wait in service.run.stalls.late():
        wait.looks += 1
        if wait.looks > LATE_LOOKS:
            age = asyncio.get_running_loop().time() - wait.began
            service.run.recorder.close_latch(
                wait.late.closes_as,
                detail=f"{wait.on}: a {wait.call} has not ended for {age:.1f} s, where "
                f"{wait.bound:.1f} s were allowed",
            )


async def watch(service: Service) -> None:
    """Looks for what is late until cancelled."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        close_for_late(service)


def waiting_for(service: Service) -> list[dict[str, Any]]:
    """What the run waits for, a row each, the oldest first; of several calls the oldest one."""
    run = service.run
    now = asyncio.get_running_loop().time()
    rows: dict[str, dict[str, Any]] = {}
    for wait in sorted(run.stalls.waits(), key=lambda wait: wait.began):
        rows.setdefault(wait.on, _waits(wait.on, wait.call, now - wait.began, wait.bound))
    if (since := run.writer.busy_since) is not None:
        rows["disk"] = _waits("disk", "batch", now - since, run.writer.stall_seconds)
    last = run.stalls.loop.last
    if last is not None and not run.stalls.loop.steady:
        rows["loop"] = _waits("loop", "catch up", last.seconds, STILL_SECONDS)
    return sorted(rows.values(), key=lambda row: -row["seconds"])


def _waits(on: str, call: str, seconds: float, bound: float) -> dict[str, Any]:
    age = round(max(0.0, seconds), 3)
    return {"on": on, "call": call, "seconds": age, "bound_seconds": round(bound, 3)}


def _loop(service: Service) -> dict[str, Any]:
    """How often the event loop stood still, the longest time, and the last one."""
    watch = service.run.stalls.loop
    found: dict[str, Any] = {
        "stood_still": watch.times,
        "longest_seconds": round(watch.longest_seconds, 3),
    }
    if watch.last is not None:
        at, seconds, where = watch.last
        ago = asyncio.get_running_loop().time() - at
        found["last"] = {"seconds": round(seconds, 3), "ago": round(ago, 3), "where": where}
    return found


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
        "oldest_request_seconds": round(service.run.stalls.oldest_seconds(), 3),
        "waiting_for": waiting_for(service),
        "loop": _loop(service),
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

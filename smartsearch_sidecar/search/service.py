"""The order of one request, and the only place that knows it.

slot -> parse -> admit -> record ``requested`` -> identity -> search -> identity and documents ->
record ``answered``, synced -> free the slot -> hand over -> record ``delivery.lost`` if the client
had gone.

Deciding is synchronous: a decision is read off the state, encoded, folded and posted in one step of
the loop (``recorder.py``). Whatever holds something settles it in the same step in which it learns
of the end, also when it is cancelled: a settlement is never awaited, only its receipt is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from smartsearch_sidecar import errors
from smartsearch_sidecar.contract.execute import (
    DECLINED_RESULT,
    ExecuteRules,
    QueryProblem,
    parse_execute,
    reference_refusal,
    render_execute,
    result_of,
)
from smartsearch_sidecar.ledger.recorder import Recorder, utf8_safe
from smartsearch_sidecar.retrieval.cache import CachedSearch
from smartsearch_sidecar.retrieval.passages import Found
from smartsearch_sidecar.run.deadline import run_until_deadline
from smartsearch_sidecar.run.record import Draft, Kind
from smartsearch_sidecar.run.shared_quota import Allowance
from smartsearch_sidecar.run.slots import Slots

_DECLINED_PAYLOAD = render_execute(DECLINED_RESULT)


@dataclass(frozen=True, slots=True)
class ServicePolicy:
    """The keys of the configuration that decide, as plain values.

    ``deadline_seconds`` runs from a request's first byte; ``decline`` and ``latch_undelivered`` are
    ``execute.on_invalid_query`` and ``execute.on_undelivered``.
    """

    rules: ExecuteRules
    deadline_seconds: float
    decline: bool
    latch_undelivered: bool


class Answer(NamedTuple):
    """A recorded answer on its way to the client.

    ``number`` is the attempt it settles, ``None`` for a declined query; ``others`` are those of a
    batch that it settles as well.
    """

    payload: bytes
    number: int | None
    others: tuple[int, ...] = ()


class Service:
    """Everything between the parsed edge and the ledger, for one run."""

    def __init__(
        self,
        *,
        recorder: Recorder,
        slots: Slots,
        retrieval: CachedSearch,
        policy: ServicePolicy,
        told: Callable[[str], None] | None = None,
        allowance: Allowance | None = None,
    ) -> None:
        """``told`` hears the result text of every answer before it is handed over, for the
        provenance of rewards; ``allowance`` is asked before a search where many nodes share one.
        """
        self.recorder = recorder
        self.state = recorder.state
        self.writer = recorder.writer
        self.slots = slots
        self.retrieval = retrieval
        self.policy = policy
        self.told = told
        self.allowance = allowance

    def undelivered(self, number: int | None, stage: str, others: Sequence[int] = ()) -> None:
        """The client was gone before its answer was handed to it; ``stage`` says how we know."""
        if self.writer.failure is not None:
            return
        self.recorder.refused["response_undelivered"] += 1
        data: dict[str, Any] = {"stage": stage}
        if others:
            data["others"] = list(others)
        try:
            self.recorder.post(Kind.DELIVERY_LOST, number, data)
        except errors.LedgerFailed:
            return  # after the end of the ledger, or beside its failure: that is the cause
        if self.policy.latch_undelivered:
            self.recorder.close_latch(
                "response_undelivered",
                number=number,
                consumed=number is not None,
                detail=f"the client had gone before its answer was handed to it ({stage})",
            )

    # --- /execute ---------------------------------------------------------------------------------

    async def execute(self, body: bytes, *, began: float, gone: Callable[[], bool]) -> Answer:
        """Serves one ``/execute`` body; ``began`` is the loop's clock at its first byte.

        Raises a ``SidecarError`` whose latch, if any, is closed and durable by then.
        """
        return await self.in_turn(began, gone, lambda deadline: self._execute(body, deadline))

    async def _execute(self, body: bytes, deadline: float) -> Answer:
        call = parse_execute(body, self.policy.rules)
        data = {"env": call.env, "call": call.call}
        if call.problem is not None and not self.policy.decline:
            refuse_as_reference(call.problem)
        if call.problem is not None and self.policy.decline:
            return await self._recorded(None, self.decline(call.problem, data), _DECLINED_PAYLOAD)
        await self.check_identity(deadline)
        number, found, item = await self.search(call.query, call.problem, data, deadline)
        return await self._recorded(number, item, found.payload)

    async def _recorded(self, number: int | None, item: Draft, payload: bytes) -> Answer:
        """Returns the answer once its record is on the medium."""
        try:
            await self.writer.post_for_receipt(item)
        except asyncio.CancelledError:
            self.undelivered(number, "cancelled before the answer")
            raise
        if self.told is not None:
            self.told(result_of(payload))
        return Answer(payload, number)

    # --- the steps of any search ------------------------------------------------------------------

    async def in_turn(
        self,
        began: float,
        gone: Callable[[], bool],
        work: Callable[[float], Coroutine[Any, Any, Answer]],
    ) -> Answer:
        """Waits for a slot, does ``work(deadline)``, and gives the slot back before the answer.

        Whatever it raises has been counted, and is durable where it closed the latch.
        """
        deadline = began + self.policy.deadline_seconds
        try:
            try:
                await self.slots.take(deadline)
            except asyncio.CancelledError:
                self.undelivered(None, "cancelled while waiting")
                raise
            try:
                if gone():
                    self.undelivered(None, "gone while waiting")
                    raise errors.CLIENT_GONE("the client left while it waited for a slot")
                answer = await work(deadline)
            finally:
                self.slots.give()
            if self.state.closed:
                self.state.refuse_closed()
            return answer
        except errors.SidecarError as exc:
            # A search that was shared raises one and the same in each request: each is a refusal.
            # A lost client was counted where it was noticed.
            exc.counted = errors.CLIENT_GONE.matches(exc)
            await self.recorder.refuse(exc)
            raise

    async def check_identity(self, deadline: float) -> None:
        """Asks for admission, and then the provider who it is: the last step before a number."""
        self.state.admit_search()
        try:
            await run_until_deadline(deadline, self.retrieval.guard.check_identity())
        except TimeoutError:
            raise errors.DEADLINE_PASSED(
                "the provider had not said what it serves at the deadline"
            ) from None
        except asyncio.CancelledError:
            if not _being_cancelled():
                raise _cancelled_itself() from None
            self.undelivered(None, "cancelled before the search")
            raise

    def decline(self, problem: QueryProblem, data: Mapping[str, Any]) -> Draft:
        """Folds a declined query; the caller posts it in the same step."""
        self.state.refuse_closed()
        item: Mapping[str, Any] = {"reason": problem.value, **data}
        return self.recorder.fold(Kind.RETRIEVAL_DECLINED, self.state.declined + 1, item)

    async def search(
        self,
        query: str,
        problem: QueryProblem | None,
        data: Mapping[str, Any],
        deadline: float,
        top_n: int | None = None,
    ) -> tuple[int, Found, Draft]:
        """Admits, records and settles one search: its number, what it found, and the settlement,
        which is folded, and which the caller posts in the same step.

        ``data`` is what ``retrieval.requested`` says of it; ``problem`` a tag or none.
        """
        if self.allowance is not None:
            await self._room(self.allowance, deadline)
        number = self.state.admit_search()
        self.writer.post(self.recorder.fold(Kind.RETRIEVAL_REQUESTED, number, data))
        try:
            if problem is not None:
                raise errors.QUERY_TAGGED("the query carries a protocol tag")
            loop = asyncio.get_running_loop()
            began = loop.time()
            found, outcome = await self.retrieval.find(query.strip(), deadline, top_n)
            return number, found, self._answered(number, found, outcome, loop.time() - began)
        except errors.SidecarError as exc:
            self._settle_failed(number, exc)
            raise
        except asyncio.CancelledError:
            if not _being_cancelled():
                fault = _cancelled_itself()
                self._settle_failed(number, fault)
                raise fault from None
            self._settle_failed(number, errors.REQUEST_CANCELLED("the search was cancelled"))
            self.undelivered(number, "cancelled during the search")
            raise
        except BaseException as exc:
            self._settle_failed(
                number, errors.INTERNAL_ERROR(f"a search ended in {type(exc).__name__}")
            )
            raise

    async def _room(self, allowance: Allowance, deadline: float) -> None:
        try:
            await allowance.room_to_search(deadline)
        except asyncio.CancelledError:
            self.undelivered(None, "cancelled before the search")
            raise

    def _answered(self, number: int, found: Found, outcome: str, seconds: float) -> Draft:
        data: dict[str, Any] = {"cache": outcome, "took_us": int(seconds * 1e6)}
        if found.dropped:
            data["dropped"] = [dict(item) for item in found.dropped]
        return self.recorder.fold(
            Kind.RETRIEVAL_ANSWERED, number, data, documents_json=found.documents_json
        )

    def _settle_failed(self, number: int, exc: errors.SidecarError) -> None:
        """Records a failed attempt and closes the latch with it."""
        if number not in self.state.searching:
            return
        cause = exc.cause or exc.code
        try:
            self.writer.post(
                self.recorder.fold(
                    Kind.RETRIEVAL_FAILED,
                    number,
                    {"code": exc.code, "cause": cause, "detail": utf8_safe(exc.message)},
                )
            )
        except errors.LedgerFailed:
            return  # the ledger failed first, and that is the cause
        if exc.cause is not None:
            self.recorder.close_latch(exc.cause, number=number, consumed=True, detail=exc.message)


def _being_cancelled() -> bool:
    """Whether this task is being cancelled; otherwise a provider has raised the same by a slip."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _cancelled_itself() -> errors.ProviderFault:
    return errors.PROVIDER_FAULT("the provider cancelled what it was asked for")


def refuse_as_reference(problem: QueryProblem) -> None:
    """Raises what the reference answers for a query of this kind; a tag is admitted first."""
    refusal = reference_refusal(problem)
    if refusal is not None:
        raise refusal(f"the query is not searched: {problem.value}")

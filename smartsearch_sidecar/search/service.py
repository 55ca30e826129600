"""The order of one request, and the only place that knows it.

slot -> parse -> admit -> record ``requested`` -> identity -> search -> identity and documents ->
record ``answered``, synced -> free the slot -> hand over -> record ``delivery.lost`` if the client
had gone. A request that repeats a lost one takes its answer in place of a search (``repeats.py``).

A request of another trainer's client may hold many searches. It has one slot and one deadline; its
searches are numbered in their order, each counted and recorded as if it had come alone, and run
side by side; all of them are answered or the request fails. The first failure closes the latch, and
a closed latch admits nothing more; each search under way is settled.

Deciding is synchronous: a decision is read off the state, encoded, folded and posted in one step of
the loop (``ledger/recorder.py``). Code that holds something settles it in the same step in which it
learns of the end, also when it is cancelled: a settlement is never awaited, only its receipt is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from smartsearch_sidecar import errors
from smartsearch_sidecar.contract.execute import (
    ExecuteRules,
    QueryProblem,
    declined_result,
    parse_execute,
    reference_refusal,
    render_execute,
)
from smartsearch_sidecar.contract.other_clients import (
    DECLINED_SCORES,
    Query,
    Searches,
    render_answer,
    render_declined,
    render_found,
    render_scores,
)
from smartsearch_sidecar.ledger.recorder import Run, utf8_safe
from smartsearch_sidecar.ledger.writer import Receipt
from smartsearch_sidecar.retrieval.guard import CachedSearch
from smartsearch_sidecar.retrieval.passages import Found
from smartsearch_sidecar.run.line import Draft
from smartsearch_sidecar.run.record import (
    Asked,
    ClientQuery,
    DeliveryLost,
    NativeCall,
    RetrievalAnswered,
    RetrievalDeclined,
    RetrievalFailed,
    RetrievalRequested,
)
from smartsearch_sidecar.run.slots import Slots, run_until_deadline
from smartsearch_sidecar.search.repeats import Answer, Ask, Repeats

AT_ONCE: Final = 256
"""Searches of one request under way: enough to fill a retriever's calls while others are out, and
few enough that a search that comes alone does not wait behind thousands."""
AHEAD_RECORDS: Final = 256
"""Records a batch may be ahead of the ledger; beyond, its searches wait for their own. Answers from
the cache come without a pause: this is also where they let others have a turn."""


class ServicePolicy(NamedTuple):
    """``deadline_seconds`` runs from a request's first byte; ``decline`` is
    ``execute.on_invalid_query``; ``latch_undelivered`` is whether a lost answer that no request may
    repeat closes the latch; ``emptied_share_max`` is the key of ``[retrieval]``.
    """

    rules: ExecuteRules
    deadline_seconds: float
    decline: bool
    latch_undelivered: bool
    emptied_share_max: float


class Sources(Protocol):
    """The files that a run was claimed with, beside those of its provider."""

    async def look(self, seconds: float) -> bool:
        """Whether all of them were looked at in time; one that differs closes the latch."""


@dataclass(eq=False, kw_only=True)
class Service:
    """Everything between the parsed edge and the ledger, for one run. ``on_answer`` is called with
    query and text of every answer of a search before it is handed over, for the provenance of
    rewards; ``repeats`` is there where a lost answer may be asked for again; ``sources`` are asked
    by the gate.
    """

    run: Run
    slots: Slots
    retrieval: CachedSearch
    policy: ServicePolicy
    on_answer: Callable[[str, str], None] | None = None
    stopping: bool = False
    """No connection is taken any more: until the run has ended, what is asked of it is refused."""
    repeats: Repeats | None = None
    sources: Sources | None = None

    def __post_init__(self) -> None:
        self._state = self.run.state
        self._recorder = self.run.recorder

    def declines(self, problem: QueryProblem | None) -> bool:
        """Whether what is wrong with a query, if anything, is answered in band."""
        return problem is not None and (self.policy.decline or problem is QueryProblem.invalid_call)

    def undelivered(
        self,
        number: int | None,
        stage: str,
        others: Sequence[int] = (),
        ask: Ask | None = None,
    ) -> None:
        """The client was gone before its answer was handed to it; ``stage`` says how we know.
        ``ask`` is the request where it may be repeated.
        """
        if self.run.writer.failure is not None:
            return
        self._recorder.refused["response_undelivered"] += 1
        if self._state.closed:
            ask = None  # no repeat would be answered
        try:
            awaits = None if ask is None else ask.repeats.awaits_repeat(ask) or None
            self._recorder.post(DeliveryLost(number, stage, tuple(others) or None, awaits))
        except errors.LedgerFailed:
            return  # after the end of the ledger, or beside its failure: that is the cause
        if ask is not None:
            if awaits:
                ask.repeats.lost(ask)
        elif self.policy.latch_undelivered:
            self._recorder.close_latch(
                "response_undelivered",
                number=number,
                consumed=number is not None,
                detail=f"the client had gone before its answer was handed to it ({stage})",
            )

    async def execute(
        self, body: bytes, *, began: float, gone: Callable[[], bool], ask: Ask | None = None
    ) -> Answer:
        """Serves one ``/execute`` body; ``began`` is the loop's clock at its first byte. Raises a
        ``SidecarError`` whose latch, if any, is closed and durable by then.
        """
        return await self.in_turn(began, gone, lambda deadline: self._execute(body, deadline), ask)

    async def _execute(self, body: bytes, deadline: float) -> Answer:
        call = parse_execute(body, self.policy.rules)
        asked = NativeCall(call.env, call.call, call.query)
        number: int | None = None
        if call.problem is not None and self.declines(call.problem):
            item, text = self.decline(call.problem, asked), declined_result(call.problem)
        else:
            if call.problem is not None:
                refuse_as_reference(call.problem)
            await self.check_identity(deadline)
            number, found, item = await self.search(call.query, call.problem, asked, deadline)
            text = found.text
        try:
            await self.run.writer.post_for_receipt(item)
        except asyncio.CancelledError:
            self.undelivered(number, "cancelled before the answer")
            raise
        if self.on_answer is not None and call.problem in (None, QueryProblem.invalid_call):
            self.on_answer(call.query, text)
        return Answer(render_execute(text), number)

    async def in_turn(
        self,
        began: float,
        gone: Callable[[], bool],
        work: Callable[[float], Coroutine[Any, Any, Answer]],
        ask: Ask | None = None,
    ) -> Answer:
        """Waits for a slot, does ``work(deadline)``, and gives the slot back before the answer.
        ``ask`` is the request where it may repeat another one, or be repeated.

        A ``SidecarError`` that it raises is durable where it closed the latch, and not counted yet:
        what answers the request counts it.
        """
        deadline = began + self.policy.deadline_seconds
        with self.run.stalls.request("rollout", began, deadline, errors.DEADLINE_PASSED):
            return await self._in_turn(deadline, gone, work, ask)

    async def _in_turn(
        self,
        deadline: float,
        gone: Callable[[], bool],
        work: Callable[[float], Coroutine[Any, Any, Answer]],
        ask: Ask | None,
    ) -> Answer:
        try:
            try:
                await self.slots.take(deadline)
            except asyncio.CancelledError:
                self.undelivered(None, "cancelled while waiting")
                raise
            try:
                if gone():
                    self.undelivered(None, "gone while waiting", ask=ask)
                    raise errors.CLIENT_GONE("the client left while it waited for a slot")
                if ask is None:
                    answer = await work(deadline)
                else:
                    answer = await ask.repeats.answer(ask, work, deadline)
            finally:
                self.slots.give()
            self._state.refuse_closed()
            self._bound_emptied()
            if asyncio.get_running_loop().time() > deadline:
                raise errors.DEADLINE_PASSED("the answer was recorded after the deadline")
            return answer
        except BaseException as exc:
            if ask is not None:
                ask.repeats.over(ask)
            if isinstance(exc, errors.SidecarError):
                await self._recorder.latch_for(exc)
            raise

    def _bound_emptied(self) -> None:
        share, most = self._state.emptied.share, self.policy.emptied_share_max
        if share > most:
            raise errors.ANSWERS_EMPTIED(
                f"{share:.0%} of the last searches lost every passage to a protocol tag, above "
                f"retrieval.emptied_share_max ({most:g})"
            )

    async def check_identity(self, deadline: float) -> None:
        """Asks for admission, and then the provider who it is: the last step before a number."""
        self._state.admit_search()
        late = errors.DEADLINE_PASSED
        try:
            with self.run.stalls.call("provider", "identity", deadline, late):
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

    def decline(self, problem: QueryProblem, asked: Asked) -> Draft:
        """Folds a declined query; the caller posts it in the same step."""
        self._state.refuse_closed()
        number = self._state.declined + 1
        return self._recorder.fold(RetrievalDeclined(number, problem.value, asked))

    async def search(
        self,
        query: str,
        problem: QueryProblem | None,
        asked: Asked,
        deadline: float,
        top_n: int | None = None,
    ) -> tuple[int, Found, Draft]:
        """Admits, records and settles one search: its number, what it found, and the settlement,
        which is folded, and which the caller posts in the same step.

        ``asked`` is what ``retrieval.requested`` says of it; ``problem`` is a tag or ``None``.
        """
        if self.run.quota is not None:
            try:
                await self.run.quota.room_to_search(deadline)
            except asyncio.CancelledError:
                self.undelivered(None, "cancelled before the search")
                raise
        number = self._state.admit_search()
        self._recorder.post(RetrievalRequested(number, asked))
        try:
            if problem is not None:
                raise errors.QUERY_TAGGED("the query carries a protocol tag")
            loop = asyncio.get_running_loop()
            began = loop.time()
            found, outcome = await self.retrieval.find(query.strip(), deadline, top_n)
            took_us = int((loop.time() - began) * 1e6)
            tries = found.tries if outcome == "miss" and found.tries > 1 else None
            dropped, emptied = found.dropped or None, found.emptied or None
            answered = RetrievalAnswered(
                number, found.documents_json, outcome, took_us, dropped, emptied, tries
            )
            return number, found, self._recorder.fold(answered)
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
            failure = errors.INTERNAL_ERROR(f"a search ended in {type(exc).__name__}")
            self._settle_failed(number, failure)
            raise

    def _settle_failed(self, number: int, exc: errors.SidecarError) -> None:
        """Records a failed attempt and closes the latch with it."""
        if number not in self._state.searching:
            return
        failed = RetrievalFailed(number, exc.code, exc.closes_as, utf8_safe(exc.message))
        try:
            self._recorder.post(failed)
        except errors.LedgerFailed:
            return  # the ledger failed first, and that is the cause
        if exc.cause is not None:
            self._recorder.close_latch(exc.cause, number=number, consumed=True, detail=exc.message)


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


async def search_many(
    service: Service,
    asked: Searches,
    *,
    began: float,
    gone: Callable[[], bool],
    ask: Ask | None = None,
) -> Answer:
    """Serves one request; ``began`` is the loop's clock at its first byte. Raises a
    ``SidecarError`` whose latch, if any, is closed and durable by then.
    """
    return await service.in_turn(
        began, gone, lambda deadline: _SearchBatch(service, asked, deadline).answer(), ask
    )


class _SearchBatch:
    """One request under way; what its searches come to stands at their index."""

    def __init__(self, service: Service, asked: Searches, deadline: float) -> None:
        self._service = service
        self._asked = asked
        self._deadline = deadline
        self._left = count = len(asked.queries)
        self._parts = [b""] * count
        self._scores = [b""] * count
        # Only the unmodified environment's rollouts are rewarded here: it joins what `/search` and
        # `/batch_search` answer. Provenance has no use for what `/retrieve` answers.
        self._on_answer = service.on_answer if asked.form.route != "retrieve" else None
        self._texts: list[str | None] = [None] * count
        self._numbers: list[int] = []
        self._failure: errors.SidecarError | None = None

    async def answer(self) -> Answer:
        """The whole answer, once every search is settled and its record on the medium."""
        service, queries = self._service, self._asked.queries
        left = [query.problem for query in queries if not service.declines(query.problem)]
        for problem in left:
            if problem is not None:
                refuse_as_reference(problem)
        try:
            await self._run(searched=bool(left))
        except asyncio.CancelledError:
            # Searches under way have recorded their loss; those already answered are lost as well.
            if self._left < len(queries):
                first, others = self._settled()
                service.undelivered(first, "cancelled before the answer", others)
            raise
        if self._on_answer is not None:
            for query, text in zip(queries, self._texts, strict=True):
                if text is not None:
                    self._on_answer(query.text, text)
        return Answer(render_answer(self._asked, self._parts, self._scores), *self._settled())

    def _settled(self) -> tuple[int | None, tuple[int, ...]]:
        """The first number of this request, and the others."""
        numbers = sorted(self._numbers)
        return (numbers[0] if numbers else None), tuple(numbers[1:])

    async def _run(self, *, searched: bool) -> None:
        if searched:
            await self._service.check_identity(self._deadline)
        todo = iter(enumerate(self._asked.queries))
        workers = min(len(self._asked.queries), AT_ONCE)
        if workers <= 1:
            await self._work(todo)
        else:
            # Never cancelled by each other, and all of them awaited: each has something to settle.
            works = [self._work(todo) for _ in range(workers)]
            for end in await asyncio.gather(*works, return_exceptions=True):
                if isinstance(end, BaseException):
                    raise end
        if self._failure is not None:
            raise self._failure

    async def _work(self, todo: Iterator[tuple[int, Query]]) -> None:
        for index, query in todo:
            try:
                await self._one(index, query)
            except errors.SidecarError as exc:
                self._failure = self._failure or exc
                return

    async def _one(self, index: int, query: Query) -> None:
        service, form, top_n = self._service, self._asked.form, self._asked.top_n
        place = (index + 1, len(self._asked.queries)) if form.many else (None, None)
        asked = ClientQuery(form.route, query.text, top_n, *place)
        if query.problem is not None and service.declines(query.problem):
            receipt = self._post(service.decline(query.problem, asked))
            kept = render_declined(form, query.problem), DECLINED_SCORES
            if query.problem == QueryProblem.invalid_call:
                self._texts[index] = declined_result(query.problem)
        else:
            number, found, item = await service.search(
                query.text, query.problem, asked, self._deadline, top_n
            )
            self._numbers.append(number)
            receipt = self._post(item)
            documents = found.documents()
            scores = render_scores(documents) if self._asked.scores else b""
            kept = render_found(form, documents), scores
            self._texts[index] = found.text
        self._parts[index], self._scores[index] = kept
        if receipt is not None:
            await receipt

    def _post(self, item: Draft) -> asyncio.Future[Receipt] | None:
        """Hands a settlement over. The last one's receipt covers those before it."""
        self._left -= 1
        writer = self._service.run.writer
        if self._left == 0 or writer.queued >= AHEAD_RECORDS:
            return writer.post_for_receipt(item)
        writer.post(item)
        return None

"""Helper calls side by side, each reserved and recorded before it is sent, and settled after.

Theory. A call is in one of four stages, and what a failure or a cancellation may do to it depends
on nothing else:

    waiting     for a place under ``concurrency``: cancelled, nothing is owed
    reserving   inside ``before`` (quota, record, sync): cancelled; if it comes back with a number
                all the same, the call was recorded and is settled as ``HelperNotSent``
    sent        it costs money: never cancelled, awaited, settled by ``after`` or ``failed``
    settled     nothing is owed

The first failure of a batch stops every call not yet sent, lets those already sent settle, and is
then raised. Cancelling the caller, and the deadline, do the same. When ``ask_all`` returns or
raises, every number that ``before`` gave out was handed to exactly one of ``after`` and ``failed``.

A place is taken before the reservation is made, so that quota is never held by a call that only
waits its turn; and each call that holds quota holds a place, so waiting for quota ends.

``HelperDispatch`` has these stages, for any three hooks; ``MeteredCalls`` are the hooks of a run:
reserve and record, settle and record.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Literal, Protocol, TypeVar, cast

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.recorder import Run
from smartsearch_sidecar.ledger.writer import Receipt
from smartsearch_sidecar.reward.wire import HelperAnswer
from smartsearch_sidecar.run.record import HelperAnswered, HelperFailed, HelperRequested
from smartsearch_sidecar.run.state import WAIT, Reservation
from smartsearch_sidecar.scoring.rows import Row

T = TypeVar("T")

# The first argument of each is the call's place in ``prompts``; the second its number.
Before = Callable[[int], Awaitable[int]]
After = Callable[[int, int, HelperAnswer], Awaitable[None] | None]
Failed = Callable[[int, int, Exception], Awaitable[None] | None]


class Asker(Protocol):
    """What a dispatch needs of a helper; ``HelperClient`` is one."""

    async def ask(self, prompt: str, *, seed: int, deadline: float | None = None) -> HelperAnswer:
        """See ``HelperClient.ask``."""
        ...


class HelperDispatch:
    """One per process: its places are shared by all rows, batches and splits.

    Args:
        helper: what is asked.
        concurrency: calls between reservation and settlement at once.
        seed: sent with every call.
    """

    def __init__(self, helper: Asker, *, concurrency: int, seed: int) -> None:
        self.helper = helper
        self.concurrency = concurrency
        self.seed = seed
        self.places = asyncio.Semaphore(concurrency)
        self.in_flight = 0
        """Calls that are sent and not yet settled."""

    async def ask_all(
        self,
        prompts: Sequence[str],
        *,
        before: Before,
        after: After,
        failed: Failed,
        deadline: float,
    ) -> list[str]:
        """The helper's texts (without the stop string), in the order of ``prompts``.

        Args:
            before: reserves the call at this place and returns its number once its record is
                synced. It may wait for quota, and be cancelled while it waits; from the moment it
                has reserved it must end with the number or with an error it has settled itself
                (``to_the_end``).
            after: settles a call that was answered. Its receipt is awaited, if it returns one.
            failed: settles a call that was not. ``HelperFault.usage`` is what it cost, if known;
                ``HelperNotSent`` cost nothing.
            deadline: seconds of the loop's clock; nothing is sent after it, and no exchange
                outlasts it.

        Raises what failed first: a ``HelperFault``, or what a hook raised. Further failures are
        noted on it.
        """
        batch = _DispatchedCalls(self, before, after, failed, deadline)
        task, cancelled = await _outlast(batch.run(prompts), on_cancel=batch.stop)
        if cancelled:  # all is settled and recorded; what failed on the way must not vanish
            raise asyncio.CancelledError from None if task.cancelled() else task.exception()
        return task.result()


class QuotaGate:
    """Where calls wait for quota inside ``before``: one per meter."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    async def reserve(self, decide: Callable[[], Reservation | Literal["wait"]]) -> Reservation:
        """Asks ``decide`` now and after every ``wake`` until it no longer says ``wait``.

        ``decide`` applies what it decides in the same step. What it raises comes out unchanged.
        Cancelled while it waits, nothing is owed.
        """
        while True:
            decision = decide()
            if isinstance(decision, Reservation):
                return decision
            turn = asyncio.get_running_loop().create_future()
            self._waiting.add(turn)
            try:
                await turn
            finally:
                self._waiting.discard(turn)

    def wake(self) -> None:
        """To be called after every settlement of the meter."""
        for turn in self._waiting:
            if not turn.done():
                turn.set_result(None)


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, even if the caller is cancelled meanwhile, which is then dropped.

    For the part of ``before`` that comes after the reservation. The dispatch knows that it has
    cancelled, and settles the number instead of sending.
    """
    task, _ = await _outlast(work)
    return task.result()


class _DispatchedCalls:
    """The calls of one ``ask_all``."""

    def __init__(
        self,
        dispatch: HelperDispatch,
        before: Before,
        after: After,
        failed: Failed,
        deadline: float,
    ) -> None:
        self._dispatch = dispatch
        self._before = before
        self._after = after
        self._failed = failed
        self._deadline = deadline
        self._unsent: set[asyncio.Task[str]] = set()
        self._stopped = False
        self._failures: list[Exception] = []

    async def run(self, prompts: Sequence[str]) -> list[str]:
        """Every call in a task of its own; returns or raises once all of them are settled."""
        alarm = asyncio.get_running_loop().call_at(self._deadline, self._late)
        tasks = [
            asyncio.create_task(self._one(place, prompt)) for place, prompt in enumerate(prompts)
        ]
        try:
            if tasks:
                await asyncio.wait(tasks)
        finally:
            alarm.cancel()
        outcomes = [None if task.cancelled() else task.exception() for task in tasks]
        if self._failures:
            raise self._failures[0]
        for outcome in outcomes:
            if outcome is not None:  # an interpreter's own exit, no failure of a call
                raise outcome
        return [task.result() for task in tasks]

    def stop(self) -> None:
        """Cancels what is not yet sent; nothing is sent any more."""
        self._stopped = True
        for task in self._unsent:
            task.cancel()

    def _late(self) -> None:
        if self._unsent:
            self._fail(
                errors.HELPER_TIMEOUT(
                    f"the deadline passed with {len(self._unsent)} helper calls not yet sent: "
                    "raise reward.deadline_seconds or reward.helper.concurrency, or send fewer rows"
                )
            )

    def _fail(self, failure: Exception) -> None:
        if any(failure is known for known in self._failures):
            return
        self._failures.append(failure)
        if len(self._failures) == 1:
            self.stop()
        else:
            note = f"also failed: {type(failure).__name__}: {failure}"
            self._failures[0].add_note(note)

    async def _one(self, place: int, prompt: str) -> str:
        task = cast("asyncio.Task[str]", asyncio.current_task())
        if self._stopped:
            raise asyncio.CancelledError
        self._unsent.add(task)
        try:
            async with self._dispatch.places:
                number = await self._before(place)
                self._unsent.discard(task)
                return await self._send(place, number, prompt)
        except Exception as exc:
            self._unsent.discard(task)
            self._fail(exc)
            raise
        finally:
            self._unsent.discard(task)

    async def _send(self, place: int, number: int, prompt: str) -> str:
        """From here on nothing cancels the task, and the number is settled in every case.

        Only a loop that is torn down can still cancel it. Then the call stays unsettled, which is
        true, and the restart says so.
        """
        dispatch = self._dispatch
        if self._stopped:
            unsent = errors.HELPER_NOT_SENT("the batch had ended before the call was sent")
            await _receipt(self._failed(place, number, unsent))
            raise asyncio.CancelledError
        dispatch.in_flight += 1
        try:
            answer = await dispatch.helper.ask(prompt, seed=dispatch.seed, deadline=self._deadline)
        except Exception as exc:
            self._fail(exc)  # first, so that nothing is sent while this one is being settled
            await _receipt(self._failed(place, number, exc))
            raise
        else:
            await _receipt(self._after(place, number, answer))
        finally:
            dispatch.in_flight -= 1
        return answer.text


async def _receipt(awaitable: Awaitable[None] | None) -> None:
    if awaitable is not None:
        await awaitable


async def _outlast(
    work: Coroutine[Any, Any, T], *, on_cancel: Callable[[], None] | None = None
) -> tuple[asyncio.Task[T], bool]:
    """The finished task of ``work``, and whether the caller was cancelled while it ran."""
    task = asyncio.create_task(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
            if on_cancel is not None:
                on_cancel()
    return task, cancelled


# --- the hooks of a run ---------------------------------------------------------------------------


class MeteredCalls:
    """Asks the helper on behalf of rows, and keeps the ledger and the quotas in step."""

    def __init__(
        self,
        run: Run,
        dispatch: HelperDispatch,
        *,
        seed: int,
    ) -> None:
        """The state of ``run`` must have been claimed: it has the splits."""
        self._state = run.state
        self._recorder = run.recorder
        self._quota = run.quota
        self._dispatch = dispatch
        self._seed = seed
        self._gates = {split: QuotaGate() for split in run.state.scores.splits}
        if run.quota is not None:
            for gate in self._gates.values():
                run.quota.woken(gate.wake)

    async def ask(
        self, owners: Sequence[Row], prompts: Sequence[str], deadline: float
    ) -> list[str]:
        """The helper's texts, in order; ``owners`` names the row of each prompt.

        Raises what failed first, with every call that was sent settled.
        """

        async def before(place: int) -> int:
            return await self._reserve(owners[place], prompts[place].encode())

        def after(place: int, number: int, answer: HelperAnswer) -> None:
            self._answered(owners[place], number, answer)

        def failed(place: int, number: int, exc: Exception) -> None:
            self._failed(owners[place], number, exc)

        return await self._dispatch.ask_all(
            prompts, before=before, after=after, failed=failed, deadline=deadline
        )

    async def _reserve(self, row: Row, prompt: bytes) -> int:
        receipts: list[asyncio.Future[Receipt]] = []
        digest = hashlib.sha256(prompt).hexdigest()

        def reserve() -> Reservation | Literal["wait"]:
            # Decided and folded in one step: the next one to ask sees this call counted.
            decision = self._state.admit_call(row.split)
            if self._quota is not None and not self._quota.room_to_call(row.split):
                return WAIT
            if isinstance(decision, Reservation):
                record = HelperRequested(
                    decision.number, row.split, row.number, digest, len(prompt), self._seed
                )
                receipts.append(self._recorder.post_for_receipt(record))
            return decision

        reserved = await self._gates[row.split].reserve(reserve)
        await to_the_end(_durable(receipts))
        return reserved.number

    def _answered(self, row: Row, number: int, answer: HelperAnswer) -> None:
        self._recorder.post(
            HelperAnswered(
                number=number,
                split=row.split,
                score=row.number,
                text=answer.text,
                input_tokens=answer.input_tokens,
                output_tokens=answer.output_tokens,
                finish_reason=answer.finish_reason,
                model=answer.model,
            )
        )
        self._gates[row.split].wake()

    def _failed(self, row: Row, number: int, exc: Exception) -> None:
        fault = exc if isinstance(exc, errors.HelperFault) else None
        usage = fault.usage if fault else None
        self._recorder.post(
            HelperFailed(
                number=number,
                split=row.split,
                score=row.number,
                code=fault.code if fault else "internal_error",
                detail=fault.message if fault else type(exc).__name__,
                usage=None if usage is None else (usage[0], usage[1]),  # JSON takes plain tuples
                sent=not errors.HELPER_NOT_SENT.matches(exc),
            )
        )
        self._gates[row.split].wake()


async def _durable(receipts: Sequence[asyncio.Future[Receipt]]) -> None:
    for receipt in receipts:
        await receipt

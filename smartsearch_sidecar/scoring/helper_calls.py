"""Helper calls side by side, each reserved and recorded before it is sent, and settled after.

Theory. A call is in one of four stages, and what a failure or a cancellation may do to it depends
on nothing else:

    waiting     for a place under ``concurrency``: cancelled, nothing is owed
    reserving   inside ``before`` (quota, record, sync): cancelled; if it comes back with numbers
                all the same, these calls were recorded and are settled as ``HelperNotSent``
    sent        it costs money: never cancelled, awaited, settled by ``after``
    settled     nothing is owed

The first failure of a batch stops every call not yet sent, lets those already sent settle, and is
then raised. Cancelling the caller, and the deadline, do the same. When ``ask_all`` returns or
raises, every number that ``before`` gave out was handed to ``after`` once.

A call that the helper refused before it began (``HelperFault.refused``) is settled as any other
that failed, and is no failure of the batch yet: after a pause its prompt waits again, for a place,
a reservation and a number of its own.

A place is taken before the reservation is made, so that quota is never held by a call that only
waits its turn; and each call that holds quota holds a place, so waiting for quota ends. All places
that are free at once are taken at once, and their calls reserved, recorded and synced together.

``HelperDispatch`` has these stages, for any two hooks; ``MeteredCalls`` are the hooks of a run:
reserve and record, settle and record.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.recorder import Run
from smartsearch_sidecar.ledger.writer import Receipt
from smartsearch_sidecar.reward.helper import HelperAnswer, HelperClient
from smartsearch_sidecar.run.record import HelperAnswered, HelperFailed, HelperRequested
from smartsearch_sidecar.scoring.rows import Row

T = TypeVar("T")

Outcome = HelperAnswer | Exception
# ``before`` is given the places of calls in ``prompts``; it reserves the first of them, at least
# one, and returns their numbers. ``after`` is given place, number and outcome of ended calls.
Before = Callable[[Sequence[int]], Awaitable[Sequence[int]]]
After = Callable[[Sequence[tuple[int, int, Outcome]]], None]

REFUSED_PAUSE_SECONDS = (0.5, 2.0)
"""Before a refused prompt is asked again the first time, and each later time: a full queue of
2,048-token answers does not empty in less."""


class HelperDispatch:
    """One per process: its places are shared by all rows, batches and splits.

    ``concurrency`` is of calls between reservation and settlement; ``seed`` is sent with each; a
    prompt that the helper refuses is asked ``retries`` times more.
    """

    def __init__(
        self, helper: HelperClient, *, concurrency: int, seed: int, retries: int = 0
    ) -> None:
        self.helper = helper
        self.seed = seed
        self.retries = retries
        self.places = asyncio.Semaphore(concurrency)
        self.in_flight = 0  # calls that are sent and not yet settled

    async def ask_all(
        self, prompts: Sequence[str], *, before: Before, after: After, deadline: float
    ) -> list[str]:
        """The helper's texts (without the stop string), in the order of ``prompts``.

        ``before`` may wait for quota, and be cancelled while it waits; from the moment it has
        reserved it must end with the numbers, their records synced, or with an error it has settled
        itself (``to_the_end``). ``after`` settles by the helper's answer or by what was raised:
        ``HelperFault.usage`` is what it cost, if known; ``HelperNotSent`` cost nothing. Nothing is
        sent after ``deadline`` (of the loop's clock), and no exchange outlasts it.

        Raises what failed first: a ``HelperFault``, or what a hook raised. Further failures are
        noted on it.
        """
        batch = _DispatchedCalls(self, prompts, before, after, deadline)
        task, cancelled = await _outlast(batch.run(), on_cancel=batch.stop)
        if cancelled:  # all is settled and recorded; what failed on the way must not vanish
            raise asyncio.CancelledError from None if task.cancelled() else task.exception()
        return task.result()

    async def take_places(self, wanted: int) -> int:
        """Takes one place, once it is free, and of ``wanted`` all that are free by then."""
        await self.places.acquire()
        taken = 1
        while taken < wanted and not self.places.locked():
            await self.places.acquire()  # in this very step: one is free
            taken += 1
        return taken

    def free_places(self, count: int) -> None:
        """Gives places back."""
        for _ in range(count):
            self.places.release()


class QuotaGate:
    """Where calls wait for quota inside ``before``: one per meter."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    async def reserve(self, decide: Callable[[], range]) -> range:
        """Asks ``decide`` now and after every ``wake`` until it gives a number at least.

        ``decide`` applies what it decides in the same step. What it raises comes out unchanged.
        Cancelled while it waits, nothing is owed.
        """
        while not (numbers := decide()):
            turn = asyncio.get_running_loop().create_future()
            self._waiting.add(turn)
            try:
                await turn
            finally:
                self._waiting.discard(turn)
        return numbers

    def wake(self) -> None:
        """To be called after every settlement of the meter."""
        for turn in self._waiting:
            if not turn.done():
                turn.set_result(None)


async def to_the_end(work: Awaitable[T]) -> T:
    """The result of ``work``, even if the caller is cancelled meanwhile, which is then dropped.

    For the part of ``before`` that comes after the reservation. The dispatch knows that it has
    cancelled, and settles the number instead of sending.
    """
    task, _ = await _outlast(work)
    return task.result()


@dataclass(eq=False)
class _DispatchedCalls:
    """The calls of one ``ask_all``: one loop reserves, sends and settles; each call is a task."""

    _dispatch: HelperDispatch
    _prompts: Sequence[str]
    _before: Before
    _after: After
    _deadline: float
    _reserving: asyncio.Task[Sequence[int]] | None = None
    _sent: dict[asyncio.Task[HelperAnswer], tuple[int, int]] = field(default_factory=dict)
    _pauses: dict[asyncio.Task[None], int] = field(default_factory=dict)
    _refused: Counter[int] = field(default_factory=Counter)
    _stopped: bool = False
    _failures: list[Exception] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._texts = [""] * len(self._prompts)
        self._unsent = deque(range(len(self._prompts)))

    async def run(self) -> list[str]:
        """Returns or raises once every reserved call is settled."""
        alarm = asyncio.get_running_loop().call_at(self._deadline, self._late)
        try:
            while True:
                if self._reserving is None and self._unsent and not self._stopped:
                    self._reserving = asyncio.create_task(self._reserve())
                tasks = (self._reserving, *self._sent, *self._pauses)
                under_way = [task for task in tasks if task is not None]
                if not under_way:
                    break
                done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                # First what has ended: where a call failed, no further one is sent.
                self._settle_ended(done)
                for pause in [pause for pause in self._pauses if pause in done]:
                    self._unsent.append(self._pauses.pop(pause))
                if self._reserving in done:
                    self._send_reserved()
        finally:
            alarm.cancel()
        if self._failures:
            raise self._failures[0]
        if self._stopped:
            raise asyncio.CancelledError
        return self._texts

    def stop(self) -> None:
        """Cancels what is not yet sent; nothing is sent any more."""
        self._stopped = True
        if self._reserving is not None:
            self._reserving.cancel()
        for pause in self._pauses:
            pause.cancel()

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
            self._failures[0].add_note(f"also failed: {type(failure).__name__}: {failure}")

    async def _reserve(self) -> Sequence[int]:
        """The numbers of the next calls; each of them holds a place."""
        taken = await self._dispatch.take_places(len(self._unsent))
        numbers: Sequence[int] = ()
        try:
            numbers = await self._before(list(itertools.islice(self._unsent, taken)))
        finally:
            self._dispatch.free_places(taken - len(numbers))
        return numbers

    def _send_reserved(self) -> None:
        """Each in a task that only a loop that is torn down cancels. Then the call stays unsettled,
        which is true, and the restart says so.
        """
        task, self._reserving = self._reserving, None
        if task is None or task.cancelled():
            return
        failure = task.exception()
        if isinstance(failure, Exception):
            self._fail(failure)
            return
        dispatch, numbers = self._dispatch, task.result()
        calls = [(self._unsent.popleft(), number) for number in numbers]
        dispatch.in_flight += len(calls)
        if self._stopped:
            unsent = errors.HELPER_NOT_SENT("the batch had ended before the call was sent")
            self._settle([(place, number, unsent) for place, number in calls])
            return
        for place, number in calls:
            asking = dispatch.helper.ask(
                self._prompts[place], seed=dispatch.seed, deadline=self._deadline
            )
            self._sent[asyncio.create_task(asking)] = place, number

    def _settle_ended(self, done: Collection[asyncio.Task[Any]]) -> None:
        ended: list[tuple[int, int, Outcome]] = []
        for task in [task for task in self._sent if task in done]:
            place, number = self._sent.pop(task)
            failure = task.exception()
            if failure is None:
                self._texts[place] = task.result().text
                ended.append((place, number, task.result()))
            elif isinstance(failure, Exception):
                if not self._asks_again(place, failure):
                    self._fail(failure)
                ended.append((place, number, failure))
            else:
                raise failure  # an interpreter's own exit, no failure of a call
        if ended:
            self._settle(ended)

    def _asks_again(self, place: int, failure: Exception) -> bool:
        """Whether the prompt at ``place`` is asked once more, after a pause that has begun now."""
        tries = self._refused[place]
        pause = REFUSED_PAUSE_SECONDS[min(tries, 1)]
        refused = isinstance(failure, errors.HelperFault) and failure.refused
        late = asyncio.get_running_loop().time() + pause >= self._deadline
        if not refused or late or self._stopped or tries >= self._dispatch.retries:
            return False
        self._refused[place] += 1
        self._pauses[asyncio.create_task(asyncio.sleep(pause))] = place
        return True

    def _settle(self, ended: Sequence[tuple[int, int, Outcome]]) -> None:
        try:
            self._after(ended)
        except Exception as exc:  # noqa: BLE001 - kept, and raised once the other calls are settled
            self._fail(exc)
        finally:
            self._dispatch.in_flight -= len(ended)
            self._dispatch.free_places(len(ended))


async def _outlast(
    work: Awaitable[T], *, on_cancel: Callable[[], None] | None = None
) -> tuple[asyncio.Future[T], bool]:
    """``work`` as a finished future, and whether the caller was cancelled while it ran."""
    task = asyncio.ensure_future(work)
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

    def __init__(self, run: Run, dispatch: HelperDispatch) -> None:
        """The state of ``run`` must have been claimed: it has the splits."""
        self._state = run.state
        self._recorder = run.recorder
        self._quota = run.quota
        self._dispatch = dispatch
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

        async def before(places: Sequence[int]) -> range:
            rows = [owners[place] for place in places]
            return await self._reserve(rows, [prompts[place].encode() for place in places])

        def after(ended: Sequence[tuple[int, int, Outcome]]) -> None:
            settled = [
                _settlement(owners[place], number, outcome) for place, number, outcome in ended
            ]
            self._recorder.post_all(settled)
            for split in {record.split for record in settled}:
                self._gates[split].wake()

        return await self._dispatch.ask_all(prompts, before=before, after=after, deadline=deadline)

    async def _reserve(self, rows: list[Row], prompts: list[bytes]) -> range:
        """The numbers of the first of these calls: those of one split that fit, synced."""
        split = rows[0].split
        wanted = sum(1 for _ in itertools.takewhile(lambda row: row.split == split, rows))
        digests = [hashlib.sha256(prompt).hexdigest() for prompt in prompts[:wanted]]
        synced: list[asyncio.Future[Receipt]] = []

        def reserve() -> range:
            # Decided and folded in one step: the next one to ask sees these calls counted.
            numbers = self._state.admit_calls(split, wanted)
            if self._quota is not None and numbers:
                numbers = numbers[: self._quota.room_to_call(split, len(numbers))]
            records = [
                HelperRequested(number, split, row.number, digest, len(prompt), self._dispatch.seed)
                for number, row, digest, prompt in zip(
                    numbers, rows, digests, prompts, strict=False
                )
            ]
            if records:
                synced.append(self._recorder.post_all_for_receipt(records))
            return numbers

        numbers = await self._gates[split].reserve(reserve)
        await to_the_end(synced[0])
        return numbers


def _settlement(row: Row, number: int, outcome: Outcome) -> HelperAnswered | HelperFailed:
    if isinstance(outcome, HelperAnswer):
        return HelperAnswered(
            number=number,
            split=row.split,
            score=row.number,
            text=outcome.text,
            input_tokens=outcome.usage.input_tokens,
            output_tokens=outcome.usage.output_tokens,
            finish_reason=outcome.finish_reason,
            model=outcome.model,
        )
    fault = outcome if isinstance(outcome, errors.HelperFault) else None
    usage = fault.usage if fault else None
    return HelperFailed(
        number=number,
        split=row.split,
        score=row.number,
        code=fault.code if fault else "internal_error",
        detail=fault.message if fault else type(outcome).__name__,
        usage=None if usage is None else (usage[0], usage[1]),  # JSON takes plain tuples
        sent=not errors.HELPER_NOT_SENT.matches(outcome),
    )

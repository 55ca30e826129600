"""Lost answers and the requests that repeat them: ``execute.on_undelivered = "replay"``.

Some clients ask again where an answer did not reach them. Such a request is no new search: it is
handed what the lost one was answered with, its quota and its record are those of the lost one, and
``delivery.repeated`` settles the loss. A loss that is not repeated in time closes the latch.

Which request repeats which? It is identical (route, ``Idempotency-Key`` if there is one, body), and
its first byte came after the client of the other had left: two that are in flight side by side are
two rollouts. Each request repeats one at most, and is repeated by one at most. So a repeat that is
lost as well leaves one loss open, as before, and N losses need N repeats.

Without the header two rollouts that ask alike cannot be told apart. Where one of them lost its
answer and the other asks next, the other takes the repeat's place and the repeat becomes a request
like any other: each is answered, with the same text. Only a rollout that gives up for good while
another one asks alike within the bound goes unnoticed here. A client that gives up is none to use
this with; one that sends the header is never taken for another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.recorder import Run
from smartsearch_sidecar.run.record import DeliveryRepeated
from smartsearch_sidecar.run.slots import run_until_deadline

Identity = tuple[str, str, bytes]
"""Route, ``Idempotency-Key`` (or nothing), body."""


@dataclass(eq=False, slots=True)
class Ask:
    """A request, from its body until its answer is handed over; and further if that was lost.

    ``began`` is loop time, as is what ``left_at`` returns: when the client left, ``None`` while it
    is there. ``earlier`` is the request that this one repeats, ``later`` the one that repeats this
    one. ``loss`` is the number of its ``delivery.lost``.
    """

    repeats: Repeats
    identity: Identity
    began: float
    left_at: Callable[[], float | None]
    earlier: Ask | None = None
    later: Ask | None = None
    answer: Answer | None = None
    loss: int | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    alarm: asyncio.TimerHandle | None = None


class Answer(NamedTuple):
    """A recorded answer on its way to the client. ``number`` is the attempt it settles, ``None``
    for a declined query; ``others`` are those of a batch that it settles as well; ``ask`` is the
    request where losses may be repeated.
    """

    payload: bytes
    number: int | None
    others: tuple[int, ...] = ()
    ask: Ask | None = None


class Repeats:
    """The requests of a run that may be repeated: those in flight, and those whose answer was lost.

    Called on the loop. What it keeps of a request is its body and its answer, both by reference.
    """

    def __init__(self, run: Run, seconds: float) -> None:
        """A lost answer must be asked for again within ``seconds``."""
        self._state, self._recorder = run.state, run.recorder
        self._seconds = seconds
        self._asks: dict[Identity, list[Ask]] = {}

    def ask(self, identity: Identity, began: float, left_at: Callable[[], float | None]) -> Ask:
        """A request whose first byte came at ``began``. It repeats the oldest identical one whose
        client had left by then, also where that one is still being answered.
        """
        new = Ask(self, identity, began, left_at)
        for earlier in self._asks.get(identity, ()):
            left = None if earlier.later is not None else earlier.left_at()
            if left is not None and left <= began:
                earlier.later, new.earlier = new, earlier
                if earlier.alarm is not None:
                    earlier.alarm.cancel()
                break
        self._asks.setdefault(identity, []).append(new)
        return new

    async def answer(
        self, ask: Ask, work: Callable[[float], Awaitable[Answer]], deadline: float
    ) -> Answer:
        """The answer to the request that this one repeats; ``work(deadline)`` where there is none,
        or it left before it was searched for. Raises what ``work`` raises, ``DeadlinePassed`` or
        ``LatchClosed``.
        """
        found = None
        while (earlier := ask.earlier) is not None and not earlier.ended.is_set():
            try:
                await run_until_deadline(deadline, earlier.ended.wait())
            except TimeoutError:
                raise errors.DEADLINE_PASSED(
                    "the search of the request that this one repeats was still running"
                ) from None
        if earlier is not None:
            self._state.refuse_closed()
            found = earlier.answer
        answer = ask.answer = await work(deadline) if found is None else found
        record = self._repeated(ask)
        if record is not None:
            await self._recorder.post_for_receipt(record)
        return answer._replace(ask=ask)

    def _repeated(self, ask: Ask) -> DeliveryRepeated | None:
        """What settles the loss that this request repeats, which is done with now."""
        earlier, ask.earlier = ask.earlier, None
        if earlier is None or earlier.loss is None:
            return None
        self._forget(earlier)
        return DeliveryRepeated(None if ask.answer is None else ask.answer.number, earlier.loss)

    def awaits_repeat(self, ask: Ask) -> bool:
        """Whether the loss of ``ask``, which is about to be recorded, awaits its repeat.

        One loss stays open for one rollout: this one, in the place of the loss that it repeats; or
        that of the earlier request alone, where that one is still being answered. Raises
        ``LedgerFailed``.
        """
        earlier = ask.earlier
        if earlier is None:
            return True
        if not earlier.ended.is_set():
            return False  # `over` puts a later request in the place of this one
        ask.answer = ask.answer or earlier.answer
        record = self._repeated(ask)
        if record is not None:
            self._recorder.post(record)
        return True

    def lost(self, ask: Ask) -> None:
        """Its loss was recorded just now, as one that awaits its repeat."""
        ask.loss = self._state.lost
        asks = self._asks.setdefault(ask.identity, [])
        if ask not in asks:
            asks.append(ask)
        ask.ended.set()
        if ask.later is None:
            self._set_alarm(ask)

    def _set_alarm(self, ask: Ask) -> None:
        why = f"and did not ask again within {self._seconds:g} s"
        ask.alarm = asyncio.get_running_loop().call_later(self._seconds, self._late, ask, why)

    def over(self, ask: Ask) -> None:
        """It is being handed over, or failed; nothing is to be repeated unless it is lost."""
        ask.ended.set()
        earlier, ask.earlier = ask.earlier, None
        if earlier is not None:
            earlier.later, ask.later = ask.later, None
            if earlier.later is not None:
                earlier.later.earlier = earlier
            elif earlier.loss is not None:
                self._set_alarm(earlier)
        if ask.loss is None:
            self._forget(ask)

    def end(self) -> None:
        """No request can come any more: what still awaits its repeat is lost for good."""
        for asks in list(self._asks.values()):
            for ask in asks:
                if ask.alarm is not None:
                    ask.alarm.cancel()
                if ask.loss in self._state.awaited:
                    self._late(ask, "and the run ended before it could ask again")

    def _forget(self, ask: Ask) -> None:
        asks = self._asks.get(ask.identity, [])
        if ask in asks:
            asks.remove(ask)
        if not asks:
            self._asks.pop(ask.identity, None)

    def _late(self, ask: Ask, why: str) -> None:
        number = None if ask.answer is None else ask.answer.number
        self._recorder.close_latch(
            "response_undelivered",
            number=number,
            consumed=number is not None,
            detail=f"the client had gone before its answer was handed to it, {why}",
        )

"""Helper calls side by side: recorded before they are sent, settled in every case."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.config.sections import HelperSection
from smartsearch_sidecar.reward.helper import HelperAnswer, HelperClient
from smartsearch_sidecar.run.scores import Meter
from smartsearch_sidecar.scoring.helper_calls import (
    HelperDispatch,
    Outcome,
    QuotaGate,
    to_the_end,
)
from tests.fakes.helper import MODEL, FakeHelper
from tests.fakes.raised import raises

pytestmark = pytest.mark.both_loops


def reserve(meter: Meter, wanted: int = 1) -> range:
    """Decides and applies in one step, as a run does."""
    numbers = meter.admit(wanted)
    for number in numbers:
        meter.on_requested(number)
    return numbers


@dataclass
class Books:
    """Hooks as the service has them: a meter, records before the calls, settlements after.

    ``syncing`` lets records become durable; a test may clear it.
    """

    fake: FakeHelper
    meter: Meter = field(default_factory=lambda: Meter(1000, 10_000_000))
    gate: QuotaGate = field(default_factory=QuotaGate)
    events: list[tuple[str, int]] = field(default_factory=list)
    faults: dict[int, Exception] = field(default_factory=dict)
    sent_unrecorded: int = 0
    syncing: asyncio.Event = field(default_factory=asyncio.Event)
    recording: int = 0

    def __post_init__(self) -> None:
        self.syncing.set()

    async def before(self, places: Sequence[int]) -> Sequence[int]:
        numbers = await self.gate.reserve(lambda: reserve(self.meter, len(places)))
        return await to_the_end(self.record(numbers))

    async def record(self, numbers: range) -> range:
        self.recording += len(numbers)
        await self.syncing.wait()
        self.recording -= len(numbers)
        self.events += [("requested", number) for number in numbers]
        return numbers

    def after(self, ended: Sequence[tuple[int, int, Outcome]]) -> None:
        for _, number, outcome in ended:
            self.check(number)
            if isinstance(outcome, HelperAnswer):
                self.events.append(("answered", number))
                self.meter.on_answered(number, *outcome.usage)
                continue
            self.events.append(("failed", number))
            self.faults[number] = outcome
            usage = outcome.usage if isinstance(outcome, errors.HelperFault) else None
            self.meter.on_failed(number, usage, sent=not errors.HELPER_NOT_SENT.matches(outcome))
        self.gate.wake()

    def check(self, number: int) -> None:
        if ("requested", number) not in self.events:
            raise AssertionError(f"call {number} was settled before it was recorded")
        if len(self.fake.calls) > sum(kind == "requested" for kind, _ in self.events):
            self.sent_unrecorded += 1

    def hooks(self) -> dict[str, Any]:
        return {"before": self.before, "after": self.after}

    def count(self, kind: str) -> int:
        return sum(event == kind for event, _ in self.events)

    def assert_balanced(self) -> None:
        """Every number was settled exactly once, and nothing was sent without a record."""
        settled = sorted(number for event, number in self.events if event != "requested")
        requested = sorted(number for event, number in self.events if event == "requested")
        assert settled == requested == list(range(1, self.meter.model_attempts + 1))
        assert self.meter.settled
        assert self.sent_unrecorded == 0
        assert len(self.fake.calls) <= len(requested)


@pytest.fixture
async def fake() -> AsyncIterator[FakeHelper]:
    """A helper whose verdict repeats its prompt."""
    async with FakeHelper() as helper:
        helper.verdict = lambda prompt: f"{prompt}!</answer>"
        yield helper


@pytest.fixture
async def client(fake: FakeHelper) -> AsyncIterator[HelperClient]:
    """The real client of the fake."""
    async with HelperClient(
        HelperSection(url=fake.url, model=MODEL, model_sha256="0" * 64, timeout_seconds=30)
    ) as helper:
        yield helper


def soon(seconds: float = 30.0) -> float:
    """A deadline."""
    return asyncio.get_running_loop().time() + seconds


def prompts(count: int, name: str = "p") -> list[str]:
    return [f"{name}{index}" for index in range(count)]


async def turns(until: Callable[[], bool]) -> None:
    """Lets the other tasks run until the condition holds."""
    for _ in range(100_000):
        if until():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to hold")


async def test_texts_come_in_the_order_of_their_prompts(
    fake: FakeHelper, client: HelperClient
) -> None:
    """Answers that arrive in any order are handed back in the order asked, all recorded."""
    books = Books(fake)
    dispatch = HelperDispatch(client, concurrency=8, seed=17)
    texts = await dispatch.ask_all(prompts(40), **books.hooks(), deadline=soon())
    assert texts == [f"{prompt}!" for prompt in prompts(40)]
    assert books.meter.usage() | {"input_tokens": 0} == {
        "score_attempts": 0,
        "score_responses": 0,
        "model_attempts": 40,
        "model_responses": 40,
        "input_tokens": 0,
        "output_tokens": 40,
        "unknown_output_token_reservations": 0,
    }
    assert {call.body["sampling_params"]["sampling_seed"] for call in fake.calls} == {17}
    books.assert_balanced()


async def test_no_prompts_send_no_call(fake: FakeHelper, client: HelperClient) -> None:
    """A rollout without searches needs no helper."""
    books = Books(fake)
    dispatch = HelperDispatch(client, concurrency=8, seed=17)
    assert await dispatch.ask_all([], **books.hooks(), deadline=soon()) == []
    assert books.events == []


async def test_places_are_shared_by_all_rows_and_batches(
    fake: FakeHelper, client: HelperClient
) -> None:
    """All of them together never have more calls open than ``concurrency``, and reach it."""
    fake.gate.clear()
    books = Books(fake)
    dispatch = HelperDispatch(client, concurrency=3, seed=17)
    rows = [
        asyncio.create_task(
            dispatch.ask_all(prompts(4, f"row{row}-"), **books.hooks(), deadline=soon())
        )
        for row in range(4)
    ]
    await fake.until_calls(3)
    assert dispatch.in_flight == 3
    assert books.meter.model_attempts == 3
    fake.gate.set()
    assert await asyncio.gather(*rows) == [
        [f"row{row}-{index}!" for index in range(4)] for row in range(4)
    ]
    assert fake.busiest == 3
    assert dispatch.in_flight == 0
    books.assert_balanced()


async def test_nothing_is_sent_before_its_record_is_durable(
    fake: FakeHelper, client: HelperClient
) -> None:
    """A call costs money, so it waits for the sync."""
    books = Books(fake)
    books.syncing.clear()
    dispatch = HelperDispatch(client, concurrency=2, seed=17)
    asking = asyncio.create_task(dispatch.ask_all(prompts(4), **books.hooks(), deadline=soon()))
    await turns(lambda: books.recording == 2)
    for _ in range(50):
        await asyncio.sleep(0)
    assert fake.calls == []
    assert books.recording == 2
    books.syncing.set()
    await asking
    books.assert_balanced()


async def test_calls_wait_for_quota_and_all_get_through(
    fake: FakeHelper, client: HelperClient
) -> None:
    """Cheap answers make room: a quota of two reservations carries twenty calls."""
    books = Books(fake, Meter(1000, 2 * 2048 + 20))
    dispatch = HelperDispatch(client, concurrency=16, seed=17)
    texts = await dispatch.ask_all(prompts(20), **books.hooks(), deadline=soon())
    assert len(texts) == 20
    assert fake.busiest <= 2
    assert books.meter.output_tokens == 20
    books.assert_balanced()


async def test_an_exhausted_quota_fails_the_batch_after_what_was_sent(
    fake: FakeHelper, client: HelperClient
) -> None:
    """The calls that fitted are settled, the first that cannot raises, the rest is never sent."""
    books = Books(fake, Meter(3, 10_000_000))
    dispatch = HelperDispatch(client, concurrency=4, seed=17)
    with raises(errors.QUOTA_EXHAUSTED):
        await dispatch.ask_all(prompts(6), **books.hooks(), deadline=soon())
    assert books.meter.model_attempts <= 3
    books.assert_balanced()


@pytest.mark.parametrize("which", [1, 3, 6])
async def test_the_first_failure_stops_what_is_not_sent_and_settles_what_is(
    fake: FakeHelper, client: HelperClient, which: int
) -> None:
    """One bad answer: no new call, the others' answers booked, the failure raised."""
    fake.failures[which] = "empty"
    books = Books(fake)
    dispatch = HelperDispatch(client, concurrency=2, seed=17)
    with raises(errors.HELPER_EMPTY) as caught:
        await dispatch.ask_all(prompts(6), **books.hooks(), deadline=soon())
    assert caught.value in books.faults.values()
    assert len(fake.calls) <= which + 1
    assert books.meter.model_responses == len(fake.calls)
    books.assert_balanced()


async def test_calls_already_sent_are_awaited_before_the_failure_is_raised(
    fake: FakeHelper, client: HelperClient
) -> None:
    """They cost money: the batch does not end before their tokens are known."""
    fake.gate.clear()
    fake.failures[2] = "error_500"
    books = Books(fake)
    section = HelperSection(url=fake.url, model=MODEL, model_sha256="0" * 64, timeout_seconds=30)
    async with _Slow(section) as slow:
        dispatch = HelperDispatch(slow, concurrency=3, seed=17)
        asking = asyncio.create_task(dispatch.ask_all(prompts(9), **books.hooks(), deadline=soon()))
        await turns(lambda: dispatch.in_flight == 3)
        fake.gate.set()
        await turns(lambda: bool(books.faults))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not asking.done()
        assert dispatch.in_flight == 2
        slow.released.set()
        with raises(errors.HELPER_STATUS):
            await asking
    assert books.count("requested") == 3
    assert books.meter.model_responses == 2
    books.assert_balanced()


class _Slow(HelperClient):
    """Holds good answers back until ``released`` is set, as a slower server would."""

    def __init__(self, section: HelperSection) -> None:
        super().__init__(section)
        self.released = asyncio.Event()

    async def ask(self, prompt: str, *, seed: int, deadline: float | None = None) -> HelperAnswer:
        answer = await super().ask(prompt, seed=seed, deadline=deadline)
        await self.released.wait()
        return answer


async def test_further_failures_are_noted_on_the_first(
    fake: FakeHelper, client: HelperClient
) -> None:
    """Nothing is swallowed: who reads the first failure sees the others."""
    fake.failure = "reset"
    books = Books(fake)
    dispatch = HelperDispatch(client, concurrency=3, seed=17)
    fake.gate.clear()
    asking = asyncio.create_task(dispatch.ask_all(prompts(3), **books.hooks(), deadline=soon()))
    await fake.until_calls(3)
    fake.gate.set()
    with raises(errors.HELPER_TRANSPORT) as caught:
        await asking
    assert len(caught.value.__notes__) == 2
    assert books.meter.unknown_output_token_reservations == 3 * 2048
    books.assert_balanced()


async def test_a_recorded_call_is_not_sent_after_a_failure(
    fake: FakeHelper, client: HelperClient
) -> None:
    """Cancelled while its record is being synced, it is settled as never sent, for nothing."""
    books = Books(fake)
    fake.failures[1] = "empty"
    fake.gate.clear()

    async def before(places: Sequence[int]) -> Sequence[int]:
        if places[0] == 1:
            books.syncing.clear()
        return await books.before(places[:1])

    dispatch = HelperDispatch(client, concurrency=2, seed=17)
    asking = asyncio.create_task(
        dispatch.ask_all(prompts(5), before=before, after=books.after, deadline=soon())
    )
    await fake.until_calls(1)
    await turns(lambda: books.recording == 1)
    fake.gate.set()
    await turns(lambda: 1 in books.faults)
    books.syncing.set()
    with raises(errors.HELPER_EMPTY):
        await asking
    assert len(fake.calls) == 1
    assert errors.HELPER_NOT_SENT.matches(books.faults[2])
    assert books.meter.usage()["unknown_output_token_reservations"] == 0
    books.assert_balanced()


async def test_a_failure_stops_calls_that_have_not_begun(
    fake: FakeHelper, client: HelperClient
) -> None:
    """A refusal in the very first step leaves no other call a reservation."""
    books = Books(fake)
    asked: list[Sequence[int]] = []

    async def before(places: Sequence[int]) -> Sequence[int]:
        asked.append(places)
        raise errors.QUOTA_EXHAUSTED("used up")

    dispatch = HelperDispatch(client, concurrency=4, seed=17)
    with raises(errors.QUOTA_EXHAUSTED):
        await dispatch.ask_all(prompts(5), before=before, after=books.after, deadline=soon())
    assert asked == [[0, 1, 2, 3]]


async def test_a_hook_that_fails_fails_the_batch(fake: FakeHelper, client: HelperClient) -> None:
    """A settlement that cannot be recorded is raised, and not settled a second time."""
    books = Books(fake)

    def after(ended: Sequence[tuple[int, int, Outcome]]) -> None:
        books.after(ended)
        if books.count("answered") == 2:
            raise errors.LEDGER_FAILED("the disk is full")

    dispatch = HelperDispatch(client, concurrency=1, seed=17)
    with pytest.raises(errors.LedgerFailed):
        await dispatch.ask_all(prompts(5), before=books.before, after=after, deadline=soon())
    assert len(fake.calls) == 2
    books.assert_balanced()


async def test_a_failed_settlement_of_a_failure_is_noted(
    fake: FakeHelper, client: HelperClient
) -> None:
    """The helper's failure came first, and the ledger's is not lost behind it."""
    fake.failure = "empty"
    books = Books(fake)

    def after(ended: Sequence[tuple[int, int, Outcome]]) -> None:
        raise errors.LEDGER_FAILED("the disk is full")

    dispatch = HelperDispatch(client, concurrency=1, seed=17)
    with raises(errors.HELPER_EMPTY) as caught:
        await dispatch.ask_all(prompts(2), before=books.before, after=after, deadline=soon())
    assert "the disk is full" in caught.value.__notes__[0]


# --- cancellation and time -----------------------------------------------------------------------


async def test_a_cancelled_caller_settles_what_was_sent(
    fake: FakeHelper, client: HelperClient
) -> None:
    """Two are sent, four are not: the two are booked, the four never leave, the caller is told."""
    fake.gate.clear()
    books = Books(fake)
    dispatch = HelperDispatch(client, concurrency=2, seed=17)
    asking = asyncio.create_task(dispatch.ask_all(prompts(6), **books.hooks(), deadline=soon()))
    await fake.until_calls(2)
    asking.cancel()
    await asyncio.sleep(0)
    asking.cancel()  # an impatient one asks twice
    for _ in range(20):
        await asyncio.sleep(0)
    assert not asking.done()
    fake.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert len(fake.calls) == 2
    assert fake.abandoned == 0
    assert books.meter.model_responses == 2
    books.assert_balanced()


async def test_a_caller_cancelled_at_once_sends_no_call(
    fake: FakeHelper, client: HelperClient
) -> None:
    """Before the first step of any call there is nothing to settle."""
    books = Books(fake)
    dispatch = HelperDispatch(client, concurrency=2, seed=17)
    asking = asyncio.create_task(dispatch.ask_all(prompts(6), **books.hooks(), deadline=soon()))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert fake.calls == []
    books.assert_balanced()


async def test_a_call_cancelled_while_it_waits_for_quota_owes_nothing(
    fake: FakeHelper, client: HelperClient
) -> None:
    """It has no number yet, and the next batch gets its place and its number."""
    fake.gate.clear()
    books = Books(fake, Meter(1000, 2048 + 10))
    dispatch = HelperDispatch(client, concurrency=2, seed=17)
    first = asyncio.create_task(dispatch.ask_all(["a"], **books.hooks(), deadline=soon()))
    await fake.until_calls(1)
    second = asyncio.create_task(dispatch.ask_all(["b"], **books.hooks(), deadline=soon()))
    await turns(lambda: bool(books.gate._waiting))
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert not books.gate._waiting
    fake.gate.set()
    assert await first == ["a!"]
    assert await dispatch.ask_all(["c"], **books.hooks(), deadline=soon()) == ["c!"]
    assert books.meter.model_attempts == 2
    books.assert_balanced()


async def test_a_failure_behind_a_cancellation_is_chained(
    fake: FakeHelper, client: HelperClient
) -> None:
    """The caller hears that it was cancelled, and the traceback says what else went wrong."""
    fake.gate.clear()
    fake.failure = "empty"
    books = Books(fake)
    dispatch = HelperDispatch(client, concurrency=1, seed=17)
    asking = asyncio.create_task(dispatch.ask_all(prompts(3), **books.hooks(), deadline=soon()))
    await fake.until_calls(1)
    asking.cancel()
    await asyncio.sleep(0)
    fake.gate.set()
    with pytest.raises(asyncio.CancelledError) as caught:
        await asking
    assert errors.HELPER_EMPTY.matches(caught.value.__cause__)
    books.assert_balanced()


async def test_the_deadline_ends_the_batch(fake: FakeHelper, client: HelperClient) -> None:
    """What hangs is given up and stays reserved, what waits is never sent."""
    fake.failures[2] = "hang"
    books = Books(fake)
    dispatch = HelperDispatch(client, concurrency=1, seed=17)
    await dispatch.ask_all(["a"], **books.hooks(), deadline=soon())  # a connection is open now
    with raises(errors.HELPER_TIMEOUT):
        await dispatch.ask_all(prompts(6), **books.hooks(), deadline=soon(0.1))
    assert len(fake.calls) == 2
    assert books.meter.model_attempts == 2
    assert books.meter.unknown_output_token_reservations == 2048
    books.assert_balanced()


async def test_nothing_is_sent_after_the_deadline(fake: FakeHelper, client: HelperClient) -> None:
    """A batch that finds no place in time fails without having asked."""
    fake.gate.clear()
    books = Books(fake)
    dispatch = HelperDispatch(client, concurrency=1, seed=17)
    first = asyncio.create_task(dispatch.ask_all(["a"], **books.hooks(), deadline=soon()))
    await fake.until_calls(1)
    with raises(errors.HELPER_TIMEOUT, match="not yet sent"):
        await dispatch.ask_all(["b", "c"], **books.hooks(), deadline=soon(0.05))
    fake.gate.set()
    assert await first == ["a!"]
    assert len(fake.calls) == 1
    books.assert_balanced()


async def test_places_survive_any_failure(fake: FakeHelper, client: HelperClient) -> None:
    """After failed, cancelled and late batches all places are free again."""
    books = Books(fake)
    dispatch = HelperDispatch(client, concurrency=3, seed=17)
    for failure in ("empty", "reset", "error_500", "cut"):
        fake.failure = failure
        with pytest.raises(errors.HelperFault):
            await dispatch.ask_all(prompts(7), **books.hooks(), deadline=soon())
    fake.failure = None
    for steps in range(12):
        asking = asyncio.create_task(dispatch.ask_all(prompts(7), **books.hooks(), deadline=soon()))
        for _ in range(steps):
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        books.assert_balanced()
    fake.gate.clear()
    already = len(fake.calls)
    asking = asyncio.create_task(dispatch.ask_all(prompts(5), **books.hooks(), deadline=soon()))
    await fake.until_calls(already + 3)
    assert dispatch.in_flight == 3
    fake.gate.set()
    await asking


# --- the parts -----------------------------------------------------------------------------------


async def test_to_the_end_hands_back_the_result_of_a_cancelled_caller() -> None:
    """The number of a record that is being written is not lost to a cancellation."""
    written = asyncio.Event()

    async def write() -> int:
        await written.wait()
        return 7

    caller = asyncio.create_task(to_the_end(write()))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.sleep(0)
    assert not caller.done()
    written.set()
    assert await caller == 7


async def test_to_the_end_raises_what_the_work_raises() -> None:
    """An error of the work is the caller's error."""

    async def write() -> int:
        raise errors.LEDGER_FAILED("the disk is full")

    with pytest.raises(errors.LedgerFailed):
        await to_the_end(write())


async def test_the_gate_lets_waiters_in_as_room_is_made() -> None:
    """Each settlement admits one more, and an exhausted quota reaches every waiter."""
    meter, gate = Meter(100, 2048), QuotaGate()
    first = await gate.reserve(lambda: reserve(meter))
    waiters = [asyncio.create_task(gate.reserve(lambda: reserve(meter))) for _ in range(3)]
    await turns(lambda: len(gate._waiting) == 3)
    meter.on_answered(first[0], 1, 0)
    gate.wake()
    await turns(lambda: len(gate._waiting) == 2)
    assert sum(waiter.done() for waiter in waiters) == 1
    meter.on_failed(2)
    gate.wake()
    outcomes: Sequence[object] = await asyncio.gather(*waiters, return_exceptions=True)
    assert [errors.QUOTA_EXHAUSTED.matches(outcome) for outcome in outcomes].count(True) == 2

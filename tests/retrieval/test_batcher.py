"""The gathering machine alone: a call is a coroutine that the test holds in its hand."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.retrieval.flashrag import batcher
from smartsearch_sidecar.retrieval.flashrag.batcher import Failed, Gather

pytestmark = pytest.mark.both_loops


class Desk:
    """Takes calls and answers each when the test says so."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, list[str]]] = []
        self.open: list[asyncio.Future[Sequence[str | Failed]]] = []
        self.cancelled = 0

    async def ask(self, lane: int, keys: Sequence[str]) -> Sequence[str | Failed]:
        self.calls.append((lane, list(keys)))
        future: asyncio.Future[Sequence[str | Failed]] = asyncio.get_running_loop().create_future()
        self.open.append(future)
        try:
            return await future
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def answer(self, position: int = -1) -> None:
        lane, keys = self.calls[position]
        self.open[position].set_result([f"{key}@{lane}" for key in keys])


@pytest.fixture
def lingers() -> None:
    """For a test of the wait before a departure."""


@pytest.fixture(autouse=True)
def no_wait_where_the_machine_is_slow(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other tests every call is quick, however long the machine took for it."""
    if "lingers" not in request.fixturenames:
        monkeypatch.setattr(batcher, "LINGER_SECONDS_MIN", float("inf"))


async def settle() -> None:
    """Lets everything that can run, run: callbacks and tasks need a few passes each."""
    for _ in range(10):
        await asyncio.sleep(0)


def submit(gather: Gather[str], *keys: str, lane: int = 5) -> list[asyncio.Task[str]]:
    return [asyncio.ensure_future(gather.submit(lane, key)) for key in keys]


async def test_a_lone_search_goes_at_once() -> None:
    """With no call out a search is asked without waiting for company or a timer."""
    desk = Desk()
    gather = Gather(desk.ask, batch_max=32)
    [search] = submit(gather, "a")
    await settle()
    assert desk.calls == [(5, ["a"])]
    desk.answer()
    assert await search == "a@5"


async def test_arrivals_of_one_pass_travel_together() -> None:
    """Searches that arrive before the loop's next pass share the first call."""
    desk = Desk()
    gather = Gather(desk.ask, batch_max=32)
    searches = submit(gather, "a", "b", "c")
    await settle()
    assert desk.calls == [(5, ["a", "b", "c"])]
    desk.answer()
    assert await asyncio.gather(*searches) == ["a@5", "b@5", "c@5"]


async def test_arrivals_gather_while_a_call_is_out() -> None:
    """The next call leaves when the previous returns, with what gathered up to the bound."""
    desk = Desk()
    gather = Gather(desk.ask, batch_max=3)
    first = submit(gather, "a")
    await settle()
    later = submit(gather, "b", "c", "d", "e")
    await settle()
    assert len(desk.calls) == 1
    desk.answer()
    await settle()
    assert desk.calls[1:] == [(5, ["b", "c", "d"])]
    desk.answer()
    await settle()
    assert desk.calls[2:] == [(5, ["e"])]
    desk.answer()
    assert await asyncio.gather(*first, *later) == ["a@5", "b@5", "c@5", "d@5", "e@5"]
    assert len(desk.calls) == 3


async def test_identical_searches_of_a_call_are_asked_once() -> None:
    """Equal queries in one call are one key of it, and each searcher has its answer."""
    desk = Desk()
    gather = Gather(desk.ask, batch_max=2)
    searches = submit(gather, "a", "b", "a", "b", "a")
    await settle()
    assert desk.calls == [(5, ["a", "b"])]
    desk.answer()
    assert await asyncio.gather(*searches) == ["a@5", "b@5", "a@5", "b@5", "a@5"]


async def test_a_call_that_is_out_is_not_joined() -> None:
    """A search that begins after its twin has left is asked again, in the next call."""
    desk = Desk()
    gather = Gather(desk.ask, batch_max=32)
    early = submit(gather, "a")
    await settle()
    late = submit(gather, "a")
    desk.answer()
    await settle()
    assert desk.calls == [(5, ["a"]), (5, ["a"])]
    assert not late[0].done()
    desk.answer()
    assert await asyncio.gather(*early, *late) == ["a@5", "a@5"]


async def test_lanes_do_not_mix_and_the_oldest_goes_first() -> None:
    """A call holds one lane only, chosen by the search that has waited longest."""
    desk = Desk()
    gather = Gather(desk.ask, batch_max=32)
    searches = submit(gather, "a")
    await settle()
    searches += submit(gather, "b", lane=3) + submit(gather, "c", "b") + submit(gather, "d", lane=3)
    await settle()
    desk.answer()
    await settle()
    assert desk.calls[1:] == [(3, ["b", "d"])]
    desk.answer()
    await settle()
    assert desk.calls[2:] == [(5, ["c", "b"])]
    desk.answer()
    assert await asyncio.gather(*searches) == ["a@5", "b@3", "c@5", "b@5", "d@3"]


async def test_one_failed_key_leaves_the_others_answered() -> None:
    """An outcome of failure is raised by its own searches alone."""
    desk = Desk()
    gather = Gather(desk.ask, batch_max=32)
    searches = submit(gather, "a", "bad", "c", "bad")
    await settle()
    desk.open[0].set_result(["A", Failed(errors.PROVIDER_FAULT("refused")), "C"])
    outcomes = await asyncio.gather(*searches, return_exceptions=True)
    assert outcomes[0] == "A"
    assert outcomes[2] == "C"
    assert [str(outcomes[i]) for i in (1, 3)] == ["refused", "refused"]


async def test_a_failed_call_fails_each_of_its_searches_with_its_own_exception() -> None:
    """No two searches raise the same object, so no traceback grows with other people's frames."""
    desk = Desk()
    gather = Gather(desk.ask, batch_max=32)
    searches = submit(gather, "a", "b", "b")
    await settle()
    cause = errors.PROVIDER_TRANSPORT("the connection broke")
    desk.open[0].set_exception(cause)
    outcomes = await asyncio.gather(*searches, return_exceptions=True)
    assert all(type(outcome) is errors.ProviderTransport for outcome in outcomes)
    assert all(str(outcome) == "the connection broke" for outcome in outcomes)
    assert len({id(outcome) for outcome in outcomes}) == 3
    again = submit(gather, "c")
    await settle()
    desk.answer()
    assert await again[0] == "c@5"


async def test_outcomes_must_match_the_searches() -> None:
    """A call that returns a wrong number of outcomes fails all of its searches."""
    desk = Desk()
    gather = Gather(desk.ask, batch_max=32)
    searches = submit(gather, "a", "b")
    await settle()
    desk.open[0].set_result(["only one"])
    outcomes = await asyncio.gather(*searches, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [errors.InvariantBroken] * 2


async def test_a_waiting_search_that_leaves_is_not_asked() -> None:
    """A cancelled search that no call has taken leaves nothing behind."""
    desk = Desk()
    gather = Gather(desk.ask, batch_max=32)
    first = submit(gather, "a")
    await settle()
    leaving, staying = submit(gather, "b", "c")
    await settle()
    leaving.cancel()
    await settle()
    assert len(gather._waiting) == 1
    desk.answer()
    await settle()
    assert desk.calls[1:] == [(5, ["c"])]
    desk.answer()
    assert await asyncio.gather(*first, staying) == ["a@5", "c@5"]


async def test_one_of_two_that_share_a_query_may_leave() -> None:
    """A cancelled search does not take its twin along, waiting or out."""
    desk = Desk()
    gather = Gather(desk.ask, batch_max=32)
    leaving_out, staying_out = submit(gather, "a", "a")
    await settle()
    leaving_waiting, staying_waiting = submit(gather, "b", "b")
    await settle()
    leaving_out.cancel()
    leaving_waiting.cancel()
    await settle()
    assert desk.cancelled == 0
    desk.answer()
    assert await staying_out == "a@5"
    await settle()
    desk.answer()
    assert await staying_waiting == "b@5"


async def test_an_unawaited_call_is_cancelled_and_the_next_leaves() -> None:
    """A hung call does not hold the searches behind it once its own searchers have gone."""
    desk = Desk()
    gather = Gather(desk.ask, batch_max=32)
    hung = submit(gather, "a", "b")
    await settle()
    behind = submit(gather, "c")
    await settle()
    hung[0].cancel()
    await settle()
    assert (len(desk.calls), desk.cancelled) == (1, 0)
    hung[1].cancel()
    await settle()
    assert (len(desk.calls), desk.cancelled) == (2, 1)
    desk.answer()
    assert await behind[0] == "c@5"


@pytest.mark.parametrize("passes", range(6))
async def test_leaving_at_each_pass_of_a_departure(passes: int) -> None:
    """A search cancelled before, at or after departure, even between departure and the call's
    first step, does not block the lane.
    """
    desk = Desk()
    gather = Gather(desk.ask, batch_max=32)
    [search] = submit(gather, "a")
    for _ in range(passes):
        await asyncio.sleep(0)
    search.cancel()
    await settle()
    again = submit(gather, "b")
    await settle()
    assert desk.calls[-1] == (5, ["b"])
    desk.answer()
    assert await again[0] == "b@5"


async def test_leaving_in_the_pass_that_answers() -> None:
    """A search cancelled in the very pass its outcome arrives leaves no unread exception."""
    desk = Desk()
    gather = Gather(desk.ask, batch_max=32)
    heard: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: heard.append(context))
    [search] = submit(gather, "a")
    await settle()
    desk.open[0].set_exception(errors.PROVIDER_FAULT("late"))
    search.cancel()
    await asyncio.wait([search])
    await settle()
    del search, desk.open[0]
    assert heard == []
    again = submit(gather, "b")
    await settle()
    desk.answer()
    assert await again[0] == "b@5"


async def test_reshaped_it_sends_single_searches_side_by_side() -> None:
    """With another shape each search is a call of its own, and several are out."""
    desk = Desk()
    gather = Gather(desk.ask, batch_max=32)
    first = submit(gather, "a")
    await settle()
    gather.reshape(batch_max=1, calls_max=3)
    later = submit(gather, "b", "c", "d")
    await settle()
    assert [keys for _, keys in desk.calls] == [["a"], ["b"], ["c"]]
    desk.answer(2)
    await settle()
    assert [keys for _, keys in desk.calls[3:]] == [["d"]]
    for position in (0, 1, 3):
        desk.answer(position)
    assert await asyncio.gather(*first, *later) == ["a@5", "b@5", "c@5", "d@5"]


async def test_close_fails_what_waits_and_what_is_out() -> None:
    """Closing fails the searches that wait, takes no further search, and ends the calls."""
    desk = Desk()
    gather = Gather(desk.ask, batch_max=1)
    searches = submit(gather, "a", "b")
    await settle()
    await gather.close()
    outcomes = await asyncio.gather(*searches, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [errors.ProviderFault] * 2
    assert desk.cancelled == 1
    with pytest.raises(errors.ProviderFault, match="closed"):
        await gather.submit(5, "c")


async def test_close_before_anything_has_left() -> None:
    """A search whose departure is only scheduled is failed, not forgotten."""
    gather = Gather(Desk().ask, batch_max=1)
    [search] = submit(gather, "a")
    await asyncio.sleep(0)
    await gather.close()
    with pytest.raises(errors.ProviderFault):
        await search


@pytest.mark.parametrize("seed", range(20))
async def test_any_order_of_events_answers_everyone_who_stays(seed: int) -> None:
    """Searches join and leave and calls return, in any order: those that stay get their answer,
    no call is over the bound or asks a query twice, and the desk is free at the end.
    """
    dice = random.Random(seed)
    desk = Desk()
    batch_max, calls_max = dice.randint(1, 4), dice.randint(1, 3)
    gather = Gather(desk.ask, batch_max=batch_max, calls_max=calls_max)
    staying: list[tuple[str, asyncio.Task[str]]] = []
    leaving: list[asyncio.Task[str]] = []
    for _ in range(200):
        match dice.choice(("join", "join", "leave", "return", "pass")):
            case "join":
                lane, key = dice.choice((3, 5)), dice.choice("abcdef")
                [task] = submit(gather, key, lane=lane)
                staying.append((f"{key}@{lane}", task))
            case "leave" if staying:
                _, task = staying.pop(dice.randrange(len(staying)))
                task.cancel()
                leaving.append(task)
            case "return":
                ready = [i for i, future in enumerate(desk.open) if not future.done()]
                if ready:
                    desk.answer(dice.choice(ready))
            case _:
                await asyncio.sleep(0)
        assert sum(not future.done() for future in desk.open) <= calls_max
    while not all(task.done() for _, task in staying):
        await settle()
        for position, future in enumerate(desk.open):
            if not future.done():
                desk.answer(position)
    assert [task.result() for _, task in staying] == [answer for answer, _ in staying]
    await asyncio.gather(*leaving, return_exceptions=True)
    assert all(len(keys) == len(set(keys)) <= batch_max for _, keys in desk.calls)
    before = len(desk.calls)
    last = submit(gather, "z")
    await settle()
    assert desk.calls[before:] == [(5, ["z"])]
    desk.answer()
    assert await last[0] == "z@5"


@pytest.mark.usefixtures("lingers")
async def test_the_next_call_waits_for_those_just_answered() -> None:
    """Of a slow retriever both halves of its callers come to travel together, all of them."""
    sizes: list[int] = []
    begun = asyncio.Event()

    async def slow(_lane: int, keys: Sequence[str]) -> list[str]:
        sizes.append(len(keys))
        begun.set()
        await asyncio.sleep(0.06)
        return list(keys)

    gather: Gather[str] = Gather(slow, batch_max=32)

    async def caller(name: int, first: asyncio.Event) -> None:
        await first.wait()
        for turn in range(4):
            assert await gather.submit(5, f"{name} {turn}") == f"{name} {turn}"

    early, late = asyncio.Event(), asyncio.Event()
    tasks = [asyncio.create_task(caller(name, early if name < 4 else late)) for name in range(8)]
    early.set()
    await begun.wait()
    late.set()
    await asyncio.gather(*tasks)
    assert sizes == [4, 8, 8, 8, 4]


@pytest.mark.usefixtures("lingers")
async def test_a_full_call_does_not_linger() -> None:
    """When as many searches wait as a call may take, the call starts without a wait."""
    begun = asyncio.Event()
    calls: list[list[str]] = []

    async def slow(_lane: int, keys: Sequence[str]) -> list[str]:
        begun.set()
        calls.append(list(keys))
        await asyncio.sleep(0.06)
        return list(keys)

    gather: Gather[str] = Gather(slow, batch_max=2)
    first = asyncio.create_task(gather.submit(5, "a"))
    await begun.wait()
    others = [asyncio.create_task(gather.submit(5, key)) for key in "bcd"]
    await first
    await settle()  # far less than a linger
    assert len(calls) == 2
    await asyncio.gather(*others)
    assert len(calls) == 3


@pytest.mark.usefixtures("lingers")
async def test_closing_while_it_lingers_fails_what_waits() -> None:
    """Nobody is left waiting behind the end."""
    begun = asyncio.Event()

    async def slow(_lane: int, keys: Sequence[str]) -> list[str]:
        begun.set()
        await asyncio.sleep(0.06)
        return list(keys)

    gather: Gather[str] = Gather(slow, batch_max=32)
    first = asyncio.create_task(gather.submit(5, "a"))
    await begun.wait()
    second = asyncio.create_task(gather.submit(5, "b"))
    await first
    await gather.close()
    with pytest.raises(errors.ProviderFault):
        await second
    assert len(gather._waiting) == 0

"""Slots: eight in service, a bounded first-come room, no slot ever lost."""

from __future__ import annotations

import asyncio
import random

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.run.slots import Slots
from tests.fakes.raised import raises

FAR = 1e9


async def test_free_slot_is_taken_without_suspending() -> None:
    """Taking a free slot never yields to the loop, so it costs no timer and no reordering."""
    slots = Slots(2, 0)
    taking = slots.take(FAR)
    with pytest.raises(StopIteration):
        taking.send(None)
    assert slots.in_service == 1
    slots.give()


async def test_ninth_is_refused_at_once_without_a_room() -> None:
    """With ``waiting_max`` 0 the request over the last slot is refused, as the reference does."""
    slots = Slots(8, 0)
    for _ in range(8):
        await slots.take(FAR)
    with raises(errors.BUSY):
        await slots.take(FAR)
    assert (slots.in_service, slots.waiting, slots.refused) == (8, 0, 1)


async def test_waiters_are_served_in_order() -> None:
    """The room is first come, first served."""
    slots = Slots(1, 10)
    await slots.take(FAR)
    order: list[int] = []

    async def one(number: int) -> None:
        async with slots.hold(FAR):
            order.append(number)

    tasks = [asyncio.create_task(one(number)) for number in range(10)]
    await asyncio.sleep(0)
    assert slots.waiting == 10
    slots.give()
    await asyncio.gather(*tasks)
    assert order == list(range(10))
    assert slots.idle


async def test_room_is_bounded() -> None:
    """One request more than slots and room together is refused, and the others are served."""
    slots = Slots(1, 2)
    await slots.take(FAR)
    waiting = [asyncio.create_task(slots.take(FAR)) for _ in range(2)]
    await asyncio.sleep(0)
    with raises(errors.BUSY):
        await slots.take(FAR)
    slots.give()
    await waiting[0]
    slots.give()
    await waiting[1]
    slots.give()
    assert slots.idle


async def test_deadline_while_waiting_is_busy() -> None:
    """A waiter whose deadline passes is refused and leaves no trace."""
    slots = Slots(1, 5)
    await slots.take(FAR)
    with raises(errors.BUSY):
        await slots.take(asyncio.get_running_loop().time() - 1.0)
    assert slots.waiting == 0
    slots.give()
    await slots.take(FAR)
    assert slots.in_service == 1


async def test_no_slot_is_lost_under_random_cancellation() -> None:
    """After cancellations of random tasks at random moments, every slot is free again."""
    rng = random.Random(20261202)
    slots = Slots(8, 200)
    most = 0

    async def one() -> None:
        nonlocal most
        async with slots.hold(FAR):
            most = max(most, slots.in_service)
            await asyncio.sleep(0)

    for _ in range(50):
        tasks = [asyncio.create_task(one()) for _ in range(100)]
        for _ in range(rng.randrange(6)):
            await asyncio.sleep(0)
        for task in rng.sample(tasks, 40):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert most == 8
    assert slots.idle
    for _ in range(8):
        await slots.take(FAR)
    assert slots.in_service == 8


async def test_wait_idle_returns_when_the_last_one_leaves() -> None:
    """Draining waits for those in service and those waiting, and for no longer."""
    slots = Slots(1, 5)
    await slots.take(FAR)
    waiter = asyncio.create_task(slots.take(FAR))
    idle = asyncio.create_task(slots.wait_idle())
    await asyncio.sleep(0)
    slots.give()
    await waiter
    await asyncio.sleep(0)
    assert not idle.done()
    slots.give()
    await idle

"""A coroutine that is begun at once and bounded only where it waits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from smartsearch_sidecar.run.slots import run_until_deadline

FAR = 1e9


@pytest.mark.both_loops
async def test_what_need_not_wait_is_answered_without_a_timer() -> None:
    """Even a deadline long past does not stand against an answer that is there."""

    async def known() -> int:
        return 7

    assert await run_until_deadline(0.0, known()) == 7


@pytest.mark.both_loops
async def test_what_it_raises_at_once_is_raised() -> None:
    """A failure before the first wait is the caller's."""

    async def failing() -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await run_until_deadline(FAR, failing())


@pytest.mark.both_loops
async def test_what_waits_goes_on_to_its_end() -> None:
    """Waits of every kind, one after the other, in the task of who asked."""
    task = asyncio.current_task()
    ready = asyncio.get_running_loop().create_future()

    async def waiting() -> list[Any]:
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(ready.set_result, "set")
        word = await ready
        async with asyncio.timeout(60):
            await asyncio.sleep(0.001)
        return [word, asyncio.current_task() is task]

    assert await run_until_deadline(FAR, waiting()) == ["set", True]


@pytest.mark.both_loops
async def test_at_the_deadline_it_is_cancelled() -> None:
    """Who waits too long is cancelled where it waits, and the caller hears of the time alone."""
    seen: list[str] = []

    async def hanging() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    with pytest.raises(TimeoutError):
        await run_until_deadline(asyncio.get_running_loop().time() - 1, hanging())
    assert seen == ["cancelled"]


@pytest.mark.both_loops
async def test_a_cancelled_caller_cancels_it_and_lets_it_tidy_up() -> None:
    """What it awaits after its cancellation is still awaited."""
    begun = asyncio.Event()
    seen: list[str] = []

    async def hanging() -> None:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            seen.append("tidy")

    task = asyncio.create_task(run_until_deadline(FAR, hanging()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["tidy"]


async def test_one_that_takes_its_cancellation_for_an_answer_is_believed() -> None:
    """A coroutine may end well at its first wait's failure."""
    failed = asyncio.get_running_loop().create_future()

    async def forgiving() -> str:
        try:
            await failed
        except OSError:
            return "well"
        return "never"

    asyncio.get_running_loop().call_soon(failed.set_exception, OSError("gone"))
    assert await run_until_deadline(FAR, forgiving()) == "well"


def test_one_that_is_given_up_is_closed() -> None:
    """A loop that ends with it pending leaves nothing open."""
    seen: list[str] = []

    async def hanging() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            seen.append("closed")

    async def main() -> Any:
        asking = run_until_deadline(FAR, hanging())
        asking.send(None)
        return asking

    asyncio.run(main()).close()
    assert seen == ["closed"]

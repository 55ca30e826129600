"""``tests/fakes/until.py``: a wait ends, and says what it waited for."""

from __future__ import annotations

import pytest

from tests.fakes.until import until, wait_until


async def test_a_wait_returns_what_it_waited_for() -> None:
    """The first true value is returned, whether it was asked of a function or a coroutine."""
    counted = iter(range(10))

    async def third() -> int:
        return next(counted) // 3

    assert await until(third) == 1
    assert await until(lambda: next(counted) // 6) == 1
    assert wait_until(lambda: next(counted) // 9) == 1


async def test_a_wait_without_end_names_its_question() -> None:
    """At the bound the line that asked is named, with what the test wants to see beside it."""
    kept: list[str] = []
    with pytest.raises(
        AssertionError, match=r"0.01 s are over.*until.lambda: kept == .*test_until"
    ):
        await until(lambda: kept == [""], seconds=0.01)
    with pytest.raises(AssertionError, match=r"kept\.pop.* \(test_until\.py:\d+\) \['a log'\]"):
        wait_until(lambda: kept and kept.pop(), seconds=0.01, found=lambda: ["a log"])
    with pytest.raises(AssertionError, match="__len__"):
        await until(kept.__len__, seconds=0.01)


def test_what_a_question_raises_ends_the_wait() -> None:
    """A process that has died needs no further questions."""

    def died() -> bool:
        raise RuntimeError("exit code 3")

    with pytest.raises(RuntimeError, match="exit code 3"):
        wait_until(died)

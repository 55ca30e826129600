"""A bound in time around a question that seldom has to wait.

Apart from ``search/service.py``, its one user: a rule of time that is tested without a search.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any, TypeVar

Value = TypeVar("Value")


async def run_until_deadline(deadline: float, asking: Coroutine[Any, Any, Value]) -> Value:
    """What ``asking`` returns; ``deadline`` is on the loop's clock.

    It is run as far as it goes at once, and only what then has to wait gets a timer: for a question
    that is answered from memory the timer costs ten times the answer. Raises ``TimeoutError`` at
    the deadline, with ``asking`` cancelled.
    """
    try:
        awaited = asking.send(None)
    except StopIteration as end:
        answer: Value = end.value
        return answer
    async with asyncio.timeout_at(deadline):
        return await _rest(asking, awaited)


@coroutine
def _rest(asking: Coroutine[Any, Any, Value], awaited: Any) -> Generator[Any, Any, Value]:
    """The rest of a coroutine that has already said what it waits for."""
    try:
        yield awaited
    except GeneratorExit:
        asking.close()
        raise
    except BaseException as exc:  # noqa: BLE001 - passed on to whom it was meant for
        try:
            awaited = asking.throw(exc)
        except StopIteration as end:
            answer: Value = end.value
            return answer
        return (yield from _rest(asking, awaited))
    return (yield from asking.__await__())

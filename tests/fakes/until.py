"""How a test waits for a state that has no event: it asks again until the state is there.

``until`` gives the loop turns between two questions, ``wait_until`` blocks. Both end after a bound,
and say then what they waited for: a wait that reaches its bound is a finding, not slowness.
"""

from __future__ import annotations

import asyncio
import inspect
import linecache
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 10.0
PAUSE_SECONDS = 0.002


async def until(
    holds: Callable[[], Any],
    *,
    seconds: float = SECONDS,
    pause: float = PAUSE_SECONDS,
    found: Callable[[], object] = str,
) -> Any:
    """The first value of ``holds()`` that counts as true; an awaitable is awaited first.

    Args:
        holds: What is asked, again and again. What it raises ends the wait.
        seconds: The bound. The last question is asked after it.
        pause: Seconds between two questions; 0 is one turn of the loop.
        found: What the message says beside the question, a log for instance.

    Raises:
        AssertionError: The bound was reached; the message names the question and what was found.
    """
    end = time.monotonic() + seconds
    while True:
        over = time.monotonic() > end
        value = holds()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        assert not over, _message(holds, seconds, found)
        await asyncio.sleep(pause)


def wait_until(
    holds: Callable[[], Any],
    *,
    seconds: float = SECONDS,
    pause: float = PAUSE_SECONDS,
    found: Callable[[], object] = str,
) -> Any:
    """The same where no loop runs, or beside it in a thread."""
    end = time.monotonic() + seconds
    while True:
        over = time.monotonic() > end
        if value := holds():
            return value
        assert not over, _message(holds, seconds, found)
        time.sleep(pause)


def _message(holds: Callable[[], Any], seconds: float, found: Callable[[], object]) -> str:
    return f"{seconds:g} s are over, still not so: {_question(holds)} {found()}".rstrip()


def _question(holds: Callable[[], Any]) -> str:
    """A lambda by its line of source, everything else by its own name."""
    if getattr(holds, "__name__", "") != "<lambda>":
        return repr(holds)
    code = holds.__code__
    line = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return f"`{line}` ({Path(code.co_filename).name}:{code.co_firstlineno})"

"""How many files, functions and moves from file to file one request takes through the package.

A profile hook over package code, in every thread, around one ``/execute`` of a run without rewards
and one ``/reward/batch`` of 4 rows of 2 searches each, served by the real daemon with the fakes for
provider and helper. A move is a call (or a coroutine's resumption) in another file than the one
before it.

    python -m tests.benchmarks.hops [--pairs]
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import smartsearch_sidecar
from tests.fakes.rewarded import item, rewarded
from tests.fakes.served import served

PACKAGE: Final = str(Path(smartsearch_sidecar.__file__).parent) + "/"
ROWS: Final = 4
SEARCHES: Final = 2
QUIET_SECONDS: Final = 0.3  # the run's own timers fall silent before and after what is counted


class Hops:
    """What the hook saw while it was on."""

    def __init__(self) -> None:
        self.on = False
        self.files: set[str] = set()
        self.functions: set[tuple[str, str, int]] = set()
        self.pairs: Counter[tuple[str, str]] = Counter()
        self._last = ""

    def hook(self, frame: FrameType, event: str, _argument: Any) -> None:
        """For ``sys.setprofile``."""
        code = frame.f_code
        if not self.on or event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        file = code.co_filename.removeprefix(PACKAGE)
        self.files.add(file)
        self.functions.add((file, code.co_name, code.co_firstlineno))
        if self._last != file:
            self.pairs[self._last, file] += 1
        self._last = file

    async def count(self, name: str, work: Callable[[], Awaitable[None]], *, pairs: bool) -> None:
        """Counts ``work``, and prints what it came to."""
        await asyncio.sleep(QUIET_SECONDS)
        self.files, self.functions, self.pairs, self._last = set(), set(), Counter(), ""
        self.on = True
        await work()
        self.on = False
        moves = sum(self.pairs.values())
        print(f"{name}: {len(self.files)} files, {len(self.functions)} functions, {moves} moves")
        if pairs:
            for (before, after), times in self.pairs.most_common():
                print(f"  {times:4} {before or 'outside'} -> {after}")


async def measure(*, pairs: bool = False) -> None:
    """Counts both requests; each kind was served once before, so that nothing is loaded late."""
    hops = Hops()
    threading.setprofile(hops.hook)
    sys.setprofile(hops.hook)
    with tempfile.TemporaryDirectory() as folder:
        async with served(Path(folder) / "searches") as run:
            await run.execute("warm")

            async def execute() -> None:
                assert (await run.execute("a new query"))[0] == 200

            await hops.count("/execute", execute, pairs=pairs)
        async with rewarded(Path(folder)) as on:
            await on.batch(item(await on.rollout("warm")))
            queries = [[f"row {row}, {one}" for one in range(SEARCHES)] for row in range(ROWS)]
            rows = [item(await on.rollout(*texts)) for texts in queries]

            async def batch() -> None:
                assert (await on.batch(*rows))[0] == 200

            name = f"/reward/batch, {ROWS} rows of {SEARCHES} searches"
            await hops.count(name, batch, pairs=pairs)


if __name__ == "__main__":
    asyncio.run(measure(pairs="--pairs" in sys.argv))

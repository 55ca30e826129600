"""Progress for a person: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

PLAIN_SECONDS = 2.0
MIB = 1024 * 1024


@contextmanager
def verification(what: str = "verifying the index") -> Iterator[Callable[[int, int], None]]:
    """Yields ``progress(bytes_done, bytes_in_all)``, callable from another thread."""
    console = Console(stderr=True)
    if not console.is_terminal:
        show = plain_lines()
        yield lambda done, total: show(lambda: f"{what}: {done // MIB} of {total // MIB} MiB")
        return
    # Only for a person who looks: a daemon that a supervisor starts does not wait for it.
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(what, total=None)

    def update(done: int, total: int) -> None:
        if not bar.finished:  # a bar that is done does not come back
            bar.start()
        bar.update(task, completed=done, total=total)
        if done >= total:
            bar.stop()

    try:
        yield update
    finally:
        bar.stop()


def plain_lines(clock: Callable[[], float] = time.monotonic) -> Callable[[Callable[[], str]], None]:
    """Prints lines on standard error: at most one every ``PLAIN_SECONDS``, the others are left out.

    The result is called with a function that makes the line, so that no line is made in vain.
    """
    last = clock()

    def show(line: Callable[[], str]) -> None:
        nonlocal last
        now = clock()
        if now - last >= PLAIN_SECONDS:
            last = now
            print(line(), file=sys.stderr, flush=True)

    return show

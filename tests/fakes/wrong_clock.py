"""The command with a wall clock ten minutes behind: ``python -m tests.fakes.wrong_clock serve``."""

from __future__ import annotations

import datetime as dt
import time

from smartsearch_sidecar.commands import main
from smartsearch_sidecar.ledger import start, writer

OFF_SECONDS = -600.0


class Behind(dt.datetime):
    """The time of day, too early."""

    @classmethod
    def now(cls, tz: dt.tzinfo | None = None) -> Behind:
        right = dt.datetime.now(tz) + dt.timedelta(seconds=OFF_SECONDS)
        return cls.fromtimestamp(right.timestamp(), tz)


def turn_back() -> None:
    """Every way this process has to ask for the time of day."""
    right = time.time
    time.time = lambda: right() + OFF_SECONDS
    for module in (start, writer):
        module.datetime = Behind  # type: ignore[attr-defined]


if __name__ == "__main__":
    turn_back()
    main()

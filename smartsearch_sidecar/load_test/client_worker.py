"""One rank of the pinned rollout, by its shape: eight threads, a new connection a call, ten seconds
of patience. ``python -m smartsearch_sidecar.load_test.client_worker`` is one process of it.

On standard input: one line of JSON (``Part``), then, once it has answered ``ready``, an empty line
to begin. On standard output: ``ready``, then a line a call, ``seconds outcome``.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Self

from smartsearch_sidecar import errors
from smartsearch_sidecar.client import Client
from smartsearch_sidecar.contract.execute import DECLINED_RESULT
from smartsearch_sidecar.load_test.shape import (
    ANSWERED,
    CLIENT_SECONDS,
    DECLINED,
    LOST,
    THREADS_PER_RANK,
    TIMEOUT,
)

_EARLY = 0.1  # a timeout is noticed a little before or after the second it is set for


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank plays. ``sandbox_url`` holds a capability: it travels by standard input."""

    sandbox_url: str
    environment: str
    questions: list[str]
    rank: int
    ranks: int
    seconds: float

    def line(self) -> str:
        """The line of standard input."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def read(cls, line: str) -> Self:
        """The part of a line."""
        return cls(**json.loads(line))


def ask(client: Client, question: str, environment: str) -> tuple[str, float]:
    """One call as the rollout makes it; its outcome and seconds. Never raises for a failed call."""
    began = time.monotonic()
    try:
        answer = client.execute(question, environment)
    except errors.Unreachable:
        took = time.monotonic() - began
        return (TIMEOUT if took > CLIENT_SECONDS - _EARLY else LOST), took
    took = time.monotonic() - began
    value = answer.value
    if answer.status != 200:
        code = value.get("error", {}).get("code") if isinstance(value, dict) else None
        return f"{answer.status} {code}", took
    return (DECLINED if value.get("result") == DECLINED_RESULT else ANSWERED), took


def questions_of(part: Part, thread: int) -> Iterator[str]:
    """Endless; no two threads at the same place, and a question that comes again has its lap beside
    it, so that the cache answers no more than it would in a run.
    """
    total = len(part.questions)
    step = part.ranks * THREADS_PER_RANK
    place = part.rank * THREADS_PER_RANK + thread
    while True:
        lap, at = divmod(place, total)
        yield f"{part.questions[at]} {lap}" if lap else part.questions[at]
        place += step


def play(part: Part, tell: Callable[[str, float], None]) -> None:
    """Eight threads until the time is over; the calls under way then end."""
    until = time.monotonic() + part.seconds
    client = Client(part.sandbox_url, timeout_seconds=CLIENT_SECONDS)

    def run(thread: int) -> None:
        questions = questions_of(part, thread)
        while time.monotonic() < until:
            tell(*ask(client, next(questions), part.environment))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(THREADS_PER_RANK)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """The process."""
    part = Part.read(sys.stdin.readline())
    _say("ready")
    sys.stdin.readline()
    one_at_a_time = threading.Lock()

    def tell(outcome: str, seconds: float) -> None:
        with one_at_a_time:
            _say(f"{seconds:.6f} {outcome}")

    play(part, tell)


if __name__ == "__main__":
    main()

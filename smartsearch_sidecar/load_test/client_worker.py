"""One rank of the pinned rollout: eight threads, a new connection for each call, a timeout of 10 s.

``python -m smartsearch_sidecar.load_test.client_worker`` runs it in a process of its own. Standard
input: one line of JSON (``Workload``), then an empty line that starts it. Standard output:
``ready`` before that empty line is read, then one line for each call, ``seconds outcome``.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Final, Self

from smartsearch_sidecar import errors
from smartsearch_sidecar.client import Client
from smartsearch_sidecar.contract.execute import DECLINED_RESULT

THREADS_PER_RANK: Final = 8
"""Calls a rank has out at once; each opens a connection of its own."""
CLIENT_SECONDS: Final = 10.0
"""The timeout of one call. After it the client leaves, and the rollout reads that it timed out."""

ANSWERED: Final = "answered"
DECLINED: Final = "declined"
"""Outcomes that are no failure. Every other one is a status and code, ``timeout`` or ``lost``."""
TIMEOUT: Final = "timeout"
LOST: Final = "lost"

STOCK_QUESTIONS: Final = (
    "Who wrote the first history of the world?",
    "In which city was the composer born?",
    "When did the war end?",
    "What is the capital of the largest country?",
    "Which river flows through the city?",
    "Who discovered the element?",
    "What year was the film released?",
    "Which team won the championship?",
)
"""Plain questions, for where no others are known: an English encyclopedia has their words."""

_EARLY = 0.1  # seconds: a timeout fires a little before or after the moment it is set for


@dataclass(frozen=True, slots=True)
class Workload:
    """What one rank asks, and for how long.

    Attributes:
        sandbox_url: holds a capability, so a workload travels by standard input, never as an
            argument.
        environment: the ``env`` text of each call.
        questions: asked in turn; a question that comes again has the number of its lap beside it.
        rank: the number of this rank, from 0.
        ranks: how many there are.
        seconds: for how long new calls are made.
    """

    sandbox_url: str
    environment: str
    questions: list[str]
    rank: int
    ranks: int
    seconds: float

    def to_line(self) -> str:
        """The line of standard input."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Self:
        """The workload of a line of standard input."""
        return cls(**json.loads(line))


def ask(client: Client, question: str, environment: str) -> tuple[str, float]:
    """One call as the rollout makes it: its outcome and seconds. A failed call does not raise."""
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


def questions_of(workload: Workload, thread: int) -> Iterator[str]:
    """The questions of one thread, without end.

    No two threads of all ranks ask the same text. A question that comes again has the number of its
    lap beside it: otherwise the cache would answer more than it does in a run.
    """
    total = len(workload.questions)
    step = workload.ranks * THREADS_PER_RANK
    place = workload.rank * THREADS_PER_RANK + thread
    while True:
        lap, at = divmod(place, total)
        yield f"{workload.questions[at]} {lap}" if lap else workload.questions[at]
        place += step


def run(workload: Workload, on_call: Callable[[str, float], None]) -> None:
    """Calls from eight threads until the time is over, and waits for the calls under way.

    Args:
        workload: what is asked.
        on_call: gets the outcome and the seconds of each call, in the thread that made it.
    """
    until = time.monotonic() + workload.seconds
    client = Client(workload.sandbox_url, timeout_seconds=CLIENT_SECONDS)

    def call_until_over(thread: int) -> None:
        questions = questions_of(workload, thread)
        while time.monotonic() < until:
            on_call(*ask(client, next(questions), workload.environment))

    threads = [threading.Thread(target=call_until_over, args=(i,)) for i in range(THREADS_PER_RANK)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Runs the workload that standard input names."""
    workload = Workload.from_line(sys.stdin.readline())
    _print("ready")
    sys.stdin.readline()
    printing = threading.Lock()

    def on_call(outcome: str, seconds: float) -> None:
        with printing:  # a line is never cut by another thread's
            _print(f"{seconds:.6f} {outcome}")

    run(workload, on_call)


if __name__ == "__main__":
    main()

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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

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
    """What rank number ``rank`` (from 0, of ``ranks``) asks in turn, and for how many seconds.

    ``sandbox_url`` holds a capability, so a workload is never an argument of a process.
    """

    sandbox_url: str
    environment: str
    questions: list[str]
    rank: int
    ranks: int
    seconds: float


def ask(client: Client, question: str, environment: str) -> tuple[str, float]:
    """One call as the rollout makes it: its outcome and seconds. A failed call does not raise."""
    began = time.monotonic()
    try:
        answer = client.execute(question, environment)
    except errors.Unreachable:
        took = time.monotonic() - began
        return ("timeout" if took > CLIENT_SECONDS - _EARLY else "lost"), took
    took = time.monotonic() - began
    if answer.status != 200:
        value = answer.value if isinstance(answer.value, dict) else {}
        return f"{answer.status} {value.get('error', {}).get('code')}", took
    return (DECLINED if answer.value.get("result") == DECLINED_RESULT else ANSWERED), took


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


def main() -> None:
    """Runs the workload of standard input, until its time is over and its last call has ended."""
    workload = Workload(**json.loads(sys.stdin.readline()))
    print("ready", flush=True)
    sys.stdin.readline()
    until = time.monotonic() + workload.seconds
    client = Client(workload.sandbox_url, timeout_seconds=CLIENT_SECONDS)
    printing = threading.Lock()

    def call_until_over(thread: int) -> None:
        questions = questions_of(workload, thread)
        while time.monotonic() < until:
            outcome, seconds = ask(client, next(questions), workload.environment)
            with printing:  # a line is never cut by another thread's
                print(f"{seconds:.6f} {outcome}", flush=True)

    with ThreadPoolExecutor(THREADS_PER_RANK) as threads:
        # The list raises what a thread raised.
        list(threads.map(call_until_over, range(THREADS_PER_RANK)))


if __name__ == "__main__":
    main()

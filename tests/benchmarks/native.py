"""One rank of the pinned rollout for a while: ``native URL QUERIES SECONDS RANK``.

Eight threads, ``requests``, a new connection a call, ten seconds of patience (the wire behaviour is
``tests/fakes/native_client.py``). QUERIES is a file of one query a line; each call asks another
one. Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.benchmarks.load import NUMBER
from tests.fakes.native_client import ask

THREADS = 8


def thread(url: str, queries: list[str], name: str, until: float) -> tuple[list[float], list[str]]:
    """Asks until the time is up, and returns milliseconds of each answer and the error texts."""
    took: list[float] = []
    errors: list[str] = []
    asked = 0
    while time.monotonic() < until:
        query = queries[asked % len(queries)].replace(NUMBER, f"{name}x{asked}")
        asked += 1
        began = time.monotonic()
        text = ask(url, query)
        took.append((time.monotonic() - began) * 1000)
        if not text.startswith("result: \n"):
            errors.append(text)
    return took, errors


def main() -> None:
    url, queries, seconds, rank = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    lines = json.loads(queries.read_text())
    began = time.monotonic()
    until = began + seconds
    start = threading.Barrier(THREADS)

    def one(number: int) -> tuple[list[float], list[str]]:
        start.wait()
        turned = lines[number::THREADS] or lines
        return thread(url, turned, f"r{rank}t{number}", until)

    with ThreadPoolExecutor(THREADS) as pool:
        parts = list(pool.map(one, range(THREADS)))
    said: dict[str, Any] = {
        "seconds": time.monotonic() - began,
        "milliseconds": [round(value, 3) for took, _ in parts for value in took],
        "errors": [text for _, errors in parts for text in errors],
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()

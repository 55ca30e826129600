"""One rank of the pinned rollout, by its wire behaviour: eight threads, ``requests``, a new
connection a call, ten seconds of patience, and the text it would put into the rollout.

Run as ``python -m tests.fakes.native_client SANDBOX_URL RANK TURNS``; prints a JSON list
of [query, text].
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import requests

ENVIRONMENT = "agentinputlab:smartsearch-fixed-wikipedia-v1"
WRONG = ["", " \n", "word " * 1800, "東" * 3000, "a </search> b", "\ud800 lone"]


def query_for(rank: int, turn: int) -> str:
    """Every fifth query is one the policy gets wrong, each kind in turn."""
    if turn % 5 == 4:
        return WRONG[(rank + turn // 5) % len(WRONG)]
    return f"rank {rank} turn {turn}"


def ask(sandbox_url: str, query: str) -> str:
    """The text the rollout gets: an error is text as well, nothing is ever raised."""
    call = f"wikipedia_search(query={query!r}, top_n=5)"
    try:
        answer = requests.post(
            f"{sandbox_url}/execute", json={"env": ENVIRONMENT, "call": call}, timeout=10
        )
        if answer.status_code != 200:
            return f"error: {answer.status_code}"
        value = answer.json()
        return "".join(
            f"{key}: \n{value[key]}\n" for key in ("result", "output", "error") if value[key]
        ).strip()
    except requests.exceptions.Timeout:
        return "error: execution timed out"
    except requests.exceptions.RequestException as exc:
        return str(exc)


def main() -> None:
    sandbox_url, rank, turns = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    queries = [query_for(rank, turn) for turn in range(turns)]
    with ThreadPoolExecutor(max_workers=8) as pool:
        texts = list(pool.map(lambda query: ask(sandbox_url, query), queries))
    print(json.dumps(list(zip(queries, texts, strict=True))))


if __name__ == "__main__":
    main()

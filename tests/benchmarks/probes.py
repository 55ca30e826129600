"""Measurements without a server, each in a process of its own: ``probes NAME WORDS``; prints JSON.

- ``search HOW INDEX QUERIES SECONDS THREADS``: searches of an index in this process. ``plain`` asks
  tantivy itself, through its own query language and nothing around it; ``ours`` the package's
  provider (words, stop words, bounds), also without anything around it.
- ``score FOLDER ROWS ROUNDS MILLISECONDS``: the reference scores rollouts row after row.
- ``verify RUN``: the whole verification of a run's ledger.
"""

from __future__ import annotations

import importlib
import json
import re
import resource
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tantivy

from smartsearch_sidecar.ledger.verify import verify as verify_run
from smartsearch_sidecar.retrieval.bm25.analysis import CONTENTS, ID, TEXT, TOKENIZER, analyzer
from smartsearch_sidecar.retrieval.bm25.provider import verify_and_open
from tests.fakes import rollouts
from tests.fakes.provider import documents_for
from tests.fakes.rewarded import QUESTION, SOURCE, SOURCE_SHA256, TRUTH

MODEL_SHA256 = "a" * 64
TOP_N = 5


# --- search ---------------------------------------------------------------------------------------


def plain_search(index: str) -> Callable[[str], Any]:
    """tantivy's own way: its query language over the question's words, five stored passages."""
    opened = tantivy.Index.open(index)
    opened.register_tokenizer(TOKENIZER, analyzer())
    searcher = opened.searcher()

    def search(question: str) -> list[tuple[bytes, bytes]]:
        words = " ".join(re.findall(r"\w+", question.lower()))
        query = opened.parse_query(words, [TEXT])
        hits = searcher.search(query, TOP_N, count=False).hits
        stored = [searcher.doc(address) for _, address in hits]
        return [(document[ID][0], document[CONTENTS][0]) for document in stored]

    return search


def search(how: str, index: str, queries: str, seconds: str, threads: str) -> dict[str, Any]:
    if how == "plain":
        ask = plain_search(index)
    else:
        ours = verify_and_open(Path(index))
        ask = lambda question: ours.search(question, TOP_N)  # noqa: E731 - the other branch's twin
    lines = json.loads(Path(queries).read_text())
    count, until = int(threads), time.monotonic() + float(seconds)
    start = threading.Barrier(count)

    def one(number: int) -> list[float]:
        start.wait()
        took: list[float] = []
        at = number
        while (began := time.monotonic()) < until:
            ask(lines[at % len(lines)])
            at += count
            took.append(time.monotonic() - began)
        return took

    began = time.monotonic()
    with ThreadPoolExecutor(count) as pool:
        took = sorted(value for part in pool.map(one, range(count)) for value in part)
    lasted = time.monotonic() - began
    return {
        "answers": len(took),
        "per_second": len(took) / lasted,
        "p50_ms": took[len(took) // 2] * 1000,
        "p99_ms": took[len(took) * 99 // 100] * 1000,
        "cpu_us": time.process_time() / len(took) * 1e6,
    }


# --- score ----------------------------------------------------------------------------------------


def solution(row: int, rounds: int) -> str:
    """A rollout of so many rounds, whose passages no other row shares."""
    texts = [
        (query, "\n\n".join(str(item["contents"]) for item in documents_for(query)))
        for query in (f"row {row} round {number}" for number in range(rounds))
    ]
    turns = [rollouts.answered(query, text) for query, text in texts]
    return rollouts.rollout(QUESTION, turns, rollouts.final("Paris"))


def score(folder: str, rows: str, rounds: str, milliseconds: str) -> dict[str, Any]:
    tools: Any = importlib.import_module("agentinputlab.recipes.smartsearch_grpo_tools")
    teacher: Any = importlib.import_module("agentinputlab.recipes.smartsearch_teacher")
    checkout = Path(folder) / "checkout"
    source = checkout / "src/verl/utils/reward_score/re_call.py"
    source.parent.mkdir(parents=True)
    source.write_bytes(SOURCE.read_bytes())
    # As tests/parity does: the scorer of our own writing stands where the pinned one would.
    tools._REWARD_SHA = SOURCE_SHA256
    tools.verify_smartsearch_sampling_source = lambda root: (Path(root), {"root": "x"})
    calls = 0

    def generate(_prompt: str, **_options: Any) -> Any:
        nonlocal calls
        calls += 1
        time.sleep(int(milliseconds) / 1000)  # the helper's own time, and nothing for the way there
        return teacher.SmartSearchTeacherCompletion("<answer> 1 ", 10, 10, MODEL_SHA256)

    scorer = tools.SmartSearchNativeGRPOReward(
        generate,
        checkout=checkout,
        references={QUESTION: TRUTH},
        model_fingerprint_sha256=MODEL_SHA256,
        controls=teacher.SmartSearchTeacherControls(
            max_model_calls=100_000, max_total_output_tokens=300_000_000, max_rollout_rows=10_000
        ),
        output_root=Path(folder) / "reference",
    )
    solutions = [solution(row, int(rounds)) for row in range(int(rows))]
    began = time.monotonic()
    for text in solutions:
        scorer(None, text, TRUTH)
    return {"seconds": time.monotonic() - began, "helper_calls": calls}


# --- verify ---------------------------------------------------------------------------------------


def verify(run: str) -> dict[str, Any]:
    size = sum(path.stat().st_size for path in (Path(run) / "journal").iterdir())
    began = time.monotonic()
    found = verify_run(Path(run))
    took = time.monotonic() - began
    if not found.ok:
        raise SystemExit("the ledger does not verify")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    speed = size / took / 1e6
    return {"mb_per_second": speed, "seconds": took, "journal_mb": size / 1e6, "peak_mib": peak}


def main() -> None:
    probes: dict[str, Callable[..., dict[str, Any]]] = {
        "search": search,
        "score": score,
        "verify": verify,
    }
    print(json.dumps(probes[sys.argv[1]](*sys.argv[2:])))


if __name__ == "__main__":
    main()

"""Scenarios of ``/execute``: what a rollout meets, beside what it would meet elsewhere."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from smartsearch_sidecar.client import Client
from tests.benchmarks import corpora, load
from tests.benchmarks.load import NUMBER
from tests.benchmarks.processes import (
    UNDER_LOAD,
    Target,
    end,
    free_port,
    listens,
    made_up,
    ours,
    peer,
    probe,
    wait_started,
)
from tests.benchmarks.results import Case, Goal, Metrics, Scenario
from tests.benchmarks.settings import Settings, Unmeasured
from tests.fakes.process import environment

SHOWN = ("per_second", "p50_ms", "p99_ms", "cpu_us", "most_waiting", "refused", "broken")
REFERENCE_CLIENTS = 4  # at eight it refuses one, and is dead
SLOTS, SLOW_MS = 8, 50
RETRIEVER_MS = 30
GROUP = 8  # rollouts of one question

Opened = Callable[[Path], Any]


def served(
    settings: Settings, opened: Opened, clients: int, *, real: bool = False, **load_keys: Any
) -> Metrics:
    """One server, fresh, under one load."""
    with settings.scratch() as folder, opened(folder) as target:
        bodies = corpora.question_bodies(folder) if real else corpora.plain_bodies(folder)
        keys = {"seconds": settings.seconds, **load_keys}
        found = load.wrk(target, bodies, clients=clients, **keys)
        return {**found, **load.seen_by_ours(target)}


def instant(settings: Settings) -> Scenario:
    """A provider that costs nothing, so that everything else is seen."""
    cases = []
    for clients in settings.clients:
        own = partial(served, settings, lambda folder: made_up(folder, 0), clients)
        bare = partial(served, settings, lambda folder: peer(folder, "bare"), clients)
        cases.append(Case(f"ours, {clients}", own, "ours", clients))
        cases.append(Case(f"bare aiohttp, {clients}", bare, "bare aiohttp", clients))
    cases.append(_reference(settings, 0))
    few, most = settings.few, max(settings.clients)
    return Scenario(
        "instant",
        "/execute, instant provider, ledger synced, every query another one",
        SHOWN,
        tuple(cases),
        (
            Goal(f"instant, {few}, over the reference at 4", f"ours, {few}", "per_second",
                 "reference, 4", least=6),
            *(
                Goal(f"instant, {clients}, over a bare handler", f"ours, {clients}", "per_second",
                     f"bare aiohttp, {clients}", least=0.3 if clients == few else None)
                for clients in settings.clients
            ),
            Goal(f"instant, {most} keep-alive: p99 ms", f"ours, {most}", "p99_ms", most=9000),
            Goal(f"instant, {most} keep-alive: refused", f"ours, {most}", "refused", most=0),
        ),
    )  # fmt: skip


def _reference(settings: Settings, milliseconds: int, index: Path | None = None) -> Case:
    words = (str(milliseconds), *([] if index is None else [str(index)]))
    opened = partial(_peer, "reference", words)
    run = partial(served, settings, opened, REFERENCE_CLIENTS, real=index is not None)
    return Case("reference, 4", run, "reference", REFERENCE_CLIENTS)


def _peer(kind: str, words: tuple[str, ...], folder: Path) -> Any:
    return peer(folder, kind, *words)


def slow(settings: Settings) -> Scenario:
    """50 ms a search in eight slots: 160 answers a second is all there is."""
    cases = []
    for clients in settings.clients:
        # Long enough that every client is answered more than once.
        seconds = max(settings.seconds, 2.5 * clients * SLOW_MS / 1000 / SLOTS)
        run = partial(
            served, settings, lambda folder: made_up(folder, SLOW_MS), clients, seconds=seconds
        )
        cases.append(Case(f"ours, {clients}", run, "ours", clients))
    cases.append(_reference(settings, SLOW_MS))
    few = settings.few
    what = f"50 ms, {few}, over"
    goals = [Goal(f"{what} the reference at 4", f"ours, {few}", "per_second", "reference, 4",
                  least=7.5)]  # fmt: skip
    if settings.checkout is not None:
        run = partial(_sandboxed, settings, few)
        cases.append(Case(f"pinned sandbox, {few}", run, "pinned sandbox", few))
        goals.append(Goal(f"{what} the pinned sandbox", f"ours, {few}", "per_second",
                          f"pinned sandbox, {few}", least=7.5))  # fmt: skip
    title = "/execute, 50 ms provider, 8 slots, ledger synced"
    return Scenario("slow", title, SHOWN, tuple(cases), tuple(goals))


# --- the pinned trainer's own sandbox -------------------------------------------------------------


def _sandboxed(settings: Settings, clients: int) -> Metrics:
    with settings.scratch() as folder, peer(folder, "retriever", str(SLOW_MS)) as behind:
        env = sandbox_environment(_checkout(settings), behind.url)
        call = f"wikipedia_search(query='question {NUMBER}', top_n=5)"
        bodies = folder / "sandbox.jsonl"
        bodies.write_text(json.dumps({"env": env, "call": call}) + "\n")
        with sandbox(settings, folder) as target:
            # It says 200 to everything: without this its failures would be measured.
            asked = json.loads(bodies.read_text())
            answer = Client(target.url.removesuffix("/execute")).call("POST", "/execute", asked)
            if not answer.value.get("result"):
                raise Unmeasured(f"the sandbox found nothing: {answer.value.get('error')}")
            return load.wrk(target, bodies, clients=clients, seconds=settings.seconds)


def _checkout(settings: Settings) -> Path:
    if settings.checkout is None:
        raise Unmeasured("needs the pinned trainer: --checkout DIR")
    return settings.checkout


@contextmanager
def sandbox(settings: Settings, folder: Path) -> Iterator[Target]:
    """The checkout's sandbox, unmodified, in an interpreter that has what it imports."""
    script = _checkout(settings) / "scripts" / "serving" / "sandbox.py"
    needed = [settings.sandbox_python, "-c", "import fastapi, requests, uvicorn"]
    if subprocess.run(needed, capture_output=True, check=False).returncode:
        raise Unmeasured("the sandbox needs fastapi, uvicorn and requests: --sandbox-python PYTHON")
    port = free_port()
    with (folder / "sandbox.log").open("ab") as log:
        process = subprocess.Popen(
            [settings.sandbox_python, str(script), "--port", str(port)],
            env=environment(),
            cwd=folder,
            stdout=log,
            stderr=log,
        )
    try:
        wait_started(lambda: listens(port), process, "the sandbox")
        yield Target(f"http://127.0.0.1:{port}/execute", process.pid)
    finally:
        end(process)


def sandbox_environment(checkout: Path, retriever_url: str) -> str:
    """The environment the checkout's datasets carry, its address filled in; it is read there."""
    for path in sorted((checkout / "data").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and "def wikipedia_search(" in text:
                return re.sub(r"<[\w-]+>", retriever_url, text)
    raise Unmeasured("no environment was found in the checkout's data folder")


# --- the embedded index ---------------------------------------------------------------------------


def bm25(settings: Settings) -> Scenario:
    """The real articles."""
    return _embedded(settings, "bm25", "10,033 real articles", corpora.vital_index())


def bm25_large(settings: Settings) -> Scenario:
    """A corpus that does not fit a processor's caches."""
    index = corpora.synthetic_index(settings.passages)
    return _embedded(settings, "bm25-large", f"{settings.passages:,} synthetic passages", index)


def _bm25_keys(index: Path) -> dict[str, Any]:
    return {"retrieval__provider": "bm25", "retrieval__bm25__index": str(index), **UNDER_LOAD}


def _embedded(settings: Settings, name: str, corpus: str, index: Path) -> Scenario:
    keys = _bm25_keys(index)
    cases = [
        Case(
            f"ours, {clients}",
            partial(served, settings, lambda folder: ours(folder, **keys), clients, real=True),
            "ours",
            clients,
        )
        for clients in settings.clients
    ]
    alone = (("plain", "plain tantivy", 1), ("plain", "plain tantivy", SLOTS))
    for how, label, threads in (*alone, ("ours", "our search alone", SLOTS)):
        run = partial(_in_process, settings, how, index, threads)
        cases.append(Case(f"{label}, {threads} threads", run, label, threads))
    cases.append(_reference(settings, 0, index))
    few, most = settings.few, max(settings.clients)
    what = f"{name}, {few}, over"
    return Scenario(
        name,
        f"/execute, embedded BM25, {corpus}, ledger synced, every query another one",
        SHOWN,
        tuple(cases),
        (
            Goal(f"{what} the reference at 4 with the same search", f"ours, {few}", "per_second",
                 "reference, 4"),
            Goal(f"{what} plain tantivy in 8 threads", f"ours, {few}", "per_second",
                 "plain tantivy, 8 threads"),
            Goal(f"{what} our search alone in 8 threads", f"ours, {few}", "per_second",
                 "our search alone, 8 threads"),
            Goal(f"{name}, {most} keep-alive: p99 ms", f"ours, {most}", "p99_ms", most=9000),
            Goal(f"{name}, {most} keep-alive: refused", f"ours, {most}", "refused", most=0),
        ),
    )  # fmt: skip


def _in_process(settings: Settings, how: str, index: Path, threads: int) -> Metrics:
    with settings.scratch() as folder:
        queries = corpora.question_list(folder)
        words = (how, str(index), str(queries), f"{settings.seconds:g}", str(threads))
        return probe(folder, "search", *words)


def repeated(settings: Settings) -> Scenario:
    """Groups of rollouts that ask alike, as those of one question do."""
    index = corpora.synthetic_index(settings.passages)
    keys = _bm25_keys(index)
    clients = min(64, max(settings.clients))

    def run(group: int, **more: Any) -> Metrics:
        def opened(folder: Path) -> Any:
            return ours(folder, **keys, **more)

        return served(settings, opened, clients, real=True, group=group)

    return Scenario(
        "repeated",
        f"/execute, groups of {GROUP} asking alike, {settings.passages:,} passages, "
        f"{clients} clients",
        ("per_second", "repeats", "p50_ms", "p99_ms", "cpu_us", "refused"),
        (
            Case("every query another one", partial(run, 1)),
            Case(f"groups of {GROUP}", partial(run, GROUP)),
            Case(f"groups of {GROUP}, no cache", partial(run, GROUP, retrieval__cache_mib=0)),
        ),
        (
            Goal(f"repeated: groups of {GROUP} over distinct", f"groups of {GROUP}", "per_second",
                 "every query another one"),
            Goal("repeated: share of hits and shared", f"groups of {GROUP}", "repeats"),
        ),
    )  # fmt: skip


# --- the native client, and many that stay --------------------------------------------------------


def native(settings: Settings) -> Scenario:
    """64 threads of the pinned rollout's client, the latch as it is in training."""
    index = corpora.vital_index()
    ranks = load.RANKS if not settings.quick else 2

    def run() -> Metrics:
        keys = {"retrieval__provider": "bm25", "retrieval__bm25__index": str(index)}
        with (
            settings.scratch() as folder,
            ours(folder, execute__max_calls=1_000_000_000, **keys) as target,
        ):
            queries = corpora.question_list(folder)
            return load.native(target, folder, queries, settings.native_seconds, ranks)

    case = f"{ranks * 8} threads, {settings.native_seconds:g} s"
    zero = [
        Goal(f"native client, {case}: {what}", case, what, most=0)
        for what in ("lost", "refused", "latched")
    ]
    return Scenario(
        "native",
        "/execute, the native client (a new connection a call), embedded BM25",
        ("answers", "per_second", "p50_ms", "p99_ms", "most_waiting", "lost", "refused", "latched"),
        (Case(case, run),),
        tuple(zero),
        once=True,
    )


def keepalive(settings: Settings) -> Scenario:
    """The fullest house: what waits must be answered before its deadline."""
    keys = _bm25_keys(corpora.vital_index())
    clients = max(settings.clients)
    seconds = settings.seconds * 2
    cases = {
        "embedded BM25": lambda folder: ours(folder, **keys),
        "20 ms provider": lambda folder: made_up(folder, 20),
    }
    return Scenario(
        "keepalive",
        f"/execute, {clients} keep-alive clients",
        SHOWN,
        tuple(
            Case(name, partial(served, settings, opened, clients, real=True, seconds=seconds))
            for name, opened in cases.items()
        ),
        tuple(
            Goal(f"{clients} keep-alive, {name}: {what}", name, metric, most=bound)
            for name in cases
            for what, metric, bound in (("p99 ms", "p99_ms", 9000), ("refused", "refused", 0))
        ),
    )


# --- a retriever service that serves one call at a time -------------------------------------------


def flashrag(settings: Settings) -> Scenario:
    """64 clients before a retriever that answers one call at a time."""
    clients = min(64, max(settings.clients))
    many = f"ours, {clients}, every query another one"
    alike = f"ours, {clients}, groups of {GROUP}"
    alone = "the retriever, one search a call"
    return Scenario(
        "flashrag",
        f"/execute, flashrag provider, retriever of {RETRIEVER_MS} ms, one call at a time",
        ("per_second", "per_call", "repeats", "p50_ms", "p99_ms", "cpu_us", "refused"),
        (
            Case(many, partial(_flashrag, settings, clients, 1)),
            Case(alike, partial(_flashrag, settings, clients, GROUP)),
            Case(alone, partial(_retriever_alone, settings, clients)),
        ),
        (
            Goal("flashrag: searches a call, every query another", many, "per_call", least=4),
            Goal("flashrag: searches a call, groups ask alike", alike, "per_call", least=4),
            Goal("flashrag: over the retriever alone", many, "per_second", alone),
        ),
    )


def _flashrag(settings: Settings, clients: int, group: int) -> Metrics:
    with settings.scratch() as folder:
        with peer(folder, "retriever", str(RETRIEVER_MS)) as behind:
            keys: Mapping[str, Any] = {
                "retrieval__provider": "flashrag",
                "retrieval__flashrag__url": behind.url,
                "retrieval__flashrag__corpus_sha256": "c" * 64,
                "retrieval__flashrag__index_sha256": "1" * 64,
                **UNDER_LOAD,
            }
            with ours(folder, **keys) as target:
                bodies = corpora.plain_bodies(folder)
                found = load.wrk(
                    target, bodies, clients=clients, seconds=settings.seconds, group=group
                )
                found |= load.seen_by_ours(target)
        asked = json.loads((folder / "retriever.json.asked").read_text())
        return {**found, "per_call": found["recorded"] / asked["calls"]}


def _retriever_alone(settings: Settings, clients: int) -> Metrics:
    with settings.scratch() as folder, peer(folder, "retriever", str(RETRIEVER_MS)) as behind:
        bodies = folder / "direct.jsonl"
        bodies.write_text(json.dumps({"query": f"question {NUMBER}", "top_n": 5}) + "\n")
        direct = Target(f"{behind.url}/search", behind.pid)
        found = load.wrk(direct, bodies, clients=clients, seconds=settings.seconds)
        return {**found, "per_call": 1.0}

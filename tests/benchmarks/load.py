"""Load on a server, and what came of it: by ``wrk``, and by the pinned rollout's own shape."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.benchmarks.processes import Target
from tests.benchmarks.results import Metrics
from tests.benchmarks.settings import Unmeasured
from tests.fakes.process import environment
from tests.fakes.served import native_body

SCRIPT = Path(__file__).with_name("load.lua")
NUMBER = "#N#"  # the script puts a number of its own there: every query another one
PATIENCE_SECONDS = (
    12  # over the daemon's deadline: what is late is refused by it, not given up here
)
RANKS = 8


def write_bodies(path: Path, queries: Iterable[str]) -> Path:
    """The native client's body for each query, a line each."""
    path.write_text("".join(json.dumps(native_body(query)) + "\n" for query in queries))
    return path


def wrk(
    target: Target,
    bodies: Path,
    *,
    clients: int,
    seconds: float,
    group: int = 1,
    limit: int = 0,
) -> Metrics:
    """One load of keep-alive clients: rates, latencies, refusals, and the server's CPU for each.

    Every query is another one, or the same for ``group`` requests in a row. ``limit`` ends it after
    so many answers.
    """
    words = ["wrk", "-t1", f"-c{clients}", f"-d{max(1, round(seconds))}s"]
    words += [f"--timeout={PATIENCE_SECONDS}s", "-s", str(SCRIPT), target.url]
    words += ["--", str(bodies), str(group), str(limit)]
    before = target.cpu()
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    after = target.cpu()
    line = next((one for one in done.stdout.splitlines() if one.startswith("JSON ")), None)
    if line is None:
        raise Unmeasured(f"wrk said nothing: {(done.stderr or done.stdout).strip()[-200:]}")
    said: dict[str, Any] = json.loads(line.removeprefix("JSON "))
    answers = said["requests"] - said["refused"]
    if answers <= 0:
        raise Unmeasured("nothing was answered")
    user, system = after[0] - before[0], after[1] - before[1]
    return {
        "answers": answers,
        "per_second": answers / said["microseconds"] * 1e6,
        "wall_us": said["microseconds"] / answers,
        "p50_ms": said["p50"] / 1000,
        "p99_ms": said["p99"] / 1000,
        "max_ms": said["max"] / 1000,
        "refused": said["refused"],
        "broken": said["broken"],
        "user_us": user / answers * 1e6,
        "system_us": system / answers * 1e6,
        "cpu_us": (user + system) / answers * 1e6,
    }


def seen_by_ours(target: Target) -> Metrics:
    """What the sidecar says of itself: the fullest waiting room, repeats, refusals, the latch."""
    status = target.status()
    if not status:
        return {}
    cache = status["cache"]
    answered = sum(cache.values())
    repeats = cache.get("hit", 0) + cache.get("shared", 0)
    return {
        "most_waiting": status["slots"]["most_waiting"],
        "repeats": repeats / answered if answered else 0.0,
        "latched": float(status["state"] == "failed"),
        "recorded": status["retrieval_responses"],
        "seq": status["ledger"]["seq"],
    }


def native(target: Target, folder: Path, queries: Path, seconds: float, ranks: int) -> Metrics:
    """``ranks`` processes of the pinned rollout's client, eight threads each, for so long.

    ``lost`` counts texts a rollout must not read: errors of any kind, and answers to nothing.
    """
    base = target.url.removesuffix("/execute")
    command = [sys.executable, "-m", "tests.benchmarks.native", base, str(queries), f"{seconds:g}"]
    before = target.cpu()
    processes = [
        subprocess.Popen(
            [*command, str(rank)], stdout=subprocess.PIPE, env=environment(), cwd=folder
        )
        for rank in range(ranks)
    ]
    said = [json.loads(process.communicate(timeout=seconds + 120)[0]) for process in processes]
    after = target.cpu()
    took = sorted(value for one in said for value in one["milliseconds"])
    if not took:
        raise Unmeasured("no client was answered")
    errors = [text for one in said for text in one["errors"]]
    for text in sorted(set(errors))[:3]:
        print(f"a rollout read: {text[:200]!r}", file=sys.stderr)
    status = target.status()
    return {
        "answers": len(took),
        "per_second": len(took) / max(one["seconds"] for one in said),
        "p50_ms": took[len(took) // 2],
        "p99_ms": took[len(took) * 99 // 100],
        "max_ms": took[-1],
        "lost": len(errors) + status["delivery_lost"],
        "refused": sum(status["refused"].values()),
        "cpu_us": (sum(after) - sum(before)) / len(took) * 1e6,
        **{name: seen_by_ours(target)[name] for name in ("most_waiting", "latched")},
    }

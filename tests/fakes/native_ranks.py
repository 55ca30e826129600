"""Ranks of the pinned rollout's client (``native_client.py``), each in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tests.fakes.forked import Forked
from tests.fakes.process import ROOT, command

PATIENCE = 100.0


def begin(folder: Path, sandbox_urls: Sequence[str], turns: int) -> list[tuple[Forked, Path]]:
    """Starts them side by side: rank N asks the Nth address and prints to a file in ``folder``."""
    ranks = []
    for rank, url in enumerate(sandbox_urls):
        out = folder / f"rank-{rank}.json"
        words = (url, str(rank), str(turns))
        ranks.append((command("tests.fakes.native_client", *words, folder=ROOT, out=out), out))
    return ranks


def texts(ranks: Sequence[tuple[Forked, Path]]) -> list[tuple[str, str]]:
    """What the rollouts of all ranks have read, query and text, once all have ended."""
    for rank, out in ranks:
        assert rank.wait(PATIENCE) == 0, out.read_text()
    return [(query, text) for _, out in ranks for query, text in json.loads(out.read_bytes())]

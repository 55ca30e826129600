"""What a command loads: those that run before each checkpoint start in a moment."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fakes.helper import FakeHelper
from tests.fakes.process import ROOT, environment, start, wait_ready
from tests.fakes.rewarded import reward_keys

pytestmark = pytest.mark.process

# All that a word to a served run needs of this package.
NEEDED = {
    "smartsearch_sidecar",
    "smartsearch_sidecar.client",
    "smartsearch_sidecar.commands",
    "smartsearch_sidecar.commands.check",
    "smartsearch_sidecar.errors",
}
HEAVY = {
    "aiohttp",
    "orjson",
    "prometheus_client",
    "structlog",
    "tantivy",
    "uvloop",
    "rich.progress",
}
# Of an index only the files are read, and a bar is drawn for a person alone.
NOT_TO_SERVE = {
    "rich.progress",
    "smartsearch_sidecar.commands.index",
    "smartsearch_sidecar.retrieval.bm25.build",
    "smartsearch_sidecar.retrieval.bm25.corpus",
}


def imported(said: str) -> set[str]:
    """The modules that ``-X importtime`` names on standard error."""
    lines = (line.rpartition("|")[2] for line in said.splitlines() if "import time:" in line)
    return {line.strip() for line in lines} - {"imported package"}


# One interpreter for all of them: what each command needs beside this package is imported once, and
# each is a fork of its own, which says at its exit what it has.
SCRIPT = """
import atexit, json, os, runpy, sys, typer
for words in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        sys.argv = ["smartsearch-sidecar", *words]
        atexit.register(lambda: print(json.dumps(list(sys.modules)), file=sys.stderr))
        runpy.run_module("smartsearch_sidecar", run_name="__main__", alter_sys=True)
        sys.exit()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 1), (words, code)
"""


def loaded(commands: Sequence[Sequence[str]]) -> list[set[str]]:
    """What each command has imported, one after the other, from its first step to its exit."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(commands)],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stderr.splitlines() if line.startswith("[")]
    assert len(lines) == len(commands)
    return [set(json.loads(line)) for line in lines]


def lived(tmp_path: Path, helper: str) -> set[str]:
    """What ``serve`` imports, with rewards; meanwhile every word to it is said."""
    rewards = reward_keys(tmp_path, helper, reward__provenance="enforce")
    daemon = start(tmp_path, fresh=True, **rewards)
    try:
        wait_ready(daemon)
        where = ("--run-dir", str(daemon.directory))
        commands = (
            ("check", *where),
            ("checkpoint", "--step", "1", *where),
            ("url", *where),
            ("latch", "--reason", "a test", *where),
            ("check", *where),  # of a failed run
            ("--version",),
        )
        for words, found in zip(commands, loaded(commands), strict=True):
            assert "smartsearch_sidecar.commands" in found, words
            ours = {name for name in found if name.partition(".")[0] == "smartsearch_sidecar"}
            assert ours <= NEEDED, words
            tops = {name.partition(".")[0] for name in found} | found
            assert not tops & HEAVY, words
    finally:
        daemon.process.send_signal(signal.SIGTERM)
        code = daemon.process.wait(30)
    assert code == 4, daemon.log.read_text()[-2000:]
    return imported(daemon.log.read_text())


async def test_words_to_a_served_run_load_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No daemon, no configuration and no library of either; and ``serve`` builds no index, and
    without [cluster] imports nothing that knows other nodes.
    """
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    async with FakeHelper() as helper:
        served = await asyncio.to_thread(lived, tmp_path, helper.url)
    assert {"smartsearch_sidecar.process.daemon", "smartsearch_sidecar.scoring.build"} <= served
    assert not served & NOT_TO_SERVE
    of_nodes = [name for name in served if name.startswith("nats") or ".cluster." in f"{name}."]
    assert not of_nodes

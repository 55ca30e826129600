"""What a command loads: those that run before each checkpoint start in a moment."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.process import ROOT, environment, is_ready, start
from tests.fakes.until import wait_until

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


def loads(*words: str) -> set[str]:
    """What one command imports, from its first step to its exit."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "smartsearch_sidecar", *words],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=ROOT,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr[-2000:]
    return imported(done.stderr)


def test_words_to_a_served_run_load_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No daemon, no configuration and no library of either; and ``serve`` builds no index."""
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    daemon = start(tmp_path, fresh=True)
    try:
        wait_until(lambda: is_ready(daemon), seconds=30, found=daemon.log.read_text)
        where = ("--run-dir", str(daemon.directory))
        for words in (
            ("check", *where),
            ("checkpoint", "--step", "1", *where),
            ("url", *where),
            ("latch", "--reason", "a test", *where),
            ("check", *where),  # of a failed run
            ("--version",),
        ):
            found = loads(*words)
            ours = {name for name in found if name.partition(".")[0] == "smartsearch_sidecar"}
            assert ours <= NEEDED, words
            tops = {name.partition(".")[0] for name in found} | found
            assert not tops & HEAVY, words
    finally:
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(30) == 4
    served = imported(daemon.log.read_text())
    assert "smartsearch_sidecar.process.daemon" in served
    assert not served & NOT_TO_SERVE

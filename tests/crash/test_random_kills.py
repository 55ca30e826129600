"""``kill -9`` at a random moment: under load, while stopping, while resuming.

The seed of every run is in its test's name: ``-k 'kill and 1042'`` runs it again. The exact moment
also depends on the machine.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.crash.harness import KILLED, Launcher, check_history, check_restart, load

pytestmark = pytest.mark.process

SEEDS = range(5)
SOAK_SEEDS = range(1000, 1200)


@pytest.mark.parametrize("seed", SEEDS)
def test_kill(launcher: Launcher, tmp_path: Path, seed: int) -> None:
    """No answered request is missing, and the run is not healthy unless it had ended in order."""
    kill_at_random(launcher, tmp_path / "run", seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", SOAK_SEEDS)
def test_two_hundred_kills(launcher: Launcher, tmp_path: Path, seed: int) -> None:
    """The same, two hundred times."""
    kill_at_random(launcher, tmp_path / "run", seed)


def kill_at_random(launcher: Launcher, directory: Path, seed: int) -> None:
    """One run under load, killed; sometimes killed again while it resumes; then checked."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    keys: dict[str, Any] = {"execute__slots": rng.choice((1, 8)), "ledger__segment_mib": 1}
    passage_bytes = rng.choice((100, 100, 20_000))
    daemon = launcher.start(directory, passage_bytes=passage_bytes, **keys)
    wanted = rng.randint(0, 80)
    with load(daemon.ready(), threads=rng.randint(1, 8)) as clients:
        clients.until(lambda so_far: len(so_far.told) >= wanted)
        time.sleep(rng.uniform(0, 0.01))  # into the middle of anything
        stopping = rng.random() < 0.3
        if stopping:
            os.kill(daemon.pid, signal.SIGTERM)
            time.sleep(rng.uniform(0, 0.02))
        ended = daemon.kill()
    assert ended == KILLED or (stopping and ended in (0, 4))
    found = check_history(directory, clients.told)
    for _ in range(rng.choice((0, 0, 1, 2))):
        again = launcher.start(directory, resume=True, **keys)
        time.sleep(rng.uniform(0, 0.05))
        assert again.kill() == KILLED
    cause = check_restart(launcher, directory, clients.told, **keys)
    if not (stopping and found.state.closed_cleanly):
        assert cause is not None

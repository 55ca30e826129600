"""The launcher of daemons, once for all crash tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.harness import Launcher


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """Forks daemons, and ends those that still run at the end of the test."""
    started = Launcher()
    yield started
    started.close()

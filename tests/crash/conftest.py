"""What starts daemons, once for all crash tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.harness import Launcher


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """Starts daemons, and ends those that still run at the end of the tests."""
    started = Launcher()
    yield started
    started.close()

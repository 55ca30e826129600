"""A real browser for every file that looks at the operator's page."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.web.browser import Page, installed, running, tab


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One browser for all; where it listens."""
    program = installed()
    if program is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    with running(program, tmp_path_factory.mktemp("browser")) as address:
        yield address


@pytest.fixture
async def page(browser: str) -> AsyncIterator[Page]:
    """A tab that keeps nothing of other tests."""
    async with tab(browser) as fresh:
        await fresh.look(width=1280)
        yield fresh

"""The page of a run of many nodes, in a real browser: a row for each, and the run's own verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.bus import Ground
from tests.fakes.cluster_run import joined
from tests.fakes.served import served
from tests.web.browser import Page
from tests.web.test_page import WORD, rows, shown

NODES = "document.getElementById('nodes').innerText"

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


async def test_a_row_for_every_node(tmp_path: Path, page: Page) -> None:
    """The page names every node, its state and its journal, and speaks for the run."""
    ground = Ground()
    async with joined(tmp_path, ground, "a", 2) as first, shown(page, first):
        await page.until(f"{NODES}.includes('not joined yet')")
        assert await page.ask(WORD) == "Pending"
        async with joined(tmp_path, ground, "b", 2) as second:
            assert (await second.execute("a question"))[0] == 200
            await page.until(f"{WORD} === 'Good'")
            await page.until(f"{NODES}.includes('All\\thealthy\\tconnected\\t1\\t1')")
            own, other, _ = await rows(page, "#nodes")
            assert own.startswith("a (this one)\thealthy\t")
            assert other.startswith("b\thealthy\t")
            assert "9,999" in (await rows(page, "#quotas"))[0]
            await second.internal("POST", "/latch", {"reason": "enough"})
            await page.until(f"{WORD} === 'Failed'")
            await page.until(f"{NODES}.includes('failed: op')")
            assert "on node b: enough" in await page.text("#failure")


async def test_a_run_of_one_has_no_such_table(tmp_path: Path, page: Page) -> None:
    """Where there are no other nodes, the page says nothing of them."""
    async with served(tmp_path / "run") as run, shown(page, run):
        assert await page.ask("document.getElementById('fleet').hidden")

"""The operator's page as a person meets it: in a real browser, against a real run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.bus import Ground
from tests.fakes.cluster_run import joined
from tests.fakes.provider import FakeProvider
from tests.fakes.rewarded import rewarded
from tests.fakes.served import EXECUTE_CAPABILITY, INTERNAL_CAPABILITY, Served, served
from tests.web.browser import Page

WORD = "document.getElementById('word').textContent"
EVIL = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
NODES = "document.getElementById('nodes').innerText"
TEXT_OF = "Array.from(document.querySelectorAll({0!r}), (one) => one.innerText)"


# A browser starts first, on a machine that is shared.
pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


@asynccontextmanager
async def shown(page: Page, run: Served) -> AsyncIterator[None]:
    """The page of a run, open and live; nothing of it may complain or ask elsewhere."""
    await page.open(run.endpoints.internal_url)
    await page.until(f"['Good', 'Pending', 'Failed'].includes({WORD})")
    yield
    base = f"http://127.0.0.1:{run.port}/{INTERNAL_CAPABILITY}"
    outside = [url for url in page.requests if not url.startswith((base, "data:", "about:"))]
    assert not outside
    assert not page.complaints


async def rows(page: Page, selector: str) -> list[str]:
    """The text of each row of a table's body."""
    found: list[str] = await page.ask(TEXT_OF.format(f"{selector} > tr"))
    return found


async def test_good_run_from_verdict_to_journal_head(tmp_path: Path, page: Page) -> None:
    """The page says good, and holds the run's figures, quotas, checkpoints, identities, head; but
    neither capability stands in the document, its title, or what a person could copy of it.
    """
    async with rewarded(tmp_path) as on, shown(page, on.run):
        await on.reward(await on.rollout("Who composed Faust?", "Where was Gounod born?"))
        await on.run.execute(" ")
        await on.run.internal("POST", "/checkpoints", {"step": 10})
        await page.until("document.getElementById('checkpoints').innerText.includes('accepted')")
        await page.until("document.querySelectorAll('#recent > tr').length === 3")
        assert await page.ask(WORD) == "Good"
        assert await page.ask("document.title") == "Good · SmartSearch sidecar"
        assert await page.ask("document.querySelector('#verdict dl').hidden")
        tiles = (await page.text("#tiles")).split("\n")
        assert tiles[tiles.index("Scores") + 1] == "1"
        assert tiles[tiles.index("Declined queries") + 1] == "33 %"
        quotas = await rows(page, "#quotas")
        assert len(quotas) == 7
        assert "9,998" in quotas[0]
        (checkpoint,) = await rows(page, "#checkpoints")
        assert checkpoint.endswith("\t10\taccepted (number 1)")
        facts = await page.text("#facts")
        head = on.run.records()[-1]["sum"]
        for value in (head, "c" * 64, "1" * 64, "a" * 64):
            assert value in facts
        assert "empty\tdeclined query\t1" in await rows(page, "#failures")
        await page.ask("document.querySelector('#recent button').click()")
        await page.until("document.querySelectorAll('#recent .opened li').length === 5")
        everything = await page.ask(
            "document.documentElement.outerHTML + document.title + document.body.innerText"
            " + JSON.stringify(Object.entries(localStorage)) + document.cookie"
        )
        for secret in (INTERNAL_CAPABILITY, EXECUTE_CAPABILITY):
            assert secret not in everything
        assert (
            await page.ask("document.querySelectorAll('[href]:not([href^=\"data:\"])').length") == 1
        )


async def test_page_is_live(tmp_path: Path, page: Page) -> None:
    """What happens after the page was opened arrives without a reload."""
    provider = FakeProvider()
    async with served(tmp_path / "run", provider=provider) as run, shown(page, run):
        assert await rows(page, "#recent") == ["None yet."]
        assert await page.ask("document.getElementById('resumed').hidden")
        # A run of one has no table of nodes.
        assert await page.ask("document.getElementById('fleet').hidden")
        await page.ask("window.kept = 'the same document'")
        for number in range(3):
            await run.execute(f"question {number}")
        await page.until("document.querySelectorAll('#recent > tr').length === 3")
        assert "question 2" in (await rows(page, "#recent"))[0]
        await page.until("document.querySelectorAll('#throughput svg path.one').length === 1")
        await page.until("document.querySelector('#latency output').textContent.includes('ms')")
        provider.gate = asyncio.Event()
        asking = asyncio.create_task(run.execute("held"))
        await page.until(f"{WORD} === 'Pending'")
        assert "1 request is in flight" in await page.text("#verdict")
        provider.gate.set()
        await asking
        await page.until(f"{WORD} === 'Good'")
        assert await page.ask("window.kept") == "the same document"


async def test_failed_run_says_why_when_and_what_to_do(tmp_path: Path, page: Page) -> None:
    """At the first failure the page turns, without a reload, to cause, time, detail, remedy and
    the last checkpoint that was accepted, not a refused one; a command between backticks in our
    sentences is set as code, without the backticks.
    """
    provider = FakeProvider()
    async with served(tmp_path / "run", provider=provider) as run, shown(page, run):
        await run.execute("well answered")
        await run.internal("POST", "/checkpoints", {"step": 70})
        provider.fault = RuntimeError("gone")
        await run.execute("never answered")
        await page.until(f"{WORD} === 'Failed'")
        verdict = await page.text("#verdict")
        for words in ("retrieval_failed", "RuntimeError", "search 2, counted", "doctor"):
            assert words in verdict
        assert await page.text("#remedy code") == "smartsearch-sidecar doctor"
        assert "`" not in verdict
        assert await page.ask("document.title") == "Failed · SmartSearch sidecar"
        assert "Failed" in await page.ask("document.getElementById('spoken').textContent")
        await page.until("document.getElementById('recent').innerText.includes('never answered')")
        assert "retrieval_failed" in (await rows(page, "#recent"))[0]
        assert "retrieval_failed\trefused\t1" in await rows(page, "#failures")
        await run.internal("POST", "/checkpoints", {"step": 80})
        await page.until("document.getElementById('checkpoints').innerText.includes('refused')")
        accepted = await page.text("#accepted")
        assert accepted.startswith("step 70, ")
        assert accepted.endswith("(number 1)")


async def test_resumed_run_says_where_its_figures_begin(tmp_path: Path, page: Page) -> None:
    """After a resume the page says that charts and lists begin there and where the rest is."""
    async with served(tmp_path / "run") as run:
        await run.execute("before the stop")
        await run.internal("POST", "/checkpoints", {"step": 70})
    async with served(tmp_path / "run", resume=True, trainer_stopped=True) as run, shown(page, run):
        told = await page.text("#resumed")
        assert "This run was resumed at " in told
        assert "smartsearch-sidecar ledger show" in told
        assert await rows(page, "#recent") == ["None since this run was resumed."]
        resumed = run.records()[-1]["data"]
        between = f"{resumed['gap_from']} to {resumed['gap_to']}, the trainer stood still"
        assert between in await page.text("#facts")
        assert "No search since the last checkpoint" in await page.text("#verdict")
        await run.execute("after the stop")
        await page.until(
            "document.getElementById('verdict').innerText.includes('would be accepted now')"
        )
        await run.internal("POST", "/latch", {"reason": "enough"})
        await page.until(f"{WORD} === 'Failed'")
        assert "before this process started" in await page.text("#accepted")


async def test_words_of_a_model_are_letters(tmp_path: Path, page: Page) -> None:
    """Markup in a query or a passage is shown as it stands, and nothing of it runs."""
    provider = FakeProvider()
    provider.answer = [{"id": EVIL, "contents": f"Title\n{EVIL}", "score": 1.0}]
    async with served(tmp_path / "run", provider=provider) as run, shown(page, run):
        await run.execute(EVIL)
        await page.until("document.querySelectorAll('#recent button').length === 1")
        assert EVIL in (await rows(page, "#recent"))[0]
        await page.ask("document.querySelector('#recent button').click()")
        await page.until("document.querySelectorAll('#recent .opened li').length === 1")
        assert (await page.text("#recent .opened li .words")) == f"Title\n{EVIL}"
        assert await page.ask("document.querySelectorAll('main img, main script').length") == 0
        assert await page.ask("document.title") == "Good · SmartSearch sidecar"


async def test_address_without_its_slash_asks_nothing_beside_it(tmp_path: Path, page: Page) -> None:
    """Opened as ``internal_url`` is printed, the page goes to its own address before it asks."""
    # What a tab keeps outlives a change of address, and so says who asked before it.
    await page.call(
        "Page.addScriptToEvaluateOnNewDocument",
        source="""window.EventSource = class extends EventSource {
          constructor(url) {
            const asked = sessionStorage.getItem("asked") || "";
            sessionStorage.setItem("asked", `${asked}${location.pathname} `);
            super(url);
          }
        };""",
    )
    async with served(tmp_path / "run") as run, shown(page, run):
        assert await page.ask("sessionStorage.getItem('asked')") == f"/{INTERNAL_CAPABILITY}/ "


async def tab_to(page: Page, expression: str) -> None:
    """Presses Tab until what is focused satisfies the expression over ``it``."""
    for _ in range(40):
        await page.press("Tab", code=9)
        if await page.ask(f"((it) => {expression})(document.activeElement)"):
            return
    raise AssertionError(f"no Tab reaches {expression}")


async def test_everything_by_keyboard(tmp_path: Path, page: Page) -> None:
    """Tab reaches range, charts, tables and passages; keys change, read, open and close them."""
    async with served(tmp_path / "run") as run, shown(page, run):
        await run.execute("by keyboard")
        await page.until("document.querySelectorAll('#recent button').length === 1")
        await page.until("view.latest.length > 1")
        await page.press("Tab", code=9)
        assert await page.ask("document.activeElement.className") == "skip"
        await tab_to(page, "it.name === 'range'")
        await page.press("ArrowRight", code=39)
        assert await page.ask("view.range") == "whole"
        await page.press("ArrowLeft", code=37)
        assert await page.ask("view.range") == "latest"
        await tab_to(page, "it.closest('#throughput') && it.tagName === 'svg'")
        await page.press("ArrowLeft", code=37)
        assert await page.ask("document.querySelectorAll('#throughput .cross').length") == 1
        await tab_to(page, "it.closest('#throughput') && it.tagName === 'SUMMARY'")
        await page.press("Enter", code=13, text="\r")
        await page.until("document.querySelectorAll('#throughput tbody tr').length > 0")
        await tab_to(page, "it.closest('#recent') && it.tagName === 'BUTTON'")
        await page.press("Enter", code=13, text="\r")
        await page.until("document.querySelectorAll('#recent .opened li').length === 5")
        assert await page.ask("document.activeElement.getAttribute('aria-expanded')") == "true"
        await page.press("Enter", code=13, text="\r")
        await page.until("document.querySelectorAll('#recent .opened').length === 0")


async def test_open_request_stays_and_the_page_is_bounded(tmp_path: Path, page: Page) -> None:
    """While a request is open newer ones wait, counted; closing it lets them in, fifty at most.
    Once the charts are full, more ticks leave rows, elements and lists as many as they were.
    """
    async with served(tmp_path / "run") as run, shown(page, run):
        await run.execute("read slowly")
        await page.until("document.querySelectorAll('#recent button').length === 1")
        await page.ask("document.querySelector('#recent button').click()")
        await page.until("document.querySelectorAll('#recent .opened li').length === 5")
        await run.execute("comes later")
        await page.until("document.getElementById('held').textContent.startsWith('1 newer')")
        assert "read slowly" in (await rows(page, "#recent"))[0]
        await page.ask("document.querySelector('#recent button').click()")
        assert "comes later" in (await rows(page, "#recent"))[0]
        many = [
            {"serial": 1000 + n, "at": 0, "number": n, "query": "q", "outcome": "hit", "took": 0}
            for n in range(200)
        ]
        await page.ask(f"addRequests({json.dumps(many)})")
        assert len(await rows(page, "#recent")) == 50
        await page.until("view.now && view.latest.length > 0")
        sizes = await page.ask("""[10, 10].map((ticks) => {
          while (view.latest.length < 595) view.latest.push(view.latest[0]);
          for (let n = 0; n < ticks; n += 1) {
            const row = [...view.latest[view.latest.length - 1]];
            row[0] += 1;
            tick({ data: JSON.stringify({ ...view.now, row, recent: [] }) });
          }
          return [view.latest.length, document.querySelectorAll("*").length];
        })""")
        assert sizes[0] == sizes[1]
        assert sizes[0][0] == 600


async def test_narrow_window_has_it_all(tmp_path: Path, page: Page) -> None:
    """On a telephone nothing hangs over the edge, and words stand out from their ground."""
    async with rewarded(tmp_path) as on, shown(page, on.run):
        await page.look(width=360, height=740)
        await on.reward(await on.rollout("W" * 600))
        await on.run.internal("POST", "/latch", {"reason": "y" * 300})
        await page.until(f"{WORD} === 'Failed'")
        await page.until("document.querySelectorAll('#recent button').length === 1")
        for dark in (False, True):
            await page.look(width=360, height=740, dark=dark)
            assert await page.ask("matchMedia('(prefers-color-scheme: dark)').matches") is dark
            assert await page.ask("document.documentElement.scrollWidth <= innerWidth")
            measured: dict[str, Any] = await page.ask(CONTRASTS)
            assert measured
            for words, contrast in measured.items():
                assert contrast >= 4.5, (words, dark)


# WCAG's contrast of each kind of text against the nearest ground that is painted.
CONTRASTS = """(() => {
  const numbers = (colour) => (colour.match(/[\\d.]+/g) || []).map(Number);
  const light = (colour) => {
    const [r, g, b] = numbers(colour).slice(0, 3).map((value) => value / 255)
      .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    for (let one = node; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor, parts = numbers(colour);
      if (parts.length === 3 || parts[3] === 1) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const found = {};
  for (const selector of ["#word", "#sentence", "#failure dt", "#cause", "h1", ".about", "#live",
      ".tile .name", ".tile .value", ".tile .note", "th", "td", "button", "summary", "output",
      "#held", "#facts dt", "#facts dd", "footer", "figcaption .key"]) {
    const node = document.querySelector(selector);
    if (!node) continue;
    const pair = [light(getComputedStyle(node).color), light(ground(node))].sort((a, b) => b - a);
    found[selector] = (pair[0] + 0.05) / (pair[1] + 0.05);
  }
  return found;
})()"""


async def test_page_says_when_it_hears_nothing(tmp_path: Path, page: Page) -> None:
    """A sidecar that has stopped does not go on looking good."""
    async with served(tmp_path / "run") as run:
        await page.open(run.endpoints.internal_url)
        await page.until(f"{WORD} === 'Good'")
        await run.stop()
        # Five seconds have to go by for the page; its own clock is turned instead.
        await page.ask("view.heard -= 60000")
        await page.until(f"{WORD} === 'Unknown'")
        assert "No contact" in await page.text("#verdict")
        complaints = [one for one in page.complaints if "ERR_CONNECTION_REFUSED" not in one]
        assert not complaints


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

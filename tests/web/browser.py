"""A small client of headless Chromium over its DevTools protocol: enough to look at one page.

Real browser, real page, nothing of ours replaced. What a page says on its console, every exception
and every request it makes is kept, so that a test can ask that there were none.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.fakes.until import until, wait_until

PATIENCE = 20.0  # seconds; a browser that starts on a loaded machine takes some
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars", "--no-proxy-server"),
    # One process draws every page and none is kept in reserve: to start each costs more than to
    # look at what is in it.
    *("--disable-site-isolation-trials", "--renderer-process-limit=1", "--in-process-gpu"),
    "--remote-debugging-port=0",
)


def installed() -> str | None:
    """The browser's program, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, session_id: str) -> None:
        self._socket = socket
        self._session_id = session_id
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.complaints: list[str] = []
        self.requests: list[str] = []

    async def read(self) -> None:
        """Hands answers to those who wait, and keeps what the page does by itself."""
        async for message in self._socket:
            value = json.loads(message.data)
            waiting = self._waiting.pop(value.get("id", 0), None)
            if waiting is not None and not waiting.done():
                waiting.set_result(value)
            self._hear(value.get("method", ""), value.get("params", {}))

    def _hear(self, method: str, given: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = given["exceptionDetails"]
            thrown = details.get("exception", {}).get("description", details["text"])
            self.complaints.append(str(thrown))
        elif method == "Runtime.consoleAPICalled":
            words = [str(one.get("value", one.get("description"))) for one in given["args"]]
            self.complaints.append(f"{given['type']}: {' '.join(words)}")
        elif method == "Log.entryAdded":
            self.complaints.append(f"{given['entry']['level']}: {given['entry']['text']}")

    async def call(self, method: str, **given: Any) -> dict[str, Any]:
        """One command of the protocol; fails where the browser refuses it."""
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        await self._socket.send_json(
            {"id": number, "sessionId": self._session_id, "method": method, "params": given}
        )
        async with asyncio.timeout(PATIENCE):
            value = await answer
        assert "error" not in value, f"{method}: {value['error']}"
        result: dict[str, Any] = value["result"]
        return result

    async def open(self, url: str) -> None:
        """Goes to an address; the page may still be loading."""
        await self.call("Page.navigate", url=url)

    async def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        value = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in value, value
        return value["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Waits until the expression is true (between two pages it may not even be askable)."""

        async def asked() -> Any:
            with contextlib.suppress(AssertionError):
                return await self.ask(expression)

        return await until(asked, seconds=PATIENCE, pause=0.04, found=lambda: expression)

    async def text(self, selector: str = "body") -> str:
        """What a person reads there."""
        return str(await self.ask(f"document.querySelector({selector!r}).innerText"))

    async def press(self, key: str, *, code: int, text: str = "") -> None:
        """One key, down and up."""
        given: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **given)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    async def look(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Sets the window and the colour scheme."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self, path: Path) -> None:
        """The whole page as a PNG file."""
        value = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(value["data"]))


@contextmanager
def running(program: str, profile: Path) -> Iterator[str]:
    """A fresh browser; where it listens. ``profile`` is a folder of its own."""
    told = profile / "DevToolsActivePort"
    process = subprocess.Popen(
        [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:

        def listens() -> bool:
            assert process.poll() is None, f"the browser ended with {process.returncode}"
            # It writes this file once it listens.
            return told.exists() and len(told.read_text().splitlines()) > 1

        wait_until(listens, seconds=PATIENCE)
        port, path = told.read_text().splitlines()[:2]
        yield f"ws://127.0.0.1:{port}{path}"
    finally:
        process.terminate()
        process.wait(PATIENCE)


@asynccontextmanager
async def tab(address: str) -> AsyncIterator[Page]:
    """The browser's one tab, empty. It is emptied again at the end: a process for each new tab
    would cost more than all that is looked at in it.
    """
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(address, max_msg_size=0) as socket,
    ):
        targets = (await _ask(socket, 1, "Target.getTargets"))["targetInfos"]
        (target,) = (one["targetId"] for one in targets if one["type"] == "page")
        attached = await _ask(socket, 2, "Target.attachToTarget", flatten=True, targetId=target)
        page = Page(socket, attached["sessionId"])
        reader = asyncio.create_task(page.read())
        try:
            for domain in ("Page", "Runtime", "Log", "Network"):
                await page.call(f"{domain}.enable")
            yield page
            await page.call("Log.clear")
            await page.call("Runtime.discardConsoleEntries")
            await page.call("Storage.clearDataForOrigin", origin="*", storageTypes="all")
            await page.open("about:blank")
        finally:
            reader.cancel()
            await asyncio.wait([reader])


async def _ask(
    socket: aiohttp.ClientWebSocketResponse, number: int, method: str, **given: Any
) -> dict[str, Any]:
    """A command to the browser itself, while no other task reads its answers."""
    await socket.send_json({"id": number, "method": method, "params": given})
    async with asyncio.timeout(PATIENCE):
        while True:
            value = json.loads((await socket.receive()).data)
            if value.get("id") == number and "sessionId" not in value:
                result: dict[str, Any] = value["result"]
                return result

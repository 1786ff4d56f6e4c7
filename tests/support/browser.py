"""A headless Chromium, driven over its own protocol: what a page shows, and what it complains of."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.wait import wait_until

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-sync"),
    *("--remote-debugging-address=127.0.0.1", "--remote-debugging-port=0", "--host-resolver-rules=MAP * 127.0.0.1"),
)
START_S = 30.0
CALL_S = 20.0


def chromium() -> str:
    """The program; its absence fails the test with the command that ends it."""
    for name in NAMES:
        if found := shutil.which(name):
            return found
    pytest.fail("no chromium on PATH: apt-get install chromium (tools/test does it)", pytrace=False)


class Tab:
    """One page. `complaints` are what its console had of errors, exceptions and refused sources."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def read(self) -> None:
        async for message in self._socket:
            told = message.json()
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            elif told["method"] == "Log.entryAdded":
                self.complaints.append(f"{told['params']['entry']['level']}: {told['params']['entry']['text']}")
            elif told["method"] == "Runtime.exceptionThrown":
                self.complaints.append(str(told["params"]["exceptionDetails"]))

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(CALL_S):
            told = await answer
        assert "error" not in told, told
        found: dict[str, Any] = told["result"]
        return found

    async def evaluate(self, expression: str) -> Any:
        told = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url=url)

    async def until(self, expression: str, *, timeout_s: float = 15.0) -> None:
        async def true() -> bool:
            return bool(await self.evaluate(expression))

        await wait_until(true, timeout_s=timeout_s, what=f"{expression}; complaints: {self.complaints}")

    async def text(self, selector: str) -> str:
        found: str = await self.evaluate(f"document.querySelector({selector!r})?.innerText ?? ''")
        return found

    async def screenshot(self, path: Path) -> None:
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        taken = await self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(taken["data"]))


@contextlib.asynccontextmanager
async def browser(directory: Path) -> AsyncIterator[Tab]:
    """A tab of a browser of its own, with its profile in `directory`; leaves no process behind."""
    profile = directory / "chromium"
    log = await asyncio.to_thread((directory / "chromium.log").open, "wb")
    process = await asyncio.create_subprocess_exec(
        chromium(), *FLAGS, f"--user-data-dir={profile}", "about:blank", stdout=log, stderr=log, start_new_session=True
    )
    try:
        port = profile / "DevToolsActivePort"
        await wait_until(lambda: port.exists() and port.read_text().count("\n"), timeout_s=START_S, what="chromium")
        place = f"http://127.0.0.1:{port.read_text().split()[0]}"
        async with aiohttp.ClientSession() as session, session.get(f"{place}/json/list") as answer:
            (page,) = [each for each in await answer.json(content_type=None) if each["type"] == "page"]
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=1 << 26) as socket:
                tab = Tab(socket)
                reading = asyncio.create_task(tab.read())
                for domain in ("Page", "Runtime", "Log"):
                    await tab.call(f"{domain}.enable")
                yield tab
                reading.cancel()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        log.close()

"""A headless Chromium, driven by the DevTools protocol through its pipe: nothing to install beside the browser."""

from __future__ import annotations

import asyncio
import base64
import fcntl
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--no-default-browser-check",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
_LAUNCH = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Chromium reads commands from descriptor 3 and writes to 4."""
_ABOVE = 10
_POLL_S = 0.02


class BrowserError(Exception):
    """The browser refused a command, or the page threw."""


class Browser:
    """One process and one tab in it. `requests`: every URL that the page asked for. `errors`: what it logged as one."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._reader, self._writer = reader, writer
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session: str | None = None
        self._reading = asyncio.create_task(self._read())

    async def open_tab(self) -> None:
        target = await self.send("Target.createTarget", url="about:blank")
        attached = await self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.send(f"{domain}.enable")

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Its result. Raises BrowserError."""
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._answers[number] = asyncio.get_running_loop().create_future()
        self._writer.write(json.dumps(message).encode() + b"\0")
        answer = await self._answers[number]
        del self._answers[number]
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    async def go(self, url: str) -> None:
        """Returns once its scripts have run."""
        await self.send("Page.navigate", url=url)
        await self.until(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    async def run(self, expression: str) -> Any:
        """Value of a JavaScript expression, awaited where it is a promise."""
        options = {"awaitPromise": True, "returnByValue": True, "allowUnsafeEvalBlockedByCSP": False}
        told = await self.send("Runtime.evaluate", expression=expression, **options)
        if "exceptionDetails" in told:
            details = told["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description", details["text"]))
        return told["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Waits until it is true; the test's own time limit ends a wait for nothing."""
        while not (value := await self.run(expression)):
            await asyncio.sleep(_POLL_S)
        return value

    async def press(self, key: str, *, code: int, ctrl: bool = False, shift: bool = False) -> None:
        """A key, by its name and its Windows code."""
        modifiers = (2 if ctrl else 0) + (8 if shift else 0)
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        await self.send("Input.dispatchKeyEvent", type="rawKeyDown", **common)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    async def click(self, selector: str) -> None:
        """In the middle of what is there, as a mouse does it."""
        box = await self.run(
            f"(() => {{ const found = document.querySelector({json.dumps(selector)});"
            " found.scrollIntoView({block: 'center'}); const box = found.getBoundingClientRect();"
            " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    async def view(self, width: int, height: int, *, scheme: str = "light", reduced_motion: bool = False) -> None:
        """Size of the window in CSS pixels, and what the reader's system prefers."""
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce" if reduced_motion else "no-preference"},
        ]
        await self.send("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self, path: Path) -> None:
        """Of the whole page."""
        size = (await self.send("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        taken = await self.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(taken["data"]))

    async def close(self) -> None:
        self._reading.cancel()
        with suppress(asyncio.CancelledError):
            await self._reading
        self._writer.close()

    async def _read(self) -> None:
        try:
            while True:
                message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
                if (waiting := self._answers.get(message.get("id", 0))) is not None:
                    if not waiting.done():
                        waiting.set_result(message)
                else:
                    self._note(message.get("method", ""), message.get("params", {}))
        except asyncio.IncompleteReadError:
            for waiting in self._answers.values():
                if not waiting.done():
                    waiting.set_exception(BrowserError("the browser has ended"))

    def _note(self, method: str, told: dict[str, Any]) -> None:
        match method:
            case "Network.requestWillBeSent":
                self.requests.append(told["request"]["url"])
            case "Runtime.exceptionThrown":
                details = told["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if told["type"] in ("error", "assert"):
                self.errors.append(" ".join(str(one.get("value", one)) for one in told["args"]))
            case "Log.entryAdded" if told["entry"]["level"] == "error":
                self.errors.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")


@asynccontextmanager
async def chromium(path: str, profile: Path) -> AsyncIterator[Browser]:
    """A fresh browser whose profile is kept in the folder `profile`; it ends with the block."""
    command_read, command_write = _pipe()
    answer_read, answer_write = _pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _LAUNCH, str(command_read), str(answer_write), path, *FLAGS, f"--user-data-dir={profile}",
        pass_fds=(command_read, answer_write),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    os.close(command_read)
    os.close(answer_write)
    reader, writer = await _streams(answer_read, command_write)
    browser = Browser(reader, writer)
    try:
        await browser.open_tab()
        yield browser
    finally:
        browser._session = None
        with suppress(BrowserError, OSError, TimeoutError):
            async with asyncio.timeout(10):
                await browser.send("Browser.close")
        await browser.close()
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def _pipe() -> tuple[int, int]:
    """Descriptors that neither 3 nor 4 is among."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for end in ends)
    for end in ends:
        os.close(end)
    return moved[0], moved[1]


async def _streams(read_end: int, write_end: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=64 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", 0))
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(write_end, "wb", 0))
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

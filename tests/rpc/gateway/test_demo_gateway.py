"""`make demo-gateway` with its own models: what it prints works as it stands, and the page is soon there.

SCREENSHOTS=DIR keeps what it looked like; times are printed, and fail nothing."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from browser import chromium
from conftest import require_tool
from demo_process import DEMO, started, told

from outrider.cli.stack import DEFAULT_MODEL
from outrider.client import Client

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

MESSAGES: list[Any] = [{"role": "user", "content": "Name three rivers, and write one word with an é."}]
RESULT = """({first: Number(document.querySelector('.pane').dataset.firstTokenMs),
  tokens: document.querySelectorAll('.pane .token').length, verdict: document.getElementById('verdict').dataset.kind,
  accepted: Number(document.querySelector('.legend [data-origin=accepted] b').textContent)})"""


@dataclass(frozen=True)
class Demo:
    """What it told. `url`: of OpenAI's API; `curl`: a command line; `page`: its address; `address`: for our client."""

    url: str
    token: str
    curl: str
    page: str
    address: str


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def demo() -> AsyncIterator[Demo]:
    async with started(DEMO) as process:
        lines = await told(process)
        (url, token) = re.findall(r'base_url="([^"]+)", api_key="([^"]+)"', lines)[0]
        (curl,) = re.findall(r"(?m)^ +(curl .*)$", lines)
        (page,) = re.findall(r"browser: (\S+)", lines)
        (address,) = re.findall(r'outrider\.Client\("([^"]+)"', lines)
        yield Demo(url, token, curl, page, address)
        process.terminate()
        await process.wait()


async def test_a_real_model_chats_with_the_same_text_and_bytes_of_its_tokens(demo: Demo) -> None:
    async with (
        Client(demo.address, token=demo.token) as ours,
        openai.AsyncOpenAI(base_url=demo.url, api_key=demo.token) as client,
    ):
        plain = await ours.complete(MESSAGES, max_tokens=24, seed=3)
        options: dict[str, Any] = {"model": DEFAULT_MODEL, "messages": MESSAGES, "max_tokens": 24, "seed": 3}
        whole = await client.chat.completions.create(**options, logprobs=True)
        assert whole.choices[0].message.content == plain.text
        logprobs = whole.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        written = b"".join(bytes(entry.bytes or ()) for entry in logprobs.content).decode(errors="replace")
        assert written.startswith(plain.text)
        stream = await client.chat.completions.create(**options, stream=True)
        assert "".join([piece.choices[0].delta.content or "" async for piece in stream]) == plain.text


@pytest.mark.outside
async def test_the_curl_line_streams_a_text(demo: Demo) -> None:
    require_tool("curl")
    asked = await asyncio.create_subprocess_shell(
        demo.curl, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    *events, last = re.findall(r"(?m)^data: (.*)$", (await asked.communicate())[0].decode())
    assert asked.returncode == 0
    assert last == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    assert len(choices) > 1
    assert "".join(choice["text"] for choice in choices).strip()
    assert choices[-1]["finish_reason"] in ("length", "stop")


@pytest.mark.outside
async def test_the_page_shows_its_first_token_soon_after_the_click(demo: Demo, tmp_path: Path) -> None:
    async with chromium(require_tool("chromium"), tmp_path) as page:
        await page.view(1280, 900)
        await page.go(demo.page)
        await page.until("document.activeElement.id === 'token'")  # asked for, since there is none yet
        await page.send("Input.insertText", text=demo.token)
        await page.press("Tab", code=9)
        await page.until("document.getElementById('model').options.length")
        for compare in ("false", "true"):
            await page.run(
                f"document.getElementById('compare').checked = {compare}, "
                "document.getElementById('max_tokens').value = 32, "
                "document.getElementById('num_speculative_tokens').value = '3', "
                "document.getElementById('prompt').value = 'Name three rivers.'"
            )
            await page.click("#run")
            await page.until("!document.body.classList.contains('running')")
            result = await page.run(RESULT)
            assert result["tokens"] >= 32
            assert result["accepted"] > 0, "INCONCLUSIVE"
            print(f"\nfirst token visible {result['first']:.0f} ms after the click; plain beside it: {compare}")
        assert result["verdict"] == "equal"
        if folder := os.environ.get("SCREENSHOTS"):
            for width, height in ((1280, 900), (390, 844)):
                await page.view(width, height)
                await page.screenshot(Path(folder, f"demo-{width}.png"))

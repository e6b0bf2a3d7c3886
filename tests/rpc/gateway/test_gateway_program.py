"""The gateway as users run it: processes of their own, and what they print for the next terminal."""

from __future__ import annotations

import asyncio
import re
import signal

import openai
import pytest
from demo_process import DEMO, TOY, started, told

from outrider.client import Client


@pytest.mark.slow
async def test_up_serves_openai_and_ends_with_it() -> None:
    async with started("outrider.cli", "up", *TOY) as process:
        lines = await told(process)
        (url,) = re.findall(r'base_url="([^"]+)", api_key="any"', lines)
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
            answer = await client.completions.create(model="", prompt="!!", max_tokens=4)
            assert answer.choices[0].text
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


@pytest.mark.slow
async def test_the_demo_prints_a_token_that_is_asked_for() -> None:
    async with started(DEMO, *TOY) as process:
        lines = await told(process)
        (url, token) = re.findall(r'base_url="([^"]+)", api_key="([^"]+)"', lines)[0]
        assert f"token: {token}" in lines
        assert f"authorization: Bearer {token}" in lines
        assert f"browser: {url.removesuffix('/v1')}/playground/ (the token" in lines
        (command,) = re.findall(r"(?m)^ +(OUTRIDER_TOKEN=.* generate .*)$", lines)
        asked = await asyncio.create_subprocess_shell(f"{command} --max-tokens 4", stdout=asyncio.subprocess.PIPE)
        assert (await asked.communicate())[0].strip()
        assert asked.returncode == 0
        (address, shown) = re.findall(r'outrider\.Client\("([^"]+)", token="([^"]+)"\)', lines)[0]
        async with Client(address, token=shown) as ours:
            assert (await ours.complete("!!", max_tokens=4)).text
        async with openai.AsyncOpenAI(base_url=url, api_key=token, max_retries=0) as client:
            answer = await client.completions.create(model="", prompt="!!", max_tokens=4)
            assert answer.choices[0].text
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="another").completions.create(model="", prompt="!!")
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0

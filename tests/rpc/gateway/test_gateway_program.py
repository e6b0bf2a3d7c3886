"""The gateway as users run it: processes of their own, a real model, and a public benchmark client."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from contextlib import AbstractAsyncContextManager
from typing import Any

import openai
import pytest
from programs import running

from outrider.cli.bundles import prepare
from outrider.cli.stack import DEFAULT_MODEL, local_stack
from outrider.client import Client

TOY = ["--target=toy:vocab=128,seed=1", "--draft=toy:vocab=128,seed=1,agreement=0.8", "--port=0", "--gateway-port=0"]
BENCH_CLIENT = "BENCH_CLIENT"
"""Variable that names vLLM's command, whose `bench serve` is the public client."""
MESSAGES: list[Any] = [{"role": "user", "content": "Name three rivers, and write one word with an é."}]


def started(module: str, *args: str) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    """With the toys."""
    return running(
        module, *args, *TOY, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": "300"},
    )  # fmt: skip


async def told(process: asyncio.subprocess.Process) -> str:
    """What it says until it says how it is stopped."""
    assert process.stdout is not None
    lines = ""
    while "Ctrl-C" not in lines:
        line = (await process.stdout.readline()).decode()
        assert line, lines
        lines += line
    return lines


@pytest.mark.slow
async def test_up_serves_openai_and_ends_with_it() -> None:
    async with started("outrider.cli", "up") as process:
        lines = await told(process)
        (url,) = re.findall(r'base_url="([^"]+)", api_key="any"', lines)
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
            answer = await client.completions.create(model="", prompt="!!", max_tokens=4)
            assert answer.choices[0].text
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


@pytest.mark.slow
async def test_the_demo_prints_a_token_that_is_asked_for() -> None:
    async with started("outrider.cli.demo_gateway") as process:
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


@pytest.mark.slow
async def test_a_real_model_chats_with_the_same_text_and_bytes_of_its_tokens() -> None:
    async with (
        local_stack(DEFAULT_MODEL, None, gateway={}) as stack,
        Client(stack.address) as ours,
        openai.AsyncOpenAI(base_url=f"http://{stack.processes['gateway'].address}/v1", api_key="any") as client,
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


@pytest.mark.slow
@pytest.mark.outside
@pytest.mark.parametrize(("backend", "path"), [("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions")])
async def test_a_public_benchmark_client_reports_every_request_well(backend: str, path: str) -> None:
    command = os.environ.get(BENCH_CLIENT)
    if not command:
        pytest.skip(f"{BENCH_CLIENT} names no `vllm` command")
    tokenizer = str(await asyncio.to_thread(prepare, DEFAULT_MODEL))
    async with local_stack(DEFAULT_MODEL, None, gateway={}) as stack:
        process = await asyncio.create_subprocess_exec(
            command, "bench", "serve", "--backend", backend, "--endpoint", path,
            "--base-url", f"http://{stack.processes['gateway'].address}",
            "--model", DEFAULT_MODEL, "--tokenizer", tokenizer, "--dataset-name", "random", "--ignore-eos",
            "--random-input-len", "16", "--random-output-len", "16", "--num-prompts", "4", "--max-concurrency", "2",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output = (await process.communicate())[0].decode()
        assert process.returncode == 0, output
        assert re.search(r"Successful requests:\s+4\b", output), output
        assert re.search(r"Total generated tokens:\s+64\b", output), output

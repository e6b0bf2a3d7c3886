"""Public benchmark clients against the gateway. Each brings more than a GB, so none is installed here:

python -m venv elsewhere && elsewhere/bin/pip install aiperf        # or guidellm, or vllm
BENCH_CLIENT=elsewhere/bin/aiperf pytest tests/rpc/gateway/test_benchmark_clients.py
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.cli.bundles import prepare
from outrider.cli.options import choose_heads
from outrider.cli.stack import DEFAULT_MODEL, local_stack

BENCH_CLIENT = "BENCH_CLIENT"
"""Variable that names the client's command."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NUM_REQUESTS, NUM_TOKENS = 4, 16
SIZES = {"requests": str(NUM_REQUESTS), "tokens": str(NUM_TOKENS), "streams": "2"}


def vllm(url: str, path: str, stream: bool, tokenizer: str, folder: Path) -> list[str]:
    if not stream:
        pytest.skip("vllm bench serve always streams")
    return [
        "bench", "serve", "--backend", "openai-chat" if path == CHAT else "openai", "--endpoint", path,
        "--base-url", url, "--model", DEFAULT_MODEL, "--tokenizer", tokenizer, "--dataset-name", "random",
        "--ignore-eos", "--random-input-len", SIZES["tokens"], "--random-output-len", SIZES["tokens"],
        "--num-prompts", SIZES["requests"], "--max-concurrency", SIZES["streams"],
    ]  # fmt: skip


def vllm_reports(output: str, folder: Path) -> None:
    assert re.search(rf"Successful requests:\s+{NUM_REQUESTS}\b", output)
    assert re.search(rf"Total generated tokens:\s+{NUM_REQUESTS * NUM_TOKENS}\b", output)


def aiperf(url: str, path: str, stream: bool, tokenizer: str, folder: Path) -> list[str]:
    return [
        "profile", "--model", DEFAULT_MODEL, "--url", url, "--endpoint-type", "chat" if path == CHAT else "completions",
        *(["--streaming"] if stream else []), "--tokenizer", tokenizer, "--use-server-token-count",
        "--extra-inputs", "ignore_eos:true", "--isl", SIZES["tokens"], "--osl", SIZES["tokens"],
        "--request-count", SIZES["requests"], "--concurrency", SIZES["streams"], "--random-seed", "1",
        "--ui", "none", "--artifact-dir", str(folder),
    ]  # fmt: skip


def aiperf_reports(output: str, folder: Path) -> None:
    told = json.loads((folder / "profile_export_aiperf.json").read_text())
    assert told["request_count"]["avg"] == NUM_REQUESTS
    assert told["output_sequence_length"]["avg"] == NUM_TOKENS
    console = (folder / "profile_export_console.txt").read_text()
    assert "Spec Decode" in console
    assert "Accepted drafts per step" in console


def guidellm(url: str, path: str, stream: bool, tokenizer: str, folder: Path) -> list[str]:
    backend = f"kind=openai_http,target={url},model={DEFAULT_MODEL},request_format={path},stream={str(stream).lower()}"
    return [
        "run", "--backend", backend, "--tokenizer", f"kind=huggingface_auto,model={tokenizer}",
        "--data", f"kind=synthetic_text,prompt_tokens={NUM_TOKENS},output_tokens={NUM_TOKENS}",
        "--profile", f"kind=concurrent,streams={SIZES['streams']}",
        "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
        "--output", f"kind=json,path={folder / 'told.json'}", "--disable-console-interactive",
    ]  # fmt: skip


def guidellm_reports(output: str, folder: Path) -> None:
    (run,) = json.loads((folder / "told.json").read_text())["benchmarks"]
    assert run["metrics"]["request_totals"] == {
        "successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS,
    }  # fmt: skip
    assert run["metrics"]["output_token_count"]["successful"]["total_sum"] == NUM_REQUESTS * NUM_TOKENS


CLIENTS: dict[str, tuple[Callable[[str, str, bool, str, Path], list[str]], Callable[[str, Path], None]]] = {
    "vllm": (vllm, vllm_reports),
    "aiperf": (aiperf, aiperf_reports),
    "guidellm": (guidellm, guidellm_reports),
}


@pytest.mark.slow
@pytest.mark.outside
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_public_benchmark_client_reports_every_request_well(path: str, stream: bool, tmp_path: Path) -> None:
    command = os.environ.get(BENCH_CLIENT)
    if not command:
        pytest.skip(f"{BENCH_CLIENT} names no command of {', '.join(CLIENTS)}")
    arguments, check = CLIENTS[Path(command).name]
    tokenizer = str(await asyncio.to_thread(prepare, DEFAULT_MODEL))
    heads = {"heads": choose_heads(DEFAULT_MODEL, "auto")}
    async with local_stack(DEFAULT_MODEL, None, gateway={}, target_worker=heads) as stack:
        url = f"http://{stack.processes['gateway'].address}"
        process = await asyncio.create_subprocess_exec(
            command, *arguments(url, path, stream, tokenizer, tmp_path),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output
    try:
        check(output, tmp_path)
    except AssertionError:
        print(output)
        raise

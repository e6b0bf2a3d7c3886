"""The engine of a target by itself: `make bench-engine MODEL=...`.

A pass over 1 to 8 rows beside the bytes it reads and beside the stock module's pass; the memory that its process holds
per byte of weights; then, through coordinator and target worker as processes of their own, tokens/s of 8 streams beside
one, and the time per token of 3 streams while a long prompt arrives beside before. The last line is one JSON object.

Variables: MODEL, DTYPE (bfloat16), MAX_TOKENS (a stream's, 128), PROMPT_TOKENS (of the long prompt, 4096).
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
from bandwidth import NUM_BYTES, bytes_read, read_bandwidth
from jobs import HERE, INHERITED
from options import number, text

from outrider.cli.bench_runs import NEUTRAL, PLAIN
from outrider.cli.bundles import prepare
from outrider.cli.console import err, print_json, reporting_errors
from outrider.cli.measure import median
from outrider.cli.stack import DEFAULT_MODEL, local_stack
from outrider.client import Client, GenerateOptions
from outrider.lm.interface import PackedBatch, Segment
from outrider.lm.loading import load_model
from outrider.results import Chunk
from outrider.settings import TargetWorkerSettings

ROW_COUNTS = (1, 2, 4, 8)
NUM_CONTEXT, NUM_PASSES = 100, 25
BLOCK_SIZE, NUM_BLOCKS = 16, 64
NUM_STREAMS, NUM_RUNNING = 8, 3


def main() -> None:
    with reporting_errors():
        model = text("MODEL", DEFAULT_MODEL)
        dtype = text("DTYPE", "auto" if model.startswith("toy:") else "bfloat16")
        path = prepare(model)
        settings = TargetWorkerSettings(model=path, dtype=dtype)  # type: ignore[arg-type]
        figures: dict[str, Any] = passes(settings)
        figures["stock_pass_ms"] = stock_pass_ms(path, figures["dtype"])
        figures |= asyncio.run(streams(path, dtype, number("MAX_TOKENS", 128), number("PROMPT_TOKENS", 4096)))
        print_json(figures)


def passes(settings: TargetWorkerSettings) -> dict[str, Any]:
    """In this process: median pass by row count, and what the model holds."""
    err.print("[dim]passes...[/]")
    num_bytes = 1 << 20 if settings.model.startswith("toy:") else NUM_BYTES
    bytes_per_s = read_bandwidth(num_bytes)
    importlib.import_module("outrider.lm.checkpoint")  # torch and transformers, which are no weights
    held_before = psutil.Process().memory_full_info().uss
    loaded = load_model(settings)
    held = psutil.Process().memory_full_info().uss - held_before
    model, table = loaded.model, list(range(NUM_BLOCKS))
    model.allocate_cache(NUM_BLOCKS, BLOCK_SIZE)
    model.forward(PackedBatch((Segment(0, [5] * NUM_CONTEXT, table, 1),)))
    pass_ms = {}
    for num_rows in ROW_COUNTS:
        batch = PackedBatch((Segment(NUM_CONTEXT, [5] * num_rows, table, num_rows),))
        seconds = []
        for _ in range(NUM_PASSES):
            begin = time.perf_counter()
            model.forward(batch)
            seconds.append(time.perf_counter() - begin)
        pass_ms[num_rows] = 1000 * median(seconds[2:])
    weight_bytes = bytes_read(Path(settings.model), loaded.description.dtype)
    bytes_per_s = max(bytes_per_s, read_bandwidth(num_bytes))
    floor_ms = 1000 * weight_bytes / bytes_per_s
    for num_rows, ms in pass_ms.items():
        share = f" = {ms / floor_ms:.2f} of what its bytes take at {bytes_per_s / 1e9:.1f} GB/s" if floor_ms else ""
        print(f"pass over {num_rows} rows: {ms:.1f} ms{share}", flush=True)
    if weight_bytes:
        print(f"held: {held / 1e9:.3f} GB for {weight_bytes / 1e9:.3f} GB of weights", flush=True)
    return {
        "dtype": loaded.description.dtype,
        "pass_ms": pass_ms[1],
        "pass_8_rows_ms": pass_ms[8],
        "pass_vs_floor": pass_ms[1] / floor_ms if floor_ms else None,
        "pass_8_rows_vs_floor": pass_ms[8] / floor_ms if floor_ms else None,
        "held_vs_weights": held / weight_bytes if weight_bytes else None,
    }


def stock_pass_ms(path: str, dtype: str) -> float | None:
    """Of the stock module in a process of its own; None for a toy."""
    if path.startswith("toy:"):
        return None
    command = [sys.executable, str(HERE / "peer_forward.py"), path, dtype]
    done = subprocess.run(command, env={**INHERITED, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=True)
    ms = float(done.stdout.split()[-1])
    print(f"stock pass over 1 row: {ms:.1f} ms", flush=True)
    return ms


async def streams(path: str, dtype: str, max_tokens: int, num_prompt_tokens: int) -> dict[str, float]:
    """Through the services, without drafts."""
    err.print("[dim]streams...[/]")
    async with local_stack(path, None, target_worker={"dtype": dtype}) as stack:
        async with Client(stack.address, timeout_s=600) as client:
            await Stream(client, 90, max_tokens).run()  # warms up
            one = Stream(client, 0, max_tokens)
            await one.run()
            begin = time.perf_counter()
            many = [Stream(client, index, max_tokens) for index in range(1, NUM_STREAMS + 1)]
            await asyncio.gather(*(stream.run() for stream in many))
            together = sum(len(stream.times) for stream in many) / (max(s.times[-1] for s in many) - begin)
            gain = together / (len(one.times) / (one.times[-1] - one.begun))
            print(f"{NUM_STREAMS} streams: {gain:.2f} times the tokens/s of one", flush=True)
            slowdown = await prefill_slowdown(client, max_tokens, num_prompt_tokens)
            print(f"time per token beside a prompt of {num_prompt_tokens}: {slowdown:.2f} times without", flush=True)
    return {"streams_8_vs_1": gain, "time_per_token_during_prefill": slowdown}


class Stream:
    """A greedy stream without drafts. `times`: when each token came, s."""

    def __init__(self, client: Client, index: int, max_tokens: int, num_prompt_tokens: int = 24) -> None:
        self._client = client
        self._prompt = [3 + (7 * index + step * (index + 3)) % 50 for step in range(num_prompt_tokens)]
        self._max_tokens = max_tokens
        self.begun = 0.0
        self.times: list[float] = []

    async def run(self) -> None:
        options: GenerateOptions = {**NEUTRAL, **PLAIN, "temperature": 0.0, "max_tokens": self._max_tokens}
        self.begun = time.perf_counter()
        async for event in self._client.generate(self._prompt, **options):
            if isinstance(event, Chunk):
                self.times += [time.perf_counter()] * len(event.token_ids)


async def prefill_slowdown(client: Client, max_tokens: int, num_prompt_tokens: int) -> float:
    """Mean time per token of running streams while the prompt is computed, over that without it: the mean of just
    before and just after, since their own texts grow meanwhile."""
    longest = (await client.model_info()).context_length - 64
    running = [Stream(client, 20 + index, longest) for index in range(NUM_RUNNING)]
    tasks = [asyncio.create_task(stream.run()) for stream in running]
    try:
        while min(len(stream.times) for stream in running) < max_tokens and not any(task.done() for task in tasks):
            await asyncio.sleep(0.01)
        long = Stream(client, 50, 1, num_prompt_tokens)
        await long.run()
        num_tokens = len(running[0].times)
        while len(running[0].times) < num_tokens + max_tokens and not any(task.done() for task in tasks):
            await asyncio.sleep(0.01)
        if any(task.done() for task in tasks):
            raise RuntimeError("a running stream ended before the long prompt was computed: give fewer PROMPT_TOKENS")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def per_token(first: float, last: float) -> float:
        pairs = (pair for stream in running for pair in itertools.pairwise(stream.times))
        return fmean(b - a for a, b in pairs if first <= a and b <= last)

    begun, ended = long.begun, long.times[-1]
    without = fmean((per_token(running[0].times[2], begun), per_token(ended, running[0].times[-1])))
    return per_token(begun, ended) / without


if __name__ == "__main__":
    main()

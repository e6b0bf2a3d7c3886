"""What watching costs: tokens/s with metrics scraped and tracing on, off the sampled path, against neither.

Two stacks of real processes over toys whose passes cost nothing, so that all time is ours, side by side. Every prompt
is run on both in turn, in changing order. Told are the median over pairs, and the processor time of the services, which
other work on the machine disturbs less. Settings are variables: PAIRS, TOKENS, STREAMS, SCRAPE_S, TOY, SAMPLE_RATIO,
CONTROL. The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import statistics
import time
import urllib.request
from contextlib import AsyncExitStack
from typing import Any

import psutil

from outrider.cli.stack import Stack, local_stack
from outrider.client import Client

PAIRS = int(os.environ.get("PAIRS", "40"))
TOKENS = int(os.environ.get("TOKENS", "200"))
STREAMS = int(os.environ.get("STREAMS", "4"))
SCRAPE_S = float(os.environ.get("SCRAPE_S", "15"))
SAMPLE_RATIO = float(os.environ.get("SAMPLE_RATIO", "0"))
TOY = os.environ.get("TOY", "toy:vocab=512,seed=1")
CONTROL = os.environ.get("CONTROL", "0") == "1"
"""Neither stack is watched: what is told then is the noise of this machine."""
AIM_PERCENT = 2.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def scrape(ports: list[int]) -> None:
    """As Prometheus does."""
    while True:
        for port in ports:
            await asyncio.to_thread(lambda url: urllib.request.urlopen(url).read(), f"http://127.0.0.1:{port}/metrics")
        await asyncio.sleep(SCRAPE_S)


def cpu_s(stack: Stack) -> float:
    """Of all its processes since they began."""
    times = [psutil.Process(child.pid).cpu_times() for child in stack.processes.values()]
    return sum(one.user + one.system for one in times)


async def tokens_per_s(client: Client, seed: int) -> float:
    begun = time.perf_counter()
    answers = await asyncio.gather(
        *(
            client.complete(
                [1, 2, 3], seed=STREAMS * seed + n, max_tokens=TOKENS, ignore_eos=True, num_speculative_tokens=3
            )
            for n in range(STREAMS)
        )
    )
    assert sum(answer.speculation.num_draft_tokens for answer in answers) > 0, "inconclusive: nothing was drafted"
    return sum(len(answer.token_ids) for answer in answers) / (time.perf_counter() - begun)


async def measure() -> dict[str, Any]:
    ports = [free_port() for _ in range(3)]
    # nobody is there: what is not sampled must not care
    traced = {"otlp_endpoint": f"http://127.0.0.1:{free_port()}"}
    watched: list[dict[str, Any]] = [{**traced, "metrics_port": port} for port in ports]
    watched[0]["trace_sample_ratio"] = SAMPLE_RATIO
    if CONTROL:
        ports, watched = [], [{}, {}, {}]
    quiet = {"log_level": "warning"}
    draft = f"{TOY},agreement=0.8"
    async with AsyncExitStack() as cleanup:
        off = await cleanup.enter_async_context(local_stack(TOY, draft, shared=quiet))
        on = await cleanup.enter_async_context(
            local_stack(
                TOY, draft, shared={"log_format": "json"}, coordinator=watched[0], target_worker=watched[1],
                draft_worker=watched[2],
            )
        )  # fmt: skip
        scraping = asyncio.create_task(scrape(ports))
        cleanup.callback(scraping.cancel)
        clients = [await cleanup.enter_async_context(Client(stack.address)) for stack in (off, on)]
        for client in clients:
            await tokens_per_s(client, 10_000)
        speeds: list[tuple[float, float]] = []
        used_s = [cpu_s(off), cpu_s(on)]
        for pair in range(PAIRS):
            found = {}
            for which in random.Random(pair).sample((0, 1), 2):
                found[which] = await tokens_per_s(clients[which], pair)
            speeds.append((found[0], found[1]))
        assert not scraping.done()
        num_tokens = PAIRS * STREAMS * TOKENS
        cpu_us = [1e6 * (cpu_s(stack) - begun) / num_tokens for stack, begun in zip((off, on), used_s, strict=True)]
    ratios = sorted(watched_speed / plain_speed for plain_speed, watched_speed in speeds)
    return {
        "num_pairs": PAIRS,
        "num_streams": STREAMS,
        "sample_ratio": SAMPLE_RATIO,
        "is_control": CONTROL,
        "tokens_per_s_unwatched": statistics.median(plain_speed for plain_speed, _ in speeds),
        "tokens_per_s_watched": statistics.median(watched_speed for _, watched_speed in speeds),
        "overhead_percent": 100 * (1 - statistics.median(ratios)),
        "overhead_percent_quartiles": [100 * (1 - ratios[3 * PAIRS // 4]), 100 * (1 - ratios[PAIRS // 4])],
        "cpu_us_per_token_unwatched": cpu_us[0],
        "cpu_us_per_token_watched": cpu_us[1],
        "cpu_overhead_percent": 100 * (cpu_us[1] / cpu_us[0] - 1),
        "aim_percent": AIM_PERCENT,
    }


def main() -> None:
    found = asyncio.run(measure())
    low, high = found["overhead_percent_quartiles"]
    print(f"{STREAMS} streams x {TOKENS} tokens, {PAIRS} pairs, passes that cost nothing, scraped each {SCRAPE_S:g} s")
    print(f"  neither metrics nor traces   {found['tokens_per_s_unwatched']:8.0f} tokens/s")
    print(f"  both, off the sampled path   {found['tokens_per_s_watched']:8.0f} tokens/s")
    print(f"  overhead {found['overhead_percent']:.1f}% (quartiles {low:.1f} to {high:.1f}), aim <= {AIM_PERCENT:g}%")
    print(f"  processor time a token: {found['cpu_overhead_percent']:.1f}% more")
    print(json.dumps(found))


if __name__ == "__main__":
    main()

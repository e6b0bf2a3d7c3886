"""What watching costs: tokens/s with metrics scraped and tracing on, off the sampled path, against neither.

See `side_by_side.py` for what is run. Variables: PAIRS, TOKENS, STREAMS, TOY, SCRAPE_S, SAMPLE_RATIO, and CONTROL=1:
neither stack is watched, and what is told then is the noise of this machine. The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from options import real, text
from ports import free_port
from side_by_side import Size, compare, quartiles

from outrider.cli.console import print_json, reporting_errors
from outrider.cli.stack import local_stack
from outrider.client import Client

AIM_PERCENT = 2.0


async def scrape(ports: Sequence[int], interval_s: float) -> None:
    """As Prometheus does."""
    while True:
        for port in ports:
            await asyncio.to_thread(lambda url: urllib.request.urlopen(url).read(), f"http://127.0.0.1:{port}/metrics")
        await asyncio.sleep(interval_s)


async def measure(size: Size, scrape_s: float, sample_ratio: float, *, is_control: bool) -> dict[str, Any]:
    ports: list[int] = []
    watched: list[dict[str, Any]] = [{}, {}, {}]
    if not is_control:
        ports = [free_port() for _ in range(3)]
        # nobody is there: what is not sampled must not care
        traced = {"otlp_endpoint": f"http://127.0.0.1:{free_port()}"}
        watched = [{**traced, "metrics_port": port} for port in ports]
        watched[0]["trace_sample_ratio"] = sample_ratio
    coordinator, target_worker, draft_worker = watched
    async with AsyncExitStack() as cleanup:
        off = await cleanup.enter_async_context(local_stack(size.toy, size.draft, shared={"log_level": "warning"}))
        on = await cleanup.enter_async_context(
            local_stack(
                size.toy, size.draft, shared={"log_format": "json"}, coordinator=coordinator,
                target_worker=target_worker, draft_worker=draft_worker,
            )
        )  # fmt: skip
        scraping = asyncio.create_task(scrape(ports, scrape_s))
        cleanup.callback(scraping.cancel)
        clients = (
            await cleanup.enter_async_context(Client(off.address)),
            await cleanup.enter_async_context(Client(on.address)),
        )
        found = await compare(size, (off, on), clients)
        assert not scraping.done()
    low, middle, high = quartiles(found.ratios)
    cpu_us = [1e6 * cpu_s / (size.num_pairs * size.num_streams * size.num_tokens) for cpu_s in found.cpu_s]
    return {
        "num_pairs": size.num_pairs,
        "num_streams": size.num_streams,
        "sample_ratio": sample_ratio,
        "is_control": is_control,
        "tokens_per_s_unwatched": found.medians[0],
        "tokens_per_s_watched": found.medians[1],
        "overhead_percent": 100 * (1 - middle),
        "overhead_percent_quartiles": [100 * (1 - high), 100 * (1 - low)],
        "cpu_us_per_token_unwatched": cpu_us[0],
        "cpu_us_per_token_watched": cpu_us[1],
        "cpu_overhead_percent": found.cpu_overhead_percent,
        "aim_percent": AIM_PERCENT,
    }


def main() -> None:
    with reporting_errors():
        size, scrape_s = Size.read(), real("SCRAPE_S", 15.0)
        is_control = text("CONTROL", "0") == "1"
        found = asyncio.run(measure(size, scrape_s, real("SAMPLE_RATIO", 0.0), is_control=is_control))
        low, high = found["overhead_percent_quartiles"]
        print(f"{size}, scraped each {scrape_s:g} s")
        print(f"  neither metrics nor traces   {found['tokens_per_s_unwatched']:8.0f} tokens/s")
        print(f"  both, off the sampled path   {found['tokens_per_s_watched']:8.0f} tokens/s")
        quartiles_told = f"(quartiles {low:.1f} to {high:.1f})"
        print(f"  overhead {found['overhead_percent']:.1f}% {quartiles_told}, aim <= {AIM_PERCENT:g}%")
        print(f"  processor time a token: {found['cpu_overhead_percent']:.1f}% more")
        print_json(found)


if __name__ == "__main__":
    main()

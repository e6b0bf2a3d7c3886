"""More clients than places, and very many streams, over three real processes with toy models: `make bench-overload`.

First, for a capacity of PLACES streams that run and QUEUE that wait, as many clients as that, each with one request
after the other, for UNLOADED_SECONDS; then ten times as many for SECONDS. A client that is refused comes back when
RetryInfo says, or after RETRY_S where that is given: clients that do not listen. Compared are the latencies of accepted
requests at the median and the 90th percentile, from call to the last token; told are how soon others were refused and
what each process's memory grew by, from its mean in the first quarter of the time to that in the last.

Then STREAMS requests at once. Told are how many were complete, how many texts were under way at one time, and what each
process's memory grew by for each of these, calls that had not begun yet included.

Passes are slept (PASS_MS, STREAMS_PASS_MS), so that a machine has time for what is measured here: the services
themselves. Every text is compared with the toy's own. The last line of stdout is one JSON object. Exit code 1 when a
text differed or a request failed otherwise than by RESOURCE_EXHAUSTED; figures fail nothing.

Variables: PLACES, QUEUE, TIMES, MAX_TOKENS, SECONDS, UNLOADED_SECONDS, RETRY_S, PASS_MS; STREAMS, STREAMS_MAX_TOKENS,
STREAMS_PASS_MS. PARTS: overload, streams, or both.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from statistics import fmean, quantiles
from typing import Any

from options import number, real, words

from outrider.cli.console import EXIT_FAILURE, print_json, reporting_errors
from outrider.cli.stack import COORDINATOR, Stack, local_stack
from outrider.client import Client
from outrider.errors import OutriderError, ResourceExhausted
from outrider.lm.toy import ToyModel, parse_toy
from outrider.results import Chunk, Complete

VOCAB = 64
NUM_CHANNELS = 8
"""Of many streams, connections that share them."""
SAMPLE_S = 0.5
SMALL_CACHES = {"trace_steps": 512, "draft_cache_bytes": 256 << 10}
"""Full before anything is measured, so that what grows is no cache that has room left."""


@dataclass
class Tally:
    """What clients have seen. Times in seconds."""

    latencies: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    refusals: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    texts: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Prompt and answer."""
    num_drafted: int = 0
    num_open: int = 0
    most_open: int = 0
    """Texts that had begun and were not complete, at once."""

    def begins(self) -> None:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)

    def num_wrong(self, model: ToyModel) -> int:
        """Texts that are not the toy's own. To be asked once nothing is measured any more."""
        return sum(ids != greedy(model, prompt, len(ids)) or not ids for prompt, ids in self.texts)


@dataclass
class Memory:
    """Resident bytes by process, one sample after the other."""

    samples: list[dict[str, int]] = field(default_factory=list)

    def growth_mb(self) -> dict[str, float]:
        """From the first quarter of the time to the last."""
        quarter = max(1, len(self.samples) // 4)
        first, last = self.samples[:quarter], self.samples[-quarter:]
        return {
            role: round((fmean(s[role] for s in last) - fmean(s[role] for s in first)) / 2**20, 1) for role in first[0]
        }


@asynccontextmanager
async def watched(stack: Stack) -> AsyncIterator[Memory]:
    """Its memory, sampled while the block runs."""
    memory = Memory()

    async def watch() -> None:
        while True:
            memory.samples.append(stack.resident_bytes())
            await asyncio.sleep(SAMPLE_S)

    watching = asyncio.create_task(watch())
    try:
        yield memory
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


@asynccontextmanager
async def connected(stack: Stack) -> AsyncIterator[list[Client]]:
    """A few connections, for many streams to share."""
    async with AsyncExitStack() as cleanup:
        clients = (Client(stack.address, resume=None) for _ in range(NUM_CHANNELS))
        yield [await cleanup.enter_async_context(client) for client in clients]


def main() -> None:
    with reporting_errors():
        parts = words("PARTS", "overload,streams")
        figures = {}
        if "overload" in parts:
            figures["overload"] = asyncio.run(overload())
        if "streams" in parts:
            figures["streams"] = asyncio.run(streams())
    print_json(figures)
    if any(part["wrong"] or part["failures"] for part in figures.values()):
        raise SystemExit(EXIT_FAILURE)


async def overload() -> dict[str, Any]:
    places, queue, times = number("PLACES", 8), number("QUEUE", 4), number("TIMES", 10)
    max_tokens, retry_s = number("MAX_TOKENS", 48), real("RETRY_S", 0.0)
    capacity = places + queue
    toy, draft = toys(real("PASS_MS", 30.0))
    settings = {"max_running_requests": places, "max_waiting_requests": queue, **SMALL_CACHES}
    async with local_stack(toy, draft, coordinator=settings, shared={"log_level": "warning"}, on_line=show) as stack:
        model = ToyModel(parse_toy(toy))
        await closed_loop(stack, capacity, real("UNLOADED_SECONDS", 20.0) / 4, max_tokens, retry_s)  # warms up
        calm, _ = await closed_loop(stack, capacity, real("UNLOADED_SECONDS", 20.0), max_tokens, retry_s)
        print(f"{capacity} clients: {told(calm.latencies)} s, {len(calm.latencies)} texts", flush=True)
        loaded, memory = await closed_loop(stack, times * capacity, real("SECONDS", 60.0), max_tokens, retry_s)
        print(f"{times * capacity} clients: {told(loaded.latencies)} s, {len(loaded.latencies)} texts", flush=True)
    before, after = spread(calm.latencies), spread(loaded.latencies)
    return {
        "clients": times * capacity,
        "running": places,
        "waiting": queue,
        "accepted": len(loaded.latencies),
        "refused": len(loaded.refusals),
        "latency_s": {"unloaded": before, "overloaded": after},
        "ratio": {name: round(after[name] / before[name], 3) for name in before},
        "first_token_s": {"unloaded": spread(calm.first_tokens), "overloaded": spread(loaded.first_tokens)},
        "refused_ms": {name: round(1000 * value, 1) for name, value in spread(loaded.refusals).items()},
        "refused_within_100_ms": round(fmean(value <= 0.1 for value in loaded.refusals or [0.0]), 4),
        "memory_growth_mb": memory.growth_mb(),
        "drafted": loaded.num_drafted,
        "wrong": calm.num_wrong(model) + loaded.num_wrong(model),
        "failures": dict(calm.failures + loaded.failures),
    }


async def closed_loop(
    stack: Stack, num_clients: int, seconds: float, max_tokens: int, retry_s: float
) -> tuple[Tally, Memory]:
    """So many clients, each with one request at a time, over a few connections."""
    tally, end = Tally(), time.perf_counter() + seconds

    async def client(index: int, channel: Client) -> None:
        rng = random.Random(index)
        await asyncio.sleep(rng.uniform(0, min(1.0, seconds / 4)))
        while time.perf_counter() < end:
            prompt = [rng.randrange(VOCAB) for _ in range(8)]
            wait_s = await ask(channel, prompt, max_tokens, tally)
            if wait_s is not None:
                left_s = end - time.perf_counter()
                await asyncio.sleep(min(max(0.0, left_s), retry_s or wait_s))

    async with connected(stack) as channels, watched(stack) as memory:
        await asyncio.gather(*(client(index, channels[index % NUM_CHANNELS]) for index in range(num_clients)))
    return tally, memory


async def ask(client: Client, prompt: list[int], max_tokens: int, tally: Tally) -> float | None:
    """One request. What it is told to wait where it is refused, seconds."""
    started, first, ids, num_drafted = time.perf_counter(), 0.0, list[int](), 0
    try:
        async for event in client.generate(prompt, max_tokens=max_tokens, temperature=0):
            if isinstance(event, Chunk):
                if not first:
                    first = time.perf_counter()
                    tally.begins()
                ids += event.token_ids
            elif isinstance(event, Complete):
                num_drafted = event.speculation.num_draft_tokens
    except ResourceExhausted as refused:
        tally.refusals.append(time.perf_counter() - started)
        return refused.retry_delay_s or 0.1
    except OutriderError as error:
        tally.failures[f"{error.status} {error.reason}"] += 1
        return 1.0
    finally:
        tally.num_open -= first > 0
    tally.latencies.append(time.perf_counter() - started)
    tally.first_tokens.append(first - started)
    tally.num_drafted += num_drafted
    tally.texts.append((prompt, ids if len(ids) == max_tokens else []))
    return None


async def streams() -> dict[str, Any]:
    num_streams, max_tokens = number("STREAMS", 2000), number("STREAMS_MAX_TOKENS", 128)
    toy, draft = toys(real("STREAMS_PASS_MS", 500.0))
    shared = {"log_level": "warning", "heartbeat_ms": 500}
    coordinator = {"max_running_requests": num_streams, "peer_timeout_s": 30.0}
    workers = {"max_batch_tokens": max(512, num_streams), "max_waiting_sessions": num_streams}
    async with (
        local_stack(
            toy,
            draft,
            shared=shared,
            coordinator=coordinator,
            target_worker=workers,
            draft_worker=workers,
            on_line=show,
        ) as stack,
        connected(stack) as channels,
    ):
        model, rng = ToyModel(parse_toy(toy)), random.Random(0)
        warm = Tally()
        await asyncio.gather(*(ask(channel, [1, 2], max_tokens, warm) for channel in channels))
        before, tally = stack.resident_bytes(), Tally()
        prompts = [[rng.randrange(VOCAB) for _ in range(8)] for _ in range(num_streams)]
        started = time.perf_counter()
        async with watched(stack) as memory:
            await asyncio.gather(
                *(ask(channels[i % NUM_CHANNELS], prompt, max_tokens, tally) for i, prompt in enumerate(prompts))
            )
            seconds = time.perf_counter() - started
    most = {role: max(sample[role] for sample in memory.samples) for role in before}
    each = {role: round((most[role] - before[role]) / 1000 / max(1, tally.most_open), 1) for role in before}
    return {
        "streams": num_streams,
        "most_at_once": tally.most_open,
        "complete": len(tally.latencies),
        "seconds": round(seconds, 1),
        "tokens_per_s": round(max_tokens * len(tally.latencies) / seconds),
        "drafted": tally.num_drafted,
        "coordinator_kb_per_stream": each[COORDINATOR],
        "kb_per_stream": each,
        "refused": len(tally.refusals),
        "wrong": tally.num_wrong(model),
        "failures": dict(tally.failures),
    }


def show(role: str, line: str) -> None:
    """What a process has to say."""
    print(f"{role}: {line}", file=sys.stderr, flush=True)


def toys(pass_ms: float) -> tuple[str, str]:
    """Target and draft. A draft takes a twentieth of a pass."""
    pair = f"toy:vocab={VOCAB},seed=1"
    return f"{pair},pass_ms={pass_ms:g}", f"{pair},agreement=0.9,pass_ms={pass_ms / 20:g}"


def greedy(model: ToyModel, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What the toy says by itself."""
    ids = list(prompt)
    for _ in range(max_tokens):
        ids.append(int(model.logits_for(ids).argmax()))
    return ids[len(prompt) :]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 90th and 99th percentile."""
    if len(values) < 2:
        return dict.fromkeys(("p50", "p90", "p99"), round(values[0], 4) if values else 0.0)
    cuts = quantiles(values, n=100, method="inclusive")
    return {f"p{percent}": round(cuts[percent - 1], 4) for percent in (50, 90, 99)}


def told(values: Sequence[float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in spread(values).items())


if __name__ == "__main__":
    main()

"""kill -9 and SIGSTOP of draft workers at random moments, under streams: real processes, one target and a coordinator
that stays. Texts are equal, streams are adopted, nothing leaks; how soon the next token came is printed, not asserted.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import random
import signal
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from accounting import held, num_accounted
from conftest import scaled
from faults.processes import Fleet

import outrider
from outrider.cli.process import Child
from outrider.server_info import Worker

VERIFY_MS = 20
TARGET = f"toy:vocab=24,seed=5,pass_ms={VERIFY_MS}"
DRAFT = "toy:vocab=24,seed=5,agreement=0.9,pass_ms=2"
NUM_DRAFT_WORKERS = 4
LENGTH = 150
PATIENCE_S = 120.0
MORE_FREEZES = 4
"""Where those before froze a worker that no stream was waiting for."""
COMMON = {"drain_grace_s": 0.5, "heartbeat_ms": 100, "log_level": "error"}
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0, "num_speculative_tokens": 3},
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 9, "num_speculative_tokens": 4},
    {"temperature": 1.0, "seed": 4},
    {"temperature": 1.0, "acceptance": "block"},
    {"temperature": 1.0, "acceptance": "token", "num_speculative_tokens": 3},
]
"""The last two by no text of their own: their law is the target's, which unit tests enumerate."""
NUM_EQUAL = 4


@asynccontextmanager
async def services() -> AsyncIterator[tuple[outrider.Client, Fleet]]:
    """A coordinator, a target and draft workers."""
    async with Fleet.running(**COMMON) as fleet:
        target, *drafts = await asyncio.gather(
            fleet.start("target", "target-worker", model=TARGET),
            *(fleet.start(f"draft-{i}", "draft-worker", model=DRAFT) for i in range(NUM_DRAFT_WORKERS)),
        )
        workers = {"target_workers": target, "draft_workers": ",".join(drafts)}
        values = {"peer_timeout_s": 1.0, "local_drafters": "", **workers}
        async with outrider.Client(await fleet.start("coordinator", "coordinator", **values)) as client:
            yield client, fleet


async def until(client: outrider.Client, condition: Callable[[list[Worker]], Any]) -> Any:
    """What the condition says of the draft workers, once it says something."""
    workers: list[Worker] = []
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                workers = [w for w in (await client.server_info()).workers if w.role == "draft"]
                if found := condition(workers):
                    return found
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"{condition} says nothing of {workers}")


@dataclass
class Streams:
    """Streams that run one after the other in each of several places, and what came of them."""

    client: outrider.Client
    requests: Sequence[dict[str, Any]]
    expected: list[list[int]]
    is_over: bool = False
    num_failures: int = 0
    num_texts: int = 0

    def __post_init__(self) -> None:
        self.num_drafted = [0] * len(self.requests)
        """Rounds with drafts, by place."""
        self.num_left = [0] * len(self.requests)
        """Tokens of the text that runs."""
        self.arrivals: list[list[float]] = [[] for _ in self.requests]
        self.target_ms: list[list[float]] = [[] for _ in self.requests]
        """Of each delivery: its wait for the pass that was under way, and its own pass, as the target tells them."""

    async def run(self, place: int) -> None:
        while not self.is_over:
            ids: list[int] = []
            stream = self.client.generate(
                [place, 1], max_tokens=LENGTH, report_steps=True, drafter="model", **self.requests[place]
            )
            complete = None
            async for event in stream:
                if isinstance(event, outrider.Chunk):
                    ids += event.token_ids
                    self.num_left[place] = LENGTH - len(ids)
                    assert event.step is not None
                    self.arrivals[place].append(time.perf_counter())
                    self.target_ms[place].append(event.step.queue_ms + event.step.verify_ms)
                    self.num_drafted[place] += event.step.num_draft_tokens > 0
                elif isinstance(event, outrider.Complete):
                    complete = event
            assert complete is not None
            self.num_texts += 1
            self.num_failures += complete.speculation.num_draft_failures
            assert num_accounted(complete.speculation) == len(ids) == LENGTH
            assert place >= NUM_EQUAL or ids == self.expected[place], f"{self.requests[place]}: another text"

    async def all_draft(self, running: list[asyncio.Task[None]]) -> None:
        """Until each place has drafted, and goes on. One that chooses for itself need not draft on a machine so busy
        that it does not pay: that it goes on is enough."""
        before = self._progress()
        async with asyncio.timeout(PATIENCE_S):
            while not all(now > was for now, was in zip(self._progress(), before, strict=True)):
                await asyncio.sleep(0.005)
                for task in running:
                    if task.done():
                        task.result()

    async def amid_a_text(self) -> None:
        """Until some stream is far from its end: where it is the only one, a kill strikes nobody between two texts."""
        async with asyncio.timeout(PATIENCE_S):
            while max(self.num_left) < LENGTH // 2:
                await asyncio.sleep(0.005)

    def _progress(self) -> list[int]:
        """By place: rounds with drafts where they are asked for, else deliveries."""
        return [
            drafted if "num_speculative_tokens" in request else len(arrivals)
            for request, drafted, arrivals in zip(self.requests, self.num_drafted, self.arrivals, strict=True)
        ]


@asynccontextmanager
async def streams(
    client: outrider.Client, requests: Sequence[dict[str, Any]] = REQUESTS
) -> AsyncIterator[tuple[Streams, list[asyncio.Task[None]]]]:
    """All of them run; at the end they end their texts."""
    expected = []
    for place, request in enumerate(requests[:NUM_EQUAL]):
        options = {**request, "num_speculative_tokens": 0}
        expected.append(list((await client.complete([place, 1], max_tokens=LENGTH, **options)).token_ids))
    one = Streams(client, requests, expected)
    running = [asyncio.create_task(one.run(place)) for place in range(len(requests))]
    try:
        yield one, running
        one.is_over = True
        await asyncio.wait_for(asyncio.gather(*running), PATIENCE_S)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def busiest(workers: list[Worker], restarts: Mapping[str, asyncio.Task[None]] = {}) -> str | None:
    """Address of the draft worker with most streams, those that are still being started left out."""
    starting = {address for address, restart in restarts.items() if not restart.done()}
    up = [w for w in workers if w.healthy and w.num_sessions and w.address not in starting]
    return max(up, key=lambda w: w.num_sessions).address if up else None


async def note_end(process: Child, gone_ms: list[float]) -> None:
    """How long it takes to end: its connections break no sooner."""
    started = time.perf_counter()
    await process.wait()
    gone_ms.append(1000 * (time.perf_counter() - started))


def nothing_held(workers: list[Worker]) -> bool:
    """All of them answer."""
    return all(w.healthy for w in workers) and not held(workers)


def report(one: Streams, kills: list[float], gone_ms: list[float]) -> str:
    """How long after each kill the streams went on, in verify times; and which part of it is the target's own: a token
    may have to wait for the pass that was under way, and then takes one. `gone_ms`: how long processes took to end."""
    waits, target_ms, rest_ms = [], [], []
    for kill, (arrivals, told_ms) in itertools.product(kills, zip(one.arrivals, one.target_ms, strict=True)):
        place = bisect.bisect_right(arrivals, kill)
        if 0 < place < len(arrivals):
            wait_ms = 1000 * (arrivals[place] - kill)
            waits.append(wait_ms / VERIFY_MS)
            target_ms.append(told_ms[place])
            rest_ms.append(max(0.0, wait_ms - told_ms[place]))
    usual = [b - a for arrivals in one.arrivals for a, b in itertools.pairwise(arrivals)]
    within = sum(wait <= 2 for wait in waits)
    own_ms = f"{statistics.median(target_ms):.1f} ms (median), {_p99(target_ms):.1f} (p99)"
    return (
        f"{len(one.requests)} streams, {len(kills)} kills, {one.num_texts} texts, {one.num_failures} losses; "
        f"next token after {statistics.median(waits):.2f} verify times (median), {_p99(waits):.2f} (p99), "
        f"{max(waits):.2f} (most), within 2: {within} of {len(waits)}; undisturbed between deliveries "
        f"{1000 * statistics.median(usual) / VERIFY_MS:.2f} (median). The target's own part, the end of a "
        f"pass that was under way and a pass: {own_ms}; "
        f"all else: {statistics.median(rest_ms):.1f} ms (median), {_p99(rest_ms):.1f} (p99), of which processes took "
        f"{statistics.median(gone_ms):.1f} (median), {max(gone_ms):.1f} (most) to end"
    )


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


@pytest.mark.slow
@pytest.mark.parametrize("num_streams", [len(REQUESTS), 1])
async def test_texts_are_equal_whenever_a_draft_worker_is_killed(num_streams: int) -> None:
    """One alone has no other's pass to wait for: how soon it goes on is the service's own doing."""
    rng, num_kills = random.Random(3), scaled(200)
    async with services() as (client, fleet):
        async with streams(client, REQUESTS[:num_streams]) as (one, running):
            kills, gone_ms = list[float](), list[float]()
            restarts: dict[str, asyncio.Task[None]] = {}
            async with asyncio.TaskGroup() as restarting:
                for _ in range(num_kills):
                    await one.all_draft(running)
                    await one.amid_a_text()
                    address = await until(client, partial(busiest, restarts=restarts))
                    await asyncio.sleep(rng.random() * 2 * VERIFY_MS / 1000)
                    name = fleet.at(address)
                    fleet.signal(name, signal.SIGKILL)
                    kills.append(time.perf_counter())
                    restarting.create_task(note_end(fleet.children[name], gone_ms))
                    restarts[address] = restarting.create_task(fleet.restart(name))
            await one.all_draft(running)
        print(report(one, kills, gone_ms))
        assert one.num_failures >= num_kills, f"INCONCLUSIVE: {num_kills} kills struck {one.num_failures} streams"
        await until(client, nothing_held)


@pytest.mark.slow
async def test_streams_of_a_frozen_draft_worker_go_on_and_nothing_is_left_after_it() -> None:
    """It wakes up with messages to send that nobody waits for any more."""
    frozen_s, num_freezes = scaled(10, at_least=3), scaled(3, at_least=1)
    async with services() as (client, fleet):
        async with streams(client) as (one, running):
            for attempt in range(num_freezes + MORE_FREEZES):
                if attempt >= num_freezes and one.num_failures:
                    break
                await one.all_draft(running)
                address = await until(client, busiest)
                fleet.signal(fleet.at(address), signal.SIGSTOP)
                thaw = time.perf_counter() + frozen_s
                await until(client, lambda workers, address=address: all(
                    not w.healthy and not w.num_sessions for w in workers if w.address == address
                ))  # fmt: skip
                await one.all_draft(running)  # others have adopted them
                await asyncio.sleep(max(0.0, thaw - time.perf_counter()))
                fleet.signal(fleet.at(address), signal.SIGCONT)
                await until(client, lambda workers: all(w.healthy for w in workers))
        assert one.num_failures > 0, "INCONCLUSIVE: no stream had the worker that was frozen"
        await until(client, nothing_held)

"""Streams cancelled at random moments leave nothing behind: no session, no cache block, on any of the services."""

import asyncio
import random

import pytest
from conftest import scaled
from stack import in_process_stack

import outrider

TARGET = "toy:vocab=24,seed=5,pass_ms=1,token_ms=0.05"
DRAFT = "toy:vocab=24,seed=5,agreement=0.85,pass_ms=0.3"


async def idle_info(client):
    """Server info once nothing is held any more, or as it is after 20 s."""
    for _ in range(200):
        info = await client.server_info()
        held = [w.capacity.num_sessions + w.capacity.num_waiting for w in info.workers]
        if info.num_requests_running == 0 and not any(held):
            return info
        await asyncio.sleep(0.1)
    return info


@pytest.mark.slow
async def test_nothing_leaks():
    rng = random.Random(4)
    num_streams, num_cancelled, num_finished = scaled(1000), 0, 0

    async def one(client, seed):
        nonlocal num_cancelled, num_finished
        stream = client.generate(
            [seed % 24, 1],
            seed=seed,
            max_tokens=rng.randrange(1, 60),
            acceptance=rng.choice(["token", "block", "coupled"]),
            drafter=rng.choice(["model", "lookup", "auto"]),
        )

        async def consume():
            async for _ in stream:
                pass

        task = asyncio.create_task(consume())
        done, _ = await asyncio.wait({task}, timeout=rng.random() * 0.15)
        if done:
            task.result()
            num_finished += 1
        else:
            task.cancel()
            num_cancelled += 1
            await asyncio.gather(task, return_exceptions=True)
        await stream.aclose()

    async with in_process_stack(TARGET, DRAFT) as stack, outrider.Client(stack.address) as client:
        before = await idle_info(client)
        for start in range(0, num_streams, 20):
            await asyncio.gather(*(one(client, seed) for seed in range(start, min(start + 20, num_streams))))
        after = await idle_info(client)
        assert num_cancelled > num_streams // 4, "INCONCLUSIVE: too few streams were cancelled in flight"
        assert (after.num_requests_running, after.num_requests_waiting) == (0, 0)
        for worker, fresh in zip(after.workers, before.workers, strict=True):
            assert worker.healthy
            assert (worker.capacity.num_sessions, worker.capacity.num_waiting) == (0, 0)
            assert worker.capacity.num_free_blocks == fresh.capacity.num_free_blocks == worker.capacity.num_blocks
        answer = await client.complete([1, 2], temperature=0.0, max_tokens=10)
        assert len(answer.token_ids) == 10

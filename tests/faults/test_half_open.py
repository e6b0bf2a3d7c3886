"""Connections of which one end has gone without a word: whoever is left finds out, and frees what it held for it."""

import asyncio

import pytest
from faults.soak.relay import Relay
from stack import in_process_stack

import outrider
from outrider.client import KeepAlive
from outrider.errors import Unavailable

TARGET = "toy:vocab=24,seed=5,pass_ms=20"
"""A text of 4,000 tokens takes far longer than NUM_TICKS."""
PINGS = {"ping_interval_ms": 200, "ping_timeout_ms": 200}
NUM_TICKS = 300
"""Of this process's own clock, 0.1 s each: one that stands still proves nothing. gRPC alone would wait for a minute."""


async def soon(condition):
    """Whether it comes true within NUM_TICKS."""
    for _ in range(NUM_TICKS):
        if await condition():
            return True
        await asyncio.sleep(0.1)
    return False


@pytest.mark.slow
async def test_a_client_that_is_cut_off_without_a_word_leaves_nothing_behind():
    async with in_process_stack(TARGET, None, coordinator=PINGS) as stack, outrider.Client(stack.address) as near:
        async with Relay(stack.address) as relay, outrider.Client(relay.address, resume=None) as far:
            stream = far.generate([1, 2], max_tokens=4000, num_speculative_tokens=0)
            async for event in stream:
                if isinstance(event, outrider.Chunk):
                    break
            relay.fall_silent()
            assert relay.num_silenced == 1

            async def is_free():
                info = await near.server_info()
                held = [w.num_sessions + w.capacity.num_sessions for w in info.workers]
                return info.num_requests_running == 0 and not any(held)

            assert not await is_free(), "INCONCLUSIVE: the text had ended"
            assert await soon(is_free)
            await stream.aclose()


@pytest.mark.slow
async def test_a_client_finds_out_that_its_coordinator_is_cut_off():
    async with in_process_stack(TARGET, None) as stack, Relay(stack.address) as relay:
        pings = KeepAlive(interval_ms=2_000, timeout_ms=200)
        async with outrider.Client(relay.address, resume=None, keep_alive=pings) as client:
            got = asyncio.Event()

            async def read():
                async for event in client.generate([1, 2], max_tokens=4000, num_speculative_tokens=0):
                    if isinstance(event, outrider.Chunk):
                        got.set()

            reading = asyncio.create_task(read())
            await got.wait()
            relay.fall_silent()

            async def is_told():
                return reading.done()

            assert await soon(is_told)
            with pytest.raises(Unavailable):
                await reading

"""A client that is closed has no connection left, whatever broke before; none waits for the garbage collector."""

import asyncio
import gc
from contextlib import contextmanager

import psutil
import pytest
from faults.soak.relay import Relay
from stack import in_process_stack

import outrider
from outrider.errors import Unavailable

TARGET = "toy:vocab=24,seed=5,pass_ms=2"
NUM_TICKS = 100


@contextmanager
def without_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def connections_to(relay):
    port = int(relay.address.rpartition(":")[2])
    found = psutil.Process().net_connections("tcp")
    return [c for c in found if c.raddr and c.raddr.port == port and c.status == psutil.CONN_ESTABLISHED]


async def are_gone(relay):
    for _ in range(NUM_TICKS):
        if not connections_to(relay):
            return True
        await asyncio.sleep(0.1)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("num_chunks", [0, 1, 5])
async def test_a_stream_that_is_left_early_leaves_no_connection_behind(num_chunks):
    async with in_process_stack(TARGET, None) as stack, Relay(stack.address) as relay:
        with without_garbage_collector():
            async with outrider.Client(relay.address) as client:
                events = client.generate([1, 2], max_tokens=60, temperature=0.0)
                for _ in range(1 + num_chunks):
                    assert not isinstance(await anext(events), outrider.Complete)
                assert len(connections_to(relay)) == 1
                await events.aclose()
            assert await are_gone(relay)


@pytest.mark.slow
@pytest.mark.parametrize("resumes", [True, False])
async def test_a_loss_leaves_no_connection_behind(resumes):
    async with in_process_stack(TARGET, None) as stack, Relay(stack.address) as relay:
        with without_garbage_collector():
            policy = {} if resumes else {"resume": None}
            async with outrider.Client(relay.address, **policy) as client:
                num_tokens = num_resumes = 0
                try:
                    async for event in client.generate([1, 2], max_tokens=60, temperature=0.0):
                        if isinstance(event, outrider.Chunk):
                            if not num_tokens:
                                relay.cut()
                                relay.heal()
                            num_tokens += len(event.token_ids)
                        elif isinstance(event, outrider.Complete):
                            num_resumes = event.num_resumes
                except Unavailable:
                    assert not resumes
                assert bool(num_resumes) == resumes, "INCONCLUSIVE"
                assert num_tokens == 60 or not resumes
            assert await are_gone(relay)

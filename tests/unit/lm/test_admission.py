"""Admission: never fits, waits its turn, queue full, cancelled while waiting."""

import asyncio

import pytest
from lm_programs import toy_engine

from outrider.errors import InvalidArgument, ResourceExhausted


async def test_what_could_never_fit_is_refused_at_once():
    engine = toy_engine("toy:context=100", num_blocks=10, block_size=4)
    for length, words in (
        (0, "at least 1"),
        (-3, "at least 1"),
        (101, "context length of 100"),
        (41, "11 cache blocks"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            await engine.open_sequence(length)
    sequence = await engine.open_sequence(40)
    assert sequence.num_promised_blocks == 10


async def test_others_wait_in_order_and_get_blocks_as_these_come_free():
    engine = toy_engine(num_blocks=4, block_size=4)
    held = [await engine.open_sequence(8), await engine.open_sequence(8)]
    order = []

    async def open_(name, length):
        sequence = await engine.open_sequence(length)
        order.append(name)
        return sequence

    large = asyncio.create_task(open_("large", 16))
    await asyncio.sleep(0)
    small = asyncio.create_task(open_("small", 4))
    await asyncio.sleep(0)
    engine.close_sequence(held[0])
    await asyncio.sleep(0.01)
    assert order == []  # the small one fits, but was not first
    assert engine.stats().num_waiting == 2
    engine.close_sequence(held[1])
    engine.close_sequence(await large)
    assert (await small).num_promised_blocks == 1
    assert order == ["large", "small"]


async def test_beyond_the_queue_is_resource_exhausted_with_a_delay():
    engine = toy_engine(num_blocks=1, max_waiting_sessions=2)
    await engine.open_sequence(1)
    waiting = [asyncio.create_task(engine.open_sequence(1)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted, match="max_waiting_sessions") as caught:
        await engine.open_sequence(1)
    assert caught.value.retry_delay_s > 0
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert engine.stats().num_waiting == 0


async def test_a_cancelled_waiter_lets_the_next_one_in():
    engine = toy_engine(num_blocks=4, block_size=4)
    held = await engine.open_sequence(12)
    large, small = asyncio.create_task(engine.open_sequence(16)), asyncio.create_task(engine.open_sequence(4))
    await asyncio.sleep(0)
    large.cancel()
    sequence = await small
    engine.check_integrity([held, sequence])


async def test_a_cancel_in_the_moment_of_admission_gives_the_blocks_back():
    engine = toy_engine(num_blocks=1)
    held = await engine.open_sequence(1)
    waiting = asyncio.create_task(engine.open_sequence(1))
    await asyncio.sleep(0)
    engine.close_sequence(held)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    engine.check_integrity([])
    assert engine.stats().num_sequences == 0

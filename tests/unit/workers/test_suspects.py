"""Suspects take turns: one at a time, in order, each for so many tokens, whatever ends it."""

import asyncio
import random

import pytest
from conftest import scaled

import target_worker.suspects as suspects_module
from outrider.errors import Aborted
from target_worker.suspects import Suspects


async def test_one_at_a_time_in_order_and_for_as_long_as_it_takes():
    rng = random.Random(5)
    for _ in range(scaled(200)):
        suspects, alone, order = Suspects(), [], []

        async def session(number, suspects=suspects, alone=alone, order=order):
            turn, num_tokens = suspects.turn(), rng.randint(1, 6)
            try:
                await turn.take(num_tokens)
                order.append(number)
                alone.append(number)
                while num_tokens > 0 and rng.random() < 0.9:
                    assert alone == [number]
                    await asyncio.sleep(0)
                    num_decided = rng.randint(1, 3)
                    num_tokens -= num_decided
                    if num_tokens <= 0:
                        alone.remove(number)
                    turn.decided(num_decided)
                turn.decided(rng.randint(0, 1) if num_tokens <= 0 else 0)  # cleared already
            finally:
                if number in alone:
                    alone.remove(number)
                turn.end()
                turn.end()

        tasks = [asyncio.create_task(session(number)) for number in range(8)]
        await asyncio.sleep(0)
        for _ in range(rng.randint(0, 3)):
            await asyncio.sleep(0)
            rng.choice(tasks).cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() or task.exception() is None for task in tasks)
        assert order == sorted(order)
        assert not alone
        async with asyncio.timeout(5):
            await suspects.turn().take(1)


async def test_a_session_without_a_turn_counts_nothing_and_one_may_take_it_anew():
    suspects = Suspects()
    turn, other = suspects.turn(), suspects.turn()
    turn.decided(5)
    turn.end()
    await turn.take(2)
    await turn.take(3)
    waiting = asyncio.create_task(other.take(1))
    turn.decided(2)
    await asyncio.sleep(0)
    assert not waiting.done()
    turn.decided(1)
    await asyncio.wait_for(waiting, 5)


async def test_a_turn_that_nobody_uses_lapses_and_one_that_is_used_does_not(monkeypatch):
    monkeypatch.setattr(suspects_module, "MAX_UNASKED_S", 0.01)
    suspects = Suspects()
    frozen, asks, last = suspects.turn(), suspects.turn(), suspects.turn()
    await frozen.take(1)
    await asyncio.wait_for(asks.take(1), 5)
    asks.used()
    waiting = asyncio.create_task(last.take(1))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    with pytest.raises(Aborted):
        frozen.used()  # it wakes, too late: the turn is another's, and it must not pass for alone
    frozen.decided(1)
    frozen.end()
    await asyncio.sleep(0.01)
    assert not waiting.done()
    asks.decided(1)
    asks.used()
    await asyncio.wait_for(waiting, 5)
    last.end()
    await asyncio.wait_for(frozen.take(1), 5)
    frozen.used()

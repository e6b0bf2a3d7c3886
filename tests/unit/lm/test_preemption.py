"""Too few blocks for all: the last in rank wait, are computed again and give the same text; nobody waits for ever."""

import asyncio

import numpy as np
import pytest
from conftest import scaled
from lm_programs import greedy, greedy_text, score, started, toy_engine

from outrider.lm.interface import Forward
from outrider.lm.job import Job
from outrider.lm.kv_cache import Sequence
from outrider.lm.placement import Placement
from outrider.lm.scheduler import StepQueue
from outrider.lm.sequence_cache import SequenceCache

NEVER = 1e9


def short_engine(num_blocks, **kwargs):
    options = {"overcommit": 100.0, "idle_grace_s": NEVER, "max_waiting_sessions": 99, "block_size": 4} | kwargs
    return toy_engine("toy:vocab=16,order=0,seed=8", num_blocks=num_blocks, **options)


@pytest.mark.parametrize("max_batch_tokens", [3, 64])
async def test_streams_beyond_the_cache_all_give_their_own_text(max_batch_tokens):
    """12 streams that grow to 10 blocks each, on 14 blocks."""
    engine = short_engine(14, max_batch_tokens=max_batch_tokens)
    with started(engine):

        async def stream(index):
            sequence = await engine.open_sequence(40, priority=index % 3)
            try:
                return await engine.run(greedy(sequence, [index] * 6, 34))
            finally:
                engine.close_sequence(sequence)

        async with asyncio.timeout(60):
            texts = await asyncio.gather(*map(stream, range(12)))
        assert texts == [greedy_text(engine.model, [index] * 6, 34) for index in range(12)]
        stats = engine.stats()
        assert stats.num_preemptions > 0
        assert stats.num_idle_evictions == 0
        assert stats.num_rows > 12 * 39  # some were computed twice
        assert stats.num_free_blocks == 14
        engine.check_integrity([])


async def test_without_overcommitment_nobody_is_preempted():
    engine = short_engine(14, overcommit=1.0)
    with started(engine):

        async def stream(index):
            sequence = await engine.open_sequence(40)
            try:
                return await engine.run(greedy(sequence, [index] * 6, 34))
            finally:
                engine.close_sequence(sequence)

        texts = await asyncio.gather(*map(stream, range(6)))
    assert texts == [greedy_text(engine.model, [index] * 6, 34) for index in range(6)]
    assert engine.stats().num_preemptions == 0
    assert engine.stats().num_rows == 6 * 39


async def test_an_idle_session_gives_way_after_its_grace_and_goes_on_as_if_nothing_had_been():
    engine = short_engine(10, idle_grace_s=0.0)
    with started(engine):
        idle, other = await engine.open_sequence(40), await engine.open_sequence(40)
        ids = [index % 16 for index in range(30)]
        await engine.run(score(idle, ids, 1))
        await engine.run(score(other, ids[::-1], 1))
        assert engine.stats().num_idle_evictions == 1
        assert (idle.token_ids, idle.blocks) == (ids, [])
        logits = await engine.run(score(idle, [3, 4, 5]))
        expected = [engine.model.logits_for([*ids, *[3, 4, 5][:n]]) for n in (1, 2, 3)]
        assert np.array_equal(logits, expected)
        assert idle.token_ids == [*ids, 3, 4, 5]
        engine.check_integrity([idle, other])


async def test_a_job_that_waits_for_blocks_ends_with_its_caller():
    engine = short_engine(10)
    with started(engine):
        holder, other = await engine.open_sequence(40), await engine.open_sequence(40)
        await engine.run(score(holder, [1] * 36, 1))  # older, and never idle for long enough
        waiting = asyncio.create_task(engine.run(score(other, [2] * 20, 1)))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        again = asyncio.create_task(engine.run(score(other, [2] * 20, 1)))
        await asyncio.sleep(0.01)
        engine.close_sequence(holder)
        async with asyncio.timeout(20):
            assert np.array_equal((await again)[0], engine.model.logits_for([2] * 20))
        engine.close_sequence(other)
        engine.check_integrity([])


async def test_opens_that_wait_go_by_priority():
    engine = short_engine(4, overcommit=1.0)
    held, order = await engine.open_sequence(16), []

    async def open_(name, priority):
        sequence = await engine.open_sequence(16, priority=priority)
        order.append(name)
        engine.close_sequence(sequence)

    tasks = []
    for name, priority in (("low", 2), ("first", 0), ("second", 0), ("urgent", -1)):
        tasks.append(asyncio.create_task(open_(name, priority)))
        await asyncio.sleep(0)
    engine.close_sequence(held)
    await asyncio.gather(*tasks)
    assert order == ["urgent", "first", "second", "low"]


class Bench:
    """A placement without an engine: sequences of 4 blocks each, their forwards queued but never computed."""

    def __init__(self, num_blocks, idle_grace_s=NEVER):
        self.now = 0.0
        self.cache = SequenceCache(num_blocks, 1, copy_block=lambda *_: None)
        self.queue = StepQueue(100)
        self.placement = Placement(self.cache, self.queue, idle_grace_s, clock=lambda: self.now)
        self.sequences = []

    def add(self, serial, priority=0, num_rows=4):
        sequence = Sequence(8, priority=priority, serial=serial, root=str(serial).encode())
        self.sequences.append(sequence)
        return sequence, self.ask(sequence, num_rows)

    def ask(self, sequence, num_rows):
        job = Job(None, asyncio.get_running_loop())
        job.wants(Forward(sequence, [0] * num_rows))
        sequence.pending = job
        self.placement.add(job)
        return job

    def compute(self):
        """All that is queued."""
        for job, num_rows in self.queue.pick():
            job.take_up(job.sequence.num_computed + num_rows)
            job.sequence.pending = None
            job.sequence.last_used_s = self.now
            job.finished = True

    def holders(self):
        self.cache.check_integrity(self.sequences)
        return [s.serial for s in self.sequences if s.blocks]


async def test_the_lowest_priority_goes_first_then_the_youngest():
    bench = Bench(12)
    bench.add(1), bench.add(2, priority=1), bench.add(3)
    bench.placement.place()
    assert bench.holders() == [1, 2, 3]
    bench.add(0)
    bench.placement.place()
    assert bench.holders() == [1, 3, 0]
    bench.add(-1)
    bench.placement.place()
    assert bench.holders() == [1, 0, -1]
    assert bench.placement.num_preemptions == 2
    bench.add(4, priority=-1)
    bench.placement.place()
    assert bench.holders() == [0, -1, 4]


async def test_the_older_is_never_preempted_by_the_younger_and_nothing_is_in_vain():
    bench = Bench(12)
    bench.add(0), bench.add(1), bench.add(5)
    bench.placement.place()
    bench.add(3, num_rows=8)  # the youngest has 4 blocks, which is not enough
    bench.placement.place()
    assert bench.holders() == [0, 1, 5]
    assert bench.placement.num_preemptions == 0
    bench.add(4)
    bench.placement.place()
    assert bench.holders() == [0, 1, 4]


async def test_idle_ones_go_before_all_others_the_longest_idle_first():
    bench = Bench(13, idle_grace_s=1.0)
    for serial in range(3):
        bench.add(serial)
    bench.placement.place()
    bench.now = 3.0
    bench.compute()
    bench.sequences[1].last_used_s = 2.9
    bench.ask(bench.sequences[2], 1)
    bench.add(9)
    bench.now = 3.5
    bench.placement.place()
    assert bench.holders() == [0, 1, 2]  # 9 waits: the others are older, and none has been idle for a second
    bench.now = 10.0
    bench.placement.place()
    assert bench.holders() == [0, 2, 9]
    assert (bench.placement.num_preemptions, bench.placement.num_idle_evictions) == (0, 1)


async def test_blocks_taken_in_advance_are_given_up_before_anybody_is_preempted():
    bench = Bench(13)
    bench.add(0), bench.add(1)  # 4 rows each, and blocks for their whole lives where there are any
    bench.placement.place()
    assert sum(len(s.blocks) for s in bench.sequences) > 8
    bench.add(2)
    bench.placement.place()
    assert bench.holders() == [0, 1, 2]
    assert bench.placement.num_preemptions == 0


@pytest.mark.parametrize("seed", range(scaled(10, at_least=1)))
async def test_a_storm_of_cancellations_on_too_few_blocks_leaks_nothing(seed):
    rng = np.random.default_rng(seed)
    engine = short_engine(20, idle_grace_s=0.0, max_waiting_sessions=1000)

    async def stream(index):
        sequence = await engine.open_sequence(int(rng.integers(8, 70)), priority=int(rng.integers(2)))
        try:
            sequence.committed_length = 6
            await engine.run(greedy(sequence, [index % 3] * 6, sequence.max_length - 6))
        finally:
            engine.close_sequence(sequence)

    with started(engine):
        tasks = [asyncio.create_task(stream(index)) for index in range(60)]
        async with asyncio.timeout(60):
            while not all(task.done() for task in tasks):
                tasks[int(rng.integers(60))].cancel()
                await asyncio.sleep(float(rng.choice([0, 0.001, 0.004])))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(r is None or isinstance(r, asyncio.CancelledError) for r in results)
        for _ in range(500):
            if engine.stats().num_free_blocks == 20:
                break
            await asyncio.sleep(0.01)
        assert (engine.stats().num_sequences, engine.stats().num_waiting) == (0, 0)
        engine.check_integrity([])
        sequence = await engine.open_sequence(70)
        assert await engine.run(greedy(sequence, [1, 2], 60)) == greedy_text(engine.model, [1, 2], 60)

"""The step loop on toy models: exact answers whatever runs beside them, one packed call a step, nobody hurt."""

import asyncio
import random
import threading

import numpy as np
import pytest
from conftest import scaled
from lm_programs import greedy, greedy_text, punch_holes, score, started, toy_engine
from waiting import until

from outrider.errors import PASS_FAILED, Aborted, Internal, Unavailable
from outrider.lm.interface import Forward


class GatedModel:
    """A toy whose passes wait for the test, so that it decides what happens during a pass."""

    def __init__(self, engine):
        self.entered, self.leave = threading.Semaphore(0), threading.Semaphore(0)
        self.batches = []
        self._forward = engine.model.forward
        engine.model.forward = self.forward

    def forward(self, batch):
        self.batches.append(batch)
        self.entered.release()
        assert self.leave.acquire(timeout=30)
        return self._forward(batch)

    async def wait_entered(self):
        assert await asyncio.to_thread(self.entered.acquire, timeout=30)


async def run_together(engine, *runs):
    """Their results; no pass ends before all have been handed over, however slow this thread is."""
    all_there, forward = threading.Event(), engine.model.forward

    def held(batch):
        assert all_there.wait(60)
        return forward(batch)

    async def let_go():
        all_there.set()

    engine.model.forward = held
    *results, _ = await asyncio.gather(*runs, let_go())
    return results


async def test_many_streams_each_get_their_own_text_in_packed_passes():
    engine = toy_engine(num_blocks=256, max_batch_tokens=16)
    prompts = [[i % 16, (3 * i) % 16, (7 * i) % 16] * (1 + i) for i in range(12)]
    with started(engine):
        sequences = [await engine.open_sequence(len(prompt) + 20) for prompt in prompts]

        async def stream(sequence, prompt):
            try:
                return await engine.run(greedy(sequence, prompt, 20))
            finally:
                engine.close_sequence(sequence)

        texts = await run_together(engine, *map(stream, sequences, prompts))
    assert texts == [greedy_text(engine.model, p, 20) for p in prompts]
    stats = engine.stats()
    assert stats.num_model_calls == stats.num_steps
    assert stats.num_rows == sum(len(p) + 19 for p in prompts)
    assert stats.num_padding_rows == 0
    assert stats.num_steps < stats.num_rows / 4
    assert (stats.num_free_blocks, stats.num_sequences) == (stats.num_blocks, 0)
    engine.check_integrity([])


@pytest.mark.parametrize("seed", range(scaled(20, at_least=2)))
async def test_any_history_gives_the_logits_of_the_bare_prefix(seed):
    rng = random.Random(seed)
    engine = toy_engine(
        "toy:vocab=16,order=0,seed=8", num_blocks=40, block_size=3, max_batch_tokens=rng.choice([3, 7, 32])
    )
    num_truncations = num_fragmented = 0

    def history(sequence, rng):
        nonlocal num_truncations
        for _ in range(rng.randint(2, 8)):
            if sequence.length and rng.random() < 0.5:
                sequence.truncate(rng.randint(0, sequence.length))
                num_truncations += 1
            room = sequence.max_length - sequence.length
            if not room:
                continue
            ids = [rng.randrange(16) for _ in range(rng.randint(1, min(room, rng.choice([2, 20]))))]
            num_logits = rng.randint(0, len(ids))
            before = list(sequence.token_ids)
            result = yield Forward(sequence, ids, num_logits)
            assert sequence.token_ids == before + ids
            prefixes = [before + ids[: len(ids) - n] for n in reversed(range(num_logits))]
            expected = [engine.model.logits_for(p) for p in prefixes]
            assert np.array_equal(result.logits, np.array(expected, np.float32).reshape(num_logits, 16))

    async def session(rng):
        nonlocal num_fragmented
        sequence = await engine.open_sequence(rng.randint(5, 30))
        try:
            await engine.run(history(sequence, rng))
            blocks = sequence.blocks
            num_fragmented += blocks[-1] - blocks[0] != len(blocks) - 1
            await engine.run(history(sequence, rng))
        finally:
            engine.close_sequence(sequence)

    async def worker(index):
        rng = random.Random(1000 * seed + index)
        for _ in range(6):
            await session(rng)

    held = await punch_holes(engine) if seed % 2 == 0 else []
    with started(engine):
        await asyncio.gather(*(worker(i) for i in range(6)))
    assert num_truncations > 0
    assert num_fragmented > 0 or not held
    assert engine.stats().num_padding_rows == 0
    engine.check_integrity(held)


async def test_a_long_prefill_is_cut_and_running_streams_go_on():
    engine = toy_engine(num_blocks=512, max_batch_tokens=8)
    with started(engine):
        long, short = await engine.open_sequence(400), await engine.open_sequence(60)
        order = []
        prompt = [i % 16 for i in range(400)]

        async def run(name, program):
            result = await engine.run(program)
            order.append(name)
            return result

        logits, text = await run_together(
            engine, run("prefill", score(long, prompt, 11)), run("decode", greedy(short, [1, 2], 30))
        )
    assert order == ["decode", "prefill"]
    assert text == greedy_text(engine.model, [1, 2], 30)
    assert np.array_equal(logits, [engine.model.logits_for(prompt[:n]) for n in range(390, 401)])


async def test_a_failed_pass_fails_its_programs_and_no_other():
    engine = toy_engine()
    forward = engine.model.forward

    def failing(batch):
        if any(13 in s.token_ids for s in batch.segments):
            raise RuntimeError("boom")
        return forward(batch)

    engine.model.forward = failing
    with started(engine):
        a, b = await engine.open_sequence(20), await engine.open_sequence(20)
        with pytest.raises(Unavailable, match="boom") as failure:
            await engine.run(score(a, [1, 13]))
        assert failure.value.reason == PASS_FAILED
        assert a.token_ids == []
        assert (await engine.run(score(b, [1, 2]))).shape == (2, 16)
        assert (await engine.run(score(a, [1, 2]))).shape == (2, 16)


async def test_an_exception_in_a_program_leaves_others():
    engine = toy_engine()

    def bad(sequence):
        yield Forward(sequence, [1])
        raise ValueError("mine alone")

    with started(engine):
        a, b = await engine.open_sequence(20), await engine.open_sequence(30)
        results = await asyncio.gather(engine.run(bad(a)), engine.run(greedy(b, [1, 2], 20)), return_exceptions=True)
    assert isinstance(results[0], ValueError)
    assert results[1] == greedy_text(engine.model, [1, 2], 20)


@pytest.mark.parametrize(
    ("ids", "num_logits", "words"),
    [
        ([1] * 9, 1, "exceed the 8"),
        ([], 0, "0 tokens"),
        ([1], 2, "2 rows"),
        ([1], -1, "-1 rows"),
        ([16], 1, "vocabulary"),
        ([-1], 1, "vocabulary"),
    ],
)
async def test_an_impossible_forward_fails_only_its_program(ids, num_logits, words):
    engine = toy_engine()
    with started(engine):
        a, b = await engine.open_sequence(8), await engine.open_sequence(30)
        results = await asyncio.gather(
            engine.run(score(a, ids, num_logits)), engine.run(greedy(b, [1], 5)), return_exceptions=True
        )
        assert isinstance(results[0], Internal)
        assert words in str(results[0])
        assert results[1] == greedy_text(engine.model, [1], 5)
        assert (await engine.run(score(a, [1] * 8))).shape == (8, 16)


async def test_a_program_that_yields_something_else_is_refused():
    def odd():
        yield "forward"

    with started(toy_engine()) as engine:
        with pytest.raises(Internal, match="not a Forward"):
            await engine.run(odd())


async def test_one_sequence_has_one_forward_at_a_time():
    engine = toy_engine()
    gate = GatedModel(engine)
    with started(engine):
        a, b = await engine.open_sequence(8), await engine.open_sequence(8)
        blocker = asyncio.create_task(engine.run(score(a, [1])))
        await gate.wait_entered()
        with pytest.raises(Internal, match="pending"):
            a.truncate(0)
        rivals = asyncio.gather(*(engine.run(score(b, [i])) for i in (2, 3)), return_exceptions=True)
        await asyncio.sleep(0)
        results = await _with_gate_open(gate, asyncio.gather(blocker, rivals))
    assert results[0].shape == results[1][0].shape == (1, 16)
    assert isinstance(results[1][1], Internal)
    assert b.token_ids == [2]


async def _with_gate_open(gate, awaitable):
    task = asyncio.ensure_future(awaitable)
    while not task.done():
        gate.leave.release()
        await asyncio.sleep(0.01)
    return task.result()


async def test_cancelling_closes_the_generator_between_passes_on_the_engine_thread():
    engine = toy_engine()
    gate = GatedModel(engine)
    closed = []

    def program(sequence):
        try:
            yield Forward(sequence, [1, 2, 3])
            yield Forward(sequence, [4])
        finally:
            closed.append(threading.current_thread().name)

    with started(engine):
        sequence = await engine.open_sequence(8)
        task = asyncio.create_task(engine.run(program(sequence)))
        await gate.wait_entered()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert closed == []
        engine.close_sequence(sequence)
        engine.close_sequence(sequence)
        stats = engine.stats()
        assert stats.num_sequences == 0
        assert stats.num_free_blocks == stats.num_blocks - 2  # the pass that writes to them is in flight
        gate.leave.release()
        await until(lambda: engine.stats().num_free_blocks == stats.num_blocks)
        assert closed == ["outrider-engine"]
        assert len(gate.batches) == 1
        engine.check_integrity([])


async def test_closing_a_sequence_aborts_its_pending_program():
    engine = toy_engine()
    gate = GatedModel(engine)
    with started(engine):
        a, b = await engine.open_sequence(12), await engine.open_sequence(12)
        blocker = asyncio.create_task(engine.run(score(b, [5])))
        await gate.wait_entered()
        queued = asyncio.create_task(engine.run(greedy(a, [1], 5)))
        gate.leave.release()
        await blocker
        await gate.wait_entered()
        engine.close_sequence(a)
        gate.leave.release()
        with pytest.raises(Aborted):
            await queued
        with pytest.raises(Aborted):
            await engine.run(score(a, [1]))
        engine.close_sequence(b)
        await until(lambda: engine.stats().num_free_blocks == engine.stats().num_blocks)
        engine.check_integrity([])


@pytest.mark.parametrize("seed", range(scaled(10, at_least=2)))
async def test_a_storm_of_cancellations_leaks_nothing(seed):
    rng = random.Random(seed)
    engine = toy_engine("toy:vocab=16,token_ms=0.01", num_blocks=48, max_batch_tokens=12, max_waiting_sessions=1000)

    async def stream():
        sequence = await engine.open_sequence(rng.randint(2, 60))
        try:
            await engine.run(greedy(sequence, [1], sequence.max_length - 1))
        finally:
            engine.close_sequence(sequence)

    with started(engine):
        tasks = [asyncio.create_task(stream()) for _ in range(100)]
        while not all(t.done() for t in tasks):
            rng.choice(tasks).cancel()
            await asyncio.sleep(rng.choice([0, 0, 0.0005]))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        cancelled = sum(isinstance(r, asyncio.CancelledError) for r in results)
        assert cancelled > 0
        assert all(r is None or isinstance(r, asyncio.CancelledError) for r in results)
        await until(lambda: engine.stats().num_free_blocks == 48)
        stats = engine.stats()
        assert (stats.num_sequences, stats.num_waiting) == (0, 0)
        engine.check_integrity([])
        sequence = await engine.open_sequence(100)
        assert await engine.run(greedy(sequence, [1, 2], 50)) == greedy_text(engine.model, [1, 2], 50)


async def test_stop_fails_what_waits_and_refuses_what_comes():
    engine = toy_engine(num_blocks=2)
    gate = GatedModel(engine)
    engine.start()
    sequence = await engine.open_sequence(8)
    running = asyncio.create_task(engine.run(greedy(sequence, [1], 5)))
    waiting = asyncio.create_task(engine.open_sequence(8))
    await gate.wait_entered()
    stopping = asyncio.create_task(asyncio.to_thread(engine.stop))
    await until(lambda: engine._stopping)
    results = await _with_gate_open(gate, asyncio.gather(running, waiting, return_exceptions=True))
    await stopping
    assert [type(r) for r in results] == [Aborted, Aborted]
    assert len(gate.batches) == 1
    with pytest.raises(Unavailable):
        await engine.run(greedy(sequence, [1], 1))
    with pytest.raises(Unavailable):
        await engine.open_sequence(4)
    engine.stop()


async def test_an_idle_engine_makes_no_calls():
    engine = toy_engine()
    with started(engine):
        sequence = await engine.open_sequence(8)
        await engine.run(score(sequence, [1]))
        calls = engine.stats().num_model_calls
        await asyncio.sleep(0.05)
        assert engine.stats().num_model_calls == calls == 1


async def test_a_result_tells_times_and_company():
    engine = toy_engine("toy:vocab=16,pass_ms=2")
    gate = GatedModel(engine)

    def program(sequence, ids):
        return (yield Forward(sequence, ids, 1))

    with started(engine):
        sequences = [await engine.open_sequence(8) for _ in range(3)]
        first = asyncio.create_task(engine.run(program(sequences[0], [1])))
        await gate.wait_entered()
        others = [asyncio.create_task(engine.run(program(s, [1, 2]))) for s in sequences[1:]]
        await asyncio.sleep(0)
        gate.leave.release()
        gate.leave.release()
        results = await asyncio.gather(first, *others)
    assert [r.num_batch_rows for r in results] == [1, 4, 4]
    assert all(r.compute_us >= 2000 for r in results)
    assert all(r.queue_us >= 0 for r in results)

"""After any history, each row's logits equal those of a fresh full forward of its prefix by stock transformers."""

import asyncio
import random

import numpy as np
import pytest
from conftest import scaled

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait

torch = pytest.importorskip("torch")

from lm_programs import punch_holes, started  # noqa: E402
from shared_histories import Histories  # noqa: E402
from tiny_models import CONTEXT_LENGTH, FAMILIES, VOCAB_SIZE, stock_logits, tiny_pair  # noqa: E402

from outrider.lm.adapter import TransformersModel  # noqa: E402
from outrider.lm.engine import Engine  # noqa: E402
from outrider.lm.interface import Forward  # noqa: E402

TOLERANCE = 1e-4


@pytest.mark.parametrize("seed", range(scaled(10, at_least=2)))
@pytest.mark.parametrize("family", FAMILIES)
async def test_any_history_gives_the_logits_of_a_fresh_forward(family, seed):
    rng = random.Random(seed)
    model, stock = tiny_pair(family)
    calls = []
    model.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs["input_ids"].shape), with_kwargs=True)
    adapted = TransformersModel(model, vocab_size=VOCAB_SIZE, context_length=CONTEXT_LENGTH)
    calls.clear()
    engine = Engine(
        adapted, num_blocks=50, block_size=4, max_batch_tokens=rng.choice([5, 24, 64]), max_waiting_sessions=99
    )
    seen, num_truncations, num_fragmented = [], 0, 0

    def history(sequence, rng):
        nonlocal num_truncations
        for _ in range(rng.randint(3, 7)):
            if sequence.length and rng.random() < 0.5:
                length = rng.randint(max(0, sequence.length - 6), sequence.length)
                num_truncations += length < sequence.length
                sequence.truncate(length)
            room = sequence.max_length - sequence.length
            if not room:
                continue
            ids = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, min(room, rng.choice([1, 6, 40]))))]
            num_logits = rng.choice([1, len(ids), rng.randint(0, len(ids))])
            prefix = sequence.token_ids + ids
            result = yield Forward(sequence, ids, num_logits)
            assert sequence.token_ids == prefix
            seen.append((prefix, num_logits, result.logits.copy()))

    async def session(rng):
        nonlocal num_fragmented
        sequence = await engine.open_sequence(rng.randint(4, 70))
        try:
            for _ in range(2):
                await engine.run(history(sequence, rng))
            num_fragmented += sequence.blocks[-1] - sequence.blocks[0] != len(sequence.blocks) - 1
        finally:
            engine.close_sequence(sequence)

    async def worker(index):
        rng = random.Random(1000 * seed + index)
        for _ in range(3):
            await session(rng)

    held = await punch_holes(engine) if seed % 2 == 0 else []
    with started(engine):
        await asyncio.gather(*(worker(i) for i in range(5)))

    assert num_truncations > 0
    assert num_fragmented > 0 or not held
    num_rows = 0
    for prefix, num_logits, logits in seen:
        expected = stock_logits(stock, prefix)[len(prefix) - num_logits :]
        assert logits.shape == expected.shape
        if num_logits:
            assert np.abs(logits - expected).max() < TOLERANCE
            assert expected.std() > 0.5
        num_rows += num_logits
    assert num_rows > 100
    stats = engine.stats()
    assert len(calls) == stats.num_steps == stats.num_model_calls
    assert all(shape[0] == 1 for shape in calls)
    assert sum(shape[1] for shape in calls) == stats.num_rows
    assert max(shape[1] for shape in calls) > 1
    assert stats.num_padding_rows == 0
    engine.check_integrity(held)


async def test_a_wrong_block_would_show():
    model, stock = tiny_pair("llama")
    adapted = TransformersModel(model, vocab_size=VOCAB_SIZE, context_length=CONTEXT_LENGTH)
    engine = Engine(adapted, num_blocks=8, block_size=4, max_batch_tokens=64, max_waiting_sessions=1)

    def program(sequence):
        yield Forward(sequence, prompt)  # fills both blocks: a slot never written may hold anything
        first, second, *_ = sequence.blocks
        sequence.blocks[0] = second
        logits = (yield Forward(sequence, [6])).logits.copy()
        sequence.blocks[0] = first
        return logits

    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    with started(engine):
        logits = await engine.run(program(await engine.open_sequence(12)))
    assert np.abs(logits[0] - stock_logits(stock, [*prompt, 6])[-1]).max() > 100 * TOLERANCE


@pytest.mark.parametrize("seed", range(scaled(10, at_least=2)))
@pytest.mark.parametrize("family", FAMILIES)
async def test_shared_preempted_and_copied_blocks_give_the_logits_of_a_fresh_forward(family, seed):
    model, stock = tiny_pair(family)
    adapted = TransformersModel(model, vocab_size=VOCAB_SIZE, context_length=CONTEXT_LENGTH)
    engine = Engine(
        adapted,
        num_blocks=30,
        block_size=4,
        max_batch_tokens=[24, 64][seed % 2],
        max_waiting_sessions=99,
        overcommit=3.0,
        idle_grace_s=0.0,
    )
    seen = []
    histories = Histories(engine, VOCAB_SIZE, lambda *row: seen.append(row), seed)
    with started(engine):
        await histories.run(num_workers=10, num_sessions=3)
    for prefix, num_logits, logits in seen:
        assert np.abs(logits - stock_logits(stock, prefix)[-num_logits:]).max() < TOLERANCE
    assert len(seen) > 100

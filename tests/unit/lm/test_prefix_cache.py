"""What is computed once is not computed again, and nobody can tell from the logits."""

import asyncio

import numpy as np
import pytest
from conftest import scaled
from lm_programs import started, toy_engine
from shared_histories import Histories

from draft_worker.session import DraftSession
from outrider.lm.interface import Forward
from outrider.sampling.params import SamplingParams, StoppingParams
from outrider.serving.messages import DraftOpening

BLOCK = 4
PROMPT = [(5 * i + i // 3) % 16 for i in range(30)]


def engine_of(**kwargs):
    return toy_engine("toy:vocab=16,order=0,seed=8", block_size=BLOCK, **kwargs)


def committed(sequence, token_ids, num_logits=1):
    """A forward whose tokens, and all before, are final; gives the result with its logits copied."""
    sequence.committed_length = sequence.length + len(token_ids)
    result = yield Forward(sequence, token_ids, num_logits)
    return result, result.logits.copy()


async def prefill(engine, token_ids, *, num_logits=1, close=True, max_length=80, **kwargs):
    """(num_cached_tokens, sequence) after a check of the logits."""
    sequence = await engine.open_sequence(max_length, **kwargs)
    result, logits = await engine.run(committed(sequence, token_ids, num_logits))
    wanted = range(len(token_ids) - num_logits + 1, len(token_ids) + 1)
    assert np.array_equal(logits, [engine.model.logits_for(token_ids[:n]) for n in wanted])
    assert sequence.token_ids == token_ids
    if close:
        engine.close_sequence(sequence)
    return result.num_cached_tokens, sequence


@pytest.mark.parametrize("seed", range(scaled(20, at_least=3)))
async def test_any_history_of_shared_texts_gives_the_logits_of_the_bare_prefix(seed):
    engine = engine_of(
        num_blocks=30, max_batch_tokens=[5, 16, 64][seed % 3], max_waiting_sessions=99, overcommit=3.0, idle_grace_s=0.0
    )

    def check(prefix, num_logits, logits):
        ends = range(len(prefix) - num_logits + 1, len(prefix) + 1)
        assert np.array_equal(logits, [engine.model.logits_for(prefix[:n]) for n in ends])

    histories = Histories(engine, 16, check, seed)
    with started(engine):
        await histories.run(num_workers=10, num_sessions=6)


async def test_a_second_prompt_computes_only_what_the_first_did_not():
    with started(engine_of()) as engine:
        assert (await prefill(engine, PROMPT))[0] == 0
        rows = engine.stats().num_rows
        assert (await prefill(engine, [*PROMPT[:18], 9, 9]))[0] == 16
        assert engine.stats().num_rows - rows == 4
        assert (await prefill(engine, [9, *PROMPT[1:]]))[0] == 0  # the same ids after another first one


@pytest.mark.parametrize(("length", "num_logits", "num_cached"), [(28, 1, 27), (30, 1, 28), (28, 6, 22), (28, 28, 0)])
async def test_rows_whose_logits_are_wanted_are_computed(length, num_logits, num_cached):
    with started(engine_of()) as engine:
        await prefill(engine, PROMPT)
        rows = engine.stats().num_rows
        assert (await prefill(engine, PROMPT[:length], num_logits=num_logits))[0] == num_cached
        assert engine.stats().num_rows - rows == length - num_cached
        assert (await prefill(engine, PROMPT))[0] == 28  # a block written to again is found again
        engine.check_integrity([])


async def test_tenants_do_not_share():
    with started(engine_of()) as engine:
        await prefill(engine, PROMPT, tenant="a")
        assert (await prefill(engine, PROMPT, tenant="b"))[0] == 0
        assert (await prefill(engine, PROMPT, tenant="a"))[0] == 28
        assert (await prefill(engine, PROMPT, tenant="b"))[0] == 28
        assert (await prefill(engine, PROMPT))[0] == 0


async def test_only_committed_tokens_are_shared():
    with started(engine_of()) as engine:
        sequence = await engine.open_sequence(80)

        def program():
            sequence.committed_length = 10
            yield Forward(sequence, PROMPT)

        await engine.run(program())
        engine.close_sequence(sequence)
        assert (await prefill(engine, PROMPT))[0] == 8


async def test_tokens_that_were_taken_back_are_not_found():
    with started(engine_of()) as engine:
        sequence = await engine.open_sequence(80)
        other = [*PROMPT[:10], *[3] * 20]
        await engine.run(committed(sequence, PROMPT))
        sequence.truncate(10)
        _, logits = await engine.run(committed(sequence, other[10:]))
        assert np.array_equal(logits[-1], engine.model.logits_for(other))
        engine.close_sequence(sequence)
        assert (await prefill(engine, other))[0] == 28
        assert (await prefill(engine, PROMPT))[0] == 8


async def test_choices_at_once_compute_one_prompt_and_copy_what_they_write_to():
    """8 choices of a prompt of 7 whole blocks: one computes them all, the others one row each, into a copy."""
    with started(engine_of(num_blocks=200, max_batch_tokens=10)) as engine:
        prompt = PROMPT[:28]
        results = await asyncio.gather(*(prefill(engine, prompt, close=False) for _ in range(8)))
        assert sorted(num_cached for num_cached, _ in results) == [0] + [27] * 7
        assert engine.stats().num_rows == 28 + 7
        assert engine.stats().num_copied_blocks == 7
        sequences = [sequence for _, sequence in results]
        assert len({tuple(sequence.blocks[:6]) for sequence in sequences}) == 1
        for index, sequence in enumerate(sequences):
            _, logits = await engine.run(committed(sequence, [index, 1, 2, 3, 4]))
            assert np.array_equal(logits[-1], engine.model.logits_for([*prompt, index, 1, 2, 3, 4]))
        engine.check_integrity(sequences)
        for sequence in sequences:
            engine.close_sequence(sequence)
        engine.check_integrity([])
        assert engine.stats().num_free_blocks == 200


async def test_the_next_in_line_computes_a_prefix_whose_first_job_went_away():
    engine = engine_of(max_batch_tokens=4)
    with started(engine):
        sequences = [await engine.open_sequence(80) for _ in range(3)]
        tasks = [asyncio.create_task(engine.run(committed(s, PROMPT))) for s in sequences]
        await asyncio.sleep(0)
        engine.close_sequence(sequences[0])
        await asyncio.gather(tasks[0], return_exceptions=True)
        for task in tasks[1:]:
            assert np.array_equal((await task)[1][-1], engine.model.logits_for(PROMPT))
        assert engine.stats().num_rows <= 2 * len(PROMPT)


async def test_the_block_unused_for_longest_is_given_up_first():
    with started(engine_of(num_blocks=32)) as engine:
        a, b = ([first, *PROMPT[1:24]] for first in (1, 2))
        for prompt in (a, b, a):
            await prefill(engine, prompt)
        assert engine.stats().num_cached_blocks == 12
        sequence = await engine.open_sequence(108)  # 27 blocks: 20 empty ones, 6 of b's, 1 of a's
        await engine.run(committed(sequence, [3] * 108))
        engine.check_integrity([sequence])
        assert engine.stats().num_cached_blocks == 5
        engine.close_sequence(sequence)
        assert (await prefill(engine, a, max_length=24))[0] == 20
        assert (await prefill(engine, b, max_length=24))[0] == 0
        engine.check_integrity([])


async def test_a_reopened_draft_session_is_not_computed_twice_and_drafts_the_same():
    """Rejected drafts of the first session are not found by the second."""
    opening = {"prompt_ids": PROMPT, "sampling": SamplingParams(seed=3), "stopping": StoppingParams(max_tokens=40)}
    with started(engine_of(num_blocks=100)) as engine:
        committed_ids, proposals = [], []
        for epoch in (1, 2):
            session = DraftSession(
                DraftOpening(epoch=epoch, committed_ids=committed_ids, **opening), vocab_size=16, context_length=4096
            )
            session.sequence = await engine.open_sequence(session.reserved_length, tenant=session.tenant)
            cached_before = engine.stats().num_cached_tokens
            await engine.run(session.prefill())
            num_cached = engine.stats().num_cached_tokens - cached_before
            if epoch == 1:
                assert num_cached == 0
                for _ in range(3):
                    proposal = await engine.run(session.advance(session.log.header, (), 4))
                    session.log.append(proposal.token_ids[0])
                committed_ids = session.log.ids[30:]
            else:
                assert num_cached == 31  # all 32 before the last committed one but the one that is always computed
            proposals.append(await engine.run(session.advance(session.log.header, (), 4)))
            engine.close_sequence(session.sequence)
        assert len(proposals[0].token_ids) == 4
        assert proposals[0].token_ids == proposals[1].token_ids
        engine.check_integrity([])

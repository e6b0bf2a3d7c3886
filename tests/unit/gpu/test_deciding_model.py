"""Sessions through the engine over a model that decides where its logits are, on a CPU, against one that does not."""

import asyncio
import dataclasses

import numpy as np
import pytest
from conftest import scaled

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait

torch = pytest.importorskip("torch")

from test_static_steps import CONTEXT, VOCAB, tiny_model  # noqa: E402

from draft_worker.device_decision import DRAFTS, DraftDecision  # noqa: E402
from draft_worker.session import DraftSession  # noqa: E402
from outrider.drafting.proposal import EMPTY  # noqa: E402
from outrider.errors import Internal  # noqa: E402
from outrider.lm.adapter import TransformersModel  # noqa: E402
from outrider.lm.engine import Engine  # noqa: E402
from outrider.lm.gpu.model import GpuModel  # noqa: E402
from outrider.lm.interface import Forward, PackedBatch, Segment  # noqa: E402
from outrider.sampling.distribution import coupled_token, greedy_token  # noqa: E402
from outrider.sampling.history import History  # noqa: E402
from outrider.sampling.noise import Noise  # noqa: E402
from outrider.sampling.params import AcceptanceRule, Finish, SamplingParams, StoppingParams  # noqa: E402
from outrider.sampling.sparse_q import sparse_q  # noqa: E402
from outrider.serving.messages import DraftOpening, TargetOpening  # noqa: E402
from target_worker.session import TargetSession  # noqa: E402

RULES = {
    "greedy": SamplingParams(temperature=0.0),
    "coupled": SamplingParams(acceptance=AcceptanceRule.COUPLED, seed=3, top_p=0.9),
    "block": SamplingParams(acceptance=AcceptanceRule.BLOCK, seed=3, top_k=20),
    "token": SamplingParams(acceptance=AcceptanceRule.TOKEN, seed=3, temperature=0.8),
    "penalised": SamplingParams(temperature=0.0, repetition_penalty=1.3, bad_words=((4,), (5, 6))),
}
STOPPING = StoppingParams(max_tokens=24, min_tokens=0, stop_token_ids=frozenset({VOCAB - 1}))


def engine_over(model):
    return Engine(model, num_blocks=120, block_size=4, max_batch_tokens=64, max_waiting_sessions=9)


def deciding():
    model = GpuModel(tiny_model(), vocab_size=VOCAB, context_length=CONTEXT)
    return model, engine_over(model)


def plain():
    model = TransformersModel(tiny_model(), vocab_size=VOCAB, context_length=CONTEXT)
    return model, engine_over(model)


async def stream(target, draft, sampling, prompt, gamma):
    """(text, drafted, accepted, choices of rows) of one stream, rounds by hand as the coordinator runs them."""
    opening = {"epoch": 1, "prompt_ids": prompt, "sampling": sampling, "stopping": STOPPING}
    limits = {"vocab_size": VOCAB, "context_length": CONTEXT, "max_draft_tokens": 8}
    t = TargetSession(TargetOpening(**opening, max_draft_tokens=8), **limits)
    d = DraftSession(DraftOpening(**opening), **limits)
    t.sequence = await target.open_sequence(t.reserved_length)
    d.sequence = await draft.open_sequence(d.reserved_length)
    verdict = await target.run(t.open())
    text, drafted, accepted, choices = list(verdict.committed_ids), 0, 0, []
    while t.finish is Finish.NONE:
        header, new_ids = t.log.header, verdict.committed_ids
        proposal = EMPTY
        if gamma:
            proposal = await draft.run(d.advance(header, new_ids, gamma, "model"))
        verdict = await target.run(t.verify(header, (), proposal))
        text += verdict.committed_ids
        drafted += verdict.num_draft_tokens
        accepted += verdict.num_accepted
        choices += verdict.row_choices
    target.close_sequence(t.sequence)
    draft.close_sequence(d.sequence)
    return text, drafted, accepted, choices


async def all_streams(make_target, make_draft, sampling, gamma, count=4):
    (target_model, target), (draft_model, draft) = make_target(), make_draft()
    target.start()
    draft.start()
    try:
        prompts = [[(7 * i + j) % VOCAB for j in range(6)] for i in range(count)]
        found = await asyncio.gather(
            *(
                stream(target, draft, dataclasses.replace(sampling, seed=sampling.seed + i), prompt, gamma)
                for i, prompt in enumerate(prompts)
            )
        )
        for engine in (target, draft):
            engine.check_integrity([])
        return found, target_model, draft_model
    finally:
        target.stop()
        draft.stop()


@pytest.mark.parametrize("rule", RULES)
async def test_streams_read_as_on_the_host(rule):
    """Text, drafts and acceptances of every stream, with and without drafts; 24 tokens of a float32 model."""
    sampling = RULES[rule]
    for gamma in (0, 1, 4):
        ours, model, draft_model = await all_streams(deciding, deciding, sampling, gamma)
        theirs, _, _ = await all_streams(plain, plain, sampling, gamma)
        assert model.num_decided > 0
        assert ours == theirs
        assert model.num_static_passes > 0
        if gamma:
            assert sum(drafted for _, drafted, _, _ in ours) > 0
            assert sum(accepted for _, _, accepted, _ in ours) > 0
            assert draft_model.num_static_passes > 0


async def test_chained_drafts_wait_once_a_round():
    """Greedy and COUPLED rounds are one forward on the draft's side; sampled ones are one a draft."""
    num_steps = {}
    for rule in ("greedy", "coupled", "block"):
        _, draft = deciding()
        draft.start()
        opening = DraftOpening(epoch=1, prompt_ids=[1, 2, 3], sampling=RULES[rule], stopping=StoppingParams(99))
        session = DraftSession(opening, vocab_size=VOCAB, context_length=CONTEXT)
        session.sequence = await draft.open_sequence(session.reserved_length)
        proposal = await draft.run(session.advance(session.log.header, (), 6, "model"))
        assert len(proposal) == 6
        assert session.sequence.token_ids == [1, 2, 3, *proposal.token_ids[:-1]]
        num_steps[rule] = (draft.stats().num_steps, draft.stats().num_rows)
        draft.stop()
    assert num_steps == {"greedy": (1, 8), "coupled": (1, 8), "block": (6, 8)}


async def test_the_last_place_of_a_sequence_can_be_chained_to():
    _, draft = deciding()
    draft.start()
    sequence = await draft.open_sequence(5)
    decision = DraftDecision(RULES["greedy"], STOPPING, History([1]), Noise(0), 3, 8)

    def program(num_chained):
        sequence.truncate(0)
        return (yield Forward(sequence, [1, 2, 3], 1, decision=decision, num_chained=num_chained))

    result = await draft.run(program(2))
    assert result.decided.shape == (3, 1)
    assert result.logits.shape == (0, VOCAB)
    assert sequence.token_ids == [1, 2, 3, *result.decided[:2, 0].astype(int).tolist()]
    with pytest.raises(Internal, match="3 chained rows"):
        await draft.run(program(3))
    draft.stop()


def test_a_row_that_cannot_be_read_comes_back_whole():
    model, _ = deciding()
    model.allocate_cache(60, 4)
    good = DraftDecision(RULES["greedy"], STOPPING, History([1]), Noise(0), 3, 8)
    bad = DraftDecision(
        SamplingParams(temperature=0.0, logit_bias={i: float("-inf") for i in range(VOCAB)}),
        STOPPING, History([1]), Noise(0), 3, 8,
    )  # fmt: skip
    batch = PackedBatch(
        (
            Segment(0, [1, 2], [0], 1, decision=good, num_chained=2),
            Segment(0, [1, 2], [1], 1, decision=bad, num_chained=1),
            Segment(0, [1, 2], [2], 2),
            Segment(0, [1, 2], [3], 0),
        )
    )
    results = model.forward_deciding(batch)
    expected = plain()[0]
    expected.allocate_cache(60, 4)
    logits = expected.forward(PackedBatch((Segment(0, [1, 2], [0], 2),)))
    assert results[0].logits is None
    assert results[0].decided.shape == (3, 1)
    assert results[0].decided[0, 0] == logits[1].argmax()
    assert results[1].decided is None
    np.testing.assert_allclose(results[1].logits, logits[1:], atol=1e-4)
    np.testing.assert_allclose(results[2].logits, logits, atol=1e-4)
    assert results[3].logits.shape == (0, VOCAB)


@pytest.mark.parametrize("seed", range(scaled(60, at_least=8)))
def test_drafts_are_the_hosts(seed):
    rng = np.random.default_rng(seed)
    rows = rng.normal(0, 3, (len(RULES) + 2, VOCAB)).astype(np.float32)
    some = [*RULES.values(), SamplingParams(min_p=0.1), SamplingParams(allowed_token_ids=(3, 9, 12))]
    decisions = [
        DraftDecision(params, STOPPING, History([1, 2], [5]), Noise(seed, i), 3, int(rng.integers(1, 80)))
        for i, params in enumerate(some)
    ]
    for step in (0, 2):
        lines = DRAFTS.decide(decisions, torch.from_numpy(rows), step).numpy()
        for decision, line, row in zip(decisions, lines, rows, strict=True):
            token_id, q = decision.read(line)
            arguments = (row, decision.params, STOPPING, decision.history)
            if decision.params.greedy:
                assert token_id == greedy_token(*arguments)
            elif decision.params.decides_by_match:
                assert token_id == coupled_token(*arguments, decision.noise, 3 + step)
            else:
                expected = sparse_q(*arguments, decision.max_q_entries)
                assert q.ids.tolist() == expected.ids.tolist()
                assert q.counts.tolist() == expected.counts.tolist()


async def test_what_the_device_does_not_decide_is_decided_on_the_host():
    """Logprobs need the logits: they come back, and the round is the host's."""
    _, target = deciding()
    target.start()
    opening = TargetOpening(
        epoch=1, prompt_ids=[1, 2, 3], sampling=RULES["block"], stopping=STOPPING, max_draft_tokens=8,
        logprobs=True, top_logprobs=3,
    )  # fmt: skip
    session = TargetSession(opening, vocab_size=VOCAB, context_length=CONTEXT, max_draft_tokens=8)
    session.sequence = await target.open_sequence(session.reserved_length)
    verdict = await target.run(session.open())
    assert len(verdict.logprobs.unpacked().token_logprobs) == 1
    target.stop()

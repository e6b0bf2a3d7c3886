"""Decisions made where the logits are, on a CPU, against the host's own: sampling, noise and the acceptance rules."""

import dataclasses

import numpy as np
import pytest
from conftest import scaled
from hypothesis import given, settings
from hypothesis import strategies as st

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait

torch = pytest.importorskip("torch")

from outrider.drafting.proposal import EMPTY, Proposal  # noqa: E402
from outrider.errors import Internal  # noqa: E402
from outrider.lm.gpu import noise as device_noise  # noqa: E402
from outrider.lm.gpu.sampling import (  # noqa: E402
    Filters,
    RowContext,
    draw,
    greedy,
    is_readable,
    log_weights,
    probabilities,
    process,
)
from outrider.sampling.distribution import distribution, greedy_token, processed_logits  # noqa: E402
from outrider.sampling.distribution import draw as host_draw  # noqa: E402
from outrider.sampling.history import History  # noqa: E402
from outrider.sampling.noise import ROOT_HASH, Noise, Role  # noqa: E402
from outrider.sampling.params import AcceptanceRule, SamplingParams, StoppingParams  # noqa: E402
from outrider.sampling.sparse_q import draw_draft, sparse_q  # noqa: E402
from target_worker.acceptance import verify  # noqa: E402
from target_worker.device_decision import ROUNDS, RoundDecision  # noqa: E402

torch.set_num_threads(1)
VOCAB = 40
PLAIN = StoppingParams(max_tokens=99)


@st.composite
def sampling_params(draw_from, rules=tuple(AcceptanceRule)):
    return SamplingParams(
        temperature=draw_from(st.sampled_from([0.0, 0.3, 1.0, 1.7])),
        top_k=draw_from(st.sampled_from([0, 0, 1, 3, VOCAB, 10**6])),
        top_p=draw_from(st.sampled_from([1.0, 1.0, 0.9, 0.5, 1e-6])),
        min_p=draw_from(st.sampled_from([0.0, 0.0, 0.05, 1.0])),
        repetition_penalty=draw_from(st.sampled_from([1.0, 1.3, 0.8])),
        presence_penalty=draw_from(st.sampled_from([0.0, 0.4])),
        frequency_penalty=draw_from(st.sampled_from([0.0, -0.3])),
        logit_bias=draw_from(st.sampled_from([{}, {3: 1.7, 5: -100.0}])),
        seed=draw_from(st.integers(0, 2**64 - 1)),
        choice=draw_from(st.integers(0, 3)),
        acceptance=draw_from(st.sampled_from(rules)),
        allowed_token_ids=draw_from(st.sampled_from([(), (), tuple(range(0, VOCAB, 2))])),
        bad_words=draw_from(st.sampled_from([(), (), ((7,), (2, 4))])),
    )


stopping_params = st.sampled_from(
    [PLAIN, StoppingParams(max_tokens=99, min_tokens=4, stop_token_ids=frozenset({1, 8}))]
)


def random_rows(rng, count, tied=False):
    rows = rng.normal(0, 3, (count, VOCAB)).astype(np.float32)
    return np.round(rows) if tied else rows  # many equal ones, and zeros of both signs


def random_history(rng):
    return History(rng.integers(0, VOCAB, 5).tolist(), rng.integers(0, VOCAB, int(rng.integers(0, 5))).tolist())


@settings(max_examples=scaled(400, at_least=40), deadline=None)
@given(sampling_params(), stopping_params, st.integers(0, 2**32), st.booleans())
def test_processed_rows_are_the_hosts_bit_for_bit(params, stopping, seed, tied):
    rng = np.random.default_rng(seed)
    contexts = [
        RowContext(params, stopping, random_history(rng), tuple(rng.integers(0, VOCAB, n).tolist())) for n in (2, 0)
    ]
    logits = random_rows(rng, 4, tied)
    before = logits.copy()
    processed = process(torch.from_numpy(logits), contexts).numpy()
    assert (logits == before).all()
    row = 0
    for context in contexts:
        lengths = [context.history.num_output_tokens]
        for index in range(context.num_rows):
            expected = processed_logits(logits[row], params, stopping, context.history)
            assert processed[row].tobytes() == expected.tobytes()
            assert int(greedy(torch.from_numpy(processed[row : row + 1]))[0]) == greedy_token(
                logits[row], params, stopping, context.history
            )
            row += 1
            if index < len(context.drafts):
                context.history.push(context.drafts[index])
        lengths.append(context.history.num_output_tokens - len(context.drafts))
        assert len(set(lengths)) == 1


@settings(max_examples=scaled(400, at_least=40), deadline=None)
@given(st.lists(sampling_params(), min_size=1, max_size=5), st.integers(0, 2**32), st.booleans())
def test_distributions_are_the_hosts(all_params, seed, tied):
    rng = np.random.default_rng(seed)
    all_params = [dataclasses.replace(p, temperature=p.temperature or 0.7) for p in all_params]
    histories = [random_history(rng) for _ in all_params]
    logits = random_rows(rng, len(all_params), tied)
    contexts = [RowContext(p, PLAIN, h) for p, h in zip(all_params, histories, strict=True)]
    weights = log_weights(process(torch.from_numpy(logits), contexts), Filters.of(all_params))
    for row, (params, history) in enumerate(zip(all_params, histories, strict=True)):
        expected = distribution(logits[row], params, PLAIN, history)
        assert weights.dtype == torch.float64
        np.testing.assert_allclose(probabilities(weights)[row].numpy(), expected, rtol=1e-12, atol=1e-300)


def test_rows_that_the_host_refuses_are_unreadable():
    rows = np.zeros((4, VOCAB), np.float32)
    rows[0, 3], rows[1, 3], rows[2] = np.nan, np.inf, -np.inf
    rows[3, :5] = -np.inf
    assert is_readable(torch.from_numpy(rows)).tolist() == [False, False, False, True]
    for row in rows[:3]:
        with pytest.raises(Internal):
            processed_logits(row, SamplingParams(), PLAIN, History([1]))


@settings(max_examples=scaled(200, at_least=20), deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**20))
def test_noise_has_the_hosts_bits(seed, choice, position):
    noise = Noise(seed, choice)
    key = torch.tensor([device_noise.signed(noise.gumbel_key(position))])
    np.testing.assert_allclose(
        device_noise.gumbel(key, 500)[0].numpy(), noise.gumbel(position, 500), rtol=1e-13, atol=1e-13
    )
    with np.errstate(over="ignore"):
        bits = np.arange(500, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(noise.gumbel_key(position))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
        bits ^= bits >> np.uint64(31)
    assert (device_noise.random_bits(key, 500)[0].numpy().view(np.uint64) == bits).all()


@settings(max_examples=scaled(400, at_least=40), deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 5, 256, 257, 1000]), st.floats(0.0, 1.0, exclude_max=True))
def test_draws_are_the_hosts(seed, vocab_size, sparsity):
    rng = np.random.default_rng(seed)
    masses = rng.random((6, vocab_size)) * (rng.random((6, vocab_size)) >= sparsity)
    masses[np.arange(6), rng.integers(0, vocab_size, 6)] += 1e-3
    uniforms = np.array([0.0, *rng.random(4), 1.0 - 2.0**-53])
    drawn = draw(torch.from_numpy(masses), torch.from_numpy(uniforms)).tolist()
    for token, row, u in zip(drawn, masses, uniforms, strict=True):
        assert row[token] > 0.0
        expected = host_draw(row, float(u))
        if token != expected:  # u falls on the border between two ids, to rounding
            cumulative = np.cumsum(row) / row.sum()
            assert abs(cumulative[min(token, expected)] - u) < 1e-12


def random_proposal(rng, params, stopping, history, count):
    """Drafts as a drafter makes them, from logits of its own, or one-hot."""
    if params.greedy or params.acceptance is AcceptanceRule.COUPLED or rng.random() < 0.2:
        return Proposal(token_ids=tuple(rng.integers(0, VOCAB, count).tolist()))
    ids, entries = [], []
    for row in random_rows(rng, count):
        q = sparse_q(row, params, stopping, history, int(rng.integers(1, 12)))
        ids.append(draw_draft(q, int(rng.integers(0, 65_536))))
        entries.append(q)
        history.push(ids[-1])
    history.pop(count)
    return Proposal(token_ids=tuple(ids), q=tuple(entries))


def random_round(rng, params, stopping):
    """(decision, its rows): the target sometimes agrees with the drafts, sometimes not."""
    history = random_history(rng)
    proposal = random_proposal(rng, params, stopping, history, int(rng.integers(0, 5)))
    rows = random_rows(rng, len(proposal) + 1)
    for index, token_id in enumerate(proposal.token_ids):
        rows[index, token_id] += rng.choice([0.0, 6.0, 14.0])
    noise = Noise(params.seed, params.choice)
    return RoundDecision(proposal, params, stopping, history, noise, ROOT_HASH ^ int(rng.integers(2**30)), 7), rows


def on_host(decision, rows):
    return verify(
        rows, decision.proposal, decision.params, decision.stopping, decision.history, decision.noise,
        decision.prefix_hash, decision.position,
    )  # fmt: skip


@settings(max_examples=scaled(600, at_least=60), deadline=None)
@given(st.lists(st.tuples(sampling_params(), stopping_params), min_size=1, max_size=6), st.integers(0, 2**32))
def test_rounds_are_decided_as_on_the_host(all_params, seed):
    rng = np.random.default_rng(seed)
    pairs = [random_round(rng, params, stopping) for params, stopping in all_params]
    decisions = [decision for decision, _ in pairs]
    decided = ROUNDS.decide(decisions, torch.from_numpy(np.concatenate([rows for _, rows in pairs])))
    assert decided.dtype == torch.float64
    for (decision, rows), line in zip(pairs, decided.numpy(), strict=True):
        assert decision.outcome(line) == on_host(decision, rows)
        assert decision.row_choices(line) == rows.argmax(1).tolist()


def test_every_ending_occurs_and_is_the_hosts():
    """Accepted wholly, corrected at each place, stop tokens, plain rows: for each rule, in one batch."""
    rng = np.random.default_rng(5)
    for rule in AcceptanceRule:
        params = SamplingParams(acceptance=rule, temperature=1.0)
        stopping = StoppingParams(max_tokens=99, stop_token_ids=frozenset(range(0, VOCAB, 3)))
        pairs = [
            random_round(rng, dataclasses.replace(params, seed=i), stopping) for i in range(scaled(600, at_least=200))
        ]
        decided = ROUNDS.decide([d for d, _ in pairs], torch.from_numpy(np.concatenate([rows for _, rows in pairs])))
        endings = set()
        for (decision, rows), line in zip(pairs, decided.numpy(), strict=True):
            outcome = decision.outcome(line)
            assert outcome == on_host(decision, rows)
            endings.add((len(decision.proposal), outcome.num_accepted, len(outcome.origins) - outcome.num_accepted))
        for count in range(1, 5):
            assert (count, 0, 1) in endings
            assert (count, count, 1) in endings or (count, count, 0) in endings
        assert any(more == 0 for _, _, more in endings)


def test_a_round_with_an_unreadable_row_is_left_to_the_host_alone():
    rng = np.random.default_rng(1)
    params = SamplingParams(acceptance=AcceptanceRule.BLOCK)
    pairs = [random_round(rng, params, PLAIN) for _ in range(3)]
    pairs[1] = (dataclasses.replace(pairs[1][0], proposal=EMPTY), np.full((1, VOCAB), np.nan, np.float32))
    decided = ROUNDS.decide([d for d, _ in pairs], torch.from_numpy(np.concatenate([r for _, r in pairs]))).numpy()
    assert np.isnan(decided[:, 0]).tolist() == [False, True, False]
    for index in (0, 2):
        assert pairs[index][0].outcome(decided[index]) == on_host(*pairs[index])


@pytest.mark.parametrize("rule", [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK])
def test_emitted_tokens_follow_the_targets_law(rule):
    """One place, drafts from q: the first emitted token of many rounds is distributed as p."""
    count = scaled(40_000, at_least=8_000)
    rng = np.random.default_rng(3)
    target, draft = rng.normal(0, 1.5, (2, 6)).astype(np.float32)
    params = [SamplingParams(acceptance=rule, seed=seed) for seed in range(count)]
    p = distribution(target, params[0], PLAIN, History([0]))
    q = sparse_q(draft, params[0], PLAIN, History([0]), 4)
    decisions = []
    for own in params:
        noise = Noise(own.seed)
        drafted = draw_draft(q, noise.integer16(ROOT_HASH, Role.DRAFT))
        decisions.append(RoundDecision(Proposal((drafted,), (q,)), own, PLAIN, History([0]), noise, ROOT_HASH, 1))
    rows = torch.from_numpy(np.tile(target, (2 * count, 1)))
    outcomes = [d.outcome(line) for d, line in zip(decisions, ROUNDS.decide(decisions, rows).numpy(), strict=True)]
    seen = np.bincount([o.token_ids[0] for o in outcomes], minlength=6) / count
    assert 0 < sum(o.num_accepted for o in outcomes) < count
    assert np.abs(seen - p).sum() / 2 < 3.0 * np.sqrt(p * (1 - p) / count).sum() / 2

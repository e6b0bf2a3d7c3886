"""Children of one node: exact counts, their own noise, and functions of prefix, parameters and seed alone."""

import itertools
from collections import Counter

import numpy as np
import pytest
from conftest import scaled
from law import FALSE_ALARM, chi_square

from outrider.drafting.proposal import Q_TOTAL, Proposal, SparseQ, check
from outrider.drafting.tree_draw import draw_children, sampled_children, without
from outrider.errors import Internal
from outrider.sampling import (
    AcceptanceRule,
    History,
    Noise,
    Role,
    SamplingParams,
    StoppingParams,
    coupled_token,
    distribution,
    draw_draft,
    hash_ids,
    sparse_q,
)

STOPPING = StoppingParams(max_tokens=9, min_tokens=2, stop_token_ids=frozenset({3}))
LOGITS = np.random.default_rng(0).normal(scale=1.5, size=12).astype(np.float32)
BUSY = {"temperature": 0.8, "repetition_penalty": 1.4, "frequency_penalty": 0.3, "top_k": 7}


def children(params: SamplingParams, count: int, *, seed: int = 5, prefix=(1, 2), output=(2,), **options):
    history = History(prefix, output)
    ids = [*prefix, *output]
    found = draw_children(
        LOGITS, params, STOPPING, history, Noise(seed), hash_ids(ids), len(ids), count, **options
    )  # fmt: skip
    assert history.output_ids == tuple(output)
    return found


@pytest.mark.parametrize("rule", [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK])
@pytest.mark.parametrize("replacement", [False, True])
def test_sampled_children_carry_the_exact_law_of_each_draw(rule: AcceptanceRule, replacement: bool) -> None:
    params = SamplingParams(acceptance=rule, **BUSY)
    noise, prefix_hash = Noise(5), hash_ids((1, 2, 2))
    drawn = children(params, 4, replacement=replacement)
    q = sparse_q(LOGITS, params, STOPPING, History((1, 2), (2,)), 64)
    for try_index, child in enumerate(drawn):
        assert child.q is not None
        assert child.q.counts.sum() == Q_TOTAL
        assert child.q.counts.min() >= 1
        assert child.token_id == draw_draft(child.q, noise.integer16(prefix_hash, Role.DRAFT, try_index))
        earlier = {c.token_id for c in drawn[:try_index]}
        assert set(child.q.ids.tolist()) == set(q.ids.tolist()) - (set() if replacement else earlier)
        kept = [q.counts[q.ids == i][0] for i in child.q.ids]
        np.testing.assert_allclose(child.q.counts, np.array(kept) * (Q_TOTAL / sum(kept)), atol=1)
        assert child.probability == q.probability(child.token_id)
    proposal = Proposal(tuple(c.token_id for c in drawn), tuple(c.q for c in drawn), parents=(-1,) * 4)
    check(proposal, vocab_size=12, max_draft_tokens=4)


def test_no_more_children_than_tokens_that_can_be_drawn() -> None:
    """How many there are follows from q, never from what was drawn."""
    params = SamplingParams(acceptance=AcceptanceRule.TOKEN, top_k=3)
    for seed in range(40):
        drawn = children(params, 8, seed=seed)
        assert len(drawn) == len({c.token_id for c in drawn}) == 3
        assert drawn[-1].q is not None
        assert drawn[-1].q.counts.tolist() == [Q_TOTAL]
        assert len(children(params, 8, seed=seed, replacement=True)) == 8
    assert len(children(SamplingParams(temperature=0.0, allowed_token_ids=(4, 5)), 8)) == 2
    assert len(children(SamplingParams(acceptance=AcceptanceRule.COUPLED, top_k=3), 8)) == 3
    assert children(params, 0) == children(SamplingParams(temperature=0.0), 0) == []


def test_the_joint_law_of_siblings_is_that_of_drawing_one_after_the_other() -> None:
    q = SparseQ(np.array([4, 1, 7], np.uint32), np.array([40_000, 20_000, 5_536]))
    noise = Noise(1)
    counts: Counter[tuple[int, ...]] = Counter()
    for prefix in range(scaled(60_000)):
        integers = [noise.integer16(prefix, Role.DRAFT, try_index) for try_index in range(2)]
        counts[tuple(c.token_id for c in sampled_children(q, integers, replacement=False))] += 1
    law = {}
    for first, second in itertools.permutations([4, 1, 7], 2):
        left = without(q, first)
        assert left is not None
        law[first, second] = q.probability(first) * left.probability(second)
    assert chi_square(counts, law) > FALSE_ALARM


@pytest.mark.parametrize("counts", [[65_535, 1], [1, 65_534, 1], [21_845, 21_845, 21_846]])
def test_removing_a_token_keeps_integer_counts(counts: list[int]) -> None:
    q = SparseQ(np.arange(len(counts), dtype=np.uint32), np.array(counts))
    for token_id in range(len(counts)):
        left = without(q, token_id)
        assert left is not None
        assert left.counts.sum() == Q_TOTAL
        assert left.counts.min() >= 1
        assert token_id not in left.ids
    assert without(SparseQ(np.array([9], np.uint32), np.array([Q_TOTAL])), 9) is None


def test_coupled_children_are_the_largest_of_ln_q_plus_noise() -> None:
    params = SamplingParams(acceptance=AcceptanceRule.COUPLED, **BUSY)
    for seed in range(30):
        drawn = children(params, 4, seed=seed)
        p = distribution(LOGITS, params, STOPPING, History((1, 2), (2,)))
        with np.errstate(divide="ignore"):
            keys = np.log(p) + Noise(seed).gumbel(3, 12)
        assert [c.token_id for c in drawn] == np.argsort(-keys)[:4].tolist()
        assert all(c.q is None for c in drawn)
        np.testing.assert_allclose([c.probability for c in drawn], p[[c.token_id for c in drawn]])
        first = coupled_token(LOGITS, params, STOPPING, History((1, 2), (2,)), Noise(seed), 3)
        assert drawn[0].token_id == first


def test_greedy_children_are_the_likeliest_and_equal_ones_go_by_id() -> None:
    params = SamplingParams(temperature=0.0)
    drawn = children(params, 5)
    allowed = np.where(np.arange(12) == 3, -np.inf, LOGITS)  # min_tokens masks the stop token
    assert [c.token_id for c in drawn] == np.argsort(-allowed, kind="stable")[:5].tolist()
    assert 3 not in [c.token_id for c in children(params, 12)]
    tied = draw_children(np.zeros(4, np.float32), params, StoppingParams(9), History((1,)), Noise(0), 0, 1, 3)
    assert [c.token_id for c in tied] == [0, 1, 2]
    assert tied[0].probability == pytest.approx(0.25)


@pytest.mark.parametrize("rule", AcceptanceRule)
def test_children_are_a_function_of_prefix_parameters_and_seed(rule: AcceptanceRule) -> None:
    params = SamplingParams(acceptance=rule)

    def ids(**options):
        return [c.token_id for c in children(params, 3, **options)]

    assert ids() == ids()
    assert [c.token_id for c in children(params, 2)] == ids()[:2], "fewer children are the first of more"
    others = [ids(seed=seed) for seed in range(20)]
    assert len({tuple(o) for o in others}) > 5
    if rule is not AcceptanceRule.COUPLED:
        assert len({tuple(ids(prefix=(1, x))) for x in range(2, 12)}) > 2, "keyed by the exact prefix"


def test_bad_logits_are_told() -> None:
    logits = LOGITS.copy()
    logits[4] = np.nan
    for params in [SamplingParams(temperature=0.0), *(SamplingParams(acceptance=rule) for rule in AcceptanceRule)]:
        with pytest.raises(Internal, match="NaN at id 4"):
            draw_children(logits, params, STOPPING, History((1,)), Noise(0), 0, 1, 2)


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(acceptance=AcceptanceRule.COUPLED)])
def test_chances_are_those_of_a_target_whose_logits_are_off_by_noise(params: SamplingParams) -> None:
    """Which child the target then chooses, over many such targets: as often as the child says."""
    found = children(params, 12)
    assert sum(child.chance for child in found) == pytest.approx(1)
    noise = np.random.default_rng(3)
    hits: Counter[tuple[int, ...]] = Counter()
    for _ in range(scaled(20_000, at_least=4_000)):
        off = (LOGITS + noise.gumbel(size=12)).astype(np.float32)
        hits[(coupled_token(off, params, STOPPING, History((1, 2), (2,)), Noise(5), 3),)] += 1
    assert chi_square(hits, {(child.token_id,): child.chance for child in found}) > FALSE_ALARM

"""The two law tests: right on true tokens, and sharp on false ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
from conftest import scaled
from scipy import stats

from outrider.cli.law import RANK_EDGES, TAIL_FACTOR, LawTest, alarm, chi_square_tail, detectable_shift


def filled(num_tokens: int, seed: int, *, vocab: int = 200, bias: float = 0.0) -> LawTest:
    """Tokens drawn from random distributions, of which the likeliest loses `bias` to the second."""
    rng = np.random.default_rng(seed)
    test = LawTest(np.random.default_rng(seed + 1_000_000))
    for _ in range(num_tokens):
        p = rng.dirichlet(np.full(vocab, 0.1))
        q = p.copy()
        best, second = np.argsort(-p)[:2]
        moved = min(bias, p[best])
        q[best] -= moved
        q[second] += moved
        test.add(p, int(rng.choice(vocab, p=q / q.sum())))
    return test


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 8, 31])
@pytest.mark.parametrize("statistic", [0.0, 0.5, 3.0, 20.0, 90.0])
def test_tail_is_scipys(statistic: float, freedom: int) -> None:
    assert chi_square_tail(statistic, freedom) == pytest.approx(stats.chi2.sf(statistic, freedom), rel=1e-9)


def test_p_values_of_true_tokens_are_uniform() -> None:
    p_values = [filled(120, seed).p_uniform() for seed in range(scaled(1000, 100))]
    assert stats.kstest(p_values, "uniform").pvalue > 1e-4


def test_rank_p_values_of_true_tokens_are_never_too_small() -> None:
    p_values = np.array([filled(120, seed).p_rank() for seed in range(scaled(1000, 100))])
    for level in (0.01, 0.1, 0.5):
        expected = level * len(p_values)
        assert (p_values < level).sum() <= expected + 4 * math.sqrt(expected)


def test_a_detectable_shift_is_found_and_a_third_of_it_seldom() -> None:
    """From the likelier half of the probability, 8 of 16 ids, to the other half."""

    def share_found(shift: float, num_tokens: int = 400, num_trials: int = 20) -> float:
        p = np.full(16, 1 / 16) + np.linspace(1e-6, -1e-6, 16)
        q = p + np.repeat([-shift / 8, shift / 8], 8)
        found = 0
        for seed in range(num_trials):
            rng = np.random.default_rng(seed)
            test = LawTest(np.random.default_rng(seed + 1_000_000))
            for token_id in rng.choice(16, size=num_tokens, p=q / q.sum()):
                test.add(p, int(token_id))
            found += alarm(test.p_uniform(), 6, 1e-6)
        return found / num_trials

    shift = detectable_shift(400, 6, 1e-6)
    assert share_found(shift) >= 0.75
    assert share_found(shift / 3) <= 0.25
    assert detectable_shift(1600, 6, 1e-6) == pytest.approx(shift / 2)
    assert detectable_shift(0, 6, 1e-6) == 1.0


@pytest.mark.parametrize("p_value", ["p_uniform", "p_rank"])
def test_a_bias_is_caught(p_value: str) -> None:
    assert not alarm(getattr(filled(600, 1), p_value)(), 6, 1e-6)
    assert alarm(getattr(filled(600, 1, bias=0.25), p_value)(), 6, 1e-6)


def test_the_rank_table_shows_the_bias() -> None:
    rows = filled(600, 1, bias=0.25).ranks()
    assert [name for name, _, _ in rows] == ["1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", "65+"]
    assert rows[0][1] < rows[0][2] - 50
    assert rows[1][1] > rows[1][2] + 50
    assert sum(observed for _, observed, _ in rows) == pytest.approx(sum(expected for _, _, expected in rows)) == 600


def test_a_token_of_probability_zero_is_counted_apart() -> None:
    test = LawTest(np.random.default_rng(0))
    test.add(np.array([0.5, 0.5, 0.0]), 2)
    assert (test.num_tokens, test.num_impossible) == (1, 1)


@pytest.mark.parametrize("vocab", [2, 5, 64, 65, 300])
def test_small_and_large_vocabularies(vocab: int) -> None:
    test = filled(200, 5, vocab=vocab)
    assert len(test.ranks()) == len(RANK_EDGES) + 1
    assert 0 < test.p_uniform() <= 1
    assert 0 < test.p_rank() <= 1


def test_one_hot_distributions_neither_fail_nor_alarm() -> None:
    test = LawTest(np.random.default_rng(0))
    for _ in range(100):
        test.add(np.array([0.0, 1.0, 0.0]), 1)
    assert test.p_rank() == 1.0
    assert test.p_uniform() > 1e-6


def test_few_tokens_are_not_conclusive() -> None:
    assert not filled(30, 1).conclusive
    assert filled(60, 1).conclusive


def test_all_alarms_together_stay_below_the_stated_rate() -> None:
    assert alarm(0.99e-6 / 6 / TAIL_FACTOR, 6, 1e-6)
    assert not alarm(1.01e-6 / 6 / TAIL_FACTOR, 6, 1e-6)

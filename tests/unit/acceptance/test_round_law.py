"""TOKEN and BLOCK, decision by decision: the shipped functions and a rational twin against the target's own law."""

import itertools
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
from conftest import scaled
from round_law import (
    KINDS,
    RATIONAL,
    Outcomes,
    Tree,
    block_chances,
    draft_q,
    expected_accepted,
    law_of_round,
    patterns,
    rational_residual,
    shipped,
    target_law,
    total_variation,
    tree,
)

from outrider.sampling import AcceptanceRule
from target_worker.acceptance import acceptances, correction, count_accepted

RULES = [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK]
TOLERANCE = 1e-12

TREES = [
    (seed, gamma, kind)
    for gamma in (1, 2, 3, 4)
    for kind in ("mixed", *KINDS)
    for seed in range(scaled(60 if gamma < 4 else 20) if kind == "mixed" else 1)
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("seed", "gamma", "kind"), TREES)
def test_shipped_rule_has_the_targets_law(rule: AcceptanceRule, seed: int, gamma: int, kind: str) -> None:
    nodes = tree(seed, gamma, kind=kind).floats()
    assert total_variation(law_of_round(nodes, shipped(rule)), target_law(nodes)) <= TOLERANCE


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("seed", "gamma", "kind"), TREES)
def test_rational_twin_has_exactly_the_targets_law(rule: AcceptanceRule, seed: int, gamma: int, kind: str) -> None:
    nodes = tree(seed, gamma, kind=kind)
    assert total_variation(law_of_round(nodes, RATIONAL[rule]), target_law(nodes)) == 0


@pytest.mark.parametrize("gamma", [1, 2, 3, 4])
def test_every_decision_equals_the_rational_twins(gamma: int) -> None:
    """Acceptance chances and residuals one by one, so that two errors cannot cancel in the law."""
    nodes = tree(11, gamma, vocab_size=4)
    for drafts in itertools.product(range(4), repeat=gamma):
        p = [nodes.p[drafts[:i]] for i in range(gamma)]
        q = [nodes.q[drafts[:i]] for i in range(gamma)]
        if any(q[i][x] == 0 for i, x in enumerate(drafts)):
            continue
        floats = [np.array([float(x) for x in row]) for row in p]
        sparse = [draft_q([float(x) for x in row]) for row in q]
        token = [min(Fraction(1), p[i][x] / q[i][x]) for i, x in enumerate(drafts)]
        joint, block = block_chances(p, q, drafts)
        # Z / (Z + 1 - P): rounding counts relative to the denominator, which is tiny where p nearly equals q.
        surplus = [sum(rational_residual(p[i], q[i], joint[i])) for i in range(1, gamma)]
        below = [*(z + 1 - joint_p for z, joint_p in zip(surplus, joint[1:], strict=False)), 1]
        for rule, chances, scales, weights in [
            (AcceptanceRule.TOKEN, token, [Fraction(1)] * gamma, [1] * gamma),
            (AcceptanceRule.BLOCK, block[1:], joint[:-1], below),
        ]:
            got = acceptances(rule, floats, sparse, drafts)
            np.testing.assert_allclose(got.residual_scales, [float(x) for x in scales], atol=TOLERANCE)
            for have, want, weight in zip(got.probabilities, chances, weights, strict=True):
                assert abs(have - float(want)) * float(weight) <= TOLERANCE
            for i in range(gamma):
                expected = np.array([float(x) for x in rational_residual(p[i], q[i], scales[i])])
                residual = correction(floats[i], sparse[i], got.residual_scales[i])
                if expected.sum() > 1e-9:
                    np.testing.assert_allclose(residual, expected, atol=TOLERANCE)


@pytest.mark.parametrize(("seed", "gamma", "kind"), TREES)
def test_block_accepts_at_least_as_many_as_token(seed: int, gamma: int, kind: str) -> None:
    nodes = tree(seed, gamma, kind=kind).floats()
    token, block = (expected_accepted(nodes, shipped(rule)) for rule in RULES)
    assert block >= token - TOLERANCE
    if kind == "random" and gamma > 1:
        assert block > token + 1e-3


def test_published_vector() -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3), two drafts: TOKEN accepts 10/9 and BLOCK 11/9."""
    texts = [text for length in range(3) for text in itertools.product(range(2), repeat=length)]
    p, q = [Fraction(1, 3), Fraction(2, 3)], [Fraction(2, 3), Fraction(1, 3)]
    nodes = Tree(2, 2, dict.fromkeys(texts, p), {text: q for text in texts if len(text) < 2})
    for rule, expected in [(AcceptanceRule.TOKEN, Fraction(10, 9)), (AcceptanceRule.BLOCK, Fraction(11, 9))]:
        assert expected_accepted(nodes, RATIONAL[rule]) == expected
        assert expected_accepted(nodes.floats(), shipped(rule)) == pytest.approx(float(expected), abs=TOLERANCE)
        assert total_variation(law_of_round(nodes, RATIONAL[rule]), target_law(nodes)) == 0


# Faults that were shipped elsewhere or come to mind first. The enumeration must see each of them.


def _unscaled_residual(p, q, drafts) -> Iterator:
    """BLOCK whose residual forgets P: max(p - q, 0)."""
    sparse = [draft_q(row) for row in q]
    chances, _ = acceptances(AcceptanceRule.BLOCK, p[:-1], sparse, drafts)
    for probability, coins in patterns(chances):
        stand = count_accepted(AcceptanceRule.BLOCK, coins)
        last = p[stand] if stand == len(drafts) else correction(p[stand], sparse[stand], 1.0)
        yield probability, stand, last / last.sum()


def _first_failure(p, q, drafts) -> Iterator:
    """BLOCK that ends at the first failed coin, as TOKEN does."""
    sparse = [draft_q(row) for row in q]
    chances, scales = acceptances(AcceptanceRule.BLOCK, p[:-1], sparse, drafts)
    for probability, coins in patterns(chances):
        stand = count_accepted(AcceptanceRule.TOKEN, coins)
        last = p[stand] if stand == len(drafts) else correction(p[stand], sparse[stand], scales[stand])
        yield probability, stand, last / last.sum()


def _last_success(p, q, drafts) -> Iterator:
    """TOKEN's coins counted as BLOCK's."""
    sparse = [draft_q(row) for row in q]
    chances, scales = acceptances(AcceptanceRule.TOKEN, p[:-1], sparse, drafts)
    for probability, coins in patterns(chances):
        stand = count_accepted(AcceptanceRule.BLOCK, coins)
        last = p[stand] if stand == len(drafts) else correction(p[stand], sparse[stand], scales[stand])
        yield probability, stand, last / last.sum()


def _correction_from_p(p, q, drafts) -> Iterator:
    """TOKEN that redraws from p after a rejection."""
    for probability, stand, _ in shipped(AcceptanceRule.TOKEN)(p, q, drafts):
        yield probability, stand, p[stand]


def _drops_unlikely_drafts(rule: AcceptanceRule) -> Outcomes:
    """Cuts the chain before the first draft that its own q found unlikely."""

    def outcomes(p, q, drafts) -> Iterator:
        kept = next((i for i, x in enumerate(drafts) if q[i][x] < 0.3), len(drafts))
        yield from shipped(rule)(p[: kept + 1], q[:kept], drafts[:kept])

    return outcomes


FAULTS = {
    "block_unscaled_residual": _unscaled_residual,
    "block_first_failure": _first_failure,
    "token_last_success": _last_success,
    "token_correction_from_p": _correction_from_p,
    "token_drops_unlikely_drafts": _drops_unlikely_drafts(AcceptanceRule.TOKEN),
    "block_drops_unlikely_drafts": _drops_unlikely_drafts(AcceptanceRule.BLOCK),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_biased_twin_is_caught(fault: str) -> None:
    nodes = tree(0, 3, vocab_size=4, kind="random").floats()
    assert total_variation(law_of_round(nodes, FAULTS[fault]), target_law(nodes)) > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_q_from_before_truncation_is_caught(rule: AcceptanceRule) -> None:
    """Drafts are drawn from the top two tokens, but the rule is told the q that still had all of them."""
    told = tree(0, 2, vocab_size=4, kind="random").floats()
    truncated = {}
    for text, row in told.q.items():
        kept = np.where(row >= np.sort(row)[-2], row, 0.0)
        truncated[text] = kept / kept.sum()
    drawn = Tree(told.vocab_size, told.gamma, told.p, truncated)
    assert total_variation(law_of_round(drawn, shipped(rule), told=told), target_law(drawn)) > 1e-3
    assert total_variation(law_of_round(drawn, shipped(rule)), target_law(drawn)) <= TOLERANCE


def test_agreement_to_rounding_is_never_an_error() -> None:
    """Residuals without mass, 0/0 and NaN have an answer: p itself, and acceptance."""
    p = np.array([0.1, 0.2, 0.7])
    same = draft_q(p)
    assert correction(p, same, 1.0) is p
    for rule in RULES:
        assert acceptances(rule, [p, p], [same, same], (0, 2)).probabilities == [1.0, 1.0]
    impossible = np.array([0.0, 0.5, 0.5])
    block = acceptances(AcceptanceRule.BLOCK, [impossible, p, p], [same, same, same], (0, 1, 2))
    assert block.probabilities == [0.0, 0.0, 0.0]

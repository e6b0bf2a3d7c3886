"""Figures of the bench, from numbers worked out by hand."""

from __future__ import annotations

import pytest

from outrider.cli.measure import Acceptance, add_up, formula_speedup, median, percentile
from outrider.results import Step


@pytest.mark.parametrize(
    ("alpha", "gamma", "c", "speedup"),
    [(0.8, 0, 0.1, 1.0), (0.0, 4, 0.25, 0.5), (1.0, 4, 0.25, 2.5), (0.5, 1, 0.0, 1.5), (0.5, 2, 0.5, 0.875)],
)
def test_formula(alpha: float, gamma: float, c: float, speedup: float) -> None:
    assert formula_speedup(alpha, gamma, c) == pytest.approx(speedup)


def test_formula_is_continuous_at_certain_acceptance() -> None:
    assert formula_speedup(1 - 1e-9, 5, 0.1) == pytest.approx(formula_speedup(1.0, 5, 0.1), rel=1e-6)


def test_alpha_counts_decided_drafts_only() -> None:
    acceptance = Acceptance(3, 9, 4, (), 0, ())
    # Rounds of γ=3 with 3, 1 and 0 accepted: 4 acceptances, 2 rejections; drafts after a rejection decide nothing.
    assert acceptance.alpha([(3, 3), (3, 1), (3, 0)]) == pytest.approx(4 / 6)
    assert acceptance.alpha([]) == 0.0


def test_acceptance_ratios() -> None:
    acceptance = Acceptance(4, 12, 6, (), 600, ())
    assert acceptance.mean_acceptance_length == 2.5
    assert acceptance.mean_gamma == 3.0
    assert acceptance.bytes_per_draft_token == 25.0  # 600 bytes over two hops
    nothing = Acceptance.of([])
    assert (nothing.mean_acceptance_length, nothing.mean_gamma, nothing.bytes_per_draft_token) == (0, 0, 0)


def test_overhead_is_what_no_worker_did() -> None:
    step = Step(4, 4, 2, "model", draft_ms=3, verify_ms=10, network_ms=1, queue_ms=0.5, round_ms=15, reason="fixed")
    assert step.overhead_ms == pytest.approx(1.5)


def test_small_helpers() -> None:
    assert add_up([(1, 2), (), (0, 0, 5)]) == (1, 2, 5)
    assert (median([]), median([3, 1, 2])) == (0, 2)
    assert (percentile([], 0.9), percentile(range(10), 0.9)) == (0, 9)

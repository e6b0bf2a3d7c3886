"""Figures of the bench, from numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from outrider.cli.bench_numerics import _cost
from outrider.cli.bench_plot import check_plot
from outrider.cli.bench_profile import PARTS, mean_parts, parts_ms, profile
from outrider.cli.console import describe_failure
from outrider.cli.measure import (
    Acceptance,
    add_up,
    describe_positions,
    draft_ms_per_token,
    formula_speedup,
    median,
    percentile,
    why_inconclusive,
    zero_gain_concurrency,
)
from outrider.errors import InvalidArgument
from outrider.results import Chunk, Completion, Step


@pytest.mark.parametrize(
    ("alpha", "gamma", "c", "speedup"),
    [(0.8, 0, 0.1, 1.0), (0.0, 4, 0.25, 0.5), (1.0, 4, 0.25, 2.5), (0.5, 1, 0.0, 1.5), (0.5, 2, 0.5, 0.875)],
)
def test_formula(alpha: float, gamma: float, c: float, speedup: float) -> None:
    assert formula_speedup(alpha, gamma, c) == pytest.approx(speedup)


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ((), ""),
        ((0.0,), "0.00"),
        ((0.75, 0.5), "0.75, 0.50"),
        ((0.75, 0.0, 0.25, 0.0), "0.75, 0.00, 0.25, 0.00"),
        ((0.75, 0.5, *[0.0] * 13), "0.75, 0.50, 0.00 at 3 to 15 (in a tree several drafts stand at one depth)"),
        ((0.0, 0.0), "0.00 at 1 to 2 (in a tree several drafts stand at one depth)"),
    ],
)
def test_places_that_no_draft_of_a_tree_can_reach_are_told_together(shares: tuple[float, ...], told: str) -> None:
    assert describe_positions(shares) == told


def test_formula_is_continuous_at_certain_acceptance() -> None:
    assert formula_speedup(1 - 1e-9, 5, 0.1) == pytest.approx(formula_speedup(1.0, 5, 0.1), rel=1e-6)


def test_alpha_counts_decided_drafts_only() -> None:
    assert Acceptance(3, 9, 4, (), 0, (2, 0, 3), 12).tokens_per_step == 12 / 5
    assert Acceptance(0, 0, 0, (), 0, ()).tokens_per_step == 0
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


STEP = Step(
    4, 4, 2, "model", draft_ms=3, verify_ms=10, network_ms=1, queue_ms=0.5, round_ms=15, reason="fixed",
    sampling_ms=2, emit_ms=0.25,
)  # fmt: skip


def test_parts_of_a_round_add_up_to_it() -> None:
    parts = parts_ms(STEP)
    assert tuple(parts) == PARTS
    assert sum(parts.values()) == pytest.approx(STEP.round_ms + STEP.emit_ms)
    assert (parts["verify"], parts["sampling"], parts["other"]) == pytest.approx((8, 2, 0.5))


def test_profile_is_by_gamma_and_leaves_the_prompt_out() -> None:
    plain = dataclasses.replace(STEP, num_draft_tokens=0, num_accepted_draft_tokens=0, draft_ms=0, round_ms=12)
    prompt = dataclasses.replace(plain, reason="prefill", verify_ms=900, round_ms=950)
    told = profile([prompt, STEP, STEP, plain])
    assert (told["num_rounds"], told["round_ms"]) == (3, 14)
    assert told["mean_ms"]["draft"] == pytest.approx(2)
    assert told["p50_ms"]["draft"] == 3
    assert [row["num_draft_tokens"] for row in told["by_gamma"]] == [0, 4]
    assert [row["mean_tokens"] for row in told["by_gamma"]] == [1, 3]
    assert mean_parts([]) == profile([])["mean_ms"] == {}


@pytest.mark.parametrize(
    ("gains", "load"),
    [
        ([(1, 1.8), (2, 1.4), (4, 0.6), (8, 0.9)], 2 * 2**0.5),
        ([(1, 1.5), (8, 1.0)], 8),
        ([(1, 0.9), (2, 1.2)], 1),
        ([(1, 1.5), (32, 1.1)], None),
        ([], None),
    ],
)
def test_where_the_gain_ends(gains: list[tuple[int, float]], load: float | None) -> None:
    assert zero_gain_concurrency(gains) == (None if load is None else pytest.approx(load))


def test_a_cost_is_the_median_over_prompts() -> None:
    assert _cost([(1.0, 1.5), (2.0, 2.0), (4.0, 5.0)]) == 0.25
    assert _cost([(0.0, 1.0), (1.0, 1.5)]) == 0.5
    assert _cost([(0.0, 1.0)]) is None


def answer(*steps: Step) -> Completion:
    """Of which only the rounds count."""
    chunks = tuple(Chunk(0, (1,), "", step=step) for step in steps)
    return Completion("", (), (), None, chunks, "length", None, *[None] * 4)  # type: ignore[arg-type]


def test_the_cost_of_a_draft_is_that_of_drafts_which_were_asked_for() -> None:
    plain = dataclasses.replace(STEP, num_draft_tokens=0, draft_ms=0)
    first, asked = dataclasses.replace(STEP, draft_ms=40), dataclasses.replace(STEP, draft_ms=8, ahead="miss")
    hit, late = (dataclasses.replace(STEP, draft_ms=ms, ahead=ahead) for ms, ahead in ((0, "hit"), (1, "late")))
    guess = dataclasses.replace(STEP, drafter="lookup", draft_ms=0)
    assert draft_ms_per_token([answer(plain, first, asked, hit, hit, late)]) == 2  # 8 ms for 4 drafts
    assert draft_ms_per_token([answer(plain, first, hit, hit)]) == 10, "nothing else tells"
    assert draft_ms_per_token([answer(plain, first, hit, late)], 3.0) == 3, "the worker's own account does"
    assert draft_ms_per_token([answer(first, asked, hit)], 3.0) == 2
    assert draft_ms_per_token([answer(first), answer(first)], 3.0) == 10, "of one drafted round each"
    assert draft_ms_per_token([answer(first, guess, guess, asked, hit, hit)]) == 2, "guesses tell of themselves alone"
    assert draft_ms_per_token([answer(guess, guess, guess)], 3.0) == 0
    assert draft_ms_per_token([answer(plain)], 3.0) == 0


def test_short_runs_are_inconclusive() -> None:
    assert why_inconclusive(10, 10) == ""
    assert "nothing was drafted" in why_inconclusive(0, 500)
    assert "9 drafted and 40 plain rounds are too few for ratios" in why_inconclusive(9, 40)
    assert "at least 10 of each" in why_inconclusive(40, 9)


@pytest.mark.parametrize(
    ("name", "sweep", "says"),
    [("a.svg", None, "--sweep gamma"), ("a.svg", "numerics", "--sweep"), ("a.png", "gamma", "svg")],
)
def test_what_cannot_be_drawn_is_told_before_the_run(tmp_path: Path, name: str, sweep: str | None, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        check_plot(tmp_path / name, sweep)
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        check_plot(tmp_path / "a.svg", "gamma")
    assert describe_failure(caught.value)[0] == "matplotlib is not installed: pip install 'outrider[plot]'"

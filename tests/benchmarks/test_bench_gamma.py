"""The chosen γ in simulation, a seeded part of `make bench-gamma`: no clock is read, so its bars may be asserted."""

import random

import pytest
from conftest import scaled
from gamma import (
    BATCHES,
    CHANGING,
    MAX_CHANGING_RTT_MS,
    MAX_LOSS,
    RTTS_MS,
    TEXTS,
    Cell,
    changing_row,
    clairvoyant_row,
    fixed_row,
    goodput_row,
    measure_all,
    steps_row,
)

CELLS = [Cell(rtt, batch, kind) for batch in BATCHES for kind in TEXTS for rtt in RTTS_MS]
NUM_TOKENS = 4000


@pytest.mark.parametrize(("batches", "max_loss", "num_cells"), [((1,), MAX_LOSS, 40), ((8, 32), 0.08, 30)])
def test_the_chosen_gamma_is_near_the_best_fixed_one_in_hindsight(
    batches: tuple[int, ...], max_loss: float, num_cells: int
) -> None:
    """Streams that share a target fall into step: the best of all γ may be one whose rounds just fit between two passes
    of the others, and γ on both sides of it lose 10%. There the bar is wider than that of `make bench-gamma`."""
    cells = [cell for cell in CELLS if cell.batch in batches]
    cells = random.Random(1).sample(cells, scaled(num_cells, at_least=3))
    row = fixed_row(measure_all(cells, 1, NUM_TOKENS))
    assert row["worst_loss"] <= max_loss, row


def test_on_changing_texts_it_beats_every_fixed_one() -> None:
    cells = [Cell(rtt, 1, kind) for kind in CHANGING for rtt in RTTS_MS if rtt <= MAX_CHANGING_RTT_MS]
    found = measure_all(cells, scaled(4), NUM_TOKENS)
    assert changing_row(found)["reached"], changing_row(found)
    assert clairvoyant_row(found)["reached"], clairvoyant_row(found)
    assert all(figures.mean_gamma > 0 for row in found.values() for figures in row), "nothing was drafted"


def test_it_settles_after_a_change_and_comes_back() -> None:
    row = steps_row(scaled(4))
    assert row["reached"], row
    assert row["tokens_until_it_returns"]


def test_it_never_costs_goodput_whatever_the_load() -> None:
    row = goodput_row(1, 400, (1, 8, 64))
    assert row["reached"], row
    assert row["gains"]["0.8, 1 streams"] > 2, "the full gain at low load"


def test_rows_that_nothing_was_measured_for_say_so() -> None:
    found = measure_all([Cell(5.0, 8, "0.3")], 1, 200)
    assert changing_row(found)["reached"] is None
    assert clairvoyant_row(found)["reached"] is None
    assert fixed_row(found)["num_cells"] == 1


def test_a_loss_is_found() -> None:
    """The bar is one that a worse controller misses."""
    (figures,) = measure_all([Cell(0.5, 1, "0.9")], 1, 400).values()
    worse = [type(f)(f.fixed, 0.9 * f.best, f.mean_gamma, f.clairvoyant) for f in figures]
    row = fixed_row({Cell(0.5, 1, "0.9"): worse})
    assert not row["reached"]
    assert row["worst_loss"] == pytest.approx(0.1)

"""Which outcomes a round may have, and how likely: against all of them, and against what then comes."""

import itertools
import math

import numpy as np
import pytest
from conftest import scaled

from draft_worker.branches import (
    WAITED_SHARE,
    Chance,
    MatchOutlook,
    Place,
    RatioOutlook,
    RowCost,
    allotted,
    likeliest_outcomes,
    softmax,
)


def places_of(rng, num_places, size=6, scale=2.0):
    return [Place(np.arange(size)[::-1].copy(), rng.normal(scale=scale, size=size)) for _ in range(num_places)]


@pytest.mark.parametrize("outlook", [MatchOutlook, RatioOutlook])
def test_the_likeliest_come_first_and_all_together_are_certain(outlook):
    rng = np.random.default_rng(1)
    for _ in range(scaled(50, at_least=5)):
        places = places_of(rng, 4)
        if outlook is RatioOutlook:
            places = [Place(ids, softmax(values)) for ids, values in places]
        drafts = [int(place.ids[place.values.argmax()]) for place in places[:3]]
        every = likeliest_outcomes(places, drafts, outlook(), 10_000)
        assert math.fsum(outcome.probability for outcome in every) == pytest.approx(1.0)
        assert len({outcome[:2] for outcome in every}) == len(every) == 3 * 5 + 6
        assert all(outcome.token_id != drafts[outcome.num_accepted] for outcome in every if outcome.num_accepted < 3)
        assert [o.probability for o in every] == sorted((o.probability for o in every), reverse=True)
        assert likeliest_outcomes(places, drafts, outlook(), 5) == every[:5]
        least = every[4].probability
        assert likeliest_outcomes(places, drafts, outlook(), 100, min_probability=least) == every[:5]


def test_nothing_is_foretold_after_the_end_of_the_text():
    places = places_of(np.random.default_rng(2), 4)
    outcomes = likeliest_outcomes(places, [3, 1, 2], MatchOutlook(), 100, left_out={1, 5})
    assert {outcome.num_accepted for outcome in outcomes} == {0, 1}, "the second draft ends the text, or falls"
    assert not {1, 5} & {outcome.token_id for outcome in outcomes}


@pytest.mark.parametrize("noise", [0.2, 1.0])
def test_a_match_learns_how_far_the_targets_scores_are_from_the_drafts(noise):
    """Foretold and seen agree: outcomes held to be likely come as often as they are held to be."""
    rng, outlook = np.random.default_rng(3), MatchOutlook()
    expected = hits = 0.0
    for i in range(400):
        places = places_of(rng, 4)
        drafts = [int(place.ids[place.values.argmax()]) for place in places[:3]]
        said = [int(p.ids[(p.values + rng.normal(scale=noise, size=6)).argmax()]) for p in places]
        num_accepted = next((i for i, (a, b) in enumerate(zip(said, drafts, strict=False)) if a != b), 3)
        if i >= 100:
            best = likeliest_outcomes(places, drafts, outlook, 2)
            expected += sum(outcome.probability for outcome in best)
            hits += any(outcome[:2] == (num_accepted, said[num_accepted]) for outcome in best)
        outlook.observe(places, drafts, num_accepted, said[num_accepted])
    assert hits / 300 == pytest.approx(expected / 300, abs=0.1)
    assert (outlook.temperature < 0.35) == (noise == 0.2)


def test_where_drafts_are_sampled_their_chances_are_learnt_by_confidence():
    rng, outlook = np.random.default_rng(4), RatioOutlook()
    sure = Place(np.array([1, 2]), np.array([0.95, 0.05]))
    unsure = Place(np.array([1, 2]), np.array([0.3, 0.7]))
    last = Place(np.array([3, 4]), np.array([0.5, 0.5]))
    for _ in range(300):
        outlook.observe([sure, last], [1], int(rng.random() < 0.95), 3)
        outlook.observe([unsure, last], [1], int(rng.random() < 0.4), 3)
    assert outlook.stands(sure, 1) == pytest.approx(0.95, abs=0.1)
    assert outlook.stands(unsure, 1) == pytest.approx(0.4, abs=0.15)
    assert outlook.after(unsure, 1).tolist() == [0.0, 1.0], "what fell does not come instead"


def expected_use(probabilities, chance, num_drafts):
    """Drafts that are expected to be used, of so many behind each outcome."""
    return sum(p * chance**i for p, n in zip(probabilities, num_drafts, strict=True) for i in range(1, n + 1))


def test_drafts_go_where_they_are_likeliest_to_be_used():
    """As many as there is room for; no other way to share them out is expected to use more."""
    probabilities, chance = [0.4, 0.25, 0.1, 0.02], 0.7
    for room in range(12):
        found = allotted(probabilities, chance, 5, max_drafts=room, value_ms=9.0)
        assert sum(found) == room
        assert found == sorted(found, reverse=True)
        every = (n for n in itertools.product(range(6), repeat=4) if sum(n) == room)
        best = max(expected_use(probabilities, chance, n) for n in every)
        assert expected_use(probabilities, chance, found) == pytest.approx(best)
    assert allotted(probabilities, chance, 5, max_drafts=100, value_ms=9.0) == [5, 5, 5, 5]
    assert allotted([], chance, 5, max_drafts=100, value_ms=9.0) == []
    assert allotted([0.5], 1.0, 3, max_drafts=2, value_ms=9.0) == [2]


def test_where_nothing_is_told_of_their_value_branches_are_whole():
    """As long as the caller's rounds shall be."""
    assert allotted([0.4, 0.25, 0.1], 0.7, 5, max_drafts=14) == [5, 5, 0]
    assert allotted([0.4], 0.7, 5, max_drafts=4) == [0]


def test_a_draft_that_saves_less_than_its_row_costs_is_left_out():
    probabilities = [0.5, 0.2, 0.05, 0.01]
    shares = 0.5 ** np.arange(1, 4) / (0.5 + 0.25 + 0.125)
    found = allotted(probabilities, 0.5, 3, max_drafts=100, value_ms=20.0, row_ms=1.0)
    assert found == [int((20.0 * p * shares >= WAITED_SHARE).sum()) for p in probabilities]
    assert 0 < found[2] < found[0]
    assert found[3] == 0
    assert allotted(probabilities, 0.5, 3, max_drafts=100, value_ms=20.0, row_ms=0.0) == [3, 3, 3, 3]


def test_the_chance_of_a_draft_counts_those_that_were_reached():
    chance = Chance()
    for num_accepted in (3, 0, 1, 2) * 200:
        chance.observe(4, num_accepted)
    assert chance.value == pytest.approx(6 / (4 + 1 + 2 + 3), abs=0.02)


def test_rows_cost_what_passes_of_more_of_them_take_longer():
    cost = RowCost()
    assert cost.ms == 0.0
    cost.observe(1, 10.0)
    assert cost.ms == 0.0
    cost.observe(11, 15.0)
    assert cost.ms == pytest.approx(0.5)
    for _ in range(3):
        cost.observe(5, 12.0)
        cost.observe(1, 10.0)
    cost.observe(5, 900.0)
    cost.observe(1, 900.0)
    assert cost.ms == pytest.approx(0.5), "one slow pass moves nothing"

"""Chains that end by themselves: what they win where confidence tells something, and that they lose nothing else."""

import math
import random
from operator import truediv
from typing import NamedTuple

import pytest
from conftest import scaled

from outrider.drafting.ratio_stop import DEFAULT_CHANCE, EDGES, MIN_OBSERVED, Calibration, EarlyStop, Price

CAP = 12
DRAFT_MS, PASS_MS, ROW_MS = 3.0, 30.0, 0.3
FREE = Price(0.0)


class Place(NamedTuple):
    """One token of the text to come: its chance as a draft, what the drafter thinks of it, and how it falls."""

    chance: float
    confidence: float
    coin: float


def odds(log_odds: float) -> float:
    return 1 / (1 + math.exp(-log_odds))


def text(num_tokens: int, seed: int, *, is_useful: bool) -> list[Place]:
    """Two regimes of some 60 tokens; an overconfident drafter that knows something, or nothing."""
    rng, is_easy, places = random.Random(seed), True, []
    for _ in range(num_tokens + CAP):
        is_easy ^= rng.random() < 1 / 60
        log_odds = math.log(0.94 / 0.06 if is_easy else 0.6 / 0.4) + rng.gauss(0, 1)
        confidence = odds(1.5 * log_odds + 0.5 + rng.gauss(0, 0.7)) if is_useful else rng.random()
        places.append(Place(odds(log_odds), confidence, rng.random()))
    return places


def play(places: list[Place], round_trip_ms: float, gamma: int, stop: EarlyStop | None = None) -> float:
    """ms a token. The same text and coins whatever the policy."""
    position, clock, tokens, ms = 0, 0.0, 1.0, PASS_MS
    passed, reached = [7.0] * CAP, [10.0] * CAP
    while position < len(places) - CAP:
        drafts, num_passes = places[position : position + gamma], gamma
        if stop is not None:
            rate, expected = tokens / ms, tuple(map(truediv, passed, reached))
            price = Price(rate, rate * ROW_MS, expected)
            chain, num_passes = stop.chain(price, DRAFT_MS), 0
            while num_passes < gamma and chain.wants_row():
                num_passes += 1
                if not chain.wants_draft(drafts[num_passes - 1].confidence):
                    break
            drafts = drafts[: len(chain.confidences)]
            stop.observe(price, chain.confidences, [draft.chance for draft in drafts])
            alive = 1.0
            for place, draft in enumerate(drafts):
                passed[place] += alive * draft.chance
                reached[place] += alive
                alive *= draft.chance
        num_accepted = next((i for i, d in enumerate(drafts) if d.coin >= d.chance), len(drafts))
        round_ms = round_trip_ms + num_passes * DRAFT_MS + PASS_MS + ROW_MS * (len(drafts) + 1)
        position, clock = position + num_accepted + 1, clock + round_ms
        tokens, ms = 0.98 * tokens + num_accepted + 1, 0.98 * ms + round_ms
    return clock / position


@pytest.mark.parametrize("round_trip_ms", [0.5, 80.0])
@pytest.mark.parametrize(("is_useful", "most"), [(True, 0.97), (False, 1.02)])
def test_beside_the_best_fixed_length_in_hindsight(round_trip_ms: float, is_useful: bool, most: float) -> None:
    """A worthless confidence costs next to nothing, a useful one wins."""
    ratios = []
    for seed in range(scaled(8, at_least=3)):
        places = text(4000, seed, is_useful=is_useful)
        best = min(play(places, round_trip_ms, gamma) for gamma in range(CAP + 1))
        ratios.append(play(places, round_trip_ms, CAP, EarlyStop()) / best)
    assert sum(ratios) / len(ratios) < most


def drafted(stop: EarlyStop, price: Price, confidences: list[float]) -> int:
    chain = stop.chain(price, DRAFT_MS)
    for confidence in confidences:
        if not (chain.wants_row() and chain.wants_draft(confidence)):
            break
    return len(chain.confidences)


def taught(chance_of: dict[float, float], num_chains: int = 60) -> EarlyStop:
    stop, rng = EarlyStop(), random.Random(3)
    for _ in range(num_chains):
        confidences = [rng.choice(list(chance_of)) for _ in range(6)]
        stop.observe(FREE, confidences, [chance_of[c] for c in confidences])
    return stop


def test_nothing_ends_before_anything_was_seen_or_while_time_costs_nothing() -> None:
    dear = Price(1.0, 1.0)
    assert drafted(EarlyStop(), dear, [0.01] * 6) == 6
    stop = taught({0.01: 0.1})
    assert drafted(stop, dear, [0.01] * 6) == 1
    assert drafted(stop, FREE, [0.01] * 6) == 6


def test_the_first_draft_stands_whatever_it_is() -> None:
    """It was asked for, and it keeps every bin of confidence known."""
    stop = taught({0.01: 0.02})
    assert {drafted(stop, Price(1.0, 1.0), [0.01] * 3) for _ in range(10)} == {1}


def test_a_chain_goes_on_where_its_drafter_is_sure_and_ends_where_not() -> None:
    stop = taught({0.3: 0.3, 0.97: 0.95})
    price = Price(0.1)
    assert drafted(stop, price, [0.97] * 5) == 5
    assert drafted(stop, price, [0.3] * 5) == 1
    assert drafted(stop, price, [0.97, 0.97, 0.3, 0.97]) == 3, "the draft that ends a chain is part of it"


def test_a_row_that_costs_more_than_it_brings_is_not_sent() -> None:
    """After its pass was paid for, only the target's row counts."""
    stop = taught({0.3: 0.3, 0.97: 0.95})
    assert drafted(stop, Price(0.0, 0.5), [0.97, 0.3]) == 1
    assert drafted(stop, Price(0.0, 0.2), [0.97, 0.3]) == 2


def test_what_was_judged_bad_is_tried_again() -> None:
    """Drafts of low confidence become good: chains that always ended at them go on again."""
    stop, price = taught({0.3: 0.1}), Price(0.1)
    assert drafted(stop, price, [0.3] * 4) == 1
    for _ in range(400):
        num_drafts = drafted(stop, price, [0.3] * 4)
        stop.observe(price, [0.3] * num_drafts, [0.9] * num_drafts)
    assert sum(drafted(stop, price, [0.3] * 4) for _ in range(10)) >= 36


def test_chances_follow_what_is_reached() -> None:
    """Where hard text comes in stretches, the drafts that are reached fare better than all drafts do."""
    stop, rng = EarlyStop(), random.Random(5)
    for _ in range(3000):
        chance = rng.choice([0.9, 0.1])
        stop.observe(FREE, [0.6] * 3, [chance] * 3)
    evidence = sum(edge <= 0.6 for edge in EDGES)
    # the mean of .9 and .1, weighted by how often each is reached
    assert stop._own.chance(evidence, DEFAULT_CHANCE) == pytest.approx(0.667, abs=0.06)


def test_confidence_is_read_against_what_is_expected_of_the_text() -> None:
    """Drafts that do as was expected of their place shift nothing, however easy or hard the text is."""
    stop, rng = EarlyStop(), random.Random(7)
    for _ in range(400):
        expected = rng.choice([(0.9, 0.8), (0.4, 0.2)])
        stop.observe(Price(0.1, 0.0, expected), [rng.random(), rng.random()], expected)
    assert drafted(stop, Price(0.1, 0.0, (0.9,)), [0.5] * 5) == 5
    assert drafted(stop, Price(0.1, 0.0, (0.4,)), [0.5] * 5) == 1


def test_a_prior_is_a_start_and_learns_with_its_streams() -> None:
    prior = taught({0.3: 0.2})
    assert drafted(EarlyStop(prior), Price(0.1), [0.3] * 4) == 1, "known before its first round"
    kind, stream = EarlyStop(), None
    for _ in range(3):
        stream = EarlyStop(kind)
        for _ in range(MIN_OBSERVED):
            stream.observe(FREE, [0.3], [0.2])
    assert drafted(EarlyStop(kind), Price(0.2), [0.3] * 4) == 1


def test_no_number_goes_astray() -> None:
    stop = EarlyStop()
    for accepted in [0.0] * 2000 + [1.0] * 2000:
        stop.observe(Price(1.0, 1.0, (accepted,)), [0.0, 1.0], [accepted, accepted])
        assert all(0 < stop._own.chance(evidence, told) < 1 for evidence in (0, 10) for told in (0.0, 0.5, 1.0))


def test_drafts_that_are_never_reached_wear_nothing_out() -> None:
    """Behind a draft that is always rejected nothing is learnt, however long; the first one reached counts as ever."""
    worn, fresh = Calibration(), Calibration()
    for _ in range(200_000):
        worn.observe(3, 0.7, 0.0, weight=0.0)
    for calibration in (worn, fresh):
        calibration.observe(3, 0.7, 0.0)
    assert worn.chance(3, 0.7) == pytest.approx(fresh.chance(3, 0.7))

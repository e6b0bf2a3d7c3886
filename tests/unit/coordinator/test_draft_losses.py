"""Deaths of draft workers in a row under one request: when it does without, for how long, and what does not count."""

from __future__ import annotations

from coordinator.draft_losses import MAX_REST_S, REST_S, CloseDeaths
from coordinator.suspicion import CLOSE_TOKENS


def is_lost(_: str) -> bool:
    return True


def test_two_in_a_row_are_followed_by_a_rest_and_each_further_one_by_a_longer_one() -> None:
    deaths, now, rest_s = CloseDeaths(), 100.0, REST_S
    deaths.died(0, 10, "a", now)
    assert not deaths.rests(now, is_lost), "one may be chance"
    for number in range(9):
        deaths.died(0, 10 + number, f"another {number}", now)
        assert deaths.rests(now + 0.74 * rest_s, is_lost)
        assert not deaths.rests(now + 1.26 * rest_s, is_lost)
        now, rest_s = now + 2 * rest_s, min(2 * rest_s, MAX_REST_S)


def test_tokens_between_make_it_chance() -> None:
    deaths = CloseDeaths()
    for number in range(9):
        deaths.died(0, number * CLOSE_TOKENS, f"process {number}", 100.0)
        assert not deaths.rests(100.0, is_lost)


def test_choices_of_one_request_that_lost_the_same_process_lost_one() -> None:
    deaths = CloseDeaths()
    for choice in range(5):
        deaths.died(choice, 10, "a", 100.0)
    assert not deaths.rests(100.0, is_lost)
    deaths.died(3, 11, "b", 100.0)
    assert deaths.rests(100.0, is_lost), "all of them"


def test_one_that_answers_after_all_has_not_died() -> None:
    deaths = CloseDeaths()
    deaths.died(0, 10, "a", 100.0)
    deaths.died(0, 11, "b", 100.0)
    assert deaths.rests(100.0, lambda incarnation: True)
    assert not deaths.rests(100.0, lambda incarnation: incarnation == "b")
    deaths.died(0, 12, "c", 100.0)
    assert deaths.rests(100.0, is_lost)

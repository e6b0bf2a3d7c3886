"""The breaker of a draft worker: what it may cost in the long run, who is let through, and when."""

from __future__ import annotations

import logging
import random

import pytest
from conftest import scaled
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.fleet.breaker import (
    BUDGET_S,
    JITTER,
    MIN_COST_S,
    MIN_OPEN_S,
    NUM_TRIAL_SUCCESSES,
    TRIAL_S,
    BreakerLimits,
    Circuit,
    CircuitBreaker,
)
from coordinator.fleet.standing import Standing

LIMITS = BreakerLimits(lost_share=0.02, max_open_s=60.0)


def breaker(jitter: float = 0.0) -> CircuitBreaker:
    return CircuitBreaker(LIMITS, random=lambda: jitter)


def opened(now: float = 100.0, lost_s: float = 1.0) -> CircuitBreaker:
    one = breaker()
    one.failed(now, lost_s)
    assert one.circuit(now) is Circuit.OPEN
    return one


@settings(max_examples=scaled(400, at_least=60), deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.0, 20.0), st.booleans(), st.floats(0.0, 1.2), st.booleans()), max_size=120),
    st.floats(0.0, 1.0, exclude_max=True),
)
def test_a_flapping_worker_costs_no_more_than_its_share_however_it_times_it(
    tries: list[tuple[float, bool, float, bool]], jitter: float
) -> None:
    """One stream asks whenever it is let through; the worker decides each time how that ends, and how long it lives."""
    one, now, lost_s = breaker(jitter), 0.0, 0.0
    most_s = max([MIN_COST_S, *(cost for _, _, cost, _ in tries)])
    for pause_s, works, cost_s, is_cold in tries:
        now += pause_s
        if not one.admits("stream", now):
            continue
        if works:
            one.succeeded(now)
            continue
        now += cost_s
        lost_s += cost_s
        one.failed(now, cost_s, is_cold=is_cold)
        assert lost_s <= LIMITS.lost_share * now + BUDGET_S + 2 * most_s


@settings(max_examples=scaled(200, at_least=40), deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.sampled_from("abc"), st.booleans()), max_size=150))
def test_it_is_never_open_for_good_and_lets_one_stream_try(steps: list[tuple[float, str, bool]]) -> None:
    one, now = breaker(0.5), 0.0
    longest_s = LIMITS.max_open_s * (1 + JITTER)
    for pause_s, who, works in steps:
        now += pause_s
        circuit = one.circuit(now)
        assert 0 <= one.open_s(now) <= longest_s
        assert (one.open_s(now) > 0) == (circuit is Circuit.OPEN)
        is_free, others = one.is_free(now), [other for other in "abc" if other != who]
        admitted = one.admits(who, now)
        assert admitted or not is_free
        if circuit is Circuit.OPEN:
            assert not admitted
        if circuit is Circuit.CLOSED:
            assert all(one.admits(other, now) for other in others)
        if circuit is Circuit.HALF_OPEN and admitted:
            assert not any(one.admits(other, now) for other in others)
        if admitted:
            one.succeeded(now) if works else one.failed(now, 0.2)
    now += longest_s + TRIAL_S
    assert one.admits("new", now)


def test_a_single_death_opens_nothing_and_two_waits_in_a_row_do() -> None:
    one = breaker()
    one.failed(10.0)
    assert one.circuit(10.0) is Circuit.CLOSED
    one.failed(11.0, 0.25)
    assert one.circuit(11.0) is Circuit.CLOSED
    one.failed(12.0, 0.25)
    assert one.circuit(12.0) is Circuit.OPEN
    assert one.num_openings == 1


@pytest.mark.parametrize("cost_s", [BUDGET_S, 1.0, 5.0])
def test_one_cold_start_is_no_proof_and_a_second_one_is(cost_s: float) -> None:
    """A first proposal waits for its prompt's pass and for whatever a process does but once."""
    one = breaker()
    one.failed(10.0, cost_s, is_cold=True)
    assert one.circuit(10.0) is Circuit.CLOSED
    one.failed(11.0, cost_s, is_cold=True)
    assert one.circuit(11.0) is Circuit.OPEN
    assert one.open_s(11.0) == min(2 * cost_s / LIMITS.lost_share, LIMITS.max_open_s) - (cost_s < 0.6), "it was counted"


def test_what_a_cold_start_has_cost_is_not_forgiven() -> None:
    one = breaker()
    one.failed(10.0, 1.0, is_cold=True)
    one.failed(12.0, MIN_COST_S)
    assert one.circuit(12.0) is Circuit.OPEN
    seldom = breaker()
    for number in range(5):
        seldom.failed(number / LIMITS.lost_share, 0.95, is_cold=True)
    assert seldom.num_openings == 0


def test_a_cold_start_right_after_a_death_is_one_and_one_on_trial_fails_the_trial() -> None:
    one = breaker()
    one.failed(10.0)
    one.failed(10.5, 1.0, is_cold=True)
    assert one.circuit(10.5) is Circuit.CLOSED
    other = opened()
    now = 100.0 + other.open_s(100.0)
    assert other.admits("a", now)
    other.failed(now, 1.0, is_cold=True)
    assert other.circuit(now) is Circuit.OPEN


def test_the_log_tells_when_a_worker_is_left_alone_why_and_until_when(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    one = Standing("host:1", breaker())
    one.failed(100.0, "a first proposal had not come after 1000 ms", 1.0, 1, True)
    assert not caplog.records
    assert one.fault(100.0) == ""
    one.failed(101.0, "a proposal had not come after 500 ms", 0.5)
    (warning,) = caplog.records
    assert warning.levelname == "WARNING"
    message = warning.getMessage()
    assert message.startswith("draft worker host:1: circuit open, left alone for 60 s")
    assert "a proposal had not come after 500 ms" in message
    assert "left alone for 50 s more: a proposal had not come after 500 ms" in one.fault(111.0)
    one.failed(102.0, "another stream's, which asked before", 0.5)
    assert len(caplog.records) == 1
    assert "one stream tries it: a proposal had not come" in one.fault(161.0)
    for _ in range(NUM_TRIAL_SUCCESSES):
        one.succeeded(161.0)
    (_, closed) = caplog.records
    assert (closed.levelname, one.fault(161.0)) == ("INFO", "")
    assert "host:1: circuit closed, 60 s after it opened" in closed.getMessage()
    one.succeeded(170.0)
    assert len(caplog.records) == 2


def test_deaths_are_forgotten_with_time() -> None:
    one = breaker()
    for number in range(100):
        one.failed(number * MIN_COST_S / LIMITS.lost_share * 1.01)
    assert one.num_openings == 0


@pytest.mark.parametrize("num_streams", [1, 8, 64])
def test_what_streams_wait_together_counts_as_what_one_waits(num_streams: int) -> None:
    """A worker that is lost takes its streams with it, one after the other; another one makes few of many wait."""
    one = breaker()
    for left in range(num_streams, 0, -1):
        one.failed(50.0, 0.3, left)
    assert one.circuit(50.0) is Circuit.CLOSED
    for left in range(num_streams, 0, -1):
        one.failed(50.5, 0.3, left)
    assert one.circuit(50.5) is Circuit.OPEN
    seldom = breaker()
    for number in range(20):
        seldom.failed(number / 10, 0.25, 64)
    assert seldom.circuit(2.0) is Circuit.CLOSED


def test_one_stream_tries_and_its_success_closes() -> None:
    one = opened(lost_s=0.6)
    now = 100.0 + one.open_s(100.0)
    assert not one.admits("a", now - 0.001)
    assert one.circuit(now) is Circuit.HALF_OPEN
    assert one.admits("a", now)
    assert not one.admits("b", now)
    assert not one.is_free(now)
    assert one.admits("a", now + 1)
    for _ in range(NUM_TRIAL_SUCCESSES):
        assert one.circuit(now + 1) is Circuit.HALF_OPEN
        one.succeeded(now + 1)
    assert one.circuit(now + 1) is Circuit.CLOSED
    assert one.admits("b", now + 1)


def test_a_stream_that_tries_and_says_nothing_makes_room() -> None:
    one = opened()
    now = 100.0 + one.open_s(100.0)
    assert one.admits("a", now)
    assert not one.admits("b", now + TRIAL_S - 0.01)
    assert one.admits("b", now + TRIAL_S)
    assert not one.admits("a", now + TRIAL_S)


def test_each_failed_try_leaves_the_worker_alone_for_longer_and_so_does_one_soon_after() -> None:
    one, now, waits = breaker(), 0.0, []
    one.failed(now, BUDGET_S)
    for _ in range(8):
        waits.append(one.open_s(now))
        now += waits[-1]
        assert one.admits("a", now)
        one.failed(now)
    assert waits == sorted(waits)
    assert waits[-1] == LIMITS.max_open_s
    now += one.open_s(now)
    for _ in range(NUM_TRIAL_SUCCESSES):
        assert one.admits("a", now)
        one.succeeded(now)
    assert one.circuit(now) is Circuit.CLOSED
    one.failed(now + 1)
    assert one.circuit(now + 1) is Circuit.OPEN, "hysteresis: it has just come back"
    assert one.open_s(now + 1) == LIMITS.max_open_s


def test_once_it_has_held_out_as_long_as_it_was_left_alone_it_begins_anew() -> None:
    one, now = opened(0.0, 0.6), 0.0
    open_s = one.open_s(now)
    now += open_s
    for _ in range(NUM_TRIAL_SUCCESSES):
        assert one.admits("a", now)
        one.succeeded(now)
    now += open_s + 0.01
    one.failed(now)
    assert one.circuit(now) is Circuit.CLOSED


def test_coordinators_do_not_try_at_once() -> None:
    times = set()
    for seed in range(8):
        one = CircuitBreaker(LIMITS, random=random.Random(seed).random)
        one.failed(0.0, 0.6)
        times.add(one.open_s(0.0))
    assert len(times) == 8
    least_s = max(0.6 / LIMITS.lost_share, MIN_OPEN_S)
    assert all(least_s <= open_s <= (1 + JITTER) * least_s for open_s in times)


def test_a_share_of_all_time_leaves_nobody_alone() -> None:
    one = CircuitBreaker(BreakerLimits(lost_share=1.0))
    for number in range(50):
        one.failed(number / 10, 5.0)
    assert one.circuit(5.0) is Circuit.CLOSED

"""Who would come too late, by what streams were measured to take; and what targets have told that they can take."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from conftest import scaled

from coordinator.fleet.limits import Foreign, Limits, limits_of, together
from coordinator.shedding import (
    DEFAULT_RETRY_S,
    MAX_RETRY_S,
    MAX_TENANTS,
    MIN_RETRY_S,
    RETURNS_PER_PLACE,
    Returns,
    ServiceTimes,
    refuse_if_too_late,
)
from outrider.errors import ResourceExhausted


def test_the_life_of_a_stream_is_what_it_was_measured_to_be() -> None:
    for seed in range(scaled(50, at_least=5)):
        rng = random.Random(seed)
        times, now, num_running = ServiceTimes(0.0), 0.0, 0
        running: list[float] = []
        for _ in range(3000):
            while len(running) < 8:
                running.append(now + rng.uniform(0.5, 1.5))
                times.runs(len(running), now)
            now = min(running)
            running.remove(now)
            times.runs(len(running), now)
            times.ended(1)
            num_running = len(running)
        assert num_running == 7
        assert times.life_s == pytest.approx(1.0, rel=0.25)
        assert times.wait_s(16, 8) == pytest.approx(2.0, rel=0.25)


def test_places_that_stand_still_lengthen_the_wait_by_themselves() -> None:
    times = ServiceTimes(0.0)
    times.runs(2, 0.0)
    assert times.life_s is None
    assert times.wait_s(5, 2) == 0.0, "nobody is refused for a guess"
    times.runs(2, 1.0)
    times.ended(2)
    before = times.wait_s(1, 2)
    times.runs(2, 100.0)
    assert times.wait_s(1, 2) > 20 * before
    assert times.wait_s(0, 2) == 0.0


def test_who_comes_too_late_is_told_when_the_wait_will_be_short_enough() -> None:
    refuse_if_too_late(3.0, None)
    refuse_if_too_late(3.0, 3.0)
    with pytest.raises(ResourceExhausted, match="has 1 s left and would wait 3 s") as late:
        refuse_if_too_late(3.0, 1.0)
    assert (late.value.reason, late.value.retry_delay_s) == ("DEADLINE_TOO_SHORT", 2.0)
    with pytest.raises(ResourceExhausted) as late:
        refuse_if_too_late(1e6, 1.0)
    assert late.value.retry_delay_s == MAX_RETRY_S


def test_those_refused_come_back_one_after_the_other() -> None:
    times = ServiceTimes(0.0)
    times.runs(4, 0.0)
    times.runs(4, 1.0)
    times.ended(4)
    interval_s = times.wait_s(1, 4)
    returns = Returns()
    delays = [returns.delay_s("many", times, 3, 4, 10.0) for _ in range(50)]
    assert delays[0] == pytest.approx(max(3 * interval_s, MIN_RETRY_S))
    gaps = [later - sooner for sooner, later in itertools.pairwise(delays)]
    assert gaps == pytest.approx([interval_s / RETURNS_PER_PLACE] * 49)
    assert returns.delay_s("one", times, 3, 4, 10.0) == pytest.approx(delays[0]), "of its tenant alone"
    assert returns.delay_s("many", times, 3, 4, 1000.0) == pytest.approx(delays[0]), "all have come by then"
    assert all(returns.delay_s("many", times, 3, 4, 0.0) <= MAX_RETRY_S for _ in range(10_000))
    for number in range(2 * MAX_TENANTS):
        returns.delay_s(str(number), times, 1, 4, 0.0)
    assert len(returns._last) == MAX_TENANTS
    fresh = [Returns().delay_s("any", ServiceTimes(0.0), 3, 4, 0.0) for _ in range(2)]
    assert fresh == [DEFAULT_RETRY_S] * 2


def test_limits_of_several_targets_are_those_of_all() -> None:
    assert together([]) is None
    told = limits_of(num_rows=8, num_foreign_streams=3, max_blocks=100, num_foreign_blocks=90, block_size=16)
    assert told == Limits(5, 160, 16)
    untold = limits_of(num_rows=8, num_foreign_streams=9, max_blocks=0, num_foreign_blocks=5, block_size=4)
    assert untold == Limits(0, math.inf, 4)
    assert together([told, untold]) == Limits(5, math.inf, 16)
    assert told.promised(17) == 32
    assert told.allow(5, 160)
    assert not told.allow(6, 160)
    assert not told.allow(5, 161)


def test_streams_of_ours_that_end_while_a_target_tells_are_nobody_elses() -> None:
    foreign = Foreign()
    foreign.heard(3, 30)
    assert (foreign.num_streams, foreign.num_blocks) == (0, 0)
    foreign.heard(2, 40)
    assert (foreign.num_streams, foreign.num_blocks) == (2, 30)
    foreign.heard(-1, -5)
    assert (foreign.num_streams, foreign.num_blocks) == (0, 0)

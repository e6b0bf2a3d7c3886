"""The wait for a busy target: time away is free until a pass more is missed."""

import pytest

from coordinator.gamma.pass_wait import BIN, NUM_PASSES, PassWait

PASS_MS = 40.0


def busy(*away_ms: float) -> PassWait:
    """Of a target whose passes follow one another, as streams found it that had been away for so long."""
    wait = seeing(PASS_MS)
    for away in away_ms:
        wait.observe(away, -away % PASS_MS)
    return wait


def seeing(*pass_ms: float) -> PassWait:
    """Passes of these lengths in turn."""
    wait = PassWait()
    for i in range(NUM_PASSES):
        wait.passed(pass_ms[i % len(pass_ms)], 1.0)
    return wait


def test_an_idle_target_has_no_wait() -> None:
    wait = seeing(PASS_MS)
    assert wait.ms(10.0) == 0.0
    for _ in range(20):
        wait.observe(10.0, 0.0)
    assert wait.ms(10.0) == wait.ms(8.0) == wait.ms(30.0) == 0.0
    nothing = PassWait()
    nothing.observe(10.0, 5.0)
    assert nothing.ms(10.0) == nothing.pass_ms == 0.0


def test_who_is_away_longer_waits_shorter() -> None:
    wait = busy(*[10.0] * 20)
    rounds = [away + wait.ms(away) for away in (5.0, 10.0, 20.0, 28.0)]
    assert rounds == pytest.approx([PASS_MS] * 4, rel=0.01), "whole passes, whatever the drafts took"
    assert 50.0 + wait.ms(50.0) == pytest.approx(2 * PASS_MS, rel=0.01)


def test_what_was_seen_outweighs_the_arithmetic() -> None:
    """Passes that were missed although there was time for them: the target had begun a short one before."""
    wait = busy(*[10.0] * 5)
    just = 0.7 * PASS_MS
    before = wait.ms(just)
    for _ in range(20):
        wait.observe(just, 2 * PASS_MS - just)
    assert wait.ms(just) > before + 0.7 * PASS_MS
    assert wait.ms(just - 2 * BIN * PASS_MS) < PASS_MS, "no other time away is judged by it"


def test_it_follows_a_target_that_idles_again() -> None:
    wait = busy(*[10.0] * 50)
    assert wait.ms(10.0) == pytest.approx(30.0, rel=0.01)
    for _ in range(200):
        wait.observe(10.0, 0.0)
    assert wait.ms(10.0) < 1.0


def test_passes_of_other_lengths_are_missed_or_not() -> None:
    """A time away that fits into the long passes alone misses one more where it meets a short one."""
    wait = seeing(20.0, 40.0)
    for _ in range(20):
        wait.observe(10.0, 20.0)
    assert wait.pass_ms == pytest.approx(30.0, rel=0.15)
    assert wait.ms(10.0) == pytest.approx(20.0, rel=0.2), "one of either length"
    assert wait.ms(30.0) == pytest.approx(10.0, rel=0.2), "two short ones, or one long one"
    weighted = PassWait()
    for _ in range(NUM_PASSES // 2):
        weighted.passed(20.0, 1.0)
        weighted.passed(40.0, 7.0)
    assert weighted.pass_ms < 25.0, "seven streams tell of each long pass"


def test_what_each_stream_of_a_pass_tells_is_one_pass() -> None:
    """A crowd says little new after its first member: it would be all that is remembered."""
    wait = seeing(20.0, 40.0)
    for _ in range(NUM_PASSES):
        wait.passed(40.0, NUM_PASSES)
    assert wait.pass_ms == pytest.approx(30.0, rel=0.15)
    for _ in range(NUM_PASSES):
        wait.passed(40.0, 1.0)
    assert wait.pass_ms == pytest.approx(40.0)


def test_waits_are_forgotten_by_passes() -> None:
    """Of a crowd whose waits change in the middle of a pass, those before are half of what is known."""
    waits: list[float] = []
    for num_streams in (1, 32):
        wait = PassWait()
        for queue_ms in (10.0, 30.0):
            for _ in range(32):
                wait.passed(PASS_MS, num_streams)
                wait.observe(10.0, queue_ms)
        waits.append(wait.busy)
    assert waits == pytest.approx([0.92, 0.68], abs=0.03)

"""The wait for a busy target: time away is free until a pass more is missed."""

import pytest

from coordinator.gamma.pass_wait import BIN, PassWait

PASS_MS = 40.0


def busy(*away_ms: float) -> PassWait:
    """Of a target whose passes follow one another, as streams found it that had been away for so long."""
    wait = PassWait()
    for away in away_ms:
        wait.observe(away, -away % PASS_MS, PASS_MS)
    return wait


def test_an_idle_target_has_no_wait() -> None:
    wait = PassWait()
    assert wait.ms(10.0, PASS_MS) == 0.0
    for _ in range(20):
        wait.observe(10.0, 0.0, PASS_MS)
    assert wait.ms(10.0, PASS_MS) == wait.ms(30.0, PASS_MS) == 0.0
    assert PassWait().ms(10.0, 0.0) == 0.0


def test_who_is_away_longer_waits_shorter() -> None:
    wait = busy(*[10.0] * 20)
    rounds = [away + wait.ms(away, PASS_MS) for away in (5.0, 10.0, 20.0, 28.0)]
    assert rounds == pytest.approx([PASS_MS] * 4, rel=0.01), "whole passes, whatever the drafts took"
    assert 50.0 + wait.ms(50.0, PASS_MS) == pytest.approx(2 * PASS_MS, rel=0.01)


def test_what_was_seen_outweighs_the_arithmetic() -> None:
    """Passes that were missed although there was time for them: the target had begun a short one before."""
    wait = busy(*[10.0] * 5)
    just = 0.7 * PASS_MS
    before = wait.ms(just, PASS_MS)
    for _ in range(20):
        wait.observe(just, 2 * PASS_MS - just, PASS_MS)
    assert wait.ms(just, PASS_MS) > before + 0.7 * PASS_MS
    assert wait.ms(just - 2 * BIN * PASS_MS, PASS_MS) < PASS_MS, "no other time away is judged by it"


def test_it_follows_a_target_that_idles_again() -> None:
    wait = busy(*[10.0] * 50)
    assert wait.ms(10.0, PASS_MS) == pytest.approx(30.0, rel=0.01)
    for _ in range(200):
        wait.observe(10.0, 0.0, PASS_MS)
    assert wait.ms(10.0, PASS_MS) < 1.0

"""How long a stream waits for a proposal, and how long it leaves a worker alone that it has lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from coordinator import drafting
from coordinator.drafting import FIRST_WAIT_S, MIN_WAIT_S, WAIT_FACTOR, Avoided, DraftSide
from coordinator.gamma.policy import Choice
from outrider.sampling.params import Origin
from outrider.serving.messages import Header, Verdict


def side(verify_ms: float = 0.0) -> DraftSide:
    stream: Any = SimpleNamespace(request=SimpleNamespace(max_draft_tokens=8, drafter=""))
    pool: Any = SimpleNamespace()
    one = DraftSide(stream, pool, 64)
    for _ in range(3 if verify_ms else 0):
        verdict = Verdict(
            header=Header(1, 3, 0), committed_ids=(1,), origins=(Origin.PLAIN,), compute_us=round(1000 * verify_ms)
        )
        one.verified(verdict)
    return one


def choice(num_draft_tokens: int = 4, max_wait_ms: float = 0.0) -> Choice:
    return Choice("model", num_draft_tokens, "best", max_wait_ms=max_wait_ms)


def test_what_nobody_knows_anything_of_is_waited_for_a_while() -> None:
    assert side()._wait_s(choice(), 0.0) == FIRST_WAIT_S
    assert side()._wait_s(choice(), 0.5) == WAIT_FACTOR * 0.5


@pytest.mark.parametrize(
    ("verify_ms", "expected_s", "wait_s"), [(100.0, 0.3, 0.7), (1000.0, 0.1, 0.4), (1.0, 0.002, MIN_WAIT_S)]
)
def test_no_longer_than_drafts_can_save(verify_ms: float, expected_s: float, wait_s: float) -> None:
    """By then the round would have been better off plain; and no longer than proposals ever take."""
    assert side(verify_ms)._wait_s(choice(), expected_s) == pytest.approx(wait_s)


def test_no_longer_than_the_choice_says_that_they_are_worth() -> None:
    one = side(100.0)
    assert one._wait_s(choice(max_wait_ms=250.0), 0.3) == 0.25
    assert one._wait_s(choice(max_wait_ms=5000.0), 0.3) == WAIT_FACTOR * 0.3
    assert one._wait_s(choice(max_wait_ms=1.0), 0.3) == MIN_WAIT_S


def test_a_worker_is_left_alone_for_longer_after_each_loss() -> None:
    avoided = Avoided(1.0, 4.0)
    for number, meant_s in enumerate((1, 2, 4, 4, 4)):
        now = 100.0 * number
        avoided.lost("a", now)
        assert avoided.at(now + 0.74 * meant_s) == {"a"}
        assert avoided.at(now + 1.26 * meant_s) == set()
    avoided.lost("b", 1000.0)
    assert avoided.at(1000.0 + 0.74 * drafting.REOPEN_AFTER_S) == {"b"}, "each for itself"

"""When drafts are made ahead of the verdict: where it pays by measured costs, and never for good or for bad."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from coordinator.gamma.adaptive import AdaptiveGamma
from coordinator.gamma.ahead import (
    MAX_ROUNDS_WITHOUT,
    MIN_ROUNDS_BEFORE,
    NUM_RETRIES,
    HitRate,
    best_ahead,
    lengths_of,
)
from coordinator.gamma.costs import RoundCosts
from coordinator.gamma.policy import HIT, LATE, MISS, Candidate, Choice, RoundReport
from coordinator.gamma.shared import PairEstimates
from outrider.serving.messages import AheadWish

MODEL = Candidate("model", max_branches=12)
VERIFY_MS, DRAFT_MS, ACCEPT = 30.0, 3.0, 204
"""Soft acceptance of every draft, of 255: .8."""


def report(choice: Choice, *, network_ms: float = 5.0, verify_ms: float = VERIFY_MS, ahead: str = "") -> RoundReport:
    num_drafts = choice.num_draft_tokens
    is_hit = ahead in (HIT, LATE)
    draft_ms = 0.0 if is_hit else DRAFT_MS * num_drafts
    network_ms = 0.0 if is_hit else network_ms
    return RoundReport(
        choice=choice,
        num_draft_tokens=num_drafts,
        num_accepted=num_drafts // 2,
        num_committed=num_drafts // 2 + 1,
        soft_acceptances=bytes([ACCEPT] * num_drafts),
        draft_ms=draft_ms,
        draft_network_ms=network_ms,
        verify_ms=verify_ms,
        round_ms=draft_ms + network_ms + verify_ms,
        ahead=ahead,
        branch_build_ms=(1 + num_drafts) * DRAFT_MS if is_hit else 0.0,
        target="t",
    )


class Stream:
    """A policy that is told what its rounds take in a world of given hits and slowness."""

    def __init__(self, mode: str = "auto", *, shared: PairEstimates | None = None, slowdown: float = 1.0) -> None:
        self.policy = AdaptiveGamma(shared or PairEstimates(), 8, draft_ahead=mode)
        self.slowdown = slowdown
        self.network_ms = 5.0
        self._wished = False
        self.num_rounds = 0
        for _ in range(4):  # plain decoding is known to cost one pass a token
            self.policy.observe(
                RoundReport(choice=Choice("", 0, "best"), num_committed=4, verify_ms=4 * VERIFY_MS,
                            round_ms=4 * VERIFY_MS, target="t")
            )  # fmt: skip

    def round(self, hits: bool = True) -> Choice:
        choice = self.policy.choose(8, 64, (MODEL,))
        if choice.candidate is None:
            self.policy.observe(
                RoundReport(choice=choice, num_committed=4, verify_ms=4 * VERIFY_MS, round_ms=4 * VERIFY_MS, target="t")
            )
            return choice
        ahead = (HIT if hits else MISS) if self._wished else ""
        verify_ms = VERIFY_MS * (self.slowdown if choice.ahead else 1.0)
        self.policy.observe(report(choice, network_ms=self.network_ms, verify_ms=verify_ms, ahead=ahead))
        self._wished = bool(choice.ahead)
        self.num_rounds += 1
        return choice

    def rounds(self, count: int, **options: bool) -> list[Choice]:
        return [choice for _ in range(count) if (choice := self.round(**options)).candidate is not None]


def test_the_first_rounds_are_on_demand_then_it_drafts_ahead() -> None:
    choices = Stream().rounds(30)
    assert not any(choice.ahead for choice in choices[:MIN_ROUNDS_BEFORE])
    assert all(choice.ahead for choice in choices[MIN_ROUNDS_BEFORE + 1 :] if choice.reason != "probe")
    last = choices[-1].ahead
    assert last.num_branches == 12
    assert last.num_draft_tokens > choices[-1].num_draft_tokens, "those of a miss are waited for"
    assert 0 < last.value_ms <= 5.0 + DRAFT_MS * last.num_draft_tokens + 1e-6


def test_a_hit_promises_more_than_a_round_on_demand() -> None:
    ahead, on_demand = Stream(), Stream("off")
    expected = [stream.rounds(60)[-1].expected_tokens_per_s for stream in (ahead, on_demand)]
    assert expected[0] > 1.3 * expected[1]
    assert not any(choice.ahead for choice in on_demand.rounds(20))


def test_hits_say_nothing_of_what_drafts_on_demand_take() -> None:
    stream = Stream()
    stream.rounds(40)
    costs = stream.policy._shared.costs
    assert costs.draft(MODEL).network.value() == pytest.approx(5.0)
    assert costs.draft_ms(MODEL, 4) == pytest.approx(4 * DRAFT_MS)
    assert costs.verify_ms(4) == pytest.approx(VERIFY_MS, rel=0.01)


def test_where_it_slows_the_target_it_is_left_and_tried_again() -> None:
    """Both on one machine: what the branches save is lost in the target's passes."""
    stream = Stream(slowdown=2.0)
    choices = stream.rounds(2 * MAX_ROUNDS_WITHOUT + 60)
    ahead = [bool(choice.ahead) for choice in choices]
    assert any(ahead[:20])
    assert not any(ahead[40 : 40 + MAX_ROUNDS_WITHOUT // 2])
    assert sum(ahead) <= 20 + 2 * (NUM_RETRIES + 1)
    assert any(ahead[100:]), "it was never tried again"
    assert stream.policy._shared.costs.verify_ms(4) == pytest.approx(VERIFY_MS, rel=0.02)
    stream.slowdown = 1.0
    assert all(choice.ahead for choice in stream.rounds(MAX_ROUNDS_WITHOUT + 60)[-20:] if choice.reason != "probe")


def test_tries_in_vain_become_rare() -> None:
    ahead = [bool(choice.ahead) for choice in Stream(slowdown=2.0).rounds(5 * MAX_ROUNDS_WITHOUT)]
    assert 0 < sum(ahead[40:]) <= 2 * (NUM_RETRIES + 1)


def test_on_and_off_are_obeyed() -> None:
    assert all(choice.ahead for choice in Stream("on", slowdown=2.0).rounds(30))
    assert not any(choice.ahead for choice in Stream("off").rounds(30))


def test_a_drafter_that_cannot_is_not_asked() -> None:
    policy = AdaptiveGamma(PairEstimates(), 8)
    for _ in range(20):
        choice = policy.choose(8, 64, (dataclasses.replace(MODEL, max_branches=0),))
        assert not choice.ahead
        policy.observe(report(choice) if choice.candidate else RoundReport(
            choice=choice, num_committed=4, verify_ms=120.0, round_ms=120.0))  # fmt: skip


def round_of(num_drafts: int, ahead: str, num_wished: int = 5) -> RoundReport:
    choice = Choice("model", num_drafts, "best", 0, MODEL, ahead=AheadWish(12, num_wished))
    return report(choice, ahead=ahead)


def test_a_hit_rate_is_a_streams_own_and_starts_from_the_others() -> None:
    prior = HitRate()
    good, bad = HitRate(prior), HitRate(prior)
    for _ in range(60):
        good.observe(round_of(5, HIT))
        bad.observe(round_of(5, MISS))
    assert good.of(5) > 0.85
    assert bad.of(5) < 0.3
    assert bad.of(5) < HitRate(prior).of(5) < good.of(5)


@pytest.mark.parametrize("num_drafts", [3, 8])
def test_hits_are_rarer_behind_a_longer_chain(num_drafts: int) -> None:
    """Seen at chains of one length it foretells those of others: each draft costs the same share of hits."""
    rng, hits, survives = random.Random(1), HitRate(), 0.94
    for _ in range(3000):
        hits.observe(round_of(num_drafts, HIT if rng.random() < survives**num_drafts else MISS))
    for other in (2, 5, 10):
        assert hits.of(other) == pytest.approx(survives**other, abs=0.12)
    assert hits.of(2) > hits.of(5) > hits.of(10)


def test_branches_shorter_than_wished_promise_less() -> None:
    hits, expected = HitRate(), [1.0, 1.8, 2.4, 2.9]
    assert [hits.tokens(expected, n) for n in range(4)] == pytest.approx(expected)
    for _ in range(400):
        hits.observe(round_of(3, HIT, num_wished=6))
    assert hits.tokens(expected, 3) == pytest.approx(1.8 + 0.5 * 0.6, abs=0.01)
    assert hits.tokens(expected, 2) == pytest.approx(1.8, abs=0.01)


@pytest.mark.parametrize("network_ms", [0.5, 5.0, 20.0, 80.0])
@pytest.mark.parametrize("survives", [0.0, 0.8, 0.94, 1.0])
def test_no_other_lengths_commit_more(network_ms: float, survives: float) -> None:
    """Against every pair of lengths, hits and misses as they then come."""
    costs, hits = RoundCosts(), HitRate()
    for size in range(1, 9):
        choice = Choice("model", size, "best", 0, MODEL)
        for _ in range(4):
            costs.observe_round(report(choice, network_ms=network_ms), MODEL)
    for _ in range(500):
        hits.observe(round_of(5, HIT if survives == 1.0 else MISS))
    if 0 < survives < 1:
        hits = HitRate()
        hits._hits, hits._seen, hits._drafts = 1e6 * survives**5, 1e6, 5e6
    expected = [sum(0.8**i for i in range(n + 1)) for n in range(9)]
    rounds_ms = costs.rounds_ms(MODEL, range(1, 9))
    found = best_ahead(costs, MODEL, expected, rounds_ms, hits, 0.01, always=True)
    assert found is not None
    rates, lengths = {}, lengths_of(costs, MODEL, expected, rounds_ms, hits)
    for wished, asked in itertools.product(range(1, 9), repeat=2):
        ahead, demand = lengths[wished - 1], lengths[asked - 1]
        share = demand.hit_rate / (1 - ahead.hit_rate + demand.hit_rate)
        tokens = share * ahead.hit_tokens + (1 - share) * demand.tokens
        rates[wished, asked] = tokens / (share * ahead.hit_ms + (1 - share) * demand.ms)
    chosen = rates[found.wish.num_draft_tokens, found.num_on_demand]
    assert chosen == pytest.approx(max(rates.values()), rel=1e-9)
    assert found.tokens / found.ms == pytest.approx(chosen)
    assert len({round(rate, 6) for rate in rates.values()}) > 8, "INCONCLUSIVE: lengths make no difference"


def test_misses_lower_what_it_promises() -> None:
    hits, misses = Stream(), Stream()
    rate = [s.rounds(80, hits=h)[-1].expected_tokens_per_s for s, h in ((hits, True), (misses, False))]
    assert rate[0] > 1.2 * rate[1]


def test_over_a_long_way_fewer_drafts_are_wanted_behind_each_outcome() -> None:
    """What the target's pass cannot hide is waited for."""
    near, far = Stream(), Stream()
    far.network_ms = 40.0
    near_choice, far_choice = near.rounds(80)[-1], far.rounds(80)[-1]
    assert near_choice.ahead
    assert far_choice.expected_tokens_per_s < near_choice.expected_tokens_per_s


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_drafts_are_waited_for_as_long_as_that_pays(mode: str) -> None:
    """Longer than they take, or nobody would have asked; not longer than all their tokens would take plainly."""
    stream = Stream(mode)
    choice = stream.rounds(60)[-1]
    usual_ms = stream.network_ms + DRAFT_MS * choice.num_draft_tokens
    assert usual_ms < choice.max_wait_ms < VERIFY_MS * choice.num_draft_tokens
    far = Stream(mode)
    far.network_ms = 40.0
    longer = far.rounds(60)[-1]
    assert longer.max_wait_ms > choice.max_wait_ms, "where time earns less, more of it is worth a draft"


def test_a_try_is_waited_for_whatever_it_takes() -> None:
    """It tells what drafts take: cut short, a worker that was slow once would be held to be slow for ever."""
    stream = Stream()
    choices = [stream.policy.choose(8, 64, (MODEL,))]
    assert choices[0].reason == "warm-up"
    assert not choices[0].max_wait_ms
    stream.network_ms = 500.0
    tries = [choice for choice in stream.rounds(400) if choice.reason == "probe"]
    assert tries, "INCONCLUSIVE"
    assert not any(choice.max_wait_ms for choice in tries)

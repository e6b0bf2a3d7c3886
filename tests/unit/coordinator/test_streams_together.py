"""Streams that share a target and what they know: tries, starts, and what a draft costs beside others."""

from __future__ import annotations

from statistics import fmean

import pytest

from coordinator.gamma.adaptive import PLAIN_PROBE_SHARE, AdaptiveGamma
from coordinator.gamma.costs import NUM_SLOWED, RoundCosts
from coordinator.gamma.fixed import FixedGamma
from coordinator.gamma.policy import GammaPolicy, RoundReport
from coordinator.gamma.shared import MAX_LEFT_TO_OTHERS, PairEstimates
from coordinator.simulator.simulation import MODEL, NewPolicy, Outcome, Simulation
from coordinator.simulator.texts import Text, constant
from coordinator.simulator.world import World


def reports_of(chance: float, num_streams: int, num_tokens: int) -> list[RoundReport]:
    shared, reports = PairEstimates(), list[RoundReport]()
    simulation = Simulation(
        World(), [Text(constant(chance))], lambda *_: AdaptiveGamma(shared, 16), num_streams=num_streams,
        on_round=reports.append,
    )  # fmt: skip
    simulation.run(num_tokens)
    return reports


def test_a_try_that_is_due_is_made_by_one_of_all_streams() -> None:
    reports = reports_of(0.8, 8, 12_000)
    plain = [report for report in reports if report.choice.reason == "probe" and not report.num_draft_tokens]
    assert plain, "it is tried now and then"
    share = sum(report.round_ms for report in plain) / sum(report.round_ms for report in reports)
    assert share < 5 * PLAIN_PROBE_SHARE, "all of them would take eight times as much"


def test_what_nobody_knows_is_tried_by_one_stream_and_left_to_it_for_a_while() -> None:
    shared = PairEstimates()
    policies = [AdaptiveGamma(shared, 16) for _ in range(3)]
    choices = [policy.choose(16, 64, (MODEL,)) for policy in policies]
    assert [choice.reason for choice in choices[:2]] == ["warm-up", "warm-up"]
    assert [bool(choice.num_draft_tokens) for choice in choices[:2]] == [True, False], "drafts by one, plain by another"
    assert choices[2].reason != "warm-up"
    for _ in range(MAX_LEFT_TO_OTHERS):
        policies[2].choose(16, 64, (MODEL,))
    assert policies[2].choose(16, 64, (MODEL,)).reason == "warm-up", "the stream that tried has ended"


def test_streams_that_begin_at_once_do_not_fall_into_step() -> None:
    """All away at once, then all in one pass: that would take a third of the speed."""
    text, world, num_tokens = Text(constant(0.95)), World(draft_rtt_ms=20.0), 12_000

    def rate(policy: NewPolicy) -> float:
        return Simulation(world, [text], policy, num_streams=32).run(num_tokens).tokens_per_s

    shared = PairEstimates()
    assert rate(lambda *_: AdaptiveGamma(shared, 16)) > 0.85 * rate(lambda *_: FixedGamma(12))


@pytest.mark.parametrize(("rtt_ms", "seed"), [(20.0, 1), (80.0, 7)])
def test_streams_that_have_fallen_into_step_part_again(rtt_ms: float, seed: int) -> None:
    """With these starts they do, whatever γ is best: one pass for all but one of them, and an idle target before it."""
    text, world, num_tokens = Text(constant(0.95), seed=seed), World(draft_rtt_ms=rtt_ms), 20_000

    def play(policy: NewPolicy) -> Outcome:
        simulation = Simulation(world, [text], policy, num_streams=32, seed=seed)
        simulation.run(num_tokens // 4)
        return simulation.run(num_tokens)

    shared = PairEstimates()
    found = play(lambda *_: AdaptiveGamma(shared, 16))
    assert found.target_load > 0.95
    assert found.tokens_per_s > 0.93 * play(lambda *_: FixedGamma(13)).tokens_per_s


def test_a_busy_draft_worker_is_slower_for_every_number_of_drafts() -> None:
    costs = RoundCosts()
    for num_drafts in (2, 4) * 8:
        costs.draft(MODEL).observe(num_drafts, num_drafts, 3.0 * num_drafts, 0.5)
    assert costs.draft_ms(MODEL, 4) == pytest.approx(12.0)
    for _ in range(NUM_SLOWED):
        costs.draft(MODEL).observe(2, 2, 12.0, 0.5)
    assert costs.draft_ms(MODEL, 2) == pytest.approx(12.0)
    assert costs.draft_ms(MODEL, 4) == pytest.approx(24.0), "not seen since"
    for _ in range(NUM_SLOWED):
        costs.draft(MODEL).observe(2, 2, 6.0, 0.5)
    assert costs.draft_ms(MODEL, 4) == pytest.approx(12.0)


def test_drafts_made_while_a_stream_would_wait_cost_no_time() -> None:
    def share(num_streams: int) -> float:
        """Of a ms of drafting, that rounds get longer by."""
        rounds = [r for r in reports_of(0.7, num_streams, 1000 * num_streams) if r.choice.price is not None]
        priced = [r for r in rounds if r.choice.price is not None and r.choice.reason != "probe"][len(rounds) // 2 :]
        assert priced
        return fmean(r.choice.price.tokens_per_ms / (r.choice.expected_tokens_per_s / 1000) for r in priced
                     if r.choice.price is not None)  # fmt: skip

    assert share(1) == pytest.approx(1.0, abs=0.1)
    assert share(8) < 0.4


def test_policies_alone_plan_plain_runs_as_long_as_they_pay() -> None:
    shared, policies = PairEstimates(), list[GammaPolicy]()

    def new(*_: object) -> GammaPolicy:
        policies.append(AdaptiveGamma(shared, 16))
        return policies[-1]

    lengths: dict[int, set[int]] = {1: set(), 8: set()}
    for num_streams, found in lengths.items():
        reports: list[RoundReport] = []
        Simulation(World(draft_rtt_ms=80.0), [Text(constant(0.3))], new, num_streams=num_streams,
                   on_round=reports.append).run(1500 * num_streams)  # fmt: skip
        found |= {r.num_committed for r in reports if r.choice.reason in ("best", "load") and not r.num_draft_tokens}
    assert max(lengths[1]) == max(lengths[8]) == 64
    assert len(lengths[8]) > 2 * len(lengths[1]), "streams of one target end theirs at different times"

"""γ controllers: unbiased survival, honest costs, and the better drafter; beside every fixed γ: test_bench_gamma.py."""

import random
from dataclasses import dataclass

import pytest

from coordinator.gamma.acceptance import Acceptance
from coordinator.gamma.adaptive import AdaptiveGamma
from coordinator.gamma.costs import VERIFY_SLOPE, LineCost
from coordinator.gamma.fixed import FixedGamma
from coordinator.gamma.policy import Candidate, Choice, GammaPolicy, RoundReport
from coordinator.gamma.shared import PairEstimates

CAP = 8
MODEL, LOOKUP = Candidate("model"), Candidate("lookup")


@dataclass
class World:
    """Simulated costs in ms and acceptance by position; `lookup_match` is the chance that a lookup finds anything.
    `catch_up_ms`: of each token of a plain run, which the model computes before it can draft again."""

    accept: float = 0.8
    draft_ms: float = 1.0
    verify_ms: float = 10.0
    row_ms: float = 0.2
    draft_rtt_ms: float = 0.5
    target_rtt_ms: float = 0.5
    lookup_match: float = 0.0
    lookup_accept: float = 0.9
    decay_by_position: float = 1.0
    catch_up_ms: float = 0.0
    num_behind: int = 0

    def play(self, policy: GammaPolicy, num_tokens: int, rng: random.Random, drafters: tuple[Candidate, ...]) -> float:
        """Time to generate so many tokens."""
        done, clock = 0, 0.0
        while done < num_tokens:
            choice = policy.choose(CAP, 64, drafters)
            report = self.round(choice, rng)
            policy.observe(report)
            done += report.num_committed
            clock += report.round_ms
        return clock * num_tokens / done

    def round(self, choice: Choice, rng: random.Random) -> RoundReport:
        def jitter(value: float) -> float:
            return value * rng.uniform(0.9, 1.1)

        if not choice.num_draft_tokens:
            self.num_behind += choice.credit_tokens
            verify = sum(jitter(self.verify_ms) for _ in range(choice.credit_tokens))
            rtt = jitter(self.target_rtt_ms)
            return RoundReport(
                choice=choice,
                num_committed=choice.credit_tokens,
                verify_ms=verify,
                verify_network_ms=rtt,
                round_ms=verify + rtt,
            )
        is_lookup = choice.drafter == "lookup"
        num_drafts = choice.num_draft_tokens if not is_lookup or rng.random() < self.lookup_match else 0
        accept = self.lookup_accept if is_lookup else self.accept
        num_accepted = 0
        while num_accepted < num_drafts and rng.random() < accept * self.decay_by_position**num_accepted:
            num_accepted += 1
        draft = 0.05 if is_lookup else jitter(self.draft_ms) * num_drafts
        num_behind, self.num_behind = (0, self.num_behind) if is_lookup else (self.num_behind, 0)
        catch_up = jitter(self.catch_up_ms) * num_behind
        verify = jitter(self.verify_ms + self.row_ms * num_drafts)
        draft_rtt, target_rtt = jitter(self.draft_rtt_ms), jitter(self.target_rtt_ms)
        return RoundReport(
            choice=choice,
            num_draft_tokens=num_drafts,
            num_accepted=num_accepted,
            num_committed=num_accepted + 1,
            draft_ms=draft + catch_up,
            draft_catch_up_ms=catch_up,
            num_ingested_tokens=num_behind + 1,
            draft_network_ms=draft_rtt,
            verify_ms=verify,
            verify_network_ms=target_rtt,
            round_ms=draft + catch_up + verify + draft_rtt + target_rtt,
        )


def best_fixed(world: World, drafters: tuple[Candidate, ...]) -> float:
    """Expected time per token of the best policy that always does the same."""
    times = [world.verify_ms + world.target_rtt_ms / 64]
    for drafter in (candidate.name for candidate in drafters):
        match = world.lookup_match if drafter == "lookup" else 1.0
        accept = world.lookup_accept if drafter == "lookup" else world.accept
        for gamma in range(1, CAP + 1):
            expected, alive = 1.0, match
            for position in range(gamma):
                alive *= accept * world.decay_by_position**position
                expected += alive
            draft_ms = 0.05 if drafter == "lookup" else world.draft_ms * gamma
            verify_ms = world.verify_ms + world.row_ms * gamma * match
            times.append((draft_ms + verify_ms + world.draft_rtt_ms + world.target_rtt_ms) / expected)
    return min(times)


def test_speculation_costs_next_to_nothing_where_it_cannot_pay() -> None:
    for world in (
        World(accept=0.0),
        World(draft_ms=100),
        World(accept=0.1, draft_rtt_ms=300),
        World(accept=0.3, draft_ms=3, catch_up_ms=3),
    ):
        plain = world.play(FixedGamma(0), 4000, random.Random(1), ())
        world.num_behind = 0
        assert world.play(AdaptiveGamma(PairEstimates(), CAP), 4000, random.Random(2), (MODEL, LOOKUP)) <= plain / 0.97


def test_coming_level_with_the_text_is_paid_once_and_is_no_part_of_what_drafts_take() -> None:
    world, policy, rng = World(accept=0.85, catch_up_ms=4), AdaptiveGamma(PairEstimates(), CAP), random.Random(3)
    world.num_behind = 60
    took_ms = world.play(policy, 400, rng, (MODEL,))
    assert took_ms <= 1.1 * 400 * best_fixed(world, (MODEL,)) + 60 * world.catch_up_ms


def test_gamma_goes_to_zero_and_comes_back_when_drafts_pay_again() -> None:
    world, rng, policy = World(accept=0.9), random.Random(4), AdaptiveGamma(PairEstimates(), CAP)

    def share_of_drafts(num_tokens: int) -> float:
        done = drafted = 0
        while done < num_tokens:
            report = world.round(policy.choose(CAP, 64, (MODEL,)), rng)
            policy.observe(report)
            done += report.num_committed
            drafted += report.num_committed if report.choice.num_draft_tokens else 0
        return drafted / done

    assert share_of_drafts(2000) > 0.9
    world.draft_ms = 60.0
    share_of_drafts(1000)
    assert share_of_drafts(2000) < 0.1
    world.draft_ms = 1.0
    share_of_drafts(20_000)
    assert share_of_drafts(2000) > 0.9
    world.accept = 0.0
    share_of_drafts(2000)
    assert share_of_drafts(2000) < 0.1
    world.accept = 0.9
    share_of_drafts(20_000)
    assert share_of_drafts(2000) > 0.9, "γ = 0 must not be forever"


@pytest.mark.parametrize(
    ("world", "winner"),
    [
        (World(accept=0.3, draft_ms=5, lookup_match=0.9), "lookup"),
        (World(accept=0.9, lookup_match=0.1), "model"),
    ],
)
def test_auto_finds_the_better_drafter(world: World, winner: str) -> None:
    num_tokens = 10_000
    best = num_tokens * best_fixed(world, (MODEL, LOOKUP))
    policy = AdaptiveGamma(PairEstimates(), CAP)
    assert world.play(policy, num_tokens, random.Random(3), (MODEL, LOOKUP)) <= 1.04 * best
    tally = [policy.choose(CAP, 64, (MODEL, LOOKUP))]
    for _ in range(50):
        policy.observe(world.round(tally[-1], random.Random(len(tally))))
        tally.append(policy.choose(CAP, 64, (MODEL, LOOKUP)))
    assert sum(choice.drafter == winner for choice in tally) > 40


@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_survival_is_unbiased_where_accepted_over_proposed_is_not(gamma: int) -> None:
    chances = [0.9, 0.8, 0.6, 0.6, 0.5, 0.5, 0.4, 0.4]
    rng, survival = random.Random(6), Acceptance(decay=1.0)
    accepted = proposed = 0
    for _ in range(20_000):
        count = 0
        while count < gamma and rng.random() < chances[count]:
            count += 1
        survival.observe([1.0] * count + [0.0] * (count < gamma), count)
        accepted, proposed = accepted + count, proposed + gamma
    reached = 1.0
    for estimate, chance in zip(survival.hazards()[:gamma], chances, strict=False):
        assert abs(estimate - chance) < 5 * (chance * (1 - chance) / (20_000 * reached)) ** 0.5 + 1e-3
        reached *= chance
    if gamma > 1:
        mean = sum(chances[:gamma]) / gamma
        assert accepted / proposed < mean - 0.05, "the naive rate counts drafts that nobody judged"


def test_one_slow_call_moves_no_cost() -> None:
    cost = LineCost(VERIFY_SLOPE)
    for _ in range(20):
        cost.observe(4, 10.0)
    cost.observe(4, 5000.0)
    assert cost.ms(4) == 10.0


def test_verify_cost_follows_the_rows() -> None:
    cost = LineCost(VERIFY_SLOPE)
    for gamma in (0, 4):
        for _ in range(5):
            cost.observe(gamma, 10.0 + gamma)
    assert cost.ms(8) == pytest.approx(18.0)
    assert cost.ms(2) == pytest.approx(12.0)


def test_no_choice_exceeds_what_is_allowed() -> None:
    rng, world = random.Random(8), World(accept=0.95, lookup_match=0.5)
    for policy in (FixedGamma(5), FixedGamma(0), AdaptiveGamma(PairEstimates(), 6)):
        for _ in range(300):
            max_drafts, credit = rng.randrange(0, 9), rng.randrange(1, 20)
            drafters = rng.choice([(), (MODEL,), (MODEL, LOOKUP)])
            choice = policy.choose(max_drafts, credit, drafters)
            assert choice.num_draft_tokens <= min(max_drafts, 6)
            assert choice.num_draft_tokens == 0 or choice.candidate in drafters
            assert choice.num_draft_tokens > 0 or 1 <= choice.credit_tokens <= credit
            policy.observe(world.round(choice, rng))

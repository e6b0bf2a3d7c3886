"""Short answers: what a stream does before it has seen anything, on modelled costs."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from test_coordinator_gamma import CAP, MODEL, World, best_fixed

from coordinator.gamma.adaptive import AdaptiveGamma
from coordinator.gamma.policy import Candidate, RoundReport
from coordinator.gamma.shared import PairEstimates, SharedEstimates
from coordinator.gamma.told import tell
from outrider.lm.timing import PassTiming
from outrider.serving.worker_calls import DRAFT, WorkerDescription

HEAD = Candidate("head", on_target=True)
WORLDS = [World(accept=0.8), World(accept=0.9, draft_ms=0.5), World(accept=0.6, draft_ms=2.0), World(accept=0.3)]


def answer(world: World, num_tokens: int, shared: PairEstimates, seed: int) -> tuple[float, list[str]]:
    """(ms of one stream of so many tokens, reasons of its rounds)."""
    policy, rng = AdaptiveGamma(shared, CAP), random.Random(seed)
    done, clock, reasons = 0, 0.0, []
    while done < num_tokens:
        left = num_tokens - done
        choice = policy.choose(min(CAP, left - 1), left, (MODEL,))
        report = world.round(choice, rng)
        policy.observe(report)
        done, clock = done + report.num_committed, clock + report.round_ms
        reasons.append(choice.reason)
    return clock, reasons


def mean_ms(world: World, num_tokens: int, shared: list[PairEstimates]) -> float:
    return sum(answer(world, num_tokens, one, seed)[0] for seed, one in enumerate(shared)) / len(shared)


@pytest.mark.parametrize("world", WORLDS)
def test_short_answers_are_near_the_best_fixed_number_at_once(world: World) -> None:
    num_tokens = 48
    best = num_tokens * best_fixed(world, (MODEL,))
    known = PairEstimates()
    for seed in range(3):
        answer(world, 128, known, 100 + seed)
    assert mean_ms(world, num_tokens, [known] * 30) <= 1.1 * best, "a tenant that was here before"
    fresh = []
    for _ in range(30):
        shared = SharedEstimates()
        answer(world, 128, shared.of("m", "other", greedy=True), 7)
        fresh.append(shared.of("m", "new", greedy=True))
    assert mean_ms(world, num_tokens, fresh) <= 1.15 * best, "a new tenant of a model whose costs are known"
    assert mean_ms(world, num_tokens, [PairEstimates() for _ in range(30)]) <= 1.3 * best, "the very first stream"


def test_the_first_round_after_the_prefill_drafts_with_the_prior() -> None:
    first = AdaptiveGamma(PairEstimates(), CAP).choose(CAP, 64, (MODEL,))
    assert (first.drafter, first.reason) == ("model", "warm-up")
    assert first.num_draft_tokens >= 3, "no climb from 1"
    told = PairEstimates()
    told.costs.verify.tell(10.0, 0.1)
    told.costs.draft(MODEL).work.tell(0.0, 0.5)
    first = AdaptiveGamma(told, CAP).choose(CAP, 64, (MODEL,))
    assert (first.drafter, first.reason) == ("model", "prior")
    told.costs.draft(MODEL).work.tell(0.0, 30.0)
    assert AdaptiveGamma(told, CAP).choose(CAP, 64, (MODEL,)).num_draft_tokens == 0, "what is told can rule it out"


def test_a_drafter_without_data_is_tried_now_and_then() -> None:
    """A head that is told to be poor and dear, and is neither: it is found out, and wins."""
    shared, rng, world = PairEstimates(), random.Random(2), World(accept=0.5, draft_ms=2.0)
    shared.costs.draft(HEAD).work.tell(12.0, 8.0)
    shared.expect(HEAD, (0.3,))
    policy, used = AdaptiveGamma(shared, CAP), {"model": 0, "head": 0, "": 0}
    for _ in range(3000):
        choice = policy.choose(CAP, 32, (MODEL, HEAD))
        used[choice.drafter] += 1
        if choice.candidate is not HEAD and choice.candidate != HEAD:
            policy.observe(world.round(choice, rng))
            continue
        left, is_first = choice.credit_tokens, True
        while left > 1:
            num_drafts = min(choice.num_draft_tokens, left - 1)
            num_accepted = 0
            while num_accepted < num_drafts and rng.random() < 0.9:
                num_accepted += 1
            rtt = 0.5 if is_first else 0.0
            policy.observe(
                RoundReport(
                    choice=choice, num_draft_tokens=num_drafts, num_accepted=num_accepted,
                    num_committed=num_accepted + 1, draft_ms=0.3 * num_drafts, verify_ms=10 + 0.2 * num_drafts,
                    verify_network_ms=rtt, round_ms=10 + 0.5 * num_drafts + rtt,
                )
            )  # fmt: skip
            left, is_first = left - num_accepted - 1, False
    assert used["head"] > 4 * used["model"], used
    assert policy.choose(CAP, 32, (MODEL, HEAD)).candidate == HEAD


def test_what_was_slow_once_is_tried_again_though_every_stream_is_short() -> None:
    """The first calls of a draft worker took long, later ones do not; streams end before a probe of their own."""
    shared, rng, slow, fast = PairEstimates(), random.Random(2), World(accept=0.9, draft_ms=40.0), World(accept=0.9)
    policy = AdaptiveGamma(shared, CAP)
    for _ in range(4):
        policy.observe(slow.round(policy.choose(CAP, 4, (MODEL,)), rng))
    assert "model" not in answer_drafters(slow, shared)
    num_streams = next((n for n in range(400) if "model" in answer_drafters(fast, shared)), 400)
    assert 0 < num_streams < 400, "tried again, and not by each stream"


def test_a_stream_that_begins_tries_what_is_due_while_its_drafter_is_level_with_it() -> None:
    """Some tokens on it would have to compute them first, and where that is dear nobody would ever try."""
    shared, rng, world = PairEstimates(), random.Random(2), World(accept=0.0, catch_up_ms=8)
    for _ in range(20):
        world.num_behind = 0
        answer_drafters(world, shared)
    due = []
    for _ in range(200):
        world.num_behind = 0
        first = AdaptiveGamma(shared, CAP)
        choice = first.choose(CAP, 64, (MODEL,))
        first.observe(world.round(choice, rng))
        due.append(choice.reason == "probe")
    assert 0 < sum(due) < 120, "and not each of them"


def answer_drafters(world: World, shared: PairEstimates) -> set[str]:
    """Who drafted for one short stream."""
    policy, rng, done, drafters = AdaptiveGamma(shared, CAP), random.Random(4), 0, set()
    while done < 64:
        choice = policy.choose(min(CAP, 63 - done), 64 - done, (MODEL,))
        report = world.round(choice, rng)
        policy.observe(report)
        done += report.num_committed
        drafters.add(choice.drafter)
    return drafters


def test_tenants_share_costs_and_nothing_else() -> None:
    shared = SharedEstimates()
    one, two = shared.of("m", "one", greedy=True), shared.of("m", "two", greedy=True)
    assert one.costs is two.costs
    assert one.prior(MODEL) is not two.prior(MODEL)
    assert shared.of("m", "one", greedy=True) is one
    assert shared.of("m", "one", greedy=False).prior(MODEL) is not one.prior(MODEL)
    other = Candidate("model", "other weights")
    assert one.prior(other) is not one.prior(MODEL), "another model behind the drafter is another pair"


def test_what_a_draft_worker_tells_of_its_passes_prices_drafts_and_coming_level() -> None:
    shared = PairEstimates()
    about: WorkerDescription = object.__new__(WorkerDescription)
    model = SimpleNamespace(model_fingerprint="")
    told = {"role": DRAFT, "timings": (line(), line(prefill=True)), "drafters": ("model",), "max_ahead_branches": 0}
    for name, value in {**told, "model": model}.items():
        object.__setattr__(about, name, value)
    tell(shared, about, num_context_tokens=10)
    assert shared.costs.draft_ms(MODEL, 3) == pytest.approx(3 * 11.0)
    assert shared.costs.catch_up_ms(MODEL, 32) == pytest.approx(32 * (10 + 64) / 64)


def line(*, prefill: bool = False) -> PassTiming:
    """10 ms, and 1 ms a row."""
    return PassTiming(
        prefill=prefill, min_sequences=1, max_sequences=1, base_ms=10.0, ms_per_row=1.0, ms_per_context_token=0.0,
        spread_ms=0.1, min_rows=1, max_rows=8, num_passes=100,
    )  # fmt: skip

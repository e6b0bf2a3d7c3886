"""The simulator against arithmetic: passes, queues, turns, texts, and the policies that it drives."""

import dataclasses
import random

import pytest
from conftest import scaled

from coordinator.gamma.adaptive import AdaptiveGamma
from coordinator.gamma.fixed import FixedGamma
from coordinator.gamma.policy import HIT, LATE, MISS, Candidate, RoundReport
from coordinator.gamma.shared import PairEstimates
from coordinator.simulator.clairvoyant import Clairvoyant, unloaded_ms
from coordinator.simulator.engine import Clock, Device, Engine, Line, Work
from coordinator.simulator.simulation import CREDIT_TOKENS, Outcome, Simulation
from coordinator.simulator.texts import LENGTH, TAIL, Text, constant, drifting, two_regimes
from coordinator.simulator.world import World

STEADY = World(jitter=0.0)


def engine(clock: Clock, device: Device, cost: Line, max_rows: int = 64) -> Engine:
    return Engine(clock, device, lambda: cost, random.Random(0), jitter=0.0, max_rows=max_rows)


def run(clock: Clock) -> None:
    while clock.num_waiting:
        clock.step()


def test_work_joins_between_passes_and_waits_when_a_pass_is_full() -> None:
    clock, ended = Clock(), {}
    one = engine(clock, Device(), Line(10.0, 1.0), max_rows=6)

    def work(name: str, num_rows: int, num_passes: int = 1) -> Work:
        return Work(num_rows, num_passes, 0, lambda done: ended.update({name: (clock.now, done)}))

    one.submit(work("first", 1, num_passes=3))
    one.submit(work("second", 4))
    one.submit(work("third", 2))
    run(clock)
    # passes: first alone (11), first and second (15), first and third (13)
    assert {name: at for name, (at, _) in ended.items()} == {"first": 39.0, "second": 26.0, "third": 39.0}
    assert {name: done.queue_ms for name, (_, done) in ended.items()} == {"first": 0.0, "second": 11.0, "third": 26.0}
    assert ended["first"][1].num_batch_rows == pytest.approx((1 + 5 + 3) / 3)
    assert ended["second"][1].num_batch_rows == 5
    assert one.busy_ms == 39.0


def test_a_pass_under_way_has_taken_what_has_gone_by() -> None:
    clock, told = Clock(), []
    one = engine(clock, Device(), Line(10.0))
    one.submit(Work(1, 2, 0, lambda _: None))
    clock.after(14.0, lambda _: told.append(one.busy_ms))
    run(clock)
    assert (told, one.busy_ms) == ([14.0], 20.0)


def test_context_costs_and_grows_with_a_run() -> None:
    clock, ended = Clock(), []
    one = engine(clock, Device(), Line(0.0, 0.0, 1.0))
    one.submit(Work(1, 3, 10, lambda _: ended.append(clock.now)))
    run(clock)
    assert ended == [11 + 12 + 13]


def test_engines_of_one_device_take_turns() -> None:
    clock, device, ended = Clock(), Device(), []
    slow, quick = engine(clock, device, Line(10.0)), engine(clock, device, Line(1.0))
    slow.submit(Work(1, 3, 0, lambda _: ended.append(("slow", clock.now))))
    quick.submit(Work(1, 2, 0, lambda _: ended.append(("quick", clock.now))))
    run(clock)
    assert ended == [("quick", 22.0), ("slow", 32.0)]


@pytest.mark.parametrize("gamma", [0, 1, 4, 9])
@pytest.mark.parametrize("chance", [0.3, 0.8])
def test_one_stream_is_as_fast_as_the_formula_says(gamma: int, chance: float) -> None:
    """E[tokens] / E[ms], with E[tokens] = 1 + a + a^2 + ... (Leviathan et al. 2023)."""
    outcome = Simulation(STEADY, [Text(constant(chance))], lambda *_: FixedGamma(gamma)).run(20_000)
    per_round = sum(chance**i for i in range(gamma + 1))
    ms = unloaded_ms(STEADY, gamma)
    if not gamma:
        ms += (STEADY.target_rtt_ms + STEADY.overhead_ms) / CREDIT_TOKENS
    assert outcome.tokens_per_s == pytest.approx(1000 * per_round / ms, rel=0.02)
    assert outcome.target_load == pytest.approx(STEADY.target(gamma + 1, 0, 1) / ms, rel=0.02)


NUM_BRANCHES = 8
AHEAD = (Candidate("model", max_branches=NUM_BRANCHES),)


def ahead_of(world: World, gamma: int, chance: float, reports: list[RoundReport] | None = None) -> Outcome:
    simulation = Simulation(
        world,
        [Text(constant(chance))],
        lambda *_: FixedGamma(gamma, drafts_ahead=True),
        candidates=AHEAD,
        on_round=None if reports is None else reports.append,
    )
    return simulation.run(10_000)


@pytest.mark.parametrize("gamma", [1, 4])
def test_with_a_branch_for_every_outcome_a_round_is_the_targets_alone(gamma: int) -> None:
    reports: list[RoundReport] = []
    world = dataclasses.replace(STEADY, branch_survival=1.0, draft_rtt_ms=2.0)
    outcome = ahead_of(world, gamma, 0.8, reports)
    ms = world.target(gamma + 1, 0, 1) + world.target_rtt_ms + world.overhead_ms
    assert outcome.tokens_per_s == pytest.approx(1000 * sum(0.8**i for i in range(gamma + 1)) / ms, rel=0.02)
    assert {report.ahead for report in reports[1:]} == {HIT}
    assert {report.draft_ms for report in reports[1:]} == {0.0}
    assert reports[-1].branch_build_ms == pytest.approx((1 + gamma) * world.draft(NUM_BRANCHES, 0, 1))


@pytest.mark.parametrize("gamma", [1, 4])
def test_what_is_drafted_ahead_in_vain_delays_a_round_by_a_pass_at_most(gamma: int) -> None:
    reports: list[RoundReport] = []
    world = dataclasses.replace(STEADY, branch_survival=1e-9, draft_rtt_ms=2.0)
    outcome = ahead_of(world, gamma, 0.8, reports)
    assert {report.ahead for report in reports[1:]} == {MISS}
    tokens, ms = sum(0.8**i for i in range(gamma + 1)), unloaded_ms(world, gamma)
    longest = world.draft(NUM_BRANCHES, 0, 1)
    assert 1000 * tokens / (ms + longest) * 0.98 <= outcome.tokens_per_s <= 1000 * tokens / ms * 1.02


def test_a_branch_that_is_not_there_is_waited_for_and_grown_alone() -> None:
    reports: list[RoundReport] = []
    world = dataclasses.replace(STEADY, branch_survival=1.0, draft_rtt_ms=10.0)
    ahead_of(world, 10, 0.8, reports)
    late = [report for report in reports if report.ahead == LATE]
    assert len(late) > 0.9 * len(reports)
    alone, together = world.draft(1, 0, 1), world.draft(NUM_BRANCHES, 0, 1)
    for report in late:
        assert report.round_ms == pytest.approx(
            report.branch_wait_ms + report.verify_ms + report.verify_network_ms + world.overhead_ms
        )
    # the first build began before its round was verified
    assert all(11 * alone < report.branch_build_ms < 11 * together - 0.1 for report in late[1:])


@pytest.mark.parametrize("at", [4.0, 14.0, 25.0])
def test_dropped_work_leaves_with_the_pass_under_way_and_nobody_else_does(at: float) -> None:
    clock, ended = Clock(), {}
    one = engine(clock, Device(), Line(10.0, 0.0, 1.0))

    def work(name: str, num_passes: int) -> Work:
        return Work(1, num_passes, 0, lambda _: ended.update({name: clock.now}))

    dropped = work("dropped", 4)
    one.submit(dropped)
    one.submit(work("kept", 3))
    clock.after(at, lambda _: ended.update(left=one.drop(dropped)))
    run(clock)
    # cached tokens of each: 1, 2, 3 and 4 in the passes that it is in; "kept" joins at the second one
    begins = [0.0, 11.0] + ([22.0] if at < 11 else [24.0])
    num_passes = sum(begin <= at for begin in begins)
    assert ended["left"] == 4 - num_passes
    assert "dropped" not in ended
    alone = [11, 12, 13]
    assert ended["kept"] == 11 + sum(alone) + sum(range(2, num_passes + 1))
    assert one.num_held == 0
    waiting = work("never", 2)
    one.submit(work("first", 1))
    one.submit(waiting)
    assert one.drop(waiting) == 2
    run(clock)
    assert (one.num_held, "never" in ended) == (0, False)


def test_reports_add_up_to_their_rounds() -> None:
    reports: list[RoundReport] = []
    world, shared = World(num_targets=2, draft_rtt_ms=5.0), PairEstimates()
    simulation = Simulation(
        world,
        [Text(constant(0.8))],
        lambda *_: AdaptiveGamma(shared, 8),
        num_streams=6,
        stream_tokens=100,
        on_round=reports.append,
    )
    outcome = simulation.run(3000)
    assert sum(report.num_committed for report in reports) == simulation.num_tokens
    assert {report.target for report in reports} == {"target-0", "target-1"}
    assert sum(report.ended for report in reports) >= 25
    for report in reports:
        parts = report.draft_ms + report.draft_network_ms + report.verify_ms + report.verify_network_ms
        assert report.round_ms == pytest.approx(parts + world.overhead_ms)
        assert report.num_accepted <= report.num_draft_tokens <= report.choice.num_draft_tokens
        assert report.num_batch_rows >= 1 + report.num_draft_tokens
        assert report.verify_queue_ms <= report.verify_ms
    assert sum(outcome.rounds.values()) == len(reports)
    assert 0 < outcome.draft_load < 1
    assert 0 < outcome.target_load <= 1


def test_the_same_seed_is_the_same_simulation() -> None:
    def play(seed: int) -> float:
        text = Text(two_regimes(), seed=3)
        shared = PairEstimates()
        return Simulation(World(), [text], lambda *_: AdaptiveGamma(shared, 8), num_streams=3, seed=seed).run(900).ms

    assert play(1) == play(1) != play(2)


@pytest.mark.parametrize("tells_chances", [True, False])
def test_verdicts_follow_the_text(tells_chances: bool) -> None:
    text = Text(constant(0.7), seed=1, tells_chances=tells_chances)
    counts = [text.verify(place, 8) for place in range(0, LENGTH, 8)]
    mean = sum(accepted for accepted, _ in counts) / len(counts)
    assert mean == pytest.approx(sum(0.7**i for i in range(1, 9)), rel=0.05)
    if tells_chances:
        assert {told for _, soft in counts for told in soft} == {round(255 * 0.7)}
    for accepted, soft in counts:
        assert len(soft) == 8
        if not tells_chances:
            assert accepted == ([*soft, 0].index(0))
    assert len(text.verify(LENGTH - 1, TAIL)[1]) == TAIL, "a text begins anew"


def test_drafts_fare_worse_further_on_where_it_is_said() -> None:
    text = Text(constant(0.9), by_depth=(1.0, 0.5), seed=2)
    told = [text.verify(place, 3)[1] for place in range(100)]
    assert set(told) == {bytes(round(255 * c) for c in (0.9, 0.45, 0.45))}
    assert text.chance(5, 0) == 0.9
    assert text.chance(5, 7) == 0.45


def test_spread_keeps_the_level() -> None:
    text = Text(constant(0.7), spread=0.5)
    assert sum(text.chances) / len(text.chances) == pytest.approx(0.7, abs=0.02)
    assert min(text.chances) < 0.2
    assert max(text.chances) > 0.95


def test_who_knows_the_text_beats_every_fixed_number() -> None:
    num_tokens, world = 3000, World(draft_rtt_ms=20.0, jitter=0.0)
    for levels in (two_regimes(), drifting(period_tokens=512)):
        text = Text(levels, seed=4)

        def knowing(text: Text, place: int) -> Clairvoyant:
            return Clairvoyant(text, place, num_tokens + CREDIT_TOKENS, lambda gamma: unloaded_ms(world, gamma), 12)

        best = Simulation(world, [text], knowing).run(num_tokens)
        assert best.rounds[0] != sum(best.rounds.values()), "nothing was drafted"
        fixed = [Simulation(world, [text], lambda *_, g=g: FixedGamma(g)).run(num_tokens) for g in range(13)]
        assert best.tokens_per_s > 1.03 * max(outcome.tokens_per_s for outcome in fixed)


def test_a_drafter_on_the_targets_own_device_costs_no_network_but_takes_its_time() -> None:
    text = Text(constant(0.8))

    def rate(world: World, num_streams: int) -> float:
        return (
            Simulation(world, [text], lambda *_: FixedGamma(4), num_streams=num_streams)
            .run(800 * num_streams)
            .tokens_per_s
        )

    far, beside = World(draft_rtt_ms=10.0), World(draft_rtt_ms=10.0, colocated=True)
    assert rate(beside, 1) > rate(far, 1), "one stream is spared the network"
    assert rate(beside, 32) < rate(far, 32), "many streams want the target's time"


def test_a_hundred_thousand_streams() -> None:
    num_streams = scaled(100_000, at_least=10_000)
    world = World(num_targets=num_streams // 50, num_drafts=num_streams // 100)
    simulation = Simulation(world, [Text(constant(0.7))], lambda *_: FixedGamma(3), num_streams=num_streams)
    outcome = simulation.run(3 * num_streams)
    assert outcome.rounds[3] > num_streams
    assert outcome.num_tokens / num_streams == pytest.approx(3, rel=0.1)

"""Rows are priced by what they take from others: known loads, and the coordinator's policies on a simulated target."""

import random
from collections.abc import Callable

import pytest

from coordinator.gamma.adaptive import AdaptiveGamma
from coordinator.gamma.costs import RoundCosts
from coordinator.gamma.fixed import FixedGamma
from coordinator.gamma.policy import Candidate, Choice, GammaPolicy, RoundReport
from coordinator.gamma.price import Load
from coordinator.gamma.shared import PairEstimates
from coordinator.simulator.engine import Line
from coordinator.simulator.simulation import Simulation
from coordinator.simulator.texts import Text, constant
from coordinator.simulator.world import World

CAP = 8
MODEL = Candidate("model")
SATURATING = World(target=Line(10.0, 0.2), draft=Line(1.5, 0.05), num_drafts=8)
"""64 rows cost as much again as a pass itself."""
CPU = World(target=Line(20.0, 3.0), draft=Line(2.0, 0.3), num_drafts=4)
"""Rows are dear at once."""


def simulate(world: World, num_streams: int, chance: float, policy: Callable[[], GammaPolicy]) -> Simulation:
    texts = [Text(constant(chance), seed=seed) for seed in range(4)]
    return Simulation(world, texts, lambda text, place: policy(), num_streams=num_streams, stream_tokens=256,
                      max_draft_tokens=CAP, seed=1)  # fmt: skip


def goodput(world: World, num_streams: int, chance: float, policy: Callable[[], GammaPolicy]) -> tuple[float, float]:
    """(tokens/s of all streams, mean γ), once it has settled."""
    simulation = simulate(world, num_streams, chance, policy)
    simulation.run(600 + 60 * num_streams)
    outcome = simulation.run(1500 + 40 * num_streams)
    return outcome.tokens_per_s, outcome.mean_gamma


def adaptive() -> Callable[[], GammaPolicy]:
    shared = PairEstimates()
    return lambda: AdaptiveGamma(shared, CAP)


@pytest.mark.parametrize("world", [SATURATING, CPU], ids=["saturating", "cpu"])
@pytest.mark.parametrize("chance", [0.4, 0.8])
@pytest.mark.parametrize("num_streams", [4, 64])
def test_the_goodput_of_a_target_is_not_less_than_plains_at_any_load(
    world: World, chance: float, num_streams: int
) -> None:
    plain, _ = goodput(world, num_streams, chance, lambda: FixedGamma(0))
    assert goodput(world, num_streams, chance, adaptive())[0] >= 0.97 * plain


def test_gamma_falls_to_zero_as_a_target_fills_and_streams_alone_have_the_full_gain() -> None:
    gammas = []
    for num_streams in (1, 8, 64):
        tokens_per_s, gamma = goodput(SATURATING, num_streams, 0.7, adaptive())
        gammas.append(gamma)
        if num_streams == 1:
            best = max(goodput(SATURATING, 1, 0.7, lambda g=g: FixedGamma(g))[0] for g in (2, 3, 4))  # type: ignore[misc]
            assert tokens_per_s > 0.97 * best
    assert min(gammas[:2]) > 2
    assert gammas[2] < 0.1


def test_streams_with_high_acceptance_keep_more_drafts_under_load() -> None:
    shared, drafts = PairEstimates(), {0.55: 0, 0.95: 0}
    texts = [Text(constant(chance), seed=seed) for seed, chance in enumerate(drafts)]
    owner: dict[int, float] = {}

    class Counted(AdaptiveGamma):
        def observe(self, report: RoundReport) -> None:
            drafts[owner[id(self)]] += report.num_draft_tokens
            super().observe(report)

    def new(text: Text, place: int) -> GammaPolicy:
        policy = Counted(shared, CAP)
        owner[id(policy)] = 0.55 if text is texts[0] else 0.95
        kept.append(policy)
        return policy

    kept: list[GammaPolicy] = []
    simulation = Simulation(CPU, texts, new, num_streams=12, max_draft_tokens=CAP, seed=1)
    simulation.run(3000)
    assert drafts[0.95] > 5 * drafts[0.55]


def loaded(
    num_streams: int, *, rows: int = 1, own_rows: int = 1, queue_ms: float = 0.0, was_asked: bool = False
) -> Load:
    load = Load()
    for _ in range(20):
        load.observe_passes(1, own_rows=own_rows, batch_rows=own_rows + rows * (num_streams - 1), pass_ms=20.0,
                            queue_ms=queue_ms, was_asked=was_asked)  # fmt: skip
        load.observe_tokens(1, 20.0)
    return load


def test_other_streams_are_counted_by_their_rows_and_by_the_wait() -> None:
    assert loaded(1).num_others == 0
    assert loaded(16).num_others == pytest.approx(15)
    assert loaded(16, rows=4, own_rows=4).num_others == pytest.approx(15), "whatever their γ"
    assert loaded(16, queue_ms=10.0, was_asked=True).num_others == pytest.approx(31), (
        "all that wait for the next pass are there when this one ends, however long they have waited"
    )
    assert loaded(16, queue_ms=0.1, was_asked=True).num_others == pytest.approx(15), "no wait"
    assert loaded(16).taken_per_ms(0.0) == pytest.approx(15 * 1 / 20)
    assert loaded(1).taken_per_ms(0.0) == 0, "alone nothing is taken"
    assert loaded(64).taken_per_ms(20.0) == pytest.approx(0.9 / 20), "a plain row is worth it whatever the estimates"


def test_a_crowded_pass_is_told_of_by_each_stream_in_it() -> None:
    """Passes of 7 streams and of 1 in turn, each of which waits for the other one: 7 others, not more."""
    load = Load()
    for _ in range(20):
        for num_streams in (7, 7, 7, 1, 7, 7, 7, 7):
            load.observe_passes(1, own_rows=3, batch_rows=3 * num_streams, pass_ms=20.0, queue_ms=10.0, was_asked=True)
            load.observe_tokens(1, 20.0)
    assert load.num_others == pytest.approx(7, rel=0.1)
    assert load.other_rows == pytest.approx(3 * 6 * 7 / 8, rel=0.1), "of a pass that one is in"


def report(gamma: int, verify_ms: float, *, rows: int, target: str = "t", queue_ms: float = 0.0) -> RoundReport:
    choice = Choice("model", gamma, "best", candidate=MODEL) if gamma else Choice("", 0, "best", 4)
    ms, num_committed = (1 if gamma else 4) * verify_ms + queue_ms, gamma + 1 if gamma else 4
    return RoundReport(choice=choice, num_draft_tokens=gamma, num_accepted=gamma, num_committed=num_committed,
                       draft_ms=gamma * 1.0, verify_ms=ms, round_ms=ms + gamma, verify_queue_ms=queue_ms,
                       target=target, num_batch_rows=rows)  # fmt: skip


def test_what_was_measured_under_one_load_holds_under_the_next() -> None:
    """A pass is known by its rows: γ = 0 was seen on an idle target, γ = 4 on a full one."""
    costs = RoundCosts()
    idle, full = costs.on("idle"), costs.on("full")
    for _ in range(8):
        idle.observe_plain(report(0, 10.2, rows=1, target="idle"))
        full.observe_round(report(4, 10.0 + 0.2 * 60, rows=60, target="full"), MODEL)
    assert full.verify_ms(0) == pytest.approx(10.0 + 0.2 * 56, rel=0.02), "plain there, though never seen there"
    assert full.verify_ms(4) - full.verify_ms(0) == pytest.approx(0.8, rel=0.05)
    assert idle.verify_ms(0) == pytest.approx(10.2)
    assert costs.on("idle").load is idle.load, "streams of one target share what they see of its load"
    assert full.load is not idle.load


def test_waits_are_no_part_of_a_pass_and_count_where_a_message_asks() -> None:
    costs = RoundCosts()
    for _ in range(8):
        costs.observe_plain(report(0, 10.0, rows=1, queue_ms=6.0))
        costs.observe_round(report(3, 10.0, rows=4, queue_ms=8.0), MODEL)
    assert costs.verify_ms(0) == pytest.approx(10.0)
    assert costs.local_round_ms(3) == pytest.approx(18.0)
    assert costs.plain_ms(1) == pytest.approx(16.0)
    assert costs.plain_ms(60) == pytest.approx(10.1), "a run waits once"


def test_drafts_are_counted_by_place_when_chains_end_by_themselves() -> None:
    cost, rng = RoundCosts().draft(MODEL), random.Random(2)
    for _ in range(400):
        cost.observe(6, 3 if rng.random() < 0.5 else 6, 5.0, 0.5, 0.25)
    assert cost.num_drafted(3) == pytest.approx(3.0)
    assert 3.8 < cost.num_drafted(6) < 5.2
    assert cost.num_drafted(8) > cost.num_drafted(6)
    assert (cost.network.value(), cost.queue.value()) == (0.5, 0.25)

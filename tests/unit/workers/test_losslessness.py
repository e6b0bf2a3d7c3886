"""The meter of losslessness: fair to an honest worker at any time, and awake to faults that each text hides well."""

import dataclasses
import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from conftest import scaled
from session_loops import RULES, HandDriver, Rounds, draft_session, target_session, toy

import target_worker.losslessness as losslessness
from outrider.drafting.proposal import Proposal
from outrider.sampling.history import History
from outrider.sampling.params import AcceptanceRule, SamplingParams, StoppingParams
from target_worker.losslessness import EValue, LosslessnessMeter, MeteredStream, statistics

TARGET, DRAFT = toy("vocab=16,seed=1"), toy("vocab=16,seed=1,agreement=0.7")
NUM_TOKENS = 40
ONE_IN_A_THOUSAND, ALARM = 3.0, 6.0


@pytest.mark.parametrize(
    "p", [[0.1, 0.2, 0.3, 0.4], [0.999, 0.001, 0.0, 0.0], [0.25] * 4, [1 - 3e-9, 1e-9, 1e-9, 1e-9]]
)
def test_statistics_have_mean_zero_and_stay_in_bounds(p: list[float]) -> None:
    found = [(p[y], statistics(np.array(p), y)) for y in range(4) if p[y]]
    for index in range(losslessness.NUM_STATISTICS):
        assert sum(chance * s[index] for chance, s in found) == pytest.approx(0.0, abs=1e-12)
        assert all(-1.0 <= s[index] <= 1.0 for _, s in found)


def test_the_e_value_of_an_honest_draw_is_one_in_the_mean_whatever_came_before() -> None:
    """Enumerated: three tokens, each from a law that depends on those before."""
    laws = np.random.default_rng(0).dirichlet(np.ones(3), size=(4, 4))
    total = 0.0
    for text in itertools.product(range(3), repeat=3):
        e_value, chance, before = EValue(losslessness.NUM_STATISTICS), 1.0, (3, 3)
        for y in text:
            p = laws[before]
            chance *= p[y]
            e_value.add(statistics(p, y))
            before = (before[1], y)
        total += chance * 10.0**e_value.log10
    assert total == pytest.approx(1.0)


def test_a_fault_that_begins_late_is_found_in_about_as_many_tokens_again() -> None:
    rng, p, e_value = np.random.default_rng(0), np.array([0.5, 0.3, 0.2]), EValue(losslessness.NUM_STATISTICS)
    for _ in range(2_000):
        e_value.add(statistics(p, rng.choice(3, p=p)))
    assert e_value.log10 < ONE_IN_A_THOUSAND
    for _ in range(2_000):
        e_value.add(statistics(p, rng.choice(3, p=[0.7, 0.2, 0.1])))
    assert e_value.log10 > ALARM


def test_what_cannot_be_is_proof() -> None:
    meter = LosslessnessMeter(1)
    stream = MeteredStream(meter, SamplingParams(temperature=0.0), StoppingParams(max_tokens=9))
    assert stream.begin_round("")
    stream.decided(np.array([[0.0, 1.0], [0.0, 1.0]], np.float32), (1, 0), History((1,)))
    assert meter.readings()["greedy", "none"] == losslessness.Reading(2, math.inf)


def honest(proposal: Proposal) -> Proposal:
    return proposal


def others_counts(proposal: Proposal) -> Proposal:
    """Drafts from one distribution that say they came from another: as greedy drafts under a sampled rule do."""
    return dataclasses.replace(proposal, q=(proposal.q[:1] * len(proposal))) if len(proposal) > 1 else proposal


def cut_by_content(proposal: Proposal) -> Proposal:
    """A drafter that looks at what it has sampled, and keeps to itself what it does not like."""
    kept = next((i for i, token_id in enumerate(proposal.token_ids) if token_id % 3 == 0), len(proposal))
    return proposal.kept(range(kept))


def metered(
    sampling: SamplingParams, mangle: Callable[[Proposal], Proposal], num_streams: int, drafter: str = "model"
) -> tuple[losslessness.Reading, int]:
    """What the meter reads after so many streams of seeds 0, 1, ..., looked at whole, and how many tokens they had."""
    meter, num_tokens, num_drafted = LosslessnessMeter(1), 0, 0
    for seed in range(num_streams):
        params = dataclasses.replace(sampling, seed=seed)
        stopping = StoppingParams(max_tokens=NUM_TOKENS)
        target = target_session(TARGET, params, stopping, meter=meter, has_fresh_seed=True)
        draft = draft_session(DRAFT, params, stopping)
        loop = Rounds(
            target, draft, HandDriver(TARGET.logits_for), HandDriver(DRAFT.logits_for), lambda _: 3, drafter, mangle
        )
        num_tokens += len(loop.run())
        num_drafted += loop.num_drafted
    assert num_drafted > 0, "INCONCLUSIVE"
    readings = meter.readings().values()
    evidence = max((reading.log10_e_value for reading in readings), default=-math.inf)
    return losslessness.Reading(sum(reading.num_tokens for reading in readings), evidence), num_tokens


@pytest.mark.parametrize("drafter", ["model", "tree"])
@pytest.mark.parametrize("rule", RULES)
def test_an_honest_worker_shows_nothing(rule: str, drafter: str) -> None:
    reading, num_tokens = metered(RULES[rule], honest, scaled(300), drafter)
    assert 0.9 * num_tokens < reading.num_tokens <= num_tokens, "a run begins with a round, and may end within one"
    assert reading.log10_e_value < ONE_IN_A_THOUSAND


@pytest.mark.parametrize("fault", [others_counts, cut_by_content])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_planted_bias_is_found(rule: str, fault: Callable[[Proposal], Proposal]) -> None:
    reading, _ = metered(RULES[rule], fault, 400)
    assert reading.log10_e_value > ALARM


def test_only_streams_with_seeds_of_their_own_are_looked_at_and_only_as_often_as_asked() -> None:
    def count(every_rounds: int, has_fresh_seed: bool) -> int:
        meter = LosslessnessMeter(every_rounds)
        for seed in range(20):
            params = SamplingParams(acceptance=AcceptanceRule.TOKEN, seed=seed)
            target = target_session(
                TARGET, params, StoppingParams(max_tokens=64), meter=meter, has_fresh_seed=has_fresh_seed
            )
            driver = HandDriver(TARGET.logits_for)
            Rounds(target, None, driver, driver, lambda _: 0).run()
        return sum(reading.num_tokens for reading in meter.readings().values())

    assert count(0, True) == count(1, False) == 0
    assert count(1, True) == 20 * 64
    assert 0 < count(48, True) <= 20 * 64 * losslessness.RUN_TOKENS / 48


def test_drafters_that_name_themselves_anew_every_time_share_one_reading_in_the_end() -> None:
    meter = LosslessnessMeter(1)
    for index in range(1_000):
        meter.e_value("token", f"d{index}")
    assert len(meter.readings()) <= losslessness.MAX_E_VALUES + 1


def test_it_may_be_read_while_the_engine_adds_to_it() -> None:
    """A bettor more begins at once with the doubling of what was seen: a reader in its midst sees all or none of it."""
    reading: list[float] = []

    class Growing(EValue):
        _kept: np.ndarray

        @property
        def _log_wealths(self) -> np.ndarray:
            seen, self._kept = self._kept, np.concatenate([self._kept, self._kept[-1:]])
            return seen

        @_log_wealths.setter
        def _log_wealths(self, value: np.ndarray) -> None:
            self._kept = np.concatenate([value, np.zeros((3, *value.shape[1:]))])

    reading.append(Growing(2).log10)
    assert np.isfinite(reading).all()

"""Across rounds: the joint law of the first tokens, whatever γ, and that noise keyed by position would be seen."""

import pytest
from conftest import scaled
from law import (
    FALSE_ALARM,
    PROMPT,
    RoundLoop,
    adaptive_gamma,
    chi_square,
    fixed_gamma,
    joint_law,
    table_pair,
)

from outrider.sampling import AcceptanceRule, Noise, SamplingParams, extend_hash
from target_worker import acceptance

NUM_SEEDS = 100_000
NUM_TOKENS = 4
GAMMAS = {
    "1": fixed_gamma(1),
    "2": fixed_gamma(2),
    "3": fixed_gamma(3),
    "4": fixed_gamma(4),
    "adaptive": adaptive_gamma,
}
RATIO_RULES = [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK]


def _p_value(loop: RoundLoop, num_seeds: int) -> float:
    law = joint_law(loop.target, loop.params, NUM_TOKENS)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-9)
    return chi_square(loop.counts(num_seeds, NUM_TOKENS), law)


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("rule", RATIO_RULES)
def test_joint_law(rule: AcceptanceRule, gamma: str) -> None:
    loop = RoundLoop(*table_pair(3, 3), SamplingParams(acceptance=rule), GAMMAS[gamma])
    assert _p_value(loop, scaled(NUM_SEEDS)) > FALSE_ALARM


@pytest.mark.parametrize("rule", RATIO_RULES)
@pytest.mark.parametrize(
    "variation",
    [
        pytest.param({"one_hot_every": 2}, id="sampled_and_one_hot_in_one_chain"),
        pytest.param({"max_entries": 2}, id="q_truncated_to_two_entries"),
    ],
)
def test_joint_law_of_odd_drafts(rule: AcceptanceRule, variation: dict[str, int]) -> None:
    loop = RoundLoop(
        *table_pair(5, 1, num_zeros=1), SamplingParams(acceptance=rule, temperature=0.8), adaptive_gamma, **variation
    )
    assert _p_value(loop, scaled(NUM_SEEDS // 2)) > FALSE_ALARM


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_joint_law_with_penalties_and_filters(rule: AcceptanceRule) -> None:
    params = SamplingParams(
        acceptance=rule,
        temperature=1.3,
        top_k=4,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.3,
        presence_penalty=0.2,
        frequency_penalty=0.5,
        logit_bias={0: 0.7},
    )
    assert _p_value(RoundLoop(*table_pair(5, 4), params, adaptive_gamma), scaled(NUM_SEEDS // 4)) > FALSE_ALARM


def test_coupled_joint_law_is_that_of_plain_and_its_text_the_same_for_every_gamma() -> None:
    """Text by text, which is more than a law: chi-square of the plain texts then holds for every γ."""
    target, draft = table_pair(3, 3)
    params = SamplingParams(acceptance=AcceptanceRule.COUPLED)
    plain = RoundLoop(target, draft, params, fixed_gamma(0))
    loops = {name: RoundLoop(target, draft, params, gamma) for name, gamma in GAMMAS.items()}
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(scaled(NUM_SEEDS)):
        text = plain.text(Noise(seed), NUM_TOKENS)
        counts[text] = counts.get(text, 0) + 1
        name = list(loops)[seed % len(loops)]
        assert loops[name].text(Noise(seed), NUM_TOKENS) == text, f"seed {seed}, γ {name}"
    assert chi_square(counts, joint_law(target, params, NUM_TOKENS)) > FALSE_ALARM
    for loop in loops.values():
        assert 0 < loop.num_accepted < loop.num_drafted


def test_greedy_text_is_the_same_for_every_gamma() -> None:
    params = SamplingParams(temperature=0.0)
    for seed in range(scaled(200)):
        target, draft = table_pair(4, seed)
        texts = {
            RoundLoop(target, draft, params, gamma).text(Noise(0), 12) for gamma in [fixed_gamma(0), *GAMMAS.values()]
        }
        assert len(texts) == 1


@pytest.mark.parametrize(
    ("rule", "gamma"),
    [(AcceptanceRule.BLOCK, "4"), (AcceptanceRule.BLOCK, "adaptive"), (AcceptanceRule.TOKEN, "adaptive")],
)
def test_noise_keyed_by_position_is_caught(monkeypatch: pytest.MonkeyPatch, rule: AcceptanceRule, gamma: str) -> None:
    """The same loop with a hash that only counts tokens: noise of a discarded draft is then used again, and seen."""

    def count(prefix_hash: int, token_id: int) -> int:
        return (prefix_hash + 1) % 2**64

    monkeypatch.setattr(acceptance, "extend_hash", count)
    loop = RoundLoop(*table_pair(3, 3), SamplingParams(acceptance=rule), GAMMAS[gamma], extend=count)
    assert _p_value(loop, 10_000) < FALSE_ALARM / 100


def test_other_choices_of_one_seed_are_other_texts() -> None:
    loop = RoundLoop(*table_pair(3, 3), SamplingParams(), fixed_gamma(2))
    texts = {loop.text(Noise(1, choice), 24) for choice in range(8)}
    assert len(texts) == 8


def test_a_text_is_a_function_of_its_seed() -> None:
    loop = RoundLoop(*table_pair(3, 3), SamplingParams(), adaptive_gamma)
    assert loop.extend is extend_hash
    assert loop.text(Noise(7), 24, prompt=PROMPT) == loop.text(Noise(7), 24, prompt=PROMPT)

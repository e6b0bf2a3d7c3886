"""`outrider verify` must be able to say each of its three verdicts: it is shown services that lie."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
from fake_generation import TOY, FakeGeneration, serving

from outrider.cli import proof
from outrider.cli.reference import Reference
from outrider.client import Client
from outrider.lm.toy import load_toy
from outrider.sampling.params import SamplingParams

# Enough for a large bias to show beyond doubt; an unbiased run of this seed passes.
PLAN = proof.Plan(num_samples=200, max_tokens=12, seed=11)


async def prove(service: FakeGeneration, plan: proof.Plan = PLAN) -> proof.Report:
    reference = Reference(load_toy(TOY), SamplingParams(temperature=plan.temperature))
    prompts = [np.random.default_rng(i).integers(0, 16, 5).tolist() for i in range(4)]
    async with serving(service) as address, Client(address) as client:
        info = await client.model_info()
        return await proof.prove(
            client, info, reference.distributions, greedy_prompts=prompts, sampling_prompts=prompts, plan=plan
        )


async def test_true_services_are_lossless() -> None:
    report = await prove(FakeGeneration())
    assert (report.verdict, report.reasons) == ("LOSSLESS", [])
    assert [law.name for law in report.laws] == ["TOKEN", "BLOCK", "COUPLED"]
    assert all(law.num_drafted > 0 and law.num_tokens == 3 * PLAN.num_samples for law in report.laws)
    assert report.as_json()["false_alarm_rate"] <= 1e-6


async def test_a_bias_is_broken_in_every_rule_and_both_tests() -> None:
    report = await prove(FakeGeneration(bias=0.35))
    assert report.verdict == "BROKEN"
    for rule in ("TOKEN", "BLOCK", "COUPLED"):
        assert [rule in reason for reason in report.reasons].count(True) == 2, report.reasons


async def test_a_different_greedy_text_is_broken() -> None:
    report = await prove(FakeGeneration(broken_greedy=True))
    assert report.verdict == "BROKEN"
    assert len(report.equalities[0].differences) == 4
    assert "output token 11" in report.equalities[0].differences[0]


async def test_a_different_coupled_text_is_broken() -> None:
    report = await prove(FakeGeneration(broken_coupled=True))
    assert report.verdict == "BROKEN"
    assert [row.name for row in report.equalities if row.differences] == ["COUPLED sampling, γ=3"]


async def test_without_drafts_nothing_is_proved() -> None:
    report = await prove(FakeGeneration(drafts=0))
    assert report.verdict == "INCONCLUSIVE"
    assert all(law.num_tokens == 0 for law in report.laws)
    assert len(report.reasons) == len(report.equalities) + len(report.laws)


async def test_too_few_tokens_prove_nothing() -> None:
    report = await prove(FakeGeneration(), replace(PLAN, num_samples=5))
    assert report.verdict == "INCONCLUSIVE"
    assert any("--samples" in reason for reason in report.reasons)


async def test_a_loss_outweighs_what_is_unclear() -> None:
    report = await prove(FakeGeneration(broken_greedy=True), replace(PLAN, num_samples=5))
    assert report.verdict == "BROKEN"


@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_reference_is_the_models_own_law_at_every_position(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    reference = Reference(load_toy(TOY), params)
    whole = reference.distributions([1, 2, 3], [4, 5, 6, 7])
    for length in range(1, 5):
        (*_, last) = reference.distributions([1, 2, 3], [4, 5, 6, 7][:length])
        np.testing.assert_array_equal(whole[length - 1], last)
    assert len({p.tobytes() for p in whole}) == 4, "the positions must differ, or the test proves nothing"


def test_reference_may_be_asked_from_several_threads() -> None:
    reference = Reference(load_toy(TOY), SamplingParams())
    expected = {i: reference.distributions([i, 2], [3, i]) for i in range(8)}
    wrong = []

    def ask(i: int) -> None:
        for _ in range(20):
            if any((a != b).any() for a, b in zip(reference.distributions([i, 2], [3, i]), expected[i], strict=True)):
                wrong.append(i)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

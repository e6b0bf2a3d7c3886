"""Sampled text with drafts from states sent to a draft worker: the joint law of the first tokens is the target's."""

import asyncio
from collections import Counter

import pytest
from conftest import scaled
from law import FALSE_ALARM, chi_square
from stack import in_process_stack
from test_drafter_laws import BUSY, NUM_TOKENS, PROMPT, TARGET, joint_law

import outrider
from outrider.sampling.params import SamplingParams

WORKERS = {
    "draft_worker": {"head": "toy:agreement=0.6", "target": TARGET},
    "target_worker": {"features": ("2", "-1")},
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["token", "block"])
async def test_the_joint_law_is_the_targets(rule: str) -> None:
    async with in_process_stack(TARGET, "", **WORKERS) as stack, outrider.Client(stack.address) as client:
        assert {*(await client.model_info()).drafters} == {"toy-head", "lookup", "suffix"}

        async def one(seed: int):
            adaptive = seed % 3 == 0
            gamma = {"drafter": "auto"} if adaptive else {"drafter": "toy-head", "num_speculative_tokens": 1 + seed % 4}
            return await client.complete(PROMPT, seed=seed, max_tokens=6, acceptance=rule, **gamma, **BUSY)

        answers = []
        for start in range(0, scaled(2_000, at_least=200), 50):
            answers += await asyncio.gather(*(one(seed) for seed in range(start, start + 50)))
    uses = [use for answer in answers for use in answer.speculation.drafter_uses if use.drafter == "toy-head"]
    drafted = sum(use.num_draft_tokens for use in uses)
    assert 0 < sum(use.num_accepted_draft_tokens for use in uses) < drafted, "INCONCLUSIVE"
    counts = Counter(tuple(answer.token_ids[:NUM_TOKENS]) for answer in answers)
    assert chi_square(counts, joint_law(SamplingParams(**BUSY))) > FALSE_ALARM

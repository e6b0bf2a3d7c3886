"""Sampled text through the services, drafter by drafter: the joint law of the first tokens is the target's."""

import asyncio
from collections import Counter

import pytest
from conftest import scaled
from law import FALSE_ALARM, chi_square
from stack import in_process_stack

import outrider
from outrider.lm.toy import ToyModel, parse_toy
from outrider.sampling.distribution import distribution
from outrider.sampling.history import History
from outrider.sampling.params import SamplingParams, StoppingParams

VOCAB, NUM_TOKENS = 5, 3
TARGET, DRAFT = f"toy:vocab={VOCAB},seed=7", f"toy:vocab={VOCAB},seed=7,agreement=0.6"
PROMPT = [1, 2, 4, 1, 2, 3, 0, 1, 2]
"""It repeats itself, so that there is something to look up."""
WORKERS = {
    "draft_worker": {"drafters": ("model", "tree")},
    "target_worker": {"heads": ("toy:agreement=0.6", "skip:1")},
}
DRAFTERS = ["model", "tree", "toy", "toy-tree", "skip", "lookup", "suffix", "auto"]
BUSY = {"temperature": 1.0, "frequency_penalty": 0.3, "logit_bias": {0: 0.5}}


def joint_law(params: SamplingParams) -> dict[tuple[int, ...], float]:
    model = ToyModel(parse_toy(TARGET))
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NUM_TOKENS):
        longer = {}
        for text, probability in law.items():
            row = model.logits_for([*PROMPT, *text])
            p = distribution(row, params, StoppingParams(9), History(PROMPT, text))
            longer.update({(*text, x): probability * float(p[x]) for x in range(VOCAB)})
        law = longer
    return law


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_the_joint_law_is_the_targets(drafter: str, rule: str) -> None:
    # A stream drafts by skipping once its second sequence is there: passes of no time at all are over by then.
    target = f"{TARGET},pass_ms=10" if drafter == "skip" else TARGET
    async with in_process_stack(target, DRAFT, **WORKERS) as stack, outrider.Client(stack.address) as client:
        offered = (await client.model_info()).drafters
        assert {*DRAFTERS} == {*offered, "auto"}, "a drafter that is not tested here"

        async def one(seed: int):
            gamma = {} if drafter == "auto" and seed % 2 else {"num_speculative_tokens": 1 + seed % 4}
            return await client.complete(
                PROMPT, seed=seed, max_tokens=6, acceptance=rule, drafter=drafter, **gamma, **BUSY
            )

        answers = []
        for start in range(0, scaled(2_000, at_least=200), 50):
            answers += await asyncio.gather(*(one(seed) for seed in range(start, start + 50)))
    drafted = sum(a.speculation.num_draft_tokens for a in answers)
    assert 0 < sum(a.speculation.num_accepted_draft_tokens for a in answers) < drafted, "INCONCLUSIVE"
    counts = Counter(tuple(a.token_ids[:NUM_TOKENS]) for a in answers)
    assert chi_square(counts, joint_law(SamplingParams(**BUSY))) > FALSE_ALARM

"""Trees of drafts through the real services: plain text under greedy and COUPLED, the law under TOKEN and BLOCK."""

import asyncio
from collections import Counter

import pytest
from conftest import scaled
from law import FALSE_ALARM, chi_square
from stack import in_process_stack
from waiting import wait_for_drafts

import outrider
from outrider.lm.toy import ToyModel, parse_toy
from outrider.sampling.distribution import distribution
from outrider.sampling.history import History
from outrider.sampling.params import SamplingParams, StoppingParams

TARGET, DRAFT = "toy:vocab=6,seed=3", "toy:vocab=6,seed=3,agreement=0.7"
PROMPT = [1, 2, 5]
TREES = {"drafters": ("tree", "model"), "tree_width": 3}


def joint_law(num_tokens: int) -> dict[tuple[int, ...], float]:
    model, params = ToyModel(parse_toy(TARGET)), SamplingParams()
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        longer = {}
        for text, probability in law.items():
            p = distribution(model.logits_for([*PROMPT, *text]), params, StoppingParams(9), History(PROMPT, text))
            longer.update({(*text, x): probability * float(p[x]) for x in range(6)})
        law = longer
    return law


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"acceptance": "coupled", "frequency_penalty": 0.4}], ids=["greedy", "coupled"]
)
async def test_text_is_plain_text(options, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_drafts(monkeypatch)  # a late proposal counts as dropped
    work = [([seed % 6, 3, 1], {"seed": seed, "max_tokens": 50, **options}) for seed in range(scaled(60, at_least=8))]
    async with in_process_stack(TARGET, DRAFT, draft_worker=TREES) as stack, outrider.Client(stack.address) as client:
        plain = [await client.complete(p, num_speculative_tokens=0, **o) for p, o in work]
        trees = await asyncio.gather(
            *(
                client.complete(p, num_speculative_tokens=1 + i % 9, drafter="tree", **o)
                for i, (p, o) in enumerate(work)
            )
        )
        free = await asyncio.gather(*(client.complete(p, **o) for p, o in work))
    for answers in (trees, free):
        assert [a.token_ids for a in answers] == [a.token_ids for a in plain]
    drafted = sum(a.speculation.num_draft_tokens for a in trees)
    assert 0 < sum(a.speculation.num_accepted_draft_tokens for a in trees) < drafted, "INCONCLUSIVE"
    assert sum(a.speculation.num_dropped_proposals for a in trees) == 0


@pytest.mark.parametrize("rule", ["token", "block"])
async def test_the_law_is_the_targets(rule: str) -> None:
    async with in_process_stack(TARGET, DRAFT, draft_worker=TREES) as stack, outrider.Client(stack.address) as client:

        async def one(seed: int):
            return await client.complete(
                PROMPT, seed=seed, max_tokens=6, acceptance=rule, drafter="tree", num_speculative_tokens=3 + seed % 4
            )

        answers = []
        for start in range(0, scaled(6_000), 50):
            answers += await asyncio.gather(*(one(seed) for seed in range(start, start + 50)))
    drafted = sum(a.speculation.num_draft_tokens for a in answers)
    assert 0 < sum(a.speculation.num_accepted_draft_tokens for a in answers) < drafted, "INCONCLUSIVE"
    counts = Counter(tuple(a.token_ids[:3]) for a in answers)
    assert chi_square(counts, joint_law(3)) > FALSE_ALARM

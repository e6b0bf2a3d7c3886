"""Drafting ahead through the services: the same text, told by its statistics, and the law of what is sampled."""

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

TARGET, DRAFT = "toy:vocab=16,seed=1,pass_ms=4", "toy:vocab=16,seed=1,agreement=0.95"
PROMPT = [1, 2, 3]
PATIENCE = {"peer_timeout_s": 30.0}
AHEAD = {"coordinator": {"draft_ahead": "on", **PATIENCE}}
BUSY = {"frequency_penalty": 0.3, "logit_bias": {0: 0.5}}


def check(speculation, *, wanted: bool) -> None:
    """What is told of branches adds up."""
    if not wanted:
        assert speculation.num_branches == speculation.num_ahead_draft_tokens == speculation.num_branch_misses == 0
        return
    assert speculation.num_branch_hits <= speculation.num_branches
    assert 0 < speculation.num_wasted_draft_tokens < speculation.num_ahead_draft_tokens


@pytest.mark.parametrize("rule", ["greedy", "coupled", "block", "token"])
async def test_the_text_is_as_on_demand(rule: str) -> None:
    """Under TOKEN and BLOCK as well: a branch is what would be drafted on demand, and rounds are as long."""
    options = {"temperature": 0.0} if rule == "greedy" else {"acceptance": rule, **BUSY}
    texts, speculations = {}, []
    for mode in ("on", "off"):
        stack_settings = {"coordinator": {"draft_ahead": mode, **PATIENCE}}
        async with in_process_stack(TARGET, DRAFT, **stack_settings) as stack, outrider.Client(stack.address) as client:
            answers = [
                await client.complete(
                    PROMPT, seed=seed, max_tokens=48, num_speculative_tokens=3, drafter="model", report_steps=True,
                    **options,
                )
                for seed in range(3)
            ]  # fmt: skip
        texts[mode] = [answer.token_ids for answer in answers]
        speculations += [answer.speculation for answer in answers]
        for answer in answers:
            check(answer.speculation, wanted=mode == "on")
            told = Counter(step.ahead for chunk in answer.chunks if (step := chunk.step))
            assert told["hit"] + told["late"] == answer.speculation.num_branch_hits
            assert told["miss"] == answer.speculation.num_branch_misses
    assert sum(s.num_branch_hits for s in speculations) > 0, "INCONCLUSIVE: no branch was used"
    if rule in ("token", "block") and any(s.num_dropped_proposals or s.num_draft_failures for s in speculations):
        pytest.skip("INCONCLUSIVE: a proposal was too late on this machine, and rounds were not as long")
    assert texts["on"] == texts["off"]


async def test_streams_beside_one_another() -> None:
    """Work ahead is done when nobody waits: all streams end, with the text that each has alone."""
    async with in_process_stack(TARGET, DRAFT, **AHEAD) as stack, outrider.Client(stack.address) as client:

        async def one(seed: int):
            return await client.complete(
                PROMPT, seed=seed, max_tokens=40, num_speculative_tokens=3, drafter="model", acceptance="coupled"
            )

        together = await asyncio.gather(*(one(seed) for seed in range(8)))
        alone = [await one(seed) for seed in range(8)]
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]
    assert sum(a.speculation.num_branch_hits for a in alone) > 0


async def test_a_draft_worker_that_does_not_is_drafted_with_all_the_same() -> None:
    settings = {**AHEAD, "draft_worker": {"ahead_branches": 0}}
    async with in_process_stack(TARGET, DRAFT, **settings) as stack, outrider.Client(stack.address) as client:
        answer = await client.complete(PROMPT, seed=1, max_tokens=24, num_speculative_tokens=3, drafter="model")
    check(answer.speculation, wanted=False)
    assert answer.speculation.num_draft_tokens > 0


async def test_a_small_cache_of_the_draft_worker_only_costs_branches() -> None:
    draft = DRAFT + ",blocks=5"
    async with in_process_stack(TARGET, draft, **AHEAD) as stack, outrider.Client(stack.address) as client:
        answer = await client.complete(
            PROMPT, seed=1, max_tokens=60, num_speculative_tokens=3, drafter="model", temperature=0.0
        )
    assert answer.speculation.num_draft_tokens > 0
    assert answer.speculation.num_draft_failures == 0


async def test_adaptive_streams_find_out_that_it_pays() -> None:
    target, draft = "toy:vocab=16,seed=1,pass_ms=20", "toy:vocab=16,seed=1,agreement=0.95,pass_ms=3"
    stack_settings = {"coordinator": PATIENCE}
    async with in_process_stack(target, draft, **stack_settings) as stack, outrider.Client(stack.address) as client:
        await client.complete(PROMPT, seed=1, max_tokens=60, drafter="model", acceptance="coupled")
        answer = await client.complete(PROMPT, seed=2, max_tokens=60, drafter="model", acceptance="coupled")
    if not answer.speculation.num_branches:
        pytest.skip("INCONCLUSIVE: on this machine it did not pay")
    check(answer.speculation, wanted=True)


async def test_the_wait_for_a_branch_under_way_is_told_as_drafting() -> None:
    """Neither as network nor as nobody's time: who reads the one would look for a nearer machine."""
    target, draft = "toy:vocab=16,seed=1,pass_ms=15", "toy:vocab=16,seed=1,agreement=0.95,pass_ms=6"
    async with in_process_stack(target, draft, **AHEAD) as stack, outrider.Client(stack.address) as client:
        answer = await client.complete(
            PROMPT, seed=1, max_tokens=40, num_speculative_tokens=3, drafter="model", acceptance="coupled",
            report_steps=True,
        )  # fmt: skip
    steps = [chunk.step for chunk in answer.chunks if chunk.step]
    late = [step for step in steps if step.ahead == "late"]
    if not late:
        pytest.skip("INCONCLUSIVE: no branch was waited for")
    for step in late:
        assert step.draft_ms > 0
        assert step.draft_network_ms == 0
        assert step.draft_ms + step.network_ms + step.queue_ms + step.verify_ms <= step.round_ms
    assert not any(step.draft_ms for step in steps if step.ahead == "hit")
    assert answer.timings.draft_ms == pytest.approx(sum(step.draft_ms for step in steps))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["token", "block"])
async def test_the_joint_law_is_the_targets(rule: str) -> None:
    vocab, num_tokens = 5, 3
    target, draft = f"toy:vocab={vocab},seed=7,pass_ms=1", f"toy:vocab={vocab},seed=7,agreement=0.8"
    model = ToyModel(parse_toy(target))
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        longer = {}
        for text, mass in law.items():
            row = model.logits_for([*PROMPT, *text])
            p = distribution(row, SamplingParams(**BUSY), StoppingParams(9), History(PROMPT, text))
            longer.update({(*text, x): mass * float(p[x]) for x in range(vocab)})
        law = longer
    async with in_process_stack(target, draft, **AHEAD) as stack, outrider.Client(stack.address) as client:

        async def one(seed: int):
            return await client.complete(
                PROMPT, seed=seed, max_tokens=6, acceptance=rule, drafter="model",
                num_speculative_tokens=1 + seed % 3, **BUSY,
            )  # fmt: skip

        answers = []
        for start in range(0, scaled(3_000, at_least=240), 20):
            answers += await asyncio.gather(*(one(seed) for seed in range(start, start + 20)))
    assert sum(a.speculation.num_branch_hits for a in answers) > 0, "INCONCLUSIVE"
    assert sum(a.speculation.num_accepted_draft_tokens for a in answers) > 0
    counts = Counter(tuple(a.token_ids[:num_tokens]) for a in answers)
    assert chi_square(counts, law) > FALSE_ALARM

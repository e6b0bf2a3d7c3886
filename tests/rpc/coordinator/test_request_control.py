"""What a request says of speculation is done and echoed, and no stream's choices leak into another's."""

from __future__ import annotations

from typing import Any

import pytest
from stack import in_process_stack

import outrider
from coordinator.gamma.adaptive import AdaptiveGamma
from coordinator.gamma.policy import Candidate, Choice, RoundReport
from coordinator.gamma.shared import SharedEstimates
from outrider.errors import InvalidArgument
from outrider.results import GammaCause

PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]
MODEL = Candidate("model")


async def answered(client: outrider.Client, **options: Any) -> outrider.Completion:
    return await client.complete(PROMPT, seed=3, report_steps=True, **{"max_tokens": 48, **options})


async def test_every_option_is_honoured_and_echoed() -> None:
    async with in_process_stack() as stack, outrider.Client(stack.address) as client:
        default = await answered(client)
        started = default.started
        assert (started.num_speculative_tokens, started.max_speculative_tokens, started.drafter) == (None, 16, "auto")

        off = await answered(client, num_speculative_tokens=0)
        assert (off.started.num_speculative_tokens, off.started.max_speculative_tokens) == (0, 0)
        assert off.speculation.num_draft_tokens == 0
        assert {c.step.cause for c in off.chunks if c.step} == {GammaCause.PREFILL, GammaCause.OFF}

        fixed = await answered(client, num_speculative_tokens=3, drafter="model")
        assert (fixed.started.num_speculative_tokens, fixed.started.drafter) == (3, "model")
        assert set(fixed.speculation.drafters) == {"model"}
        drafted = [c.step for c in fixed.chunks if c.step and c.step.num_draft_tokens]
        assert all(step.cause is GammaCause.FIXED for step in drafted)
        # the stream's end leaves room for fewer
        assert {step.num_draft_tokens for step in drafted[:-3]} == {3}
        assert not any(step.price_tokens_per_ms for step in drafted), "a fixed number has no price"

        capped = await answered(client, max_speculative_tokens=2)
        assert (capped.started.num_speculative_tokens, capped.started.max_speculative_tokens) == (None, 2)
        assert max(c.step.num_draft_tokens for c in capped.chunks if c.step) <= 2

        local = await answered(client, drafter="lookup", num_speculative_tokens=4)
        assert local.started.drafter == "lookup"
        assert set(local.speculation.drafters) <= {"lookup"}
        for wrong in ({"num_speculative_tokens": 99}, {"drafter": "oracle"}):
            with pytest.raises(InvalidArgument):
                await answered(client, **wrong)
    assert len({answer.token_ids for answer in (default, off, fixed, capped, local)}) == 1, "speed only"


async def test_a_server_with_a_fixed_number_says_so_and_a_cap_gives_the_choice_back() -> None:
    settings = {"coordinator": {"num_speculative_tokens": 2}}
    async with in_process_stack(**settings) as stack, outrider.Client(stack.address) as client:
        assert (await answered(client, max_tokens=8)).started.num_speculative_tokens == 2
        assert (await answered(client, max_tokens=8, max_speculative_tokens=3)).started.num_speculative_tokens is None
        assert (await answered(client, max_tokens=8, num_speculative_tokens=1)).started.num_speculative_tokens == 1


async def test_streams_beside_one_another_keep_to_their_own_options() -> None:
    import asyncio

    gammas = (0, 1, 2, 5)
    async with in_process_stack("toy:vocab=16,seed=1,pass_ms=1") as stack, outrider.Client(stack.address) as client:
        answers = await asyncio.gather(
            *(answered(client, num_speculative_tokens=gamma, drafter="model") for gamma in gammas)
        )
    for gamma, answer in zip(gammas, answers, strict=True):
        assert answer.started.num_speculative_tokens == gamma
        assert max(c.step.num_draft_tokens_wanted for c in answer.chunks if c.step) == gamma


def rounds(policy: AdaptiveGamma, chance: float, num_rounds: int = 60) -> None:
    """Drafts that are accepted with this chance, told softly."""
    byte = round(255 * chance)
    for _ in range(num_rounds):
        policy.observe(
            RoundReport(
                choice=Choice("model", 4, "best", candidate=MODEL), num_draft_tokens=4, num_accepted=round(4 * chance),
                num_committed=1 + round(4 * chance), soft_acceptances=bytes([byte] * 4), draft_ms=2.0, verify_ms=10.0,
                round_ms=12.5, target="t", num_batch_rows=5,
            )
        )  # fmt: skip


def test_only_costs_and_a_tenants_prior_pass_from_stream_to_stream() -> None:
    shared = SharedEstimates()
    good = AdaptiveGamma(shared.of("m", "one", greedy=True), 8)
    rounds(good, 0.95)
    hazards = {
        "same tenant": AdaptiveGamma(shared.of("m", "one", greedy=True), 8),
        "another tenant": AdaptiveGamma(shared.of("m", "two", greedy=True), 8),
        "sampled": AdaptiveGamma(shared.of("m", "one", greedy=False), 8),
    }
    first = {name: policy._objective.acceptance(MODEL).hazards(1)[0] for name, policy in hazards.items()}
    fresh = AdaptiveGamma(SharedEstimates().of("m", "x", greedy=True), 8)._objective.acceptance(MODEL).hazards(1)[0]
    assert first["same tenant"] > 0.85
    assert first["another tenant"] == first["sampled"] == fresh
    assert shared.of("m", "two", greedy=True).costs.knows(MODEL), "what a draft takes is no secret of a tenant"
    assert not SharedEstimates().of("m", "x", greedy=True).costs.knows(MODEL)


def test_a_stream_that_goes_badly_does_not_change_one_that_runs() -> None:
    """Beside what they share: a neighbour's own estimate is its own."""
    shared = SharedEstimates()
    one, two = (AdaptiveGamma(shared.of("m", "t", greedy=True), 8) for _ in range(2))
    rounds(one, 0.95)
    before = one._objective.acceptance(MODEL).hazards(1)[0]
    rounds(two, 0.05, 4)
    assert one._objective.acceptance(MODEL).hazards(1)[0] > 0.8 * before
    assert two._objective.acceptance(MODEL).hazards(1)[0] < 0.8

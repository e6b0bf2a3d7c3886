"""A draft worker whose answers are malformed, stale, doubled, reordered or late costs speed only, not text."""

import asyncio

import pytest
from conftest import scaled
from faults.rogue import FAULTS, TRUSTING, rogue_draft
from stack import in_process_stack

import outrider
from coordinator import drafting

TARGET, DRAFT = "toy:vocab=24,seed=5", "toy:vocab=24,seed=5,agreement=0.85"


def requests(count):
    for seed in range(count):
        prompt = [seed % 24, 3, 7]
        if seed % 2:
            yield prompt, {"temperature": 0.0, "max_tokens": 40}
        else:
            yield prompt, {"temperature": 1.0, "seed": seed, "acceptance": "coupled", "max_tokens": 40}


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [4, None])
async def test_text_does_not_change(gamma, monkeypatch):
    monkeypatch.setattr(drafting, "REOPEN_AFTER_S", 0.01)
    monkeypatch.setattr(drafting, "MAX_REOPEN_AFTER_S", 0.05)
    monkeypatch.setattr(drafting, "LOOK_AGAIN_S", 0.01)
    work = list(requests(scaled(120, at_least=12)))
    extra = {} if gamma is None else {"num_speculative_tokens": gamma}
    async with in_process_stack(TARGET, None) as plain, outrider.Client(plain.address) as client:
        expected = [(await client.complete(p, num_speculative_tokens=0, **o)).token_ids for p, o in work]
    async with in_process_stack(TARGET, DRAFT) as honest:
        async with rogue_draft(honest.draft[0].address, seed=gamma or 1) as (address, rogue):
            stack = in_process_stack(TARGET, None, coordinator={"draft_workers": (address,), **TRUSTING})
            async with stack as services, outrider.Client(services.address) as client:
                answers = []
                for start in range(0, len(work), 8):
                    part = work[start : start + 8]
                    answers += await asyncio.gather(
                        *(client.complete(p, drafter="model", timeout_s=120, **o, **extra) for p, o in part)
                    )
    assert [a.token_ids for a in answers] == expected
    drafted = sum(a.speculation.num_draft_tokens for a in answers)
    assert drafted > 0, "INCONCLUSIVE: no draft was ever verified"
    if gamma is not None:
        assert sum(rogue.counts.values()) > len(FAULTS)
        dropped = sum(a.speculation.num_dropped_proposals + a.speculation.num_draft_failures for a in answers)
        assert dropped > 0, "no fault was noticed"


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["model", "tree"])
@pytest.mark.parametrize("fault", [f for f in FAULTS if f != "none"])
async def test_each_fault_alone(fault, drafter):
    work = list(requests(scaled(30, at_least=4)))
    async with in_process_stack(TARGET, DRAFT, draft_worker={"drafters": (drafter,)}) as honest:
        async with outrider.Client(honest.address) as client:
            expected = [(await client.complete(p, num_speculative_tokens=0, **o)).token_ids for p, o in work]
        async with rogue_draft(honest.draft[0].address, seed=2, faults=("none", fault), silence_s=0.2) as (
            address,
            rogue,
        ):
            stack = in_process_stack(TARGET, None, coordinator={"draft_workers": (address,), **TRUSTING})
            async with stack as services, outrider.Client(services.address) as client:
                answers = await asyncio.gather(
                    *(
                        client.complete(p, drafter=drafter, num_speculative_tokens=3, timeout_s=120, **o)
                        for p, o in work
                    )
                )
    assert [a.token_ids for a in answers] == expected
    assert rogue.counts[fault] > 0, "INCONCLUSIVE: the fault never happened"

"""A draft worker that lies about its branches, before a target far away: rounds are sent early for what it foretold.
That costs speed only, not text, and every token is accounted for."""

from contextlib import AsyncExitStack

import pytest
from benchmarks.delay import delayed
from conftest import scaled
from faults.rogue import BRANCH_FAULTS, TRUSTING, rogue_draft
from stack import in_process_stack, start

import coordinator.server
import outrider
from outrider.settings import CoordinatorSettings

TARGET, DRAFT = "toy:vocab=24,seed=5", "toy:vocab=24,seed=5,agreement=0.97"
OPTIONS = [
    {"temperature": 0.0},
    {"acceptance": "coupled", "seed": 3},
    {"acceptance": "coupled", "seed": 4, "frequency_penalty": 0.3},
]


@pytest.mark.parametrize("faults", [BRANCH_FAULTS, BRANCH_FAULTS[1:]], ids=["now and then", "always"])
async def test_text_does_not_change(faults: tuple[str, ...]) -> None:
    async with AsyncExitStack() as cleanup:
        honest = await cleanup.enter_async_context(in_process_stack(TARGET, DRAFT))
        rogue_at = rogue_draft(honest.draft[0].address, seed=1, faults=("none",), branch_faults=faults)
        address, rogue = await cleanup.enter_async_context(rogue_at)
        far = await cleanup.enter_async_context(delayed(honest.target[0].address, 6.0))
        settings = CoordinatorSettings(
            port=0, log_level="error", target_workers=(far,), draft_workers=(address,), draft_ahead="on",
            peer_timeout_s=30.0, **TRUSTING,
        )  # fmt: skip
        server = await start(coordinator.server.serve, settings)
        cleanup.push_async_callback(server.close)
        plainly = await cleanup.enter_async_context(outrider.Client(honest.address))
        client = await cleanup.enter_async_context(outrider.Client(server.address))
        num_sent = 0
        for number in range(scaled(30, at_least=3)):
            options = {**OPTIONS[number % len(OPTIONS)], "max_tokens": 60}
            expected = await plainly.complete([number % 24, 3, 7], num_speculative_tokens=0, **options)
            answer = await client.complete(
                [number % 24, 3, 7], num_speculative_tokens=3, drafter="model", timeout_s=60, **options
            )
            assert answer.token_ids == expected.token_ids, (number, rogue.branch_counts)
            told = answer.speculation
            num_sent += told.num_pipelined_verifies
            num_told = told.num_accepted_draft_tokens + told.num_correction_tokens
            assert num_told + told.num_bonus_tokens + told.num_plain_tokens == len(answer.token_ids)
    assert sum(count for fault, count in rogue.branch_counts.items() if fault != "none") > 3, "INCONCLUSIVE"
    assert num_sent > 0 or "none" not in faults, f"INCONCLUSIVE: {rogue.branch_counts}"

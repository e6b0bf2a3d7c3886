"""A draft worker that tells numbers which cannot be, beside one that does not: streams are none the worse for it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
from faults.rogue import rogue_draft
from stack import in_process_stack, start

import coordinator.server
from outrider import Client
from outrider.settings import CoordinatorSettings

TARGET, DRAFT = "toy:vocab=16,seed=1", "toy:vocab=16,seed=1,agreement=0.8"


def timing(**bad: float) -> Callable[[Any], None]:
    """A pass that was measured well, but for what is given."""

    def describe(answer: Any) -> None:
        good = {"base_ms": 1.0, "ms_per_row": 1.0, "spread_ms": 1.0}
        answer.timings.add(min_sequences=1, max_sequences=4, min_rows=1, max_rows=4, num_passes=10, **(good | bad))

    return describe


def no_capacity(answer: Any) -> None:
    answer.capacity.Clear()


@pytest.mark.parametrize(
    ("describe", "field"),
    [
        (timing(base_ms=math.nan), "base_ms is nan"),
        (timing(ms_per_row=1e308), "ms_per_row is 1e+308"),
        (timing(ms_per_context_token=math.inf), "ms_per_context_token is inf"),
        (timing(base_ms=-1.0), "base_ms is -1"),
        (no_capacity, "capacity.num_blocks is 0"),
    ],
)
async def test_texts_are_whole_whatever_a_draft_worker_tells_of_itself(
    describe: Callable[[Any], None], field: str
) -> None:
    async with in_process_stack(TARGET, DRAFT) as stack, rogue_draft(stack.draft[0].address, seed=1) as (spoilt, rogue):
        rogue.describe, rogue.faults = describe, ("none",)
        settings = CoordinatorSettings(
            port=0, log_level="error", drain_grace_s=0.0, drain_delay_s=0.0,
            target_workers=(stack.target[0].address,), draft_workers=(spoilt, stack.draft[0].address),
        )  # fmt: skip
        running = await start(coordinator.server.serve, settings)
        try:
            async with asyncio.timeout(60), Client(running.address, resume=None) as client:
                assert any(field in worker.detail for worker in (await client.server_info()).workers)
                for gamma in ({}, {}, {"num_speculative_tokens": 4}):
                    answer = await client.complete([1, 2, 3], max_tokens=40, temperature=0, **gamma)
                    assert len(answer.token_ids) == 40
                assert answer.speculation.num_draft_tokens > 0
                assert answer.speculation.num_draft_failures == 0
        finally:
            await running.close()

"""NaN logits end the stream that met them, with its name; others go on."""

import asyncio

import pytest
from stack import in_process_stack

import outrider
from outrider.errors import Internal, OutriderError


@pytest.mark.parametrize("gamma", [0, 3])
async def test_nan_in_the_target(gamma):
    async with in_process_stack("toy:vocab=16,seed=1,nan_after=30", "toy:vocab=16,seed=1,agreement=0.9") as stack:
        async with outrider.Client(stack.address) as client:
            long = client.complete([1] * 10, max_tokens=60, request_id="poisoned", num_speculative_tokens=gamma)
            short = client.complete([1] * 10, max_tokens=15, temperature=0.0, num_speculative_tokens=gamma)
            failed, answer = await asyncio.gather(long, short, return_exceptions=True)
            assert isinstance(failed, Internal)
            assert "poisoned" in str(failed)
            assert "NaN" in str(failed)
            assert len(answer.token_ids) == 15


async def test_nan_in_the_draft_costs_speed_only():
    async with in_process_stack("toy:vocab=16,seed=1", "toy:vocab=16,seed=1,agreement=0.9,nan_after=20") as stack:
        async with outrider.Client(stack.address) as client:
            common = {"temperature": 0.0, "max_tokens": 40, "drafter": "model"}
            plain = await client.complete([1] * 10, num_speculative_tokens=0, **common)
            answer = await client.complete([1] * 10, num_speculative_tokens=3, **common)
            assert answer.token_ids == plain.token_ids
            assert answer.speculation.num_draft_tokens > 0


async def test_the_error_is_an_outrider_error():
    async with (
        in_process_stack("toy:vocab=16,seed=1,nan_after=5", None) as stack,
        outrider.Client(stack.address) as client,
    ):
        with pytest.raises(OutriderError):
            await client.complete([1] * 10, max_tokens=5)

"""kill -9 of real processes in the middle of streams."""

import asyncio
import os
import random
import signal

import pytest
from conftest import scaled

import outrider
from outrider.cli.stack import local_stack
from outrider.errors import OutriderError

TARGET = "toy:vocab=24,seed=5,pass_ms=4"
DRAFT = "toy:vocab=24,seed=5,agreement=0.9,pass_ms=1"


async def tokens(client, prompt, reached=None, **options):
    """Ids and statistics of a stream; `reached` is set after its tenth token."""
    ids = []
    async for event in client.generate(prompt, **options):
        if isinstance(event, outrider.Chunk):
            ids += event.token_ids
            if reached is not None and len(ids) >= 10:
                reached.set()
        elif isinstance(event, outrider.Complete):
            return ids, event.speculation
    raise AssertionError("the stream ended without `complete`")


@pytest.mark.slow
async def test_streams_go_on_plain_when_the_draft_worker_is_killed():
    rng = random.Random(1)
    for round_number in range(scaled(20, at_least=2)):
        async with local_stack(TARGET, DRAFT) as stack, outrider.Client(stack.address) as client:
            options = [
                {"temperature": 0.0, "max_tokens": 120},
                {"temperature": 1.0, "seed": 9, "max_tokens": 120},
                {"temperature": 0.0, "max_tokens": 120, "num_speculative_tokens": 5},
            ]
            prompts = [[round_number % 24, i] for i in range(len(options))]
            expected = [
                (await tokens(client, p, **{**o, "num_speculative_tokens": 0}))[0]
                for p, o in zip(prompts, options, strict=True)
            ]
            reached = [asyncio.Event() for _ in options]
            running = [
                asyncio.create_task(tokens(client, p, r, drafter="model", **{"num_speculative_tokens": 3, **o}))
                for p, o, r in zip(prompts, options, reached, strict=True)
            ]
            await asyncio.wait_for(asyncio.gather(*(r.wait() for r in reached)), 60)
            await asyncio.sleep(rng.random() * 0.05)
            os.kill(stack.processes["draft-worker"].pid, signal.SIGKILL)
            answers = await asyncio.wait_for(asyncio.gather(*running), 120)
            assert [ids for ids, _ in answers] == expected
            assert all(stats.num_draft_tokens > 0 for _, stats in answers), "INCONCLUSIVE"
            assert any(stats.num_plain_tokens > 1 for _, stats in answers), "INCONCLUSIVE: the kill came too late"
            later, _ = await tokens(client, [3, 3], temperature=0.0, max_tokens=20)
            assert len(later) == 20, "new streams run without a draft worker"


@pytest.mark.slow
async def test_a_killed_target_is_an_error_and_never_the_end_of_a_text():
    quick = {"target_wait_s": 0.5}
    async with (
        local_stack(TARGET, DRAFT, coordinator=quick) as stack,
        outrider.Client(stack.address, resume=None) as client,
    ):
        reached = asyncio.Event()
        running = asyncio.create_task(tokens(client, [1, 2], reached, temperature=0.0, max_tokens=400))
        await asyncio.wait_for(reached.wait(), 60)
        os.kill(stack.processes["target-worker"].pid, signal.SIGKILL)
        with pytest.raises(OutriderError) as failure:
            await asyncio.wait_for(running, 60)
        assert failure.value.status in ("UNAVAILABLE", "ABORTED")

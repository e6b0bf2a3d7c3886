"""What a coordinator tells of its draft workers: the rounds that asked them, counted once, and what these waited."""

from __future__ import annotations

import asyncio

import numpy as np
from stack import in_process_stack

from outrider import Client, results, server_info

TARGET = "toy:vocab=16,seed=1"
DRAFT = "toy:vocab=16,seed=1,agreement=0.8,pass_ms=4"
"""Slow enough for streams to meet in its queue."""


async def draft_rounds(client: Client) -> server_info.DraftRounds:
    (told,) = [w.draft_rounds for w in (await client.server_info()).workers if w.role == "draft"]
    return told


async def test_rounds_that_asked_a_draft_worker_are_told_with_what_they_waited() -> None:
    async with in_process_stack(TARGET, DRAFT) as stack, Client(stack.address, timeout_s=60) as client:
        assert await draft_rounds(client) == server_info.DraftRounds()

        prompt = np.random.default_rng(1).integers(16, size=400).tolist()  # so long that most pairs of ids are in it

        async def complete(seed: int, num_drafts: int, drafter: str = "") -> results.Completion:
            return await client.complete(
                prompt,
                max_tokens=40,
                temperature=0.7,
                seed=seed,
                ignore_eos=True,
                num_speculative_tokens=num_drafts,
                drafter=drafter,
            )

        answers = await asyncio.gather(*(complete(i, 3, "model") for i in range(4)))
        told = await draft_rounds(client)
        counts = [answer.speculation for answer in answers]
        assert told.num_draft_tokens == sum(c.num_draft_tokens for c in counts) > 0
        assert told.num_accepted_draft_tokens == sum(c.num_accepted_draft_tokens for c in counts)
        assert told.num_rounds >= sum(c.num_spec_steps for c in counts)
        assert 0 < told.wait_ms < told.round_ms

        # neither guesses of the coordinator's own nor plain rounds are the worker's
        guessed = await complete(7, 3, "lookup")
        await complete(8, 0)
        assert guessed.speculation.num_draft_tokens > 0, "inconclusive: nothing was guessed"
        assert await draft_rounds(client) == told
        (target,) = [w for w in (await client.server_info()).workers if w.role == "target"]
        assert target.draft_rounds == server_info.DraftRounds()

"""The draft model is replaced by another one under live streams: it changes speed only."""

from __future__ import annotations

import asyncio

import pytest
from stack import in_process_stack, start

import draft_worker.server as draft_server
from outrider import results
from outrider.client import Client
from outrider.settings import DraftWorkerSettings

TARGET = "toy:vocab=64,seed=5,pass_ms=3"
OLD, NEW = "toy:vocab=64,seed=5,agreement=0.9", "toy:vocab=64,seed=8,agreement=0.5"
OPTIONS = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 11}, {"temperature": 0.0, "num_speculative_tokens": 4}]


@pytest.mark.parametrize("options", OPTIONS, ids=["greedy", "coupled", "fixed"])
async def test_texts_are_equal_and_the_new_model_drafts(options: dict) -> None:
    prompts = [[1, 2, 3], [9, 8, 7, 6]]
    async with (
        in_process_stack(
            TARGET, OLD, draft_worker={"drain_grace_s": 0.0}, coordinator={"local_drafters": ()}
        ) as stack,
        Client(stack.address) as client,
    ):  # fmt: skip
        plain = [await client.complete(p, max_tokens=500, **{**options, "num_speculative_tokens": 0}) for p in prompts]
        new = []

        async def swap() -> None:
            port = stack.draft[0].port
            await stack.draft[0].close()
            common = {"port": port, "model": NEW, "drain_grace_s": 0.0, "log_level": "warning"}
            new.append(await start(draft_server.serve, DraftWorkerSettings(**common)))

        async def run(prompt: list[int], swaps: bool) -> tuple[tuple[int, ...], list[results.Step], results.Complete]:
            ids, steps, complete, swapping = [], [], None, None
            async for event in client.generate(prompt, max_tokens=500, report_steps=True, **options):
                if isinstance(event, results.Chunk):
                    ids += event.token_ids
                    steps.append(event.step)
                    if swaps and swapping is None and len(ids) > 60:
                        swapping = asyncio.create_task(swap())
                if isinstance(event, results.Complete):
                    complete = event
            if swapping is not None:
                await swapping
            assert complete is not None
            return tuple(ids), steps, complete

        try:
            answers = await asyncio.gather(*(run(p, index == 0) for index, p in enumerate(prompts)))
            for (ids, steps, complete), same in zip(answers, plain, strict=True):
                assert ids == same.token_ids
                drafted = [bool(step.num_draft_tokens) for step in steps]
                assert any(drafted[:40]), "INCONCLUSIVE: the old model never drafted"
                assert not all(drafted[1:]), "INCONCLUSIVE: the old model never left"
                assert complete.speculation.num_draft_failures > 0, "INCONCLUSIVE: no stream had it when it left"
            asked = {**options, "num_speculative_tokens": 4, "drafter": "model"}
            later = await client.complete(prompts[0], max_tokens=200, **asked)
            assert later.token_ids == plain[0].token_ids[:200]
            assert "model" in later.speculation.drafters, "INCONCLUSIVE: the new model never drafted"
        finally:
            for server in new:
                await server.close()

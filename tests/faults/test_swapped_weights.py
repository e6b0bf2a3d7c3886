"""Other weights come up at a target's address while requests arrive: no text is another model's than it says."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from conftest import scaled
from faults.processes import Fleet
from faults.soak.relay import Relay

import outrider
from outrider.errors import OutriderError
from outrider.lm.toy import ToyModel, parse_toy

MODELS = tuple(f"toy:vocab=24,seed={seed},order=3,blocks=600,pass_ms=1" for seed in (5, 6))
PROMPT, LENGTH, PATIENCE_S = [1, 2], 12, 60.0
NUM_TEXTS, CUT_AT = 40, 8


def greedy_text(model: str) -> list[int]:
    toy, ids = ToyModel(parse_toy(model)), list(PROMPT)
    while len(ids) < len(PROMPT) + LENGTH:
        ids.append(int(toy.logits_for(ids).argmax()))
    return ids[len(PROMPT) :]


@pytest.mark.slow
async def test_whatever_answers_at_an_address_a_text_is_of_the_model_that_it_names() -> None:
    """The relay is a virtual address that moves from one process to the other, with texts every few milliseconds: some
    are opened on the new connection before the coordinator has asked who is there."""
    texts = {model: greedy_text(model) for model in MODELS}
    assert texts[MODELS[0]] != texts[MODELS[1]]
    async with Fleet.running(drain_grace_s=1.0, log_level="error") as running:
        addresses = [
            await running.start(f"target-{number}", "target-worker", model=model) for number, model in enumerate(MODELS)
        ]
        async with Relay(addresses[0]) as relay:
            coordinator = await running.start("coordinator", "coordinator", target_workers=relay.address)
            async with outrider.Client(coordinator, resume=None) as client:
                ends = Counter[str]()

                async def one() -> None:
                    ids: list[int] = []
                    try:
                        async with asyncio.timeout(PATIENCE_S):
                            async for event in client.generate(
                                PROMPT, temperature=0.0, max_tokens=LENGTH, num_speculative_tokens=0, timeout_s=3.0
                            ):
                                if isinstance(event, outrider.Started):
                                    model = event.model
                                if isinstance(event, outrider.Chunk):
                                    ids += event.token_ids
                    except OutriderError as error:
                        ends[error.status] += 1
                    else:
                        ends["equal" if ids == texts[model] else f"wrong, {model}"] += 1

                for number in range(scaled(60, at_least=6)):
                    await until_healthy(client)
                    relay.there = addresses[1 - number % 2]
                    tasks = []
                    for text in range(NUM_TEXTS):
                        tasks.append(asyncio.create_task(one()))
                        if text == CUT_AT:
                            relay.cut()
                            relay.heal()
                        await asyncio.sleep(0.003)
                    await asyncio.gather(*tasks)
    assert ends["equal"] >= 0.3 * ends.total(), "INCONCLUSIVE: hardly a text came"
    assert set(ends) <= {"equal", "UNAVAILABLE", "DEADLINE_EXCEEDED"}, ends


async def until_healthy(client: outrider.Client) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not all(worker.healthy for worker in (await client.server_info()).workers):
            await asyncio.sleep(0.02)

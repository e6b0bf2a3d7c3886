"""Streams go where their prompt is cached, and share the load with other coordinators."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from stack import Server, Stack, in_process_stack, start

import coordinator.server
from coordinator.fleet.directory import WorkerDirectory
from coordinator.fleet.worker import WorkerRecord
from outrider import Chunk, Client
from outrider.settings import CoordinatorSettings

TOY = "toy:vocab=64,seed=1"
LONG_PROMPT = [n % 60 for n in range(200)]


async def sessions(client: Client, stack: Stack) -> list[int]:
    """Of this coordinator on each target."""
    found = {worker.address: worker.num_sessions for worker in (await client.server_info()).workers}
    return [found[target.address] for target in stack.target]


async def told_sessions(client: Client, address: str) -> int:
    """Of all coordinators, as the worker told last."""
    return next(w.capacity.num_sessions for w in (await client.server_info()).workers if w.address == address)


async def test_a_prompt_goes_to_the_target_that_has_its_beginning() -> None:
    options = {"temperature": 0.0, "max_tokens": 4, "num_speculative_tokens": 0, "ignore_eos": True}
    async with in_process_stack(f"{TOY},pass_ms=5", None, num_targets=2) as stack:
        async with Client(stack.address, timeout_s=60) as client:
            busy = asyncio.create_task(client.complete([1, 2, 3], **{**options, "max_tokens": 3000}))
            while await sessions(client, stack) != [1, 0]:
                await asyncio.sleep(0.01)
            first = await client.complete(LONG_PROMPT, **options)
            assert first.usage.cached_tokens == 0
            busy.cancel()
            await asyncio.gather(busy, return_exceptions=True)
            while await sessions(client, stack) != [0, 0]:
                await asyncio.sleep(0.01)
            # by load alone it would go to the first of two idle targets
            again = await client.complete([*LONG_PROMPT, 5, 6], **options)
            other = await client.complete([9, *LONG_PROMPT], **options)
    assert again.usage.cached_tokens >= 128
    assert other.usage.cached_tokens == 0


async def test_coordinators_share_the_load_of_the_same_targets() -> None:
    async with in_process_stack(f"{TOY},pass_ms=5", None, num_targets=2) as stack:
        settings = CoordinatorSettings(
            port=0, target_workers=tuple(t.address for t in stack.target), drain_grace_s=0, log_level="warning"
        )
        second: Server = await start(coordinator.server.serve, settings)
        async with Client(stack.address, timeout_s=60) as one, Client(second.address, timeout_s=60) as two:
            streams = [asyncio.create_task(one.complete([1, 2, 3], max_tokens=3000, ignore_eos=True))]
            while await sessions(one, stack) != [1, 0]:
                await asyncio.sleep(0.01)
            while await told_sessions(two, stack.target[0].address) != 1:  # the other one has not heard of it yet
                await asyncio.sleep(0.05)
            streams.append(asyncio.create_task(two.complete([1, 2, 3], max_tokens=3000, ignore_eos=True)))
            while sum(await sessions(two, stack)) != 1:
                await asyncio.sleep(0.01)
            assert await sessions(two, stack) == [0, 1]
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        await second.close()


async def test_after_a_loss_the_same_numerics_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    pick = WorkerDirectory.pick_target

    def watched(directory: WorkerDirectory, *args: Any, numerics: str = "", **options: Any) -> WorkerRecord:
        if options:  # not the look whether there is a target at all
            asked.append(numerics)
        return pick(directory, *args, numerics=numerics, **options)

    monkeypatch.setattr(WorkerDirectory, "pick_target", watched)
    quick = {"drain_grace_s": 0.0}
    async with in_process_stack(f"{TOY},pass_ms=5", None, num_targets=2, worker=quick) as stack:
        async with Client(stack.address, timeout_s=60) as client:
            fingerprint = (await client.server_info()).workers[0].numerics_fingerprint
            # plain: a text that was written before is guessed, and done before anybody is lost
            options = {"temperature": 0.0, "max_tokens": 300, "ignore_eos": True, "num_speculative_tokens": 0}
            plain = await client.complete([1, 2, 3], **options)
            for target in stack.target:  # else a load of before is seen
                while await told_sessions(client, target.address):
                    await asyncio.sleep(0.05)
            token_ids: list[int] = []
            async for event in client.generate([1, 2, 3], **options):
                if isinstance(event, Chunk):
                    if not token_ids:
                        assert await sessions(client, stack) == [1, 0]
                        await stack.target[0].close()
                    token_ids += event.token_ids
    assert tuple(token_ids) == tuple(plain.token_ids)
    assert fingerprint
    assert asked == ["", "", fingerprint]


@pytest.mark.parametrize(("num_tokens", "spread"), [(100, [[0, 4], [4, 0]]), (300, [[2, 2]])])
async def test_choices_of_a_request_stay_together_where_there_is_room_for_them(
    num_tokens: int, spread: list[list[int]]
) -> None:
    """Of 45 blocks each target promises 19 to a text of 300 tokens, and 7 to one of 100."""
    target = f"{TOY},pass_ms=5,blocks=45"
    async with in_process_stack(target, None, num_targets=2, target_worker={"cache_overcommit": 1.0}) as stack:
        async with Client(stack.address, timeout_s=60) as client:

            async def ends() -> None:
                options = {"n": 4, "temperature": 1.0, "num_speculative_tokens": 0, "ignore_eos": True}
                async for _ in client.generate([1, 2, 3], max_tokens=num_tokens, **options):
                    pass

            request = asyncio.create_task(ends())
            while sum(now := await sessions(client, stack)) != 4:
                assert not request.done()
                await asyncio.sleep(0.005)
            assert now in spread
            await request

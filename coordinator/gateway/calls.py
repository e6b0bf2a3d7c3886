"""Events of one HTTP request: a `Generate` for each of its prompts, side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from outrider.client import Client, Prompt
from outrider.results import Event

Told = tuple[int, Event]
"""Which prompt it is of, and what came."""


async def events(client: Client, prompts: Sequence[Prompt], options: Mapping[str, Any]) -> AsyncGenerator[Told, None]:
    """As they come; one that the caller is slow to take holds all. A request id gets the prompt's index behind it where
    there are several. Raises OutriderError: the first failure of any, which ends the others."""
    if len(prompts) == 1:
        async with aclosing(client.generate(prompts[0], **options)) as told:
            async for event in told:
                yield 0, event
        return
    queue: asyncio.Queue[Told | Exception | None] = asyncio.Queue(maxsize=1)

    async def feed(index: int, prompt: Prompt) -> None:
        own = dict(options)
        if "request_id" in own:
            own["request_id"] = f"{own['request_id']}-{index}"
        end: Exception | None = None
        try:
            async with aclosing(client.generate(prompt, **own)) as told:  # type: ignore[arg-type]
                async for event in told:
                    await queue.put((index, event))
        except Exception as error:
            end = error
        await queue.put(end)

    feeding = [asyncio.create_task(feed(index, prompt)) for index, prompt in enumerate(prompts)]
    try:
        num_running = len(feeding)
        while num_running:
            match await queue.get():
                case None:
                    num_running -= 1
                case Exception() as error:
                    raise error
                case told_of_one:
                    yield told_of_one
    finally:
        for task in feeding:
            task.cancel()
        await asyncio.gather(*feeding, return_exceptions=True)

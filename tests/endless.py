"""Streams that go on for as long as a test looks on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from outrider.client import Client
from outrider.results import Chunk

PROMPT = [1, 2, 3]


@contextlib.asynccontextmanager
async def endless(client: Client, request_id: str, num_tokens: int = 5, **options: int) -> AsyncIterator[None]:
    """A stream that goes on while the block runs; it has `num_tokens` by then."""
    begun = asyncio.Event()

    async def read() -> None:
        seen = 0
        async for event in client.generate(
            PROMPT, max_tokens=3000, request_id=request_id, num_speculative_tokens=2, seed=1, **options
        ):
            seen += len(event.token_ids) if isinstance(event, Chunk) else 0
            if seen >= num_tokens:
                begun.set()

    task = asyncio.create_task(read())
    try:
        if num_tokens:
            await begun.wait()
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

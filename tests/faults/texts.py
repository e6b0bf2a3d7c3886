"""Streams of a fleet under faults, and the wait until its workers are healthy."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import outrider

PATIENCE_S = 120.0
LENGTH = 300


async def healthy(client: outrider.Client, number: int) -> None:
    """Until so many workers are."""
    async with asyncio.timeout(PATIENCE_S):
        while sum(w.healthy for w in (await client.server_info()).workers) < number:
            await asyncio.sleep(0.02)


@dataclass
class Text:
    """A stream and what has come of it."""

    prompt: list[int]
    options: dict[str, Any]
    ids: list[int] = field(default_factory=list)
    num_draft_tokens: int = 0

    async def run(self, client: outrider.Client, length: int = LENGTH) -> list[int]:
        async for event in client.generate(self.prompt, max_tokens=length, **self.options):
            if isinstance(event, outrider.Chunk):
                self.ids += event.token_ids
            elif isinstance(event, outrider.Complete):
                assert event.usage.completion_tokens == len(self.ids)
                self.num_draft_tokens = event.speculation.num_draft_tokens
                return self.ids
        raise AssertionError("the stream ended without `complete`")

    async def reaches(self, length: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.ids) < length:
                await asyncio.sleep(0.002)

"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merged(streams: Iterable[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """What each gives, as it comes. A caller that is slow to take one holds all of them. The first failure of any ends
    the others, and is the caller's. No item may be None or an exception."""
    queue: asyncio.Queue[T | Exception | None] = asyncio.Queue(maxsize=1)

    async def feed(stream: AsyncGenerator[T, None]) -> None:
        end: Exception | None = None
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put(item)
        except Exception as error:
            end = error
        await queue.put(end)

    feeding = [asyncio.create_task(feed(stream)) for stream in streams]
    try:
        num_running = len(feeding)
        while num_running:
            match await queue.get():
                case None:
                    num_running -= 1
                case Exception() as error:
                    raise error
                case item:
                    yield item
    finally:
        for task in feeding:
            task.cancel()
        await asyncio.gather(*feeding, return_exceptions=True)

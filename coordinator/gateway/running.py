"""Requests that run: how many, until when, and for whom: a client that hung up waits for nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.types import Receive

from outrider.errors import DRAINING, ResourceExhausted, Unavailable

T = TypeVar("T")
RETRY_DELAY_S = 1.0


class ClientGone(Exception):
    """Nobody reads the answer."""


class Running:
    """The requests of one gateway."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._limits: set[asyncio.Timeout] = set()
        self.ends_soon = False
        """`/health` says so, and nothing is refused yet."""
        self._draining = False

    def __len__(self) -> int:
        return len(self._limits)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """For one request. Raises ResourceExhausted, and Unavailable where the gateway ends, or has to before it."""
        if self._draining:
            raise Unavailable("the gateway is draining", reason=DRAINING, retry_delay_s=RETRY_DELAY_S)
        if len(self) >= self._max_requests:
            raise ResourceExhausted(
                f"the gateway has {len(self)} requests, as many as it takes at once", retry_delay_s=RETRY_DELAY_S
            )
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limits.add(limit)
                try:
                    yield
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            if not limit.expired():
                raise
            raise Unavailable(
                "the gateway ends, and the text was not complete in time", reason=DRAINING, retry_delay_s=RETRY_DELAY_S
            ) from None

    def end_within(self, grace_s: float) -> None:
        """No more requests; those that run have so long."""
        self.ends_soon = self._draining = True
        when = asyncio.get_running_loop().time() + grace_s
        for limit in self._limits:
            limit.reschedule(when)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns or raises. Ends it and raises ClientGone once the client hangs up. The body has been read."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

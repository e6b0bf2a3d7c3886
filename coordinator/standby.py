"""A second target worker that has a stream's text computed too, in its idle time: losing the first costs about a pass.

The session there is asked nothing. What it computes stays in that worker's prefix cache, so that the session which is
opened there after a loss, like any other, finds all but the last few tokens. Its price is cache on that worker, and
messages of a few bytes a token; what it computes, it computes when nobody else wants anything.
"""

from __future__ import annotations

import asyncio
import random
from typing import Protocol

from coordinator.stream import Stream
from coordinator.target_link import TargetLink
from outrider.errors import OutriderError, Unavailable
from outrider.serving.messages import TargetOpening

STEP_TOKENS = 16
"""Committed between two messages, at least."""
RETRY_S = 1.0
"""After a loss; on average three quarters of it."""
LAST_PRIORITY = 2**31 - 1


class StandbyPool(Protocol):
    """Where links come from."""

    def connect_standby(self, stream: Stream, avoid: str) -> TargetLink:
        """A link to the best healthy worker but that one. Raises Unavailable when there is none."""

    def disconnect(self, link: TargetLink, error: Exception | None = None) -> None:
        """The link is not used any more; `error` is why, when it failed."""

    def next_change(self) -> asyncio.Event:
        """Set once the health of any worker may have changed."""


class Standby:
    """Of one stream. Never raises: where there is no second worker, there is no standby."""

    def __init__(self, stream: Stream, pool: StandbyPool) -> None:
        self._stream = stream
        self._pool = pool
        self._target = ""
        self._link: TargetLink | None = None
        self._task: asyncio.Task[None] | None = None
        self._grown = asyncio.Event()
        self._length = 0
        """Tokens that are computed there."""

    @property
    def address(self) -> str:
        """Of the worker that has some of the text computed; empty: there is none."""
        return self._link.address if self._link is not None and self._length else ""

    def follow(self, target: str) -> None:
        """The stream is computed at this address, and its log may have grown."""
        if target != self._target:
            self._target = target
            if self._link is None or self._link.address == target:
                self.close()
                self._task = asyncio.create_task(self._run())
        elif self._stream.log.length >= self._length + STEP_TOKENS:
            self._grown.set()

    def make_way(self, address: str) -> None:
        """The stream itself goes to this address: a session there holds blocks that it may have to wait for. What was
        computed stays in the worker's cache."""
        if self._link is not None and self._link.address == address:
            self._target = ""
            self.close()

    def close(self) -> None:
        """Frees the session. Harmless when repeated; waits for nothing."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._drop()

    async def _run(self) -> None:
        while True:
            change = self._pool.next_change()
            try:
                self._link = link = self._pool.connect_standby(self._stream, self._target)
            except Unavailable:
                await change.wait()
                continue
            try:
                await self._keep_up(link)
            except OutriderError as error:
                self._drop(error)
            await asyncio.sleep(RETRY_S * random.uniform(0.5, 1.0))

    async def _keep_up(self, link: TargetLink) -> None:
        opening = TargetOpening(**self._stream.opening_fields(epoch=1), priority=LAST_PRIORITY)
        await link.open_deferred(opening)
        while True:
            self._grown.clear()
            length = self._stream.log.length
            await link.ingest()
            self._length = length
            if self._stream.log.length < length + STEP_TOKENS:
                await self._grown.wait()

    def _drop(self, error: Exception | None = None) -> None:
        link, self._link, self._length = self._link, None, 0
        if link is not None:
            self._pool.disconnect(link, error)
            link.close()

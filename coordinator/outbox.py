"""Events on their way to a client. Each stream has room for so many chunks; a slow client pauses its own alone.

A stream that pauses keeps its place here and asks its workers for nothing: others may have its blocks whenever they are
short of some, and its sessions end with their leases. It goes on from the log, as after a loss.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from outrider.errors import Aborted
from outrider.serving.events import SealedChunk, ServerEvent
from outrider.serving.session_calls import SealedPromptLogprobs


class Outbox:
    """One request's events, all its streams' merged in order."""

    def __init__(
        self,
        room_chunks: int,
        *,
        max_pause_s: float | None = None,
        on_end: Callable[[], object] = lambda: None,
        on_pause: Callable[[int], object] = lambda change: None,
    ) -> None:
        """max_pause_s: a client that takes nothing for so long has its request ended; None: never. on_end: called once
        all streams have left, which may be long before their client has read everything. on_pause: told 1 for a stream
        that waits for its client, -1 when it does no more."""
        self._room_chunks = room_chunks
        self._max_pause_s = max_pause_s
        self._on_end = on_end
        self._on_pause = on_pause
        self._events: deque[ServerEvent] = deque()
        self._waiting_chunks: dict[int, int] = {}
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()
        self._num_open = 0
        self._failed = False
        self._handed_over: Exception | None = None
        self.was_cut_off = False
        """Handed over in the middle of a round."""
        self.prompt_told = asyncio.Event()
        """The prompt's logprobs are on their way: chunks may follow."""

    def join(self, index: int) -> None:
        """A stream that will put events."""
        self._waiting_chunks[index] = 0
        self._num_open += 1

    def leave(self) -> None:
        """A stream has put its last event."""
        self._num_open -= 1
        self._changed.set()
        if not self._num_open:
            self._on_end()

    def fail(self) -> None:
        """A stream failed: `events` ends, and what is left is dropped."""
        self._failed = True
        self._events.clear()
        self._changed.set()

    def hand_over(self, error: Exception) -> None:
        """Streams end behind the chunk that they have put last: `room` raises `error` from now on. What was put is
        still sent."""
        self._handed_over = error
        self._taken.set()

    def cut_off(self) -> None:
        """As `fail`, for streams that were to be handed over and take too long for it."""
        self.was_cut_off = True
        self.fail()

    def put(self, event: ServerEvent) -> None:
        """Never waits: call `room` first."""
        if self._failed:
            return
        if isinstance(event, SealedChunk):
            self._waiting_chunks[event.index] += 1
        elif isinstance(event, SealedPromptLogprobs):
            self.prompt_told.set()
        self._events.append(event)
        self._changed.set()

    async def room(self, index: int) -> int:
        """Chunks that this stream may put; waits until there is one. Raises Aborted when the client does not read."""
        while (room := self._room_chunks - self._waiting_chunks[index]) <= 0 and self._handed_over is None:
            self._taken.clear()
            self._on_pause(1)
            try:
                async with asyncio.timeout(self._max_pause_s):
                    await self._taken.wait()
            except TimeoutError:
                raise Aborted(
                    f"the client has read nothing for {self._max_pause_s:g} s; resume with resume_token_ids",
                    reason="CLIENT_STALLED",
                    retry_delay_s=0.0,
                ) from None
            finally:
                self._on_pause(-1)
        if self._handed_over is not None:
            raise self._handed_over
        return room

    async def events(self) -> AsyncIterator[ServerEvent]:
        """Ends once all streams have left."""
        while True:
            while self._events and not self._failed:
                event = self._events.popleft()
                yield event
                if isinstance(event, SealedChunk):
                    # only now: while the client takes its time over this one, it still fills the buffer
                    self._waiting_chunks[event.index] -= 1
                    self._taken.set()
            if self._failed or not self._num_open:
                return
            self._changed.clear()
            await self._changed.wait()

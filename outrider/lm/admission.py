"""Admission by blocks: a sequence opens when blocks for its whole life are free, first come, first served.

What could never fit is refused at once; beyond a bounded queue an open is refused with a retry delay.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from outrider.errors import Aborted, Internal, InvalidArgument, ResourceExhausted, Unavailable
from outrider.lm.kv_cache import BlockAllocator, Sequence

MIN_RETRY_DELAY_S, MAX_RETRY_DELAY_S = 0.1, 60.0


class _Waiter:
    def __init__(self, max_length: int, num_blocks: int, loop: asyncio.AbstractEventLoop) -> None:
        self.max_length = max_length
        self.num_blocks = num_blocks
        self.loop = loop
        self.future: asyncio.Future[None] = loop.create_future()
        self.sequence: Sequence | None = None


class Admission:
    """Owns the blocks. `open` belongs to an event loop; `release` and the rest may be called from any thread."""

    def __init__(self, num_blocks: int, block_size: int, context_length: int, max_waiting_sessions: int) -> None:
        self.block_size = block_size
        self.context_length = context_length
        self.max_waiting_sessions = max_waiting_sessions
        self._allocator = BlockAllocator(num_blocks)
        self._lock = threading.Lock()
        self._waiters: deque[_Waiter] = deque()
        self._stopped = False
        self._num_open = 0
        self._mean_life_s = 1.0

    async def open(self, max_length: int) -> Sequence:
        """Raises InvalidArgument when it could never fit, ResourceExhausted when the queue is full. Cancellable."""
        num_blocks = self._num_blocks_for(max_length)
        with self._lock:
            if self._stopped:
                raise Unavailable("the engine has stopped", retry_delay_s=1.0)
            if not self._waiters and self._allocator.can_reserve(num_blocks):
                return self._reserve(max_length, num_blocks)
            if len(self._waiters) >= self.max_waiting_sessions:
                raise ResourceExhausted(
                    f"no cache blocks are free and {len(self._waiters)} sessions wait for some already; the limit is "
                    f"{self.max_waiting_sessions} (max_waiting_sessions): try again later",
                    reason="QUEUE_FULL",
                    retry_delay_s=self._expected_wait_s(),
                )
            waiter = _Waiter(max_length, num_blocks, asyncio.get_running_loop())
            self._waiters.append(waiter)
        try:
            await waiter.future
        except asyncio.CancelledError:
            self._leave(waiter)
            raise
        if waiter.sequence is None:
            raise Aborted("the engine stopped")
        return waiter.sequence

    def release(self, sequence: Sequence) -> None:
        """Frees a sequence's blocks and lets in whoever fits now, in order."""
        with self._lock:
            self._free(sequence)

    def stop(self) -> None:
        """Refuses from now on; those that wait get Aborted."""
        with self._lock:
            self._stopped = True
            waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            post(waiter.loop, settle, waiter.future, None, None)

    @property
    def num_blocks(self) -> int:
        """All blocks there are."""
        return self._allocator.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that belong to nobody."""
        return self._allocator.num_free

    @property
    def num_waiting(self) -> int:
        """Opens that wait for blocks."""
        return len(self._waiters)

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Raises Internal unless exactly the blocks of `sequences` are taken."""
        with self._lock:
            self._allocator.check_integrity([s.blocks for s in sequences])

    def _num_blocks_for(self, max_length: int) -> int:
        if max_length < 1:
            raise InvalidArgument(f"a sequence needs room for at least 1 token, not {max_length}")
        if max_length > self.context_length:
            raise InvalidArgument(
                f"{max_length} tokens (prompt and output together) exceed the model's context length of "
                f"{self.context_length}: shorten the prompt or lower max_tokens",
                reason="CONTEXT_LENGTH_EXCEEDED",
            )
        num_blocks = -(-max_length // self.block_size)
        if num_blocks > self.num_blocks:
            raise InvalidArgument(
                f"{max_length} tokens need {num_blocks} cache blocks, this worker has {self.num_blocks} in all: "
                "lower max_tokens, or give the worker more memory (kv_cache_bytes)",
                reason="NEVER_FITS",
            )
        return num_blocks

    def _reserve(self, max_length: int, num_blocks: int) -> Sequence:
        self._num_open += 1
        return Sequence(max_length, self._allocator.reserve(num_blocks), time.monotonic())

    def _free(self, sequence: Sequence) -> None:
        self._allocator.free(sequence.blocks)
        sequence.blocks = []
        self._num_open -= 1
        self._mean_life_s += (time.monotonic() - sequence.opened_at - self._mean_life_s) / 16
        self._admit()

    def _admit(self) -> None:
        while self._waiters and self._allocator.can_reserve(self._waiters[0].num_blocks):
            waiter = self._waiters.popleft()
            waiter.sequence = self._reserve(waiter.max_length, waiter.num_blocks)
            post(waiter.loop, settle, waiter.future, None, None)

    def _leave(self, waiter: _Waiter) -> None:
        """A cancelled open: its turn may have come in the very moment of the cancellation."""
        with self._lock:
            if waiter.sequence is not None:
                waiter.sequence.closed = True
                self._free(waiter.sequence)
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
                self._admit()

    def _expected_wait_s(self) -> float:
        """One of the open sequences ends after its share of the mean life."""
        return min(MAX_RETRY_DELAY_S, max(MIN_RETRY_DELAY_S, self._mean_life_s / max(1, self._num_open)))


def post(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: Any) -> None:
    """`call_soon_threadsafe`, unless the loop is closed: then nobody waits for the answer."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise


def settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Resolves a future that may have been cancelled meanwhile."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, Exception):
        future.set_exception(error)
    else:
        future.set_exception(Internal(f"a program ended with {type(error).__name__}: {error}"))

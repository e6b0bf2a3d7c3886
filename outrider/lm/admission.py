"""Admission by blocks: a sequence opens when blocks for its whole life can be promised, by priority, then in order.

With `overcommit` 1 all promises can be kept at once; beyond, they count on streams that end early or share blocks, and
on preemption where that does not come true. What could never fit is refused at once; beyond a bounded queue an open is
refused with a retry delay.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import math
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

from outrider.errors import Aborted, Internal, InvalidArgument, ResourceExhausted, Unavailable
from outrider.lm.kv_cache import Sequence
from outrider.lm.sequence_cache import SequenceCache

MIN_RETRY_DELAY_S, MAX_RETRY_DELAY_S = 0.1, 60.0


class _Waiter:
    """An open that waits; `admitted` once its turn has come."""

    def __init__(self, sequence: Sequence, loop: asyncio.AbstractEventLoop) -> None:
        self.sequence = sequence
        self.loop = loop
        self.future: asyncio.Future[None] = loop.create_future()
        self.admitted = False


class Admission:
    """Promises blocks. `open` belongs to an event loop; `release` and the rest may be called from any thread."""

    def __init__(
        self,
        cache: SequenceCache,
        context_length: int,
        max_waiting_sessions: int,
        overcommit: float = 1.0,
        read_features: Callable[[list[int], SequenceOf[int]], Any] | None = None,
    ) -> None:
        """read_features: what every sequence is given."""
        self.context_length = context_length
        self.max_waiting_sessions = max_waiting_sessions
        self._cache = cache
        self._read_features = read_features
        self._max_promised = cache.num_blocks * overcommit
        self._num_promised = 0
        self._serials = itertools.count()
        self._lock = threading.Lock()
        self._waiters: list[_Waiter] = []
        self._stopped = False
        self._num_open = 0
        self._mean_life_s = 1.0

    async def open(self, max_length: int, tenant: str = "", priority: int = 0, skips: bool = False) -> Sequence:
        """Raises InvalidArgument when it could never fit, ResourceExhausted when the queue is full. Cancellable."""
        self._check_fits(max_length)
        sequence = Sequence(
            max_length,
            block_size=self._cache.block_size,
            root=self._cache.root(tenant, skips),
            priority=priority,
            serial=next(self._serials),
            read_features=None if skips else self._read_features,
            skips=skips,
        )
        with self._lock:
            if self._stopped:
                raise Unavailable("the engine has stopped", retry_delay_s=1.0)
            is_next = not self._waiters or sequence.rank < self._waiters[0].sequence.rank
            if is_next and self._can_promise(sequence):
                self._promise(sequence)
                return sequence
            if len(self._waiters) >= self.max_waiting_sessions:
                raise ResourceExhausted(
                    f"no cache blocks are free and {len(self._waiters)} sessions wait for some already; the limit is "
                    f"{self.max_waiting_sessions} (max_waiting_sessions): try again later",
                    reason="QUEUE_FULL",
                    retry_delay_s=self._expected_wait_s(),
                )
            waiter = _Waiter(sequence, asyncio.get_running_loop())
            bisect.insort(self._waiters, waiter, key=lambda w: w.sequence.rank)
        try:
            await waiter.future
        except asyncio.CancelledError:
            self._leave(waiter)
            raise
        if not waiter.admitted:
            raise Aborted("the engine stopped")
        return sequence

    def release(self, sequence: Sequence) -> None:
        """Frees a sequence's blocks and lets in whoever fits now, in order."""
        with self._lock:
            self._free(sequence)

    def stop(self) -> None:
        """Refuses from now on; those that wait get Aborted."""
        with self._lock:
            self._stopped = True
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            post(waiter.loop, settle, waiter.future, None, None)

    @property
    def num_waiting(self) -> int:
        """Opens that wait for blocks."""
        return len(self._waiters)

    @property
    def num_promised_blocks(self) -> int:
        """To open sequences."""
        return self._num_promised

    @property
    def max_promised_blocks(self) -> int:
        """At once; 0: as many as are asked for."""
        return int(self._max_promised) if math.isfinite(self._max_promised) else 0

    def _check_fits(self, max_length: int) -> None:
        if max_length < 1:
            raise InvalidArgument(f"a sequence needs room for at least 1 token, not {max_length}")
        if max_length > self.context_length:
            raise InvalidArgument(
                f"{max_length} tokens (prompt and output together) exceed the model's context length of "
                f"{self.context_length}: shorten the prompt or lower max_tokens",
                reason="CONTEXT_LENGTH_EXCEEDED",
            )
        num_blocks = -(-max_length // self._cache.block_size)
        if num_blocks > self._cache.num_blocks:
            raise InvalidArgument(
                f"{max_length} tokens need {num_blocks} cache blocks, this worker has {self._cache.num_blocks} in all: "
                "lower max_tokens, or give the worker more memory (kv_cache_bytes)",
                reason="NEVER_FITS",
            )

    def _can_promise(self, sequence: Sequence) -> bool:
        return self._num_promised + sequence.num_promised_blocks <= self._max_promised

    def _promise(self, sequence: Sequence) -> None:
        self._num_open += 1
        self._num_promised += sequence.num_promised_blocks
        sequence.opened_at = sequence.last_used_s = time.monotonic()

    def _free(self, sequence: Sequence) -> None:
        self._cache.evict(sequence)
        self._num_promised -= sequence.num_promised_blocks
        self._num_open -= 1
        self._mean_life_s += (time.monotonic() - sequence.opened_at - self._mean_life_s) / 16
        self._admit()

    def _admit(self) -> None:
        while self._waiters and self._can_promise(self._waiters[0].sequence):
            waiter = self._waiters.pop(0)
            waiter.admitted = True
            self._promise(waiter.sequence)
            post(waiter.loop, settle, waiter.future, None, None)

    def _leave(self, waiter: _Waiter) -> None:
        """A cancelled open: its turn may have come in the very moment of the cancellation."""
        with self._lock:
            if waiter.admitted:
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

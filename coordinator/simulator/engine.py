"""A worker as its coordinator sees it: pass after pass, each over all that is ready, as `outrider.lm.engine` does."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol


class PassCost(Protocol):
    """ms of a pass over so many rows and cached tokens of so many sequences."""

    def __call__(self, num_rows: int, num_context_tokens: int, num_sequences: int) -> float: ...


class Line(NamedTuple):
    """base + per row + per cached token, at any load."""

    base_ms: float
    ms_per_row: float = 0.0
    ms_per_context_token: float = 0.0

    def __call__(self, num_rows: int, num_context_tokens: int, num_sequences: int) -> float:
        return self.base_ms + self.ms_per_row * num_rows + self.ms_per_context_token * num_context_tokens


class Clock:
    """What happens when: callbacks in the order of their times, ms."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._ties = itertools.count()

    def after(self, ms: float, callback: Callable[[Any], None], argument: Any = None) -> None:
        heapq.heappush(self._events, (self.now + ms, next(self._ties), callback, argument))

    @property
    def num_waiting(self) -> int:
        """Events to come."""
        return len(self._events)

    def step(self) -> None:
        """The next event."""
        self.now, _, callback, argument = heapq.heappop(self._events)
        callback(argument)


class Work:
    """A forward of `num_rows` rows in each of `num_passes` passes: a verification, drafts or a plain run."""

    __slots__ = (
        "arrived",
        "done",
        "end_pass",
        "num_batch_rows",
        "num_context_tokens",
        "num_passes",
        "num_rows",
        "queue_ms",
    )

    def __init__(self, num_rows: int, num_passes: int, num_context_tokens: int, done: Callable[[Work], None]) -> None:
        self.num_rows = num_rows
        self.num_passes = num_passes
        self.num_context_tokens = num_context_tokens
        self.done = done
        self.arrived = 0.0
        self.end_pass = 0
        """Number of the pass that it ends with, once it is in one."""
        self.queue_ms = 0.0
        """From its arrival to the start of its first pass."""
        self.num_batch_rows = 0.0
        """Rows of its passes, those of others included, in the mean; once it is done."""


def _nobody(work: Work) -> None:
    """Waits for it."""


class Device:
    """What passes run on. Engines that share one take turns."""

    def __init__(self) -> None:
        self.is_busy = False
        self.engines: list[Engine] = []

    def next_after(self, engine: Engine) -> None:
        """The turn goes round."""
        place = self.engines.index(engine) + 1
        for other in (*self.engines[place:], *self.engines[:place]):
            if other.start():
                return


class Engine:
    """Work joins between passes and leaves with its last one; what is too much for a pass waits in order."""

    def __init__(
        self,
        clock: Clock,
        device: Device,
        cost: Callable[[], PassCost],
        rng: random.Random,
        *,
        jitter: float,
        max_rows: int,
    ) -> None:
        """cost: what a pass takes, asked for anew each time. jitter: passes take that share more or less, at most."""
        self.name = ""
        self.num_passes = 0
        self.num_held = 0
        """Sequences that wait or compute."""
        self._clock = clock
        self._device = device
        self._cost = cost
        self._rng = rng
        self._jitter = jitter
        self._max_rows = max_rows
        self._waiting: deque[Work] = deque()
        self._ending: dict[int, list[Work]] = {}
        self._busy_ms = self._ends_at = 0.0
        self._rows = self._context = self._sequences = 0
        self._num_rows = 0
        """Of all passes."""
        device.engines.append(self)

    @property
    def busy_ms(self) -> float:
        """So far: of a pass under way what has gone by."""
        return self._busy_ms - max(0.0, self._ends_at - self._clock.now)

    def submit(self, work: Work) -> None:
        work.arrived = self._clock.now
        self.num_held += 1
        self._waiting.append(work)
        if not self._device.is_busy:
            self.start()

    def drop(self, work: Work) -> int:
        """The work ends with the pass under way, or without one, and `done` is not called. How many of its passes are
        left out."""
        work.done = _nobody
        if not work.end_pass:
            self._waiting.remove(work)
            self.num_held -= 1
            return work.num_passes
        num_left = work.end_pass - self.num_passes - 1
        if num_left > 0:
            self._ending[work.end_pass].remove(work)
            work.end_pass, work.num_passes = self.num_passes + 1, work.num_passes - num_left
            self._ending.setdefault(work.end_pass, []).append(work)
        return max(0, num_left)

    def start(self) -> bool:
        """Begins a pass; False when there is nothing to compute."""
        while self._waiting and (not self._sequences or self._rows + self._waiting[0].num_rows <= self._max_rows):
            work = self._waiting.popleft()
            work.end_pass = self.num_passes + work.num_passes
            work.queue_ms = self._clock.now - work.arrived
            work.num_batch_rows = -self._num_rows
            self._ending.setdefault(work.end_pass, []).append(work)
            self._sequences += 1
            self._rows += work.num_rows
            self._context += work.num_context_tokens + work.num_rows
        if not self._sequences:
            return False
        ms = self._cost()(self._rows, self._context, self._sequences)
        if self._jitter:
            ms *= 1 + self._jitter * (2 * self._rng.random() - 1)
        self._device.is_busy = True
        self._busy_ms += ms
        self._ends_at = self._clock.now + ms
        self._clock.after(ms, self._end)
        return True

    def _end(self, _: None) -> None:
        self.num_passes += 1
        self._num_rows += self._rows
        # a run's context grows by a token with each pass
        self._context += self._rows
        for work in self._ending.pop(self.num_passes, ()):
            self.num_held -= 1
            self._sequences -= 1
            self._rows -= work.num_rows
            self._context -= work.num_context_tokens + work.num_rows * (1 + work.num_passes)
            work.num_batch_rows = (work.num_batch_rows + self._num_rows) / work.num_passes
            work.done(work)
        self._device.is_busy = False
        self._device.next_after(self)

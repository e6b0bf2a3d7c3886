"""When a draft worker that streams have waited for in vain is left alone, and when it is tried again.

What it has cost a stream on average is a level, in seconds of waiting, that drains by a small share of the time. It
may rise to a budget; from there on the circuit is open, until it has drained or `max_open_s` is over. Then one stream
tries: so a worker that fails now and then, however often it recovers, costs no more than that share. The clock is
passed in; seconds on any scale.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum

BUDGET_S = 0.5
"""Of waiting that one incident may cost, or several."""
MIN_COST_S = 0.1
"""Of a failure, however soon it was known: the session is opened anew and its text computed again."""
MIN_OPEN_S = 1.0
"""The first time; after each try that fails, or comes to nothing soon, twice as long as before at least."""
JITTER = 0.25
"""An open time is longer by up to this part, so that coordinators do not try all at once."""
TRIAL_S = 5.0
"""A stream that tries has so long to tell how it went; then another one may."""
NUM_TRIAL_SUCCESSES = 4
"""Rounds in time that close the circuit."""


class Circuit(Enum):
    """CLOSED: anybody may ask the worker. OPEN: nobody. HALF_OPEN: one stream tries."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """lost_share: of the time, that may be lost in the long run; 1: the circuit stays closed. max_open_s: jitter comes
    on top."""

    lost_share: float = 0.02
    max_open_s: float = 60.0


class CircuitBreaker:
    """Of one worker, for all streams of this coordinator. `random` gives [0, 1)."""

    def __init__(self, limits: BreakerLimits | None = None, random: Callable[[], float] = random.random) -> None:
        self._limits = limits or BreakerLimits()
        self._random = random
        self._level_s = 0.0
        self._level_at = 0.0
        self._num_streams = 0.0
        """At most of late: those that a worker loses go one by one."""
        self._open_until: float | None = None
        """None: the circuit is closed."""
        self._open_s = 0.0
        """How long it was open last, without jitter."""
        self._closed_at = float("-inf")
        self._trial: Hashable = None
        self._trial_until = float("-inf")
        self._num_successes = 0
        self.num_openings = 0

    def circuit(self, now: float) -> Circuit:
        if self._open_until is None:
            return Circuit.CLOSED
        return Circuit.OPEN if now < self._open_until else Circuit.HALF_OPEN

    def open_s(self, now: float) -> float:
        """Time until the worker is tried again; 0 where it may be."""
        return 0.0 if self._open_until is None else max(0.0, self._open_until - now)

    def is_free(self, now: float) -> bool:
        """Whether a stream that asks next would be let through."""
        if self._open_until is None:
            return True
        return now >= self._open_until and (self._trial is None or now >= self._trial_until)

    def admits(self, who: Hashable, now: float) -> bool:
        """Whether this stream may ask the worker now. In a half-open circuit it is the one that tries, from now on."""
        if self._open_until is None:
            return True
        if self.is_free(now):
            self._trial, self._trial_until = who, now + TRIAL_S
        return now >= self._open_until and self._trial == who

    def failed(self, now: float, lost_s: float = 0.0, num_streams: int = 1, is_cold: bool = False) -> None:
        """One of `num_streams` has lost the worker, or has given up waiting for it after `lost_s`. is_cold: of the
        first thing that it asked there, which waits for its prompt's pass and for whatever a process does but once:
        that costs what it costs, and alone it is no proof of a worker that goes on so."""
        self._num_streams = max(num_streams, self._num_streams * 0.5 ** max(0.0, now - self._level_at), 1.0)
        before_s = self._drained(now)
        self._level_s = before_s + max(lost_s, MIN_COST_S) / self._num_streams
        self._level_at = now
        circuit = self.circuit(now)
        if circuit is Circuit.OPEN:
            return  # streams that asked before it was
        is_on_trial = circuit is Circuit.HALF_OPEN or now < self._closed_at + self._open_s
        is_proof = self._level_s >= BUDGET_S and not (is_cold and before_s < MIN_COST_S)
        if self._limits.lost_share < 1 and (is_on_trial or is_proof):
            least_s = 2 * self._open_s if is_on_trial else MIN_OPEN_S
            self._open(now, max(least_s, self._level_s / self._limits.lost_share))

    def succeeded(self, now: float) -> None:
        """The worker has answered a stream in time."""
        if self.circuit(now) is not Circuit.HALF_OPEN:
            return
        self._num_successes += 1
        if self._num_successes >= NUM_TRIAL_SUCCESSES:
            self._open_until, self._trial, self._closed_at = None, None, now

    def _open(self, now: float, open_s: float) -> None:
        self._num_successes, self._trial = 0, None
        self._open_s = min(open_s, self._limits.max_open_s)
        self._open_until = now + self._open_s * (1 + JITTER * self._random())
        self.num_openings += 1

    def _drained(self, now: float) -> float:
        return max(0.0, self._level_s - self._limits.lost_share * max(0.0, now - self._level_at))

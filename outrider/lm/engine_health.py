"""Whether an engine still computes: passes that fail or hang are no single stream's, and what comes next fails too.

A card that has lost its context answers every pass with an error, a rank that is gone leaves the others waiting for
ever; the process lives on with both, and answers whoever asks. Written by the engine's thread, read by any.
"""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_FAILED_PASSES = 3
"""In a row: one, or two, may be a stream's own fault, which is then tried alone elsewhere."""
REST_S = 30.0
"""Then the engine is left alone for so long; one more that fails, and it is again."""
MAX_PASS_S = 120.0
"""A pass that takes longer hangs."""


class EngineHealth:
    """Of one engine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_at: float | None = None
        self._num_failed = 0
        self._failed_at = 0.0
        self._ended = ""

    def begins(self) -> None:
        """A pass."""
        self._began_at = self._clock()

    def passed(self) -> None:
        """It was computed."""
        self._began_at, self._num_failed = None, 0

    def failed(self) -> None:
        """It was not."""
        self._began_at, self._failed_at = None, self._clock()
        self._num_failed += 1

    def ended(self, why: str) -> None:
        """There will be no other pass."""
        self._ended = why

    def fault(self) -> str:
        """Why nobody should come now; empty: there is nothing wrong."""
        if self._ended:
            return self._ended
        began_at, now = self._began_at, self._clock()
        if began_at is not None and now - began_at > MAX_PASS_S:
            return f"a model pass has taken {now - began_at:.0f} s and has not ended"
        if self._num_failed >= MAX_FAILED_PASSES and now - self._failed_at < REST_S:
            return f"the last {self._num_failed} model passes failed"
        return ""

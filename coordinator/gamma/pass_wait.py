"""The wait for a pass of a busy target, by how long a stream was away.

Passes of a busy target follow one another without a gap. A stream whose pass has ended is away for its drafts and the
network, and whichever pass begins next after it is back takes it in: so it misses whole passes of the others, and time
away costs nothing until it makes the stream miss one more. The longer it is away, the shorter it waits:

    away + wait = P * (number of passes missed),    passes missed = away / P, rounded up

Passes are not all of one length: those seen of late, whichever stream they were of, say how often a time away just
fits. On an idle target there is no wait. How far a target is the one or the other is learnt: waits as they were over
those that a busy target would have had; and how much longer waits are after how long away, where that was seen of late.
"""

from __future__ import annotations

import math
from collections import deque

DECAY = 0.95
"""Of waits, with each pass."""
NUM_PASSES, MAX_REPORTS = 32, 512
"""As of late, and of these by streams: each stream of a pass tells of it."""
QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Of the lengths of passes, that stand for all of them."""
BIN = 0.125
"""Of the time away, in passes."""
SEEN_DECAY = 0.98
"""The same, of waits by the time away."""
PRIOR_WEIGHT = 3.0
"""Waits that the arithmetic counts for beside those seen."""


class PassWait:
    """At one target."""

    def __init__(self) -> None:
        self._passes: deque[tuple[float, float]] = deque()
        """(ms, share of a pass), a stream each."""
        self._num_passes = 0.0
        """Sum of those shares."""
        self._share = 1.0
        """Of the last one."""
        self._num_new = 0.0
        """Passes since the lengths were found."""
        self._lengths: list[float] = []
        """At the quantiles; empty: to be found anew."""
        self._waited = self._busy_waits = 0.0
        self._longer: dict[int, tuple[float, float]] = {}
        """By time away: sums of how much longer waits were than the arithmetic says, in passes, and of observations;
        decayed."""

    def passed(self, pass_ms: float, num_streams: float) -> None:
        """A pass, as one of so many streams in it has seen it: each of them tells of it."""
        if pass_ms > 0:
            self._share = 1 / num_streams
            self._passes.append((pass_ms, self._share))
            self._num_passes += self._share
            while self._num_passes > NUM_PASSES or len(self._passes) > MAX_REPORTS:
                self._num_passes -= self._passes.popleft()[1]
            self._num_new += self._share
            if self._num_new > 0.99:  # of each pass but once
                self._lengths, self._num_new = [], 0.0

    def observe(self, away_ms: float, queue_ms: float) -> None:
        """The last pass was asked for by a stream that had been away for so long."""
        pass_ms = self.pass_ms
        if pass_ms <= 0:
            return
        busy_wait_ms, place = self._busy_wait_ms(away_ms), int(away_ms / pass_ms / BIN)
        kept, seen_kept = DECAY**self._share, SEEN_DECAY**self._share
        self._waited = kept * self._waited + queue_ms
        self._busy_waits = kept * self._busy_waits + busy_wait_ms
        self._longer = {k: (seen_kept * m, seen_kept * n) for k, (m, n) in self._longer.items() if n > 0.01}
        longer, seen = self._longer.get(place, (0.0, 0.0))
        self._longer[place] = longer + (queue_ms - self.busy * busy_wait_ms) / pass_ms, seen + 1

    @property
    def pass_ms(self) -> float:
        """Of a pass as of late."""
        lengths = self._known_lengths()
        return sum(lengths) / len(lengths) if lengths else 0.0

    @property
    def busy(self) -> float:
        """0 to 1: how far waits are those of a target whose passes follow one another."""
        return min(1.0, self._waited / self._busy_waits) if self._busy_waits else 0.0

    def ms(self, away_ms: float) -> float:
        """To expect after so long away."""
        pass_ms = self.pass_ms
        if pass_ms <= 0 or not self._busy_waits:
            return 0.0
        longer, seen = self._longer.get(int(away_ms / pass_ms / BIN), (0.0, 0.0))
        return max(0.0, self.busy * self._busy_wait_ms(away_ms) + longer * pass_ms / (seen + PRIOR_WEIGHT))

    def _busy_wait_ms(self, away_ms: float) -> float:
        wait_ms = 0.0
        lengths = self._known_lengths()
        for length in lengths:  # asked for at each γ of each choice
            wait_ms += max(1, math.ceil(away_ms / length)) * length - away_ms
        return wait_ms / len(lengths)

    def _known_lengths(self) -> list[float]:
        if not self._lengths and self._passes:
            below, total = 0.0, sum(weight for _, weight in self._passes)
            wanted = [share * total for share in QUANTILES]
            for ms, weight in sorted(self._passes):
                below += weight
                while wanted and below >= wanted[0]:
                    self._lengths.append(ms)
                    del wanted[0]
        return self._lengths

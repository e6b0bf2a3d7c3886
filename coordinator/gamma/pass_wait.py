"""The wait for a pass of a busy target, by how long a stream was away.

Passes of a busy target follow one another without a gap. A stream whose pass has ended is away for its drafts and the
network, and whichever pass begins next after it is back takes it in: so it misses whole passes of the others, and time
away costs nothing until it makes the stream miss one more. The longer it is away, the shorter it waits:

    away + wait = P * (number of passes missed),    passes missed = away / P, rounded up

On an idle target there is no wait. How far a target is the one or the other is learnt: waits as they were over those
that a busy target would have had; and how many passes are missed after how long away, where that was seen of late.
"""

from __future__ import annotations

import math

DECAY = 0.95
LENGTHS = (0.75, 0.85, 0.95)
"""Of the passes that are missed, in those that are seen: they vary, and those that one is not in hold fewer rows."""
BIN = 0.125
"""Of the time away, in passes."""
SEEN_DECAY = 0.98
PRIOR_WEIGHT = 3.0
"""Waits that the arithmetic counts for beside those seen."""


class PassWait:
    """At one target."""

    def __init__(self) -> None:
        self._waited = self._busy_waits = 0.0
        self._missed: dict[int, tuple[float, float]] = {}
        """By time away: sums of passes missed, and of observations; decayed."""

    def observe(self, away_ms: float, queue_ms: float, pass_ms: float) -> None:
        """A pass that was asked for by a stream that had been away for so long."""
        if pass_ms <= 0:
            return
        self._waited = DECAY * self._waited + queue_ms
        self._busy_waits = DECAY * self._busy_waits + _busy_wait_ms(away_ms, pass_ms)
        self._missed = {k: (SEEN_DECAY * m, SEEN_DECAY * n) for k, (m, n) in self._missed.items() if n > 0.01}
        missed, seen = self._missed.get(int(away_ms / pass_ms / BIN), (0.0, 0.0))
        self._missed[int(away_ms / pass_ms / BIN)] = (missed + (away_ms + queue_ms) / pass_ms, seen + 1)

    @property
    def busy(self) -> float:
        """0 to 1: how far waits are those of a target whose passes follow one another."""
        return min(1.0, self._waited / self._busy_waits) if self._busy_waits else 0.0

    def ms(self, away_ms: float, pass_ms: float) -> float:
        """To expect after so long away. pass_ms: of a pass as of late."""
        if pass_ms <= 0 or not self._busy_waits:
            return 0.0
        assumed_ms = self.busy * _busy_wait_ms(away_ms, pass_ms)
        missed, seen = self._missed.get(int(away_ms / pass_ms / BIN), (0.0, 0.0))
        wait_ms = (missed * pass_ms + PRIOR_WEIGHT * (away_ms + assumed_ms)) / (seen + PRIOR_WEIGHT) - away_ms
        return max(0.0, wait_ms)


def _busy_wait_ms(away_ms: float, pass_ms: float) -> float:
    missed = sum(max(1, math.ceil(away_ms / (length * pass_ms))) for length in LENGTHS) / len(LENGTHS)
    return max(0.0, missed * pass_ms - away_ms)

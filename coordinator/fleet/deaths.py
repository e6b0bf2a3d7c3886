"""Workers that were lost of late: whether they die anyway, whatever a stream does that is suspected of it. Pure.

What is counted are processes, by their incarnations, so that one that answers again was none, and one that several
streams have lost was one. Those that were found to be killed by a stream say nothing about others.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any

MEMORY_S = 60.0
MAX_REMEMBERED = 256
"""Processes, of each kind; the oldest are forgotten first."""


class Deaths:
    """Of all workers of one kind of one coordinator."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lost_at: OrderedDict[str, float] = OrderedDict()
        self._explained: OrderedDict[str, None] = OrderedDict()

    def lost(self, incarnation: str) -> None:
        """Its connection broke, or it fell silent. Harmless when repeated."""
        if incarnation and incarnation not in self._explained:
            self._lost_at.setdefault(incarnation, self._clock())
            bound(self._lost_at)

    def answers(self, incarnation: str) -> None:
        """It was not dead."""
        self._lost_at.pop(incarnation, None)
        self._explained.pop(incarnation, None)

    def explained(self, incarnations: Collection[str]) -> None:
        """A stream killed these."""
        for incarnation in incarnations:
            self._lost_at.pop(incarnation, None)
            self._explained[incarnation] = None
        bound(self._explained)

    def has_died(self, incarnation: str) -> bool:
        """Whether it was lost and has not answered since."""
        return incarnation in self._lost_at or incarnation in self._explained

    def is_explained(self, incarnation: str) -> bool:
        """Whether a stream is known to have killed it."""
        return incarnation in self._explained

    def num_besides(self, incarnations: Collection[str]) -> int:
        """Of late, of other processes than these, and for no known reason."""
        since = self._clock() - MEMORY_S
        return sum(at >= since and lost not in incarnations for lost, at in self._lost_at.items())


def bound(known: OrderedDict[str, Any]) -> None:
    """Forgets the oldest."""
    while len(known) > MAX_REMEMBERED:
        known.popitem(last=False)

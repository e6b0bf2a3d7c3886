"""What the heads of all sessions hold, bounded: a session that needs more takes it from those idle longest."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Protocol


class Holder(Protocol):
    """A session with something to lose."""

    closed: bool

    def evict(self) -> None:
        """Lose all of it; what is lost has to come again. On the thread that its own work is done on."""


class HeadMemory:
    """At most `max_bytes`. Sessions claim and are evicted on the engine's thread, where one works at a time; they
    release on any."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: OrderedDict[Holder, int] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0
        self.num_evictions = 0

    def claim(self, holder: Holder, num_bytes: int) -> bool:
        """Room for `holder` to hold so much in all, which makes it the last to be evicted. False: there is not so much
        for anybody; nothing has changed."""
        if num_bytes > self._max_bytes:
            return False
        with self._lock:
            if not holder.closed:
                self._set(holder, num_bytes)
            while self.num_bytes > self._max_bytes:
                idle = next(iter(self._held))
                idle.evict()
                self._set(idle, 0)
                self.num_evictions += 1
        return True

    def settle(self, holder: Holder, num_bytes: int) -> None:
        """What it holds now, no more than it has claimed."""
        with self._lock:
            if holder in self._held:
                self._set(holder, num_bytes)

    def release(self, holder: Holder) -> None:
        """It is closed, and will hold nothing."""
        self.settle(holder, 0)

    def _set(self, holder: Holder, num_bytes: int) -> None:
        """Whoever is set stands behind all others."""
        self.num_bytes += num_bytes - self._held.pop(holder, 0)
        if num_bytes:
            self._held[holder] = num_bytes

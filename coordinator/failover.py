"""What a stream does about a lost target worker: why it was lost, whom to ask next and when, and when to give up."""

from __future__ import annotations

import random

from coordinator.peer import WORKER_LOST, WORKER_SILENT, WORKER_STOPPED
from outrider.errors import DRAINING, PASS_FAILED, Aborted, OutriderError, ResourceExhausted, Unavailable

DIED = "died"
SILENT = "silent"
STOPPED = "stopped"
DRAINED = "drained"
REFUSED = "refused"
FULL = "full"
SESSION = "session"
FAILED = "failed"
CAUSES = (DIED, SILENT, STOPPED, DRAINED, REFUSED, FULL, SESSION, FAILED)
"""Of a lost session: the connection broke; nothing was heard; the worker ended its streams; it drains; it takes no
streams now; it has no room; it has forgotten this session alone; its model's pass failed."""
SUDDEN = (DIED, SILENT)
"""Those that nobody announced."""
DEADLY = (*SUDDEN, FAILED)
"""Those that what was being computed may have caused."""
_BY_REASON = {WORKER_LOST: DIED, WORKER_SILENT: SILENT, WORKER_STOPPED: STOPPED, DRAINING: DRAINED, PASS_FAILED: FAILED}
MAX_FORGOTTEN = 3
"""Sessions in a row that workers may forget without a token between."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0
LAST_WORDS_S = 0.25
"""A waiting stream gives up so much before its client's deadline, or a tenth of its time: the client is to hear why."""


def cause_of(error: OutriderError) -> str:
    """Why a session was lost; empty where another worker would say the same."""
    if error.reason == DRAINING:
        return DRAINED
    if isinstance(error, Aborted):
        return SESSION
    if isinstance(error, ResourceExhausted):
        return FULL
    return _BY_REASON.get(error.reason, REFUSED) if isinstance(error, Unavailable) else ""


class Failover:
    """The losses of one stream since its last token. Times are the event loop's, in seconds."""

    def __init__(self) -> None:
        self.failed: set[str] = set()
        """Addresses that others are to be preferred to."""
        self._num_losses = 0
        self._num_forgotten = 0
        self._causes: set[str] = set()
        self._lost_at = 0.0
        self._error: OutriderError | None = None

    def lost(self, error: OutriderError, cause: str, address: str, now: float) -> None:
        """Raises the error where no further worker should be asked."""
        if not self._num_losses:
            self._lost_at = now
        self._num_losses += 1
        self._causes.add(cause)
        self._error = error
        if cause == SESSION:
            self._num_forgotten += 1
            if self._num_forgotten > MAX_FORGOTTEN:
                raise error
        else:
            self.failed.add(address)

    def recovered(self, now: float) -> float | None:
        """A token came. Returns how long none could since the first loss; None: nothing had been lost."""
        if not self._num_losses:
            return None
        self._num_losses = self._num_forgotten = 0
        self.failed.clear()
        self._causes.clear()
        return now - self._lost_at

    @property
    def was_only_full(self) -> bool:
        """Whether all that was met since the last token is workers without room."""
        return self._causes == {FULL}

    def pause_s(self) -> float:
        """Before the next worker is asked: none at first, then longer and longer, never the same for two streams."""
        if self._num_losses < 2:
            return 0.0
        asked_s = self._error.retry_delay_s if isinstance(self._error, ResourceExhausted) else None
        longest_s = max(FIRST_PAUSE_S * 2.0 ** min(self._num_losses - 2, 16), asked_s or 0.0)
        return random.uniform(0.5, 1.0) * min(MAX_PAUSE_S, longest_s)

    def gives_up_at(self, wait_s: float, deadline: float | None) -> float:
        """When to stop looking for a worker: close to the client's deadline, or `wait_s` after the first loss where it
        has none."""
        if deadline is None:
            return self._lost_at + wait_s
        return deadline - min(LAST_WORDS_S, max(0.0, deadline - self._lost_at) / 10)

    def gave_up(self, now: float) -> OutriderError:
        """What the client is told: that there is no room, where that is all; or that no worker is left."""
        if self.was_only_full and self._error is not None:
            return self._error
        lost = self._error.message if self._error is not None else "none was there"
        return Unavailable(
            f"no target worker could go on with the stream for {now - self._lost_at:.1f} s; the last one: {lost}",
            reason="NO_TARGET_WORKER",
            retry_delay_s=MAX_PAUSE_S,
        )

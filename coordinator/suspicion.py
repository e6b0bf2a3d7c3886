"""Whether a request kills the target workers that compute it, or was only there when one died.

A worker's death proves nothing against one of its streams: all that it was computing were there. So each of them is a
suspect, and is opened on the next worker to be computed alone among suspects, of all coordinators, until it has the
tokens that were being decided at the death (`target_worker.suspects`); streams without suspicion go on beside it. One
that gets them is cleared. One whose worker dies in that time, too, was the only stream present at both deaths that had
not come past them: it has killed both, fails alone, and no third worker is asked. Those that waited for their turn are
as suspected as before, and no more. One in whose worker another suspect's turn has come since is past its trial, though
it has not heard of all its tokens (`coordinator.fleet.trials`); of turns of other coordinators' streams nobody tells.

Unless workers die anyway: where others were lost of late, at which the stream was not present and that no stream is
known to have killed (`coordinator.fleet.deaths`), a machine that failed or a wave of preemptions is as good a reason,
and it is tried alone once more.

What dies at the same token every time is found by that. What kills a little later each time is not, and is stopped by
the number of deaths with hardly a token between.
"""

from __future__ import annotations

import math

TRIAL_TOKENS = 4
"""Of a run: a worker that dies may have decided so many that were never heard of, and those of LATE_MS."""
LATE_MS = 250.0
"""On a busy machine news of a token may be so late, and are lost with the worker that sent them."""
MAX_TRIAL_TOKENS = 64
CLOSE_TOKENS = 32
MAX_CLOSE_DEATHS = 8
"""In a row, with fewer than CLOSE_TOKENS tokens from each to the next."""
MAX_SPARED = 1
"""Times that the deaths of others speak for it, in such a row."""


def trial_tokens(num_left: int, token_ms: float) -> int:
    """Of a run that has so many tokens left and takes so long for each (0: not known): it may have killed the worker
    with any token that was decided unheard, so it is on trial until it is past them all."""
    num_late = math.ceil(LATE_MS / token_ms) if token_ms else 0
    return min(num_left, max(TRIAL_TOKENS, num_late), MAX_TRIAL_TOKENS)


class Suspicion:
    """Of one stream."""

    def __init__(self) -> None:
        self.is_suspect = False
        self._num_trial_tokens = 0
        """Left; 0: it is not on trial."""
        self._num_close_deaths = self._num_spared = 0
        self._died_at = -CLOSE_TOKENS
        self.present_at: set[str] = set()
        """Incarnations of the workers of these deaths."""

    def on_trial(self, num_tokens: int) -> None:
        """Its turn has come: from now on it is computed alone among suspects, until it has so many tokens."""
        self._num_trial_tokens = num_tokens

    def answered(self, num_tokens: int) -> None:
        """So many tokens more stand."""
        self._num_trial_tokens -= min(num_tokens, self._num_trial_tokens)
        if not self._num_trial_tokens:
            self.cleared()

    def cleared(self) -> None:
        """What was asked when a worker died has been answered by another one."""
        self.is_suspect, self._num_trial_tokens = False, 0

    def died(self, length: int, incarnation: str) -> bool:
        """A worker died, or fell silent, while it computed the stream, whose log had this length. Returns whether that
        was the stream's doing, as far as its own deaths tell."""
        if length - self._died_at >= CLOSE_TOKENS:
            self._num_close_deaths = self._num_spared = 0
            self.present_at.clear()
        self._num_close_deaths += 1
        self._died_at = length
        self.present_at.add(incarnation)
        was_on_trial = self._num_trial_tokens > 0
        self.is_suspect, self._num_trial_tokens = True, 0
        return was_on_trial or self._num_close_deaths > MAX_CLOSE_DEATHS

    def is_spared(self, num_other_deaths: int) -> bool:
        """Whether it gets the benefit of the doubt: so many workers died of late without it."""
        if not num_other_deaths or self._num_spared >= MAX_SPARED:
            return False
        self._num_spared += 1
        return True

    def interrupted(self) -> None:
        """Its session ended in another way: its trial, if there was one, is to be held again."""
        self._num_trial_tokens = 0

"""Streams that leave a target in one pass and come back for one: all of them away at once, it idles meanwhile.

Such a crowd stays one by itself. It drafts together, so that each of it is away for as long as the others, and who is
somewhat earlier has a pass alone and is caught up with by its end; no γ mends it that all of them take. So where a
target was idle for long enough, every second stream of a crowd comes back earlier once, by as much as a pass of that
half takes: it is served while the others are away, and from then on either half drafts during the other one's pass.

How long a target idles is what a round took less the passes that the streams of this coordinator have told of
meanwhile. Passes of other coordinators' streams alone are taken for idle time. So a crowd that has parted is left alone
for a while, for longer each time that it was in vain.
"""

from __future__ import annotations

import math

WINDOW_ROUNDS = 2
"""Of every stream at the target, that the idle time is a mean of."""
REST_ROUNDS = 8
"""Of every stream of a crowd that has parted."""
MAX_PATIENCE = 32
"""Times that number."""
MIN_GAIN = 0.1
"""Of a round, by a pass over half of the crowd: less is not worth a round with fewer drafts."""


class Crowd:
    """At one target."""

    def __init__(self) -> None:
        self.num_streams = 1.0
        """In the last pass."""
        self.passes_ms = 0.0
        """Of all passes there were, each counted once by all its streams together."""
        self._idle_ms = 0.0
        self._num_rounds = 0.0
        self._num_leaving = 0
        """Streams of a crowd that parts which have not chosen yet."""
        self._is_early = False
        """Whether the last one of these is to come back earlier."""
        self._num_resting = 0.0
        """Rounds to see before a crowd parts again."""
        self._least_idle_ms = 0.0
        """Since the crowd has parted last."""
        self._patience = 1

    def passed(self, ms: float, num_streams: float) -> None:
        """Passes of so many streams, as one of them has seen them."""
        self.num_streams = num_streams
        self.passes_ms += ms / num_streams

    def observe(self, idle_ms: float, num_streams: float) -> None:
        """A round of one of so many streams, and for how long of it there was no pass."""
        kept = 1 - 1 / (WINDOW_ROUNDS * max(1.0, num_streams))
        self._idle_ms = kept * self._idle_ms + idle_ms
        self._num_rounds = kept * self._num_rounds + 1
        self._num_resting = max(0.0, self._num_resting - 1)
        self._least_idle_ms = min(self._least_idle_ms, self.idle_ms)

    @property
    def idle_ms(self) -> float:
        """Of a round, as of late."""
        return self._idle_ms / self._num_rounds if self._num_rounds else 0.0

    def may_part(self, pass_ms: float) -> bool:
        """Or is parting. pass_ms: of half of it."""
        return bool(self._num_leaving) or (not self._num_resting and self.idle_ms >= pass_ms)

    def sends_early(self, pass_ms: float) -> bool:
        """Whether the stream that leaves the last pass now is to come back earlier than others. pass_ms: as above."""
        if self._num_leaving:
            self._num_leaving -= 1
            self._is_early = not self._is_early
            return self._is_early
        if not self.may_part(pass_ms):
            return False
        was_in_vain = self._least_idle_ms >= pass_ms
        self._patience = min(2 * self._patience, MAX_PATIENCE) if was_in_vain else 1
        self._num_leaving = round(self.num_streams) - 1
        self._num_resting = REST_ROUNDS * self._patience * self.num_streams
        self._least_idle_ms = math.inf
        self._is_early = True
        return True

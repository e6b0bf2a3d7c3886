"""What a stream takes from the others of its target, so that γ falls by itself as a target fills up.

A pass takes a + b * rows + c * context ms, and everybody at the target waits for it: those in the pass, and those who
have come meanwhile. So a row lengthens the round of each of them by b ms, in which it would have committed tokens at
its own rate:

    taken = (other streams at the target) * (tokens per ms of a stream) * ms added

A round is judged by its tokens less those taken, per ms of its own: what it adds to the goodput of the whole target.
Alone nothing is taken, and the stream's own speed is all that counts. On a full target a draft must be accepted with a
chance of about b * goodput to be worth its row: streams with high acceptance keep more.

How many others there are is read off the target's own verdicts, so that streams of other coordinators count too: rows
of a pass beside one's own, over the rows of a stream, tell who is in the pass; the wait for the engine in passes, how
many are on their way in for each of them (Little's law).
"""

from __future__ import annotations

from coordinator.gamma.crowd import Crowd
from coordinator.gamma.pass_wait import PassWait
from outrider.median import Median

MIN_WINDOW, REPORTS_A_STREAM = 20, 8
"""Reports that means are taken over: so many of each stream at the target, as plain runs are told of seldom."""
WAITED_SHARE = 0.05
"""Of a pass: a longer wait was one for the end of another."""
MAX_TAKEN_SHARE = 0.9
"""Of its own token that a plain row may take from others: a load is known roughly, and one row must be worth it."""


class Load:
    """One target as the streams of this coordinator find it of late."""

    def __init__(self) -> None:
        self.queue = Median()
        """Wait for the engine of a pass that a message asked for, ms."""
        self.crowd = Crowd()
        self._pass_wait = PassWait()
        self.run_queue = Median()
        """The same of a run's first step; the others wait for nothing."""
        self._rows = 0.0
        self._all_rows = 0.0
        """Of passes, each pass counted once by all its streams together; so is `_streams`."""
        self._streams = 0.0
        """Sum of 1 / streams: how many passes they were."""
        self._num_waited = 0.0
        self._own_rows = 0.0
        self._num_passes = 0.0
        self._tokens = 0.0
        self._ms = 0.0
        self._num_others: float | None = None
        """As they are now, asked for at each γ of each choice."""

    def observe_passes(
        self, num_passes: int, *, own_rows: float, batch_rows: float, pass_ms: float, queue_ms: float, was_asked: bool
    ) -> None:
        """Of one pass, or of a run. own_rows, batch_rows: of a pass, own ones included in both; pass_ms: of one.
        queue_ms: before the first. was_asked: for one, by a message of its own."""
        kept, others = self._kept, max(0.0, batch_rows - own_rows)
        self._rows = kept * self._rows + num_passes * others
        self._own_rows = kept * self._own_rows + num_passes * own_rows
        self._num_passes = kept * self._num_passes + num_passes
        num_streams = 1 + others * self._num_passes / self._own_rows
        self._streams = kept * self._streams + num_passes / num_streams
        self._all_rows = kept * self._all_rows + num_passes * batch_rows / num_streams
        self._num_waited = kept * self._num_waited + (queue_ms > WAITED_SHARE * pass_ms)
        self._num_others = None
        self._pass_wait.passed(pass_ms, num_streams)
        self.crowd.passed(num_passes * pass_ms, num_streams)
        (self.queue if was_asked else self.run_queue).add(queue_ms)

    def observe_wait(self, away_ms: float, queue_ms: float) -> None:
        """Of a pass that was asked for after so long without one: drafts, networks."""
        self._num_others = None
        self._pass_wait.observe(away_ms, queue_ms)

    def wait_ms(self, away_ms: float) -> float:
        """For the engine, to expect after so long away."""
        return self._pass_wait.ms(away_ms)

    def observe_round(self, round_ms: float, passes_ms: float) -> None:
        """A round in which passes took so long in all, its own one included."""
        self.crowd.observe(round_ms - passes_ms, 1 + self.num_others)

    def observe_tokens(self, num_tokens: int, ms: float) -> None:
        """What one stream committed in a round or a run, and how long that took."""
        self._tokens = self._kept * self._tokens + num_tokens
        self._ms = self._kept * self._ms + ms

    @property
    def _kept(self) -> float:
        """Of a sum, with each report."""
        return 1 - 1 / max(MIN_WINDOW, REPORTS_A_STREAM * (1 + self.num_others))

    @property
    def other_rows(self) -> float:
        """In a pass, beside those of the stream that asks. It is in the crowded passes more often than in others."""
        return self._rows / self._num_passes if self._num_passes else 0.0

    @property
    def other_rows_of_run(self) -> float:
        """The same for a stream that is in every pass."""
        others = self.num_others
        return self._all_rows / self._streams * others / (1 + others) if self._streams else 0.0

    @property
    def tokens_per_ms(self) -> float:
        """Of a stream."""
        return self._tokens / self._ms if self._ms > 0 else 0.0

    @property
    def num_others(self) -> float:
        """Streams at the target, in a pass or waiting for one, beside one that is there."""
        if self._num_others is None:
            self._num_others = self._count_others()
        return self._num_others

    def _count_others(self) -> float:
        if not self._num_passes or not self.other_rows:
            return 0.0
        in_pass = self._num_passes / self._streams
        return in_pass + in_pass * self._num_waited / self._num_passes - 1

    def taken_per_ms(self, plain_ms: float) -> float:
        """Tokens that the others lose in each ms by which a pass grows. plain_ms: what a plain row adds to it."""
        taken = self.num_others * self.tokens_per_ms
        return min(taken, MAX_TAKEN_SHARE / plain_ms) if plain_ms > 0 else taken

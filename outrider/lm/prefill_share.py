"""How many rows of a prompt a step may take beside running streams: as many as leave their steps nearly as short.

Learned from the steps themselves. Steps without prompts give the line a + b * rows that streams alone would take; what
a step with a prompt took beyond it, per row of the prompt, is the price of a row. Below the row count from which a
processor computes rather than reads weights a row costs next to nothing, above it costs its full share, so the price is
followed from recent steps, and the share grows step by step.

Part of a step's price is not of its rows: a late part of a long prompt attends to all that stands before it. So each
step with streams earns what it may be lengthened by, a step with a prompt's rows spends what it took, and while more
was spent than earned the streams have their steps to themselves: on average they are slowed by what is aimed at.

Where more prompts wait than streams run, each that waits counts as one that runs: one stream would else keep seven
others waiting and let them have a quarter of its time.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from outrider.lm.timing import fit_line

MAX_SLOWDOWN = 1.3
"""Most that a step with a prompt's rows should take, as a multiple of the same step without them."""
AIM = 1.25
"""What is aimed at: the price of a row is known from few steps, and grows with the context."""
MIN_ROWS = 4
"""A prompt goes on at this rate at least, whatever it costs."""
MAX_GROWTH = 1.5
NUM_PLAIN_STEPS = 64
NUM_PRICES = 8
"""Steps from which the price of a row is taken: their median."""
REFIT_STEPS = 8
MAX_DEBT_STEPS = 8
"""Steps at most that the streams have to themselves between two parts of a prompt."""


class PrefillShare:
    """`rows`: of prompts, for a step in which at least as many streams run as prompts wait; MIN_ROWS to `max_rows`."""

    def __init__(self, rows: int, max_rows: int) -> None:
        """rows: what to begin with, until both kinds of steps were seen."""
        self.max_rows = max(1, max_rows)
        self.min_rows = min(MIN_ROWS, self.max_rows)
        self.rows = max(self.min_rows, min(rows, self.max_rows))
        self._plain: deque[tuple[int, float]] = deque(maxlen=NUM_PLAIN_STEPS)
        self._prices: deque[float] = deque(maxlen=NUM_PRICES)
        self._line: tuple[float, float] | None = None
        self._num_until_fit = 0
        self._debt_ms = 0.0
        self._weight = 1.0

    def weigh(self, num_prompts: int, num_streams: int) -> None:
        """Before a step: prompts that wait, and streams beside them."""
        self._weight = max(1.0, num_prompts / max(1, num_streams))

    @property
    def step_rows(self) -> int:
        """Of prompts, for the next step."""
        return min(self.max_rows, int(self.rows * self._weight))

    @property
    def is_in_debt(self) -> bool:
        """Whether the next step is the streams' alone."""
        return self._debt_ms > 0

    def observe(self, num_stream_rows: int, num_prefill_rows: int, ms: float) -> None:
        """A step and what it took."""
        if not num_stream_rows:
            return
        if not num_prefill_rows:
            self._plain.append((num_stream_rows, ms))
            self._num_until_fit -= 1
            self._debt_ms = max(0.0, self._debt_ms - self._may_take_ms(ms))
            return
        alone_ms = self._alone_ms(num_stream_rows)
        if alone_ms is None:
            return
        may_take_ms = self._may_take_ms(alone_ms)
        self._debt_ms = min(max(0.0, ms - alone_ms - may_take_ms), MAX_DEBT_STEPS * may_take_ms)
        self._prices.append(max(0.0, ms - alone_ms) / num_prefill_rows)
        if len(self._prices) == NUM_PRICES:
            self._set(alone_ms, float(np.median(self._prices)))

    def _may_take_ms(self, alone_ms: float) -> float:
        """What prompts may add to a step that streams alone would take so long for."""
        return (AIM - 1) * self._weight * alone_ms

    def _set(self, alone_ms: float, ms_per_row: float) -> None:
        """The prices are of this share: another one has to be tried before it is changed again."""
        most = self.rows * MAX_GROWTH + 1
        affordable = (AIM - 1) * alone_ms / ms_per_row if ms_per_row > 0 else most
        rows = max(self.min_rows, min(int(affordable), int(most), self.max_rows))
        if rows != self.rows:
            self.rows = rows
            self._prices.clear()

    def _alone_ms(self, num_rows: int) -> float | None:
        """What streams of so many rows take without prompts; None: never seen."""
        if not self._plain:
            return None
        if self._line is None or self._num_until_fit <= 0:
            table = np.array(self._plain, np.float64)
            (base, slope), _ = fit_line(table[:, :1], table[:, 1], np.ones(len(table)))
            self._line, self._num_until_fit = (float(base), float(slope)), REFIT_STEPS
        base, slope = self._line
        return base + slope * num_rows

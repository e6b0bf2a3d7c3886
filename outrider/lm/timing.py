"""What a pass costs, learned from the passes themselves: ms = a + b * rows + c * context, per load.

Load is the number of sequences in the pass, in buckets 1, 2, 3-4, 5-8, ...; passes that compute a prompt are a model of
their own. For a target worker the line is its verify time, with rows = drafts + 1; for a draft worker a pass of one row
a sequence is the time per drafted token. The time is the whole step: the model's pass and what the sessions' programs
do with its logits.

Robust: a Huber fit, so that a pass which met a busy machine moves little. Forgetting: the last passes of a bucket count
most, so that the line follows a machine that has become slower or faster.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import numpy as np

from outrider.lm.interface import PackedBatch
from outrider.lm.scheduler import MAX_CATCH_UP_ROWS

WINDOW = 256
"""Passes kept per bucket."""
HALF_LIFE = 64
"""A pass counts half as much as one this many passes later."""
REFIT_PASSES = 16
HUBER_K = 1.345
"""Residuals beyond this many standard deviations count linearly: 95% efficient under normal noise (Huber 1964)."""
MAD_TO_SD = 1.4826
NUM_REWEIGHTINGS = 25
MIN_SLOPE_ERRORS = 2.0
"""A slope smaller than this many of its standard errors counts as none."""

Observation = tuple[int, int, float]
"""Rows, context tokens, ms."""


@dataclass(frozen=True, slots=True)
class PassTiming:
    """One bucket's line. A slope is 0 when the passes seen do not show that time grows with it.

    base_ms + ms_per_row * rows + ms_per_context_token * context, where context counts the cached tokens and the rows of
    all sequences together. It holds between `min_rows` and `max_rows`. `spread_ms`: median distance of a pass from it.
    """

    prefill: bool
    min_sequences: int
    max_sequences: int
    base_ms: float
    ms_per_row: float
    ms_per_context_token: float
    spread_ms: float
    min_rows: int
    max_rows: int
    num_passes: int

    def ms(self, num_rows: float, num_context_tokens: float) -> float:
        """Expected time of a pass."""
        return self.base_ms + self.ms_per_row * num_rows + self.ms_per_context_token * num_context_tokens


class TimingModel:
    """Fed by the engine's thread, read by any other."""

    def __init__(self, *, window: int = WINDOW, half_life: float = HALF_LIFE) -> None:
        self._window = window
        self._half_life = half_life
        self._lock = threading.Lock()
        self._buckets: dict[tuple[bool, int], _Bucket] = {}

    def observe(self, batch: PackedBatch, ms: float) -> None:
        """A step that computed `batch`."""
        num_rows, num_context_tokens, prefill = 0, 0, False
        for segment in batch.segments:
            rows = len(segment.token_ids)
            num_rows += rows
            num_context_tokens += segment.num_cached_tokens + rows
            prefill |= rows > max(MAX_CATCH_UP_ROWS, segment.num_logits)
        key = (prefill, (len(batch.segments) - 1).bit_length())
        with self._lock:
            if key not in self._buckets:
                self._buckets[key] = _Bucket(deque(maxlen=self._window))
            self._buckets[key].add((num_rows, num_context_tokens, ms))

    def timings(self) -> tuple[PassTiming, ...]:
        """Every bucket that was seen, decodes before prefills, light load before heavy."""
        with self._lock:
            keys = sorted(self._buckets)
        return tuple(self._timing(key) for key in keys)

    def _timing(self, key: tuple[bool, int]) -> PassTiming:
        """A fit is kept until an eighth as many passes again came in, at most REFIT_PASSES: coordinators ask often."""
        with self._lock:
            bucket = self._buckets[key]
            passes, num_passes, fitted = list(bucket.passes), bucket.num_passes, bucket.fitted
        if fitted is not None and num_passes - fitted.num_passes <= min(REFIT_PASSES, fitted.num_passes // 8):
            return fitted
        bucket.fitted = self._fit(key, passes, num_passes)
        return bucket.fitted

    def _fit(self, key: tuple[bool, int], passes: list[Observation], num_passes: int) -> PassTiming:
        prefill, power = key
        table = np.array(passes, np.float64)
        weights = 0.5 ** (np.arange(len(table))[::-1] / self._half_life)
        coefficients, spread_ms = fit_line(table[:, :2], table[:, 2], weights)
        return PassTiming(
            prefill=prefill,
            min_sequences=1 if power == 0 else (1 << power - 1) + 1,
            max_sequences=1 << power,
            base_ms=float(coefficients[0]),
            ms_per_row=float(coefficients[1]),
            ms_per_context_token=float(coefficients[2]),
            spread_ms=spread_ms,
            min_rows=int(table[:, 0].min()),
            max_rows=int(table[:, 0].max()),
            num_passes=num_passes,
        )


class _Bucket:
    __slots__ = ("fitted", "num_passes", "passes")

    def __init__(self, passes: deque[Observation]) -> None:
        self.passes = passes
        self.num_passes = 0
        self.fitted: PassTiming | None = None

    def add(self, observation: Observation) -> None:
        self.passes.append(observation)
        self.num_passes += 1


def expected_ms(
    timings: tuple[PassTiming, ...], *, num_rows: float, num_context_tokens: float, num_sequences: int = 1
) -> float | None:
    """Time of a pass that computes no prompt, by the bucket of this load or the nearest one seen; None: none was."""
    decodes = [timing for timing in timings if not timing.prefill]
    if not decodes:
        return None
    nearest = min(decodes, key=lambda timing: abs((timing.max_sequences / num_sequences) - 1))
    for timing in decodes:
        if timing.min_sequences <= num_sequences <= timing.max_sequences:
            nearest = timing
    return nearest.ms(num_rows, num_context_tokens)


def fit_line(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, float]:
    """Huber regression of y float64[N] on x float64[N, K], no coefficient below 0.

    Returns (intercept and K slopes, median distance from the line). Slopes that the noise explains are held at 0:
    passes of nearly one context say nothing about another, and a line through them must not be drawn out to it.
    """
    columns = np.column_stack([np.ones(len(y)), x])
    free = [0, *(1 + np.flatnonzero(np.ptp(x, axis=0) > 0))]
    tiny = 1e-9 * float(np.abs(y).max())
    while True:
        solved, distances, kept = _huber(columns[:, free], y, weights)
        design = columns[:, free] * np.sqrt(kept)[:, None]
        noise = MAD_TO_SD * _weighted_median(distances, weights)
        sure = solved - MIN_SLOPE_ERRORS * noise * np.sqrt(np.diag(np.linalg.pinv(design.T @ design)))
        doubtful = [i for i, column in enumerate(free) if column and sure[i] * columns[:, column].max() < -tiny]
        if not doubtful and free[0] == 0 and solved[0] < -tiny and len(free) > 1:
            doubtful = [0]
        if not doubtful or len(free) == 1:
            break
        del free[min(doubtful, key=lambda i: sure[i] * columns[:, free[i]].max())]
    coefficients = np.zeros(columns.shape[1])
    coefficients[free] = np.maximum(solved, 0.0)
    return coefficients, _weighted_median(distances, weights)


def _huber(columns: np.ndarray, y: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(coefficients, distances, final weights) by iteratively reweighted least squares.

    The scale is the weighted median of the distances.
    """
    scale = np.maximum(columns.max(axis=0), 1e-12)
    coefficients, distances, kept = np.zeros(columns.shape[1]), np.zeros(len(y)), weights
    for _ in range(NUM_REWEIGHTINGS):
        before, root = coefficients, np.sqrt(kept)
        coefficients = np.linalg.lstsq(columns / scale * root[:, None], y * root, rcond=None)[0] / scale
        distances = np.abs(y - columns @ coefficients)
        limit = HUBER_K * MAD_TO_SD * max(_weighted_median(distances, weights), 1e-9)
        kept = weights * np.minimum(1.0, limit / np.maximum(distances, 1e-12))
        if np.allclose(before, coefficients, rtol=1e-6, atol=1e-12):
            break
    return coefficients, distances, kept


def _weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    order = np.argsort(values)
    cumulative = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(cumulative, cumulative[-1] / 2)])

"""Do observed tokens follow known distributions? Two chi-square tests over (p, token) pairs, free of I/O.

*Uniform*: with the tokens sorted by probability and v an independent uniform, U = P(likelier tokens) + v p(token) is
uniform on [0, 1) whatever p is (the randomised probability integral transform); equal bins then hold an exact
multinomial. *Rank*: how often the likeliest token, the second, the 3rd to 4th, ... were drawn, against the sum of their
probabilities with the covariance sum(diag(r) - r r^T), which shows a bias directly. Where a category is rare, the
chi-square law is too thin a tail, so that this p-value is never below Chernoff's bound for the worst single category.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import numpy as np

RANK_EDGES = (1, 2, 4, 8, 16, 32, 64)
MIN_EXPECTED = 10.0
MAX_BINS = 32
MIN_BINS = 4
# The tail of a multinomial chi-square statistic is heavier than the chi-square law's: simulated, up to 2 times at
# 3e-6 with 10 expected per bin, and growing slowly further out. p-values are multiplied by this before they are judged.
TAIL_FACTOR = 20.0
POWER = 0.9
"""Chance with which a shift of `detectable_shift` is found."""


class LawTest:
    """Collects tokens and the distributions they should come from."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.num_tokens = 0
        self.num_impossible = 0
        """Tokens whose probability is 0: one of them is proof enough."""
        self._rng = rng
        self._uniforms: list[float] = []
        self._observed = np.zeros(len(RANK_EDGES) + 1)
        self._expected = np.zeros(len(RANK_EDGES) + 1)
        self._covariance = np.zeros((len(RANK_EDGES) + 1,) * 2)

    def add(self, p: np.ndarray, token_id: int) -> None:
        """p: float64[V], the law of this token given all before it."""
        self.num_tokens += 1
        if p[token_id] <= 0.0:
            self.num_impossible += 1
            return
        ids = np.arange(len(p))
        before = (p > p[token_id]) | ((p == p[token_id]) & (ids < token_id))
        self._uniforms.append(float(p[before].sum() + self._rng.random() * p[token_id]))
        r = _rank_masses(p)
        self._observed[np.searchsorted(RANK_EDGES, before.sum(), side="right")] += 1
        self._expected += r
        self._covariance += np.diag(r) - np.outer(r, r)

    @property
    def conclusive(self) -> bool:
        """Whether there are tokens enough for a test."""
        return self.num_tokens >= MIN_BINS * MIN_EXPECTED

    def p_uniform(self) -> float:
        """p-value of the uniform test; 1 without tokens enough."""
        num_bins = min(MAX_BINS, int(len(self._uniforms) / MIN_EXPECTED))
        if num_bins < MIN_BINS:
            return 1.0
        bins = np.minimum((np.array(self._uniforms) * num_bins).astype(int), num_bins - 1)
        expected = len(self._uniforms) / num_bins
        statistic = float((np.square(np.bincount(bins, minlength=num_bins) - expected) / expected).sum())
        return chi_square_tail(statistic, num_bins - 1)

    def p_rank(self) -> float:
        """p-value of the rank test; 1 where fewer than two categories are expected often enough."""
        merge = _merge_rare(self._expected)
        if len(merge) < 2:
            return 1.0
        deviation = (merge @ (self._observed - self._expected))[:-1]  # the last one follows from the others
        covariance = (merge @ self._covariance @ merge.T)[:-1, :-1]
        values, vectors = np.linalg.eigh(covariance)
        # A direction without variance (p one-hot everywhere) cannot deviate and carries no freedom.
        keep = values > 1e-9 * max(1.0, values.max())
        if not keep.any():
            return 1.0
        statistic = float((np.square(vectors[:, keep].T @ deviation) / values[keep]).sum())
        bound = _chernoff(merge @ self._observed, merge @ self._expected)
        return max(chi_square_tail(statistic, int(keep.sum())), bound)

    def ranks(self) -> list[tuple[str, float, float]]:
        """(ranks, observed, expected) rows for people."""
        lows = (0, *RANK_EDGES)
        names = [
            str(low + 1) if high == low + 1 else f"{low + 1}-{high}"
            for low, high in zip(lows, RANK_EDGES, strict=False)
        ]
        return list(
            zip([*names, f"{RANK_EDGES[-1] + 1}+"], self._observed.tolist(), self._expected.tolist(), strict=True)
        )


def alarm(p_value: float, num_tests: int, false_alarm_rate: float) -> bool:
    """Whether a p-value counts as proof, when all tests together may raise a false alarm at this rate at most."""
    return p_value * num_tests * TAIL_FACTOR < false_alarm_rate


def detectable_shift(num_tokens: int, num_tests: int, false_alarm_rate: float) -> float:
    """About the smallest shift of probability, as total variation, that the uniform test finds with POWER; at most 1.

    A shift of size e from the likelier half of the probability to the other adds a noncentrality of L = 4 n e^2 to the
    statistic of n tokens in f + 1 bins. Needed is the L that carries the statistic, taken as normal with the noncentral
    law's mean f + L and variance 2 (f + 2 L), above what counts as an alarm.
    """
    freedom = min(MAX_BINS, int(num_tokens / MIN_EXPECTED)) - 1
    if freedom + 1 < MIN_BINS:
        return 1.0
    critical = _bisect(lambda c: alarm(chi_square_tail(c, freedom), num_tests, false_alarm_rate), 500.0)
    z = statistics.NormalDist().inv_cdf(POWER)
    needed = _bisect(lambda x: freedom + x - z * math.sqrt(2 * (freedom + 2 * x)) >= critical, 2000.0)
    return min(1.0, math.sqrt(needed / (4 * num_tokens)))


def _bisect(holds: Callable[[float], bool], high: float) -> float:
    """The least value from 0 to `high` from which on `holds`."""
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(X >= statistic) for a chi-square variable, in closed form for a whole number of degrees of freedom."""
    half = statistic / 2
    if freedom % 2 == 0:
        terms = (half**i / math.factorial(i) for i in range(freedom // 2))
        return min(1.0, math.exp(-half) * sum(terms)) if half < 700 else 0.0
    terms = (half ** (i - 0.5) / math.gamma(i + 0.5) for i in range(1, (freedom + 1) // 2))
    return min(1.0, math.erfc(math.sqrt(half)) + math.exp(-half) * sum(terms)) if half < 700 else 0.0


def _chernoff(observed: np.ndarray, expected: np.ndarray) -> float:
    """Bound on the chance that any of these sums of independent indicators strays so far from its expectation."""
    with np.errstate(divide="ignore", invalid="ignore"):
        log_ratio = np.where(observed > 0, observed * np.log(observed / expected), 0.0)
    return min(1.0, 2 * len(observed) * float(np.exp(-(log_ratio - observed + expected)).min()))


def _rank_masses(p: np.ndarray) -> np.ndarray:
    """float64[8]: the mass of each rank category."""
    width = min(RANK_EDGES[-1], len(p))
    top = np.sort(np.partition(p, len(p) - width)[len(p) - width :])[::-1]
    cumulative = np.concatenate(([0.0], np.cumsum(top)))
    at = cumulative[np.minimum((0, *RANK_EDGES), width)]
    return np.append(np.diff(at), max(0.0, 1.0 - at[-1]))


def _merge_rare(expected: np.ndarray) -> np.ndarray:
    """[groups, categories] of 0 and 1: neighbours joined until each group is expected MIN_EXPECTED times."""
    groups: list[np.ndarray] = []
    open_group, mass = np.zeros(len(expected)), 0.0
    for index, value in enumerate(expected):
        open_group[index] = 1.0
        mass += value
        if mass >= MIN_EXPECTED:
            groups.append(open_group)
            open_group, mass = np.zeros(len(expected)), 0.0
    if open_group.any() and groups:
        groups[-1] = groups[-1] + open_group
    return np.array(groups)

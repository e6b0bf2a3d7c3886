"""What drafts meet: at each place of a text a chance that a draft is accepted, and the coin that decides it.

Everything is drawn before anything is simulated and belongs to the place, so that all policies meet the same text with
the same coins, and a difference between two of them is theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

LENGTH = 1 << 16
"""Places of a text before it begins anew."""
TAIL = 64
"""Places repeated at the end: no round looks further ahead."""

Levels = Callable[[np.random.Generator, int], np.ndarray]
"""Chances float64[n] of n places in a row."""


def constant(chance: float) -> Levels:
    """The same everywhere."""
    return lambda rng, length: np.full(length, chance)


def two_regimes(easy: float = 0.94, hard: float = 0.6, mean_tokens: float = 64.0) -> Levels:
    """Stretches of two kinds in turn, of geometric lengths."""

    def levels(rng: np.random.Generator, length: int) -> np.ndarray:
        stretches = rng.geometric(1 / mean_tokens, size=4 + int(4 * length / mean_tokens))
        return np.repeat(np.resize([easy, hard], len(stretches)), stretches)[:length]

    return levels


def drifting(high: float = 0.95, low: float = 0.5, period_tokens: int = 2048) -> Levels:
    """Up and down along a sine."""

    def levels(rng: np.random.Generator, length: int) -> np.ndarray:
        phase = 2 * np.pi * (np.arange(length) / period_tokens + rng.random())
        return (high + low) / 2 + (high - low) / 2 * np.sin(phase)

    return levels


@dataclass(slots=True)
class Text:
    """One text, which streams read from different places on.

    by_depth: factors on the chance of the first, second, ... draft of a round; the last one holds for all that follow.
    spread: of the chances around their level, 0 to 1: none, or all of them 0 or 1 already. tells_chances: whether a
    verdict tells each draft's chance, as under TOKEN and BLOCK, or only how it fell, as under COUPLED and greedily.
    confidence_bias, confidence_noise: of the drafter's own idea of a chance, on its log odds.
    """

    levels: Levels
    seed: int = 0
    by_depth: tuple[float, ...] = ()
    spread: float = 0.0
    tells_chances: bool = True
    confidence_bias: float = 0.5
    confidence_noise: float = 1.0
    length: int = LENGTH
    chances: list[float] = field(init=False)
    confidences: list[float] = field(init=False)
    _coins: list[float] = field(init=False)
    _told: bytes = field(init=False)
    _next_fall: list[int] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng((self.seed, 17))
        chances = self.levels(rng, self.length)
        if self.spread:
            weight = 1 / self.spread - 1
            chances = rng.beta(np.maximum(1e-3, weight * chances), np.maximum(1e-3, weight * (1 - chances)))
        chances = np.concatenate([chances, chances[:TAIL]])
        # one in each 1/n of [0, 1): their mean is that of the law, and figures of one text say more
        coins = rng.permutation((np.arange(len(chances)) + rng.random(len(chances))) / len(chances))
        odds = np.log(np.clip(chances, 1e-4, 1 - 1e-4)) - np.log1p(-np.clip(chances, 1e-4, 1 - 1e-4))
        odds += self.confidence_bias + self.confidence_noise * rng.standard_normal(len(chances))
        falls = coins >= chances
        told = chances if self.tells_chances else ~falls
        places = np.where(falls, np.arange(len(chances)), len(chances))
        self.chances, self._coins = chances.tolist(), coins.tolist()
        self.confidences = (1 / (1 + np.exp(-odds))).tolist()
        self._told = np.round(255 * told).astype(np.uint8).tobytes()
        self._next_fall = np.minimum.accumulate(places[::-1])[::-1].tolist()

    def chance(self, place: int, depth: int) -> float:
        """Of the draft at `place` when it is the round's number `depth`, from 0."""
        return self.chances[place % self.length] * self._factor(depth)

    def confidence(self, place: int) -> float:
        """The drafter's own idea of the chance at `place`."""
        return self.confidences[place % self.length]

    def verify(self, place: int, num_drafts: int) -> tuple[int, bytes]:
        """(accepted, soft acceptances) of so many drafts from `place` on."""
        place %= self.length
        if not self.by_depth:
            return min(num_drafts, self._next_fall[place] - place), self._told[place : place + num_drafts]
        chances = [self.chances[place + depth] * self._factor(depth) for depth in range(num_drafts)]
        fell = [self._coins[place + depth] < chance for depth, chance in enumerate(chances)]
        num_accepted = fell.index(False) if False in fell else num_drafts
        told = chances if self.tells_chances else fell
        return num_accepted, bytes(round(255 * value) for value in told)

    def _factor(self, depth: int) -> float:
        return self.by_depth[min(depth, len(self.by_depth) - 1)] if self.by_depth else 1.0

"""How much better or worse than usual drafts fare just now, as a factor on the odds of their acceptance.

What a stream writes changes: boilerplate, then reasoning. How fast it changes nobody knows; so several memories of
different lengths predict each round, and those that predicted the last ones well count most (a forecaster by expert
advice with fixed share, Herbster and Warmuth 1998). On an even text the longest memory wins and the level lies still.
"""

from __future__ import annotations

import math

HALF_LIVES = (5.0, 16.0, 64.0, 1024.0)
"""Of the memories, in drafts judged."""
NUM_SHORT = 2
"""Memories that are of use only where the text changes."""
PRIOR_WEIGHT = 4.0
"""Drafts at the usual level that each memory begins with, and keeps."""
SHARE = 0.03
"""Of the trust that is dealt anew to all memories each round."""
MAX_WEIGHT = 8.0
"""Drafts of one round count for no more: they are not independent of one another."""


class Level:
    """One stream's."""

    def __init__(self) -> None:
        # per memory: drafts that passed, that were judged, and that were expected to pass; decayed
        self._passed = [0.0] * len(HALF_LIVES)
        self._judged = [0.0] * len(HALF_LIVES)
        self._expected = [0.0] * len(HALF_LIVES)
        self._trust = [1 / len(HALF_LIVES)] * len(HALF_LIVES)
        self._log_factors = [0.0] * len(HALF_LIVES)
        self._num_unseen = 0
        """Tokens since a draft was judged."""

    @property
    def factor(self) -> float:
        """On the odds; 1 is the usual level. A memory fades as the text goes on without it."""
        memories = zip(self._trust, self._log_factors, HALF_LIVES, strict=True)
        return math.exp(sum(trust * log * 0.5 ** (self._num_unseen / life) for trust, log, life in memories))

    @property
    def changes(self) -> float:
        """0 to 1: how far the short memories are trusted, as the text changes soon."""
        return sum(self._trust[:NUM_SHORT])

    def pass_over(self, num_tokens: int) -> None:
        """The text went on by so many without a draft."""
        self._num_unseen += num_tokens

    def observe(self, passed: float, expected: float, judged: float) -> None:
        """A round: of `judged` drafts `passed` did (chances count as parts), where `expected` were to at the usual
        level."""
        if judged <= 0:
            return
        self._num_unseen = 0
        share, usual_odds = _open(passed / judged), _odds(_open(expected / judged))
        weight = min(judged, MAX_WEIGHT)
        losses = []
        for log_factor in self._log_factors:
            odds = usual_odds * math.exp(log_factor)
            losses.append(weight * (math.log1p(odds) - share * math.log(odds)))
        least = min(losses)
        trust = [t * math.exp(least - loss) for t, loss in zip(self._trust, losses, strict=True)]
        total = sum(trust)
        self._trust = [(1 - SHARE) * t / total + SHARE / len(trust) for t in trust]
        for k, half_life in enumerate(HALF_LIVES):
            keep = 0.5 ** (judged / half_life)
            self._passed[k] = keep * self._passed[k] + passed
            self._judged[k] = keep * self._judged[k] + judged
            self._expected[k] = keep * self._expected[k] + expected
            mean = _open(self._expected[k] / self._judged[k])
            seen = (self._passed[k] + PRIOR_WEIGHT * mean) / (self._judged[k] + PRIOR_WEIGHT)
            self._log_factors[k] = math.log(_odds(_open(seen)) / _odds(mean))


def shifted(chance: float, factor: float) -> float:
    """With its odds times `factor`."""
    chance = _open(chance)
    return chance * factor / (chance * factor + 1 - chance)


def _open(chance: float) -> float:
    """Within (0, 1), so that its odds are a number."""
    return min(0.995, max(0.005, chance))


def _odds(chance: float) -> float:
    return chance / (1 - chance)

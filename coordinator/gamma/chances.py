"""How often each kind of evidence was right: learnt from every committed token, whoever drafted it, or nobody."""

from __future__ import annotations

from outrider.drafting.guess import Evidence

PRIOR_WEIGHT = 8.0
"""Observations that the prior counts for."""


class Chances:
    """A guessed token's chance of acceptance by its evidence.

    A guess is judged by the token that was committed in its place: under every rule that token has the target's law, so
    that its agreement with a guess made before it, and the guess's acceptance, have the same chance. Nothing need be
    drafted for it.
    """

    def __init__(self, *, decay: float = 0.97, prior: Chances | None = None, greedy: bool = False) -> None:
        """greedy: of texts that are, which decides what is assumed; a prior knows that by itself."""
        self._greedy = greedy
        self._decay = decay
        self._prior = prior
        self._seen: dict[Evidence, tuple[float, float]] = {}

    def chance(self, evidence: Evidence) -> float:
        """Leans on `prior`, and that on what is assumed of such evidence, where little was seen."""
        lean = evidence.prior_chance(self._greedy) if self._prior is None else self._prior.chance(evidence)
        right, seen = self._seen.get(evidence, (0.0, 0.0))
        return (right + PRIOR_WEIGHT * lean) / (seen + PRIOR_WEIGHT)

    def observe(self, evidence: Evidence, was_right: float, weight: float = 1.0) -> None:
        """was_right: whether it was, or the chance that the target itself gave it. The prior sees it too."""
        right, seen = self._seen.get(evidence, (0.0, 0.0))
        self._seen[evidence] = (right * self._decay + weight * was_right, seen * self._decay + weight)
        if self._prior is not None:
            self._prior.observe(evidence, was_right, weight)

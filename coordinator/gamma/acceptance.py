"""How far drafts survive, by position, from every row that was verified.

The verdict tells each position's chance of acceptance, past the first rejection too: so nothing is censored, and the
chance itself says more than the coin thrown on it. Rows past a rejection follow a text that was not taken; they count
less. Where chances are not told, a position counts in rounds that reached it (Kaplan-Meier). accepted/proposed would be
too low, more so with larger γ.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.gamma.policy import RoundReport
from coordinator.gamma.tree_acceptance import trunk_of

MAX_POSITIONS = 64
PRIOR_HAZARD = 0.7
"""Chance of acceptance assumed before anything was seen."""
LEAN_WEIGHT = 16.0
"""Observations that the prior counts for."""
OFF_PATH_WEIGHT = 0.5
SHIFT_DECAY = 0.9
"""A stream's own level is that of its last rounds: what it writes changes."""
SHIFT_WEIGHT = 8.0


class Acceptance:
    """Chance that draft i of one drafter is accepted, given that those before it are.

    A stream's own starts with `prior`, what earlier streams saw. It learns by position, and sooner by level: how much
    likelier than the prior its drafts are accepted on the whole, as a factor on the odds.
    """

    def __init__(self, *, decay: float = 0.98, prior: Acceptance | None = None, start: float = PRIOR_HAZARD) -> None:
        """start: assumed without a prior."""
        self._decay = decay
        self._prior = prior
        self._start = start
        self._passed = [0.0] * MAX_POSITIONS
        self._reached = [0.0] * MAX_POSITIONS
        self._shift_passed = self._shift_reached = self._shift_expected = 0.0
        self.num_rounds = 0

    def observe(self, chances: Sequence[float], num_accepted: int) -> None:
        """A round: each draft's chance of acceptance, or how it fell, of which the first `num_accepted` fell well."""
        self.num_rounds += 1
        chances = chances[:MAX_POSITIONS]
        expected = self._prior.hazards(len(chances)) if self._prior is not None else []
        self._passed = [passed * self._decay for passed in self._passed]
        self._reached = [reached * self._decay for reached in self._reached]
        self._shift_passed *= SHIFT_DECAY
        self._shift_reached *= SHIFT_DECAY
        self._shift_expected *= SHIFT_DECAY
        for i, chance in enumerate(chances):
            weight = 1.0 if i <= num_accepted else OFF_PATH_WEIGHT
            self._passed[i] += weight * chance
            self._reached[i] += weight
            if expected:
                self._shift_passed += weight * chance
                self._shift_reached += weight
                self._shift_expected += weight * expected[i]

    def hazards(self, num_positions: int = MAX_POSITIONS) -> list[float]:
        """Per position the chance to pass it once it is reached. Where little was seen it leans on the shifted prior,
        and without one on the position before."""
        prior = self._shifted(self._prior.hazards(num_positions)) if self._prior is not None else None
        hazards: list[float] = []
        for i in range(num_positions):
            lean = prior[i] if prior is not None else (hazards[-1] if hazards else self._start)
            hazards.append((self._passed[i] + LEAN_WEIGHT * lean) / (self._reached[i] + LEAN_WEIGHT))
        return hazards

    def expected_tokens(self, max_draft_tokens: int) -> list[float]:
        """Entry γ: committed tokens a round when γ drafts are asked for, the correction or bonus included."""
        expected, alive = [1.0], 1.0
        for hazard in self.hazards(max_draft_tokens):
            alive *= hazard
            expected.append(expected[-1] + alive)
        return expected

    def _shifted(self, chances: list[float]) -> list[float]:
        if not self._shift_reached:
            return chances
        mean = _open(self._shift_expected / self._shift_reached)
        passed = self._shift_passed + SHIFT_WEIGHT * mean
        failed = self._shift_reached - self._shift_passed + SHIFT_WEIGHT * (1 - mean)
        factor = passed / failed * (1 - mean) / mean
        return [chance * factor / (chance * factor + 1 - chance) for chance in map(_open, chances)]


def _open(chance: float) -> float:
    """Within (0, 1), so that its odds are a number."""
    return min(0.995, max(0.005, chance))


def chances_of(report: RoundReport) -> tuple[list[float], int]:
    """What `Acceptance.observe` wants of the chosen drafter's own drafts: a chain that ended before it was as long as
    wanted, all of it accepted, fails at its end."""
    if report.parents:
        trunk = trunk_of(report.parents) if report.soft_acceptances else []
        return [report.soft_acceptances[node] / 255 for node in trunk], report.num_accepted
    num_drafts = report.num_own_drafts
    num_accepted = min(report.num_accepted, num_drafts)
    if len(report.soft_acceptances) >= num_drafts:
        chances = [byte / 255 for byte in report.soft_acceptances[:num_drafts]]
    else:
        chances = [1.0] * num_accepted + [0.0] * (num_accepted < num_drafts)
    if num_accepted == num_drafts < report.choice.num_draft_tokens:
        chances.append(0.0)
    return chances, num_accepted

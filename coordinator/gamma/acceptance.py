"""How far drafts survive, by position, from every row that was verified.

The verdict tells each position's chance of acceptance, past the first rejection too: so nothing is censored, and the
chance itself says more than the coin thrown on it. Rows past a rejection follow a text that was not taken; they count
less. Where chances are not told, a position counts in rounds that reached it (Kaplan-Meier). accepted/proposed would be
too low, more so with larger γ.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.gamma.level import Level, shifted
from coordinator.gamma.policy import RoundReport
from coordinator.gamma.tree_acceptance import trunk_of

MAX_POSITIONS = 64
PRIOR_HAZARD = 0.7
"""Chance of acceptance assumed before anything was seen."""
LEAN_WEIGHT = 16.0
"""Observations that the prior counts for."""
START_WEIGHT = 4.0
"""The same of what is assumed without one, and of the position before."""
OFF_PATH_WEIGHT = 0.5
SAME_ROUNDS = 4.0
"""After which half of it is believed that a first stream's text differs from what it has itself made usual."""
MAX_UNIT = 1e6


class Acceptance:
    """Chance that draft i of one drafter is accepted, given that those before it are.

    Slowly learnt by position, beginning with `prior`, what earlier streams saw; a stream's own follows the text at hand
    by level, the same factor on the odds of all positions.
    """

    def __init__(
        self, *, decay: float = 0.98, prior: Acceptance | None = None, start: Sequence[float] = (PRIOR_HAZARD,)
    ) -> None:
        """decay: of what was seen, with each round. start: assumed without a prior, of the first positions."""
        self._decay = decay
        self._prior = prior
        self._start = start
        self._passed: list[float] = []
        self._reached: list[float] = []
        self._unit = 1.0
        """What an observation counts for now: it grows, instead of all earlier ones shrinking."""
        self._level = Level() if prior is not None else None
        self.num_rounds = 0
        self._version = 0
        """Goes up with whatever changes what is expected; the prior's as well."""
        self._expected: list[float] = []
        self._expected_of = -1, -1

    def observe(self, chances: Sequence[float], num_accepted: int) -> None:
        """A round: each draft's chance of acceptance, or how it fell, of which the first `num_accepted` fell well."""
        self.num_rounds += 1
        self._version += 1
        chances = chances[:MAX_POSITIONS]
        weights = [1.0 if i <= num_accepted else OFF_PATH_WEIGHT for i in range(len(chances))]
        if self._level is not None:
            usual = self._usual(len(chances))
            passed = sum(weight * chance for weight, chance in zip(weights, chances, strict=True))
            expected = sum(weight * chance for weight, chance in zip(weights, usual, strict=True))
            self._level.observe(passed, expected, sum(weights))
        missing = len(chances) - len(self._passed)
        self._passed += [0.0] * missing
        self._reached += [0.0] * missing
        self._unit /= self._decay
        for i, (weight, chance) in enumerate(zip(weights, chances, strict=True)):
            self._passed[i] += self._unit * weight * chance
            self._reached[i] += self._unit * weight
        if self._unit > MAX_UNIT:
            self._passed = [passed / self._unit for passed in self._passed]
            self._reached = [reached / self._unit for reached in self._reached]
            self._unit = 1.0

    def pass_over(self, num_tokens: int) -> None:
        """The text went on by so many tokens that were not drafted, or by somebody else."""
        if self._level is not None:
            self._version += 1
            self._level.pass_over(num_tokens)

    @property
    def changes(self) -> float:
        """0 to 1: how soon what was seen of the text at hand holds no more."""
        return self._level.changes if self._level is not None else 0.0

    def hazards(self, num_positions: int = MAX_POSITIONS) -> list[float]:
        """Per position the chance to pass it once it is reached, for the text at hand."""
        version = self._version, self._prior._version if self._prior is not None else 0
        if version != self._expected_of or len(self._expected) < num_positions:
            self._expected, self._expected_of = self._hazards(num_positions), version
        return self._expected[:num_positions]

    def expected_tokens(self, max_draft_tokens: int) -> list[float]:
        """Entry γ: committed tokens a round when γ drafts are asked for, the correction or bonus included."""
        expected, alive = [1.0], 1.0
        for hazard in self.hazards(max_draft_tokens):
            alive *= hazard
            expected.append(expected[-1] + alive)
        return expected

    def _hazards(self, num_positions: int) -> list[float]:
        usual = self._usual(num_positions)
        if self._level is None:
            return usual
        factor = self._level.factor ** self._trust_in_level()
        return [shifted(chance, factor) for chance in usual]

    def _trust_in_level(self) -> float:
        """0 to 1. Where this stream is the first, what is usual was learnt from the rounds that the level tells of:
        both would say the same twice."""
        assert self._prior is not None
        num_rounds = max(self.num_rounds, self._prior.num_rounds - self.num_rounds)
        return num_rounds / (num_rounds + SAME_ROUNDS)

    def _usual(self, num_positions: int) -> list[float]:
        """On a text like all that were seen. Where little was it leans on the prior, and without one on the position
        before."""
        prior = self._prior.hazards(num_positions) if self._prior is not None else None
        lean_weight = (START_WEIGHT if prior is None else LEAN_WEIGHT) * self._unit
        num_seen = len(self._passed)
        usual: list[float] = []
        lean = PRIOR_HAZARD
        for i in range(num_positions):
            if prior is not None:
                lean = prior[i]
            elif i < len(self._start):
                lean = self._start[i]
            if i < num_seen:
                lean = (self._passed[i] + lean_weight * lean) / (self._reached[i] + lean_weight)
            usual.append(lean)
        return usual


def chances_of(report: RoundReport) -> tuple[list[float], int]:
    """What `Acceptance.observe` wants of the chosen drafter's own drafts: a chain that ended before it was as long as
    wanted, all of it accepted, fails at its end."""
    if report.choice.shape:
        return _of_head_tree(report)
    if report.parents:
        trunk = trunk_of(report.parents) if report.soft_acceptances else []
        return [report.soft_acceptances[node] / 255 for node in trunk], report.num_accepted
    num_drafts = report.num_own_drafts
    num_accepted = min(report.num_accepted, num_drafts)
    if len(report.soft_acceptances) >= num_drafts:
        chances = [byte / 255 for byte in report.soft_acceptances[:num_drafts]]
    else:
        chances = [1.0] * num_accepted + [0.0] * (num_accepted < num_drafts)
    if num_accepted == num_drafts < report.num_wanted:
        chances.append(0.0)
    return chances, num_accepted


def _of_head_tree(report: RoundReport) -> tuple[list[float], int]:
    """A tree that follows what a head sees has a deep trunk where the head is sure: only its first draft tells of a
    chain, as it is there always. One that was planned tells all along."""
    drawn = report.drawn_shape
    if len(report.soft_acceptances) < len(drawn):
        return [], report.num_accepted
    trunk = trunk_of(drawn)[: None if drawn == report.wanted_shape else 1]
    return [report.soft_acceptances[node] / 255 for node in trunk], report.num_accepted

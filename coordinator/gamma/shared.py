"""What streams leave to one another: costs by model, and how far drafts survive by pair of models and tenant."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from coordinator.gamma.acceptance import PRIOR_HAZARD, Acceptance
from coordinator.gamma.ahead import HitRate
from coordinator.gamma.costs import RoundCosts
from coordinator.gamma.head_trees import Gain
from coordinator.gamma.policy import Candidate
from coordinator.gamma.tree_acceptance import Siblings

MAX_SCOPES = 1024
"""Tenants and kinds of sampling whose priors are kept; the least recently used go first."""

MAX_LEFT_TO_OTHERS = 256
GOLDEN_RATIO = (5**0.5 - 1) / 2


class PairEstimates:
    """What one stream starts from: the costs of its model, and the priors of its scope."""

    def __init__(self, costs: RoundCosts | None = None) -> None:
        self.costs = costs or RoundCosts()
        self._priors: dict[str, Acceptance] = {}
        self._starts: dict[str, Sequence[float]] = {}
        self._ms = 0.0
        self._tried_at: dict[str, float] = {}
        self._tried_now: dict[str, int] = {}
        """Choices that may still leave it to the stream that tries."""
        self._stagger = 0.0
        self._siblings: dict[str, Siblings] = {}
        self._gains: dict[str, Gain] = {}
        self._hit_rates: dict[str, HitRate] = {}

    def prior(self, candidate: Candidate) -> Acceptance:
        """Of every stream of the scope, with this drafter and the model behind it."""
        name = candidate.learnt_as
        if name not in self._priors:
            self._priors[name] = Acceptance(decay=0.995, start=self._starts.get(name, (PRIOR_HAZARD,)))
        return self._priors[name]

    def siblings(self, candidate: Candidate) -> Siblings:
        """Of every stream of the scope."""
        return self._siblings.setdefault(candidate.learnt_as, Siblings())

    def hit_rate(self, candidate: Candidate) -> HitRate:
        """Of drafting ahead, over every stream of the scope."""
        return self._hit_rates.setdefault(candidate.learnt_as, HitRate())

    def gain(self, candidate: Candidate) -> Gain:
        """Of trees of a drafter inside the target over their shapes, over every stream of the scope."""
        return self._gains.setdefault(candidate.learnt_as, Gain())

    def passed(self, tried: str, ms: float) -> None:
        """Time of one stream of the scope, in which it did what this key names."""
        self._ms += ms
        self._tried_at[tried] = self._ms
        self._tried_now.pop(tried, None)

    def tries(self, key: str) -> None:
        """One stream is about to do this; the others need not at the same time."""
        self._tried_at[key] = self._ms
        self._tried_now[key] = MAX_LEFT_TO_OTHERS

    def is_tried_now(self, key: str) -> bool:
        """By a stream that has not told of it yet; it may have ended meanwhile."""
        left = self._tried_now.get(key, 0)
        if left:
            self._tried_now[key] = left - 1
        return left > 0

    def stagger(self) -> float:
        """0 to 1, first 0: far from those of the last streams that asked (multiples of the golden ratio)."""
        stagger, self._stagger = self._stagger, (self._stagger + GOLDEN_RATIO) % 1
        return stagger

    def ms_since_try(self, key: str) -> float:
        """Time of all streams of the scope since one of them did this; 0 before the first. Streams may be too short
        for each to try again by itself what was slow once."""
        return self._ms - self._tried_at.get(key, self._ms)

    def expect(self, candidate: Candidate, chances: Sequence[float]) -> None:
        """First estimates for a drafter that nobody of the scope has used, by position."""
        self._starts.setdefault(candidate.learnt_as, chances)

    def expect_siblings(self, candidate: Candidate, chances: Sequence[float]) -> None:
        """The same of its second, third, ... guesses at a place, each given that those before are wrong."""
        if chances:
            self._siblings.setdefault(candidate.learnt_as, Siblings(chances))


class SharedEstimates:
    """Of one coordinator: costs know no tenants, acceptance stays within one."""

    def __init__(self) -> None:
        self._costs: dict[str, RoundCosts] = {}
        self._scopes: OrderedDict[tuple[str, str, bool], PairEstimates] = OrderedDict()

    def costs(self, model: str) -> RoundCosts:
        return self._costs.setdefault(model, RoundCosts())

    def forget(self, model: str) -> None:
        """All of it: something in there cannot be. Streams that run keep what they have."""
        self._costs.pop(model, None)
        for scope in [scope for scope in self._scopes if scope[0] == model]:
            del self._scopes[scope]

    def apart(self, model: str) -> PairEstimates:
        """Of one stream that may learn from no other, what work takes aside."""
        return PairEstimates(self.costs(model))

    def of(self, model: str, tenant: str, *, greedy: bool) -> PairEstimates:
        """Greedy drafts are accepted more often than sampled ones."""
        scope = (model, tenant, greedy)
        if scope not in self._scopes:
            self._scopes[scope] = PairEstimates(self.costs(model))
        self._scopes.move_to_end(scope)
        while len(self._scopes) > MAX_SCOPES:
            self._scopes.popitem(last=False)
        return self._scopes[scope]

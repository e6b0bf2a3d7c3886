"""Whether drafting ahead of the verdict pays, and what rounds then take.

A hit takes the target's round alone: its branch was drafted while the target was at work. It is there in time if the
network and the build are no longer than the target's round; otherwise the round waits for half of what is missing,
since the wait of one round is a head start for the next. A miss takes what a round on demand takes. What drafting ahead
takes from a target that shares its machine is measured: passes beside it against passes without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.gamma.median import Median
from coordinator.gamma.policy import HIT, LATE, Candidate, RoundReport
from outrider.serving.messages import NOTHING_AHEAD, AheadWish

if TYPE_CHECKING:
    from coordinator.gamma.costs import RoundCosts

PRIOR_HIT_RATE = 0.6
PRIOR_WEIGHT = 8.0
"""Rounds that the prior counts for."""
HIT_DECAY = 0.97
BUILD_SHARE = 1.2
"""Assumed time of a draft of all branches, in drafts of one chain, until a build was seen."""
MIN_ROUNDS_BEFORE = 3
"""Rounds on demand to have seen before any drafting ahead: it is judged against them."""
MAX_ROUNDS_WITHOUT, NUM_RETRIES = 128, 8
"""Where it did not pay it is tried again after so many rounds, for so many; twice as many after each try in vain."""
MAX_PATIENCE = 32
"""Times that first number."""
SLOWED = 1.1
"""A pass this much slower, or faster, than expected tells of work beside it, not of passes."""
MIN_GAIN = 1.01
"""Over rounds on demand: less is not worth the work."""


class HitRate:
    """How often the outcome of a round had a branch: of one stream, or of all of a scope."""

    def __init__(self, prior: HitRate | None = None) -> None:
        self._prior = prior
        self._hits = self._seen = 0.0

    def observe(self, was_hit: bool) -> None:
        """The prior sees it too."""
        self._hits = HIT_DECAY * self._hits + was_hit
        self._seen = HIT_DECAY * self._seen + 1
        if self._prior is not None:
            self._prior.observe(was_hit)

    @property
    def value(self) -> float:
        lean = self._prior.value if self._prior is not None else PRIOR_HIT_RATE
        return (self._hits + PRIOR_WEIGHT * lean) / (self._seen + PRIOR_WEIGHT)


class AheadCosts:
    """Of one drafter: what its builds take, and what they take from the target's passes. All streams share it."""

    def __init__(self) -> None:
        self._pass_ms = Median()
        """Of a build, by its passes: one over the chain, one a draft."""
        self._slowdown = Median(NUM_RETRIES)
        self._num_rounds_without = 0
        self._num_retries = 0
        self._patience = 1

    @property
    def slowdown(self) -> float:
        """Of the target's passes, as a factor."""
        return max(1.0, self._slowdown.value(1.0))

    def observe(self, report: RoundReport, expected_pass_ms: float) -> bool:
        """A round of the drafter. Whether its pass tells of passes without work beside them."""
        if report.ahead in (HIT, LATE) and report.branch_build_ms and report.num_own_drafts:
            self._pass_ms.add(report.branch_build_ms / (1 + report.num_own_drafts))
        if not report.choice.ahead:
            self._num_rounds_without += 1
            if self._num_rounds_without >= self._patience * MAX_ROUNDS_WITHOUT:
                self._num_retries = NUM_RETRIES
                self._num_rounds_without = 0
                self._patience = min(2 * self._patience, MAX_PATIENCE)
            return True
        self._num_rounds_without = 0
        if not self._num_retries:
            self._patience = 1  # it was not a try: it paid
        self._num_retries = max(0, self._num_retries - 1)
        ratio = (report.verify_ms - report.verify_queue_ms) / max(1e-6, expected_pass_ms)
        self._slowdown.add(ratio)
        return 1 / SLOWED <= ratio <= SLOWED

    def build_ms(self, num_draft_tokens: int, draft_ms: float) -> float:
        """draft_ms: of one draft of a chain."""
        return (1 + num_draft_tokens) * self._pass_ms.value(BUILD_SHARE * draft_ms)

    @property
    def is_due(self) -> bool:
        """Whether it is to be tried again although it did not pay."""
        return self._num_retries > 0


def ahead_of(
    costs: RoundCosts, candidate: Candidate, num_draft_tokens: int, hit_rate: float, *, always: bool = False
) -> tuple[AheadWish, float]:
    """What to draft ahead for the round after one of so many drafts, and what rounds then take, ms. always: whether it
    pays or not. Nothing where the drafter cannot."""
    on_demand_ms = costs.round_ms(candidate, num_draft_tokens)
    draft = costs.draft(candidate)
    if not candidate.max_branches or (len(draft.network) < MIN_ROUNDS_BEFORE and not always):
        return NOTHING_AHEAD, on_demand_ms
    ahead, verify_ms = costs.ahead(candidate), costs.verify_ms(num_draft_tokens)
    ask_ms = costs.ask_ms(candidate) + costs.draft_ms(candidate, num_draft_tokens)
    target_ms = costs.local_round_ms(num_draft_tokens) + (ahead.slowdown - 1) * verify_ms
    latency_ms = draft.network.value() + ahead.build_ms(num_draft_tokens, costs.draft_ms(candidate, 1))
    wait_ms = min(ask_ms, max(0.0, latency_ms - target_ms) / 2)
    ahead_ms = target_ms + hit_rate * wait_ms + (1 - hit_rate) * ask_ms
    wish = AheadWish(candidate.max_branches, num_draft_tokens, max(0.0, ask_ms - wait_ms))
    if always or ahead.is_due or MIN_GAIN * ahead_ms < on_demand_ms:
        return wish, ahead_ms
    return NOTHING_AHEAD, on_demand_ms

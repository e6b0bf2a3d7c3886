"""Whether drafting ahead of the verdict pays, how far, and what rounds then take.

A hit takes the target's round alone: its branch was drafted while the target was at work. It is there in time if the
network and the build are no longer than the target's round; otherwise the round waits for half of what is missing,
since the wait of one round is a head start for the next. A miss takes what a round on demand takes. So there are two
lengths to choose: drafts behind an outcome, which cost next to nothing while the build is hidden, and drafts of a miss,
each of which is waited for. What drafting ahead takes from a target that shares its machine is measured: passes beside
it against passes without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from coordinator.gamma.policy import HIT, LATE, MISS, Candidate, RoundReport
from outrider.median import Median
from outrider.serving.messages import AheadWish

if TYPE_CHECKING:
    from coordinator.gamma.costs import RoundCosts

PRIOR_HIT_RATE, PRIOR_DRAFTS = 0.7, 5.0
"""Behind a chain of so many drafts."""
PRIOR_WEIGHT = 8.0
"""Rounds that the prior counts for."""
MAX_HIT_RATE = 0.999
MAX_ITERATIONS = 6
"""Of lengths: two or three are enough."""
MIN_MS = 1e-6
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
    """How often the outcome of a round had a branch: of one stream, or of all of a scope.

    A longer chain has more outcomes, each less likely. Hits survive from draft to draft as drafts do: a chain of n has
    a branch for its outcome with chance r ** n, which is what r is fitted to at the mean length seen.
    """

    def __init__(self, prior: HitRate | None = None) -> None:
        self._prior = prior
        self._hits = self._seen = self._drafts = 0.0
        self._share: float = 1.0 if prior is None else prior._share
        """Of what was wished behind outcomes, in those that came."""
        self._last = RoundDrafts(0, 0)

    def observe(self, report: RoundReport) -> None:
        """A round of the stream that a draft worker was asked for. The prior sees it too."""
        if report.ahead and self._last.num_drafts:
            self._add(report.ahead != MISS, self._last.num_drafts)
        if report.ahead in (HIT, LATE) and self._last.num_wished:
            self._add_share(min(1.0, report.num_own_drafts / self._last.num_wished))
        self._last = RoundDrafts(report.num_own_drafts, report.choice.ahead.num_draft_tokens)

    def of(self, num_drafts: int) -> float:
        """Behind a chain of so many drafts."""
        rate, mean_drafts = self._mean
        return float(min(MAX_HIT_RATE, rate) ** (num_drafts / mean_drafts))

    def tokens(self, expected: Sequence[float], num_drafts: int) -> float:
        """That a branch is to commit for which so many drafts were wished: unlikely outcomes have shorter ones.
        expected: of a chain of each length."""
        length = self._share * num_drafts
        whole = int(length)
        further = expected[min(whole + 1, num_drafts)] - expected[whole]
        return expected[whole] + (length - whole) * further

    def _add(self, was_hit: bool, num_drafts: int) -> None:
        self._hits = HIT_DECAY * self._hits + was_hit
        self._seen = HIT_DECAY * self._seen + 1
        self._drafts = HIT_DECAY * self._drafts + num_drafts
        if self._prior is not None:
            self._prior._add(was_hit, num_drafts)

    def _add_share(self, share: float) -> None:
        self._share = HIT_DECAY * self._share + (1 - HIT_DECAY) * share
        if self._prior is not None:
            self._prior._add_share(share)

    @property
    def _mean(self) -> tuple[float, float]:
        rate, num_drafts = self._prior._mean if self._prior is not None else (PRIOR_HIT_RATE, PRIOR_DRAFTS)
        seen = self._seen + PRIOR_WEIGHT
        return (self._hits + PRIOR_WEIGHT * rate) / seen, (self._drafts + PRIOR_WEIGHT * num_drafts) / seen


class RoundDrafts(NamedTuple):
    """Of the last round: drafts verified, and drafts wished behind its outcomes."""

    num_drafts: int
    num_wished: int


class AheadCosts:
    """Of one drafter: what its builds take, and what they take from the target's passes. All streams share it."""

    def __init__(self) -> None:
        self._pass_ms = Median()
        """Of a build."""
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
            # branches of unlikely outcomes are shorter than the build was long; wishes change seldom
            num_wished = max(report.num_own_drafts, report.choice.ahead.num_draft_tokens)
            self._pass_ms.add(report.branch_build_ms / (1 + num_wished))
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

    def build_pass_ms(self, draft_ms: float) -> float:
        """Of each pass of a build: one over the chain, one a draft. draft_ms: of one draft of a chain."""
        return self._pass_ms.value(BUILD_SHARE * draft_ms)

    @property
    def is_due(self) -> bool:
        """Whether it is to be tried again although it did not pay."""
        return self._num_retries > 0


class AheadRounds(NamedTuple):
    """Rounds with drafting ahead, hits and misses as they come: in the mean `num_drafts` are verified, `tokens`
    committed and `ms` taken. `num_on_demand`: drafts to ask for on a miss; `tokens_if_asked`: what it then commits,
    and what the round after it gains by branches."""

    num_on_demand: int
    wish: AheadWish
    num_drafts: float
    tokens: float
    ms: float
    tokens_if_asked: float


def best_ahead(
    costs: RoundCosts,
    candidate: Candidate,
    expected: Sequence[float],
    rounds_ms: Sequence[float],
    hits: HitRate,
    on_demand_rate: float,
    *,
    always: bool = False,
) -> AheadRounds | None:
    """The lengths that commit most per ms, less what passes take from other streams; None where rounds on demand, of
    this rate, are as good, or the drafter cannot. expected: tokens of a round by its drafts, from 0 on. rounds_ms: what
    a round on demand takes, from 1 on. always: whether it pays or not.

    After a hit and after a miss alike the next round's outcome has a branch with a chance that falls with its drafts.
    Both lengths are found by policy iteration: each is the best for the rate, and for what a hit is worth over a miss,
    that the last ones came to.
    """
    if not candidate.max_branches or (len(costs.draft(candidate).network) < MIN_ROUNDS_BEFORE and not always):
        return None
    rounds = lengths_of(costs, candidate, expected, rounds_ms, hits)
    rate, worth = on_demand_rate, 0.0
    hit = miss = None
    for _ in range(MAX_ITERATIONS):
        before = hit, miss
        hit = max(rounds, key=lambda r: r.hit_tokens - rate * r.hit_ms + worth * r.hit_rate)
        miss = max(rounds, key=lambda r: r.tokens - rate * r.ms + worth * r.hit_rate)
        leaving = 1 - hit.hit_rate + miss.hit_rate
        share = miss.hit_rate / leaving
        tokens, ms = _mean(share, hit.hit_tokens, miss.tokens), _mean(share, hit.hit_ms, miss.ms)
        rate = tokens / max(MIN_MS, ms)
        worth = (hit.hit_tokens - rate * hit.hit_ms - miss.tokens + rate * miss.ms) / leaving
        if (hit, miss) == before:
            break
    if hit is None or miss is None:
        return None
    if not (always or costs.ahead(candidate).is_due or rate > MIN_GAIN * on_demand_rate):
        return None
    wish = AheadWish(candidate.max_branches, hit.num_drafts, max(0.0, worth / rate) if rate > 0 else 0.0)
    num_drafts = _mean(share, hit.num_drafts, miss.num_drafts)
    if_asked = expected[miss.num_drafts] + worth * miss.hit_rate
    return AheadRounds(miss.num_drafts, wish, num_drafts, tokens + costs.taken(num_drafts), ms, if_asked)


class Length(NamedTuple):
    """Rounds of one length: tokens less those taken from others, and the time, on demand and with a branch at hand.
    hit_rate: of the round after it."""

    num_drafts: int
    hit_rate: float
    hit_tokens: float
    hit_ms: float
    tokens: float
    ms: float


def lengths_of(
    costs: RoundCosts, candidate: Candidate, expected: Sequence[float], rounds_ms: Sequence[float], hits: HitRate
) -> list[Length]:
    """From one draft on. Asked for at each choice: what all have in common is computed once."""
    ahead, network_ms, hit_rate = costs.ahead(candidate), costs.draft(candidate).network.value(), hits.of(1)
    slowdown, pass_ms = ahead.slowdown, ahead.build_pass_ms(costs.draft_ms(candidate, 1))
    beside_ms = costs.local_round_ms(0) - costs.verify_ms(0)
    found = []
    for num_drafts, ms in enumerate(rounds_ms, start=1):
        verify_ms, taken = costs.verify_ms(num_drafts), costs.taken(num_drafts)
        on_demand_ms, target_ms = ms + (slowdown - 1) * verify_ms, beside_ms + slowdown * verify_ms
        late_ms = max(0.0, network_ms + (1 + num_drafts) * pass_ms - target_ms)
        hit_ms = min(target_ms + late_ms / 2, on_demand_ms)
        hit_tokens = hits.tokens(expected, num_drafts) - taken
        tokens = expected[num_drafts] - taken
        found.append(Length(num_drafts, hit_rate**num_drafts, hit_tokens, hit_ms, tokens, on_demand_ms))
    return found


def _mean(share: float, of_hits: float, of_misses: float) -> float:
    return share * of_hits + (1 - share) * of_misses

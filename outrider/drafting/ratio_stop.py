"""Where a chain of drafts ends by itself: once a further draft is expected to earn less than it costs.

The price says what is at stake: `tokens_per_ms` is what the stream commits per ms anyway, so a draft that takes t ms
and a row of the target's pass must be accepted, all before it included, with a chance of tokens_per_ms * t + row_tokens
at least. That is the stationary condition of max E[tokens] / E[ms] (Dinkelbach 1967: the best ratio is the price at
which nothing more can be won).

Chances come from what the caller expects of the text at hand, by place, and from the drafter's own confidence: by how
much likelier drafts of such confidence turned out than was expected. A worthless confidence adds nothing, and the chain
ends where the length that the caller expects to pay best does.

What may be looked at. Whether the row of draft i + 1 is computed may depend on drafts 1 to i, and whether that draft is
drawn also on its own law q; never on what was drawn. So each prefix decides by itself whether the chain goes on, and
TOKEN and BLOCK keep their law: both prove it by induction from the ends of the chains. Where drafts are not sampled
(COUPLED, greedy, one-hot) the draft itself may be looked at, and left out. The time that a whole chain takes follows
from what was drawn, so nobody may drop one for being late, or lost on its way; but the time of each draft follows from
those before it alone. So sampled drafts are sent one by one, and those that have come are used.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

EDGES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.99)
"""Between bins of confidence."""
FIRST = len(EDGES) + 1
"""The bin of the place before the first draft, of which nothing is known."""
DEFAULT_CHANCE = 0.7
"""Of a draft at a place of which nothing is expected."""
PRIOR_WEIGHT = 8.0
"""Observations that the start of a session's estimate counts for."""
DECAY = 0.995
MIN_OBSERVED = 32
"""Drafts to have seen before any chain is ended."""
PROBE_EVERY = 24
"""Of the ends that are due, one in so many is put off by a draft, so that what follows stays known."""
MAX_LOG_ODDS = 6.0
NUM_DRAFT_TIMES = 16
"""Drafts whose median tells what one takes a worker as of late, its wait for the engine included."""


@dataclass(frozen=True, slots=True)
class Price:
    """`tokens_per_ms`: what a ms of this stream's time earns. `row_tokens`: what a further row of the target's pass
    takes from this stream and from all others. `expected`: by place, that a draft stands if those before it do."""

    tokens_per_ms: float
    row_tokens: float = 0.0
    expected: tuple[float, ...] = ()

    def chance(self, place: int) -> float:
        """Of the draft at a place, from 0; beyond those told, that of the last one."""
        return self.expected[min(place, len(self.expected) - 1)] if self.expected else DEFAULT_CHANCE


@dataclass(frozen=True, slots=True)
class Judged:
    """How the target found the drafts behind one prefix: a byte each, as `Verdict.soft_acceptances`."""

    prefix_hash: int = 0
    soft_acceptances: bytes = b""


UNJUDGED = Judged()


class Calibration:
    """How much likelier drafts are accepted than was expected, by a bin of evidence: in log odds, fitted online.

    A Newton step an observation, each bin with its own curvature, which is forgotten as more come in.
    """

    def __init__(self, start: Calibration | None = None) -> None:
        """start: what others have learnt; it counts for a few observations."""
        self._shift: list[float] = [0.0] * (FIRST + 1) if start is None else list(start._shift)
        self._curvature = [PRIOR_WEIGHT * DEFAULT_CHANCE * (1 - DEFAULT_CHANCE)] * (FIRST + 1)

    def chance(self, evidence: int, expected: float) -> float:
        """evidence: a bin; expected: the chance without it."""
        log_odds = _log_odds(expected) + self._shift[evidence]
        return 1 / (1 + math.exp(-max(-MAX_LOG_ODDS, min(MAX_LOG_ODDS, log_odds))))

    def observe(self, evidence: int, expected: float, accepted: float, weight: float = 1.0) -> None:
        """accepted: the target's own chance of it, or 1 or 0 as it fell. Of no weight, it is no observation: what was
        seen before is not forgotten for it either."""
        chance = self.chance(evidence, expected)
        kept = 1 - (1 - DECAY) * weight
        self._curvature[evidence] = kept * self._curvature[evidence] + weight * chance * (1 - chance)
        self._shift[evidence] += weight * (accepted - chance) / self._curvature[evidence]


class EarlyStop:
    """What one stream has learnt of one drafter's confidence, and what it leaves to others of its kind."""

    def __init__(self, prior: EarlyStop | None = None) -> None:
        """prior: of all streams of the kind; it learns with this one."""
        self._prior = prior
        self._own: Calibration = Calibration() if prior is None else Calibration(prior._own)
        """Chance of a draft by its own confidence."""
        self._next: Calibration = Calibration() if prior is None else Calibration(prior._next)
        """The same by the confidence of the draft before it."""
        self._num_observed: int = 0 if prior is None else prior._num_observed
        self._num_due = 0

    def chain(self, price: Price, draft_ms: float) -> ChainStop:
        """For the next chain. draft_ms: what a draft takes, its wait for the engine included."""
        return ChainStop(self, price, draft_ms)

    def observe(self, price: Price, confidences: Sequence[float], accepted: Sequence[float]) -> None:
        """A chain that was verified, at the price it was drafted for. accepted: each draft's chance of acceptance as
        the target found it, past the first rejection too. A draft counts by the chance that all before it stand: where
        text is hard for several tokens in a row, those that are reached fare better than those that are not."""
        bins = [FIRST, *map(_bin, confidences)]
        reached = 1.0
        for place, chance in enumerate(accepted[: len(confidences)]):
            expected = price.chance(place)
            self._own.observe(bins[place + 1], expected, chance, reached)
            self._next.observe(bins[place], expected, chance, reached)
            reached *= chance
            self._num_observed += 1
        if self._prior is not None:
            self._prior.observe(price, confidences, accepted)

    @property
    def is_ready(self) -> bool:
        """Whether enough was seen to end anything."""
        return self._num_observed >= MIN_OBSERVED

    def _may_end(self) -> bool:
        """Of the ends that are due."""
        self._num_due += 1
        return self._num_due % PROBE_EVERY != 0


class ChainStop:
    """Of one chain: `wants_row` before each pass of the drafter, then `wants_draft` with what its row says."""

    def __init__(self, learnt: EarlyStop, price: Price, draft_ms: float) -> None:
        self._learnt = learnt
        self.price = price
        self._draft_ms = draft_ms
        self._bin = FIRST
        self._path = 1.0
        self.confidences: list[float] = []
        """Of the drafts so far."""

    def wants_row(self) -> bool:
        """Whether another draft is expected to pay for its pass and for its row; the first one was asked for."""
        if not self.confidences or not self._learnt.is_ready:
            return True
        expected = self._path * self._learnt._next.chance(self._bin, self.price.chance(len(self.confidences)))
        due = expected < self.price.tokens_per_ms * self._draft_ms + self.price.row_tokens
        return not (due and self._learnt._may_end())

    def wants_draft(self, confidence: float) -> bool:
        """Whether the draft of the row at hand pays for its place in the target's pass; it counts as drafted then.

        confidence: in [0, 1]; of a sampled draft a function of q, of another one its own probability.
        """
        place, evidence = len(self.confidences), _bin(confidence)
        path = self._path * self._learnt._own.chance(evidence, self.price.chance(place))
        if place and self._learnt.is_ready and path < self.price.row_tokens and self._learnt._may_end():
            return False
        self._path, self._bin = path, evidence
        self.confidences.append(confidence)
        return True


def _bin(confidence: float) -> int:
    return bisect_right(EDGES, confidence)


def _log_odds(chance: float) -> float:
    chance = min(0.995, max(0.005, chance))
    return math.log(chance / (1 - chance))

"""What `outrider bench` computes from answers: pure functions over completions and step records."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coordinator.gamma.policy import HIT, LATE
from outrider.results import Completion, Step

NUM_HOPS = 2
MIN_ROUNDS = 10
"""Drafted rounds, and plain ones: with fewer, a ratio of their times says more about the moment than about drafting."""


@dataclass(frozen=True, slots=True)
class Timed:
    """An answer and when its tokens came, in seconds from the request."""

    completion: Completion
    first_s: float
    last_s: float

    @property
    def num_tokens(self) -> int:
        return len(self.completion.token_ids)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.last_s

    @property
    def tpot_ms(self) -> float:
        """Time per output token after the first."""
        return (self.last_s - self.first_s) * 1000 / max(1, self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Pace:
    """Medians over prompts."""

    tokens_per_s: float
    ttft_ms: float
    tpot_ms: float

    @classmethod
    def of(cls, runs: Sequence[Timed]) -> Pace:
        return cls(
            statistics.median(run.tokens_per_s for run in runs),
            statistics.median(run.first_s * 1000 for run in runs),
            statistics.median(run.tpot_ms for run in runs),
        )


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Sums over all answers. `by_position[i]` is accepted / drafted at position i."""

    num_rounds: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    by_position: tuple[float, ...]
    num_proposal_bytes: int
    gamma_histogram: tuple[int, ...]
    num_tokens: int = 0

    @classmethod
    def of(cls, completions: Iterable[Completion]) -> Acceptance:
        stats = [completion.speculation for completion in completions]
        drafted = add_up(s.num_draft_tokens_per_pos for s in stats)
        accepted = add_up(s.num_accepted_tokens_per_pos for s in stats)
        return cls(
            sum(s.num_spec_steps for s in stats),
            sum(s.num_draft_tokens for s in stats),
            sum(s.num_accepted_draft_tokens for s in stats),
            tuple(a / d for a, d in zip(accepted, drafted, strict=False) if d),
            sum(s.num_proposal_bytes for s in stats),
            add_up(s.gamma_histogram for s in stats),
            sum(s.num_tokens for s in stats),
        )

    @property
    def tokens_per_step(self) -> float:
        """Tokens for each round of the target, plain ones too; 0 without rounds."""
        num_steps = sum(self.gamma_histogram)
        return self.num_tokens / num_steps if num_steps else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / rounds; 0 without rounds."""
        return 1 + self.num_accepted_draft_tokens / self.num_rounds if self.num_rounds else 0.0

    @property
    def mean_gamma(self) -> float:
        return self.num_draft_tokens / self.num_rounds if self.num_rounds else 0.0

    @property
    def bytes_per_draft_token(self) -> float:
        """Of the proposal, on each of its hops: draft worker to coordinator, coordinator to target worker."""
        return self.num_proposal_bytes / NUM_HOPS / self.num_draft_tokens if self.num_draft_tokens else 0.0

    def alpha(self, gammas_and_accepted: Iterable[tuple[int, int]]) -> float:
        """Chance that a draft is accepted once those before it were: accepted / (accepted + rejecting rounds)."""
        pairs = list(gammas_and_accepted)
        num_accepted = sum(accepted for _, accepted in pairs)
        num_decided = num_accepted + sum(accepted < gamma for gamma, accepted in pairs)
        return num_accepted / num_decided if num_decided else 0.0


def describe_positions(shares: Sequence[float]) -> str:
    """Acceptance by position, for people. Positions past the last at which a draft was accepted are told together:
    drafts of a tree have one each, though several stand at one depth and only one of those can be accepted."""
    depth = max((position for position, share in enumerate(shares, 1) if share), default=0)
    told = ", ".join(f"{share:.2f}" for share in shares[:depth])
    if len(shares) <= depth + 1:
        return ", ".join(filter(None, (told, *(["0.00"] if len(shares) > depth else []))))
    rest = f"0.00 at {depth + 1} to {len(shares)} (in a tree several drafts stand at one depth)"
    return ", ".join(filter(None, (told, rest)))


def draft_ms_per_token(completions: Iterable[Completion], pass_ms: float = 0.0) -> float:
    """What a draft takes, the median over rounds. Drafts made ahead of the verdict took the draft worker's time and not
    their round's: they count as what that drafter took where it was asked.

    The first drafts of a stream wait for the prompt's pass too: they count where nothing else tells. pass_ms: the draft
    worker's own account of a pass over one row, for runs whose other rounds were all drafted ahead; 0: none.
    """
    first: dict[str, list[float]] = {}
    asked: dict[str, list[float]] = {}
    ahead: list[str] = []
    for completion in completions:
        rounds = [step for step in steps_of([completion]) if step.num_draft_tokens]
        for index, step in enumerate(rounds):
            if step.ahead in (HIT, LATE):
                ahead.append(step.drafter)
            else:
                found = asked if index else first
                found.setdefault(step.drafter, []).append(step.draft_ms / step.num_draft_tokens)

    def typical(drafter: str) -> float:
        return median(asked[drafter]) if drafter in asked else pass_ms or median(first.get(drafter, ()))

    told = [*itertools.chain(*asked.values()), *map(typical, ahead)]
    return median(told or itertools.chain(*first.values()))


def formula_speedup(alpha: float, gamma: float, c: float) -> float:
    """(1 - α^(γ+1)) / ((1 - α)(γc + 1)): Leviathan et al. 2023, theorem 3.8; its limit (γ+1)/(γc+1) at α = 1."""
    if gamma == 0:
        return 1.0
    expected_tokens = gamma + 1 if alpha >= 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
    return expected_tokens / (gamma * c + 1)


def why_inconclusive(num_drafted_rounds: int, num_plain_rounds: int) -> str:
    """Why no ratio of speeds follows from so few; empty where one does."""
    if not num_drafted_rounds:
        return "nothing was drafted: there is nothing to compare with plain decoding"
    if min(num_drafted_rounds, num_plain_rounds) >= MIN_ROUNDS:
        return ""
    return (
        f"{num_drafted_rounds} drafted and {num_plain_rounds} plain rounds are too few for ratios, at least "
        f"{MIN_ROUNDS} of each are needed: more --max-tokens or --num-prompts"
    )


def steps_of(completions: Iterable[Completion]) -> list[Step]:
    """All rounds."""
    return [chunk.step for completion in completions for chunk in completion.chunks if chunk.step is not None]


def median(values: Iterable[float]) -> float:
    """0 for none."""
    values = list(values)
    return statistics.median(values) if values else 0.0


def percentile(values: Iterable[float], share: float) -> float:
    """The value below which `share` of them lie; 0 for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def add_up(rows: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Sum of tuples of different lengths, by index."""
    totals: list[int] = []
    for row in rows:
        totals += [0] * (len(row) - len(totals))
        for index, value in enumerate(row):
            totals[index] += value
    return tuple(totals)


def zero_gain_concurrency(gains: Sequence[tuple[int, float]]) -> float | None:
    """Where speculation stops paying: the load at which the gain (speculative over plain) first falls to 1.

    gains: (streams, gain) by rising load; between two loads it is interpolated over the logarithm of the load. The
    first load when there is no gain even there, None when the gain never ends.
    """
    before: tuple[int, float] | None = None
    for load, gain in gains:
        if gain <= 1:
            if before is None:
                return float(load)
            share = (before[1] - 1) / (before[1] - gain)
            return float(before[0] * (load / before[0]) ** share)
        before = (load, gain)
    return None

"""Counts and times of one stream, cut at the token where its text ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from coordinator.branches import AheadCounts
from outrider.results import DrafterOutlook, DrafterUse, Speculation, Timings
from outrider.round_counts import RoundCounts
from outrider.sampling.params import Origin


@dataclass(frozen=True, slots=True)
class Drafting:
    """Who drafted a round and why; `local_drafter` made the last `num_local` of its drafts: all of them, or those that
    go on after the chain of `drafter`. `expected_tokens_per_s`, `round_ms`: what it was chosen for and what it took;
    0: neither is told."""

    drafter: str = ""
    reason: str = ""
    local_drafter: str = ""
    num_local: int = 0
    expected_tokens_per_s: float = 0.0
    round_ms: float = 0.0

    def parts(self, num_draft_tokens: int, num_accepted: int) -> Iterator[tuple[str, str, int, int]]:
        """(drafter, reason, drafts, accepted ones) of each who took part; a plain round has one part of nobody's."""
        num_local = min(self.num_local, num_draft_tokens)
        num_own = num_draft_tokens - num_local
        if num_own or not num_local:
            yield self.drafter if num_own else "", self.reason, num_own, min(num_accepted, num_own)
        if num_local:
            reason = "continued" if num_own else self.reason
            yield self.local_drafter, reason, num_local, max(0, num_accepted - num_own)


NOBODY = Drafting()


class RoundObserver(Protocol):
    """Who wants to know of rounds as they are counted."""

    def round(self, num_draft_tokens: int, origins: tuple[Origin, ...], by: Drafting) -> None:
        """As `StreamStatistics.count`, which has counted it."""

    def lost_target(self, cause: str, unheard_s: float) -> None:
        """As `StreamStatistics.count_loss`."""

    def recovered(self, after_s: float) -> None:
        """As `StreamStatistics.count_recovery`."""

    def poisoned(self) -> None:
        """The stream has killed its target workers."""


@dataclass(slots=True)
class _Use:
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    expected_sum: float = 0.0
    num_tokens: int = 0
    ms: float = 0.0

    def told(self, drafter: str, reason: str) -> DrafterUse:
        return DrafterUse(
            drafter,
            reason,
            self.num_rounds,
            self.num_draft_tokens,
            self.num_accepted_draft_tokens,
            expected_tokens_per_s=self.expected_sum / self.num_rounds,
            tokens_per_s=1000 * self.num_tokens / self.ms if self.ms else 0.0,
        )


@dataclass(slots=True)
class StreamStatistics:
    """What its `Speculation` and `Timings` are made of."""

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    time_to_first_token_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    network_ms: float = 0.0
    num_cached_tokens: int = 0
    num_dropped_proposals: int = 0
    num_draft_failures: int = 0
    num_proposal_bytes: int = 0
    num_feature_bytes: int = 0
    rounds: RoundCounts = field(default_factory=RoundCounts)
    _drafters: dict[str, None] = field(default_factory=dict)
    _uses: dict[tuple[str, str], _Use] = field(default_factory=dict)
    outlooks: tuple[DrafterOutlook, ...] = ()
    ahead: AheadCounts = field(default_factory=AheadCounts)
    observer: RoundObserver | None = None

    def count(self, num_draft_tokens: int, origins: tuple[Origin, ...], by: Drafting = NOBODY) -> None:
        """A verdict that checked `num_draft_tokens` drafts and delivered tokens of these origins."""
        self.rounds.count(num_draft_tokens, origins)
        for drafter, reason, num_drafts, num_accepted in by.parts(num_draft_tokens, origins.count(Origin.ACCEPTED)):
            use = self._uses.setdefault((drafter, reason), _Use())
            use.num_rounds += 1
            use.num_draft_tokens += num_drafts
            use.num_accepted_draft_tokens += num_accepted
            if reason == by.reason:
                use.expected_sum += by.expected_tokens_per_s
                use.num_tokens += len(origins)
                use.ms += by.round_ms
            if drafter:
                self._drafters[drafter] = None
        if self.observer is not None:
            self.observer.round(num_draft_tokens, origins, by)

    def count_loss(self, cause: str, unheard_s: float) -> None:
        """The stream lost its target, which had said nothing for so long. cause: of `coordinator.failover`."""
        if self.observer is not None:
            self.observer.lost_target(cause, unheard_s)

    def count_recovery(self, after_s: float) -> None:
        """A token came from another worker, so long after the first one was found lost."""
        if self.observer is not None:
            self.observer.recovered(after_s)

    def count_poisoned(self) -> None:
        """The stream is given up for having killed its target workers."""
        if self.observer is not None:
            self.observer.poisoned()

    @property
    def has_rounds(self) -> bool:
        return bool(self.rounds.gammas)

    def speculation(self) -> Speculation:
        return Speculation(
            **self.rounds.fields(),
            num_dropped_proposals=self.num_dropped_proposals,
            num_draft_failures=self.num_draft_failures,
            drafters=tuple(self._drafters),
            num_proposal_bytes=self.num_proposal_bytes,
            num_feature_bytes=self.num_feature_bytes,
            drafter_uses=tuple(use.told(drafter, reason) for (drafter, reason), use in self._uses.items()),
            drafter_outlooks=self.outlooks,
            num_branches=self.ahead.num_branches,
            num_branch_hits=self.ahead.num_hits,
            num_branch_misses=self.ahead.num_misses,
            num_ahead_draft_tokens=self.ahead.num_draft_tokens,
            num_wasted_draft_tokens=self.ahead.num_wasted_tokens,
            num_pipelined_verifies=self.ahead.num_pipelined,
            num_dropped_verifies=self.ahead.num_pipelined - self.ahead.num_pipelined_used,
        )

    def timings(self, total_ms: float) -> Timings:
        return Timings(
            queue_ms=self.queue_ms,
            prefill_ms=self.prefill_ms,
            time_to_first_token_ms=self.time_to_first_token_ms,
            draft_ms=self.draft_ms,
            verify_ms=self.verify_ms,
            network_ms=self.network_ms,
            total_ms=total_ms,
        )

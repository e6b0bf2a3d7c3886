"""The seam of γ controllers: `choose` before a round, `observe` after it. Costs are read from message timings only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from outrider.drafting.guess import Guess


@dataclass(frozen=True, slots=True)
class Choice:
    """One round. `num_draft_tokens` 0 is plain decoding: then up to `credit_tokens` tokens without a draft call."""

    drafter: str
    num_draft_tokens: int
    reason: str
    credit_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """What a round did and took. A plain run of several tokens is one report; times in ms, summed over it.

    `is_local`: its drafts were a guess at hand, nobody was asked. `num_draft_tokens`: drafts checked, the last
    `num_local` of them a local drafter's: after the chosen one's, or instead of them when they were late. `ended`: the
    stream ended with it, so that a missing acceptance is no rejection. `draft_ms` and `verify_ms` are the workers' own
    times, queues included; networks are round trips less those. `wait_ms`: time lost to a proposal that came too late,
    or never.
    """

    choice: Choice
    is_local: bool = False
    num_draft_tokens: int = 0
    num_local: int = 0
    num_accepted: int = 0
    num_committed: int = 0
    ended: bool = False
    draft_ms: float = 0.0
    draft_network_ms: float = 0.0
    verify_ms: float = 0.0
    verify_network_ms: float = 0.0
    wait_ms: float = 0.0
    round_ms: float = 0.0

    @property
    def num_own_drafts(self) -> int:
        """Of the drafter that was chosen."""
        return self.num_draft_tokens - self.num_local


class GammaPolicy(Protocol):
    """One per stream."""

    def choose(
        self, max_draft_tokens: int, max_credit_tokens: int, drafters: tuple[str, ...], guesses: tuple[Guess, ...] = ()
    ) -> Choice:
        """The next round. Never more drafts or credit than given; `drafters` are those that can be asked now, `guesses`
        what local drafters have at hand. A drafter that samples is chosen before anybody has seen its sample."""

    def interrupts(self, guesses: tuple[Guess, ...]) -> bool:
        """Whether a run of plain decoding should end because one of these is better."""

    def num_continued(self, choice: Choice, num_drafted: int, guess: Guess) -> int:
        """How many tokens of a guess to verify after a chain of `num_drafted` drafts. One-hot tokens after a sampled
        chain may depend on what was sampled: they change no q before them."""

    def observe(self, report: RoundReport) -> None:
        """A round that `choose` decided has ended."""

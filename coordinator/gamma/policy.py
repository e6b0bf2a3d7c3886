"""The seam of γ controllers: `choose` before a round, `observe` after it. Costs are read from message timings only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from outrider.drafting.guess import Guess
from outrider.drafting.guess_tree import GuessTree
from outrider.drafting.ratio_stop import Price
from outrider.drafting.tree import chain_parents
from outrider.results import DrafterOutlook
from outrider.serving.messages import NOTHING_AHEAD, AheadWish

HIT, LATE, MISS = "hit", "late", "miss"
"""What became of drafting ahead: the branch was there with the verdict; it was waited for; there was none."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafter that can be asked now: of a draft worker, whose `model` is a fingerprint, or inside the target, where a
    draft costs no message and rounds go on without a round trip between them. `max_draft_tokens` 0: as many as wanted.
    `max_width` above 1: it puts up to so many guesses beside each token of the chain that `trunk` would draft.
    Inside the target such a drafter draws any shape, no deeper than `max_depth` (0: any), and is asked for as `trunk`.
    `max_branches`: outcomes of a round that it drafts ahead for at most.
    """

    name: str
    model: str = ""
    on_target: bool = False
    max_draft_tokens: int = 0
    max_width: int = 1
    trunk: str = ""
    max_branches: int = 0
    max_depth: int = 0

    learnt_as: str = field(init=False, compare=False, repr=False)
    """What is learnt of costs and acceptance goes under this name: of a tree, that of its trunk."""
    costs_as: str = field(init=False, compare=False, repr=False)
    """The same of what drafts take: a level of a head's tree is not a draft of its chain."""
    key: str = field(init=False, compare=False, repr=False)
    """Tells drafters apart, and the models behind them."""

    def __post_init__(self) -> None:
        # asked for at each γ of each choice
        learnt_as = f"{'target' if self.on_target else 'draft'}:{self.trunk or self.name}:{self.model}"
        object.__setattr__(self, "learnt_as", learnt_as)
        object.__setattr__(self, "costs_as", f"{learnt_as}/tree" if self.on_target and self.trunk else learnt_as)
        object.__setattr__(self, "key", f"{learnt_as}/{self.name}")

    @property
    def asked_as(self) -> str:
        """What the worker calls it."""
        return self.trunk if self.on_target and self.trunk else self.name

    def cap(self, max_draft_tokens: int) -> int:
        """Drafts that a round of it may carry."""
        return min(self.max_draft_tokens or max_draft_tokens, max_draft_tokens)


@dataclass(frozen=True, slots=True)
class Choice:
    """One round. `num_draft_tokens` 0 is plain decoding: then up to `credit_tokens` tokens without a draft call.

    `candidate`: who drafts; None: nobody, or a local drafter. One on the target drafts `num_draft_tokens` at each step
    of a run of up to `credit_tokens` tokens. `expected_tokens_per_s`: what it was chosen for; 0: not by expectation.
    `tree`: the drafts themselves, where local guesses that disagree are verified together. `tree_width`: guesses beside
    one another at each level of a tree drafter; 0: as it likes. `shape`: `Proposal.parents` of the tree that a drafter
    inside the target draws, or of a part of it, from the first node on; empty: a chain. `ahead`: what to draft for the
    round after it. `price`: the drafter ends its chain where drafts do not earn it; None: it is as long as it says.
    `max_wait_ms`: for the drafts, as long as they are worth; 0: not said.
    """

    drafter: str
    num_draft_tokens: int
    reason: str
    credit_tokens: int = 0
    candidate: Candidate | None = None
    expected_tokens_per_s: float = 0.0
    tree: GuessTree | None = None
    tree_width: int = 0
    ahead: AheadWish = NOTHING_AHEAD
    shape: tuple[int, ...] = ()
    price: Price | None = None
    max_wait_ms: float = 0.0

    @property
    def is_run(self) -> bool:
        """Whether the target goes on by itself, step by step."""
        return not self.num_draft_tokens or (self.candidate is not None and self.candidate.on_target)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """What a round did and took. A plain run of several tokens is one report, a run that the target drafts for one a
    step; times in ms, summed over it.

    `is_local`: its drafts were a guess at hand, nobody was asked. `num_draft_tokens`: drafts checked, the last
    `num_local` of them a local drafter's: after the chosen one's, or instead of them when they were late.
    `soft_acceptances`: one byte per draft, see `Verdict`; empty: not told. `parents`: shape of a tree. `ended`: the
    stream ended with it, so that a missing acceptance is no rejection. `draft_ms` and `verify_ms` are the workers' own
    times, their queues (`draft_queue_ms`, `verify_queue_ms`) and a draft worker's coming level with the text
    (`draft_catch_up_ms`, with `num_ingested_tokens`) included; networks are round trips less those. `wait_ms`: time
    lost to a proposal that came too late, or never. `target`: the worker that verified. `num_batch_rows`: rows of its
    pass, other streams' included; the mean over a run; 0: not told. `ahead`: what became of the branches that the round
    before asked for, HIT, LATE (after `branch_wait_ms`) or MISS; empty: none were. `branch_build_ms`: what the worker
    took for those that came last.
    """

    choice: Choice
    is_local: bool = False
    num_draft_tokens: int = 0
    num_local: int = 0
    num_accepted: int = 0
    num_committed: int = 0
    soft_acceptances: bytes = b""
    parents: tuple[int, ...] = ()
    ended: bool = False
    draft_ms: float = 0.0
    draft_network_ms: float = 0.0
    verify_ms: float = 0.0
    verify_network_ms: float = 0.0
    wait_ms: float = 0.0
    round_ms: float = 0.0
    draft_queue_ms: float = 0.0
    draft_catch_up_ms: float = 0.0
    num_ingested_tokens: int = 0
    verify_queue_ms: float = 0.0
    target: str = ""
    num_batch_rows: float = 0.0
    ahead: str = ""
    branch_wait_ms: float = 0.0
    branch_build_ms: float = 0.0

    @property
    def wanted_shape(self) -> tuple[int, ...]:
        """Of the tree that was asked of a drafter inside the target; empty: a chain was."""
        return self.choice.shape[: self.choice.num_draft_tokens]

    @property
    def drawn_shape(self) -> tuple[int, ...]:
        """What came of it, a chain spelled out."""
        return self.parents or chain_parents(self.num_draft_tokens)

    @property
    def num_wanted(self) -> int:
        """Drafts that the chosen drafter was to give. A chain that ended where it did not pay was not short of any:
        nothing is known of how further drafts would have fared."""
        was_ended = self.choice.price is not None and self.num_own_drafts > 0
        return min(self.num_own_drafts, self.choice.num_draft_tokens) if was_ended else self.choice.num_draft_tokens

    @property
    def num_own_drafts(self) -> int:
        """Of the drafter that was chosen."""
        return self.num_draft_tokens - self.num_local


class GammaPolicy(Protocol):
    """One per stream."""

    def choose(
        self,
        max_draft_tokens: int,
        max_credit_tokens: int,
        candidates: tuple[Candidate, ...],
        guesses: tuple[Guess, ...] = (),
    ) -> Choice:
        """The next round. Never more drafts or credit than given; `candidates` are those that can be asked now,
        `guesses` what local drafters have at hand. A drafter that samples is chosen before anybody has seen its sample.
        """

    def interrupts(self, guesses: tuple[Guess, ...]) -> bool:
        """Whether a run of the target by itself should end because one of these is better."""

    def num_continued(self, choice: Choice, num_drafted: int, guess: Guess) -> int:
        """How many tokens of a guess to verify after a chain of `num_drafted` drafts. One-hot tokens after a sampled
        chain may depend on what was sampled: they change no q before them."""

    def observe(self, report: RoundReport) -> None:
        """A round that `choose` decided has ended."""

    def outlooks(self) -> tuple[DrafterOutlook, ...]:
        """Of everyone who could be chosen last, the best first; none where nothing is chosen by expectation."""

"""Always the same number of drafts, as the request or the settings say."""

from __future__ import annotations

from coordinator.gamma.plans import Objective
from coordinator.gamma.policy import Candidate, Choice, RoundReport
from coordinator.gamma.shared import PairEstimates
from outrider.drafting.guess import Guess
from outrider.results import DrafterOutlook
from outrider.serving.messages import NOTHING_AHEAD, AheadWish

LOOK_AGAIN_TOKENS = 4
"""A plain run without a guess at its start is also ended by one; but a fast target has finished it by then."""


class FixedGamma:
    """`num_draft_tokens` drafts from the first drafter a round, or from the likeliest guess while no drafter can be
    asked; 0 decodes plainly with all the credit there is."""

    def __init__(
        self, num_draft_tokens: int, *, drafts_ahead: bool = False, shared: PairEstimates | None = None
    ) -> None:
        """drafts_ahead: of the verdict, wherever a drafter can. shared: what is known, for the shape of trees."""
        self._num_draft_tokens = num_draft_tokens
        self._shared = shared or PairEstimates()
        self._drafts_ahead = drafts_ahead
        self._is_drafted = False

    def choose(
        self,
        max_draft_tokens: int,
        max_credit_tokens: int,
        candidates: tuple[Candidate, ...],
        guesses: tuple[Guess, ...] = (),
    ) -> Choice:
        self._is_drafted = False
        if not self._num_draft_tokens:
            return Choice("", 0, "off", max_credit_tokens)
        num_draft_tokens = min(self._num_draft_tokens, max_draft_tokens)
        if not num_draft_tokens:
            return Choice("", 0, "no-room", min(1, max_credit_tokens))
        if candidates:
            self._is_drafted, first = True, candidates[0]
            credit_tokens = max_credit_tokens if first.on_target else 0
            ahead = AheadWish(first.max_branches, num_draft_tokens) if self._drafts_ahead else NOTHING_AHEAD
            if first.on_target and first.max_width > 1:
                shape = Objective(self._shared).fixed_shape(first, num_draft_tokens)
                return Choice(first.name, len(shape), "fixed", credit_tokens, first, shape=shape)
            return Choice(first.name, first.cap(num_draft_tokens), "fixed", credit_tokens, first, ahead=ahead)
        if not guesses:
            return Choice("", 0, "no-match", min(LOOK_AGAIN_TOKENS, max_credit_tokens))
        best = max(guesses, key=lambda guess: guess.expected_accepted(num_draft_tokens))
        return Choice(best.drafter, min(num_draft_tokens, len(best)), "fixed")

    def interrupts(self, guesses: tuple[Guess, ...]) -> bool:
        """Plain runs only."""
        return bool(guesses) and self._num_draft_tokens > 0 and not self._is_drafted

    def num_continued(self, choice: Choice, num_drafted: int, guess: Guess) -> int:
        return 0

    def observe(self, report: RoundReport) -> None:
        pass

    def outlooks(self) -> tuple[DrafterOutlook, ...]:
        return ()

"""Always the same number of drafts, as the request or the settings say."""

from __future__ import annotations

from coordinator.gamma.policy import Choice, RoundReport


class FixedGamma:
    """`num_draft_tokens` drafts from the first drafter a round; 0 decodes plainly with all the credit there is."""

    def __init__(self, num_draft_tokens: int) -> None:
        self._num_draft_tokens = num_draft_tokens

    def choose(self, max_draft_tokens: int, max_credit_tokens: int, drafters: tuple[str, ...]) -> Choice:
        if not self._num_draft_tokens:
            return Choice("", 0, "off", max_credit_tokens)
        num_draft_tokens = min(self._num_draft_tokens, max_draft_tokens)
        if not num_draft_tokens or not drafters:
            return Choice("", 0, "no-room" if drafters else "no-draft-worker", min(1, max_credit_tokens))
        return Choice(drafters[0], num_draft_tokens, "fixed")

    def observe(self, report: RoundReport) -> None:
        pass

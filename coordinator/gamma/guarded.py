"""A γ policy that cannot end a stream: where it fails, or its choice is none, the stream goes on without drafts."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coordinator.gamma.policy import Candidate, Choice, GammaPolicy, RoundReport
from coordinator.stream import Stream
from outrider.drafting.guess import Guess
from outrider.results import DrafterOutlook

log = logging.getLogger(__name__)
FAILED = "policy-failed"


class GuardedGamma:
    """Of one stream. What broke may be in what it shares with others, which is forgotten then."""

    def __init__(self, make: Callable[[], GammaPolicy], stream: Stream, forget: Callable[[], None]) -> None:
        """make: the policy, which may fail at that already. forget: what it was to share with others."""
        self._stream = stream
        self._forget = forget
        self._policy: GammaPolicy | None = None
        with self._set_aside_if_broken():
            self._policy = make()

    def choose(
        self,
        max_draft_tokens: int,
        max_credit_tokens: int,
        candidates: tuple[Candidate, ...],
        guesses: tuple[Guess, ...] = (),
    ) -> Choice:
        if self._policy is not None:
            with self._set_aside_if_broken():
                choice = self._policy.choose(max_draft_tokens, max_credit_tokens, candidates, guesses)
                if fault := _fault_of(choice, max_draft_tokens, max_credit_tokens):
                    raise ValueError(f"{fault}: {choice}")
                return choice
        return Choice("", 0, FAILED, max(1, max_credit_tokens))

    def interrupts(self, guesses: tuple[Guess, ...]) -> bool:
        if self._policy is not None:
            with self._set_aside_if_broken():
                return self._policy.interrupts(guesses)
        return False

    def num_continued(self, choice: Choice, num_drafted: int, guess: Guess) -> int:
        if self._policy is not None:
            with self._set_aside_if_broken():
                return max(0, int(self._policy.num_continued(choice, num_drafted, guess)))
        return 0

    def observe(self, report: RoundReport) -> None:
        if self._policy is not None:
            with self._set_aside_if_broken():
                self._policy.observe(report)

    def outlooks(self) -> tuple[DrafterOutlook, ...]:
        if self._policy is not None:
            with self._set_aside_if_broken():
                return self._policy.outlooks()
        return ()

    @contextmanager
    def _set_aside_if_broken(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._policy = None
            self._stream.statistics.num_draft_failures += 1
            log.exception("request %s goes on without drafts: none can be chosen", self._stream.request.request_id)
            self._forget()


def _fault_of(choice: Choice, max_draft_tokens: int, max_credit_tokens: int) -> str:
    """Why it is no choice; empty: it is one. Comparisons with NaN are false."""
    if not (isinstance(choice.num_draft_tokens, int) and 0 <= choice.num_draft_tokens <= max_draft_tokens):
        return f"of at most {max_draft_tokens} drafts"
    if choice.is_run and not (isinstance(choice.credit_tokens, int) and 1 <= choice.credit_tokens <= max_credit_tokens):
        return f"of 1 to {max_credit_tokens} tokens of a run"
    numbers = [choice.expected_tokens_per_s, choice.max_wait_ms, choice.ahead.value_ms]
    if choice.price is not None:
        numbers += (choice.price.tokens_per_ms, choice.price.row_tokens)
        if not all(0 <= chance <= 1 for chance in choice.price.expected):
            return "of a chance that is none"
    return "" if all(0 <= number < math.inf for number in numbers) else "of a number below 0, or that is none"

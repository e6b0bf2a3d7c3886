"""What an audit finds in one stream, and what it comes to."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

MAX_CLOSE_SHARE = 0.5
"""Of the tokens: beyond it the tolerance is too wide to tell one decision from another."""


class Verdict(enum.StrEnum):
    """Of a stream."""

    AUDITED = "AUDITED"
    BREACH = "BREACH"
    INCONCLUSIVE = "INCONCLUSIVE"


@dataclass(frozen=True, slots=True)
class Breach:
    """index: of the output token, resumed ones counted. expected: what should have been there, None where `what` alone
    tells. by: how far beyond the tolerance the decision is, in the unit of `what`; 0: it is no matter of numbers."""

    index: int
    token_id: int | None
    expected: int | None
    what: str
    by: float = 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a decision hangs on. margin: how far on the side that it wants, negative on the other; in probability,
    logits or nats. error: how far that may be off. place: of the token that it is about, within its round."""

    place: int
    margin: float
    error: float
    what: str = ""

    @property
    def is_close(self) -> bool:
        """Within what logits may be off by."""
        return self.margin <= self.error

    @property
    def is_breach(self) -> bool:
        """Beyond it, on the wrong side."""
        return self.margin < -self.error


@dataclass(slots=True)
class Findings:
    """num_close: tokens of a decision that the tolerance leaves open; num_flipped: those of them that were decided the
    other way. num_draws: drafts that were drawn again from their q. num_comparisons: of coins, draws and choices.
    reasons: why it is INCONCLUSIVE, if no breach was found."""

    num_tokens: int = 0
    num_resumed: int = 0
    num_close: int = 0
    num_flipped: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_draws: int = 0
    num_comparisons: int = 0
    breaches: list[Breach] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        if self.breaches:
            return Verdict.BREACH
        return Verdict.INCONCLUSIVE if self.reasons else Verdict.AUDITED

    def breach(self, index: int, token_id: int | None, expected: int | None, what: str, by: float = 0.0) -> None:
        """See `Breach`."""
        self.breaches.append(Breach(index, token_id, expected, what, by))

    def count(self, comparisons: Iterable[Comparison]) -> None:
        """Of a round that is right, or within the tolerance."""
        compared = list(comparisons)
        self.num_comparisons += len(compared)
        self.num_close += len({one.place for one in compared if one.is_close})
        self.num_flipped += len({one.place for one in compared if one.margin < 0.0})

    def judge(self) -> None:
        """Whether enough was looked at."""
        if not self.num_tokens:
            self.reasons.append("nothing was decided")
        elif not self.num_drafted:
            self.reasons.append("nothing was drafted: speculation was not put to the test")
        if self.num_close > MAX_CLOSE_SHARE * self.num_tokens:
            self.reasons.append(
                f"{self.num_close} of {self.num_tokens} tokens are within the tolerance of a tie: it is too wide"
            )

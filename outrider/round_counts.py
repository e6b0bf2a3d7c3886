"""Counts of rounds: by drafts, by accepted ones, and of their tokens by origin. Coordinators count verdicts, clients
the chunks that came of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.results import Speculation
from outrider.sampling.params import Origin


@dataclass(slots=True)
class RoundCounts:
    """emitted = accepted + corrections + bonus + plain. `accepted` has rounds with drafts only."""

    gammas: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    origins: Counter[Origin] = field(default_factory=Counter)

    @classmethod
    def of(cls, told: Speculation) -> RoundCounts:
        """Those that `fields` were made of."""
        return cls(
            _counter(told.gamma_histogram),
            _counter(told.acceptance_histogram),
            Counter(
                {
                    Origin.ACCEPTED: told.num_accepted_draft_tokens,
                    Origin.CORRECTION: told.num_correction_tokens,
                    Origin.BONUS: told.num_bonus_tokens,
                    Origin.PLAIN: told.num_plain_tokens,
                }
            ),
        )

    def count(self, num_draft_tokens: int, origins: Sequence[Origin]) -> None:
        """A round that checked so many drafts and delivered tokens of these origins."""
        self.gammas[num_draft_tokens] += 1
        self.origins.update(origins)
        if num_draft_tokens:
            self.accepted[origins.count(Origin.ACCEPTED)] += 1

    def add(self, other: RoundCounts) -> None:
        self.gammas.update(other.gammas)
        self.accepted.update(other.accepted)
        self.origins.update(other.origins)

    @property
    def num_draft_tokens(self) -> int:
        return sum(gamma * number for gamma, number in self.gammas.items())

    def fields(self) -> dict[str, Any]:
        """Those of `Speculation` that follow from these counts; vLLM's definitions, see `SpeculationStats` of the
        wire."""
        num_steps, num_drafts = self.accepted.total(), self.num_draft_tokens
        num_accepted = self.origins[Origin.ACCEPTED]
        num_positions = max(self.gammas, default=0)
        return {
            "num_spec_steps": num_steps,
            "num_draft_tokens": num_drafts,
            "num_accepted_draft_tokens": num_accepted,
            "mean_acceptance_length": 1 + num_accepted / num_steps if num_steps else 0.0,
            "draft_acceptance_rate": num_accepted / num_drafts if num_drafts else 0.0,
            "acceptance_histogram": _histogram(self.accepted),
            "gamma_histogram": _histogram(self.gammas),
            "num_draft_tokens_per_pos": _at_least(self.gammas, num_positions),
            "num_accepted_tokens_per_pos": _at_least(self.accepted, num_positions),
            "num_plain_tokens": self.origins[Origin.PLAIN],
            "num_correction_tokens": self.origins[Origin.CORRECTION],
            "num_bonus_tokens": self.origins[Origin.BONUS],
        }


def _histogram(counts: Counter[int]) -> tuple[int, ...]:
    return tuple(counts[i] for i in range(max(counts, default=-1) + 1))


def _counter(histogram: Sequence[int]) -> Counter[int]:
    return Counter({i: number for i, number in enumerate(histogram) if number})


def _at_least(counts: Counter[int], num_positions: int) -> tuple[int, ...]:
    """Entry i: how often the number was above i, that is, position i was there."""
    return tuple(sum(n for number, n in counts.items() if number > i) for i in range(num_positions))

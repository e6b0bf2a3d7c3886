"""How often a head is right, measured on text that its target has written itself, before anybody relies on it.

A head that is read in a wrong way, or was trained for another model, fails no check of shapes: it guesses, and is
hardly ever right. Some two hundred tokens tell.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from outrider.errors import FailedPrecondition, InvalidArgument
from outrider.lm.heads.conventions import Convention
from outrider.lm.heads.eagle import EagleHead
from outrider.lm.heads.loading import Head
from outrider.lm.heads.medusa import MedusaHead

REFUSED_BELOW, WARNED_BELOW = 0.05, 0.20
"""Of agreement on the next guess: a head of the right model reaches 0.3 and more, one of another model some percent."""
NUM_DEPTHS = 3
"""Guesses in a row that are measured."""
STRIDE = 4
"""Deeper guesses are begun at each so many-th place: they cost a step each."""
MIN_TOKENS = 32
NUM_TOKENS = 200
"""To be generated in all, shared among the prompts."""

PROMPTS = (
    "Explain in simple words why the sky is blue during the day and red in the evening.",
    "Write a Python function that returns the n-th Fibonacci number, with a short docstring.",
    "A train leaves at 9:40 and arrives at 12:15. How long is the journey? Think step by step.",
    "List five useful habits for learning a new language, with one sentence about each.",
)
"""What the target is asked, greedily, for text to measure on."""

NUM_RANKS = 8
"""Guesses at one place that are measured, the likeliest first."""

Guess = tuple[int, int, list[int]]
"""Depth, place of the token that is guessed, the guesses."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProbeText:
    """token_ids: a prompt and what the target said to it greedily. num_prompt_tokens: how many are the prompt's, which
    are not counted. features: [n, len(feature_states(head)) * H], of n places from the first on, all that are counted:
    at least len(token_ids) - 2."""

    token_ids: Sequence[int]
    num_prompt_tokens: int
    features: torch.Tensor


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """Of guesses after d guessed states (Medusa: of head d), num_right[d] of num_guesses[d] were the target's token.
    num_right_at[r]: over all depths, how often it was the r-th guess at its place; the first is 0.

    convention: in which the head was read. warning: empty, or why the head is doubtful.
    """

    convention: Convention
    num_right: tuple[int, ...]
    num_guesses: tuple[int, ...]
    num_right_at: tuple[int, ...] = (0,) * NUM_RANKS
    warning: str = ""

    @property
    def agreement(self) -> tuple[float, ...]:
        """Top-1 agreement by depth, 0 to 1."""
        return tuple(right / max(1, guesses) for right, guesses in zip(self.num_right, self.num_guesses, strict=True))

    @property
    def rank_agreement(self) -> tuple[float, ...]:
        """Share of the places at which the first, second, ... guess was right, over all depths."""
        return tuple(right / max(1, sum(self.num_guesses)) for right in self.num_right_at)

    def __add__(self, other: ProbeReport) -> ProbeReport:
        """Over both texts."""
        return ProbeReport(
            self.convention,
            tuple(a + b for a, b in zip(self.num_right, other.num_right, strict=True)),
            tuple(a + b for a, b in zip(self.num_guesses, other.num_guesses, strict=True)),
            tuple(a + b for a, b in zip(self.num_right_at, other.num_right_at, strict=True)),
        )

    def __str__(self) -> str:
        shares = " / ".join(f"{100 * share:.1f}" for share in self.agreement)
        return f"{shares} % by depth over {self.num_guesses[0]} tokens ({self.convention})"


def feature_states(head: Head) -> tuple[int, ...]:
    """The target's states that any way of reading the head needs: what the calibration's features consist of."""
    return tuple(sorted({state for convention in head.conventions for state in convention.states}))


def probe(head: Head, token_ids: Sequence[int], features: torch.Tensor, num_prompt_tokens: int = 0) -> ProbeReport:
    """Teacher-forced: what the head guesses at each place of a text of the target's, as it is read now.

    features: [n, W] of the places from the first on, states as in `head.states`, n >= len(token_ids) - 2.
    """
    ids = torch.tensor(list(token_ids), dtype=torch.int64, device=head.device)
    right, total, right_at = [0] * NUM_DEPTHS, [0] * NUM_DEPTHS, [0] * NUM_RANKS
    first = max(0, num_prompt_tokens - 2)  # the first guess is of the response's first token, from the prompt's last
    for depth, place, guesses in _guesses(head, ids, features, first):
        total[depth] += 1
        if int(ids[place]) in guesses:
            rank = guesses.index(int(ids[place]))
            right[depth] += rank == 0
            right_at[rank] += 1
    return ProbeReport(head.convention, tuple(right), tuple(total), tuple(right_at))


def choose_convention(head: Head, texts: Sequence[ProbeText]) -> tuple[Head, ProbeReport]:
    """The head in that of its ways of reading that agrees best with the texts, the likeliest one among equals.

    Raises FailedPrecondition below `REFUSED_BELOW`, InvalidArgument where the texts are too short to tell; the report
    has a warning below `WARNED_BELOW`.
    """
    kept = feature_states(head)
    reports = []
    for convention in head.conventions:
        reading = head.reading(convention)
        parts = [
            probe(reading, text.token_ids, _select(text.features, kept, reading.states), text.num_prompt_tokens)
            for text in texts
        ]
        nothing = ProbeReport(convention, (0,) * NUM_DEPTHS, (0,) * NUM_DEPTHS)
        reports.append(sum(parts, nothing))
    best = max(reports, key=lambda report: sum(report.agreement))
    return head.reading(best.convention), _judged(head, best, reports)


def _guesses(head: Head, ids: torch.Tensor, features: torch.Tensor, first: int) -> Iterator[Guess]:
    if isinstance(head, MedusaHead):
        return _medusa_guesses(head, ids, features, first)
    return _eagle_guesses(head, ids, features, first)


def _eagle_guesses(head: EagleHead, ids: torch.Tensor, features: torch.Tensor, first: int) -> Iterator[Guess]:
    """Pair t guesses token t + 2; the text's own tokens on top of the head's own states guess those after it."""
    context, num_pairs = head.new_context(), len(ids) - 2
    if first:
        context.extend(features[:first], ids[1 : first + 1])
    while context.length < num_pairs:
        start, end = context.length, min(context.length + STRIDE, num_pairs)
        logits = context.extend_rows(features[start:end], ids[start + 1 : end + 1])
        for row, guesses in enumerate(_best(head, logits)):
            yield 0, start + row + 2, guesses
        for depth in range(1, NUM_DEPTHS):
            if end + depth >= len(ids) - 1:
                break
            (guesses,) = _best(head, context.step(int(ids[end + depth]))[None])
            yield depth, end + depth + 1, guesses


def _medusa_guesses(head: MedusaHead, ids: torch.Tensor, features: torch.Tensor, first: int) -> Iterator[Guess]:
    """Head d guesses token t + d + 2 from the state of token t."""
    for place in range(first, len(ids) - 2):
        num_heads = NUM_DEPTHS if (place - first) % STRIDE == 0 else 1
        for depth, guesses in enumerate(_best(head, head.logits(features[place], num_heads))):
            if place + depth + 2 < len(ids):
                yield depth, place + depth + 2, guesses


def _best(head: Head, logits: torch.Tensor) -> list[list[int]]:
    """The likeliest ids of each row, the best first."""
    best = logits.topk(min(NUM_RANKS, logits.shape[-1]), -1).indices
    return (best if head.draft_ids is None else head.draft_ids[best]).tolist()


def _select(features: torch.Tensor, kept: Sequence[int], states: Sequence[int]) -> torch.Tensor:
    """[n, len(states) * H] of [n, len(kept) * H]."""
    by_state = features.unflatten(-1, (len(kept), -1))
    return by_state[:, [kept.index(state) for state in states]].flatten(1)


def _judged(head: Head, best: ProbeReport, reports: Sequence[ProbeReport]) -> ProbeReport:
    if best.num_guesses[0] < MIN_TOKENS:
        raise InvalidArgument(
            f"heads: {head.name} was tried on {best.num_guesses[0]} tokens, {MIN_TOKENS} at least are needed to tell",
            field="heads",
        )
    share, measured = best.agreement[0], f"{head.name} agrees with the target on {best}"
    tried = "" if len(reports) == 1 else "; read otherwise: " + "; ".join(str(r) for r in reports if r is not best)
    if share < REFUSED_BELOW:
        raise FailedPrecondition(
            f"heads: {measured}{tried}. That is no better than chance: it was most likely trained for another model "
            "(or another version of this one), or reads other layers than its config tells",
            field="heads",
            reason="HEAD_DISAGREES",
        )
    if share >= WARNED_BELOW:
        return best
    warning = (
        f"{measured}{tried}: drafts will seldom be accepted. Its target may be another version of this model, or "
        "quantised otherwise, or the head was trained on little"
    )
    _log.warning("%s", warning)
    return dataclasses.replace(best, warning=warning)

"""p of one place, derived once more: straight from the definitions in `outrider.sampling.distribution`, by full sorts
and loops over ids, and sharing no code with it. With it goes how far each probability may be off.

Passes over the same tokens in another order of additions give logits that differ in their last bits. `tolerance` says
by how much at most, in logits, any of them may; what follows from it is bounded to the first order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.sampling.grammar import GrammarState
from outrider.sampling.params import SamplingParams, StoppingParams

ROUNDING = 1e-9
"""Of sums of float64 probabilities in another order, and more: what no decision is blamed for."""


@dataclass(frozen=True, slots=True)
class Law:
    """p: float64[V] summing to 1. error: float64[V], how far each may be off."""

    p: np.ndarray
    error: np.ndarray


@dataclass(frozen=True, slots=True)
class Scores:
    """What the largest of is chosen, lowest id on ties. values: float64[V], -inf where a token cannot come.
    kept: bool[V], tokens that the filters let through; uncertain: bool[V], where the tolerance leaves that open.
    error: how far the difference of two values may be off."""

    values: np.ndarray
    kept: np.ndarray
    uncertain: np.ndarray
    error: float

    @property
    def choice(self) -> int:
        """The token that is chosen."""
        return int(np.argmax(np.where(self.kept, self.values, -np.inf)))


class Text:
    """Prompt and output up to the place that is looked at."""

    def __init__(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int] = (), grammar: GrammarState | None = None
    ) -> None:
        self.prompt_ids = tuple(prompt_ids)
        self.output_ids: list[int] = []
        self.grammar = grammar
        for token_id in output_ids:
            self.push(token_id)

    @property
    def length(self) -> int:
        """Ids so far, prompt included."""
        return len(self.prompt_ids) + len(self.output_ids)

    def push(self, token_id: int) -> None:
        """Goes one token on."""
        self.output_ids.append(token_id)
        if self.grammar is not None:
            self.grammar.push(token_id)

    def pop(self, num_tokens: int) -> None:
        """Goes back."""
        if num_tokens:
            del self.output_ids[-num_tokens:]
            if self.grammar is not None:
                self.grammar.pop(num_tokens)


def processed(logits: np.ndarray, params: SamplingParams, stopping: StoppingParams, text: Text) -> np.ndarray | None:
    """float32[V] after logit bias, penalties and masks; None where the row cannot be read. logits: float32[V]."""
    row = np.array(logits, dtype=np.float32)
    if not _is_readable(row):
        return None
    for token_id, bias in params.logit_bias.items():
        row[token_id] += np.float32(bias)
    _penalise(row, params, text)
    output = text.output_ids
    if params.allowed_token_ids:
        row[[token_id for token_id in range(len(row)) if token_id not in params.allowed_token_ids.ids]] = -np.inf
    for word in params.bad_words:
        before = list(word[:-1])
        if not before or output[-len(before) :] == before:
            row[word[-1]] = -np.inf
    if len(output) < stopping.min_tokens:
        row[sorted(stopping.stop_token_ids)] = -np.inf
    if text.grammar is not None:
        allowed = text.grammar.allowed(stopping.stop_token_ids)
        if allowed is not None:
            row[~allowed[: len(row)]] = -np.inf
    return row if _is_readable(row) else None


def law(row: np.ndarray, params: SamplingParams, tolerance: float) -> Law:
    """Temperature above 0. row: float32[V] as `processed` gives it."""
    weights, kept, uncertain = _filtered(row, params, tolerance)
    masses = np.where(kept, np.exp(weights), 0.0)
    total = masses.sum()
    p = masses / total
    would_be = np.where(uncertain, np.exp(weights), 0.0) / total
    relative = min(math.expm1(min(_shift(params, tolerance) / params.temperature, 50.0)), 1e9)
    error = np.where(uncertain, would_be, p * (relative + would_be.sum()))
    return Law(p, np.minimum(error, 1.0))


def greedy_scores(row: np.ndarray, params: SamplingParams, tolerance: float) -> Scores:
    """Processed logits."""
    none = np.zeros(len(row), bool)
    return Scores(row.astype(np.float64), ~none, none, _shift(params, tolerance) + ROUNDING)


def coupled_scores(row: np.ndarray, params: SamplingParams, tolerance: float, gumbel: np.ndarray) -> Scores:
    """ln p up to a constant, and the noise float64[V] of the place."""
    weights, kept, uncertain = _filtered(row, params, tolerance)
    values = np.where(kept | uncertain, weights + gumbel, -np.inf)
    return Scores(values, kept, uncertain, _shift(params, tolerance) / params.temperature + ROUNDING)


def _shift(params: SamplingParams, tolerance: float) -> float:
    """Of the difference of two processed logits: penalties stretch what logits are off by."""
    penalty = params.repetition_penalty
    return 2.0 * tolerance * max(1.0, penalty, 1.0 / penalty)


def _filtered(row: np.ndarray, params: SamplingParams, tolerance: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(log-probabilities up to a constant, float64[V], the largest 0; bool[V], what top-k, top-p and min-p keep;
    bool[V], where the tolerance leaves that open)."""
    shift = _shift(params, tolerance)
    values = row.astype(np.float64)
    with np.errstate(over="ignore"):
        weights = (values - values.max()) / params.temperature
    order = np.argsort(-values, kind="stable")  # likeliest first, of equal ones the lower id
    possible = values > -np.inf
    kept = possible.copy()
    uncertain = np.zeros(len(row), bool)
    if 0 < params.top_k < len(row):
        kept[order[params.top_k :]] = False
        last_in, first_out = values[order[params.top_k - 1]], values[order[params.top_k]]
        with np.errstate(invalid="ignore"):
            uncertain |= possible & kept & (values - first_out <= shift)
            uncertain |= possible & ~kept & (last_in - values <= shift)
    if params.top_p < 1.0:
        in_order = order[(kept | uncertain)[order]]
        masses = np.where(kept[in_order], np.exp(weights[in_order]), 0.0)
        cumulative = np.cumsum(masses)
        total = cumulative[-1]
        before = np.concatenate([[0.0], cumulative[:-1]]) / total
        falling = -values[in_order]  # ascends
        above = np.searchsorted(falling, falling - shift, side="left")
        not_below = np.searchsorted(falling, falling + shift, side="right")
        around = np.concatenate([[0.0], cumulative]) / total
        slack = before * (1.0 - before) * shift / params.temperature + ROUNDING
        least, most = around[above] - slack, around[not_below] - masses / total + slack
        uncertain[in_order] |= (least < params.top_p) & (params.top_p <= most)
        kept[in_order[before >= params.top_p]] = False
        uncertain[in_order[least >= params.top_p]] = False
    if params.min_p > 0.0:
        bound = math.log(params.min_p)
        within = shift / params.temperature
        uncertain |= (kept | uncertain) & (np.abs(weights - bound) <= within)
        kept &= weights >= bound
        uncertain &= weights >= bound - within
    return weights, kept, uncertain


def _penalise(row: np.ndarray, params: SamplingParams, text: Text) -> None:
    if (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0):
        return
    counts = Counter(text.output_ids)
    for token_id in {*text.prompt_ids, *counts}:
        value = row[token_id]
        if params.repetition_penalty != 1.0:
            penalty = np.float32(params.repetition_penalty)
            value = value / penalty if value > 0 else value * penalty
        value = value - np.float32(params.frequency_penalty) * np.float32(counts[token_id])
        row[token_id] = value - np.float32(params.presence_penalty) * np.float32(counts[token_id] > 0)


def _is_readable(row: np.ndarray) -> bool:
    return not np.isnan(row).any() and bool(np.isfinite(row.max()))

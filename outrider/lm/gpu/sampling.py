"""Logits to distributions and choices where the logits are, for many rows at once.

The fast twin of `outrider.sampling.distribution`, which says what everything means. Processed logits are float32 and
equal the host's bit for bit; distributions are float64 like the host's and differ from them by rounding only (sums in
another order, another exponential), so laws that hold there to 1e-15 hold here. Greedy choices are equal.

R rows, V ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.errors import Internal
from outrider.sampling.history import History
from outrider.sampling.masks import needs_masks
from outrider.sampling.params import SamplingParams, StoppingParams

DRAW_CHUNK = 256
"""Ids summed at once when a draw looks for its id."""


@dataclass(frozen=True, slots=True)
class RowContext:
    """What shifts the logits of consecutive rows: row i follows the output in `history` and the first i of `drafts`."""

    params: SamplingParams
    stopping: StoppingParams
    history: History
    drafts: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.drafts) + 1

    @property
    def is_plain(self) -> bool:
        """Whether logits stay as they are."""
        params = self.params
        masks = params.allowed_token_ids or params.bad_words or params.grammar or self.stopping.masks_stops
        return not (params.logit_bias or params.has_penalties or masks)


def process(rows: torch.Tensor, contexts: Sequence[RowContext]) -> torch.Tensor:
    """float32[R, V]: logit bias, penalties and masks on all rows of all contexts, in order; `rows` stays as it is.

    Histories are as before when it returns.
    """
    if all(context.is_plain for context in contexts):
        return rows
    rows = rows.clone()
    start = 0
    for context in contexts:
        if not context.is_plain:
            _process(rows[start : start + context.num_rows], context)
        start += context.num_rows
    return rows


def is_readable(rows: torch.Tensor) -> torch.Tensor:
    """bool[R]: whether the host would accept the row; it has no NaN, no +inf and something above -inf."""
    return torch.isfinite(rows.amax(1))


def greedy(processed: torch.Tensor) -> torch.Tensor:
    """int64[R]: the likeliest id, the lowest one on ties."""
    return processed.argmax(1)


@dataclass(frozen=True, slots=True)
class Filters:
    """One entry per row, on the host: what a distribution takes of `SamplingParams`."""

    temperature: list[float]
    top_k: list[int]
    top_p: list[float]
    min_p: list[float]

    @staticmethod
    def of(params: Sequence[SamplingParams]) -> Filters:
        """params: one per row."""
        return Filters(
            [p.temperature for p in params],
            [p.top_k for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
        )


def log_weights(processed: torch.Tensor, filters: Filters) -> torch.Tensor:
    """float64[R, V]: ln p up to one constant a row, the largest being 0; -inf for ids masked or filtered out."""
    device, vocab_size = processed.device, processed.shape[1]
    weights = processed.double()
    weights -= weights.amax(1, keepdim=True)
    if any(t != 1.0 for t in filters.temperature):
        weights /= _column(filters.temperature, device)
    ranked = [
        row
        for row, (k, p) in enumerate(zip(filters.top_k, filters.top_p, strict=True))
        if 0 < k < vocab_size or p < 1.0
    ]
    if ranked:
        where = torch.tensor(ranked, device=device)
        top_k = [k if 0 < k < vocab_size else vocab_size for k in (filters.top_k[row] for row in ranked)]
        top_p = [filters.top_p[row] for row in ranked]
        # Adding 0 makes one zero of two: a sort by bits would tell them apart.
        kept = _keep_likeliest(processed[where] + 0.0, weights[where], top_k, top_p)
        weights.index_copy_(0, where, kept)
    if any(m > 0.0 for m in filters.min_p):
        least = [math.log(m) if m > 0.0 else -math.inf for m in filters.min_p]
        weights.masked_fill_(weights < _column(least, device), -math.inf)
    return weights


def probabilities(weights: torch.Tensor) -> torch.Tensor:
    """float64[R, V], each row summing to 1."""
    masses = torch.exp(weights)
    return masses / masses.sum(1, keepdim=True)


def draw(masses: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """int64[R]: in each of float64[R, V] the first id whose cumulative mass exceeds u times the total; never one
    without mass.

    Sums run in a fixed order, chunk by chunk, so a draw is a function of its row and u.
    """
    num_rows, vocab_size = masses.shape
    num_chunks = -(-vocab_size // DRAW_CHUNK)
    padded = torch.nn.functional.pad(masses, (0, num_chunks * DRAW_CHUNK - vocab_size))
    chunks = padded.view(num_rows, num_chunks, DRAW_CHUNK)
    within = chunks.cumsum(2) if not masses.is_cuda else chunks.permute(2, 0, 1).contiguous().cumsum(0).permute(1, 2, 0)
    before = within[:, :, -1].t().contiguous().cumsum(0).t()  # [R, chunks], each including its own
    wanted = uniforms * before[:, -1]
    chunk = _first(before > wanted[:, None])
    start = torch.where(chunk > 0, before.gather(1, (chunk - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    rows = torch.arange(num_rows, device=masses.device)
    inside, own = within[rows, chunk], chunks[rows, chunk]
    has_mass = own > 0
    reached = has_mass & (inside > (wanted - start)[:, None])
    # Rounding between the two sums may leave nothing reached: then it is the last id with mass.
    last = DRAW_CHUNK - 1 - _first(has_mass.flip(1))
    return chunk * DRAW_CHUNK + torch.where(reached.any(1), _first(reached), last)


def _process(rows: torch.Tensor, context: RowContext) -> None:
    """In place, on the rows of one context."""
    params, stopping, history = context.params, context.stopping, context.history
    if params.logit_bias:
        ids = _ids(list(params.logit_bias.keys()), rows)
        rows[:, ids] += torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=rows.device)
    num_pushed = 0
    try:
        for index in range(context.num_rows):
            if params.has_penalties:
                _penalise(rows[index], params, history)
            if needs_masks(params, stopping, history):
                _mask(rows[index], params, stopping, history)
            if index < len(context.drafts):
                history.push(context.drafts[index])
                num_pushed += 1
    finally:
        history.pop(num_pushed)


def _penalise(row: torch.Tensor, params: SamplingParams, history: History) -> None:
    seen, counted = history.seen()
    ids = _ids(seen, row)
    counts = torch.from_numpy(counted.astype(np.float32)).to(row.device)
    values = row[ids]
    if params.repetition_penalty != 1.0:
        penalty = torch.full((), params.repetition_penalty, dtype=torch.float32, device=row.device)
        values = torch.where(values > 0, values / penalty, values * penalty)
    values = values - torch.full((), params.frequency_penalty, dtype=torch.float32, device=row.device) * counts
    values = values - torch.full((), params.presence_penalty, dtype=torch.float32, device=row.device) * (counts > 0)
    row[ids] = values


def _mask(row: torch.Tensor, params: SamplingParams, stopping: StoppingParams, history: History) -> None:
    if params.allowed_token_ids:
        allowed = _ids(params.allowed_token_ids.array, row)
        kept = row[allowed]
        row.fill_(-math.inf)
        row[allowed] = kept
    if params.bad_words:
        row[_ids(params.bad_words.banned_after(history), row)] = -math.inf
    if history.num_output_tokens < stopping.min_tokens and stopping.stop_token_ids:
        row[_ids(sorted(stopping.stop_token_ids), row)] = -math.inf
    try:
        may_follow = None if history.grammar is None else history.grammar.allowed(stopping.stop_token_ids)
    except Internal:
        row.fill_(-math.inf)  # it cannot be read, and rows of others can
        return
    if may_follow is not None:
        row.masked_fill_(torch.from_numpy(~may_follow[: len(row)]).to(row.device), -math.inf)


def _keep_likeliest(
    processed: torch.Tensor, weights: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]
) -> torch.Tensor:
    """weights with -inf where top-k, then top-p, take an id out."""
    order = processed.sort(dim=1, descending=True, stable=True).indices
    ranked = weights.gather(1, order)
    ranks = torch.arange(ranked.shape[1], device=ranked.device)[None]
    ranked.masked_fill_(ranks >= _column(top_k, ranked.device, torch.int64), -math.inf)
    masses = torch.exp(ranked)
    wanted = _column(top_p, ranked.device) * masses.sum(1, keepdim=True)
    cumulative = masses.cumsum(1)
    # An id stays while the likelier ones do not hold the mass yet; the likeliest always does. 1.0 takes nothing out.
    is_out = torch.zeros_like(cumulative, dtype=torch.bool)
    is_out[:, 1:] = cumulative[:, :-1] >= wanted
    is_out &= _column(top_p, ranked.device) < 1.0
    ranked.masked_fill_(is_out, -math.inf)
    return weights.scatter(1, order, ranked)


def _column(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)[:, None]


def _ids(ids: Sequence[int] | np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(np.array(ids, dtype=np.int64), device=like.device)


def _first(flags: torch.Tensor) -> torch.Tensor:
    """int64[R]: index of the first True of each row of bool[R, n]; 0 where there is none."""
    return flags.to(torch.int8).argmax(1)

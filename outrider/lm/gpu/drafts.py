"""A draft's token, or the likeliest entries of its q, where the logits are: the device's part of a model drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from outrider.lm.gpu.noise import gumbel, signed
from outrider.lm.gpu.sampling import Filters, RowContext, greedy, is_readable, log_weights, process
from outrider.sampling.history import History
from outrider.sampling.noise import Noise
from outrider.sampling.params import SamplingParams, StoppingParams


class DraftRow(Protocol):
    """What decides one draft: its place in a text and the parameters. `position` is that of the first chained row's."""

    params: SamplingParams
    stopping: StoppingParams
    history: History
    noise: Noise
    position: int
    max_q_entries: int


def decide(decisions: Sequence[DraftRow], rows: torch.Tensor, step: int) -> torch.Tensor:
    """rows float32[n, V], one of each draft -> float64[n, w]. A line is the token, where the rule is a match of ids;
    else how many ids may be drawn, at most K, then K ids and K masses, the likeliest first. NaN: cannot be read."""
    processed = process(rows, [RowContext(d.params, d.stopping, d.history) for d in decisions])
    readable = is_readable(rows)
    if processed is not rows:
        readable &= is_readable(processed)
    most = max(0 if d.params.decides_by_match else d.max_q_entries for d in decisions)
    most = min(most, rows.shape[1])
    result = torch.zeros(len(decisions), 1 + 2 * most, dtype=torch.float64, device=rows.device)
    is_greedy = [i for i, d in enumerate(decisions) if d.params.greedy]
    if is_greedy:
        own = torch.tensor(is_greedy, device=rows.device)
        result[own, 0] = greedy(processed[own]).double()
    others = [i for i, d in enumerate(decisions) if not d.params.greedy]
    if others:
        own = torch.tensor(others, device=rows.device)
        weights = log_weights(processed[own], Filters.of([decisions[i].params for i in others]))
        result[own] = _drawn([decisions[i] for i in others], weights, most, step)
    result[:, 0].masked_fill_(~readable, torch.nan)
    return result


def _drawn(decisions: Sequence[DraftRow], weights: torch.Tensor, most: int, step: int) -> torch.Tensor:
    keys = torch.tensor([signed(d.noise.gumbel_key(d.position + step)) for d in decisions], device=weights.device)
    matches = torch.tensor([d.params.decides_by_match for d in decisions], device=weights.device)
    if all(d.params.decides_by_match for d in decisions):
        tokens = (weights + gumbel(keys, weights.shape[1])).argmax(1).double()[:, None]
        return torch.nn.functional.pad(tokens, (0, 2 * most))
    ranked = weights.sort(dim=1, descending=True, stable=True)
    ids, masses = ranked.indices[:, :most], torch.exp(ranked.values[:, :most])
    first = (masses > 0.0).sum(1)
    if any(d.params.decides_by_match for d in decisions):
        first = torch.where(matches, (weights + gumbel(keys, weights.shape[1])).argmax(1), first)
    return torch.cat([first[:, None].double(), ids.double(), masses], 1)

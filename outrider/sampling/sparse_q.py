"""Draft distributions as integer counts out of 65,536: what is sent is exactly what was sampled from."""

from __future__ import annotations

import numpy as np

from outrider.drafting.proposal import MAX_Q_ENTRIES, Q_TOTAL, SparseQ
from outrider.sampling.distribution import likeliest, processed_logits, support, tempered
from outrider.sampling.history import History
from outrider.sampling.params import SamplingParams, StoppingParams


def sparse_q(
    logits: np.ndarray,
    params: SamplingParams,
    stopping: StoppingParams,
    history: History,
    max_entries: int,
) -> SparseQ:
    """The draft distribution of one row of draft logits, float32[V], after all sampling parameters.

    The `max_entries` likeliest tokens are scaled to 65,536, rounded down, and the remainder goes to the largest
    fractions (ties to the likelier token, of equally likely ones to the lower id); zeros are dropped. Entries fall in
    likelihood. Truncation happens here, before the draw: never drop or change a token once it was sampled.

    max_entries: [1, 256]. Raises ValueError outside it or at temperature 0 (a greedy draft is one-hot and has no q),
    Internal on bad logits.
    """
    if not 1 <= max_entries <= MAX_Q_ENTRIES:
        raise ValueError(f"max_entries is {max_entries}, must be in [1, {MAX_Q_ENTRIES}]")
    if params.greedy:
        raise ValueError("temperature is 0: draft the greedy token as one-hot, without q")
    if params.top_p >= 1.0 and params.min_p <= 0.0:
        # Filters that go by rank alone: the few that stay are found before anything is computed of the others.
        logits = processed_logits(logits, params, stopping, history)
        ids = None
        ranked = likeliest(logits, min(max_entries, params.top_k) if params.top_k > 0 else max_entries)
        masses = np.exp(tempered(logits[ranked], params.temperature))
    else:
        ids, weights = support(logits, params, stopping, history)
        ranked = likeliest(weights, max_entries)
        masses = np.exp(weights[ranked])
    counts = to_counts(masses)
    ids = ranked if ids is None else ids[ranked]
    drawable = counts > 0
    return SparseQ(ids=ids[drawable].astype(np.uint32), counts=counts[drawable])


def to_counts(masses: np.ndarray) -> np.ndarray:
    """int64[K] summing to 65,536, in proportion to `masses` float64[K]: largest remainders, ties to the lower index."""
    shares = masses * (Q_TOTAL / masses.sum())
    counts = np.floor(shares).astype(np.int64)
    fractions = shares - counts
    remainder = Q_TOTAL - int(counts.sum())
    counts[np.argsort(-fractions, kind="stable")[:remainder]] += 1
    return counts


def draw_draft(q: SparseQ, integer16: int) -> int:
    """The token that `integer16`, uniform in [0, 65,536), draws: each id for exactly its count of integers."""
    return int(q.ids[np.searchsorted(np.cumsum(q.counts), integer16, side="right")])

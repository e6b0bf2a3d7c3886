"""How sure a drafter is of a draft: what is calibrated into a chance of acceptance."""

from __future__ import annotations

import numpy as np

from outrider.drafting.proposal import Q_TOTAL, SparseQ
from outrider.sampling.distribution import processed_logits
from outrider.sampling.history import History
from outrider.sampling.params import SamplingParams, StoppingParams


def sampled_confidence(q: SparseQ) -> float:
    """Of a draft that is drawn from q, whatever is drawn: the likeliest token's probability."""
    return int(q.counts.max()) / Q_TOTAL


def matched_confidence(
    token_id: int, logits: np.ndarray, params: SamplingParams, stopping: StoppingParams, history: History
) -> float:
    """Of a draft that must be the target's own choice (greedy, COUPLED): its probability before filters, at the
    request's temperature, greedily at 1. logits: float32[V]. Raises Internal as `processed_logits` does."""
    scores = processed_logits(logits, params, stopping, history)
    if not params.greedy and params.temperature != 1.0:
        scores = scores / np.float32(params.temperature)
    return float(1 / np.exp(scores - scores[token_id]).sum(dtype=np.float64))

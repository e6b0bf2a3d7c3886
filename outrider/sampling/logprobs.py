"""Log-probabilities as clients see them: of the model's raw distribution, before any sampling parameter."""

from __future__ import annotations

import math

import numpy as np

from outrider.sampling.distribution import likeliest


def raw_logprobs(logits: np.ndarray, token_id: int, num_top: int) -> tuple[float, np.ndarray, np.ndarray]:
    """(ln p(token_id), top ids int64[n], their ln p float64[n]) of softmax(logits), natural logarithms.

    logits: float32[V], a row that sampling has accepted (finite maximum). n = min(num_top, V), likeliest first and of
    equal ones the lower id first; the token itself is listed only when it is among them.
    """
    weights = np.asarray(logits, dtype=np.float32).astype(np.float64)
    weights -= weights.max()
    log_total = math.log(np.exp(weights).sum())
    top_ids = likeliest(weights, num_top) if num_top > 0 else np.empty(0, dtype=np.int64)
    return float(weights[token_id]) - log_total, top_ids, weights[top_ids] - log_total

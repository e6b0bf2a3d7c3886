"""Logits to the distribution that a token is drawn from: the one place where sampling parameters act.

Order: logit bias, penalties (repetition, then frequency and presence), masks (allowed_token_ids, bad_words, min_tokens;
see masks.py), temperature, top-k, top-p, min-p.
"Likeliest" is by processed logit, and of equal ones the lower id counts as likelier; every filter keeps the likeliest:

- top-k keeps exactly k tokens;
- top-p keeps the shortest run of likeliest tokens whose mass, of what top-k left, is at least top_p;
- min-p keeps tokens with at least min_p times the probability of the likeliest.

Logits come as float32 and processed logits stay float32; from the temperature on all is float64.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from outrider.errors import Internal
from outrider.sampling.history import History
from outrider.sampling.masks import apply_masks, dead_end, needs_masks
from outrider.sampling.noise import Noise
from outrider.sampling.params import SamplingParams, StoppingParams

_TOP_P_FIRST_TRY = 1024
_DRAW_BLOCK = 256


class Support(NamedTuple):
    """What the filters left: `weights` float64[n] are log-probabilities up to one constant, the largest being 0.

    ids: int64[n] ascending, or None for the whole vocabulary.
    """

    ids: np.ndarray | None
    weights: np.ndarray

    def probabilities(self) -> np.ndarray:
        """float64[n], summing to 1."""
        masses = np.exp(self.weights)
        masses /= masses.sum()
        return masses

    def possible(self) -> Support:
        """Without ids that cannot come: of a draft's row that knows few ids, or of a masked one, nearly all."""
        if self.weights.min() > -np.inf:
            return self
        (kept,) = np.nonzero(self.weights > -np.inf)
        return Support(kept if self.ids is None else self.ids[kept], self.weights[kept])


def processed_logits(
    logits: np.ndarray, params: SamplingParams, stopping: StoppingParams, history: History
) -> np.ndarray:
    """float32[V] after logit bias, penalties and masks. The input is never modified; it is returned itself when nothing
    applies.

    Raises Internal when the row holds NaN or +inf, before or after, or nothing but -inf; of its kinds DeadEnd where it
    is the masks that leave nothing.
    """
    logits = np.asarray(logits, dtype=np.float32)
    _check_row(logits, "the model's logits")
    masks = needs_masks(params, stopping, history)
    if not (params.logit_bias or params.has_penalties or masks):
        return logits
    logits = logits.copy()
    if params.logit_bias:
        bias_ids = np.fromiter(params.logit_bias.keys(), dtype=np.int64, count=len(params.logit_bias))
        logits[bias_ids] += np.fromiter(params.logit_bias.values(), dtype=np.float32, count=len(bias_ids))
    if params.has_penalties:
        _apply_penalties(logits, params, history)
    if masks:
        apply_masks(logits, params, stopping, history)
        if logits.max() == -np.inf:
            raise dead_end(params, stopping, history)
    _check_row(logits, "logits after logit_bias, penalties and masks")
    return logits


def distribution(logits: np.ndarray, params: SamplingParams, stopping: StoppingParams, history: History) -> np.ndarray:
    """float64[V] summing to 1: what the next token is drawn from. At temperature 0 all mass is on the greedy token.

    Raises Internal as `processed_logits` does.
    """
    if params.greedy:
        one_hot = np.zeros(len(logits))
        one_hot[greedy_token(logits, params, stopping, history)] = 1.0
        return one_hot
    kept = support(logits, params, stopping, history)
    if kept.ids is None:
        return kept.probabilities()
    dense = np.zeros(len(logits))
    dense[kept.ids] = kept.probabilities()
    return dense


def greedy_token(logits: np.ndarray, params: SamplingParams, stopping: StoppingParams, history: History) -> int:
    """The argmax of the processed logits, lowest id on ties. Raises Internal as `processed_logits` does."""
    return int(np.argmax(processed_logits(logits, params, stopping, history)))


def coupled_token(
    logits: np.ndarray,
    params: SamplingParams,
    stopping: StoppingParams,
    history: History,
    noise: Noise,
    position: int,
) -> int:
    """argmax over the surviving ids of ln p + Gumbel noise, lowest id on ties: a draw from p (the Gumbel-max trick).

    position: the absolute position that the token will occupy. The constant by which `Support.weights` differ from ln p
    does not move the argmax. At temperature 0 the greedy token.
    """
    if params.greedy:
        return greedy_token(logits, params, stopping, history)
    ids, weights = support(logits, params, stopping, history).possible()
    best = int(np.argmax(weights + noise.gumbel(position, len(weights) if ids is None else ids)))
    return best if ids is None else int(ids[best])


def draw(probabilities: np.ndarray, u: float) -> int:
    """Inverse CDF: the first id whose cumulative mass exceeds u times the total; u in [0, 1).

    `probabilities` float64[V] need not sum to 1, but must have mass. An id with probability 0 is never returned.
    """
    num_whole = len(probabilities) - len(probabilities) % _DRAW_BLOCK
    if num_whole < 2 * _DRAW_BLOCK:
        return _first_beyond(np.cumsum(probabilities), u)
    # A running sum waits for itself at every id: over blocks first, then within one, takes a tenth of the time.
    masses = probabilities[:num_whole].reshape(-1, _DRAW_BLOCK).sum(axis=1)
    bounds = np.cumsum(np.append(masses, probabilities[num_whole:].sum()))
    block = _first_beyond(bounds, u)
    start = block * _DRAW_BLOCK
    within = probabilities[start : start + _DRAW_BLOCK]
    left = u * bounds[-1] - (bounds[block - 1] if block else 0.0)
    index = int(np.searchsorted(np.cumsum(within), left, side="right"))
    # The block's own running sum may round to less than what its place among the blocks leaves.
    return start + (index if index < len(within) else int(np.flatnonzero(within)[-1]))


def _first_beyond(cumulative: np.ndarray, u: float) -> int:
    """u * total rounds to less than total for every u <= 1 - 2**-53, so the index is in range; where the total is a
    subnormal number it may not, and the last id with mass is meant."""
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return index if index < len(cumulative) else int(np.searchsorted(cumulative, cumulative[-1]))


def support(logits: np.ndarray, params: SamplingParams, stopping: StoppingParams, history: History) -> Support:
    """All stages, temperature above 0. Raises Internal as `processed_logits` does."""
    logits = processed_logits(logits, params, stopping, history)
    ids: np.ndarray | None = None
    if 0 < params.top_k < len(logits):
        ids = likeliest(logits, params.top_k)
    weights = tempered(logits if ids is None else logits[ids], params.temperature)
    if params.top_p < 1.0:
        ids, weights = _keep_top_p(logits, ids, weights, params.top_p)
    if params.min_p > 0.0:
        (kept,) = np.nonzero(weights >= math.log(params.min_p))
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    if ids is None:
        return Support(None, weights)
    ascending = np.argsort(ids)
    return Support(ids[ascending], weights[ascending])


def likeliest(values: np.ndarray, count: int) -> np.ndarray:
    """int64[min(count, V)]: the indices of the largest values in falling order, lower index first on ties.

    Selects before it sorts, so a small `count` costs one pass over a large vocabulary. Values of -inf come last.
    """
    if count >= len(values):
        return np.argsort(-values, kind="stable")
    if values.min() == -np.inf:
        # Selection among values that are mostly equal is many times slower: masked ids take no part in it.
        (possible,) = np.nonzero(values > -np.inf)
        ranked = possible[likeliest(values[possible], count)]
        num_missing = count - len(ranked)
        return np.concatenate([ranked, np.flatnonzero(values == -np.inf)[:num_missing]]) if num_missing else ranked
    smallest_kept = np.partition(values, len(values) - count)[len(values) - count]
    (above,) = np.nonzero(values > smallest_kept)
    (equal,) = np.nonzero(values == smallest_kept)
    chosen = np.concatenate([above, equal[: count - len(above)]])
    return chosen[np.argsort(-values[chosen], kind="stable")]


def _check_row(logits: np.ndarray, what: str) -> None:
    largest = logits.max()
    if math.isfinite(largest):
        return
    if math.isnan(largest):
        bad = f"NaN at id {int(np.argmax(np.isnan(logits)))}"
    elif largest > 0:
        bad = f"+inf at id {int(np.argmax(logits))}"
    else:
        bad = "-inf for every id: no token is left to choose"
    raise Internal(f"{what} hold {bad}", reason="BAD_LOGITS")


def _apply_penalties(logits: np.ndarray, params: SamplingParams, history: History) -> None:
    ids, counts = history.seen()
    rows = logits[ids]
    if params.repetition_penalty != 1.0:
        penalty = np.float32(params.repetition_penalty)
        rows = np.where(rows > 0, rows / penalty, rows * penalty)
    rows -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
    rows -= np.float32(params.presence_penalty) * (counts > 0)
    logits[ids] = rows


def tempered(logits: np.ndarray, temperature: float) -> np.ndarray:
    """float64 log-probabilities up to one constant, the largest being exactly 0.

    Subtracting the largest first keeps any temperature from overflowing.
    """
    weights = logits.astype(np.float64)
    weights -= weights.max()
    if temperature != 1.0:
        with np.errstate(over="ignore"):
            weights /= temperature
    return weights


def _keep_top_p(
    logits: np.ndarray, ids: np.ndarray | None, weights: np.ndarray, top_p: float
) -> tuple[np.ndarray, np.ndarray]:
    """ids and weights of the shortest run of likeliest tokens with mass top_p; `ids`, if given, fall in likelihood."""
    masses = np.exp(weights)
    wanted = top_p * masses.sum()
    if ids is not None:
        return _shortest_run(ids, weights, np.cumsum(masses), wanted)
    # Nearly always a few tokens hold the mass: rank some, and more only when they fall short.
    count = _TOP_P_FIRST_TRY
    while True:
        ranked = likeliest(logits, count)
        cumulative = np.cumsum(masses[ranked])
        if cumulative[-1] >= wanted or count >= len(logits):
            return _shortest_run(ranked, weights[ranked], cumulative, wanted)
        count *= 8


def _shortest_run(
    ids: np.ndarray, weights: np.ndarray, cumulative: np.ndarray, wanted: float
) -> tuple[np.ndarray, np.ndarray]:
    length = int(np.searchsorted(cumulative, wanted, side="left")) + 1
    return ids[:length], weights[:length]

"""The children of one node of a tree of drafts: functions of the draft's logits there, prefix, parameters and seed.

Sampled children (TOKEN, BLOCK) are drawn one after the other, each with its own noise and by default without
replacement: what was drawn is removed from q and the rest renormalised, in integer counts, so that both ends hold the
law of every draw exactly. COUPLED and greedy children are the ids that the target would choose, likeliest choice first,
were its logits the draft's: the first k by ln q + noise, and by processed logit. They are one-hot.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outrider.drafting.proposal import SparseQ
from outrider.sampling.distribution import likeliest, processed_logits, support
from outrider.sampling.history import History
from outrider.sampling.noise import Noise, Role
from outrider.sampling.params import AcceptanceRule, SamplingParams, StoppingParams
from outrider.sampling.sparse_q import draw_draft, sparse_q, to_counts


class Child(NamedTuple):
    """One child, in draw order among its siblings.

    q: the law it was drawn from given the siblings before it; None is one-hot. probability: the draft's own, of the
    token, before siblings were removed; nothing may be decided by it where q is not None. chance: of a one-hot child,
    that it is what the target chooses, the noise of COUPLED counted in; 0 of others.
    """

    token_id: int
    q: SparseQ | None
    probability: float
    chance: float = 0.0


def draw_children(
    logits: np.ndarray,
    params: SamplingParams,
    stopping: StoppingParams,
    history: History,
    noise: Noise,
    prefix_hash: int,
    position: int,
    num_children: int,
    *,
    max_entries: int = 64,
    replacement: bool = False,
) -> list[Child]:
    """Up to `num_children` children of the node that `logits` float32[V], `history` and `prefix_hash` belong to; fewer
    where no more tokens are possible. The first child is what a chain would draft.

    position: the absolute position that the children occupy. max_entries: of q, [1, 256]. Raises Internal on bad
    logits.
    """
    if num_children < 1:
        return []
    if params.greedy:
        return certain_children(processed_logits(logits, params, stopping, history), num_children)
    if params.acceptance is AcceptanceRule.COUPLED:
        ids, weights = support(logits, params, stopping, history).possible()
        keys = weights + noise.gumbel(position, len(weights) if ids is None else ids)
        probabilities, chances = _normalised(weights), _normalised(keys)
        possible = int((probabilities > 0).sum())
        best = likeliest(keys, min(num_children, possible))
        return [
            Child(int(i if ids is None else ids[i]), None, float(probabilities[i]), float(chances[i])) for i in best
        ]
    q = sparse_q(logits, params, stopping, history, max_entries)
    integers = [noise.integer16(prefix_hash, Role.DRAFT, try_index) for try_index in range(num_children)]
    return sampled_children(q, integers, replacement=replacement)


def sampled_children(q: SparseQ, integers: list[int], *, replacement: bool) -> list[Child]:
    """A child for each of `integers`, independent and uniform in [0, 65,536), as long as there are tokens to draw."""
    children = []
    left: SparseQ | None = q
    for integer in integers:
        if left is None:
            break
        token_id = draw_draft(left, integer)
        children.append(Child(token_id, left, q.probability(token_id)))
        if not replacement:
            left = without(left, token_id)
    return children


def without(q: SparseQ, token_id: int) -> SparseQ | None:
    """q given that `token_id` is not drawn, counts summing to 65,536 again; None when nothing else can be drawn."""
    others = q.ids != token_id
    if not others.any():
        return None
    # No count can round to 0: it is at least what it was.
    return SparseQ(ids=q.ids[others], counts=to_counts(q.counts[others].astype(np.float64)))


def certain_children(logits: np.ndarray, num_children: int) -> list[Child]:
    """The likeliest tokens of processed logits float32[V], one-hot: what greedy children are, and exact under any rule,
    as nothing was sampled."""
    # a head may be able to say but a part of a large vocabulary
    (ids,) = np.nonzero(logits > -np.inf)
    values = logits[ids]
    probabilities = _normalised(values.astype(np.float64))
    best = likeliest(values, num_children)
    return [Child(int(ids[i]), None, float(probabilities[i]), float(probabilities[i])) for i in best]


def _normalised(keys: np.ndarray) -> np.ndarray:
    """exp of them, summing to 1. Of ln q + noise: the chances to be the largest once each is off by standard Gumbel
    noise of its own, so the same model of how far the draft's logits are from the target's as q itself is of greedy."""
    masses = np.exp(keys - keys.max())
    masses /= masses.sum()
    return masses

"""The draft vocabulary: the ids that the target says most, and how much of what it says they cover."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from outrider.distill.batches import Corpus
from outrider.distill.target import LAST

MAX_SAMPLES = 8192
"""Positions at which the target's distribution is added up."""
CHUNK_ROWS = 256


@dataclass(frozen=True, slots=True)
class Coverage:
    """Of held-out text: the share of its tokens, and the mean mass of the target's distribution, on the vocabulary."""

    tokens: float
    mass: float


def choose_ids(corpus: Corpus, head: torch.Tensor, size: int, kept: Iterable[int]) -> torch.Tensor:
    """int64[size], ascending: `kept`, then by the times the target said an id plus the times it would have.

    The second is the mean of the target's distribution over a sample of positions: it ranks ids that its few draws did
    not show. head [V, H].
    """
    vocab_size = len(head)
    counts = np.zeros(vocab_size)
    for sequence in corpus.sequences:
        np.add.at(counts, [*sequence.token_ids[sequence.prompt_length :], sequence.next_token], 1.0)
    mean = torch.zeros(vocab_size)
    num_rows = 0
    for rows in _sampled_states(corpus, MAX_SAMPLES):
        mean += torch.softmax((rows @ head.T).float(), -1).sum(0)
        num_rows += len(rows)
    counts += mean.numpy() * (corpus.num_generated / max(1, num_rows))
    counts[list(kept)] = np.inf
    ids = np.argsort(-counts, kind="stable")[: min(size, vocab_size)]
    return torch.from_numpy(np.sort(ids))


def coverage(corpus: Corpus, head: torch.Tensor, draft_ids: torch.Tensor) -> Coverage:
    """Over the tokens the target said in `corpus`."""
    listed = torch.zeros(len(head), dtype=torch.bool)
    listed[draft_ids] = True
    said = [i for s in corpus.sequences for i in (*s.token_ids[s.prompt_length :], s.next_token)]
    mass, num_rows = 0.0, 0
    for rows in _sampled_states(corpus, MAX_SAMPLES // 4):
        mass += float(torch.softmax((rows @ head.T).float(), -1)[:, draft_ids].sum())
        num_rows += len(rows)
    return Coverage(float(listed[said].float().mean()), mass / max(1, num_rows))


def _sampled_states(corpus: Corpus, count: int) -> Iterable[torch.Tensor]:
    """Last states [n, H] at about `count` positions from which the target spoke, evenly spaced."""
    every = max(1, corpus.num_generated // count)
    pending: list[torch.Tensor] = []
    offset = num_pending = 0
    for index, sequence in enumerate(corpus.sequences):
        states = corpus.states_of(index)[sequence.prompt_length - 1 :, LAST]
        pending.append(states[offset::every])
        num_pending += len(pending[-1])
        offset = (offset - len(states)) % every
        if num_pending >= CHUNK_ROWS:
            yield torch.cat(pending)
            pending, num_pending = [], 0
    if num_pending:
        yield torch.cat(pending)

"""Sequences grouped into batches of like length, in an order that the seed fixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.distill.shards import Generated, Shard

WINDOW = 256
"""Sequences sorted by length together: long enough to pad little, short enough to mix well."""


@dataclass(frozen=True, slots=True)
class Batch:
    """B sequences padded on the right to T tokens. token_ids int64[B, T + 1], the last real one never read.

    states: [B, T, S, H], zeros where there is no token. lengths, prompt_lengths: int64[B], of the tokens read.
    """

    token_ids: torch.Tensor
    states: torch.Tensor
    lengths: torch.Tensor
    prompt_lengths: torch.Tensor

    def answer_rows(self) -> torch.Tensor:
        """bool[B, T]: rows whose state decides a token after the response's first, which is never drafted."""
        rows = torch.arange(self.states.shape[1])[None]
        return (rows >= self.prompt_lengths[:, None]) & (rows < self.lengths[:, None])

    def next_ids(self) -> torch.Tensor:
        """int64[B, T]: the token that follows each row."""
        return self.token_ids[:, 1:]


class Corpus:
    """The sequences of several shards; states stay on disk until a batch wants them."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.sequences: list[Generated] = [s for shard in shards for s in shard.sequences]
        self._places = [(shard, index) for shard in shards for index in range(len(shard.sequences))]

    @property
    def num_generated(self) -> int:
        """Tokens that the target said."""
        return sum(s.num_generated for s in self.sequences)

    def states_of(self, index: int) -> torch.Tensor:
        """[n, S, H]."""
        shard, place = self._places[index]
        return shard.states_of(place)

    def batch(self, indices: Sequence[int]) -> Batch:
        """These sequences together."""
        chosen = [self.sequences[i] for i in indices]
        longest = max(len(s.token_ids) for s in chosen)
        first = self.states_of(indices[0])
        token_ids = torch.zeros(len(chosen), longest + 1, dtype=torch.long)
        states = torch.zeros(len(chosen), longest, *first.shape[1:], dtype=first.dtype)
        for row, (index, sequence) in enumerate(zip(indices, chosen, strict=True)):
            length = len(sequence.token_ids)
            token_ids[row, : length + 1] = torch.tensor([*sequence.token_ids, sequence.next_token])
            states[row, :length] = self.states_of(index)
        lengths = torch.tensor([len(s.token_ids) for s in chosen])
        return Batch(token_ids, states, lengths, torch.tensor([s.prompt_length for s in chosen]))

    def in_order(self, batch_tokens: int) -> Iterator[list[int]]:
        """Every sequence once, by length."""
        order = sorted(range(len(self.sequences)), key=lambda i: len(self.sequences[i].token_ids))
        yield from _pack(order, self.sequences, batch_tokens)

    def endless(self, batch_tokens: int, seed: int, skip: int = 0) -> Iterator[tuple[int, list[int]]]:
        """(epoch, indices) for ever, each epoch in an order of its own; the first `skip` batches are left out."""
        epoch = 0
        while True:
            generator = np.random.default_rng([seed, epoch])
            order = generator.permutation(len(self.sequences)).tolist()
            windows = [order[i : i + WINDOW] for i in range(0, len(order), WINDOW)]
            batches = [
                batch
                for window in windows
                for batch in _pack(
                    sorted(window, key=lambda i: len(self.sequences[i].token_ids)), self.sequences, batch_tokens
                )
            ]
            generator.shuffle(batches)
            for batch in batches:
                if skip:
                    skip -= 1
                else:
                    yield epoch, batch
            epoch += 1


def _pack(order: Sequence[int], sequences: Sequence[Generated], batch_tokens: int) -> Iterator[list[int]]:
    """Runs of `order`, rising in length, whose padded size stays within `batch_tokens`; one sequence at least."""
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * len(sequences[index].token_ids) > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch

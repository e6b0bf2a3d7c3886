"""Heads and their features by hand: tables that check what they are given, beside a toy target."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import torch
from session_loops import PROMPT, ListSequence

from outrider.drafting.heads import EagleDrafter, MedusaDrafter
from outrider.lm.toy import ToyModel
from outrider.server_info import TargetDrafter

STATES = (2, 0, -1)


@functools.cache
def _feature(model: ToyModel, context: tuple[int, ...], states: tuple[int, ...]) -> np.ndarray:
    return model.features_for(context, states)


def feature(model: ToyModel, ids, states) -> np.ndarray:
    """`features_for`, remembered: of an order-n toy the last n ids decide."""
    return _feature(model, tuple(ids[-model.spec.order :]), tuple(states))


class FeatureSequence(ListSequence):
    """Keeps what a toy's cache would: the states of its tokens, or of the first `num_computed` of them."""

    def __init__(self, max_length: int, model: ToyModel) -> None:
        super().__init__(max_length)
        self._model = model
        self.lost = False

    @property
    def num_computed(self) -> int:
        return 0 if self.lost else len(self.token_ids)

    def features(self, start: int, end: int, states) -> torch.Tensor:
        assert 0 <= start <= end <= self.num_computed
        rows = [feature(self._model, self.token_ids[: place + 1], states) for place in range(start, end)]
        return torch.from_numpy(np.stack(rows))


class EagleTable:
    """An EAGLE head whose guess is the row of `draft` after the pairs' ids, over `draft_ids` only. Fails on features
    that are not those of exactly these ids. prompt_id: the first id, which no pair has."""

    states = STATES
    kind = "eagle3"

    def __init__(self, target: ToyModel, draft: ToyModel, draft_ids=None, prompt_id: int = PROMPT[0]) -> None:
        self.target, self.draft, self.prompt_id = target, draft, prompt_id
        self.draft_ids = None if draft_ids is None else torch.tensor(draft_ids)
        self.num_extended = self.num_steps = 0
        self.fails_in_step = 0

    def new_context(self) -> EagleTableContext:
        return EagleTableContext(self)

    def row(self, ids) -> torch.Tensor:
        logits = torch.from_numpy(self.draft.logits_for(ids))
        return logits if self.draft_ids is None else logits[self.draft_ids]


class EagleTableContext:
    def __init__(self, head: EagleTable) -> None:
        self._head = head
        self._kept: list[int] = [head.prompt_id]
        self._guessed: list[int] = []
        self._branches: list[list[int]] = []
        self._fresh = False

    @property
    def length(self) -> int:
        return len(self._kept) - 1

    def extend(self, features: torch.Tensor, next_ids: torch.Tensor) -> torch.Tensor:
        assert len(features) == len(next_ids) > 0
        self._guessed.clear()
        self._branches.clear()
        for row, next_id in zip(features, next_ids.tolist(), strict=True):
            expected = feature(self._head.target, self._kept, STATES)
            assert np.array_equal(row.numpy(), expected), f"features of other tokens than {self._kept}"
            self._kept.append(next_id)
        self._head.num_extended += len(next_ids)
        self._fresh = True
        return self._head.row(self._kept)

    def step(self, token_id: int) -> torch.Tensor:
        assert self._fresh, "a step without a row before it"
        self._head.num_steps += 1
        if self._head.num_steps == self._head.fails_in_step:
            raise RuntimeError("a step that fails")
        self._guessed.append(token_id)
        return self._head.row([*self._kept, *self._guessed])

    def branch(self, token_ids, parents) -> torch.Tensor:
        assert self._fresh
        assert not self._guessed
        self._head.num_steps += 1
        if self._head.num_steps == self._head.fails_in_step:
            raise RuntimeError("a step that fails")
        above = [[] if parent < 0 else self._branches[parent] for parent in parents]
        paths = [[*path, token_id] for path, token_id in zip(above, token_ids, strict=True)]
        self._branches += paths
        return torch.stack([self._head.row([*self._kept, *path]) for path in paths])

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self.length
        self._branches.clear()
        self._fresh = self._fresh and length == self.length
        del self._kept[length + 1 :]
        self._guessed.clear()


class MedusaTable:
    """Head i guesses what comes i + 2 tokens after the context that a feature belongs to, were the text greedy."""

    states = (-1,)
    kind = "medusa"
    draft_ids = None

    def __init__(self, target: ToyModel, num_heads: int = 3) -> None:
        self.num_heads = num_heads
        self._target = target
        contexts = itertools.product(range(target.vocab_size), repeat=target.spec.order)
        self._context_of = {target.features_for(c, self.states).tobytes(): c for c in contexts}

    def logits(self, feature: torch.Tensor, num_heads: int) -> torch.Tensor:
        ids = list(self._context_of[feature.numpy().tobytes()])
        rows = []
        ids.append(int(self._target.logits_for(ids).argmax()))
        for _ in range(min(num_heads, self.num_heads)):
            rows.append(self._target.logits_for(ids))
            ids.append(int(rows[-1].argmax()))
        return torch.from_numpy(np.stack(rows))


class CacheRows:
    """Features as `target_worker.head_drafter` reads them."""

    def __init__(self, sequence: FeatureSequence, states) -> None:
        self._sequence, self._states = sequence, states

    @property
    def num_rows(self) -> int:
        return self._sequence.num_computed

    def rows(self, start: int, end: int) -> torch.Tensor:
        return self._sequence.features(start, end, self._states)


class HeldTable:
    """A table as a target worker holds its heads."""

    def __init__(self, head) -> None:
        self.head = head
        self.description = TargetDrafter(head.kind, head.kind, draws_trees=True)

    def for_session(self, log, sequence):
        make = MedusaDrafter if self.head.kind == "medusa" else EagleDrafter
        return make(self.head.kind, self.head, log, CacheRows(sequence, self.head.states))

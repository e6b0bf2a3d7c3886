"""Where the target's logits come from: its plain forward, teacher-forced over the whole text, without services,
sessions, schedulers or tree masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from outrider.lm.interface import LanguageModel, PackedBatch, Segment

BLOCK_SIZE = 16
WINDOW = 128
"""Rows of a pass."""


class Rows(Protocol):
    """The target, over one text."""

    def after(self, num_tokens: int) -> np.ndarray:
        """float32[V] following the text's first `num_tokens`, at least 1. Asked for in ascending order, but for some
        tokens back: those of a round."""

    def aside(self, num_tokens: int, token_ids: Sequence[int]) -> np.ndarray:
        """float32[n, V] following each of these tokens, which stand behind the text's first `num_tokens`."""


def allocate(model: LanguageModel, max_tokens: int, max_aside: int) -> None:
    """Room for texts of so many tokens, one after the other, with so many that stand aside at once. Called once."""
    model.allocate_cache(_num_blocks(max_tokens) + _num_blocks(max_aside) + 1, BLOCK_SIZE)


def _num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


class ModelRows:
    """Of a `LanguageModel`. Passes over `WINDOW` tokens of the text; what leads away from it is computed in other
    blocks, so that the text's own stay as they are."""

    def __init__(self, model: LanguageModel, text_ids: Sequence[int], max_tokens: int, max_aside: int) -> None:
        """max_tokens, max_aside: for which `allocate` made room."""
        self._model = model
        self._ids = list(text_ids)
        self._num_blocks = _num_blocks(max_tokens)
        self._aside_blocks = range(self._num_blocks, self._num_blocks + _num_blocks(max_aside) + 1)
        self._windows: list[np.ndarray] = []
        """The last two; the newest ends at `_computed`."""
        self._computed = 0

    def after(self, num_tokens: int) -> np.ndarray:
        while self._computed < num_tokens:
            ids = self._ids[self._computed : self._computed + WINDOW]
            segment = Segment(self._computed, ids, range(self._num_blocks), num_logits=len(ids))
            self._windows = [*self._windows[-1:], np.array(self._model.forward(PackedBatch((segment,))))]
            self._computed += len(ids)
        back, windows = self._computed - num_tokens, list(self._windows)
        while back >= len(windows[-1]):
            back -= len(windows.pop())
        return np.asarray(windows[-1][len(windows[-1]) - 1 - back])

    def aside(self, num_tokens: int, token_ids: Sequence[int]) -> np.ndarray:
        self.after(num_tokens)
        num_whole, in_part = divmod(num_tokens, BLOCK_SIZE)
        if in_part:
            self._model.copy_block(num_whole, self._aside_blocks[0])
        blocks = [*range(num_whole), *self._aside_blocks]
        segment = Segment(num_tokens, list(token_ids), blocks, num_logits=len(token_ids))
        return np.array(self._model.forward(PackedBatch((segment,))))

"""Where the target's logits come from: its plain forward, teacher-forced over the whole text, without services,
sessions, schedulers or tree masks."""

from __future__ import annotations

from abc import ABC, abstractmethod
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


class WindowedRows(ABC):
    """Rows of one text, `WINDOW` a pass. The last two passes' are kept."""

    def __init__(self, text_ids: Sequence[int]) -> None:
        self._ids = list(text_ids)
        self._windows: list[np.ndarray] = []
        """The newest ends at `_computed`."""
        self._computed = 0

    def after(self, num_tokens: int) -> np.ndarray:
        while self._computed < num_tokens:
            ids = self._ids[self._computed : self._computed + WINDOW]
            self._windows = [*self._windows[-1:], self._next(self._computed, ids)]
            self._computed += len(ids)
        back, windows = self._computed - num_tokens, list(self._windows)
        while back >= len(windows[-1]):
            back -= len(windows.pop())
        return np.asarray(windows[-1][len(windows[-1]) - 1 - back])

    @abstractmethod
    def _next(self, start: int, token_ids: Sequence[int]) -> np.ndarray:
        """float32[n, V] following each of these tokens, which stand behind the text's first `start`: those that were
        given before."""


class ModelRows(WindowedRows):
    """Of a `LanguageModel`. What leads away from the text is computed in other blocks, so that its own stay as they
    are."""

    def __init__(self, model: LanguageModel, text_ids: Sequence[int], max_tokens: int, max_aside: int) -> None:
        """max_tokens, max_aside: for which `allocate` made room."""
        super().__init__(text_ids)
        self._model = model
        num_blocks = _num_blocks(max_tokens)
        self._blocks = range(num_blocks)
        self._aside_blocks = range(num_blocks, num_blocks + _num_blocks(max_aside) + 1)

    def aside(self, num_tokens: int, token_ids: Sequence[int]) -> np.ndarray:
        self.after(num_tokens)
        num_whole, in_part = divmod(num_tokens, BLOCK_SIZE)
        if in_part:
            self._model.copy_block(num_whole, self._aside_blocks[0])
        return self._forward(num_tokens, token_ids, [*range(num_whole), *self._aside_blocks])

    def _next(self, start: int, token_ids: Sequence[int]) -> np.ndarray:
        return self._forward(start, token_ids, self._blocks)

    def _forward(self, start: int, token_ids: Sequence[int], blocks: Sequence[int]) -> np.ndarray:
        segment = Segment(start, list(token_ids), blocks, num_logits=len(token_ids))
        return np.array(self._model.forward(PackedBatch((segment,))))

"""Attention of a static step behind one small interface; the implementation that needs nothing but torch.

Every row is one query with a context of its own: the tokens of its sequence up to its position, read through its block
table. Letters as in attention.py and step_rows.py.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from outrider.lm.gpu.cache import PagedCache
from outrider.lm.gpu.step_rows import StepRows


class PagedAttention(Protocol):
    """One step shape's attention. `begin` runs on the host before every step; the rest is part of the step and, when
    that is captured, runs once, so it may depend on shapes only."""

    name: str

    def begin(self, matrix: np.ndarray) -> None:
        """matrix: int64[N, 2 + W], the step's rows, as on the device."""

    def plan(self, rows: StepRows) -> None:
        """Whatever all layers share, on the device."""

    def attend(
        self, layer: int, query: torch.Tensor, scaling: float | None, window: int | None, softcap: float | None
    ) -> torch.Tensor:
        """query [N, H, D] -> [N, H, E]. The rows' own keys and values are in the cache already.

        window, softcap: as in `attention.paged_attention`.
        """


class GatheredAttention:
    """Copies each row's context out of the pages and attends to it with torch's own kernels: works everywhere, and
    moves every context twice."""

    name = "gathered"

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._masks: dict[int | None, torch.Tensor] = {}

    def begin(self, matrix: np.ndarray) -> None:
        """Nothing."""

    def plan(self, rows: StepRows) -> None:
        """A mask per window is made when a layer first asks for it."""
        self._rows = rows
        self._masks = {}

    def attend(
        self, layer: int, query: torch.Tensor, scaling: float | None, window: int | None, softcap: float | None
    ) -> torch.Tensor:
        """The G heads of a group are lines of one problem per row and key-value head."""
        keys = self._context(self._cache.key_pages[layer])
        values = self._context(self._cache.value_pages[layer])
        grouped = query.unflatten(1, (keys.shape[1], -1))  # [N, K, G, D]
        mask = self._mask(window)
        if softcap is not None:
            scale = grouped.shape[3] ** -0.5 if scaling is None else scaling
            scores = (grouped.float() @ keys.float().transpose(2, 3)) * scale
            scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~mask, float("-inf"))
            return (scores.softmax(3) @ values.float()).to(query.dtype).flatten(1, 2)
        attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
        return attended.flatten(1, 2)

    def _context(self, pages: torch.Tensor) -> torch.Tensor:
        """[N, K, W * block_size, D]."""
        return pages[self._rows.tables].flatten(1, 2).transpose(1, 2).to(self._cache.read_dtype)

    def _mask(self, window: int | None) -> torch.Tensor:
        """bool[N, 1, 1, W * block_size]: where a row may look."""
        mask = self._masks.get(window)
        if mask is None:
            num_tokens = self._rows.tables.shape[1] * self._cache.block_size
            tokens = torch.arange(num_tokens, device=self._rows.matrix.device)[None]
            positions = self._rows.positions[:, None]
            mask = visible(tokens, positions, window)[:, None, None]
            self._masks[window] = mask
        return mask


def visible(tokens: torch.Tensor, positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """Whether the row at `positions` sees the token at `tokens`: not later, and among the last `window`."""
    seen = tokens <= positions
    return seen if window is None else seen & (tokens > positions - window)

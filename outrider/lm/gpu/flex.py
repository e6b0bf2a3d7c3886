"""Paged attention by torch's flex attention: a kernel that walks only the pages a row's context lies in.

The whole cache is one long run of keys that all rows share; a row's mask says which slots are its own. Compiled for a
GPU; on a CPU the same mask runs uncompiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from outrider.lm.gpu.cache import PagedCache
from outrider.lm.gpu.paged_attention import visible
from outrider.lm.gpu.step_rows import StepRows

TILE_SLOTS = 128
"""Slots that the kernel takes or leaves at once: several blocks, which mostly lie side by side."""
NOWHERE = 1 << 30
"""Index of a block that a row has not: beyond every position."""
MAX_COMPILED = 64
"""Shapes and windows compiled in one process: dynamo's own limit is lower than the buckets there are."""


class FlexAttention:
    """compiled: by inductor, once per bucket and window, at the first step of that kind."""

    name = "flex"

    def __init__(self, cache: PagedCache, *, compiled: bool) -> None:
        self._cache = cache
        self._num_slots = cache.num_pages * cache.block_size
        self._masks: dict[int | None, BlockMask] = {}
        plain: Any = flex_attention
        self._attend = torch.compile(plain, dynamic=False) if compiled else plain

    def begin(self, matrix: np.ndarray) -> None:
        """Nothing."""

    def plan(self, rows: StepRows) -> None:
        """index[n, b]: which block of row n's context block b of the cache is; beyond every position if none."""
        num_rows, width = rows.tables.shape
        none = torch.full((), NOWHERE, dtype=torch.int64, device=rows.matrix.device)
        order = torch.arange(width, device=rows.matrix.device).expand(num_rows, -1)
        # Of equal entries, which only the scratch block has, the first counts, whatever order they come in.
        index = none.expand(num_rows, self._cache.num_pages).contiguous()
        self._index = index.scatter_reduce(1, rows.tables, order, "amin").to(torch.int32)
        self._positions = rows.positions.to(torch.int32)
        self._masks = {}

    def attend(
        self, layer: int, query: torch.Tensor, scaling: float | None, window: int | None, softcap: float | None
    ) -> torch.Tensor:
        """One query per batch entry; keys and values are one entry, shared."""
        keys, values = self._cache.keys[layer][None], self._cache.values[layer][None]
        with torch._dynamo.config.patch(recompile_limit=MAX_COMPILED):
            attended: torch.Tensor = self._attend(
                query[:, :, None],
                keys,
                values,
                score_mod=None if softcap is None else _capped(softcap),
                block_mask=self._mask(window),
                scale=scaling,
                enable_gqa=True,
            )
        return attended[:, :, 0]

    def _mask(self, window: int | None) -> BlockMask:
        mask = self._masks.get(window)
        if mask is None:
            mask = self._masks[window] = self._block_mask(window)
        return mask

    def _block_mask(self, window: int | None) -> BlockMask:
        size = self._cache.block_size
        index, positions = self._index, self._positions

        def may_see(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
            block = index[row, slot // size]
            token = torch.where(block < NOWHERE, block * size + slot % size, NOWHERE)
            return visible(token, positions[row], window)

        used = self._used_tiles(window)
        counts = used.sum(-1, dtype=torch.int32)[:, None, None]
        tiles = torch.argsort(used.to(torch.int32), dim=-1, descending=True, stable=True).to(torch.int32)
        return BlockMask.from_kv_blocks(
            counts,
            tiles[:, None, None],
            BLOCK_SIZE=(TILE_SLOTS, TILE_SLOTS),
            mask_mod=may_see,
            seq_lengths=(1, self._num_slots),
            compute_q_blocks=False,
        )

    def _used_tiles(self, window: int | None) -> torch.Tensor:
        """bool[N, tiles]: those with a slot that the row sees."""
        size = self._cache.block_size
        block = self._index
        first = block.to(torch.int64) * size
        positions = self._positions[:, None]
        seen = (block < NOWHERE) & (first <= positions)
        if window is not None:
            seen &= first + size > positions - window + 1
        num_tiles = -(-self._num_slots // TILE_SLOTS)
        starts = torch.arange(self._cache.num_pages, device=block.device) * size
        counts = torch.zeros(len(block), num_tiles, dtype=torch.int32, device=block.device)
        # A block may reach into more than one tile.
        for offset in range(0, size + TILE_SLOTS - 1, TILE_SLOTS):
            tile = ((starts + min(offset, size - 1)) // TILE_SLOTS).expand(len(block), -1)
            counts.scatter_add_(1, tile, seen.to(torch.int32))
        return counts > 0


def _capped(softcap: float) -> Callable[..., torch.Tensor]:
    def cap(score: torch.Tensor, *place: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap

"""Attention in which a row's result depends on its own sequence's tokens alone, to the bit.

The additions in a row's scores and weighted values happen in an order that libraries choose by the shape of the whole
problem: how many rows, how many keys, where each thread's buffers begin. So every problem has one shape. Rows go in
blocks of BLOCK_ROWS query lines, filled up with zeros; keys and values are taken up to the next multiple of TILE
positions, and with a sliding window from a multiple of WINDOW_TILE, whatever the row may not see being masked. A row's
tile follows from its position, so neighbours, chunks, drafts and the layout of the cache change nothing; numerics.py
proves that on the machine at hand.

A node of a tree is a row of the text of its own path: that path's keys are gathered behind the prefix's, in order.

Letters as in attention.py; B blocks of t tokens each, so of t G query lines and some of zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from outrider.lm.attention import AttentionPlan, KVCache, attend
from outrider.lm.batch import FlatBatch, Span
from outrider.lm.tree import Tree, branches

BLOCK_ROWS = 8
"""Query lines per block: a multiple keeps the buffers of all threads equally aligned."""
TILE = 64
"""Positions up to whose multiple keys are taken: what a row may not see counts zero, but shapes the problem."""
WINDOW_TILE = 512
"""Positions at whose multiple keys begin under a sliding window."""


@dataclass(frozen=True, slots=True)
class _Call:
    """Rows of the pass at successive positions, of one tile, and the positions of the keys they meet."""

    rows: slice | torch.Tensor
    """int64[R] where they do not follow one another in the pass."""
    num_rows: int
    slots: torch.Tensor | None
    """int64[end_key - first_key], where those keys lie; None: where their segment's context has them."""
    first_key: int
    end_key: int
    mask: torch.Tensor
    """[B, 1, lines, end_key - first_key]"""


class ExactPlan(AttentionPlan):
    """As `AttentionPlan`, with contexts readable up to a multiple of TILE: the cache has slots that far, all finite."""

    def __init__(self, flat: FlatBatch, cache: KVCache, device: torch.device) -> None:
        super().__init__(flat, cache, device)
        self._gathers = [_padded_slots(span, device) for span in flat.spans]
        self._calls: dict[tuple[int, int | None, int], list[_Call]] = {}

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """A pass may have rows beyond the batch's: these go nowhere, and `attend` answers zeros for them."""
        num_rows = len(self.slots)
        super().write(layer, key[:, :, :num_rows], value[:, :, :num_rows])

    def attend(
        self, layer: int, query: torch.Tensor, scaling: float | None, window: int | None, softcap: float | None
    ) -> torch.Tensor:
        """query [K, G, N, D] -> [N, H, E]."""
        num_kv_heads, group_size, num_rows, _ = query.shape
        out = query.new_zeros(num_rows, num_kv_heads * group_size, self.cache.values[layer].shape[2])
        for index, span in enumerate(self.spans):
            keys, values = self._padded_context(layer, index)
            for call in self.calls(index, span, window, group_size):
                if call.slots is None:
                    where = slice(call.first_key, call.end_key)
                    _attend_call(call, query, keys[:, where], values[:, where], scaling, softcap, out)
                else:
                    _attend_call(call, query, *self.cache.gathered(layer, call.slots), scaling, softcap, out)
        return out

    def calls(self, index: int, span: Span, window: int | None, group_size: int) -> list[_Call]:
        """One call per tile that the segment's rows touch, and that per branch of a tree."""
        calls = self._calls.get((index, window, group_size))
        if calls is None:
            first, end = span.num_before, span.num_context_tokens
            calls = []
            for a, b in _tiles(first, end if span.tree is None else min(end, span.tree.start), window):
                rows = slice(span.start + a - first, span.start + b - first)
                calls.append(self._call(a, b, rows, None, window, group_size))
            if span.tree is not None:
                calls += self._tree_calls(span, span.tree, window, group_size)
            self._calls[index, window, group_size] = calls
        return calls

    def _tree_calls(self, span: Span, tree: Tree, window: int | None, group_size: int) -> list[_Call]:
        calls = []
        for path, num_rows in branches(tree.parents, first=max(0, span.num_before - tree.start)):
            places = np.concatenate([np.arange(tree.start), tree.start + np.array(path)])
            slots = _filled_up(torch.from_numpy(span.slots_at(places))).to(self.device)
            rows = torch.from_numpy(span.start - span.num_before + places).to(self.device)
            for a, b in _tiles(len(places) - num_rows, len(places), window):
                calls.append(self._call(a, b, rows[a:b], slots, window, group_size))
        return calls

    def _call(
        self,
        a: int,
        b: int,
        rows: slice | torch.Tensor,
        slots: torch.Tensor | None,
        window: int | None,
        group_size: int,
    ) -> _Call:
        """Of the rows at positions `a` to `b`. slots: of the tokens they may see, from position 0 on."""
        first_key, end_key = _first_key(a, window), -(-b // TILE) * TILE
        tokens_per_block, lines = block_shape(group_size)
        num_blocks = -(-(b - a) // tokens_per_block)
        positions = torch.arange(a, a + num_blocks * tokens_per_block, device=self.device)[:, None]
        keys = torch.arange(first_key, end_key, device=self.device)[None, :]
        hidden = keys > positions
        if window is not None:
            hidden |= keys <= positions - window
        hidden = hidden.unflatten(0, (num_blocks, tokens_per_block)).repeat_interleave(group_size, 1)
        mask = torch.zeros(num_blocks, 1, lines, end_key - first_key, dtype=self.cache.read_dtype, device=self.device)
        mask[:, 0, : hidden.shape[1]].masked_fill_(hidden, float("-inf"))
        own_slots = None if slots is None else slots[first_key:end_key]
        return _Call(rows, b - a, own_slots, first_key, end_key, mask)

    def _padded_context(self, layer: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [K, T', D] and values of segment `index`, T' being T or more, up to a multiple of TILE."""
        span, gather = self.spans[index], self._gathers[index]
        if gather is not None:
            return self.cache.gathered(layer, gather)
        assert span.first_slot is not None
        return self.cache.run(layer, span.first_slot, span.first_slot + -(-span.num_context_tokens // TILE) * TILE)


def block_shape(group_size: int) -> tuple[int, int]:
    """Tokens in a block, and its query lines: all G heads of a token are in one block."""
    lines = -(-group_size // BLOCK_ROWS) * BLOCK_ROWS
    return max(1, lines // group_size), lines


def _attend_call(
    call: _Call,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
    out: torch.Tensor,
) -> None:
    """keys [K, end_key - first_key, D] and values of the call; its rows' answers go to `out`."""
    num_kv_heads, group_size, _, width = query.shape
    num_blocks, _, lines, _ = call.mask.shape
    tokens_per_block, _ = block_shape(group_size)
    num_rows = call.num_rows
    blocks = query.new_zeros(num_blocks, num_kv_heads, lines, width)
    # [B, t, K, G, D], a view: row i of the call is token i % t of block i // t.
    tokens = blocks[:, :, : tokens_per_block * group_size].unflatten(2, (tokens_per_block, group_size)).transpose(1, 2)
    rows = query[:, :, call.rows].permute(2, 0, 1, 3)  # [R, K, G, D]
    num_full, num_left = divmod(num_rows, tokens_per_block)
    if num_full:
        tokens[:num_full] = rows[: num_rows - num_left].unflatten(0, (num_full, tokens_per_block))
    if num_left:
        tokens[num_full, :num_left] = rows[num_rows - num_left :]
    shape = (num_blocks, -1, -1, -1)
    attended = attend(blocks, keys[None].expand(shape), values[None].expand(shape), call.mask, scaling, softcap)
    answers = attended[:, :, : tokens_per_block * group_size].unflatten(2, (tokens_per_block, group_size))
    answers = answers.transpose(1, 2).flatten(2, 3).flatten(0, 1)  # [B t, H, E]
    out[call.rows] = answers[:num_rows]


def _tiles(first: int, end: int, window: int | None) -> Iterator[tuple[int, int]]:
    """Positions `first` to `end` as those of one tile each."""
    while first < end:
        bound = min(_end_of_tile(first, window), end)
        yield first, bound
        first = bound


def _first_key(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1) // WINDOW_TILE * WINDOW_TILE


def _end_of_tile(position: int, window: int | None) -> int:
    """The next position whose keys begin or end elsewhere."""
    end = (position // TILE + 1) * TILE
    if window is None:
        return end
    return min(end, _first_key(position, window) + WINDOW_TILE + window - 1)


def _padded_slots(span: Span, device: torch.device) -> torch.Tensor | None:
    """Slots of the context, the first one repeated up to a multiple of TILE."""
    if span.slots is None:
        return None
    return _filled_up(torch.from_numpy(span.slots)).to(device)


def _filled_up(slots: torch.Tensor) -> torch.Tensor:
    return torch.cat([slots, slots[:1].expand(-len(slots) % TILE)])

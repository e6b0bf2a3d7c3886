"""Attention over a block cache: rows of many sequences in one pass, each seeing its own sequence's earlier tokens only.

Letters: N rows of the pass, H query heads, K key-value heads, G = H / K, D and E widths of a key and a value head,
R rows of one segment, T tokens of its context.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from outrider.lm.batch import FlatBatch, Span


class KVCache:
    """Keys and values of every layer, [K, num_slots, D] each: a head's tokens lie side by side."""

    def __init__(
        self, head_shapes: list[tuple[int, int, int]], num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """head_shapes: (K, D, E) of each layer. Memory is not touched before tokens come: none unwritten is read."""
        self.keys = [torch.empty(k, num_slots, d, dtype=dtype, device=device) for k, d, _ in head_shapes]
        self.values = [torch.empty(k, num_slots, e, dtype=dtype, device=device) for k, _, e in head_shapes]

    def copy(self, source: int, destination: int, count: int) -> None:
        """Keys and values of `count` slots from slot `source` on, to slots that do not overlap these."""
        for cached in (*self.keys, *self.values):
            cached[:, destination : destination + count] = cached[:, source : source + count]


class AttentionPlan:
    """What all layers of one pass share: where rows go, where contexts lie, and masks once built."""

    def __init__(self, flat: FlatBatch, cache: KVCache, device: torch.device) -> None:
        self.cache = cache
        self.spans = flat.spans
        self.slots = torch.from_numpy(flat.slots).to(device)
        only = flat.spans[0] if len(flat.spans) == 1 else None
        self.only_slot = int(flat.slots[0]) if only is not None and only.first_slot is not None else None
        """First slot of the rows when these lie in one run: then they are written by one plain copy."""
        self._gathers = [None if s.slots is None else torch.from_numpy(s.slots).to(device) for s in flat.spans]
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}
        self.device = device

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """key [1, K, N, D] and value [1, K, N, E] of the pass's rows go to their slots."""
        for cached, new in ((self.cache.keys[layer], key[0]), (self.cache.values[layer], value[0])):
            if self.only_slot is not None:
                cached[:, self.only_slot : self.only_slot + new.shape[1]] = new
            else:
                cached.index_copy_(1, self.slots, new)

    def context(self, layer: int, index: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [K, T - first, D] and values of segment `index` from token `first` on; views where in one run."""
        span, gather = self.spans[index], self._gathers[index]
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if gather is not None:
            return keys.index_select(1, gather[first:]), values.index_select(1, gather[first:])
        assert span.first_slot is not None
        where = slice(span.first_slot + first, span.first_slot + span.num_context_tokens)
        return keys[:, where], values[:, where]

    def mask(self, index: int, window: int | None, first: int) -> torch.Tensor:
        """bool[R, T - first], True where row r may see token t: t <= its own position, and within the window."""
        mask = self._masks.get((index, window))
        if mask is None:
            span = self.spans[index]
            length = span.num_context_tokens
            own = torch.arange(length - (span.end - span.start), length, device=self.device)[:, None]
            tokens = torch.arange(first, length, device=self.device)[None, :]
            mask = tokens <= own
            if window is not None:
                mask &= tokens > own - window
            self._masks[index, window] = mask
        return mask


def paged_attention(
    plan: AttentionPlan,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """query [1, H, N, D], key [1, K, N, D], value [1, K, N, E] of the rows -> [1, N, H, E]. Writes keys, values first.

    window: a row sees the last `window` tokens, its own included; None: all.
    """
    plan.write(layer, key, value)
    _, num_heads, num_rows, _ = query.shape
    num_kv_heads, value_width = value.shape[1], value.shape[3]
    grouped = query[0].unflatten(0, (num_kv_heads, num_heads // num_kv_heads))  # [K, G, N, D]
    out = query.new_empty(1, num_rows, num_heads, value_width)
    for index, span in enumerate(plan.spans):
        out[0, span.start : span.end] = _attend_segment(plan, layer, index, span, grouped, scaling, window)
    return out


def _attend_segment(
    plan: AttentionPlan,
    layer: int,
    index: int,
    span: Span,
    grouped: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """[R, H, E] of one segment."""
    num_rows = span.end - span.start
    first = 0 if window is None else max(0, span.num_context_tokens - num_rows - window + 1)
    keys, values = plan.context(layer, index, first)
    if num_rows == 1:
        # All G heads of a group see the same tokens, so they are rows of one unmasked problem per key-value head.
        query = grouped[None, :, :, span.start]  # [1, K, G, D]
        return F.scaled_dot_product_attention(query, keys[None], values[None], scale=scaling).flatten(1, 2)
    query = grouped[:, :, span.start : span.end]  # [K, G, R, D]
    shape = (-1, query.shape[1], -1, -1)
    is_plain_prefill = span.num_context_tokens == num_rows and window is None
    attended = F.scaled_dot_product_attention(
        query,
        keys[:, None].expand(shape),
        values[:, None].expand(shape),
        attn_mask=None if is_plain_prefill else plan.mask(index, window, first),
        is_causal=is_plain_prefill,
        scale=scaling,
    )
    return attended.flatten(0, 1).transpose(0, 1)

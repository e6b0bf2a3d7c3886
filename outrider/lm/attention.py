"""Attention over a block cache: rows of many sequences in one pass, each seeing its own sequence's earlier tokens only.

Letters: N rows of the pass, H query heads, K key-value heads, G = H / K, D and E widths of a key and a value head,
R rows of one segment, T tokens of its context.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from outrider.lm.batch import FlatBatch, Span
from outrider.lm.softcap import softcapped_attention
from outrider.lm.threads import GNU, RUNTIME

ONE_THREAD_PRODUCTS = 1 << 21 if RUNTIME == GNU else 0
"""Multiply-adds of a problem below which one thread is faster: a second one of GNU's runtime takes some 20 us to wake.
Intel's spins at this point, and would let it go for each change of the number of threads: 4 to 18% of a pass."""

CACHE_LINE_BYTES = 64

MAX_JOINT_ROWS = 64
"""Rows of a segment up to which the heads of a group make one problem; beyond, its mask would cost too much."""


class KVCache:
    """Keys and values of every layer, [K, num_slots, D] each: a head's tokens lie side by side."""

    def __init__(
        self,
        head_shapes: list[tuple[int, int, int]],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        zeroed: bool = False,
        read_dtype: torch.dtype | None = None,
    ) -> None:
        """head_shapes: (K, D, E) of each layer. zeroed: slots not written yet may be read, and hold zeros.

        dtype: of what is kept; read_dtype: of what attention gets, `dtype` by default. Memory is not touched before
        tokens come.
        """
        self.read_dtype = read_dtype or dtype
        allocate = _lazy_zeros if zeroed else torch.empty
        self.keys = [allocate((k, num_slots, d), dtype=dtype, device=device) for k, d, _ in head_shapes]
        self.values = [allocate((k, num_slots, e), dtype=dtype, device=device) for k, _, e in head_shapes]

    def copy(self, source: int, destination: int, count: int) -> None:
        """Keys and values of `count` slots from slot `source` on, to slots that do not overlap these."""
        for cached in (*self.keys, *self.values):
            cached[:, destination : destination + count] = cached[:, source : source + count]

    def move(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """int64[n] each: keys and values of these slots to those; all are read before one is written."""
        for cached in (*self.keys, *self.values):
            cached.index_copy_(1, destinations, cached.index_select(1, sources))

    def run(self, layer: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of slots `start` to `end`, as attention reads them: views, unless kept in another type."""
        dtype = self.read_dtype
        return self.keys[layer][:, start:end].to(dtype), self.values[layer][:, start:end].to(dtype)

    def gathered(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `run`, of int64[T] slots."""
        keys, values = self.keys[layer].index_select(1, slots), self.values[layer].index_select(1, slots)
        return keys.to(self.read_dtype), values.to(self.read_dtype)


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
        self._masks: dict[tuple[int, int | None, int], torch.Tensor] = {}
        self.device = device

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """key [1, K, N, D] and value [1, K, N, E] of the pass's rows go to their slots."""
        for cached, new in ((self.cache.keys[layer], key[0]), (self.cache.values[layer], value[0])):
            if self.only_slot is not None:
                cached[:, self.only_slot : self.only_slot + new.shape[1]] = new
            else:
                cached.index_copy_(1, self.slots, new.to(cached.dtype))

    def context(self, layer: int, index: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [K, T - first, D] and values of segment `index` from token `first` on; views where in one run."""
        span, gather = self.spans[index], self._gathers[index]
        if gather is not None:
            return self.cache.gathered(layer, gather[first:])
        assert span.first_slot is not None
        return self.cache.run(layer, span.first_slot + first, span.first_slot + span.num_context_tokens)

    def attend(
        self, layer: int, query: torch.Tensor, scaling: float | None, window: int | None, softcap: float | None
    ) -> torch.Tensor:
        """query [K, G, N, D] of all rows -> [N, H, E]."""
        parts = [
            _attend_segment(self, layer, i, span, query, scaling, window, softcap) for i, span in enumerate(self.spans)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def mask(self, index: int, window: int | None, first: int, group_size: int) -> torch.Tensor:
        """[R * group_size, T - first]: 0 where row r may see token t, minus infinity elsewhere.

        It may when t <= its own position and within the window, and of a tree its ancestors and itself only. Row r's
        `group_size` lines are alike.
        """
        mask = self._masks.get((index, window, group_size))
        if mask is None:
            span = self.spans[index]
            length = span.num_context_tokens
            own = torch.arange(length - (span.end - span.start), length, device=self.device)[:, None]
            tokens = torch.arange(first, length, device=self.device)[None, :]
            hidden = tokens > own
            if span.tree is not None:
                hidden = torch.from_numpy(_hidden_from_tree(span, window)[:, first:]).to(self.device)
            elif window is not None:
                hidden |= tokens <= own - window
            dtype = self.cache.read_dtype
            mask = torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill_(hidden, float("-inf"))
            mask = mask.repeat_interleave(group_size, 0)
            self._masks[index, window, group_size] = mask
        return mask


def paged_attention(
    plan: AttentionPlan,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None = None,
) -> torch.Tensor:
    """query [1, H, N, D], key [1, K, N, D], value [1, K, N, E] of the rows -> [1, N, H, E]. Writes keys, values first.

    window: a row sees the last `window` tokens, its own included; None: all. softcap: bound of scores; None: none.
    """
    plan.write(layer, key, value)
    num_kv_heads = key.shape[1]
    grouped = query[0].unflatten(0, (num_kv_heads, query.shape[1] // num_kv_heads))
    return plan.attend(layer, grouped, scaling, window, softcap)[None]


def _attend_segment(
    plan: AttentionPlan,
    layer: int,
    index: int,
    span: Span,
    grouped: torch.Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """[R, H, E] of one segment."""
    num_rows = span.end - span.start
    first = 0 if window is None else max(0, span.first_position - window + 1)
    keys, values = plan.context(layer, index, first)
    group_size = grouped.shape[1]
    if num_rows == 1 and span.tree is None:
        # All G heads of a group see the same tokens, so they are rows of one unmasked problem per key-value head.
        attended = attend(grouped[None, :, :, span.start], keys[None], values[None], None, scaling, softcap)
        return attended.flatten(1, 2)
    query = grouped[:, :, span.start : span.end]  # [K, G, R, D]
    if num_rows <= MAX_JOINT_ROWS:
        # The heads of a group as rows of one problem again: keys and values are read once, not once a head.
        joint = query.transpose(1, 2).flatten(1, 2)[None]  # [1, K, R G, D]
        mask = plan.mask(index, window, first, group_size)
        attended = attend(joint, keys[None], values[None], mask, scaling, softcap)[0]
        return attended.unflatten(1, (num_rows, group_size)).transpose(0, 1).flatten(1, 2)
    shape = (-1, group_size, -1, -1)
    if softcap is not None:
        keys, values = keys[:, None].expand(shape), values[:, None].expand(shape)
        mask = plan.mask(index, window, first, 1)
        return softcapped_attention(query, keys, values, mask, scaling, softcap).flatten(0, 1).transpose(0, 1)
    is_plain_prefill = span.num_context_tokens == num_rows and window is None and span.tree is None
    attended = F.scaled_dot_product_attention(
        query,
        keys[:, None].expand(shape),
        values[:, None].expand(shape),
        attn_mask=None if is_plain_prefill else plan.mask(index, window, first, 1),
        is_causal=is_plain_prefill,
        scale=scaling,
    )
    return attended.flatten(0, 1).transpose(0, 1)


def _hidden_from_tree(span: Span, window: int | None) -> np.ndarray:
    """bool[R, T] of a span that ends with a tree: whether row r may not see token t."""
    assert span.tree is not None
    start, positions = span.tree.start, span.positions()
    places = np.arange(span.num_context_tokens)
    own = places[span.num_before :]
    hidden = places[None, :] > own[:, None]
    nodes = own[own >= start] - start
    hidden[len(own) - len(nodes) :, start:] = ~span.tree.sees[nodes]
    if window is not None:
        hidden |= positions[None, :] <= positions[own, None] - window
    return hidden


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Scaled dot-product attention, in this thread alone where waking others would cost more than they save."""
    if softcap is not None:
        return softcapped_attention(query, keys, values, mask, scaling, softcap)
    num_products = query.numel() * keys.shape[-2]
    num_threads = torch.get_num_threads()
    if query.is_cuda or num_threads == 1 or num_products > ONE_THREAD_PRODUCTS:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
    torch.set_num_threads(1)
    try:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
    finally:
        torch.set_num_threads(num_threads)


def _lazy_zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that the system hands out page by page when touched; `torch.zeros` would write them all."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = torch.from_numpy(np.zeros(num_bytes + CACHE_LINE_BYTES, np.uint8))
    start = -buffer.data_ptr() % CACHE_LINE_BYTES
    return buffer[start : start + num_bytes].view(dtype).view(shape)

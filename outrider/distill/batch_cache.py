"""Keys and values of a batch of sequences that decode in step: one problem a layer instead of one per sequence.

The engine's own cache serves sequences that come and go, block by block; generation for distillation knows its batch
beforehand, so every sequence has a row of a plain array here. As in the engine, transformers' attention is replaced
through its public interface, and a plan of the pass reaches every layer as a keyword.

Letters: B sequences, N rows of a pass, K key-value heads, G query heads of a group, D width of a head, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedModel

from outrider.errors import InvalidArgument

if TYPE_CHECKING:
    from outrider.distill.target import Target

ATTENTION_NAME = "outrider_distill"
PLAN = "outrider_distill_plan"


class Plan(Protocol):
    """Where the rows of a pass go in the cache and what each attends to."""

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """key, value [1, K, N, D]."""

    def attend(self, layer: int, query: torch.Tensor, scaling: float | None, window: int | None) -> torch.Tensor:
        """query [K, G, N, D] -> [N, K G, D]."""


class BatchCache:
    """keys and values: per layer [B, K, T, D]. Zeros at first: a NaN in a slot not written yet would pass a mask."""

    def __init__(self, shape: tuple[int, int, int], num_sequences: int, max_length: int, dtype: torch.dtype) -> None:
        """shape: layers, K, D."""
        num_layers, num_heads, width = shape
        size = (num_sequences, num_heads, max_length, width)
        self.keys = [torch.zeros(size, dtype=dtype) for _ in range(num_layers)]
        self.values = [torch.zeros(size, dtype=dtype) for _ in range(num_layers)]

    def move(self, source: int, destination: int, length: int) -> None:
        """The first `length` tokens of one sequence take the place of another's."""
        for cached in (*self.keys, *self.values):
            cached[destination, :, :length] = cached[source, :, :length]


class PrefillPlan:
    """Whole prompts, back to back: prompt i has rows `starts[i]` to `starts[i + 1]` and sequence `slots[i]`."""

    def __init__(self, cache: BatchCache, slots: Sequence[int], lengths: Sequence[int]) -> None:
        self._cache = cache
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        self._spans = list(zip(slots, starts, starts[1:], strict=False))

    @classmethod
    def alone(cls, target: Target, length: int) -> PrefillPlan:
        """For one sequence of its own."""
        return cls(BatchCache(target.cache_shape(), 1, length, target.dtype), [0], [length])

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        for slot, start, end in self._spans:
            self._cache.keys[layer][slot, :, : end - start] = key[0, :, start:end]
            self._cache.values[layer][slot, :, : end - start] = value[0, :, start:end]

    def attend(self, layer: int, query: torch.Tensor, scaling: float | None, window: int | None) -> torch.Tensor:
        parts = []
        for slot, start, end in self._spans:
            _check_window(window, end - start)
            rows = query[:, :, start:end]
            shape = (-1, rows.shape[1], -1, -1)
            keys = self._cache.keys[layer][slot, :, None, : end - start].expand(shape)
            values = self._cache.values[layer][slot, :, None, : end - start].expand(shape)
            attended = F.scaled_dot_product_attention(rows, keys, values, is_causal=True, scale=scaling)
            parts.append(attended.flatten(0, 1).transpose(0, 1))
        return torch.cat(parts)


class DecodePlan:
    """One row for each of the first N sequences of the cache, at position `lengths[i]`, int64[N]."""

    def __init__(self, cache: BatchCache, lengths: torch.Tensor) -> None:
        self._cache = cache
        self._lengths = lengths
        self._rows = torch.arange(len(lengths))
        self._end = int(lengths.max()) + 1
        hidden = torch.arange(self._end)[None, :] > lengths[:, None]
        dtype = cache.keys[0].dtype
        self._mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))[:, None, None]

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._cache.keys[layer][self._rows, :, self._lengths] = key[0].transpose(0, 1)
        self._cache.values[layer][self._rows, :, self._lengths] = value[0].transpose(0, 1)

    def attend(self, layer: int, query: torch.Tensor, scaling: float | None, window: int | None) -> torch.Tensor:
        _check_window(window, self._end)
        rows = query.permute(2, 0, 1, 3)  # [N, K, G, D]: heads of a group are rows of one problem
        keys = self._cache.keys[layer][: len(rows), :, : self._end]
        values = self._cache.values[layer][: len(rows), :, : self._end]
        return F.scaled_dot_product_attention(rows, keys, values, attn_mask=self._mask, scale=scaling).flatten(1, 2)


def use_batch_attention(model: PreTrainedModel) -> None:
    """From now on every pass of `model` needs a plan, as the keyword PLAN."""
    model.set_attn_implementation(ATTENTION_NAME)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer: query [1, H, N, D], key and value [1, K, N, D] -> [1, N, H, D]."""
    if kwargs.get("softcap") is not None:
        raise InvalidArgument("model: attention with bounded scores is not distilled", field="model")
    plan: Plan = kwargs[PLAN]
    layer: int = module.layer_idx  # type: ignore[assignment]
    plan.write(layer, key, value)
    grouped = query[0].unflatten(0, (key.shape[1], query.shape[1] // key.shape[1]))
    return plan.attend(layer, grouped, scaling, sliding_window)[None], None


# No mask function is registered under this name: transformers then builds no mask at all.
AttentionInterface.register(ATTENTION_NAME, _attention)


def _check_window(window: int | None, length: int) -> None:
    if window is not None and length > window:
        raise InvalidArgument(
            f"max_new_tokens: {length} tokens exceed the model's attention window of {window}; ask for fewer",
            field="max_new_tokens",
        )

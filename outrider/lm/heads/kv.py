"""Keys and values of one session's head: grows at its end, and is cut there."""

from __future__ import annotations

import torch

FIRST_CAPACITY = 128


class HeadCache:
    """Room of some places in every layer, `length` of them in use; whoever shortens `length` forgets the rest.

    On a CPU numbers are float32 whatever the head's type: products of so few rows are cheapest there.
    """

    def __init__(
        self, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype = torch.float32 if device.type == "cpu" else dtype
        self.length = 0
        self._tensors = torch.empty(2, num_layers, num_kv_heads, 0, head_dim, dtype=self.dtype, device=device)

    def bytes_for(self, length: int) -> int:
        """That room for so many places takes at most, however it came to be."""
        both, layers, heads, _, width = self._tensors.shape
        return both * layers * heads * width * self._tensors.itemsize * max(FIRST_CAPACITY, 2 * length)

    def grow(self, num_rows: int) -> tuple[int, int]:
        """Takes places for so many rows at the end; returns the first and the one after the last."""
        start, self.length = self.length, self.length + num_rows
        capacity = self._tensors.shape[3]
        if self.length > capacity:
            both, layers, heads, _, width = self._tensors.shape
            larger = self._tensors.new_empty(both, layers, heads, max(FIRST_CAPACITY, 2 * self.length), width)
            larger[:, :, :, :start] = self._tensors[:, :, :, :start]
            self._tensors = larger
        return start, self.length

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Puts [n, heads, D] at the last n places; returns all that is in use, [heads, length, D] each."""
        start = self.length - len(keys)
        kept_keys, kept_values = self._tensors[0, layer, :, : self.length], self._tensors[1, layer, :, : self.length]
        kept_keys[:, start:] = keys.transpose(0, 1)
        kept_values[:, start:] = values.transpose(0, 1)
        return kept_keys, kept_values

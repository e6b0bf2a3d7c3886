"""Linear layers with 4-bit weights, for drafts: a quarter of the bytes of bfloat16, where no text depends on it.

Each run of 64 (or 32) inputs of an output has a smallest value and a step of its own, its weights are multiples of that
step. Activations are bfloat16. A row's result is the same to the bit in whatever pass it is computed. On the machine of
the README a layer takes 0.6 of int8's time over 1 to 4 rows, and twice bfloat16's over the many of a prompt.
"""

from __future__ import annotations

import torch
from torch import nn

GROUPS = (64, 32)
"""Weights that share a step; the first that divides the layer's width."""
OUTPUTS = 16
"""The kernel takes so many outputs at once, and whole such blocks only."""
NUM_LEVELS = 16
ROWS = 4
"""Rows at once: with more the kernel of torch 2.13 leaves its fast path."""
_DTYPES = (torch.float32, torch.bfloat16)
_SMALLEST_STEP = 1e-8
_INNER_TILES = 2
"""Part of the packed layout, which a CPU ignores."""


class Int4Linear(nn.Module):
    """Stands in for an `nn.Linear` in inference: y = x W^T + b within the rounding of W to 4 bits, x and y to bfloat16.

    x: float32 or bfloat16 [..., in_features]; y has its number type. num_bytes: of the weight and its steps.
    """

    def __init__(self, linear: nn.Linear) -> None:
        """linear: one that `can_hold` allows. Raises RuntimeError where torch has no such kernel."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._group = next(group for group in GROUPS if linear.in_features % group == 0)
        weight = linear.weight.detach().float().unflatten(1, (-1, self._group))
        smallest = weight.amin(-1)
        step = ((weight.amax(-1) - smallest) / (NUM_LEVELS - 1)).clamp_min_(_SMALLEST_STEP)
        levels = ((weight - smallest[..., None]) / step[..., None]).round_().to(torch.int32).flatten(1)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, _INNER_TILES)
        # the kernel computes step * (level - 8) + middle
        steps_and_middles = torch.stack([step, smallest + NUM_LEVELS // 2 * step], -1)
        self._steps = steps_and_middles.transpose(0, 1).contiguous().bfloat16()
        self._bias = linear.bias.detach().bfloat16() if linear.bias is not None else None
        self.num_bytes = self._packed.nbytes + self._steps.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features).bfloat16()
        parts = [
            torch.ops.aten._weight_int4pack_mm_for_cpu(part, self._packed, self._group, self._steps)
            for part in rows.split(ROWS)
        ]
        y = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self._bias is not None:
            y += self._bias
        return y.view(*x.shape[:-1], self.out_features).to(x.dtype)


def can_hold(linear: nn.Linear) -> bool:
    """Whether the kernel takes a layer of this shape and number type."""
    fits = linear.in_features % GROUPS[-1] == 0 and linear.out_features % OUTPUTS == 0
    return fits and linear.weight.dtype in _DTYPES

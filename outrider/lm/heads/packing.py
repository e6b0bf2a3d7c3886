"""Linear layers from loose tensors, packed as the target's own are (cpu_linear.py), those of one input as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from outrider.lm.cpu_linear import PackedLinear, can_pack

Weights = tuple[torch.Tensor, torch.Tensor | None]
"""weight [out, in] and bias [out]."""
Linear = Any
"""[n, in] -> [n, out]."""


def pack(parts: Sequence[Weights], dtype: torch.dtype, device: torch.device) -> Linear:
    """One layer whose outputs are those of `parts`, all of one input, side by side."""
    weight = torch.cat([weight for weight, _ in parts]).to(device, dtype)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if any(bias is not None for _, bias in parts):
        biases = [torch.zeros(len(weight)) if bias is None else bias.float().cpu() for weight, bias in parts]
        linear.bias = nn.Parameter(torch.cat(biases).to(device, dtype), requires_grad=False)
    if not can_pack(linear):
        return linear
    packed = PackedLinear(linear)
    try:
        packed(torch.zeros(1, linear.in_features, dtype=dtype))
    except (RuntimeError, NotImplementedError):  # this build has the operation and not for this shape
        return linear
    return packed

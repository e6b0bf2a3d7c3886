"""Linear layers with oneDNN-prepacked weights: on CPUs one pass over a few rows then costs as much as over one.

Stock `F.linear` repacks or strides through the weight on every call; the packed form reads it once, in order. This is
what decides whether verifying several drafts is cheaper than decoding them. The stock layer stays the slow twin in
tests, and the fallback where the op, the device or the number type does not fit.
"""

from __future__ import annotations

import torch
from torch import nn

PACK_ROWS = 8
"""Row count that the packed layout is made for: a verification's, not a prefill's."""

_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """Drop-in for an `nn.Linear` in inference: y = x W^T + b with W[out_features, in_features] packed."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        self.dtype = weight.dtype
        self.num_bytes = weight.numel() * weight.element_size()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
        self._bias = linear.bias.detach() if linear.bias is not None else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")


def can_pack(linear: nn.Linear) -> bool:
    """Whether this layer, on this machine and build of torch, has a packed form that computes the same."""
    weight = linear.weight
    if weight.device.type != "cpu" or weight.dtype not in _DTYPES or type(linear) is not nn.Linear:
        return False
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return weight.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def pack_linears(model: nn.Module) -> int:
    """Replaces every linear layer that can be packed, in place; returns how many.

    The original weights are freed with their layers, except one that is also the input embedding, whose rows are looked
    up. Falls back to the stock layer, unchanged, when packing any single one fails.
    """
    num_packed = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and can_pack(child):
                try:
                    packed = PackedLinear(child)
                    packed(torch.zeros(1, child.in_features, dtype=child.weight.dtype))
                except (RuntimeError, NotImplementedError):
                    return num_packed
                setattr(module, name, packed)
                num_packed += 1
    return num_packed

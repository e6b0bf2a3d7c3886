"""Linear layers with int8 weights, for drafts: a pass reads half the bytes of bfloat16, and no text depends on it.

Weights are rounded to int8 once, symmetrically, with one scale per output; activations are rounded in every pass, with
one scale per row, so that neither a row's neighbours nor an outlier in another row reach it. Sums are exact integers:
a row's result is the same to the bit in whatever pass it is computed. The float layer is the slow twin in tests.

Of the int8 kernels of torch 2.13 on a CPU with VNNI, FBGEMM's was the fastest at 1, 2 and 5 rows and at prefill.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn

WEIGHT_MAX = 127
_SMALLEST_SCALE = 1e-30
"""Keeps a row of zeros from a division by zero."""


class Int8Linear(nn.Module):
    """Stands in for an `nn.Linear` in inference: y = x W^T + b within the rounding of W and x to 8 bits.

    x: float32 or bfloat16 [..., in_features]; y has its number type. num_bytes: of the weight and its scales.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.num_bytes = self.in_features * self.out_features + 12 * self.out_features
        weight = linear.weight.detach().float()
        scales = weight.abs().amax(1).clamp_min(_SMALLEST_SCALE).double() / WEIGHT_MAX
        self._packed = _pack(weight, scales)
        self._bias = linear.bias.detach().float() if linear.bias is not None else None
        # Without VNNI pairs of products are added in 16 bits, which full 8-bit activations overflow.
        self._input_max = 127 if torch.cpu._is_vnni_supported() else 63

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        largest = torch.linalg.vector_norm(x, float("inf"), -1, keepdim=True, dtype=torch.float32)
        largest.clamp_min_(_SMALLEST_SCALE)
        y = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            x / largest, 1 / self._input_max, self._input_max + 1, self._packed
        )
        y = y * largest if self._bias is None else torch.addcmul(self._bias, y, largest)
        return y.to(x.dtype)


def _pack(weight: torch.Tensor, scales: torch.Tensor) -> torch.ScriptObject:
    """What FBGEMM reads in a pass. The engine named at packing decides whose kernel runs."""
    zeros = torch.zeros(len(scales), dtype=torch.long)
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # quantised tensors leave torch one day: then it is refused
            rounded = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        packed: torch.ScriptObject = torch.ops.quantized.linear_prepack(rounded, None)
        return packed
    finally:
        torch.backends.quantized.engine = engine

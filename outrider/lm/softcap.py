"""Attention whose scores are bounded before the softmax, as in Gemma 2: c tanh(score / c). No library kernel has it.

Computed in float32 whatever the number type. Every problem of the first dimension is computed alone, so that its shape,
and with it the order of its additions, does not follow how many there are.
"""

from __future__ import annotations

import torch


def softcapped_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float,
) -> torch.Tensor:
    """As `F.scaled_dot_product_attention` with a float mask, or none: [B, K, R, D], [B, K, T, D] -> [B, K, R, E]."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attended = []
    for index in range(query.shape[0]):
        scores = query[index].float() @ keys[index].float().transpose(-1, -2)
        scores = scores.mul_(scale / softcap).tanh_().mul_(softcap)
        if mask is not None:
            scores += mask if mask.dim() == 2 else mask[index]
        attended.append(scores.softmax(-1) @ values[index].float())
    return torch.stack(attended).to(query.dtype)

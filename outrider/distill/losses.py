"""Losses of a draft's head against the target, and their gradients, a few rows at a time: no logits are kept.

Letters: N rows, H hidden size, V ids of the draft vocabulary, p the target's distribution, q the draft's, both over V.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

CHUNK_ROWS = 512
KL_DECAY = 3.0
"""Of the hybrid's weight: exp(-KL_DECAY * acceptance) of a row goes to the divergence, the rest to the acceptance."""


def head_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    probabilities: torch.Tensor,
    row_weights: torch.Tensor,
    *,
    acceptance_aware: bool,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weighted sums over the rows of (the loss, the cross entropy, the acceptance sum min(p, q)).

    hidden [N, H] and weight [V, H] may need gradients; probabilities [N, V] is p; row_weights [N].
    The loss of a row is the cross entropy -sum p ln q; with `acceptance_aware` it is the hybrid of "LK losses"
    (arXiv 2602.23881): l KL(p, q) + (1 - l) TV(p, q) with l = exp(-3 acceptance), held constant.
    Products are made in `compute_dtype`, everything else in float32. Only the loss carries a gradient.
    """
    result: Any = _HeadLoss.apply(hidden, weight, probabilities, row_weights, acceptance_aware, compute_dtype)  # type: ignore[no-untyped-call]
    return result  # type: ignore[no-any-return]


class _HeadLoss(Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        probabilities: torch.Tensor,
        row_weights: torch.Tensor,
        acceptance_aware: bool,
        compute_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        cast_weight = weight.to(compute_dtype)
        grad_hidden = torch.empty_like(hidden, dtype=torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        totals = torch.zeros(3)
        for start in range(0, len(hidden), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            cast_hidden, p, r = hidden[rows].to(compute_dtype), probabilities[rows].float(), row_weights[rows]
            log_q = torch.log_softmax((cast_hidden @ cast_weight.T).float(), -1)
            losses, grad_logits = _row_losses(p, log_q, acceptance_aware)
            totals += (losses @ r).detach()
            grad = (grad_logits * r[:, None]).to(compute_dtype)
            grad_hidden[rows] = (grad @ cast_weight).float()
            if ctx.needs_input_grad[1]:
                grad_weight += (grad.T @ cast_hidden).float()
        ctx.save_for_backward(grad_hidden, grad_weight)
        loss, entropy, acceptance = totals.unbind()
        ctx.mark_non_differentiable(entropy, acceptance)
        return loss, entropy, acceptance

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *unused: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad * grad_hidden, grad * grad_weight, None, None, None, None


def _row_losses(p: torch.Tensor, log_q: torch.Tensor, acceptance_aware: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[3, n]: loss, cross entropy and acceptance of each row; and the loss's gradient by the logits, [n, V]."""
    q = log_q.exp()
    entropy = -(p * log_q).sum(-1)
    acceptance = torch.minimum(p, q).sum(-1)
    if not acceptance_aware:
        return torch.stack([entropy, entropy, acceptance]), q - p
    share = torch.exp(-KL_DECAY * acceptance)
    divergence = entropy + torch.special.xlogy(p, p).sum(-1)
    loss = share * divergence + (1 - share) * (1 - acceptance)
    # TV = 1 - sum min(p, q) falls with q wherever q < p; the softmax's own derivative takes q's mean off.
    slope = -(q < p).float()
    grad_variation = q * (slope - (q * slope).sum(-1, keepdim=True))
    grad = share[:, None] * (q - p) + (1 - share)[:, None] * grad_variation
    return torch.stack([loss, entropy, acceptance]), grad

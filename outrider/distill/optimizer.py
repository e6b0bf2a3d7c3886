"""Muon for the matrices inside a draft, AdamW for its norms and its head, one schedule for both."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

NORM_RATE, HEAD_RATE = 5e-3, 3e-4
WARMUP_STEPS = 20
LAST_SHARE = 0.05
CLIP_NORM = 5.0


class DraftOptimizer:
    """Steps every parameter of `draft` that is trained; its head may be frozen. matrix_rate: Muon's learning rate."""

    def __init__(self, draft: nn.Module, matrix_rate: float) -> None:
        trained = [(name, p) for name, p in draft.named_parameters() if p.requires_grad]
        head = [p for name, p in trained if name == "lm_head.weight"]
        matrices = [p for name, p in trained if p.ndim == 2 and name != "lm_head.weight"]
        vectors = [p for _, p in trained if p.ndim < 2]
        self._parameters = [p for _, p in trained]
        self._optimizers: list[Any] = [
            torch.optim.Muon(
                matrices, lr=matrix_rate, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(
                [{"params": vectors, "lr": NORM_RATE}, {"params": head, "lr": HEAD_RATE}],
                betas=(0.9, 0.95),
                weight_decay=0.0,
            ),
        ]
        self._rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self._optimizers]

    def step(self, num_steps: int, progress: float) -> None:
        """After a backward pass: clips, steps and clears the gradients. progress: of the whole training, 0 to 1."""
        nn.utils.clip_grad_norm_(self._parameters, CLIP_NORM)
        factor = schedule(num_steps, progress)
        for optimizer, rates in zip(self._optimizers, self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[Any]:
        return [optimizer.state_dict() for optimizer in self._optimizers]

    def load_state_dict(self, states: list[Any]) -> None:
        for optimizer, state in zip(self._optimizers, states, strict=True):
            optimizer.load_state_dict(state)


def schedule(num_steps: int, progress: float) -> float:
    """Of the learning rate: a short warm-up, then half a cosine down to a twentieth."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return min(1.0, (num_steps + 1) / WARMUP_STEPS) * (LAST_SHARE + (1 - LAST_SHARE) * cosine)

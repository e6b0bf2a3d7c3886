"""Training a draft on what the target said: divergence first, acceptance at the end; killed at any step, it goes on.

The target's distribution over the draft vocabulary is made anew for each batch from its last state: nothing of the
size of a vocabulary is ever stored.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from outrider.distill.batches import Batch, Corpus
from outrider.distill.losses import head_loss
from outrider.distill.optimizer import DraftOptimizer
from outrider.distill.target import LAST

STEP_DECAY = 0.8
"""Weight of each further unrolled step against the one before, as in EAGLE-3."""
LOG_STEPS = 20


class Draft(Protocol):
    """What is trained: an `nn.Module` with these."""

    lm_head: nn.Linear

    def hidden(self, batch: Batch, num_steps: int) -> list[torch.Tensor]:
        """Tensor j [B, T, H]: row m, times the head, guesses token m + 1 after j own guesses; for m <= j maybe none."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How long and how. Ends after `num_steps` steps, or where that is 0 after `seconds`.

    acceptance_share: the last part of the training, which uses the acceptance-aware loss.
    """

    num_steps: int
    seconds: float
    matrix_rate: float
    num_unrolled_steps: int
    batch_tokens: int
    acceptance_share: float
    seed: int
    checkpoint_s: float
    compute_dtype: torch.dtype


@dataclass(slots=True)
class TrainingState:
    """Where the training is. curve: {step, loss, cross_entropy, acceptance, epoch} every few steps."""

    step: int = 0
    seconds: float = 0.0
    num_tokens: int = 0
    curve: list[dict[str, float]] = field(default_factory=list)
    resumed_from: list[int] = field(default_factory=list)


class Trainer:
    """Trains `draft` in place. checkpoint: the file that a killed run goes on from."""

    def __init__(
        self,
        draft: Any,
        corpus: Corpus,
        head: torch.Tensor,
        draft_ids: torch.Tensor,
        plan: TrainingPlan,
        checkpoint: Path,
    ) -> None:
        """head [V, H]: the target's. draft_ids: int64[dV], ascending."""
        self.draft, self.plan = draft, plan
        self.state = TrainingState()
        self._corpus, self._checkpoint = corpus, checkpoint
        self._target_rows = head[draft_ids].to(plan.compute_dtype)
        self._listed = torch.zeros(len(head), dtype=torch.bool)
        self._listed[draft_ids] = True
        self._optimizer = DraftOptimizer(draft, plan.matrix_rate)
        if checkpoint.is_file():
            self._load()

    def fraction(self) -> float:
        """Of the training that is done, 0 to 1."""
        if self.plan.num_steps:
            return min(1.0, self.state.step / self.plan.num_steps)
        return min(1.0, self.state.seconds / self.plan.seconds)

    def run(self, on_step: Callable[[TrainingState, float], None]) -> None:
        """To the end, with a checkpoint every so often and a last one. on_step is told after each step."""
        state = self.state
        saved_at = last = time.monotonic()
        batches = self._corpus.endless(self.plan.batch_tokens, self.plan.seed, skip=state.step)
        self.draft.train()
        while self.fraction() < 1.0:
            epoch, indices = next(batches)
            measured = self._step(self._corpus.batch(indices))
            state.step += 1
            now = time.monotonic()
            state.seconds, last = state.seconds + now - last, now
            state.num_tokens += sum(len(self._corpus.sequences[i].token_ids) for i in indices)
            if state.step % LOG_STEPS == 0 or self.fraction() >= 1.0:
                state.curve.append({"step": state.step, "epoch": epoch, **measured})
            if now - saved_at >= self.plan.checkpoint_s:
                self._save()
                saved_at = time.monotonic()
            on_step(state, self.fraction())
        self._save()
        self.draft.eval()

    def _step(self, batch: Batch) -> dict[str, float]:
        plan = self.plan
        wanted = batch.answer_rows() & self._listed[batch.next_ids()]
        probabilities = target_probabilities(batch, wanted, self._target_rows)
        row_of = (wanted.flatten().cumsum(0) - 1).view(wanted.shape)
        aware = self.fraction() >= 1.0 - plan.acceptance_share
        weights = [STEP_DECAY**step for step in range(plan.num_unrolled_steps)]
        loss = torch.zeros(())
        measured = {"loss": 0.0, "cross_entropy": 0.0, "acceptance": 0.0}
        with torch.autocast("cpu", plan.compute_dtype, enabled=plan.compute_dtype != torch.float32):
            hidden = self.draft.hidden(batch, plan.num_unrolled_steps)
        for step, (states, weight) in enumerate(zip(hidden, weights, strict=True)):
            mask = wanted & (torch.arange(wanted.shape[1]) > step)
            num_rows = int(mask.sum())
            if not num_rows:
                continue
            row_weights = torch.full((num_rows,), 1.0 / num_rows)
            own, entropy, acceptance = head_loss(
                states[mask],
                self.draft.lm_head.weight,
                probabilities[row_of[mask]],
                row_weights,
                acceptance_aware=aware,
                compute_dtype=plan.compute_dtype,
            )
            loss = loss + weight / sum(weights) * own
            if step == 0:
                measured = {
                    "loss": float(own.detach()),
                    "cross_entropy": float(entropy),
                    "acceptance": float(acceptance),
                }
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step(self.state.step, self.fraction())
        return measured

    def _save(self) -> None:
        state = self.state
        content = {
            "draft": {name: p.detach() for name, p in self.draft.named_parameters() if p.requires_grad},
            "optimizer": self._optimizer.state_dict(),
            "step": state.step,
            "seconds": state.seconds,
            "num_tokens": state.num_tokens,
            "curve": state.curve,
            "resumed_from": state.resumed_from,
        }
        part = self._checkpoint.with_name(self._checkpoint.name + ".part")
        torch.save(content, part)
        os.replace(part, self._checkpoint)

    def _load(self) -> None:
        content = torch.load(self._checkpoint, weights_only=True)
        own = dict(self.draft.named_parameters())
        for name, value in content["draft"].items():
            own[name].data.copy_(value)
        self._optimizer.load_state_dict(content["optimizer"])
        self.state = TrainingState(
            content["step"], content["seconds"], content["num_tokens"], content["curve"], content["resumed_from"]
        )
        if self.fraction() < 1.0:
            self.state.resumed_from.append(content["step"])


def target_probabilities(batch: Batch, wanted: torch.Tensor, target_rows: torch.Tensor) -> torch.Tensor:
    """float32[N, dV]: the target's distribution, renormalised over the draft vocabulary, at the rows of bool[B, T]."""
    states = batch.states[:, :, LAST][wanted].to(target_rows.dtype)
    return torch.softmax((states @ target_rows.T).float(), -1)

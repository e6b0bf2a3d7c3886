"""An exit adapter: one block and a norm that guess the next token from the input of the target's layer E.

The target stays as it is: a frozen one says nothing in its middle that its head could read (LayerSkip, arXiv
2404.16710, trains the whole model for that), so the adapter is the part that is trained. Of a token that stood, the
state at layer E is the target's own, however the token was guessed: a guess further ahead is no other than the first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from outrider.distill.batches import Batch
from outrider.distill.target import TargetWeights
from outrider.lm.exit_block import new_block


class ExitAdapter(nn.Module):
    """`base`: a transformers model of one layer without embedding, started from the target's layer E and its last norm.
    lm_head [V, H]: the target's rows of the draft vocabulary, frozen."""

    def __init__(self, weights: TargetWeights, draft_ids: torch.Tensor, layer: int, state: int) -> None:
        """layer: E. state: index, among a batch's states, of that layer's input. draft_ids: int64[V], ascending."""
        super().__init__()
        self.base: Any = new_block(weights.config, layer).float()
        self.base.layers[0].load_state_dict({k: v.float() for k, v in weights.layers[layer].items()})
        self.base.norm.weight.data.copy_(weights.norm.float())
        self.lm_head = nn.Linear(weights.config.hidden_size, len(draft_ids), bias=False).requires_grad_(False)
        self.lm_head.weight.data.copy_(weights.head[draft_ids].float())
        self._state = state

    def hidden(self, batch: Batch, num_steps: int) -> list[torch.Tensor]:
        """`num_steps` times one tensor [B, T, H]: row m, times the head, guesses token m + 1."""
        states = batch.states[:, :, self._state].float()
        return [self.base(inputs_embeds=states, use_cache=False).last_hidden_state] * num_steps

"""A plain small model made of a few of the target's layers, its embedding and rows of its head: distilled, it stands
alone as a checkpoint that any server of the family loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModel

from outrider.distill.batches import Batch
from outrider.distill.target import TargetWeights
from outrider.lm.exit_block import pruned_config


class PrunedModel(nn.Module):
    """`base` is a transformers model without head; its embedding is the target's, frozen. lm_head [V, H] is trained."""

    def __init__(self, weights: TargetWeights, draft_ids: torch.Tensor, layers: Sequence[int]) -> None:
        """layers: which of the target's, in order. draft_ids: int64[V], ascending."""
        super().__init__()
        self.base: Any = AutoModel.from_config(pruned_config(weights.config, layers)).float()
        self.base.embed_tokens.weight = nn.Parameter(weights.embedding, requires_grad=False)
        self.base.norm.weight.data.copy_(weights.norm.float())
        for own, index in zip(self.base.layers, layers, strict=True):
            own.load_state_dict({k: v.float() for k, v in weights.layers[index].items()})
        self.lm_head = nn.Linear(weights.config.hidden_size, len(draft_ids), bias=False)
        self.lm_head.weight.data.copy_(weights.head[draft_ids].float())

    def hidden(self, batch: Batch, num_steps: int) -> list[torch.Tensor]:
        """`num_steps` times one tensor [B, T, H]: row m, times the head, guesses token m + 1.

        Its own guesses that came true are the text, so a guess further ahead is no other than the first.
        """
        embedded = self.base.embed_tokens(batch.token_ids[:, :-1]).float()
        return [self.base(inputs_embeds=embedded, use_cache=False).last_hidden_state] * num_steps

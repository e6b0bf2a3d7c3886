"""The exit adapter at work: one block after the target's first E layers, with keys and values of its own per session.

It reads the input of the target's layer E at every position and guesses the token that follows. The block is one of the
target's own family, as transformers builds it; its attention is ours, through transformers' public interface.

Letters: N rows, K key-value heads, D width of a head, H hidden size, V ids of the draft vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AutoModel, PretrainedConfig

from outrider.errors import InvalidArgument

ATTENTION_NAME = "outrider_exit"
CONTEXT = "outrider_exit_context"
CHUNK_ROWS = 512
MIN_CAPACITY = 64


class ExitHead:
    """Serves all sessions; what differs between them is in their contexts. Used by one thread.

    exit_layer: E; it needs the inputs of that layer. draft_ids: int64[V], ascending.
    """

    def __init__(self, base: Any, rows: nn.Module, exit_layer: int, draft_ids: torch.Tensor, config: dict[str, Any]):
        """base: as `new_block` builds, filled and in the type and place it runs in. rows: maps [N, H] to [N, V].
        config: what the checkpoint tells of itself."""
        self.exit_layer, self.draft_ids, self.config = exit_layer, draft_ids, config
        self.num_parameters = sum(p.numel() for p in base.parameters())
        self.weight_bytes = sum(p.numel() * p.element_size() for p in (*base.parameters(), *rows.parameters()))
        base.set_attn_implementation(ATTENTION_NAME)
        self._base = base.eval().requires_grad_(False)
        self._rows = rows

    def new_context(self) -> ExitContext:
        """For one session, empty."""
        return ExitContext(self)

    @torch.inference_mode()
    def logits(self, context: ExitContext, states: torch.Tensor) -> torch.Tensor:
        """As `ExitContext.extend`."""
        hidden = states
        for part in states.split(CHUNK_ROWS):
            places = torch.arange(context.length, context.length + len(part), device=part.device)[None]
            hidden = self._base(
                inputs_embeds=part[None], position_ids=places, use_cache=False, **{CONTEXT: context}
            ).last_hidden_state[0]
            context.length += len(part)
        return self._rows(hidden[-1:])[0].float()  # type: ignore[no-any-return]


class ExitContext:
    """Keys and values of the first `length` positions of a session's text."""

    def __init__(self, head: ExitHead) -> None:
        self.length = 0
        self._head = head
        self._keys = self._values = torch.empty(0, 0, 0)

    def extend(self, states: torch.Tensor) -> torch.Tensor:
        """float32[V], logits of the token after the last of these positions.

        states [N, H], N >= 1: the inputs of layer E at positions length, length + 1, ...
        """
        return self._head.logits(self, states)

    def truncate(self, length: int) -> None:
        """Forgets positions from `length` on."""
        assert 0 <= length <= self.length
        self.length = length

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, window: int | None
    ) -> torch.Tensor:
        """query [heads, N, D], key and value [K, N, D] of the next N positions -> [N, heads, D]."""
        start, end = self.length, self.length + key.shape[1]
        if end > self._keys.shape[1]:
            self._keys, self._values = (_grown(old, new, start, end) for old, new in
                                        ((self._keys, key), (self._values, value)))  # fmt: skip
        self._keys[:, start:end], self._values[:, start:end] = key, value
        first = max(0, start + 1 - window) if window is not None else 0
        places = torch.arange(first, end, device=query.device)
        own = torch.arange(start, end, device=query.device)[:, None]
        mask = places <= own
        if window is not None:
            mask &= places > own - window
        attended = F.scaled_dot_product_attention(
            query[None], self._keys[None, :, first:end], self._values[None, :, first:end],
            attn_mask=None if len(own) == 1 else mask, scale=scaling, enable_gqa=True,
        )  # fmt: skip
        return attended[0].transpose(0, 1)


def new_block(config: PretrainedConfig, layer: int) -> Any:
    """A transformers model of the target's family with layer `layer` alone, random weights and no embedding."""
    base: Any = AutoModel.from_config(pruned_config(config, [layer]))
    base.embed_tokens = None
    return base


def pruned_config(config: PretrainedConfig, layers: Sequence[int]) -> PretrainedConfig:
    """The target's config with these layers only."""
    pruned = copy.deepcopy(config)
    pruned.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        pruned.layer_types = [config.layer_types[index] for index in layers]
    return pruned


def _grown(old: torch.Tensor, new: torch.Tensor, length: int, wanted: int) -> torch.Tensor:
    grown = new.new_empty(new.shape[0], max(MIN_CAPACITY, 2 * wanted), new.shape[2])
    if length:
        grown[:, :length] = old[:, :length]
    return grown


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: query [1, heads, N, D], key and value [1, K, N, D] -> [1, N, heads, D]."""
    if kwargs.get("softcap") is not None:
        raise InvalidArgument("heads: attention with bounded scores has no exit adapter", field="heads")
    context: ExitContext = kwargs[CONTEXT]
    return context.attend(query[0], key[0], value[0], scaling, sliding_window)[None], None


# No mask function is registered under this name: transformers then builds no mask at all.
AttentionInterface.register(ATTENTION_NAME, _attention)

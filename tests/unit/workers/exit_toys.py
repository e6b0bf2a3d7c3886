"""A tiny target that leaves early, and an adapter made of its own parts: for sessions driven by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from session_loops import HandDriver, ListSequence

from outrider.lm.exit_block import ExitHead, new_block
from outrider.lm.interface import Forward, ForwardResult

NUM_LAYERS, EXIT_LAYER = 4, 2


class TinyTarget:
    """A seeded llama whose rows and states after a prefix are computed once."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        config = transformers.LlamaConfig(
            vocab_size=vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=NUM_LAYERS,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256, initializer_range=0.3,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        self.model = transformers.LlamaForCausalLM(config).eval().float()
        with torch.no_grad():
            for layer in self.model.model.layers:
                layer.mlp.down_proj.weight.mul_(0.5)
        self.vocab_size = vocab_size
        self._known: dict[tuple[int, ...], tuple[np.ndarray, torch.Tensor]] = {}

    def row(self, ids: Sequence[int]) -> np.ndarray:
        """float32[V] after `ids`."""
        return self._after(ids)[0]

    def state(self, ids: Sequence[int]) -> torch.Tensor:
        """[H]: the input of the exit layer at the last of `ids`."""
        return self._after(ids)[1]

    @torch.inference_mode()
    def _after(self, ids: Sequence[int]) -> tuple[np.ndarray, torch.Tensor]:
        key = tuple(ids)
        if key not in self._known:
            result = self.model(input_ids=torch.tensor([list(ids)]), output_hidden_states=True)
            self._known[key] = result.logits[0, -1].numpy(), result.hidden_states[EXIT_LAYER][0, -1]
        return self._known[key]

    def adapter(self, draft_ids: Sequence[int]) -> ExitHead:
        """The exit layer itself, the last norm and rows of the head: some of its guesses are right."""
        base = new_block(self.model.config, EXIT_LAYER)
        base.layers[0].load_state_dict(self.model.model.layers[EXIT_LAYER].state_dict())
        base.norm.load_state_dict(self.model.model.norm.state_dict())
        ids = torch.tensor(list(draft_ids))
        rows = torch.nn.Linear(16, len(ids), bias=False).requires_grad_(False)
        rows.weight.copy_(self.model.lm_head.weight[ids])
        return ExitHead(base, rows, EXIT_LAYER, ids, {})


class EarlySequence(ListSequence):
    """Also holds tokens of which only the first layers were computed, and answers for states of layer E."""

    def __init__(self, max_length: int, target: TinyTarget) -> None:
        super().__init__(max_length)
        self.early_ids: list[int] = []
        self._target = target

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self.early_ids = []

    def features(self, start: int, end: int, states: Sequence[int]) -> torch.Tensor:
        ids = [*self.token_ids, *self.early_ids]
        assert tuple(states) == (EXIT_LAYER,)
        assert 0 <= start < end <= len(ids)
        return torch.stack([self._target.state(ids[: place + 1]) for place in range(start, end)])


class EarlyDriver(HandDriver):
    """Counts rows by layer as the engine would: `num_first` of the first E layers, `num_last` of the others."""

    num_first = num_last = 0

    def forward(self, request: Forward) -> ForwardResult:
        sequence: Any = request.sequence
        rows = list(request.token_ids)
        if request.num_layers:
            assert request.num_layers == EXIT_LAYER
            assert not request.num_logits
            sequence.early_ids += rows
            assert len(sequence.token_ids) + len(sequence.early_ids) <= sequence.max_length
            self.num_first += len(rows)
            return ForwardResult(np.empty((0, 1)), queue_us=1, compute_us=2, num_batch_rows=len(rows))
        num_done = 0
        while num_done < min(len(rows), len(sequence.early_ids)) and rows[num_done] == sequence.early_ids[num_done]:
            num_done += 1
        sequence.early_ids = []
        self.num_first += len(rows) - num_done
        self.num_last += len(rows)
        return super().forward(request)

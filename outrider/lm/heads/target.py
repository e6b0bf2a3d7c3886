"""What a head needs of the model it guesses for: sizes to be checked against, and the two matrices it may share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Embedding = Callable[[torch.Tensor], torch.Tensor]
"""int64[n] ids -> [n, H]."""
Projection = Callable[[torch.Tensor], torch.Tensor]
"""[n, H] -> [n, V]."""


@dataclass(frozen=True, slots=True)
class HeadTarget:
    """The target as heads see it.

    hidden_size, num_layers: of its residual stream. vocab_size: real ids; padded_vocab_size: rows of its matrices.
    embedding, lm_head: of the loaded model, shared and not copied: int64[n] -> [n, H] and [n, H] -> [n, padded V], in
    `dtype` on `device`. fingerprint: the model's own name for its weights; empty: not known, and a head that names its
    target is taken at its word. folder: of its safetensors, where a full model with heads can be compared with it.
    """

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    padded_vocab_size: int
    embedding: Embedding
    lm_head: Projection
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")  # noqa: RUF009  # immutable
    fingerprint: str = ""
    folder: Path | None = None

    @classmethod
    def of(
        cls, model: Any, *, name: str, vocab_size: int, fingerprint: str = "", folder: Path | None = None
    ) -> HeadTarget:
        """Of a loaded transformers causal LM, its layers packed or not. vocab_size: real ids."""
        config = model.config.get_text_config()
        return cls(
            name=name,
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            vocab_size=vocab_size,
            padded_vocab_size=config.vocab_size,
            embedding=model.get_input_embeddings(),
            lm_head=model.get_output_embeddings(),
            dtype=model.dtype,
            device=model.device,
            fingerprint=fingerprint,
            folder=folder,
        )

    def embed(self, token_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[n, H] of int64[n]."""
        return self.embedding(token_ids).to(dtype)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[n, V] of [n, H], the state after the final norm: the target's own logits, padding cut off."""
        return self.lm_head(hidden.to(self.dtype))[..., : self.vocab_size].float()


def cheapest_dtype(target: HeadTarget) -> torch.dtype:
    """To compute a head in: half the bytes where the processor multiplies them directly, since no text depends on how
    precise a guess is."""
    if target.device.type == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.bfloat16
    return target.dtype

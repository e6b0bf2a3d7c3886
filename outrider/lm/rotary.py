"""Rotary angles looked up instead of computed: once per page of positions, and the same bits in every pass.

A pass of few rows would compute sines and cosines of few numbers, for which the vectorised and the plain code, chosen
by how many numbers there are, may differ in the last bit.
"""

from __future__ import annotations

import torch
from torch import nn

PAGE = 1024
"""Positions computed at a time, always this many, so always in the same way."""


class RotaryTable(nn.Module):
    """Drop-in for a model's rotary embedding: `(x, position_ids[1, N]) -> (cos, sin)`, each [1, N, D] of x's dtype.

    For embeddings that depend on nothing but the position, which is what the adapter serves, and on the type of the
    layer where a model has a third argument for it.
    """

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary
        self._tables: dict[tuple[str, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, *layer_type: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = position_ids[0]
        tables = self._reaching(x, int(rows.max()) + 1, layer_type)
        return tables[0][rows][None], tables[1][rows][None]

    def _reaching(self, x: torch.Tensor, length: int, layer_type: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        tables = self._tables.get(layer_type)
        num_ready = 0 if tables is None or tables[0].dtype != x.dtype else tables[0].shape[0]
        if tables is None or num_ready < length:
            starts = range(0, -(-length // PAGE) * PAGE, PAGE)
            pages = [self.rotary(x, torch.arange(s, s + PAGE, device=x.device)[None], *layer_type) for s in starts]
            tables = (torch.cat([p[0][0] for p in pages]), torch.cat([p[1][0] for p in pages]))
            self._tables[layer_type] = tables
        return tables


def use_rotary_table(model: nn.Module) -> bool:
    """Puts a table in front of the model's rotary embedding, in place. False where it is none of the usual kind."""
    for module in model.modules():
        rotary = getattr(module, "rotary_emb", None)
        if isinstance(rotary, nn.Module) and _is_usual(rotary) and hasattr(module, "layers"):
            module.rotary_emb = RotaryTable(rotary)
            return True
    return False


def _is_usual(rotary: nn.Module) -> bool:
    """Frequencies, of the model or of each type of its layers, are all that it holds."""
    return any(name == "inv_freq" or name.endswith("_attention_inv_freq") for name, _ in rotary.named_buffers())

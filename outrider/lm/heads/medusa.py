"""Medusa heads (arXiv 2401.10774): each guesses from the target's last state alone, at an offset of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from outrider.errors import Internal
from outrider.lm.heads.conventions import LAST_STATE_ONLY, Convention
from outrider.lm.heads.packing import Linear
from outrider.lm.heads.target import Projection


@dataclass(frozen=True, slots=True)
class MedusaHead:
    """num_heads guesses at once. No state: one object serves all sessions.

    first: the first residual layer of all heads as one product, [H] -> [num_heads * H]. later: of each head, its
    further ones. lm_heads: one for each head, or one for all. draft_ids: int64[dV], the id of each logit; None: all.
    """

    name: str
    layout: str
    hidden_size: int
    num_heads: int
    dtype: torch.dtype
    device: torch.device
    first: Linear | None
    later: tuple[tuple[Linear, ...], ...]
    lm_heads: tuple[Projection, ...]
    draft_ids: torch.Tensor | None
    num_parameters: int
    kind: str = "medusa"
    convention: Convention = LAST_STATE_ONLY[0]
    conventions: tuple[Convention, ...] = LAST_STATE_ONLY

    @property
    def states(self) -> tuple[int, ...]:
        """The target's states that make up a feature."""
        return self.convention.states

    @property
    def feature_width(self) -> int:
        """Numbers in a feature."""
        return self.hidden_size

    def reading(self, convention: Convention) -> MedusaHead:
        """There is but one way."""
        return self

    @torch.inference_mode()
    def logits(self, feature: torch.Tensor, num_heads: int | None = None) -> torch.Tensor:
        """float32[num_heads, V'] of the target's last state [H] at position t: row i guesses token t + i + 2.

        num_heads: only the first so many.
        """
        if feature.shape != (self.hidden_size,):
            raise Internal(f"a Medusa head reads one state of {self.hidden_size} numbers, not {list(feature.shape)}")
        count = self.num_heads if num_heads is None else min(num_heads, self.num_heads)
        x = feature.to(self.device, self.dtype).expand(self.num_heads, -1)
        if self.first is not None:
            x = x + F.silu(self.first(x[:1])).view(self.num_heads, -1)
        rows = []
        for number in range(count):
            row = x[number : number + 1]
            for layer in self.later[number]:
                row = row + F.silu(layer(row))
            rows.append(row)
        if len(self.lm_heads) == 1:
            return self.lm_heads[0](torch.cat(rows))
        return torch.cat([self.lm_heads[number](row) for number, row in enumerate(rows)])

"""What a draft needs to be decided where the draft model's logits are, and how the decision reads. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.drafting.proposal import SparseQ
from outrider.errors import Internal
from outrider.sampling.history import History
from outrider.sampling.noise import Noise
from outrider.sampling.params import SamplingParams, StoppingParams
from outrider.sampling.sparse_q import to_counts


class Drafts:
    """The kind of all `DraftDecision`s."""

    def decide(self, decisions: Sequence[DraftDecision], rows: Any, step: int = 0) -> Any:
        """See `outrider.lm.gpu.drafts.decide`."""
        from outrider.lm.gpu.drafts import decide

        return decide(decisions, rows, step)


DRAFTS = Drafts()


@dataclass(slots=True)
class DraftDecision:
    """One draft's parameters, and the position where it will stand. `history` is read while its program waits."""

    params: SamplingParams
    stopping: StoppingParams
    history: History
    noise: Noise
    position: int
    max_q_entries: int

    @property
    def kind(self) -> Drafts:
        """All of them are decided together."""
        return DRAFTS

    @property
    def can_chain(self) -> bool:
        """Whether a draft depends on the one before through its logits and its position only."""
        params = self.params
        return params.decides_by_match and not params.needs_history and not self.stopping.masks_stops

    def read(self, line: np.ndarray) -> tuple[int | None, SparseQ | None]:
        """line: float64[w] -> the token, or the q to draw it from. Raises Internal on a row that cannot be read."""
        if np.isnan(line[0]):
            raise Internal("the draft model's logits hold NaN, +inf or no token to choose", reason="BAD_LOGITS")
        if self.params.decides_by_match:
            return int(line[0]), None
        most = (len(line) - 1) // 2
        count = min(int(line[0]), self.max_q_entries)
        counts = to_counts(line[1 + most : 1 + most + count])
        drawable = counts > 0
        return None, SparseQ(line[1 : 1 + count][drawable].astype(np.uint32), counts[drawable])

"""What a round needs to be decided where the logits are, and what the decision reads as. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.drafting.proposal import Proposal
from outrider.sampling.history import History
from outrider.sampling.noise import Noise
from outrider.sampling.params import SamplingParams, StoppingParams
from target_worker.acceptance import Outcome, ends_text, outcome_of


class Rounds:
    """The kind of all `RoundDecision`s."""

    def decide(self, decisions: Sequence[RoundDecision], rows: Any, step: int = 0) -> Any:
        """See `device_acceptance.decide`."""
        from target_worker.device_acceptance import decide

        return decide(decisions, rows)


ROUNDS = Rounds()


@dataclass(frozen=True, slots=True)
class RoundDecision:
    """The arguments of `acceptance.verify`, without the logits. `history` is read while its program waits."""

    proposal: Proposal
    params: SamplingParams
    stopping: StoppingParams
    history: History
    noise: Noise
    prefix_hash: int
    position: int

    @property
    def kind(self) -> Rounds:
        """All of them are decided together."""
        return ROUNDS

    def outcome(self, decided: np.ndarray) -> Outcome:
        """decided: float64[3 + 2 G], this round's line of what `decide` gave."""
        drafts, stand = self.proposal.token_ids, int(decided[0])
        soft_acceptances = bytes(int(soft) for soft in decided[2 : 2 + len(drafts)])
        next_token = None if ends_text(drafts[:stand], self.stopping) else int(decided[1])
        return outcome_of(drafts, stand, next_token, soft_acceptances)

    def row_choices(self, decided: np.ndarray) -> list[int]:
        """The likeliest id of each row's raw logits."""
        start = 2 + (len(decided) - 3) // 2
        return [int(token_id) for token_id in decided[start : start + len(self.proposal) + 1]]

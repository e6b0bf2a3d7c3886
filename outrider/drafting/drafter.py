"""What a session wants from a drafter. One instance serves one session; state it keeps follows the committed ids."""

from __future__ import annotations

from typing import Protocol

from outrider.drafting.proposal import Proposal
from outrider.lm.interface import Program


class Drafter(Protocol):
    """Guesses what comes after the session's committed ids."""

    name: str

    def propose(self, num_draft_tokens: int) -> Program[Proposal]:
        """Up to `num_draft_tokens` (at least 1) drafts. A pure function of the committed prefix and the parameters."""

    def ingest(self) -> Program[None]:
        """Computes now what the next `propose` would have to compute first."""

"""What a session wants from a drafter. One instance serves one session; state it keeps follows the committed ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from outrider.drafting.proposal import Proposal
from outrider.lm.interface import Program


class Drafter(Protocol):
    """Guesses what comes after the session's committed ids."""

    name: str

    def propose(self, num_draft_tokens: int) -> Program[Proposal]:
        """Up to `num_draft_tokens` (at least 1) drafts. A pure function of the committed prefix and the parameters."""

    def ingest(self) -> Program[None]:
        """Computes now what the next `propose` would have to compute first."""


@runtime_checkable
class TreeDrafter(Protocol):
    """A drafter that draws trees as well."""

    def propose_tree(self, shape: Sequence[int]) -> Program[Proposal]:
        """As `Drafter.propose`: a tree of this shape, `Proposal.parents`, or a part of it with all its beginnings.
        Drafts that are not sampled may make any other of as many nodes and as deep at most."""

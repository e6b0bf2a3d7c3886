"""What a session wants from a drafter. One instance serves one session; state it keeps follows the committed ids."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from outrider.drafting.proposal import Proposal
from outrider.errors import DeadEnd
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


def proposed(program: Program[Proposal], drafter: str) -> Program[Proposal]:
    """What a drafter's program proposes: nothing where the request leaves its first draft no token. That is no fault of
    the drafter's: a draft model's vocabulary may lack what a form wants, and where it is the form's own end the target
    finds it and tells the client."""
    started_ns = time.perf_counter_ns()
    try:
        return (yield from program)
    except DeadEnd:
        return Proposal(drafter=drafter, compute_us=(time.perf_counter_ns() - started_ns) // 1000)

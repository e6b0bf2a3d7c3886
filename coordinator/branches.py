"""Branches that a draft worker told of one stream: proposals for outcomes not known yet. Sans-IO.

A branch is taken whole, or not at all, for no other reason than that the log has become its prefix: nothing that was
drawn in it is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider.serving.session_calls import SealedProposal

MAX_BRANCHES = 128
"""Kept at once; the oldest go first."""


@dataclass(slots=True)
class AheadCounts:
    """What drafting ahead came to. `num_hits`: branches used; `num_misses`: rounds that found none though some were
    wanted; `num_cancelled_tokens`: drafted for branches that were never told. `num_pipelined`: rounds that were sent to
    the target before the verdict of the one before; `num_pipelined_used`: not dropped there."""

    num_branches: int = 0
    num_hits: int = 0
    num_misses: int = 0
    num_told_tokens: int = 0
    num_used_tokens: int = 0
    num_cancelled_tokens: int = 0
    num_pipelined: int = 0
    num_pipelined_used: int = 0

    def add(self, others: AheadCounts) -> None:
        """Those of another stream."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(others, name))

    @property
    def num_draft_tokens(self) -> int:
        """Drafted ahead in all."""
        return self.num_told_tokens + self.num_cancelled_tokens

    @property
    def num_wasted_tokens(self) -> int:
        return self.num_draft_tokens - self.num_used_tokens


class Foretold(NamedTuple):
    """The likeliest outcome of the round on top of the log: `num_accepted` drafts stand, then comes `token_id`; and the
    branch behind it, whose prefix has this hash."""

    prefix_hash: int
    num_accepted: int
    token_id: int
    branch: SealedProposal


class BranchStore:
    """By the hash of the prefix that each continues."""

    def __init__(self, counts: AheadCounts) -> None:
        self._counts = counts
        self._branches: dict[int, SealedProposal] = {}
        self._likeliest: tuple[int, Foretold] | None = None

    def add(
        self, proposals: Mapping[int, SealedProposal], base_length: int = 0, outcomes: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Told by the worker, of the round on top of `base_length` ids; `outcomes` of each, the likeliest first."""
        for (prefix_hash, branch), outcome in zip(proposals.items(), outcomes, strict=False):
            self._likeliest = base_length, Foretold(prefix_hash, *outcome, branch)
            break
        self._counts.num_branches += len(proposals)
        self._counts.num_told_tokens += sum(proposal.num_draft_tokens for proposal in proposals.values())
        self._branches.update(proposals)
        while len(self._branches) > MAX_BRANCHES:
            del self._branches[next(iter(self._branches))]

    def likeliest(self, base_length: int) -> Foretold | None:
        """Of the round on top of so many ids; None: nothing was told of it."""
        told = self._likeliest
        return told[1] if told is not None and told[0] == base_length else None

    def __contains__(self, prefix_hash: int) -> bool:
        return prefix_hash in self._branches

    def take(self, prefix_hash: int, drafter: str) -> SealedProposal | None:
        """The branch of a log with this hash, if `drafter` made it; all others are forgotten."""
        found = self._branches.get(prefix_hash)
        self._branches.clear()
        if found is None or found.drafter != drafter:
            return None
        self._counts.num_hits += 1
        self._counts.num_used_tokens += found.num_draft_tokens
        return found

    def clear(self) -> None:
        """The worker is lost, or begins anew."""
        self._branches.clear()
        self._likeliest = None

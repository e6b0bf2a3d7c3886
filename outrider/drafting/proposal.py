"""The message between drafters and the verifier: tokens, and exactly the distributions they were drawn from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.drafting import tree

Q_TOTAL = 65_536
MAX_Q_ENTRIES = 256
MAX_STEP_ROWS = 8
"""Committed tokens that a draft model computes along with its first draft. More of them, as behind a plain run, are a
pass of their own, so that what drafts take is told without it."""


@dataclass(frozen=True, slots=True)
class SparseQ:
    """A draft distribution as integer counts: q(ids[i]) = counts[i] / 65,536, and 0 elsewhere.

    ids: uint32[K], unique; counts: int64[K], each >= 1, summing to 65,536; 1 <= K <= 256.
    """

    ids: np.ndarray
    counts: np.ndarray

    def probability(self, token_id: int) -> float:
        """q(token_id), exact in float64."""
        (where,) = np.nonzero(self.ids == token_id)
        return float(self.counts[where[0]]) / Q_TOTAL if len(where) else 0.0


@dataclass(frozen=True, slots=True)
class Proposal:
    """A chain or a tree of drafted tokens. `q[i]` is the exact conditional of token i given the prefix, its ancestors
    and, where siblings were drawn without replacement, the siblings before it: removed and renormalised. Siblings drawn
    with replacement have the same q.

    `q[i] is None` means one-hot: the token was not sampled (lookup, greedy, COUPLED). An empty `q` means all one-hot.
    `confidences` are chances of acceptance in [0, 1], empty when not told. `parents` is the shape as `tree` defines it;
    empty: a chain.
    """

    token_ids: tuple[int, ...] = ()
    q: tuple[SparseQ | None, ...] = ()
    confidences: tuple[float, ...] = ()
    drafter: str = ""
    queue_us: int = 0
    compute_us: int = 0
    num_ingested_tokens: int = 0
    catch_up_us: int = 0
    parents: tuple[int, ...] = ()

    @property
    def is_chain(self) -> bool:
        """Whether every token is the child of the one before it, said or unsaid."""
        return tree.is_chain(self.parents)

    @property
    def shape(self) -> tuple[int, ...]:
        """`parents`, spelled out for a chain as well."""
        return self.parents or tree.chain_parents(len(self))

    def kept(self, indices: Sequence[int]) -> Proposal:
        """Of these tokens only, which ascend and hold every parent of one of them (KeyError otherwise)."""
        places = {tree.PREFIX: tree.PREFIX, **{index: place for place, index in enumerate(indices)}}
        parents = tuple(places[self.shape[index]] for index in indices)
        return dataclasses.replace(
            self,
            token_ids=tuple(self.token_ids[index] for index in indices),
            q=tuple(self.q[index] for index in indices) if self.q else (),
            confidences=tuple(self.confidences[index] for index in indices) if self.confidences else (),
            parents=() if tree.is_chain(parents) else parents,
        )

    def q_at(self, index: int) -> SparseQ | None:
        """q of drafted token `index`; None is one-hot."""
        return self.q[index] if self.q else None

    def __len__(self) -> int:
        return len(self.token_ids)


EMPTY = Proposal()


class ProposalFault(Exception):
    """The proposal cannot be trusted: it is dropped and counted, the round goes on plain. The text says why."""


def check(proposal: Proposal, *, vocab_size: int, max_draft_tokens: int) -> None:
    """Raises ProposalFault unless every id is in range, every sparse q is well formed and holds its token, parents come
    before their children, and siblings agree on how they were drawn."""
    if len(proposal) > max_draft_tokens:
        raise ProposalFault(f"{len(proposal)} drafts, at most {max_draft_tokens} allowed")
    if proposal.q and len(proposal.q) != len(proposal):
        raise ProposalFault(f"{len(proposal.q)} distributions for {len(proposal)} drafts")
    for index, token_id in enumerate(proposal.token_ids):
        if not 0 <= token_id < vocab_size:
            raise ProposalFault(f"draft {index} has id {token_id}, vocabulary has {vocab_size}")
        q = proposal.q_at(index)
        if q is None:
            continue
        if not 1 <= len(q.ids) == len(q.counts) <= MAX_Q_ENTRIES:
            raise ProposalFault(f"q of draft {index} has {len(q.ids)} ids and {len(q.counts)} counts")
        if q.counts.min() < 1 or int(q.counts.sum()) != Q_TOTAL:
            raise ProposalFault(f"q of draft {index} has counts that do not sum to {Q_TOTAL}")
        if int(q.ids.max()) >= vocab_size or len(np.unique(q.ids)) != len(q.ids):
            raise ProposalFault(f"q of draft {index} has ids out of range or twice")
        if not (q.ids == token_id).any():
            raise ProposalFault(f"q of draft {index} does not hold its own token {token_id}")
    if proposal.parents:
        _check_shape(proposal)
        for siblings in tree.children(proposal.parents):
            _check_siblings(proposal, siblings)


def _check_shape(proposal: Proposal) -> None:
    if len(proposal.parents) != len(proposal):
        raise ProposalFault(f"{len(proposal.parents)} parents for {len(proposal)} drafts")
    for index, parent in enumerate(proposal.parents):
        if not tree.PREFIX <= parent < index:
            raise ProposalFault(f"draft {index} has parent {parent}, which is not before it")


def _check_siblings(proposal: Proposal, siblings: Sequence[int]) -> None:
    """A sampled sibling was drawn from the q of one before it (with replacement) or from one without the tokens of all
    of them (without). One-hot siblings differ: the second of two equal ones could never be accepted."""
    sampled: list[int] = []
    certain: set[int] = set()
    for index in siblings:
        token_id, q = proposal.token_ids[index], proposal.q_at(index)
        if q is None:
            if token_id in certain:
                raise ProposalFault(f"draft {index} repeats its one-hot sibling {token_id}")
            certain.add(token_id)
            continue
        repeats = any((q.ids == proposal.token_ids[other]).any() for other in sampled)
        if repeats and not any(_same_q(q, proposal.q_at(other)) for other in sampled):
            raise ProposalFault(f"q of draft {index} is not that of a sibling, and holds the token of one before it")
        sampled.append(index)


def _same_q(a: SparseQ, b: SparseQ | None) -> bool:
    return b is not None and np.array_equal(a.ids, b.ids) and np.array_equal(a.counts, b.counts)

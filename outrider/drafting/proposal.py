"""The message between drafters and the verifier: tokens, and exactly the distributions they were drawn from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Q_TOTAL = 65_536
MAX_Q_ENTRIES = 256


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
    """A chain of drafted tokens. `q[i]` is the exact conditional of token i given the prefix and tokens before it.

    `q[i] is None` means one-hot: the token was not sampled (lookup, greedy, COUPLED). An empty `q` means all one-hot.
    `confidences` are chances of acceptance in [0, 1], empty when not told.
    """

    token_ids: tuple[int, ...] = ()
    q: tuple[SparseQ | None, ...] = ()
    confidences: tuple[float, ...] = ()
    drafter: str = ""
    queue_us: int = 0
    compute_us: int = 0
    num_ingested_tokens: int = 0

    def q_at(self, index: int) -> SparseQ | None:
        """q of drafted token `index`; None is one-hot."""
        return self.q[index] if self.q else None

    def __len__(self) -> int:
        return len(self.token_ids)


EMPTY = Proposal()


class ProposalFault(Exception):
    """The proposal cannot be trusted: it is dropped and counted, the round goes on plain. The text says why."""


def check(proposal: Proposal, *, vocab_size: int, max_draft_tokens: int) -> None:
    """Raises ProposalFault unless every id is in range and every sparse q is well formed and holds its token."""
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

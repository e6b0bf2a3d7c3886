"""Drawing a chain of drafts, row after row of a draft's logits, with the stream's own parameters and noise: every draft
is a function of the exact prefix, the parameters and the seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from outrider.drafting.proposal import MAX_Q_ENTRIES, Proposal, SparseQ
from outrider.sampling.distribution import coupled_token, greedy_token
from outrider.sampling.history import History
from outrider.sampling.noise import Noise, Role, extend_hash
from outrider.sampling.params import AcceptanceRule, SamplingParams, StoppingParams
from outrider.sampling.sparse_q import draw_draft, sparse_q

if TYPE_CHECKING:
    from outrider.serving.session_log import SessionLog


def draw_token(
    logits: np.ndarray,
    params: SamplingParams,
    stopping: StoppingParams,
    history: History,
    noise: Noise,
    prefix_hash: int,
    position: int,
    max_q_entries: int,
) -> tuple[int, SparseQ | None]:
    """One draft and its q; None where the rule is a match of ids, which needs none.

    logits: float32[V], of the row that `history` and `prefix_hash` belong to. position: where the draft will stand.
    Raises Internal on a row that cannot be read.
    """
    if params.greedy:
        return greedy_token(logits, params, stopping, history), None
    if params.acceptance is AcceptanceRule.COUPLED:
        return coupled_token(logits, params, stopping, history, noise, position), None
    q = sparse_q(logits, params, stopping, history, max_q_entries)
    return draw_draft(q, noise.integer16(prefix_hash, Role.DRAFT)), q


class ChainDraft:
    """The drafts so far, on top of a history that is set back at the end. Made by `drafting`."""

    def __init__(self, log: SessionLog, max_q_entries: int) -> None:
        self.token_ids: list[int] = []
        self._q: list[SparseQ | None] = []
        self._params = log.sampling
        self._stopping = log.stopping
        self._history = log.history
        self._noise = log.noise
        self._prefix_hash = log.prefix_hash
        self._position = len(log.ids)
        self._max_q_entries = max_q_entries

    @property
    def ends_text(self) -> bool:
        """Whether the last draft is a stop token: no draft after it is of use."""
        return bool(self.token_ids) and self.token_ids[-1] in self._stopping.stop_token_ids

    @property
    def ends_certainly(self) -> bool:
        """The same of a draft that was not sampled. Where a proposal may come late it ends here at most: one that comes
        sooner for what was drawn is late less often, and lateness must not select among draws."""
        return self.ends_text and self._q[-1] is None

    def draw(self, logits: np.ndarray) -> int:
        """The next draft, from float32[V]. Raises Internal, with nothing drafted, on a row that cannot be read."""
        token_id, q = draw_token(
            logits, self._params, self._stopping, self._history, self._noise, self._prefix_hash,
            self._position + len(self.token_ids), self._max_q_entries,
        )  # fmt: skip
        self._push(token_id, q)
        return token_id

    def choose(self, logits: np.ndarray) -> int:
        """As `draw`, but certain under every rule: where drafts are sampled, the likeliest token, one-hot."""
        if self._params.decides_by_match:
            return self.draw(logits)
        token_id = greedy_token(logits, self._params, self._stopping, self._history)
        self._push(token_id, None)
        return token_id

    def proposal(self, drafter: str) -> Proposal:
        """What was drawn."""
        is_sampled = any(q is not None for q in self._q)
        return Proposal(tuple(self.token_ids), q=tuple(self._q) if is_sampled else (), drafter=drafter)

    def _push(self, token_id: int, q: SparseQ | None) -> None:
        self.token_ids.append(token_id)
        self._q.append(q)
        self._history.push(token_id)
        self._prefix_hash = extend_hash(self._prefix_hash, token_id)


@contextmanager
def drafting(log: SessionLog, *, max_q_entries: int = MAX_Q_ENTRIES) -> Iterator[ChainDraft]:
    """A chain to draw behind the committed ids; the log's history is afterwards as before."""
    chain = ChainDraft(log, max_q_entries)
    try:
        yield chain
    finally:
        log.history.pop(len(chain.token_ids))


def length_in_step(drafted: Sequence[int], committed: Sequence[int], known: int) -> int:
    """How many leading ids of `drafted` are those of `committed`, all but its last at most: only a pass over that one
    gives its logits. known: so many are known to be."""
    most = min(len(drafted), len(committed) - 1)
    while known < most and drafted[known] == committed[known]:
        known += 1
    return min(known, most)

"""Drafting ahead of the verdict: behind the likeliest outcomes of the chain that is being verified, in one tree.

Every branch is drawn as it would be drawn on demand, once its prefix is committed: from the same logits with the same
noise, which is keyed by that prefix. So a branch that is used changes nothing but when it is there. Which branches
there are may depend on the chain's own drafts, of which no later draw knows anything; all branches grow by a draft a
pass, so that nothing drawn decides when they are told (a certain draft that ends the text aside).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from draft_worker.branches import MatchOutlook, Outlook, Place, RatioOutlook, RowCost, likeliest_outcomes, worth
from outrider.drafting.chain import draw_token, length_in_step
from outrider.drafting.proposal import Proposal, SparseQ
from outrider.drafting.tree import PREFIX, chain_parents
from outrider.errors import Internal
from outrider.lm.interface import Forward, Program, SequenceHandle
from outrider.sampling.distribution import likeliest, processed_logits, support
from outrider.sampling.noise import extend_hash, hash_ids
from outrider.sampling.sparse_q import sparse_q
from outrider.serving.messages import AheadWish, Branches
from outrider.serving.session_log import SessionCounters, SessionLog

NUM_CANDIDATES = 16
"""Ids of a place that may be guessed to come next."""
MIN_PROBABILITY = 1 / 512
"""An outcome less likely is not worth a branch, whatever it costs."""


@dataclass(slots=True)
class _Branch:
    """Drafts behind one outcome. `ids`: its tokens on top of the log, `num_committed` of them, then the drafts; `node`:
    of the last one computed. `next_hash`: of all of them; `prefix_hash`: of those before the drafts."""

    ids: list[int]
    num_committed: int
    prefix_hash: int
    next_hash: int
    limit: int
    node: int
    q: list[SparseQ | None] = field(default_factory=list)
    ended: bool = False

    @property
    def drafts(self) -> tuple[int, ...]:
        return tuple(self.ids[self.num_committed :])

    def proposal(self, drafter: str) -> Proposal:
        is_sampled = self.q[0] is not None
        return Proposal(self.drafts, tuple(self.q) if is_sampled else (), drafter=drafter)


@dataclass(frozen=True, slots=True)
class _Whole:
    proposal: Proposal
    num_wanted: int


class DraftAhead:
    """Of one session, whose draft model has the target's ids. `prepare` is a program like any other of the session: one
    at a time; it may be dropped at any pass, and what its tree left in the cache serves whatever comes next."""

    def __init__(self, log: SessionLog, max_q_entries: int, counters: SessionCounters, drafter: str) -> None:
        self._log = log
        self._max_q_entries = max_q_entries
        self._counters = counters
        self._drafter = drafter
        self._num_in_step = 0
        self._outlook: Outlook = MatchOutlook() if log.sampling.decides_by_match else RatioOutlook()
        self._row_cost = RowCost()
        self._whole: dict[int, _Whole] = {}
        self._growing: frozenset[int] = frozenset()
        self._only: int | None = None
        self._pending: Forward | None = None
        self._foretold: tuple[int, list[Place], tuple[int, ...]] = (0, [], ())
        self._num_cancelled = 0

    def observe(self) -> None:
        """The log has moved on: what was foretold is compared with what came."""
        base, places, drafts = self._foretold
        self._foretold = (0, [], ())
        came = self._log.ids[base:]
        num_accepted = _num_same(came, drafts)
        if places and len(came) == num_accepted + 1:  # one round, and no other since
            self._outlook.observe(places, drafts, num_accepted, came[-1])

    def take(self, num_draft_tokens: int) -> Proposal | None:
        """The branch that the log has become, cut to so many drafts; None: there is none that is as long. All others
        are forgotten."""
        whole = self._whole.get(self._log.prefix_hash)
        self._whole = {}
        if whole is None or (whole.num_wanted < num_draft_tokens):
            return None
        proposal = whole.proposal
        return proposal if len(proposal) <= num_draft_tokens else proposal.kept(range(num_draft_tokens))

    def waits_for(self, prefix_hash: int) -> bool:
        """Whether a branch of the running program is the one for this prefix: it is then grown alone, to its end. Any
        thread."""
        if prefix_hash not in self._growing:
            return False
        self._only = prefix_hash
        if self._pending is not None:
            self._pending.background = False
        return True

    def take_num_cancelled(self) -> int:
        """Tokens drafted for branches that never became whole, since the last call."""
        num_cancelled, self._num_cancelled = self._num_cancelled, 0
        return num_cancelled

    def drafted(self, proposal: Proposal) -> None:
        """A chain that was drafted on demand, a pass for each token."""
        if len(proposal):
            self._row_cost.observe(1, proposal.compute_us / 1000 / len(proposal))

    def prepare(self, sequence: SequenceHandle, chain: Proposal, wish: AheadWish) -> Program[Branches]:
        """Branches behind `chain`, which is being verified on top of the log: one pass over it for the logits along it,
        then one pass a draft for all branches. Drops out of the way of any forward of another stream."""
        started_ns = time.perf_counter_ns()
        log = self._log
        header, base = log.header, len(log.ids)
        self._whole, self._only = {}, None
        branches: list[_Branch] = []
        queue_us = 0
        is_whole = False
        try:
            rows = self._not_cached(sequence)
            most = min(wish.num_branches, (sequence.max_length - base - len(chain)) // wish.num_draft_tokens)
            if most < 1:
                return Branches(header)
            result = yield Forward(
                sequence,
                [*rows, *chain.token_ids],
                num_logits=len(chain) + 1,
                parents=chain_parents(len(chain)),
                background=True,
            )
            queue_us += result.queue_us
            places = self._places(result.logits, chain)
            self._foretold = (base, places, chain.token_ids)
            branches = self._branches(places, chain, most, wish)
            self._growing = frozenset(branch.prefix_hash for branch in branches)
            num_nodes = len(chain)
            for _ in range(wish.num_draft_tokens):
                growing = [b for b in branches if not b.ended and self._only in (None, b.prefix_hash)]
                if not growing:
                    break
                self._pending = Forward(
                    sequence,
                    [b.ids[-1] for b in growing],
                    num_logits=len(growing),
                    parents=[b.node for b in growing],
                    background=self._only is None,
                )
                if self._only is not None:  # since it was looked at: whoever said so could not see this forward yet
                    self._pending.background = False
                result = yield self._pending
                queue_us += result.queue_us
                self._row_cost.observe(len(growing), result.compute_us / 1000)
                for index, branch in enumerate(growing):
                    self._grow(branch, result.logits[index])
                    branch.node = num_nodes + index
                num_nodes += len(growing)
            is_whole = True
        finally:
            self._growing, self._pending = frozenset(), None
            given_up = [b for b in branches if not is_whole or self._only not in (None, b.prefix_hash)]
            self._count(branches, given_up)
        kept = [b for b in branches if b.q and b not in given_up]
        told = {b.prefix_hash: b.proposal(self._drafter) for b in kept}
        self._whole = {prefix_hash: _Whole(p, wish.num_draft_tokens) for prefix_hash, p in told.items()}
        return Branches(
            header,
            proposals=told,
            outcomes=[(b.num_committed - 1, b.ids[b.num_committed - 1]) for b in kept],
            queue_us=queue_us,
            compute_us=max(0, (time.perf_counter_ns() - started_ns) // 1000 - queue_us),
        )

    def _count(self, branches: Sequence[_Branch], given_up: Sequence[_Branch]) -> None:
        self._counters.num_ahead_draft_tokens += sum(len(b.drafts) for b in branches)
        self._num_cancelled += sum(len(b.drafts) for b in given_up)

    def _places(self, logits: np.ndarray, chain: Proposal) -> list[Place]:
        """What may stand at each draft's place, and after the last; logits float32[len(chain) + 1, V]."""
        log = self._log
        places = []
        try:
            for index in range(len(chain) + 1):
                try:
                    places.append(self._place(logits[index], len(log.ids) + index))
                except Internal:
                    places.append(Place(np.zeros(0, np.int64), np.zeros(0)))
                if index < len(chain):
                    log.history.push(chain.token_ids[index])
        finally:
            log.history.pop(min(len(places), len(chain)))
        return places

    def _place(self, logits: np.ndarray, position: int) -> Place:
        log = self._log
        params = log.sampling
        subject = (logits, params, log.stopping, log.history)
        if params.greedy:
            scores = processed_logits(*subject)
            best = likeliest(scores, NUM_CANDIDATES)
            return _place(best, scores[best].astype(np.float64))
        if params.decides_by_match:
            ids, weights = support(*subject).possible()
            keys = weights + log.noise.gumbel(position, len(weights) if ids is None else ids)
            best = likeliest(keys, NUM_CANDIDATES)
            return _place(best if ids is None else ids[best], keys[best])
        q = sparse_q(*subject, self._max_q_entries)
        return _place(q.ids[:NUM_CANDIDATES], q.counts[:NUM_CANDIDATES])

    def _branches(self, places: list[Place], chain: Proposal, most: int, wish: AheadWish) -> list[_Branch]:
        """Of the likeliest outcomes, as many as are worth their rows."""
        log = self._log
        outcomes = likeliest_outcomes(
            places, chain.token_ids, self._outlook, most, min_probability=MIN_PROBABILITY,
            left_out=log.stopping.stop_token_ids,
        )  # fmt: skip
        if wish.value_ms:
            outcomes = worth(outcomes, wish.value_ms, wish.num_draft_tokens * self._row_cost.ms)
        branches = []
        for outcome in outcomes:
            ids = [*chain.token_ids[: outcome.num_accepted], outcome.token_id]
            # as in `DraftSession.advance`: the stream's last token needs no draft
            limit = min(wish.num_draft_tokens, log.max_length - len(log.ids) - len(ids) - 1)
            if limit < 1:
                continue
            prefix_hash = hash_ids(ids, log.prefix_hash)
            node = outcome.num_accepted - 1 if outcome.num_accepted else PREFIX
            branches.append(_Branch(ids, len(ids), prefix_hash, prefix_hash, limit, node))
        return branches

    def _grow(self, branch: _Branch, logits: np.ndarray) -> None:
        """The branch's next draft, as `ModelDrafter` draws it."""
        log = self._log
        for token_id in branch.ids:
            log.history.push(token_id)
        try:
            token_id, q = draw_token(
                logits, log.sampling, log.stopping, log.history, log.noise, branch.next_hash,
                len(log.ids) + len(branch.ids), self._max_q_entries,
            )  # fmt: skip
        except Internal:
            branch.ended = True  # the row cannot be read: that depends on the drafts before it alone
            return
        finally:
            log.history.pop(len(branch.ids))
        branch.ids.append(token_id)
        branch.q.append(q)
        branch.next_hash = extend_hash(branch.next_hash, token_id)
        ends_text = q is None and token_id in log.stopping.stop_token_ids
        branch.ended = len(branch.q) == branch.limit or ends_text

    def _not_cached(self, sequence: SequenceHandle) -> list[int]:
        """Sets the cache back to committed ids; gives those left to compute, the last one at least."""
        committed = self._log.ids
        settle(sequence, committed)
        length = length_in_step(sequence.token_ids, committed, self._num_in_step)
        sequence.truncate(length)
        self._num_in_step = length
        sequence.committed_length = len(committed)
        return committed[length:]


def settle(sequence: SequenceHandle, committed: Sequence[int]) -> None:
    """Ends a tree that drafting ahead has left in the cache: the path that `committed` takes through it stays."""
    if not sequence.parents:
        return
    start = len(sequence.token_ids) - len(sequence.parents)
    path: list[int] = []
    below = PREFIX
    for node, parent in enumerate(sequence.parents):
        place = start + len(path)
        if parent == below and place < len(committed) and sequence.token_ids[start + node] == committed[place]:
            path.append(node)
            below = node
    sequence.keep_path(path)


def _place(ids: np.ndarray, values: np.ndarray) -> Place:
    kept = np.isfinite(values)
    return Place(np.asarray(ids)[kept].astype(np.int64), np.asarray(values)[kept].astype(np.float64))


def _num_same(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

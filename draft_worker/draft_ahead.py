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

from draft_worker.branches import (
    Chance,
    MatchOutlook,
    Outcome,
    Outlook,
    Place,
    RatioOutlook,
    RowCost,
    allotted,
    likeliest_outcomes,
)
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
LIKELY = 0.2
"""Chance from which on a draft is worth a pass of its own."""
UNREAD = Place(np.arange(-8, 0), np.array([0.55, 0.17, 0.09, 0.06, 0.05, 0.03, 0.03, 0.02]))
"""After the last draft until its row is there, so that room is left: no ids, and the masses of a place of its kind."""


@dataclass(slots=True)
class _Branch:
    """Drafts behind one outcome. `ids`: its tokens on top of the log, `num_committed` of them, then the drafts; `node`:
    of the last one computed. `next_hash`: of all of them; `prefix_hash`: of those before the drafts. `limit`: of the
    drafts."""

    ids: list[int]
    num_committed: int
    prefix_hash: int
    next_hash: int
    limit: int
    node: int
    probability: float
    q: list[SparseQ | None] = field(default_factory=list)
    ended: bool = False

    @property
    def drafts(self) -> tuple[int, ...]:
        return tuple(self.ids[self.num_committed :])

    def proposal(self, drafter: str) -> Proposal:
        is_sampled = self.q[0] is not None
        return Proposal(self.drafts, tuple(self.q) if is_sampled else (), drafter=drafter)


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
        self._reads_history = log.sampling.needs_history or log.stopping.masks_stops
        """Whether a branch's own tokens change what may follow them."""
        self._row_cost = RowCost()
        self._chance = Chance()
        self._whole: dict[int, Proposal] = {}
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
            self._chance.observe(len(drafts), num_accepted)

    def take(self) -> Proposal | None:
        """The branch that the log has become, whole, as it was told; None: there is none. All others are forgotten."""
        whole, self._whole = self._whole, {}
        return whole.get(self._log.prefix_hash)

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
        """Branches behind `chain`, which is being verified on top of the log: a pass over it for the logits along it,
        then one pass a draft for all branches. Drops out of the way of any forward of another stream.

        Where drafts were sampled, their q tells what may stand in place of each: branches begin with the pass over the
        chain, but for those behind all of it, which begin a pass later.
        """
        started_ns = time.perf_counter_ns()
        log = self._log
        header, base = log.header, len(log.ids)
        self._whole, self._only = {}, None
        branches: list[_Branch] = []
        queue_us = 0
        is_whole = False
        try:
            rows = self._not_cached(sequence)
            room = sequence.max_length - base - len(chain)
            if room < wish.num_draft_tokens:
                return Branches(header)
            places = self._places_of(chain)
            num_read = len(chain) + 1 - len(places)
            if places:
                branches = self._begin(branches, [*places, UNREAD], chain, room, wish)
            rows, parents = [*rows, *chain.token_ids], list(chain_parents(len(chain)))
            num_nodes = len(chain)
            for _ in range(self._num_passes(len(chain), wish, begun=bool(places))):
                growing = [b for b in branches if not b.ended and self._only in (None, b.prefix_hash)]
                if not (growing or num_read):
                    break
                self._pending = Forward(
                    sequence,
                    [*rows, *(b.ids[-1] for b in growing)],
                    num_logits=num_read + len(growing),
                    parents=[*parents, *(b.node for b in growing)],
                    background=self._only is None,
                )
                if self._only is not None:  # since it was looked at: whoever said so could not see this forward yet
                    self._pending.background = False
                asked_ns = time.perf_counter_ns()
                result = yield self._pending
                queue_us += result.queue_us
                for index, branch in enumerate(growing):
                    self._grow(branch, result.logits[num_read + index])
                    branch.node = num_nodes + index
                num_nodes += len(growing)
                if num_read:
                    places += self._places(result.logits[:num_read], chain)
                    self._foretold = (base, places, chain.token_ids)
                    branches = self._begin(branches, places, chain, room, wish)
                    rows, parents, num_read = [], [], 0
                else:
                    elapsed_us = (time.perf_counter_ns() - asked_ns) / 1000
                    self._row_cost.observe(len(growing), (elapsed_us - result.queue_us) / 1000)
            is_whole = True
        finally:
            self._growing, self._pending = frozenset(), None
            given_up = [b for b in branches if not is_whole or self._only not in (None, b.prefix_hash)]
            self._count(branches, given_up)
        kept = [b for b in branches if b.q and b not in given_up]
        self._whole = told = {b.prefix_hash: b.proposal(self._drafter) for b in kept}
        return Branches(
            header,
            proposals=told,
            outcomes=[(b.num_committed - 1, b.ids[b.num_committed - 1]) for b in kept],
            queue_us=queue_us,
            compute_us=max(0, (time.perf_counter_ns() - started_ns) // 1000 - queue_us),
        )

    def _num_passes(self, num_drafts: int, wish: AheadWish, *, begun: bool) -> int:
        """One over the chain and one a draft. Where branches begin with the first of them, those behind all of the
        chain may be a draft shorter, if that draft is unlikely to be used and branches need not be whole."""
        is_likely = self._chance.value ** (num_drafts + wish.num_draft_tokens) > LIKELY
        return wish.num_draft_tokens + (is_likely or not begun or not wish.value_ms)

    def _count(self, branches: Sequence[_Branch], given_up: Sequence[_Branch]) -> None:
        self._counters.num_ahead_draft_tokens += sum(len(b.drafts) for b in branches)
        self._num_cancelled += sum(len(b.drafts) for b in given_up)

    def _places_of(self, chain: Proposal) -> list[Place]:
        """What might have stood at each draft's place: its q; none where drafts were not sampled."""
        return [_likely(q) for q in chain.q if q is not None]

    def _places(self, logits: np.ndarray, chain: Proposal) -> list[Place]:
        """What may stand at the last of the drafts' places and after them, of which these are the rows; float32[n, V],
        n at most one more than drafts."""
        history, first, num_pushed = self._log.history, len(chain) + 1 - len(logits), 0
        places = []
        try:
            for index in range(len(chain) + 1):
                if index >= first:
                    places.append(self._place_or_none(logits[index - first], len(self._log.ids) + index))
                if index < len(chain):
                    history.push(chain.token_ids[index])
                    num_pushed += 1
        finally:
            history.pop(num_pushed)
        return places

    def _place_or_none(self, logits: np.ndarray, position: int) -> Place:
        try:
            return self._place(logits, position)
        except Internal:
            return _place(np.zeros(0, np.int64), np.zeros(0))

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
        return _likely(sparse_q(*subject, self._max_q_entries))

    def _begin(
        self, begun: list[_Branch], places: list[Place], chain: Proposal, room: int, wish: AheadWish
    ) -> list[_Branch]:
        """These, and those behind the likeliest other outcomes, the likeliest first. room: for drafts of all."""
        log = self._log
        outcomes = likeliest_outcomes(
            places, chain.token_ids, self._outlook, wish.num_branches, min_probability=MIN_PROBABILITY,
            left_out=log.stopping.stop_token_ids,
        )  # fmt: skip
        known = {(b.num_committed - 1, b.ids[b.num_committed - 1]) for b in begun}
        outcomes = [o for o in outcomes if o[:2] not in known][: wish.num_branches - len(begun)]
        num_drafts = allotted(
            [o.probability for o in outcomes], self._chance.value, wish.num_draft_tokens,
            max_drafts=room - sum(b.limit for b in begun), value_ms=wish.value_ms, row_ms=self._row_cost.ms,
        )  # fmt: skip
        branches = begun + [
            self._branch(chain, o, n) for o, n in zip(outcomes, num_drafts, strict=True) if o.token_id >= 0
        ]
        branches = sorted((b for b in branches if b.limit > 0), key=lambda b: -b.probability)
        self._growing = frozenset(b.prefix_hash for b in branches)
        return branches

    def _branch(self, chain: Proposal, outcome: Outcome, num_drafts: int) -> _Branch:
        log = self._log
        ids = [*chain.token_ids[: outcome.num_accepted], outcome.token_id]
        # as in `DraftSession.advance`: the stream's last token needs no draft
        limit = min(num_drafts, log.max_length - len(log.ids) - len(ids) - 1)
        prefix_hash = hash_ids(ids, log.prefix_hash)
        node = outcome.num_accepted - 1 if outcome.num_accepted else PREFIX
        return _Branch(ids, len(ids), prefix_hash, prefix_hash, limit, node, outcome.probability)

    def _grow(self, branch: _Branch, logits: np.ndarray) -> None:
        """The branch's next draft, as `ModelDrafter` draws it."""
        log = self._log
        pushed = branch.ids if self._reads_history else ()
        for token_id in pushed:
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
            log.history.pop(len(pushed))
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


def _likely(q: SparseQ) -> Place:
    return _place(q.ids[:NUM_CANDIDATES], q.counts[:NUM_CANDIDATES])


def _num_same(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

"""A draft worker and a target whose random answers are questions, each to be given every possible answer."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import tree_law
from round_law import shipped
from tree_law import Drawn

from coordinator.drafting import Drafted
from coordinator.gamma.policy import Candidate, Choice
from coordinator.stream import Stream
from coordinator.target_link import Timed
from outrider.drafting import tree_draw
from outrider.drafting.grown_tree import GrownTree, planned
from outrider.drafting.heads import MedusaDrafter
from outrider.drafting.proposal import Q_TOTAL, Proposal, SparseQ
from outrider.drafting.tree import children
from outrider.lm.interface import run_program
from outrider.sampling.params import AcceptanceRule, Finish, Origin, SamplingParams, StoppingParams
from outrider.serving import convert
from outrider.serving.messages import Opening, Verdict
from outrider.serving.session_calls import SealedProposal, _sealed
from outrider.serving.session_log import SessionLog
from target_worker.acceptance import draft_q, soft_acceptance
from target_worker.tree_acceptance import _soft_acceptances as tree_soft_acceptances

Ids = tuple[int, ...]
Weighted = list[tuple[Any, float]]


class Ask(Exception):
    """A random answer is needed: the possible ones and their probabilities."""

    def __init__(self, answers: Weighted) -> None:
        self.answers = answers


@dataclass
class Script:
    """Answers given so far, in the order of the questions."""

    answers: list[Any]
    num_used: int = 0

    def answer(self, possible: Callable[[], Weighted]) -> Any:
        if self.num_used == len(self.answers):
            raise Ask(possible())
        self.num_used += 1
        return self.answers[self.num_used - 1]


@dataclass
class Pair:
    """p and q after every text: rows over a tiny vocabulary, q in counts of 65,536. Both depend on the whole text."""

    vocab_size: int
    seed: int
    concentration: float = 0.7
    _rows: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict)

    def p(self, ids: Sequence[int]) -> np.ndarray:
        return self._row(1, ids)

    def q(self, ids: Sequence[int]) -> SparseQ:
        counts = np.floor(self._row(2, ids) * Q_TOTAL).astype(np.int64)
        counts[int(counts.argmax())] += Q_TOTAL - counts.sum()
        (kept,) = np.nonzero(counts)
        return SparseQ(kept.astype(np.uint32), counts[kept])

    def _row(self, table: int, ids: Sequence[int]) -> np.ndarray:
        key = (table, *ids)
        if key not in self._rows:
            rng = np.random.default_rng([self.seed, *key])
            self._rows[key] = rng.dirichlet([self.concentration] * self.vocab_size)
        return self._rows[key]


def candidate_of(name: str) -> Candidate:
    """As a draft worker's description would give it."""
    return Candidate(name, max_width=3, trunk="model") if name == "tree" else Candidate(name)


@dataclass
class FakeDraft:
    """A draft worker whose samples are questions. `is_late(length)`: no proposal comes for a log that long."""

    stream: Stream
    pair: Pair
    script: Script
    is_late: Callable[[int], bool] = lambda length: False
    wanted: bool = True
    drafters: tuple[str, ...] = ("model",)
    patience_tokens: int = 2
    num_drafted: int = 0

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return tuple(map(candidate_of, self.drafters))

    def open_soon(self) -> None:
        pass

    def judge(self, verdict: Verdict, num_drafts: int) -> None:
        pass

    def verified(self, verdict: Verdict) -> None:
        pass

    def count(self, drafted: Drafted, num_drafts: int, num_accepted: int, round_ms: float) -> None:
        pass

    async def ready(self) -> tuple[bool, str]:
        return bool(self.drafters), "" if self.drafters else "no-draft-worker"

    async def propose(self, choice: Choice) -> Drafted:
        prefix = (*self.stream.log.prompt_ids, *self.stream.log.output_ids)
        if self.is_late(len(prefix)):
            return Drafted(SealedProposal(), wait_ms=1.0)
        proposal = self.script.answer(lambda: self.proposals(prefix, choice.num_draft_tokens))
        self.num_drafted += len(proposal)
        return Drafted(_sealed(convert.proposal_to_pb(proposal)))

    def proposals(self, prefix: Ids, num_tokens: int) -> Weighted:
        """(proposal, probability) of all that may be drawn: here, chains of samples."""
        return sampled_chains(self.pair, prefix, num_tokens, "model")


def sampled_chains(pair: Pair, prefix: Ids, num_tokens: int, drafter: str) -> Weighted:
    """(proposal, probability) of all chains that may be drawn from q."""
    chains: Weighted = [((), 1.0)]
    for _ in range(num_tokens):
        chains = [
            ((*chain, int(x)), mass * int(count) / Q_TOTAL)
            for chain, mass in chains
            for q in [pair.q((*prefix, *chain))]
            for x, count in zip(q.ids, q.counts, strict=True)
        ]
    return [
        (Proposal(drafts, tuple(pair.q((*prefix, *drafts[:i])) for i in range(len(drafts))), drafter=drafter), mass)
        for drafts, mass in chains
    ]


class Draw(BaseException):
    """A token is to be drawn from q. No Exception: drawing goes on after those."""

    def __init__(self, q: SparseQ) -> None:
        self.q = q


def head_trees(pair: Pair, prefix: Ids, shape: Ids, drafter: str, rule: AcceptanceRule) -> Weighted:
    """(proposal, probability) of all trees that the shipped functions may draw: as EAGLE's, and as Medusa's where the
    drafter is called so, whose heads read q after the likeliest path."""
    found: Weighted = []
    pending: list[tuple[list[int], float]] = [([], 1.0)]
    while pending:
        tokens, mass = pending.pop()
        left = iter(tokens)

        def draw(q: SparseQ, integer: int, left: Any = left) -> int:
            for token_id in left:
                return int(token_id)
            raise Draw(q)

        opening = Opening(
            epoch=0, prompt_ids=prefix, sampling=SamplingParams(acceptance=rule), stopping=StoppingParams(99)
        )
        log = SessionLog(opening, vocab_size=pair.vocab_size)
        try:
            with mock.patch.object(tree_draw, "draw_draft", draw):
                tree = _medusa_tree if drafter.startswith("medusa") else _eagle_tree
                found.append((tree(pair, log, shape, drafter), mass))
        except Draw as asked:
            chances = zip(asked.q.ids.tolist(), asked.q.counts.tolist(), strict=True)
            pending += [([*tokens, token_id], mass * count / Q_TOTAL) for token_id, count in chances]
    return found


def _eagle_tree(pair: Pair, log: SessionLog, shape: Ids, drafter: str) -> Proposal:
    grown = GrownTree(log, 64)

    def rows(nodes: Sequence[int]) -> list[np.ndarray]:
        return [_logits(pair, (*log.ids, *grown.path_ids(node))) for node in nodes]

    order = planned(grown, shape, _logits(pair, log.ids), rows, grown.drawn)
    return grown.proposal(order, drafter)


def _medusa_tree(pair: Pair, log: SessionLog, shape: Ids, drafter: str) -> Proposal:
    heads, path = [], list(log.ids)
    for _ in range(3):
        row = _logits(pair, path)
        heads.append(SimpleNamespace(cpu=lambda row=row: SimpleNamespace(numpy=lambda: row)))
        path.append(int(row.argmax()))
    head: Any = SimpleNamespace(draft_ids=None, logits=lambda feature, num_heads: heads[:num_heads])
    features: Any = SimpleNamespace(num_rows=len(log.ids) - 1, rows=lambda start, end: [None])
    return run_program(MedusaDrafter(drafter, head, log, features).propose_tree(shape), lambda forward: None)  # type: ignore[arg-type,return-value]


def _logits(pair: Pair, ids: Sequence[int]) -> np.ndarray:
    q = pair.q(ids)
    row = np.full(pair.vocab_size, -np.inf, np.float32)
    row[q.ids] = np.log(q.counts)
    return row


@dataclass
class FakeTarget:
    """A target whose decisions are questions, with the chances of the shipped acceptance functions. `candidates` are
    its own drafters: chains sampled from q, and what the shipped functions draw of trees."""

    stream: Stream
    pair: Pair
    script: Script
    rule: AcceptanceRule
    candidates: tuple[Candidate, ...] = ()
    num_drafted: int = 0
    num_local: int = 0
    num_own: int = 0
    pipelines: bool = False
    is_verifying: bool = False
    num_trees: int = 0
    _stopped: bool = False

    async def open(self) -> Timed:
        return self._commit(Proposal())

    async def verify(self, sealed: SealedProposal) -> Timed:
        proposal = convert.proposal_from_pb(sealed.message) if sealed.message is not None else Proposal()
        return self._commit(proposal)

    async def decode(self, choice: Choice) -> Any:
        self._stopped = False
        credit_tokens = choice.credit_tokens
        while credit_tokens > 0:
            stopped = self._stopped
            timed = self._own_step(choice, credit_tokens)
            credit_tokens -= len(timed.verdict.committed_ids)
            yield timed
            if stopped:
                return

    def _own_step(self, choice: Choice, credit_tokens: int) -> Timed:
        num_tokens = min(choice.num_draft_tokens, credit_tokens - 1, self.stream.num_remaining_tokens - 1)
        if num_tokens < 1:
            return self._commit(Proposal())
        prefix = (*self.stream.log.prompt_ids, *self.stream.log.output_ids)
        if choice.shape:
            shape = choice.shape[:num_tokens]
            proposal = self.script.answer(lambda: head_trees(self.pair, prefix, shape, choice.drafter, self.rule))
            self.num_trees += not proposal.is_chain
        else:
            proposal = self.script.answer(lambda: sampled_chains(self.pair, prefix, num_tokens, choice.drafter))
        timed = self._commit(proposal)
        self.num_own += len(proposal)
        verdict = dataclasses.replace(
            timed.verdict, drafted_ids=proposal.token_ids, drafted_parents=proposal.parents, draft_us=500
        )
        return dataclasses.replace(timed, verdict=verdict)

    async def stop_decoding(self) -> None:
        self._stopped = True

    def _commit(self, proposal: Proposal) -> Timed:
        prefix = (*self.stream.log.prompt_ids, *self.stream.log.output_ids)
        accepted, token_id = self.script.answer(lambda: self._outcomes(prefix, proposal))
        num_drafts, ids = len(accepted), (*accepted, token_id)
        last = Origin.CORRECTION if num_drafts < len(proposal) else Origin.BONUS
        room = self.stream.num_remaining_tokens
        origins = (Origin.ACCEPTED,) * num_drafts + (last if len(proposal) else Origin.PLAIN,)
        self.num_drafted += len(proposal)
        self.num_local += sum(proposal.q_at(i) is None for i in range(len(proposal)))
        verdict = Verdict(
            header=self.stream.log.header(1),
            committed_ids=ids[:room],
            origins=origins[:room],
            num_accepted=min(num_drafts, room),
            num_draft_tokens=len(proposal),
            soft_acceptances=self._soft_acceptances(prefix, proposal),
            finish=Finish.LENGTH if len(ids) >= room else Finish.NONE,
        )
        return Timed(verdict, 1.0)

    def _soft_acceptances(self, prefix: Ids, proposal: Proposal) -> bytes:
        """Past the first rejection too: what is decided by them must leave the law alone."""
        drafts = proposal.token_ids
        if not proposal.is_chain:
            drawn = Drawn(proposal.parents, drafts, ())
            below = children(proposal.parents)
            p = {node: self.pair.p((*prefix, *drawn.text(node))) for node in range(-1, len(drafts)) if below[node + 1]}
            return tree_soft_acceptances(below, p, [draft_q(proposal, i) for i in range(len(drafts))])
        return bytes(
            soft_acceptance(self.pair.p((*prefix, *drafts[:i])), draft_q(proposal, i)) for i in range(len(drafts))
        )

    def _outcomes(self, prefix: Ids, proposal: Proposal) -> Weighted:
        """((drafts that stand, the token after them), probability)."""
        drafts = proposal.token_ids
        q = tuple(dense(draft_q(proposal, i), self.pair.vocab_size) for i in range(len(drafts)))
        masses: dict[tuple[Ids, int], float] = defaultdict(float)
        if proposal.is_chain:
            p = [self.pair.p((*prefix, *drafts[:i])) for i in range(len(drafts) + 1)]
            found = ((mass, drafts[:stand], last) for mass, stand, last in shipped(self.rule)(p, q, drafts))
        else:
            drawn = Drawn(proposal.parents, drafts, q)
            rows = {node: self.pair.p((*prefix, *drawn.text(node))) for node in range(-1, len(drafts))}
            found = ((mass, drawn.text(node), last) for mass, node, last in tree_law.shipped(self.rule)(drawn, rows))
        for mass, accepted, last in found:
            for x in np.nonzero(last)[0].tolist():
                masses[accepted, x] += mass * float(last[x])
        return list(masses.items())


def dense(q: Any, vocab_size: int) -> np.ndarray:
    row = np.zeros(vocab_size)
    row[q.ids] = q.probabilities
    return row

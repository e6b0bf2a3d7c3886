"""The acceptance rules over trees of drafts: which path stands, and what is emitted after it. Functions over arrays.

TOKEN tries the children of an accepted node one after the other: recursive rejection sampling (SpecInfer, Miao et al.
2023, arXiv:2305.09781), without replacement as in Sequoia (Chen et al. 2024, arXiv:2402.12374). BLOCK decides from the
leaves up: traversal verification (Weng et al. 2025, arXiv:2505.12398), which on a chain is block verification; on trees
it accepts more than TOKEN on average, but not on every one. COUPLED and greedy walk to the child that the target itself
chooses. On a chain all three are `acceptance.verify`, bit for bit.

Nodes are indices of drafts, PREFIX is the committed prefix. Why any of this keeps the target's distribution: after a
child was tried in vain, what is left to emit after its parent is max(chance * p - q, 0), whatever q was, as long as the
child was drawn from q given everything drafted before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from outrider.drafting import tree
from outrider.drafting.proposal import Proposal
from outrider.drafting.tree import PREFIX
from outrider.errors import Internal
from outrider.sampling.distribution import coupled_token, distribution, draw, greedy_token
from outrider.sampling.history import History
from outrider.sampling.noise import Noise, Role, extend_hash
from outrider.sampling.params import AcceptanceRule, Origin, SamplingParams, StoppingParams
from target_worker.acceptance import (
    DraftQ,
    Outcome,
    checked_round,
    correction,
    draft_q,
    ratio,
    residual_mass,
    soft_acceptance,
)

T = TypeVar("T")

Coin = Callable[[int, float], bool]
"""Whether the coin of a node falls on its chance, a pure function of the node."""


@dataclass(frozen=True, slots=True)
class TreeOutcome(Outcome):
    """One verified round. `path`: the accepted nodes, from a child of the prefix down.

    soft_acceptances: one byte per node, 255 times the chance that it gave acceptance once its siblings before it were
    tried in vain; 0 below a row that cannot be read or a stop token.
    """

    path: tuple[int, ...]


class Left(NamedTuple):
    """What is left at a node when some of its children were tried in vain.

    chance: that the node stands, given that nothing below it did so far. p: float64[V], what is then emitted after it,
    up to a factor; what the next child is tried against must sum to 1.
    """

    chance: float
    p: np.ndarray

    def normalised(self) -> Left:
        """p summing to 1."""
        return Left(self.chance, self.p / self.p.sum())

    def chance_of(self, q: DraftQ, token_id: int) -> float:
        """That a child drawn from q stands, or something below it."""
        return min(1.0, self.chance * ratio(self.p, q, token_id))

    def without(self, q: DraftQ) -> Left:
        """After a child drawn from q was tried in vain."""
        surplus = residual_mass(self.p, q, self.chance)
        shortfall = 1.0 - self.chance
        # 0/0: the node surely stands and p equals q, so no child is ever tried in vain.
        chance = surplus / (surplus + shortfall) if surplus + shortfall > 0.0 else 1.0
        return Left(chance, correction(self.p, q, self.chance))


def verify_tree(
    logits: np.ndarray,
    proposal: Proposal,
    params: SamplingParams,
    stopping: StoppingParams,
    history: History,
    noise: Noise,
    prefix_hash: int,
    position: int,
) -> TreeOutcome:
    """Decides one round. Arguments and errors as in `acceptance.verify`, except

    logits: float32[len(proposal) + 1, V], row 0 following the committed prefix and row i + 1 draft i and its ancestors.

    A row that cannot be read takes its children out of the proposal, a stop token all that follows it: functions of the
    drafts before these, so the law is exact.
    """
    with checked_round(logits, proposal, history):
        if params.decides_by_match:
            return _verify_by_match(logits, proposal, params, stopping, history, noise, position)
        return _verify_by_ratio(logits, proposal, params, stopping, history, noise, prefix_hash)


def _verify_by_ratio(
    logits: np.ndarray,
    proposal: Proposal,
    params: SamplingParams,
    stopping: StoppingParams,
    history: History,
    noise: Noise,
    prefix_hash: int,
) -> TreeOutcome:
    """TOKEN and BLOCK. Every coin is keyed by the exact prefix it follows and by its place among siblings."""
    drafts = proposal.token_ids
    children = _children(proposal, stopping)
    p = _at_parents(children, drafts, history, lambda node: distribution(logits[node + 1], params, stopping, history))
    q = [draft_q(proposal, node) for node in range(len(drafts))]
    hashes = {PREFIX: prefix_hash}
    for node, parent in enumerate(proposal.shape):
        hashes[node] = extend_hash(hashes[parent], drafts[node])
    tries = {child: try_index for siblings in children for try_index, child in enumerate(siblings)}

    def coin(node: int, chance: float) -> bool:
        return noise.uniform(hashes[proposal.shape[node]], Role.ACCEPT, tries[node]) < chance

    node, left = stand(params.acceptance, children, drafts, p, q, coin)
    soft_acceptances = _soft_acceptances(children, p, q)
    path = tree.path(proposal.shape, node)
    if path and drafts[node] in stopping.stop_token_ids:
        return _outcome(proposal, path, None, Origin.BONUS, soft_acceptances)
    if left is not None and children[node + 1]:
        next_token = draw(left.p, noise.uniform(hashes[node], Role.RESIDUAL))
        return _outcome(proposal, path, next_token, Origin.CORRECTION, soft_acceptances)
    for accepted in path:
        history.push(drafts[accepted])
    last = distribution(logits[node + 1], params, stopping, history)
    role, origin = (Role.BONUS, Origin.BONUS) if drafts else (Role.PLAIN, Origin.PLAIN)
    return _outcome(proposal, path, draw(last, noise.uniform(hashes[node], role)), origin, soft_acceptances)


def stand(
    rule: AcceptanceRule,
    children: Sequence[Sequence[int]],
    drafts: Sequence[int],
    p: Mapping[int, np.ndarray],
    q: Sequence[DraftQ],
    coin: Coin,
) -> tuple[int, Left | None]:
    """(the deepest node that stands, what is left there), the second None where p has no row for the node.

    children: entry i + 1 those of node i. p: float64[V] by node; children of a node without are out of the proposal.
    TOKEN throws a node's coin on the way down, so that its chance is 1 or 0 from there on, and BLOCK on the way up.
    """

    def search(node: int, chance: float) -> tuple[int, Left | None] | None:
        left = Left(chance, p[node]) if node in p else None
        for try_index, child in enumerate(children[node + 1] if left else ()):
            assert left is not None
            left = left.normalised() if try_index else left
            child_chance = left.chance_of(q[child], drafts[child])
            if rule is AcceptanceRule.TOKEN:
                child_chance = float(coin(child, child_chance))
            if child_chance > 0.0 and (found := search(child, child_chance)):
                return found
            left = left.without(q[child])
        chance = left.chance if left else chance
        stands = chance == 1.0 or (rule is AcceptanceRule.BLOCK and coin(node, chance))
        return (node, left) if stands else None

    found = search(PREFIX, 1.0)
    assert found is not None, "the committed prefix stands whatever was drafted"
    return found


def _soft_acceptances(children: Sequence[Sequence[int]], p: Mapping[int, np.ndarray], q: Sequence[DraftQ]) -> bytes:
    soft = bytearray(len(q))
    for node, row in p.items():
        left = Left(1.0, row)
        for child in children[node + 1]:
            soft[child] = soft_acceptance(left.p, q[child])
            if child != children[node + 1][-1]:
                left = left.without(q[child]).normalised()
    return bytes(soft)


def _verify_by_match(
    logits: np.ndarray,
    proposal: Proposal,
    params: SamplingParams,
    stopping: StoppingParams,
    history: History,
    noise: Noise,
    position: int,
) -> TreeOutcome:
    """COUPLED and greedy: the target chooses once after each prefix, and the child stands that is what it chose."""
    depths = [0, *tree.depths(proposal.shape)]

    def target_choice(node: int) -> int:
        if params.greedy:
            return greedy_token(logits[node + 1], params, stopping, history)
        return coupled_token(logits[node + 1], params, stopping, history, noise, position + depths[node + 1])

    drafts = proposal.token_ids
    children = _children(proposal, stopping)
    choices = _at_parents(children, drafts, history, target_choice)
    soft_acceptances = bytearray(len(drafts))
    for node, choice in choices.items():
        for child in children[node + 1]:
            soft_acceptances[child] = 255 * (drafts[child] == choice)

    node = PREFIX
    path: list[int] = []
    while node in choices:
        match = next((child for child in children[node + 1] if drafts[child] == choices[node]), None)
        if match is None:
            return _outcome(proposal, tuple(path), choices[node], Origin.CORRECTION, bytes(soft_acceptances))
        node = match
        path.append(node)
        history.push(drafts[node])
    if path and drafts[node] in stopping.stop_token_ids:
        return _outcome(proposal, tuple(path), None, Origin.BONUS, bytes(soft_acceptances))
    origin = Origin.BONUS if drafts else Origin.PLAIN
    return _outcome(proposal, tuple(path), target_choice(node), origin, bytes(soft_acceptances))


def _children(proposal: Proposal, stopping: StoppingParams) -> list[list[int]]:
    """As `tree.children`, but none below a stop token."""
    children = tree.children(proposal.shape)
    for node, token_id in enumerate(proposal.token_ids):
        if token_id in stopping.stop_token_ids:
            children[node + 1] = []
    return children


def _at_parents(
    children: Sequence[Sequence[int]], drafts: Sequence[int], history: History, function: Callable[[int], T]
) -> dict[int, T]:
    """`function` at every node with children, called with the history of that node's own prefix. Left out: nodes where
    it raises Internal, and all that is below them."""
    found: dict[int, T] = {}

    def visit(node: int) -> None:
        try:
            found[node] = function(node)
        except Internal:
            return
        for child in children[node + 1]:
            if children[child + 1]:
                history.push(drafts[child])
                visit(child)
                history.pop()

    if children[0]:
        visit(PREFIX)
    return found


def _outcome(
    proposal: Proposal, path: tuple[int, ...], next_token: int | None, origin: Origin, soft_acceptances: bytes
) -> TreeOutcome:
    accepted = tuple(proposal.token_ids[node] for node in path)
    return TreeOutcome(
        num_accepted=len(path),
        token_ids=accepted if next_token is None else (*accepted, next_token),
        origins=(Origin.ACCEPTED,) * len(path) + ((origin,) if next_token is not None else ()),
        soft_acceptances=soft_acceptances,
        path=path,
    )

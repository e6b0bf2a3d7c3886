"""TOKEN and BLOCK once more, over trees of drafts of which a chain is one: recursive rejection sampling and traversal
verification as their papers state them (see `target_worker.tree_acceptance`), with none of its code.

Every comparison that a decision hangs on is told with how far it may be off, so that a near-tie is told from a breach.
A decision can be made two ways: as the coins fall, or led along a given path, to see what speaks against it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from outrider.audit.findings import Comparison
from outrider.audit.law import ROUNDING, Law
from outrider.drafting.proposal import Q_TOTAL, Proposal
from outrider.drafting.tree import PREFIX
from outrider.lm.tree import path_to
from outrider.sampling.noise import Role
from outrider.sampling.params import AcceptanceRule

Uniform = Callable[[int, Role, int], float]
"""Of a node, a role and a try: the coin that is keyed by the ids down to that node."""


@dataclass(slots=True)
class Decision:
    """path: accepted nodes, from a child of the prefix down. token_id: what follows them; None after a stop token."""

    path: list[int] = field(default_factory=list)
    token_id: int | None = None
    comparisons: list[Comparison] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Left:
    """What is left at a node: it stands with this chance if nothing below does, and then p follows, float64[V] summing
    to 1. Each with how far it may be off."""

    chance: float
    chance_error: float
    p: np.ndarray
    p_error: np.ndarray


class Round:
    """One round to decide. children: entry i + 1 those of node i."""

    def __init__(
        self,
        rule: AcceptanceRule,
        proposal: Proposal,
        stop_token_ids: frozenset[int],
        laws: Mapping[int, Law],
        uniform: Uniform,
    ) -> None:
        """laws: of every node that has drafts after it, as far as its row can be read, and of each that may end the
        accepted path; read when they are needed."""
        self._rule = rule
        self._ids = proposal.token_ids
        self._proposal = proposal
        self._stops = stop_token_ids
        self._laws = laws
        self._uniform = uniform
        self._parents = proposal.shape
        self.children: list[list[int]] = [[] for _ in range(len(proposal) + 1)]
        for node, parent in enumerate(self._parents):
            if parent == PREFIX or self._ids[parent] not in stop_token_ids:
                self.children[parent + 1].append(node)

    def decide(self) -> Decision:
        """As the coins fall."""
        return self._run(None, None)

    def against(self, end: int, token_id: int | None) -> Decision:
        """Led to `end` as the last accepted node, and to the token after it."""
        return self._run(path_to(self._parents, end), token_id)

    def _run(self, led: list[int] | None, token_id: int | None) -> Decision:
        decision = Decision()
        found = self._search(PREFIX, 1.0, 0.0, led, decision)
        if found is None or led not in (None, path_to(self._parents, found[0])):  # led along a path that cannot be
            place = max(len(led or ()) - 1, 0)
            decision.comparisons.append(Comparison(place, -1.0, 0.0, "a draft that could not be accepted"))
            return decision
        end, left = found
        decision.path = path_to(self._parents, end)
        if decision.path and self._ids[end] in self._stops:
            return decision
        if left is None or not self.children[end + 1]:
            law = self._laws[end]
            left = Left(1.0, 0.0, law.p, law.error)
            role = Role.BONUS if self._ids else Role.PLAIN
        else:
            role = Role.RESIDUAL
        u = self._uniform(end, role, 0)
        decision.token_id = drawn(left.p, u) if led is None else token_id
        if decision.token_id is not None:
            comparison = _draw_comparison(left, u, decision.token_id, len(decision.path), str(role.name).lower())
            decision.comparisons.append(comparison)
        return decision

    def _search(
        self, node: int, chance: float, error: float, led: list[int] | None, decision: Decision
    ) -> tuple[int, Left | None] | None:
        """The deepest node at or below this one that stands, and what is left there."""
        children = self.children[node + 1]
        law = self._laws.get(node) if children else None
        left = Left(chance, error, law.p, law.error) if law is not None else None
        for place, child in enumerate(children if left is not None else ()):
            assert left is not None
            q = self._q(child, len(left.p))
            child_chance, child_error = _accepts(left, q, self._ids[child])
            if self._rule is AcceptanceRule.TOKEN:
                falls = self._coin(node, place, child, child_chance, child_error, led, decision)
                child_chance, child_error = float(falls), 0.0
            if child_chance > 0.0 and (led is None or self._may_hold(child, led)):
                if found := self._search(child, child_chance, child_error, led, decision):
                    return found
            elif led is not None and child in led:
                return None
            left = _without(left, q)
        chance, error = (left.chance, left.chance_error) if left is not None else (chance, error)
        if self._rule is AcceptanceRule.TOKEN:
            return (node, left) if led is None or node == (led[-1] if led else PREFIX) else None
        if node == PREFIX:
            return node, left
        parent = self._parents[node]
        place = self.children[parent + 1].index(node)
        stands = self._coin(parent, place, node, chance, error, led, decision)
        return (node, left) if stands else None

    def _may_hold(self, child: int, led: list[int]) -> bool:
        """BLOCK looks below every draft before it decides about it, TOKEN below accepted ones."""
        return self._rule is AcceptanceRule.BLOCK or child in led

    def _coin(
        self,
        parent: int,
        place: int,
        node: int,
        chance: float,
        error: float,
        led: list[int] | None,
        decision: Decision,
    ) -> bool:
        u = self._uniform(parent, Role.ACCEPT, place)
        falls = u < chance
        if led is not None:
            falls = node == led[-1] if self._rule is AcceptanceRule.BLOCK and led else node in led
        margin = chance - u if falls else u - chance
        what = f"coin {u:.6f} against chance {chance:.6f}"
        decision.comparisons.append(Comparison(len(path_to(self._parents, node)) - 1, margin, error + ROUNDING, what))
        return falls

    def _q(self, node: int, vocab_size: int) -> np.ndarray:
        dense = np.zeros(vocab_size)
        q = self._proposal.q_at(node)
        if q is None:
            dense[self._ids[node]] = 1.0
        else:
            for token_id, count in zip(q.ids, q.counts, strict=True):
                dense[token_id] = count / Q_TOTAL
        return dense


def _accepts(left: Left, q: np.ndarray, token_id: int) -> tuple[float, float]:
    """min(1, chance p/q), and how far it may be off."""
    raw = left.chance * left.p[token_id] / q[token_id]
    error = (left.chance_error * left.p[token_id] + left.chance * left.p_error[token_id]) / q[token_id]
    if raw >= 1.0:
        return 1.0, float(max(0.0, 1.0 - (raw - error)))
    return float(raw), float(min(error, 1.0))


def _without(left: Left, q: np.ndarray) -> Left:
    """After a child drawn from q was tried in vain: max(chance p - q, 0) is what is left, and the chance
    mass / (mass + 1 - chance)."""
    entry_errors = left.chance * left.p_error + left.chance_error * left.p
    difference = left.chance * left.p - q
    rest = np.maximum(difference, 0.0)
    entry_errors = np.where(difference + entry_errors > 0.0, entry_errors, 0.0)
    mass, mass_error = float(rest.sum()), float(entry_errors.sum())
    whole = mass + 1.0 - left.chance
    if whole <= 0.0:  # p equals q, and the node surely stands: no child is tried in vain but by rounding
        return Left(1.0, 0.0, left.p, left.p_error)
    chance_error = 0.0 if left.chance == 1.0 and not left.chance_error else (mass_error + left.chance_error) / whole
    if mass <= 0.0:
        return Left(mass / whole, min(chance_error, 1.0), left.p, left.p_error)
    p = rest / mass
    return Left(mass / whole, min(chance_error, 1.0), p, np.minimum((entry_errors + p * mass_error) / mass, 1.0))


def drawn(weights: np.ndarray, u: float) -> int:
    """The first id whose cumulative mass exceeds u times the whole."""
    sums = np.cumsum(weights)
    return min(int(np.searchsorted(sums, u * sums[-1], side="right")), int(np.flatnonzero(weights)[-1]))


def _draw_comparison(left: Left, u: float, token_id: int, place: int, role: str) -> Comparison:
    """Whether u falls on the token: between the masses of the ids before it and with it."""
    before, mass = float(left.p[:token_id].sum()), float(left.p[token_id])
    whole = float(left.p.sum())
    low, high = before / whole, (before + mass) / whole
    error_before, error_all = float(left.p_error[:token_id].sum()), float(left.p_error.sum())
    error_at = float(left.p_error[token_id])
    if mass == 0.0 and error_at == 0.0:
        return Comparison(place, -1.0, 0.0, f"{role} draw of a token that has probability 0")

    def bound(share: float, inside: float) -> float:
        return (inside * (1.0 - share) + share * (error_all - inside)) / whole + ROUNDING

    if u - low < high - u:
        margin, error = u - low, bound(low, error_before)
    else:
        margin, error = high - u, bound(high, error_before + error_at)
    return Comparison(place, margin, error, f"{role} draw {u:.6f} in [{low:.6f}, {high:.6f})")

"""One round over a tree of drafts, enumerated: every draw of the tree, every coin, the exact law of what is emitted.

A drafting decides node by node what to draw next, from what was drawn before; the machinery is generic over numbers, so
that the shipped functions (float64), a rational twin and deliberately biased twins go through the same enumeration.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from round_law import Text, Tree, Vector, draft_q, rational_residual

from outrider.drafting import tree
from outrider.sampling import AcceptanceRule
from target_worker.tree_acceptance import stand

WITH, WITHOUT, ONE_HOT = "with replacement", "without replacement", "one-hot"
OTHER = "another drafter"
"""Its q is that of the first one with the vocabulary turned around."""


@dataclass(frozen=True)
class Drawn:
    """A tree as far as it is drawn. q: dense rows; kinds: how each node was drawn."""

    parents: Text = ()
    drafts: Text = ()
    q: tuple[Vector, ...] = ()
    kinds: tuple[str, ...] = ()

    def text(self, node: int) -> Text:
        """Tokens down to `node`."""
        return tuple(self.drafts[i] for i in tree.path(self.parents, node))

    def siblings(self, parent: int) -> list[int]:
        """Children of `parent` drawn so far."""
        return [i for i, p in enumerate(self.parents) if p == parent]


Drafting = Callable[[Drawn], "tuple[int, str] | None"]
"""(parent, kind) of the next node, from what was drawn before it; None: the tree is done."""

Outcomes = Callable[[Drawn, dict[int, Vector]], Iterator[tuple[Any, int, Vector]]]
"""(tree, p by node) -> (probability, deepest node that stands, law of the token after it)."""


def fixed(parents: Sequence[int], kinds: Sequence[str]) -> Drafting:
    """The same shape whatever is drawn. A node whose parent could not be drawn is left out."""

    def drafting(drawn: Drawn) -> tuple[int, str] | None:
        index = len(drawn.drafts)
        return (parents[index], kinds[index]) if index < len(parents) else None

    return drafting


def drawings(nodes: Tree, drafting: Drafting, drawn: Drawn | None = None) -> Iterator[tuple[Any, Drawn]]:
    """(probability, tree) of everything that can be drawn. A tree ends where nothing is left to draw without
    replacement: how much is left depends on q alone."""
    drawn = drawn or Drawn()
    step = drafting(drawn)
    q = None if step is None else conditional(nodes, drawn, *step)
    if step is None or q is None:
        yield 1, drawn
        return
    parent, kind = step
    for x in range(nodes.vocab_size):
        if q[x]:
            longer = Drawn((*drawn.parents, parent), (*drawn.drafts, x), (*drawn.q, q), (*drawn.kinds, kind))
            for probability, whole in drawings(nodes, drafting, longer):
                yield q[x] * probability, whole


def conditional(nodes: Tree, drawn: Drawn, parent: int, kind: str) -> Vector | None:
    """The law of the next child of `parent`. One-hot children are q's likeliest ids, one after the other."""
    q = nodes.q[drawn.text(parent)]
    siblings = drawn.siblings(parent)
    if kind == WITH:
        return q
    if kind == OTHER:
        return q[::-1]
    if kind == ONE_HOT:
        rank = sum(drawn.kinds[i] == ONE_HOT for i in siblings)
        if rank >= nodes.vocab_size:
            return None
        x = sorted(range(nodes.vocab_size), key=lambda y: (-q[y], y))[rank]
        return [0 * q[x] + (y == x) for y in range(nodes.vocab_size)]
    taken = {drawn.drafts[i] for i in siblings if drawn.kinds[i] != ONE_HOT}
    left = [0 * q[x] if x in taken else q[x] for x in range(nodes.vocab_size)]
    total = sum(left)
    return [x / total for x in left] if total else None


def law_of_round(
    nodes: Tree, drafting: Drafting, outcomes: Outcomes, *, told: Callable[[Drawn], Drawn] = lambda drawn: drawn
) -> dict[Text, Any]:
    """P(first γ + 1 tokens): what a round emits, continued by plain sampling from p. No tree is deeper than γ.

    told: what the rule sees of a tree that was drawn; anything but the tree itself is a lie.
    """
    emitted: dict[Text, Any] = defaultdict(int)
    for drawing, drawn in ((probability, told(whole)) for probability, whole in drawings(nodes, drafting)):
        for probability, node, last in outcomes(drawn, rows(nodes, drawn)):
            for x in range(nodes.vocab_size):
                if last[x]:
                    emitted[(*drawn.text(node), x)] += drawing * probability * last[x]
    law: dict[Text, Any] = {(): 0}
    for _ in range(nodes.gamma + 1):
        law = {
            (*text, x): begun * nodes.p[text][x] + emitted.get((*text, x), 0)
            for text, begun in law.items()
            for x in range(nodes.vocab_size)
        }
    return law


def expected_accepted(nodes: Tree, drafting: Drafting, outcomes: Outcomes) -> Any:
    """E[length of the path that stands]."""
    return sum(
        drawing * probability * len(drawn.text(node))
        for drawing, drawn in drawings(nodes, drafting)
        for probability, node, _ in outcomes(drawn, rows(nodes, drawn))
    )


def rows(nodes: Tree, drawn: Drawn) -> dict[int, Vector]:
    """p after the prefix and after every node."""
    return {node: nodes.p[drawn.text(node)] for node in range(-1, len(drawn.drafts))}


def shipped(rule: AcceptanceRule, group: Callable[[Drawn, int], Any] = lambda drawn, node: node) -> Outcomes:
    """The function that `verify_tree` runs on. Nodes of one group share a coin; honest groups hold one node each."""

    def outcomes(drawn: Drawn, p: dict[int, Vector]) -> Iterator[tuple[Any, int, Vector]]:
        children = tree.children(drawn.parents)
        at_parents = {node: p[node] for node in p if children[node + 1]}
        q = [draft_q(np.asarray(row, dtype=float)) for row in drawn.q]
        for probability, (node, left) in runs(
            lambda coin: stand(rule, children, drawn.drafts, at_parents, q, coin), lambda node: group(drawn, node)
        ):
            last = left.p if left is not None else p[node]
            yield probability, node, last / last.sum()

    return outcomes


class Throws:
    """One way that the coins of a decision fall. The coin of a group is one uniform number, which is known to lie in an
    interval after each throw."""

    def __init__(self, script: Sequence[bool], group: Callable[[int], Any]) -> None:
        self._script, self._group = script, group
        self._intervals: dict[Any, tuple[Any, Any]] = {}
        self._thrown: list[bool] = []
        self._free: list[bool] = []
        self.probability: Any = 1

    def coin(self, node: int, chance: Any) -> bool:
        """Whether the group's number is below `chance`."""
        low, high = self._intervals.get(self._group(node), (0, 1))
        cut = min(max(chance, low), high)
        index = len(self._thrown)
        success = self._script[index] if index < len(self._script) else cut > low
        self._thrown.append(success)
        self._free.append(low < cut < high)
        self._intervals[self._group(node)] = (low, cut) if success else (cut, high)
        self.probability = self.probability * ((cut - low) if success else (high - cut)) / (high - low)
        return success

    def others(self) -> list[list[bool]]:
        """The scripts that part from this way at a throw beyond its own."""
        beyond = range(len(self._script), len(self._thrown))
        return [[*self._thrown[:i], not self._thrown[i]] for i in beyond if self._free[i]]


def runs(
    decide: Callable[[Callable[[int, Any], bool]], Any], group: Callable[[int], Any] = lambda node: node
) -> Iterator[tuple[Any, Any]]:
    """(probability, result) of `decide` for every way that its coins may fall."""
    scripts: list[list[bool]] = [[]]
    while scripts:
        throws = Throws(scripts.pop(), group)
        result = decide(throws.coin)
        yield throws.probability, result
        scripts += throws.others()


def rational_token(drawn: Drawn, p: dict[int, Vector]) -> Iterator[tuple[Any, int, Vector]]:
    """TOKEN from the paper: Miao et al. 2023, algorithm 2, with each sibling's own conditional q."""
    children = tree.children(drawn.parents)

    def walk(node: int, reached: Any) -> Iterator[tuple[Any, int, Vector]]:
        left = p[node]
        for child in children[node + 1]:
            x, q = drawn.drafts[child], drawn.q[child]
            chance = min(Fraction(1), left[x] / q[x])
            if chance:
                yield from walk(child, reached * chance)
            reached = reached * (1 - chance)
            if not reached:
                return
            residual = rational_residual(left, q, Fraction(1))
            left = [r / sum(residual) for r in residual]
        yield reached, node, left

    yield from walk(-1, Fraction(1))


def rational_block(drawn: Drawn, p: dict[int, Vector]) -> Iterator[tuple[Any, int, Vector]]:
    """BLOCK as measures: `due` is the mass that a node must emit token by token, given the drafts above it, times the
    chance `alive` that nothing below stands so far. Each child is given what fits under its own q."""
    children = tree.children(drawn.parents)

    def climb(node: int, chance: Any) -> tuple[list[tuple[Any, int, Vector]], Any]:
        """(what stands at or below the node, the chance that nothing does), given the node's own chance."""
        found: list[tuple[Any, int, Vector]] = []
        alive, left = Fraction(1), p[node]
        for child in children[node + 1]:
            x, q = drawn.drafts[child], drawn.q[child]
            below, fails = climb(child, min(Fraction(1), chance * left[x] / q[x]))
            found += [(alive * probability, where, last) for probability, where, last in below]
            alive = alive * fails
            due = rational_residual(left, q, chance)
            mass = sum(due)
            if not alive:
                return found, alive
            chance = mass / (mass + 1 - chance)
            left = [d / mass for d in due] if mass else left
        if chance:
            found.append((alive * chance, node, left))
        return found, alive * (1 - chance)

    found, fails = climb(-1, Fraction(1))
    assert fails == 0
    yield from found


RATIONAL = {AcceptanceRule.TOKEN: rational_token, AcceptanceRule.BLOCK: rational_block}


def random_drafting(seed: int, gamma: int, num_nodes: int, kinds: Sequence[str] = (WITH, WITHOUT, ONE_HOT)) -> Drafting:
    """A random shape of at most `num_nodes` nodes and depth γ; all sampled siblings of a node are drawn alike."""
    rng = random.Random(f"shape {seed} {gamma} {num_nodes}")
    parents: list[int] = []
    sampled: dict[int, str] = {}
    chosen: list[str] = []
    while len(parents) < num_nodes:
        parent = rng.randrange(-1, len(parents))
        if len(tree.path(parents, parent)) == gamma:
            continue
        parents.append(parent)
        kind = rng.choice(list(kinds))
        chosen.append(kind if kind == ONE_HOT else sampled.setdefault(parent, kind))
    return fixed(parents, chosen)

"""Which tree of drafts to verify: the one that commits most tokens per millisecond, from calibrated chances and costs.

A tree commits one token and, for each of its nodes, one more with the chance that the whole path to the node stands. So
of all trees of n nodes the n likeliest paths are the best one (OPT-Tree, Wang et al. 2024, arXiv:2406.17276), and they
are a tree, as no path is likelier than its beginning. What is left to choose is how many nodes and how deep, by what a
pass over so many rows and so many levels of drafting take.

`shape` plans before anything is drawn: for sampled drafts. `choose` picks among nodes that are drawn, and may only be
asked about one-hot ones, COUPLED and greedy included: to drop a sampled token because of itself would bias the text.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from outrider.drafting import tree

Acceptance = Callable[[int, int], float]
"""(depth from 1, try index from 0) -> chance that this child of a node that stands is the one that stands; for each
depth the chances sum to at most 1 and do not rise with the try index."""


@dataclass(frozen=True, slots=True)
class RoundCost:
    """Milliseconds of a round, as measured."""

    verify_ms: float
    """A verify pass, whatever it holds, and all else that every round pays."""
    row_ms: float
    """Each row of it; a tree of n nodes has n + 1."""
    level_ms: float = 0.0
    """Each level of drafting; a tree of depth d needs d."""

    def ms(self, num_nodes: int, depth: int) -> float:
        """Of a round over a tree; of plain decoding at (0, 0)."""
        return self.verify_ms + self.row_ms * (num_nodes + 1) + self.level_ms * depth


@dataclass(frozen=True, slots=True)
class Plan:
    """A tree and what it is expected to commit and to take. `nodes`: candidates it consists of, ascending."""

    nodes: tuple[int, ...]
    parents: tuple[int, ...]
    num_tokens: float
    ms: float

    @property
    def tokens_per_ms(self) -> float:
        """What trees are chosen by."""
        return self.num_tokens / self.ms if self.ms > 0 else float("inf")


def choose(
    parents: Sequence[int], path_chances: Sequence[float], cost: RoundCost, *, max_nodes: int, max_depth: int = 64
) -> Plan:
    """The best tree out of one-hot candidates. `path_chances[i]`: that node i and all its ancestors stand, calibrated;
    at most its parent's."""
    for node, parent in enumerate(parents):
        if parent != tree.PREFIX and path_chances[node] > path_chances[parent]:
            raise ValueError(f"node {node} is likelier ({path_chances[node]}) than its parent ({path_chances[parent]})")
    depths = tree.depths(parents)
    # On ties a parent comes before its children, so that what is taken is always a tree.
    ranked = sorted(range(len(parents)), key=lambda node: (-path_chances[node], depths[node], node))
    best = Plan((), (), 1.0, cost.ms(0, 0))
    for deepest in range(1, min(max_depth, max(depths, default=0)) + 1):
        within = [node for node in ranked if depths[node] <= deepest][:max_nodes]
        count, num_tokens, ms = _best_count([(path_chances[node], depths[node]) for node in within], cost)
        if num_tokens / max(ms, 1e-12) > best.tokens_per_ms:
            nodes = tuple(sorted(within[:count]))
            places = {tree.PREFIX: tree.PREFIX, **{node: place for place, node in enumerate(nodes)}}
            best = Plan(nodes, tuple(places[parents[node]] for node in nodes), num_tokens, ms)
    return best


def shape(acceptance: Acceptance, cost: RoundCost, *, max_nodes: int, max_depth: int, max_width: int = 16) -> Plan:
    """The best shape to draw a tree in, known before any token: depth first of all, then as wide as it pays.

    Its nodes stand in the order of their chances, parents before children and siblings in draw order.
    """
    best = Plan((), (), 1.0, cost.ms(0, 0))
    for deepest in range(1, max_depth + 1):
        parents, chances = _likeliest_paths(acceptance, max_nodes, deepest, max_width)
        depths = tree.depths(parents)
        count, num_tokens, ms = _best_count(list(zip(chances, depths, strict=True)), cost)
        if num_tokens / max(ms, 1e-12) > best.tokens_per_ms:
            best = Plan(tuple(range(count)), tuple(parents[:count]), num_tokens, ms)
    return best


def shape_of_size(
    acceptance: Acceptance, cost: RoundCost, num_nodes: int, *, max_depth: int, max_width: int = 16
) -> tuple[int, ...]:
    """Parents of the best shape of so many nodes, as deep as it pays; fewer where depth and width allow no more."""
    best: tuple[float, tuple[int, ...]] = (-1.0, ())
    for deepest in range(1, max_depth + 1):
        parents, chances = _likeliest_paths(acceptance, num_nodes, deepest, max_width)
        rate = (1.0 + sum(chances)) / max(cost.ms(len(parents), max(tree.depths(parents))), 1e-12)
        if len(parents) > len(best[1]) or (len(parents) == len(best[1]) and rate > best[0]):
            best = (rate, tuple(parents))
    return best[1]


def _likeliest_paths(
    acceptance: Acceptance, max_nodes: int, max_depth: int, max_width: int
) -> tuple[list[int], list[float]]:
    """(parents, path chances) of the `max_nodes` likeliest nodes, likeliest first."""
    parents: list[int] = []
    chances: list[float] = []
    # (-chance, depth, parent, try index, parent's chance): at equal chances the shallow and the early come first
    heap = [(-acceptance(1, 0), 1, tree.PREFIX, 0, 1.0)]
    while heap and len(parents) < max_nodes:
        chance, depth, parent, try_index, parents_chance = heapq.heappop(heap)
        node = len(parents)
        parents.append(parent)
        chances.append(-chance)
        if try_index + 1 < max_width:
            sibling = -parents_chance * acceptance(depth, try_index + 1)
            heapq.heappush(heap, (max(sibling, chance), depth, parent, try_index + 1, parents_chance))
        if depth < max_depth:
            heapq.heappush(heap, (chance * acceptance(depth + 1, 0), depth + 1, node, 0, -chance))
    return parents, chances


def _best_count(ranked: Iterable[tuple[float, int]], cost: RoundCost) -> tuple[int, float, float]:
    """(nodes, expected tokens, ms) of the best beginning of (path chance, depth), likeliest first."""
    num_tokens, depth = 1.0, 0
    best = (0, 1.0, cost.ms(0, 0))
    for count, (chance, at_depth) in enumerate(ranked, start=1):
        num_tokens += chance
        depth = max(depth, at_depth)
        ms = cost.ms(count, depth)
        if num_tokens * best[2] > best[1] * ms:
            best = (count, num_tokens, ms)
    return best

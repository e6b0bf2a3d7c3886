"""Trees that drafters inside the target draw: which shape pays, from how far their chains stand and how often a second
guess is right where the first is wrong.

The shape is planned before anything is drawn, from averages over earlier rounds (`outrider/drafting/tree_plan.py`).
Sampled drafts and Medusa's take it as it is; where a match of ids decides, a head goes by what it sees at the very
place, and may do better than the average: how much so is learnt as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.gamma.tree_acceptance import Siblings
from outrider.drafting import tree
from outrider.drafting.tree_plan import RoundCost, shape

MAX_DEPTH = 8
MAX_WIDTH = 8
"""Guesses at one place."""
GAIN_DECAY = 0.99
GAIN_WEIGHT = 16.0
"""Tokens that the assumption of no gain counts for."""

Chance = Callable[[int, int], float]


class Gain:
    """Tokens that were accepted of trees, over those that their shapes promised."""

    def __init__(self) -> None:
        self._accepted = self._promised = 0.0

    def observe(self, num_accepted: int, promised: float) -> None:
        """A round."""
        self._accepted = GAIN_DECAY * self._accepted + num_accepted
        self._promised = GAIN_DECAY * self._promised + promised

    def value(self) -> float:
        return (self._accepted + GAIN_WEIGHT) / (self._promised + GAIN_WEIGHT)


def chances(hazards: Sequence[float], siblings: Siblings) -> Chance:
    """As `tree_plan.Acceptance`: hazards[d - 1] for the first guess at depth d, and for those beside it what it and
    those before them leave."""
    tries = [siblings.chance(try_index) for try_index in range(1, MAX_WIDTH)]
    left, of_rest = 1.0, []
    for chance in tries:
        of_rest.append(left * chance)
        left *= 1 - chance
    return lambda depth, i: hazards[depth - 1] if i == 0 else (1 - hazards[depth - 1]) * of_rest[i - 1]


def best_shape(chance: Chance, cost: RoundCost, *, max_nodes: int, max_depth: int, is_chain: bool) -> tuple[int, ...]:
    """`Proposal.parents` of the tree that commits most per ms: one node at least. is_chain: it may be a chain;
    otherwise one more guess at the first place is the least, so that second guesses are judged at all."""
    plan = shape(chance, cost, max_nodes=max_nodes, max_depth=max_depth, max_width=MAX_WIDTH)
    parents = plan.parents or (tree.PREFIX,)
    return parents if is_chain else widened(parents, max_nodes)


def widened(parents: tuple[int, ...], max_nodes: int) -> tuple[int, ...]:
    """The same; where it is a chain with a second guess at its first place, if there is room for that."""
    if max_nodes < 2 or not tree.is_chain(parents):
        return parents
    return (*parents[: max_nodes - 1], tree.PREFIX)


def expected_accepted(parents: Sequence[int], chance: Chance) -> float:
    """Of a tree of this shape."""
    reached: list[float] = []
    num_children = [0] * (len(parents) + 1)
    for parent, depth in zip(parents, tree.depths(parents), strict=True):
        above = 1.0 if parent == tree.PREFIX else reached[parent]
        reached.append(above * chance(depth, min(num_children[parent + 1], MAX_WIDTH - 1)))
        num_children[parent + 1] += 1
    return sum(reached)

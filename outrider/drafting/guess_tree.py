"""Guesses that disagree, verified beside one another: a tree of one-hot drafts, as large as its rows are worth.

Siblings are tried in the order in which they stand, and each is one-hot, so the law is the target's whatever they are
(`guess.py` says why). Which nodes are kept follows from chances that were there before any coin of the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.drafting.guess import Guess
from outrider.drafting.tree import PREFIX
from outrider.drafting.tree_plan import RoundCost, choose


@dataclass(frozen=True, slots=True)
class GuessTree:
    """`parents` as in `Proposal`; `path_chances[i]`: that token i and all before it on its path stand."""

    drafter: str
    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    path_chances: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def expected_accepted(self) -> float:
        return sum(self.path_chances)


def merged(guesses: Sequence[Guess]) -> GuessTree | None:
    """All of them; None where they say the same as far as they go. The likeliest comes first everywhere."""
    token_ids: list[int] = []
    parents: list[int] = []
    path_chances: list[float] = []
    places: dict[tuple[int, int], int] = {}
    left: dict[int, float] = {}
    has_siblings = False
    for guess in sorted(guesses, key=Guess.expected_accepted, reverse=True):
        node, reached = PREFIX, 1.0
        for token_id, chance in zip(guess.token_ids, guess.chances, strict=True):
            child = places.get((node, token_id))
            if child is None:
                has_siblings |= node in left
                child = places[node, token_id] = len(token_ids)
                token_ids.append(token_id)
                parents.append(node)
                # what its siblings took cannot be its own
                path_chances.append(reached * min(chance, left.get(node, 1.0)))
                left[node] = left.get(node, 1.0) - min(chance, left.get(node, 1.0))
            node, reached = child, path_chances[child]
    if not has_siblings:
        return None
    return GuessTree(
        "+".join(guess.drafter for guess in guesses), tuple(token_ids), tuple(parents), tuple(path_chances)
    )


def best_part(tree: GuessTree, cost: RoundCost, max_nodes: int) -> GuessTree | None:
    """The part of it that commits most tokens per ms; None where that is nothing, or a chain."""
    plan = choose(tree.parents, tree.path_chances, cost, max_nodes=max_nodes)
    if not any(plan.parents.count(parent) > 1 for parent in set(plan.parents)):
        return None
    ids = tuple(tree.token_ids[node] for node in plan.nodes)
    return GuessTree(tree.drafter, ids, plan.parents, tuple(tree.path_chances[node] for node in plan.nodes))

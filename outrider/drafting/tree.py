"""The shape of a tree of drafts: `parents[i]` is the index of token i's parent, -1 the committed prefix.

Order is topological: a parent stands before its children, and siblings stand in the order in which they were drawn. So
"the tokens before token i" are the ones with smaller index, and what is decided about token i (whether it is drafted,
kept or cut) may depend on those alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.lm.tree import is_chain, path_to

__all__ = ["PREFIX", "chain_parents", "children", "depths", "is_chain", "path", "within"]

PREFIX = -1
"""The parent of what follows the committed prefix directly."""


def chain_parents(num_tokens: int) -> tuple[int, ...]:
    """Every token the child of the one before it."""
    return tuple(range(PREFIX, num_tokens - 1))


def depths(parents: Sequence[int]) -> list[int]:
    """Of each token: 1 right after the prefix, one more than its parent's elsewhere. Token i stands at position
    (position of the last committed token) + depth."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent == PREFIX else found[parent] + 1)
    return found


def children(parents: Sequence[int]) -> list[list[int]]:
    """Entry i + 1: the children of token i in draw order; entry 0: those of the prefix."""
    found: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for index, parent in enumerate(parents):
        found[parent + 1].append(index)
    return found


def path(parents: Sequence[int], index: int) -> tuple[int, ...]:
    """Indices from a child of the prefix down to token `index`, which may be the prefix itself: the empty path."""
    return tuple(path_to(parents, index))


def within(parents: Sequence[int], max_depth: int) -> tuple[int, ...]:
    """The shape of what is no deeper."""
    kept = [index for index, depth in enumerate(depths(parents)) if depth <= max_depth]
    places = {PREFIX: PREFIX, **{index: place for place, index in enumerate(kept)}}
    return tuple(places[parents[index]] for index in kept)

"""Trees of tokens behind a prefix: where each node stands, and what it sees.

A tree is the parents of its nodes, every one before its children: an index into the tree, or -1 for the last token of
the prefix. A node sees the prefix, its ancestors and itself; its position is as in a text of its path alone. The nodes
of a sequence's tree lie behind its prefix in the cache, in tree order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def is_chain(parents: Sequence[int]) -> bool:
    """Whether each node is the child of the one before: then it is no tree but a text. True of no nodes at all."""
    return all(parent == index - 1 for index, parent in enumerate(parents))


def are_ordered(parents: Sequence[int], start: int = 0) -> bool:
    """Whether each parent from index `start` on is -1 or comes before its child."""
    return all(-1 <= parent < index for index, parent in enumerate(parents[start:], start))


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """From a root to `node`, both included; empty for -1."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree of n nodes behind `start` tokens.

    depths: int64[n], 1 for a root's; so a node's position is start - 1 + depth. sees: bool[n, n], whether row's node
    sees column's: its ancestors and itself.
    """

    start: int
    parents: tuple[int, ...]
    depths: np.ndarray
    sees: np.ndarray

    @classmethod
    def of(cls, start: int, parents: Sequence[int]) -> Tree:
        """parents: in order, see `are_ordered`."""
        depths = np.ones(len(parents), np.int64)
        sees = np.eye(len(parents), dtype=bool)
        for node, parent in enumerate(parents):
            if parent >= 0:
                depths[node] += depths[parent]
                sees[node] |= sees[parent]
        return cls(start, tuple(parents), depths, sees)

    @property
    def positions(self) -> np.ndarray:
        """int64[n] of the nodes."""
        return self.start - 1 + self.depths


def branches(parents: Sequence[int], first: int = 0) -> list[tuple[list[int], int]]:
    """Paths from a root down, each with how many of its last nodes are its own: every node from `first` on is one
    path's own."""
    covered = [False] * len(parents)
    found = []
    for node in reversed(range(first, len(parents))):
        if not covered[node]:
            path = path_to(parents, node)
            own = [n for n in path if n >= first and not covered[n]]
            for n in own:
                covered[n] = True
            found.append((path, len(own)))
    return found

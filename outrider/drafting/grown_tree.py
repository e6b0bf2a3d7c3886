"""Trees out of a head's rows, in one of two ways: the likeliest paths that the head itself sees, or a shape given
before anything is drawn.

The first (EAGLE-2, Li et al. 2024, arXiv:2406.16858) is for drafts that are decided by a match of ids: whatever picks
them, the text is the target's. Sampled drafts take a shape: what is drawn must all be verified, and where it is drawn
may follow from nothing that is drawn later. One-hot guesses may take either.

Both run all nodes of a level at once, and only those that something may come after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from outrider.drafting import tree
from outrider.drafting.proposal import Proposal
from outrider.drafting.tree import PREFIX
from outrider.drafting.tree_draw import Child, draw_children
from outrider.sampling.noise import extend_hash

if TYPE_CHECKING:
    from outrider.serving.session_log import SessionLog

MAX_SIBLINGS = 10
"""Of the likeliest paths: the eleventh guess at a place is hardly ever among them."""


class Node(NamedTuple):
    """A draft of a tree that grows. `parent` is its index there; `depth` 1 follows the prefix; `value`: chance that all
    the path to it stands, of one-hot drafts."""

    parent: int
    depth: int
    child: Child
    prefix_hash: int
    value: float


Rows = Callable[[Sequence[int]], Iterable[np.ndarray]]
"""Of nodes by index, all of one level, none asked for twice: float32[V] logits after each, valid until the next."""
Children = Callable[[int, np.ndarray, int], list[Child]]
"""(node, its row, how many at most) -> its children, in draw order. Raises Internal on a row that cannot be read."""


class GrownTree:
    """Nodes so far, in the order in which they were drawn, behind the log's committed ids."""

    def __init__(self, log: SessionLog, max_q_entries: int) -> None:
        self.nodes: list[Node] = []
        self._log = log
        self._max_q_entries = max_q_entries

    @property
    def is_matched(self) -> bool:
        """Whether drafts stand by a match of ids, so that any may be proposed."""
        return self._log.sampling.decides_by_match

    def path_ids(self, node: int) -> list[int]:
        """Tokens from the first level down to it."""
        ids: list[int] = []
        while node != PREFIX:
            ids.append(self.nodes[node].child.token_id)
            node = self.nodes[node].parent
        return ids[::-1]

    def drawn(self, node: int, row: np.ndarray, num_children: int) -> list[Child]:
        """Children as the stream's rule draws them, after the exact prefix of the node."""
        log, path = self._log, self.path_ids(node)
        prefix_hash = self.nodes[node].prefix_hash if path else log.prefix_hash
        try:
            for token_id in path:
                log.history.push(token_id)
            return draw_children(
                row, log.sampling, log.stopping, log.history, log.noise, prefix_hash, len(log.ids) + len(path),
                num_children, max_entries=self._max_q_entries,
            )  # fmt: skip
        finally:
            log.history.pop(len(path))

    def add(self, parent: int, child: Child) -> int:
        """Its index."""
        depth, prefix_hash, value = 1, self._log.prefix_hash, 1.0
        if parent != PREFIX:
            above = self.nodes[parent]
            depth, prefix_hash, value = above.depth + 1, above.prefix_hash, above.value
        self.nodes.append(Node(parent, depth, child, extend_hash(prefix_hash, child.token_id), value * child.chance))
        return len(self.nodes) - 1

    def goes_on(self, node: int) -> bool:
        """Whether drafts after it are of use. A sampled stop token ends nothing: that a proposal is shorter for what
        was drawn must not tell when it comes."""
        child = self.nodes[node].child
        return child.q is not None or child.token_id not in self._log.stopping.stop_token_ids

    def proposal(self, order: Sequence[int], drafter: str) -> Proposal:
        """Of these nodes, parents before children and siblings in draw order."""
        places = {PREFIX: PREFIX, **{node: place for place, node in enumerate(order)}}
        nodes = [self.nodes[node] for node in order]
        parents = tuple(places[node.parent] for node in nodes)
        return Proposal(
            token_ids=tuple(node.child.token_id for node in nodes),
            q=tuple(node.child.q for node in nodes) if any(node.child.q is not None for node in nodes) else (),
            drafter=drafter,
            parents=() if tree.is_chain(parents) else parents,
        )


def grow(grown: GrownTree, shape: Sequence[int], root: np.ndarray, rows: Rows) -> list[int]:
    """The nodes to propose of a drafter whose rows follow its own drafts: the likeliest paths, as many and as deep as
    those of the shape, where a match decides; else a tree of this shape."""
    if grown.is_matched:
        return likeliest(grown, len(shape), max(tree.depths(shape), default=0), root, rows)
    return planned(grown, shape, root, rows, grown.drawn)


def likeliest(grown: GrownTree, num_nodes: int, max_depth: int, root: np.ndarray, rows: Rows) -> list[int]:
    """Grows by levels; the `num_nodes` nodes of the highest value that are at most so deep, likeliest first.

    No node is likelier than its parent, so once a level has none among the best, no later one has. Raises Internal
    where the root's row cannot be read; what later rows fail to give is left out.
    """
    best: list[int] = []
    frontier = [PREFIX]
    for depth in range(1, max_depth + 1):
        try:
            for node, row in zip(frontier, rows(frontier) if grown.nodes else [root], strict=True):
                for child in grown.drawn(node, row, min(num_nodes, MAX_SIBLINGS)):
                    best.append(grown.add(node, child))
        except Exception:
            if not grown.nodes:
                raise
            break
        best = sorted(best, key=lambda node: (-grown.nodes[node].value, grown.nodes[node].depth, node))[:num_nodes]
        # after the last of as many as are wanted nothing likelier can come
        frontier = [n for n in best[: num_nodes - 1] if grown.nodes[n].depth == depth and grown.goes_on(n)]
        if not frontier:
            break
    return best


def planned(grown: GrownTree, shape: Sequence[int], root: np.ndarray, rows: Rows, children: Children) -> list[int]:
    """Draws a tree of this shape; its nodes in the shape's order, fewer where no more tokens are possible, after stop
    tokens that were not sampled, and where rows fail. Raises Internal where the root's row cannot be read.

    A child is left out because of what q its siblings have or what was drawn before: the law of the others is exact.
    """
    below = tree.children(shape)
    places: dict[int, int] = {}
    """Of a node, its place in the shape."""
    frontier = [PREFIX]
    while frontier:
        drawn: list[int] = []
        try:
            for node, row in zip(frontier, rows(frontier) if grown.nodes else [root], strict=True):
                wanted = below[1 + places.get(node, PREFIX)]
                for place, child in zip(wanted, children(node, row, len(wanted)), strict=False):
                    drawn.append(grown.add(node, child))
                    places[drawn[-1]] = place
        except Exception:
            # What was drawn stands: to drop it for what comes after it would select among draws.
            if not grown.nodes:
                raise
            break
        frontier = [node for node in drawn if below[1 + places[node]] and grown.goes_on(node)]
    return sorted(places, key=places.__getitem__)

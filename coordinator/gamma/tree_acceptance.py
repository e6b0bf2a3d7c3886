"""Guesses beside a chain: how often one of them is right where the chain is wrong."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.gamma.policy import RoundReport
from outrider.drafting.tree import PREFIX, children

PRIOR_CHANCES = (0.3, 0.2, 0.15)
"""Of the second, third and further guesses at a place, given that those before them are wrong: assumed at first."""
PRIOR_WEIGHT = 16.0
DECAY = 0.998


class Siblings:
    """Chance of each guess after the first at its place, given that it is tried at all; by its number, at any depth."""

    def __init__(self, start: Sequence[float] = PRIOR_CHANCES) -> None:
        """start: assumed at first, by number, the last one of all further ones."""
        self._start = start
        self._right: dict[int, float] = {}
        self._seen: dict[int, float] = {}

    def observe(self, report: RoundReport) -> None:
        """A verified tree; nothing is learnt where its nodes' chances are not told."""
        if len(report.soft_acceptances) < len(report.parents):
            return
        for siblings in children(report.parents):
            for try_index, node in enumerate(siblings[1:], start=1):
                chance = report.soft_acceptances[node] / 255
                self._right[try_index] = self._right.get(try_index, 0.0) * DECAY + chance
                self._seen[try_index] = self._seen.get(try_index, 0.0) * DECAY + 1

    def chance(self, try_index: int) -> float:
        """try_index from 1."""
        prior = self._start[min(try_index, len(self._start)) - 1]
        right, seen = self._right.get(try_index, 0.0), self._seen.get(try_index, 0.0)
        return (right + PRIOR_WEIGHT * prior) / (seen + PRIOR_WEIGHT)

    def expected_tokens(self, hazards: Sequence[float], width: int) -> list[float]:
        """Entry L: committed tokens of a round over a chain of L drafts, each with `width` - 1 guesses beside it that
        nothing follows. `hazards`: of the chain."""
        all_wrong = 1.0
        for try_index in range(1, width):
            all_wrong *= 1 - self.chance(try_index)
        expected, reached = [1.0], 1.0
        for hazard in hazards:
            expected.append(expected[-1] + reached * (hazard + (1 - hazard) * (1 - all_wrong)))
            reached *= hazard
        return expected


def trunk_of(parents: Sequence[int]) -> list[int]:
    """The first guess at each place, from the first level down."""
    below, node, trunk = children(parents), PREFIX, []
    while below[node + 1]:
        node = below[node + 1][0]
        trunk.append(node)
    return trunk

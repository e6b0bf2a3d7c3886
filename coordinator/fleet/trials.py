"""Whose turn among suspects came last on each target worker, as far as one coordinator knows. Pure.

A worker gives the next suspect its turn once the one before has decided its tokens, and may die before these are heard
of. So whoever had an earlier turn there is past it, whatever it has heard.
"""

from __future__ import annotations

from collections import OrderedDict

from coordinator.fleet.deaths import bound


class Trials:
    """Of all targets of one coordinator, by their incarnations."""

    def __init__(self) -> None:
        self._num_begun: OrderedDict[str, int] = OrderedDict()

    def begins(self, incarnation: str) -> int:
        """A suspect's turn has come there. Its number."""
        number = self._num_begun.pop(incarnation, 0) + 1
        self._num_begun[incarnation] = number
        bound(self._num_begun)
        return number

    def is_over(self, incarnation: str, number: int) -> bool:
        """Whether another one's turn has come since."""
        return self._num_begun.get(incarnation, 0) > number

"""Draft workers that a stream has lost: which are left alone for a while, and when all are. Pure.

A request may be what kills them. It costs nothing but speed, of the streams that had those workers as well: so where
two have died in a row with hardly a token of a stream between, its request does without for a while, longer each time.
Streams that were only there do too, and come back apart.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from coordinator.suspicion import CLOSE_TOKENS

MAX_CLOSE_DEATHS = 2
"""In a row, with fewer than CLOSE_TOKENS tokens from each to the next: from then on each is followed by a rest."""
REST_S, MAX_REST_S = 30.0, 960.0
"""On average; twice as long each time."""


class Avoided:
    """Workers that a stream has lost, each for a while."""

    def __init__(self, first_s: float, most_s: float) -> None:
        """first_s: after the first loss; twice as long after each further one, up to `most_s`."""
        self._first_s = first_s
        self._most_s = most_s
        self._until: dict[str, float] = {}
        self._next_s: dict[str, float] = {}

    def lost(self, address: str, now: float) -> None:
        wait_s = self._next_s.get(address, self._first_s)
        self._next_s[address] = min(2 * wait_s, self._most_s)
        # not all streams at once
        self._until[address] = now + wait_s * random.uniform(0.75, 1.25)

    def at(self, now: float) -> frozenset[str]:
        """Addresses that are not to be asked now."""
        return frozenset(address for address, until in self._until.items() if now < until)


class CloseDeaths:
    """Of draft workers under the streams of one request, in a row. Times are in seconds, of any clock."""

    def __init__(self) -> None:
        self._row: list[str] = []
        self._died_at: dict[int, int] = {}
        self._rest_s = REST_S
        self._rests_until = 0.0

    def died(self, choice: int, length: int, incarnation: str, now: float) -> None:
        """The connection to this process broke while it had the choice, whose log had this length."""
        before = self._died_at.get(choice)
        self._died_at[choice] = length
        if before is not None and length - before >= CLOSE_TOKENS:
            self._row.clear()
            self._rest_s = REST_S
        if incarnation in self._row:
            return
        self._row.append(incarnation)
        if len(self._row) >= MAX_CLOSE_DEATHS:
            self._rests_until = now + self._rest_s * random.uniform(0.75, 1.25)
            self._rest_s = min(2 * self._rest_s, MAX_REST_S)

    def rests(self, now: float, is_lost: Callable[[str], bool]) -> bool:
        """Whether no draft worker is to be asked now. Processes that answer after all have not died."""
        if now >= self._rests_until:
            return False
        self._row = [incarnation for incarnation in self._row if is_lost(incarnation)]
        return len(self._row) >= MAX_CLOSE_DEATHS

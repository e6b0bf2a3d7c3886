"""When a draft worker that proposes what cannot be is asked no more: too often, for what its proposals are worth.

A process that is broken stays so: it comes back as another process at its address, never by time alone.
"""

from __future__ import annotations

from collections import OrderedDict

FORGIVEN_AFTER = 1000
"""Good proposals that make up for a bad one."""
MAX_CONDEMNED = 64
"""Processes of one address that are remembered as broken."""


class Quarantine:
    """Of one address. max_bad: bad proposals of one process that are borne, less those that were made up for."""

    def __init__(self, max_bad: int = 3) -> None:
        self._max_bad = max_bad
        self._incarnation = ""
        self._condemned: OrderedDict[str, str] = OrderedDict()
        """Why, by incarnation."""
        self._num_against = 0
        self._num_good = 0
        self.num_bad = 0
        """Ever, of all processes."""

    @property
    def reason(self) -> str:
        """Why the process that is there now is in quarantine; empty: it is not."""
        return self._condemned.get(self._incarnation, "")

    def meet(self, incarnation: str) -> None:
        """The process that answers at the address now. Another one than before begins anew, unless it is known."""
        if incarnation != self._incarnation:
            self._incarnation, self._num_against, self._num_good = incarnation, 0, 0

    def good(self, incarnation: str) -> None:
        """A proposal of this process was verified."""
        if incarnation == self._incarnation and self._num_against:
            self._num_good += 1
            if self._num_good >= FORGIVEN_AFTER:
                self._num_against, self._num_good = self._num_against - 1, 0

    def bad(self, incarnation: str, fault: str) -> None:
        """A proposal of this process could not be one."""
        self.num_bad += 1
        if incarnation != self._incarnation:
            return  # of a process that has gone
        self._num_against, self._num_good = self._num_against + 1, 0
        if self._num_against >= self._max_bad and incarnation not in self._condemned:
            self._condemned[incarnation] = f"{self._num_against} bad proposals, the last one: {fault}"
            while len(self._condemned) > MAX_CONDEMNED:
                self._condemned.popitem(last=False)

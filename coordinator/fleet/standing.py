"""What this coordinator's streams have had of the draft worker at an address. It outlives leases and processes."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

from coordinator.fleet.breaker import BreakerLimits, Circuit, CircuitBreaker
from coordinator.fleet.quarantine import Quarantine
from outrider.settings import CoordinatorSettings

log = logging.getLogger(__name__)

MAX_ADDRESSES = 4096
"""Remembered; the least recently met ones go first."""
CIRCUIT_OPEN, QUARANTINED = "draft-circuit-open", "draft-quarantined"
"""Why a stream that has a session there does not ask for drafts."""


@dataclass(slots=True)
class Standing:
    """num_adoptions: streams that went there after another worker, or this one, was lost to them. The log tells when
    its circuit opens, and when it closes."""

    address: str = ""
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    quarantine: Quarantine = field(default_factory=Quarantine)
    num_adoptions: int = 0
    _why_open: str = ""
    _opened_at: float = 0.0

    def failed(self, now: float, why: str, lost_s: float = 0.0, num_streams: int = 1, is_cold: bool = False) -> None:
        """See `CircuitBreaker.failed`. why: for people, of this failure."""
        num_openings, was_closed = self.breaker.num_openings, self.breaker.circuit(now) is Circuit.CLOSED
        self.breaker.failed(now, lost_s, num_streams, is_cold)
        if self.breaker.num_openings == num_openings:
            return
        self._why_open = why
        if was_closed:
            self._opened_at = now
        open_s = self.breaker.open_s(now)
        log.warning("draft worker %s: circuit open, left alone for %.0f s: %s", self.address, open_s, why)

    def succeeded(self, now: float) -> None:
        """See `CircuitBreaker.succeeded`."""
        was_closed = self.breaker.circuit(now) is Circuit.CLOSED
        self.breaker.succeeded(now)
        if not was_closed and self.breaker.circuit(now) is Circuit.CLOSED:
            since_s = now - self._opened_at
            log.info("draft worker %s: circuit closed, %.0f s after it opened", self.address, since_s)

    def why_not(self, who: Hashable, now: float) -> str:
        """Why this stream must not ask the worker now; empty: it may."""
        if self.quarantine.reason:
            return QUARANTINED
        return "" if self.breaker.admits(who, now) else CIRCUIT_OPEN

    def takes_streams(self, now: float) -> bool:
        """Whether a session is worth opening there."""
        return not self.quarantine.reason and self.breaker.is_free(now)

    def fault(self, now: float) -> str:
        """For people; empty: there is nothing against it."""
        if self.quarantine.reason:
            return f"quarantined until another process answers there: {self.quarantine.reason}"
        circuit = self.breaker.circuit(now)
        if circuit is Circuit.CLOSED:
            return ""
        why = self._why_open or "it was lost, or waited for in vain"
        if circuit is Circuit.HALF_OPEN:
            return f"circuit half-open, one stream tries it: {why}"
        return f"circuit open, left alone for {self.breaker.open_s(now):.0f} s more: {why}"


@dataclass(frozen=True, slots=True)
class Conduct:
    """Where a session tells what its worker does: of the process that it was opened with."""

    standing: Standing
    incarnation: str = ""

    def bad(self, fault: str) -> None:
        """A proposal that cannot be one, or an answer about another text."""
        self.standing.quarantine.bad(self.incarnation, fault)

    def good(self) -> None:
        """A proposal that was verified."""
        self.standing.quarantine.good(self.incarnation)


class Standings:
    """Of all addresses."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._limits = BreakerLimits(settings.draft_breaker_share, settings.draft_breaker_max_open_s)
        self._max_bad = settings.max_bad_proposals
        self._known: OrderedDict[str, Standing] = OrderedDict()

    def of(self, address: str) -> Standing:
        """Of the worker there: as it was left, however long ago."""
        if address not in self._known:
            self._known[address] = Standing(address, CircuitBreaker(self._limits), Quarantine(self._max_bad))
            while len(self._known) > MAX_ADDRESSES:
                self._known.popitem(last=False)
        self._known.move_to_end(address)
        return self._known[address]

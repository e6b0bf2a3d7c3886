"""How many streams run at once, who waits, and who is refused. Sans-IO but for the futures that requests wait on.

A request runs once the coordinator has a place for each of its streams and the targets of its model can promise them
rows and cache blocks, so that it need not wait there. It waits in its tenant's turn, or is refused at once: where its
place would come after its deadline, and where the queue is full. In a full queue a tenant with fewer streams takes the
place of one with more, whose last request is refused then.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from coordinator.fair_share import FairQueue
from coordinator.fleet.limits import Limits
from coordinator.shedding import Returns, ServiceTimes, refuse_if_too_late
from outrider.errors import InvalidArgument, ResourceExhausted

LimitsOf = Callable[[str], Limits | None]
"""Of the targets of a model; None: nothing is known of them."""


@dataclass(eq=False, slots=True)
class Ticket:
    """A request's place: `admitted` is done once its streams may run.

    num_tokens: of one stream, that its target has to promise. num_promised: to all its streams, while they run.
    lingers: its texts are complete, but its client still reads. left: it is over.
    """

    num_streams: int
    priority: int
    tenant: str
    model: str
    num_tokens: int
    admitted: asyncio.Future[None] = field(repr=False)
    num_promised: int = 0
    has_place: bool = False
    lingers: bool = False
    left: bool = False


@dataclass(slots=True)
class _Model:
    """Requests of one model. num_promised: tokens, to those that run."""

    waiting: FairQueue[Ticket] = field(default_factory=FairQueue)
    num_running: int = 0
    num_promised: int = 0


class Admission:
    """Counts streams. A request of several choices enters as a whole."""

    def __init__(
        self,
        max_running: int,
        max_waiting: int,
        limits: LimitsOf = lambda model: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._limits = limits
        self._clock = clock
        self._models: dict[str, _Model] = {}
        """Those that anybody runs or waits for; whose turn it is comes first."""
        self._times = ServiceTimes(clock())
        self._returns = Returns()
        self._waiting: Counter[str] = Counter()
        """Streams by tenant."""
        self._num_arriving = 0
        self.num_running = 0
        self.num_waiting = 0
        self.num_lingering = 0
        """Requests whose texts are complete, while their clients still read."""
        self.num_paused = 0
        """Streams of those that run that wait until their clients have read."""

    @contextlib.contextmanager
    def arriving(self, tenant: str = "") -> Iterator[None]:
        """While a request is read and tokenized. Raises ResourceExhausted where no further one could get a place, so
        that one too many costs as little as it can."""
        if self.num_waiting + self._num_arriving >= self._max_waiting + self._num_free:
            most = max(self._waiting.values(), default=0)
            if self._num_arriving >= self._max_waiting or self._waiting[tenant] + 1 >= most:
                raise self._full(tenant)
        self._num_arriving += 1
        try:
            yield
        finally:
            self._num_arriving -= 1

    def enter(
        self,
        num_streams: int,
        priority: int,
        *,
        tenant: str = "",
        model: str = "",
        num_tokens: int = 1,
        time_left_s: float | None = None,
    ) -> Ticket:
        """num_tokens: cached ones of one stream at most. time_left_s: until its deadline, None: it has none.

        Raises ResourceExhausted when the queue is full or its place would come too late, InvalidArgument when it could
        never run.
        """
        if num_streams > self._max_running:
            raise InvalidArgument(
                f"output.n is {num_streams}, this server runs at most {self._max_running} streams at once",
                field="output.n",
            )
        future = asyncio.get_running_loop().create_future()
        ticket = Ticket(num_streams, priority, tenant, model, max(1, num_tokens), future)
        known = self._models.setdefault(model, _Model())
        num_ahead = known.waiting.weight_ahead(tenant=tenant, priority=priority)
        cost = num_streams * ticket.num_tokens
        known.waiting.push(ticket, tenant=tenant, cost=cost, priority=priority, weight=num_streams)
        self._count_waiting(ticket, num_streams)
        self.look()
        if not ticket.has_place:
            try:
                self._check_deadline(known, ticket, num_ahead, time_left_s)
                self._check_queue(ticket)
            except ResourceExhausted:
                self.leave(ticket)
                raise
        return ticket

    def finish(self, ticket: Ticket) -> None:
        """The request's texts are complete: its place is free, though its client may still read. Harmless when
        repeated. Once as many linger so as may run, a further one keeps its place until it leaves."""
        if ticket.has_place and self.num_lingering < self._max_running:
            ticket.lingers = True
            self.num_lingering += 1
            self._free(ticket)

    def pause(self, num_streams: int) -> None:
        """So many more streams wait for their clients; they keep their places. Below 0: so many wait no more."""
        self.num_paused += num_streams

    def leave(self, ticket: Ticket) -> None:
        """The request has ended, or gave up waiting. Harmless when repeated."""
        if ticket.left:
            return
        ticket.left = True
        if ticket.has_place:
            self._free(ticket)
        elif ticket.lingers:
            self.num_lingering -= 1
        else:
            self._stop_waiting(ticket)
            self.look()

    def look(self) -> None:
        """Lets in whoever can run now: one request of each model in turn, in each model in its tenants' turn."""
        num_idle = 0
        while num_idle < len(self._models):
            name, known = next(iter(self._models.items()))
            ticket = known.waiting.first()
            if ticket is not None and ticket.admitted.cancelled():
                ticket.left = True
                self._stop_waiting(ticket)
                continue
            num_idle += bool(known.waiting or known.num_running)
            if ticket is not None and self._targets_allow(known, ticket):
                if ticket.num_streams > self._num_free:
                    return  # the places that it waits for go to nobody else
                self._admit(known, ticket)
                num_idle = 0
            del self._models[name]
            if known.waiting or known.num_running:
                self._models[name] = known

    @property
    def _num_free(self) -> int:
        return self._max_running - self.num_running

    def _targets_allow(self, known: _Model, ticket: Ticket) -> bool:
        """A stream that is alone is let in whatever it takes: its target says so if it could never fit."""
        limits = self._limits(ticket.model)
        if limits is None or not known.num_running:
            return True
        num_tokens = ticket.num_streams * limits.promised(ticket.num_tokens)
        return limits.allow(known.num_running + ticket.num_streams, known.num_promised + num_tokens)

    def _check_deadline(self, known: _Model, ticket: Ticket, num_ahead: int, time_left_s: float | None) -> None:
        num_free, num_running = self._num_free, self.num_running
        if not self._targets_allow(known, ticket):
            num_free, num_running = 0, known.num_running
        num_to_end = max(1, num_ahead + ticket.num_streams - num_free)
        refuse_if_too_late(self._times.wait_s(num_to_end, num_running), time_left_s)

    def _check_queue(self, ticket: Ticket) -> None:
        """Makes room for a request that has entered, or refuses it."""
        num_more, waiting, refused = self.num_waiting - self._max_waiting, self._waiting.copy(), list[Ticket]()
        while num_more > 0:
            tenant, most = max(waiting.items(), key=lambda item: item[1])
            if most <= waiting[ticket.tenant]:
                raise self._full(ticket.tenant, ticket.num_streams)
            last = self._last_of(tenant, refused)
            refused.append(last)
            waiting[tenant] -= last.num_streams
            num_more -= last.num_streams
        for other in refused:
            error = self._full(other.tenant)
            if not other.admitted.done():
                other.admitted.set_exception(error)
                other.admitted.exception()  # its request may be gone: nobody has to read it
            self.leave(other)

    def _last_of(self, tenant: str, besides: list[Ticket]) -> Ticket:
        """Of what waits of a tenant, what would have its turn last."""
        found = (t for known in self._models.values() for t in known.waiting if t.tenant == tenant and t not in besides)
        return max(enumerate(found), key=lambda item: (item[1].priority, item[0]))[1]

    def _admit(self, known: _Model, ticket: Ticket) -> None:
        known.waiting.pop()
        self._count_waiting(ticket, -ticket.num_streams)
        limits = self._limits(ticket.model)
        promised = ticket.num_tokens if limits is None else limits.promised(ticket.num_tokens)
        ticket.num_promised = ticket.num_streams * promised
        ticket.has_place = True
        self._count(known, ticket.num_streams, ticket.num_promised)
        ticket.admitted.set_result(None)

    def _free(self, ticket: Ticket) -> None:
        ticket.has_place = False
        self._count(self._models[ticket.model], -ticket.num_streams, -ticket.num_promised)
        self._times.ended(ticket.num_streams)
        self.look()

    def _count(self, known: _Model, num_streams: int, num_promised: int) -> None:
        self.num_running += num_streams
        known.num_running += num_streams
        known.num_promised += num_promised
        self._times.runs(self.num_running, self._clock())

    def _stop_waiting(self, ticket: Ticket) -> None:
        self._count_waiting(ticket, -ticket.num_streams)
        self._models[ticket.model].waiting.remove(ticket, tenant=ticket.tenant)

    def _count_waiting(self, ticket: Ticket, num_streams: int) -> None:
        self.num_waiting += num_streams
        self._waiting[ticket.tenant] += num_streams
        if not self._waiting[ticket.tenant]:
            del self._waiting[ticket.tenant]

    def _full(self, tenant: str, num_own: int = 0) -> ResourceExhausted:
        """num_own: streams among those that wait which are refused."""
        num_waiting = self.num_waiting - num_own
        num_to_end = max(1, num_waiting + 1 - self._num_free)
        return ResourceExhausted(
            f"{self.num_running} streams run and {num_waiting} wait, at most {self._max_running} and "
            f"{self._max_waiting} may; try again later",
            reason="QUEUE_FULL",
            retry_delay_s=self._returns.delay_s(tenant, self._times, num_to_end, self.num_running, self._clock()),
        )

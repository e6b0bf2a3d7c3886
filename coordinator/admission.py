"""How many streams run at once, who waits, and who is refused. Sans-IO but for the futures that requests wait on."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from dataclasses import dataclass, field

from outrider.errors import InvalidArgument, ResourceExhausted

RETRY_DELAY_S = 1.0


@dataclass(order=True, slots=True)
class Ticket:
    """A request's place: `admitted` is done once its streams may run. Lower priority first, then first come."""

    priority: int
    number: int
    num_streams: int = field(compare=False)
    admitted: asyncio.Future[None] = field(compare=False)
    left: bool = field(default=False, compare=False)


class Admission:
    """Counts streams. A request of several choices enters as a whole."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._queue: list[Ticket] = []
        self._numbers = itertools.count()
        self.num_running = 0
        self.num_waiting = 0

    def enter(self, num_streams: int, priority: int) -> Ticket:
        """Raises ResourceExhausted when the queue is full, InvalidArgument when it could never run."""
        if num_streams > self._max_running:
            raise InvalidArgument(
                f"output.n is {num_streams}, this server runs at most {self._max_running} streams at once",
                field="output.n",
            )
        ticket = Ticket(priority, next(self._numbers), num_streams, asyncio.get_running_loop().create_future())
        runs_now = not self.num_waiting and self.num_running + num_streams <= self._max_running
        if not runs_now and self.num_waiting + num_streams > self._max_waiting:
            raise ResourceExhausted(
                f"{self.num_running} streams run and {self.num_waiting} wait, at most {self._max_running} and "
                f"{self._max_waiting} may; try again later",
                reason="QUEUE_FULL",
                retry_delay_s=RETRY_DELAY_S,
            )
        self.num_waiting += num_streams
        heapq.heappush(self._queue, ticket)
        self._admit()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """The request has ended, or gave up waiting. Harmless when repeated."""
        if ticket.left:
            return
        ticket.left = True
        if ticket.admitted.done() and not ticket.admitted.cancelled():
            self.num_running -= ticket.num_streams
        else:
            self.num_waiting -= ticket.num_streams
            self._queue.remove(ticket)
            heapq.heapify(self._queue)
        self._admit()

    def _admit(self) -> None:
        while self._queue and self.num_running + self._queue[0].num_streams <= self._max_running:
            ticket = heapq.heappop(self._queue)
            self.num_waiting -= ticket.num_streams
            if ticket.admitted.cancelled():
                ticket.left = True
                continue
            self.num_running += ticket.num_streams
            ticket.admitted.set_result(None)

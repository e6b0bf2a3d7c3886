"""Streams that a draining coordinator does not end in time: each stops behind its last whole round, and its client is
told to resume it elsewhere. Nothing that was delivered is lost, and nothing else is looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from coordinator.outbox import Outbox
from outrider.errors import DRAINING, Unavailable


class HandedOver(Unavailable):
    """What a client is told whose stream goes on elsewhere."""

    def __init__(self) -> None:
        super().__init__(
            "the coordinator is draining: resume with resume_token_ids on another one, or on a new connection",
            reason=DRAINING,
            retry_delay_s=0.0,
        )


class HandOver:
    """Of one coordinator: its requests, until they are told to go elsewhere. Must be made on the event loop."""

    def __init__(self) -> None:
        self._outboxes: set[Outbox] = set()
        self._begun = asyncio.get_running_loop().create_future()

    def begin(self, within_s: float) -> None:
        """Ends each request once its streams have ended their rounds, and after half of this time as it stands."""
        if self._begun.done():
            return
        self._begun.set_result(None)
        for outbox in self._outboxes:
            outbox.hand_over(HandedOver())
        asyncio.get_running_loop().call_later(within_s / 2, self._cut_off)

    @contextlib.contextmanager
    def covering(self, outbox: Outbox) -> Iterator[None]:
        """While this request runs."""
        self._outboxes.add(outbox)
        if self._begun.done():
            outbox.hand_over(HandedOver())
        try:
            yield
        finally:
            self._outboxes.discard(outbox)

    async def unless_begun(self, admitted: asyncio.Future[None]) -> None:
        """Waits for a place to run. Raises HandedOver for one that is not to be had here any more."""
        await asyncio.wait({admitted, self._begun}, return_when=asyncio.FIRST_COMPLETED)
        if not admitted.done():
            raise HandedOver
        admitted.result()

    def _cut_off(self) -> None:
        for outbox in self._outboxes:
            outbox.cut_off()

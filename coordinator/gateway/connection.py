"""A connection that does not wait for ever: for a client to say what it wants, or to read what it is sent."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from coordinator.gateway.metrics import GatewayMetrics

MIN_READ_BYTES = 65_536
"""Of an answer that waits, to be read in each pause: whoever reads less reads nothing."""


class PatientConnection(H11Protocol):
    """uvicorn's, which is cut off when its client pauses for `max_pause_s`: sends no whole head while no request of it
    runs, or reads nothing while an answer waits for it. What runs for it is told that it hung up."""

    def __init__(self, *args: Any, max_pause_s: float, metrics: GatewayMetrics, is_tls: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self._max_pause_s = max_pause_s
        self._metrics = metrics
        if is_tls:  # a handshake that fails makes no connection
            metrics.on_handshake()
        self._unasked: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._metrics.on_connection()
        self._see_whether_asked()

    def connection_lost(self, exc: Exception | None) -> None:
        for limit in (self._unasked, self._unread):
            if limit is not None:
                limit.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        self._see_whether_asked()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._see_whether_asked()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _see_whether_asked(self) -> None:
        """A byte now and then changes nothing: the whole head has to come."""
        is_asked = self.cycle is not None and not self.cycle.response_complete
        if is_asked and self._unasked is not None:
            self._unasked.cancel()
            self._unasked = None
        elif not is_asked and self._unasked is None:
            self._unasked = self.loop.call_later(self._max_pause_s, self._end_unasked)

    def _end_unasked(self) -> None:
        """Unless it still reads an answer, to which the other limit goes."""
        self._unasked = None
        if self._unread is None:
            self.transport.abort()
        else:
            self._see_whether_asked()

    def _watch_reader(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(self._max_pause_s, self._see_what_was_read, waiting)

    def _see_what_was_read(self, before: int) -> None:
        if self.transport.get_write_buffer_size() > before - MIN_READ_BYTES:
            self.transport.abort()
        else:
            self._watch_reader()

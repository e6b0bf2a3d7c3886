"""What both ends of a session stream share: heartbeats, the idle lease, a bounded way out, one place that ends it all.

`receive` and `send` belong to the driver, `outgoing` to gRPC. Heartbeats go out every `heartbeat_ms` while `working`
(unless a message is queued anyway), and are never seen by the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Generic, TypeVar

from outrider.errors import SESSION_LOST, Aborted, OutriderError, ResourceExhausted, Unavailable

In = TypeVar("In")
Out = TypeVar("Out")
MAX_QUEUED = 1024


class SessionStream(Generic[In, Out]):
    """One end of a bidirectional session stream.

    heartbeat: the message to send as one; any incoming message whose oneof `message` is `heartbeat` is taken as one.
    idle_lease_s: without any message for this long the stream fails with ABORTED, reason SESSION_LOST; None: never.
    peer_timeout_s: the same with UNAVAILABLE, reason PEER_SILENT, but only while working.
    """

    def __init__(
        self,
        *,
        heartbeat: Out,
        heartbeat_ms: int,
        idle_lease_s: float | None = None,
        peer_timeout_s: float | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._heartbeat = heartbeat
        self._heartbeat_s = heartbeat_ms / 1000
        self._idle_lease_s = idle_lease_s
        self._peer_timeout_s = peer_timeout_s
        self._incoming: deque[In] = deque()
        self._outgoing: deque[Out] = deque()
        self._incoming_changed = asyncio.Event()
        self._outgoing_changed = asyncio.Event()
        self._input_ended = False
        self._output_ended = False
        self._error: BaseException | None = None
        self._handed_over: OutriderError | None = None
        self._num_working = 0
        self._last_heard = self._working_since = self._loop.time()
        self._last_sent = -math.inf
        self._due = self._last_heard + self._heartbeat_s
        self._timer = self._loop.call_at(self._due, self._tick)

    @property
    def num_queued(self) -> int:
        """Messages that the peer has not taken yet."""
        return len(self._outgoing)

    async def wait(self) -> None:
        """Returns when `receive` would not wait; takes nothing, so it can be cancelled without loss."""
        while not (self._incoming or self._input_ended or self._error or self._handed_over):
            self._incoming_changed.clear()
            await self._incoming_changed.wait()

    async def receive(self) -> In | None:
        """The next message that is no heartbeat; None when the peer is done. Raises what made the stream fail, or what
        it was handed over with."""
        await self.wait()
        if self._handed_over is not None:
            raise self._handed_over
        if self._incoming:
            return self._incoming.popleft()
        if self._error is not None:
            raise self._error
        return None

    def send(self, message: Out) -> None:
        """Queues a message. A peer that lets MAX_QUEUED pile up is not reading: the stream fails."""
        if len(self._outgoing) >= MAX_QUEUED:
            self.fail(ResourceExhausted(f"{MAX_QUEUED} messages wait for a peer that does not read"))
            return
        self._last_sent = self._loop.time()
        self._outgoing.append(message)
        self._outgoing_changed.set()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Work is outstanding: on a worker, computing; on a coordinator, waiting for an answer."""
        if not self._num_working:
            self._working_since = self._loop.time()
        self._num_working += 1
        try:
            yield
        finally:
            self._num_working -= 1

    def fail(self, error: OutriderError) -> None:
        """Ends both directions with `error`, at once; the first error stays."""
        self._error = self._error or error
        self._incoming_changed.set()
        self._outgoing_changed.set()

    def hand_over(self, error: OutriderError) -> None:
        """No further message is received: `receive` raises `error`. The one at hand is answered in peace."""
        self._handed_over = error
        self._incoming_changed.set()

    def finish(self) -> None:
        """No more messages will be sent: `outgoing` ends after what is queued."""
        self._output_ended = True
        self._outgoing_changed.set()

    def close(self) -> None:
        """Stops the clock. The stream is not to be used any more."""
        self._timer.cancel()
        self.finish()

    async def outgoing(self) -> AsyncIterator[Out]:
        """What was sent, in order; ends after `finish`. Raises what made the stream fail."""
        while True:
            while self._outgoing and self._error is None:
                yield self._outgoing.popleft()
            if self._error is not None:
                raise self._error
            if self._output_ended:
                return
            self._outgoing_changed.clear()
            await self._outgoing_changed.wait()

    async def pump(self, messages: AsyncIterator[In]) -> None:
        """Feeds what the peer sends, until it is done. What reading raises, `receive` raises."""
        try:
            async for message in messages:
                self._last_heard = self._loop.time()
                if message.WhichOneof("message") != "heartbeat":  # type: ignore[attr-defined]
                    self._incoming.append(message)
                    self._incoming_changed.set()
                    if len(self._incoming) >= MAX_QUEUED:
                        self.fail(ResourceExhausted(f"{MAX_QUEUED} messages sent without waiting for answers"))
                        return
        except Exception as error:
            self._error = self._error or error
            self._outgoing_changed.set()
        self._input_ended = True
        self._incoming_changed.set()

    def _tick(self) -> None:
        now = self._loop.time()
        # While this process was too busy to listen, the peer's silence proves nothing.
        self._last_heard += max(0.0, now - self._due - self._heartbeat_s)
        # what was sent says as much as a heartbeat: the next is due an interval after it
        self._due = self._last_sent + self._heartbeat_s
        if self._due <= now:
            self._due = now + self._heartbeat_s
            if self._num_working and not self._outgoing:
                self.send(self._heartbeat)
        self._timer = self._loop.call_at(self._due, self._tick)
        if self._idle_lease_s is not None and now - self._last_heard > self._idle_lease_s:
            text = f"no message for {self._idle_lease_s:g} s: the session was freed, open it again"
            self.fail(Aborted(text, reason=SESSION_LOST))
        silent_s = now - max(self._last_heard, self._working_since)
        if self._num_working and self._peer_timeout_s is not None and silent_s > self._peer_timeout_s:
            text = f"the peer is silent since {silent_s:.1f} s with work outstanding"
            self.fail(Unavailable(text, reason="PEER_SILENT", retry_delay_s=0.0))


Drive = Callable[[SessionStream[In, Out]], Coroutine[Any, Any, None]]


async def serve_session(
    stream: SessionStream[In, Out], requests: AsyncIterator[In], drive: Drive[In, Out]
) -> AsyncIterator[Out]:
    """The server's end: yields what `drive` sends until it returns, and raises what it raised.

    However the call ends, `drive` has been cancelled and has run its `finally` before this generator is closed.
    """
    reader = asyncio.create_task(stream.pump(requests))
    driver = asyncio.create_task(drive(stream))
    driver.add_done_callback(lambda _: stream.finish())
    try:
        async for message in stream.outgoing():
            yield message
        await driver
    finally:
        stream.close()
        for task in (driver, reader):
            task.cancel()
        await asyncio.gather(driver, reader, return_exceptions=True)

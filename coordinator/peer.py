"""The coordinator's end of one session stream: an inbox, ordered writes, heartbeats, and word of a lost peer."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import grpc

from outrider.errors import Aborted, DeadlineExceeded, OutriderError, Unavailable, Unimplemented
from outrider.serving.status import STATUS_DETAILS, from_rpc_error

RETRY_DELAY_S = 0.5
MAX_QUEUED = 1024
"""Messages that nobody has taken yet; a worker answers what it was asked, and cannot come near."""
FLOODED = "FLOODED"
"""The reason of a peer that was lost for more than that."""
MAX_RESENDS = 3
"""A worker that stays out of step after this many corrections is given up."""
WORKER_LOST, WORKER_SILENT, WORKER_STOPPED = "WORKER_LOST", "WORKER_SILENT", "WORKER_STOPPED"
"""Reasons of a peer that was lost: its connection broke, nothing came in time, or it ended the stream by itself."""
NOT_UNDERSTOOD = "NOT_UNDERSTOOD"
"""The reason of a peer that was lost for a message that cannot be read."""


class Peer:
    """One bidirectional stream to a worker. `receive` raises OutriderError once the worker failed, left or fell silent.

    A worker is silent when it sends nothing, heartbeats included, for `timeout_s` while an answer is outstanding: it is
    known by then, and not before the last but one of our own heartbeat ticks within that time. Time is counted in these
    ticks, so that a pause of this process is not taken for one of the worker.
    """

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall,
        read: Callable[[Any], Any],
        *,
        address: str,
        heartbeat: Any,
        is_heartbeat: Callable[[Any], bool],
        interval_s: float,
        timeout_s: float,
    ) -> None:
        self._call = call
        self._read = read
        self._address = address
        self._heartbeat = heartbeat
        self._is_heartbeat = is_heartbeat
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._inbox: deque[Any] = deque()
        self._changed = asyncio.Event()
        self._failure: OutriderError | None = None
        self._write_lock = asyncio.Lock()
        self._writes: set[asyncio.Task[None]] = set()
        self._num_silent_ticks = 0
        self._has_spoken = False
        """We have, since the last tick: that says as much as a heartbeat."""
        self._max_silent_ticks = max(2, math.ceil(timeout_s / interval_s - 1e-9))
        self._last_word_at = asyncio.get_running_loop().time()
        self.num_outstanding = 0
        """Answers owed; maintained by the link that knows what answers what."""
        self.was_asked = False
        """Whether answers were owed when the peer was lost."""
        self.unheard_s = 0.0
        """How long neither end had said anything when the peer was lost, which was at most so long before."""
        self._tasks = (asyncio.create_task(self._read_all()), asyncio.create_task(self._beat()))

    async def send(self, message: Any) -> None:
        """Safe to cancel: a write that is cut short would end the whole call, so it goes on without its sender."""
        if self._failure is not None:
            raise self._failure
        self._said_something()
        self._has_spoken = True
        try:
            writing = self._in_background(self._write(message))
            await asyncio.wait({writing})
            if writing.cancelled():  # by `close`
                raise self._failure or self._gone("was closed here")
            writing.result()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            # the reader learns why the call ended; its status is the better error
            await asyncio.wait({self._tasks[0]}, timeout=self._timeout_s)
            raise self._failure or self._gone("closed the stream") from None

    def send_soon(self, *messages: Any) -> asyncio.Task[None]:
        """One after the other, without anybody waiting. A write that fails is seen by whoever reads or sends next."""
        return self._in_background(self._send_all(messages))

    async def receive(self) -> Any:
        """The next message that is not a heartbeat. Safe to cancel."""
        while (message := self.receive_now()) is None:
            self._changed.clear()
            await self._changed.wait()
        return message

    def receive_now(self) -> Any | None:
        """A message that is already there. Raises like `receive`."""
        if self._inbox:
            return self._inbox.popleft()
        if self._failure is not None:
            raise self._failure
        return None

    def close(self) -> None:
        """Ends the stream; the worker frees its session. Waits for nothing, so that nothing can cut it short."""
        self._fail(self._gone("was closed here"))
        self._call.cancel()
        for task in (*self._tasks, *self._writes):
            task.cancel()

    async def _read_all(self) -> None:
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                self._said_something()
                if message is None:  # gRPC's word for bytes that are no such message
                    raise ValueError("bytes that are no message")
                content = self._read(message)
                if self._is_heartbeat(content):
                    continue
                if len(self._inbox) >= MAX_QUEUED:
                    self._fail(self._gone(f"sent {MAX_QUEUED} messages that nobody waits for", reason=FLOODED))
                    self._call.cancel()
                    return
                self._inbox.append(content)
                self._changed.set()
                del message, content  # the next may be long in coming
            code = await self._call.code()
            if code is not grpc.StatusCode.OK:
                raise grpc.aio.AioRpcError(
                    code,
                    await self._call.initial_metadata(),
                    await self._call.trailing_metadata(),
                    details=await self._call.details(),
                )
            self._fail(self._gone("closed the stream", reason=WORKER_STOPPED))
        except grpc.aio.AioRpcError as error:
            self._fail(self._read_error(error))
        except asyncio.CancelledError:
            # by `close`, or the call was cancelled under us
            self._fail(self._gone("cancelled the stream", reason=WORKER_STOPPED))
            raise
        except ValueError as error:
            self._fail(self._gone(f"sent what this version does not understand: {error}", reason=NOT_UNDERSTOOD))
            self._call.cancel()

    async def _beat(self) -> None:
        while self._failure is None:
            await asyncio.sleep(self._interval_s)
            if not self.num_outstanding:
                self._num_silent_ticks = 0
                continue
            self._num_silent_ticks += 1
            if self._num_silent_ticks >= self._max_silent_ticks:
                self._fail(self._gone(f"has been silent for {self._timeout_s:g} s", reason=WORKER_SILENT))
                self._call.cancel()
            elif not (self._has_spoken or self._write_lock.locked()):
                # beside the clock, which goes on however long the transport takes; while a write waits, no other is due
                self._in_background(self._write_heartbeat())
            self._has_spoken = False

    def _in_background(self, writing: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(writing)
        self._writes.add(task)
        task.add_done_callback(self._written)
        return task

    def _written(self, task: asyncio.Task[None]) -> None:
        self._writes.discard(task)
        if not task.cancelled():
            task.exception()  # whoever sends, if he is still there, has it as well

    async def _write(self, message: Any) -> None:
        async with self._write_lock:
            await self._call.write(message)

    async def _send_all(self, messages: Iterable[Any]) -> None:
        with contextlib.suppress(OutriderError):
            for message in messages:
                await self.send(message)

    async def _write_heartbeat(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            await self._write(self._heartbeat)

    def _said_something(self) -> None:
        self._num_silent_ticks = 0
        self._last_word_at = asyncio.get_running_loop().time()

    def _fail(self, error: OutriderError) -> None:
        if self._failure is None:
            self._failure = error
            self.was_asked = self.num_outstanding > 0
            self.unheard_s = asyncio.get_running_loop().time() - self._last_word_at
            self._changed.set()

    def _read_error(self, failure: grpc.aio.AioRpcError) -> OutriderError:
        """What the worker said; and which worker it was, and when to try again, where it could not say so itself.

        Workers send details with every error of theirs: a bare status comes from the transport, whatever its code (a
        killed process can show as INTERNAL or UNKNOWN too), and means that the worker is gone.
        """
        error = from_rpc_error(failure)
        keys = {key for key, _ in failure.trailing_metadata() or ()}
        if STATUS_DETAILS not in keys and not isinstance(error, DeadlineExceeded | Unimplemented):
            stopped = failure.code() is grpc.StatusCode.CANCELLED
            error = Unavailable(error.message, reason=WORKER_STOPPED if stopped else WORKER_LOST)
        if not isinstance(error, Unavailable | Aborted):
            return error
        return type(error)(
            f"worker {self._address}: {error.message}",
            reason=error.reason,
            field=error.field,
            retry_delay_s=RETRY_DELAY_S if error.retry_delay_s is None else error.retry_delay_s,
        )

    def _gone(self, what: str, reason: str = WORKER_LOST) -> Unavailable:
        return Unavailable(f"worker {self._address} {what}", reason=reason, retry_delay_s=RETRY_DELAY_S)

"""A worker's end of one session stream, whatever the session computes: messages in turn, one session at a time."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from outrider.errors import OTHER_PROCESS, InvalidArgument, Unavailable
from outrider.lm.interface import Program, T
from outrider.serving.daemon_threads import DaemonThreads
from outrider.serving.engine_watch import refuse_if_broken
from outrider.serving.messages import Header, Opening, OutOfStep
from outrider.serving.session_log import SessionLog
from outrider.serving.session_stream import SessionStream
from outrider.serving.session_trace import SessionTrace
from outrider.serving.worker import Worker

LONG_PROMPT_TOKENS = 2048
"""From here on a session is built off the event loop: hashing its prompt takes a millisecond or more. So is one
with a grammar: reading that may take a second."""
BUILDERS = DaemonThreads(2, "session-builder")
"""Threads of their own: many such sessions at once must not keep a probe waiting for one, or the worker seems lost."""


class Session(Protocol):
    """Of one epoch. `entry_us`: what the message at hand waited for its program to begin: a part of the queue that
    the session cannot know of, and tells with its answer."""

    log: SessionLog
    entry_us: int


S = TypeVar("S", bound=Session)


class WorkerStream(ABC, Generic[S]):
    """Takes messages in turn, runs their programs, sends what these answer. Its end, for whatever cause, frees all."""

    METHOD = ""
    """Full name of the call."""

    def __init__(self, worker: Worker, stream: SessionStream[Any, Any]) -> None:
        self._worker = worker
        self._stream = stream
        self._session: S | None = None
        self._trace = SessionTrace(worker.tracing, self.METHOD)

    async def drive(self, _: SessionStream[Any, Any]) -> None:
        """Until the caller has no more to say."""
        with self._worker.session_open(self._stream):
            try:
                while (request := await self._stream.receive()) is not None:
                    try:
                        await self._handle(request)
                    except OutOfStep as error:
                        self._stream.send(self._out_of_step(error.header))
            finally:
                self._free()
                self._trace.ended()

    @abstractmethod
    async def _handle(self, request: Any) -> None:
        """One message. Raises OutOfStep where it does not fit the session, which goes on."""

    @abstractmethod
    def _out_of_step(self, header: Header) -> Any:
        """The answer that tells the session's own state."""

    @abstractmethod
    def _free(self) -> None:
        """Ends the session, if there is one, and gives back all that it held."""

    def _takes_opening(self, epoch: int, worker_incarnation: str) -> bool:
        """False: a stale one, counted. Raises Unavailable where another process is meant, and for a new session while
        the worker drains, or is broken."""
        if worker_incarnation not in ("", self._worker.incarnation):
            raise Unavailable(
                "another process than the one that the session is meant for answers here: describe it again",
                reason=OTHER_PROCESS,
                retry_delay_s=0.0,
            )
        if self._session is None:
            self._worker.server.refuse_if_draining()
            refuse_if_broken(self._worker.engine.health)
        elif epoch <= self._session.log.epoch:
            self._worker.counters.num_stale_messages += 1
            return False
        return True

    async def _made(self, make: Callable[[], S], opening: Opening) -> S:
        is_long = len(opening.prompt_ids) > LONG_PROMPT_TOKENS or opening.sampling.grammar is not None
        return await asyncio.get_running_loop().run_in_executor(BUILDERS, make) if is_long else make()

    async def _run(self, program: Program[T]) -> T:
        """Of the session, on the engine, which begins a program between two passes only: the wait is `entry_us`."""
        session, asked_ns = self._opened(), time.perf_counter_ns()

        def entered() -> Program[T]:
            session.entry_us = (time.perf_counter_ns() - asked_ns) // 1000
            return (yield from program)

        with self._stream.working():
            return await self._worker.engine.run(entered())

    def _opened(self) -> S:
        if self._session is None:
            raise InvalidArgument("the session is not open: send `open` first", field="message")
        return self._session

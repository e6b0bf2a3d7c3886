"""One `Generate`, over as many connections as it takes: a stream that breaks is resumed from what was delivered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import grpc

from outrider.errors import DeadlineExceeded, OutriderError, Unavailable
from outrider.merging import merged
from outrider.progress import ChoiceProgress, Progress
from outrider.results import Event, Started
from outrider.resume import Losses, Mend, Resume, about_coordinator, mend
from outrider.serving.endpoints import Connection, Endpoints
from outrider.serving.forks import is_ours, use_grpc
from outrider.serving.read_results import read_event
from outrider.serving.status import is_from_transport
from outrider.serving.write_request import resuming_request
from outrider.v1 import generation_pb2, generation_pb2_grpc

CUT_SHORT = "CUT_SHORT"
"""Reason of a stream that ended as if all were well, with a text that had no end: somebody between cut it."""


class ResumingCall:
    """`policy` None: the first failure is the caller's. `to_error`: what a failed call amounts to."""

    def __init__(
        self,
        endpoints: Endpoints,
        request: generation_pb2.GenerateRequest,
        policy: Resume | None,
        *,
        timeout_s: float | None,
        metadata: Callable[[], tuple[tuple[str, str], ...]],
        to_error: Callable[[grpc.aio.AioRpcError], OutriderError],
    ) -> None:
        self._endpoints = endpoints
        self._request = request
        self._policy = policy
        self._metadata = metadata
        self._to_error = to_error
        self._timeout_s = timeout_s
        self._clock = asyncio.get_running_loop().time
        self._deadline = None if timeout_s is None else self._clock() + timeout_s

    def events(self) -> AsyncGenerator[Event, None]:
        """Whatever happens on the way, each event once and in order. Raises OutriderError, and RuntimeError in a forked
        child."""
        given, num_choices = self._request.resume_token_ids, max(1, self._request.output.n)
        return self._until_complete(Progress([ChoiceProgress(index, given) for index in range(num_choices)]))

    async def _until_complete(self, progress: Progress) -> AsyncGenerator[Event, None]:
        losses = Losses(self._policy) if self._policy is not None else None
        tried: set[str] = set()
        while True:
            failure: grpc.aio.AioRpcError | None = None
            had_begun = False
            async with self._endpoints.connection(tried) as connection:
                call = self._call(connection, progress)
                try:
                    # not `async for`: left early, it keeps call and connection for the garbage collector
                    while (response := await call.read()) is not grpc.aio.EOF:
                        self._endpoints.answered(connection)
                        had_begun = True
                        event = read_event(response)
                        told = progress.take(event) if event is not None else None
                        if told is None:
                            continue
                        if losses is not None and not isinstance(told, Started):
                            losses.progressed()
                            tried.clear()
                        yield told
                        use_grpc()  # a child that was forked meanwhile must leave this call to its parent
                except grpc.aio.AioRpcError as broken:
                    failure = broken
                finally:
                    if is_ours():
                        call.cancel()
                if progress.is_complete:
                    return
                error, wait_s = self._lost(failure, connection, progress, losses, tried, had_begun=had_begun)
            await self._wait(wait_s, error)
            if progress.has_tokens and len(progress.choices) > 1:
                async with aclosing(merged(map(self._until_complete, progress.alone()))) as events:
                    async for event in events:
                        yield event
                return

    def _call(self, connection: Connection, progress: Progress) -> Any:
        stub = generation_pb2_grpc.GenerationServiceStub(connection.channel)
        request = resuming_request(self._request, progress)
        return stub.Generate(request, timeout=self._time_left_s(), metadata=self._metadata())  # type: ignore[call-arg]

    def _lost(
        self,
        failure: grpc.aio.AioRpcError | None,
        connection: Connection,
        progress: Progress,
        losses: Losses | None,
        tried: set[str],
        *,
        had_begun: bool,
    ) -> tuple[OutriderError, float]:
        """What ended the call, and how long to wait before the next one. Raises what is the caller's to know."""
        if failure is None:
            error: OutriderError = Unavailable("the stream ended before its text", reason=CUT_SHORT)
        else:
            error = self._to_error(failure)
        is_bare = failure is None or is_from_transport(failure)
        if not is_bare:
            self._endpoints.answered(connection)
        is_known, is_accepted = self._endpoints.is_known, progress.started is not None
        mends = mend(error, is_bare=is_bare, is_accepted=is_accepted, is_known=is_known)
        if losses is None or mends is Mend.NOTHING or self._endpoints.is_closed:
            raise error
        tried.add(connection.address)
        is_gone = about_coordinator(error, is_bare=is_bare)
        if is_gone:
            self._endpoints.failed(connection)
        if mends is Mend.ELSEWHERE and len(tried) >= len(self._endpoints):
            raise error
        if had_begun:
            progress.lost()
        wait_s = losses.wait_s(error, had_begun=had_begun)
        if len(tried) >= len(self._endpoints):
            tried.clear()
        if not is_gone:  # one that is at work knows best when it has room
            wait_s = max(wait_s, error.retry_delay_s or 0.0)
        return error, max(wait_s, self._endpoints.ready_in_s())

    async def _wait(self, wait_s: float, error: OutriderError) -> None:
        """Raises DeadlineExceeded where the time is up before."""
        left_s = self._time_left_s()
        if left_s is not None and left_s <= wait_s:
            raise DeadlineExceeded(
                f"the time for the request is up (timeout_s is {self._timeout_s:g}); it waited for another try after: "
                f"{error.message}"
            ) from error
        await asyncio.sleep(wait_s)

    def _time_left_s(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

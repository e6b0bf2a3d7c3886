"""One session stream of a draft worker that has a head: takes messages in turn, runs their programs, sends answers."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from draft_worker.head_session import HeadSession
from draft_worker.held_head import HeldHead
from outrider.errors import InvalidArgument
from outrider.serving import convert
from outrider.serving.draft_answers import opened, out_of_step, proposed
from outrider.serving.messages import FeatureRows, OutOfStep
from outrider.serving.session_stream import SessionStream
from outrider.serving.worker import Worker

LONG_PROMPT_TOKENS = 2048
"""From here on a session is built off the event loop: hashing its prompt takes a millisecond or more."""


class HeadStream:
    """All work on a session is done in programs on the engine's thread, where those of other sessions take turns."""

    def __init__(self, worker: Worker, held: HeldHead, stream: SessionStream[Any, Any]) -> None:
        self._worker = worker
        self._held = held
        self._stream = stream
        self._session: HeadSession | None = None

    async def drive(self, _: SessionStream[Any, Any]) -> None:
        with self._worker.session_open():
            try:
                while (request := await self._stream.receive()) is not None:
                    await self._handle(request)
            finally:
                self._free()

    async def _handle(self, request: Any) -> None:
        try:
            match request.WhichOneof("message"):
                case "open":
                    await self._open(request.open)
                case "advance":
                    await self._advance(request.advance)
                case "features":
                    await self._take(convert.feature_rows_from_pb(request.features))
                case _:
                    raise InvalidArgument("the message is none of open, advance, features, heartbeat", field="message")
        except OutOfStep as error:
            self._stream.send(out_of_step(error.header))

    async def _open(self, message: Any) -> None:
        if self._session is None:
            self._worker.server.refuse_if_draining()
        elif message.epoch <= self._session.log.epoch:
            self._worker.counters.num_stale_messages += 1
            return
        make = partial(self._held.session, convert.draft_open_from_pb(message), self._worker.counters)
        self._free()
        with self._stream.working():
            is_long = len(message.prompt_ids) > LONG_PROMPT_TOKENS
            self._session = await asyncio.to_thread(make) if is_long else make()
        self._stream.send(opened(self._held.model.context_length))

    async def _advance(self, message: Any) -> None:
        if message.features:
            await self._take(FeatureRows(message.features_start, message.features))
        session, header = self._opened(), convert.header_from_pb(message.header)
        with self._stream.working():
            proposal = await self._worker.engine.run(
                session.advance(header, list(message.committed_ids), message.num_draft_tokens, message.drafter)
            )
        if proposal is not None:
            self._stream.send(proposed(header, proposal, session.features_end))

    async def _take(self, features: FeatureRows) -> None:
        """A long prompt is read in parts, so that other sessions need not wait for all of it."""
        session = self._opened()
        with self._stream.working():
            has_more = await self._worker.engine.run(session.take(features))
            while has_more:
                has_more = await self._worker.engine.run(session.read())

    def _opened(self) -> HeadSession:
        if self._session is None:
            raise InvalidArgument("the session is not open: send `open` first", field="message")
        return self._session

    def _free(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = None

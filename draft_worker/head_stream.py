"""One session stream of a draft worker that has a head: takes messages in turn, runs their programs, sends answers."""

from __future__ import annotations

from functools import partial
from typing import Any

from draft_worker.head_session import HeadSession
from draft_worker.held_head import HeldHead
from outrider.errors import InvalidArgument
from outrider.serving import convert
from outrider.serving.draft_answers import opened, out_of_step, proposed
from outrider.serving.messages import FeatureRows, Header
from outrider.serving.session_stream import SessionStream
from outrider.serving.worker import Worker
from outrider.serving.worker_stream import WorkerStream


class HeadStream(WorkerStream[HeadSession]):
    """All work on a session is done in programs on the engine's thread, where those of other sessions take turns."""

    METHOD = "outrider.v1.DraftService/Session"

    def __init__(self, worker: Worker, held: HeldHead, stream: SessionStream[Any, Any]) -> None:
        super().__init__(worker, stream)
        self._held = held

    async def _handle(self, request: Any) -> None:
        match request.WhichOneof("message"):
            case "open":
                await self._open(request.open)
            case "advance":
                await self._advance(request.advance)
            case "features":
                await self._take(convert.feature_rows_from_pb(request.features))
            case _:
                raise InvalidArgument("the message is none of open, advance, features, heartbeat", field="message")

    def _out_of_step(self, header: Header) -> Any:
        return out_of_step(header)

    async def _open(self, message: Any) -> None:
        if not self._takes_opening(message.epoch, message.worker_incarnation):
            return
        opening = convert.draft_open_from_pb(message)
        make = partial(self._held.session, opening, self._worker.counters, self._worker.grammars)
        self._free()
        with self._stream.working():
            self._session = await self._made(make, opening)
        self._stream.send(opened(self._held.model.context_length))

    async def _advance(self, message: Any) -> None:
        if message.features:
            await self._take(FeatureRows(message.features_start, message.features))
        session, header = self._opened(), convert.header_from_pb(message.header)
        proposal = await self._run(
            session.advance(header, list(message.committed_ids), message.num_draft_tokens, message.drafter)
        )
        self._trace.proposed(proposal)
        if proposal is not None:
            self._stream.send(proposed(header, proposal, session.features_end))

    async def _take(self, features: FeatureRows) -> None:
        """A long prompt is read in parts, so that other sessions need not wait for all of it."""
        session = self._opened()
        with self._stream.working(), self._trace.timed("read_features"):
            has_more = await self._worker.engine.run(session.take(features))
            while has_more:
                has_more = await self._worker.engine.run(session.read())

    def _free(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = None

"""`TargetService`: sessions on the engine. One driver per stream; its end, for whatever cause, frees everything."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from outrider.drafting.proposal import EMPTY, ProposalFault
from outrider.errors import InvalidArgument
from outrider.lm.interface import LoadedModel, Program, T
from outrider.serving import convert
from outrider.serving.messages import Header, Verdict
from outrider.serving.session_stream import SessionStream, serve_session
from outrider.serving.token_logprobs import TokenLogprobs
from outrider.serving.worker import Worker, serve_worker
from outrider.serving.worker_stream import WorkerStream
from outrider.settings import TargetWorkerSettings
from outrider.v1 import common_pb2, target_pb2, worker_pb2
from target_worker.heads import Heads
from target_worker.losslessness import LosslessnessMeter
from target_worker.losslessness_metrics import losslessness_families
from target_worker.prompt_pass import TellPrompt
from target_worker.sent_features import in_messages
from target_worker.session import TargetSession
from target_worker.suspects import Suspects

SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetService"]
DECODE_BACKLOG = 256
"""Verdicts that may wait for a slow reader before a decode ends early."""

Request = target_pb2.TargetServiceSessionRequest
Response = target_pb2.TargetServiceSessionResponse


async def serve(
    settings: TargetWorkerSettings,
    *,
    loaded: LoadedModel | None = None,
    stop: asyncio.Event | None = None,
    on_ready: Callable[[int], None] | None = None,
) -> None:
    """Runs a target worker until `stop` is set or the process is asked to end (see `serve_worker`)."""
    heads = Heads(settings)
    meter = LosslessnessMeter(settings.losslessness_every_rounds)
    await serve_worker(
        settings,
        role=worker_pb2.WORKER_ROLE_TARGET,
        service=SERVICE,
        make_servicer=partial(TargetServicer, heads=heads, meter=meter),
        equipment=heads,
        more_families=partial(losslessness_families, meter),
        loaded=loaded,
        stop=stop,
        on_ready=on_ready,
    )


class TargetServicer:
    """`TargetService` of one worker."""

    def __init__(self, worker: Worker, heads: Heads, meter: LosslessnessMeter) -> None:
        self._worker = worker
        self._heads = heads
        self._meter = meter
        self._suspects = Suspects()

    async def Session(self, requests: AsyncIterator[Request], context: Any) -> AsyncIterator[Response]:
        settings = self._worker.settings
        stream = SessionStream[Request, Response](
            heartbeat=Response(heartbeat=common_pb2.Heartbeat()),
            heartbeat_ms=settings.heartbeat_ms,
            idle_lease_s=settings.session_idle_lease_s,
        )
        target = _TargetStream(self._worker, self._heads, self._meter, stream, self._suspects)
        async for response in serve_session(stream, requests, target.drive):
            yield response


class _TargetStream(WorkerStream[TargetSession]):
    """Sessions of a target."""

    METHOD = f"{SERVICE.full_name}/Session"

    def __init__(
        self,
        worker: Worker,
        heads: Heads,
        meter: LosslessnessMeter,
        stream: SessionStream[Request, Response],
        suspects: Suspects,
    ) -> None:
        super().__init__(worker, stream)
        self._turn = suspects.turn()
        self._heads = heads
        self._meter = meter
        self._engine = worker.engine
        self._sequence: Any = None

    async def _handle(self, request: Request) -> None:
        match request.WhichOneof("message"):
            case "open":
                await self._open(request.open)
            case "verify":
                await self._verify(request.verify)
            case "decode":
                await self._decode(request.decode)
            case "ingest":
                header, committed_ids = _prefix(request.ingest)
                self._send_ready(await self._run(self._opened().ingest(header, committed_ids)))
            case "stop":
                pass  # whatever it was to end has ended already
            case _:
                raise InvalidArgument(
                    "the message is none of open, verify, decode, ingest, stop, heartbeat", field="message"
                )

    def _out_of_step(self, header: Header) -> Response:
        return Response(out_of_step=common_pb2.OutOfStep(header=convert.header_to_pb(header)))

    async def _open(self, message: target_pb2.TargetOpen) -> None:
        if not self._takes_opening(message.epoch, message.worker_incarnation):
            return
        opening = convert.target_open_from_pb(message)
        description = self._worker.loaded.description
        make = partial(
            TargetSession,
            opening,
            vocab_size=description.vocab_size,
            context_length=description.context_length,
            max_draft_tokens=self._worker.settings.max_draft_tokens,
            counters=self._worker.counters,
            drafters=self._heads.held,
            states=self._heads.states,
            meter=self._meter,
            grammars=self._worker.grammars,
        )
        self._free()
        with self._stream.working():
            session = await self._made(make, opening)
            session.sequence = self._sequence = await self._engine.open_sequence(
                session.reserved_length, tenant=opening.tenant, priority=opening.priority
            )
            self._session = session
            if not opening.deferred:
                self._send_verdict(await self._run(session.open(self._tell_prompt)))
            elif opening.num_suspect_tokens:
                await self._turn.take(opening.num_suspect_tokens)
                self._send_ready(session.log.header)

    async def _verify(self, message: target_pb2.TargetVerify) -> None:
        session = self._opened()
        if message.HasField("expected_token_id") and message.committed_ids:
            raise InvalidArgument(
                "verify.committed_ids: a pipelined verify counts on a verdict, it fills no gap",
                field="verify.committed_ids",
            )
        proposal, fault = EMPTY, ""
        try:
            proposal = convert.proposal_from_pb(message.proposal)
        except ProposalFault as reason:
            fault = str(reason)
        header, committed_ids = _prefix(message)
        expected_token_id = message.expected_token_id if message.HasField("expected_token_id") else None
        if session.drops(header, expected_token_id):
            return  # at once: the round that is asked for instead would wait behind it for a pass that is under way
        program = session.verify(
            header,
            committed_ids,
            proposal,
            fault,
            drafter=message.drafter,
            num_draft_tokens=message.num_draft_tokens,
            tree_parents=tuple(parent - 1 for parent in message.tree_parents),
            features_start=_features_start(message),
            expected_token_id=expected_token_id,
            tell_prompt=self._tell_prompt,
        )
        verdict = await self._run(program)
        if verdict is not None:
            self._send_verdict(verdict)
            self._turn.end()

    async def _decode(self, message: target_pb2.TargetDecode) -> None:
        """Runs a decode until its credit is used or another message comes, which is left for `drive`."""
        session = self._opened()
        emit = partial(_post, asyncio.get_running_loop(), partial(self._send_decoded, session))
        header, committed_ids = _prefix(message)
        program = session.decode(
            header,
            committed_ids,
            message.credit_tokens,
            emit,
            drafter=message.drafter,
            num_draft_tokens=message.num_draft_tokens,
            tree_parents=tuple(parent - 1 for parent in message.tree_parents),
            features_start=_features_start(message),
        )
        decoding = asyncio.ensure_future(self._run(program))
        arrival = asyncio.ensure_future(self._stream.wait())
        try:
            await asyncio.wait({decoding, arrival}, return_when=asyncio.FIRST_COMPLETED)
            session.stop_decoding()
            await decoding
            self._turn.end()
        finally:
            for task in (decoding, arrival):
                task.cancel()

    async def _run(self, program: Program[T]) -> T:
        self._turn.used()
        return await super()._run(program)

    def _send_decoded(self, session: TargetSession, verdict: Verdict) -> None:
        self._send_verdict(verdict)
        if self._stream.num_queued > DECODE_BACKLOG:
            session.stop_decoding()

    @property
    def _tell_prompt(self) -> TellPrompt:
        return partial(_post, asyncio.get_running_loop(), self._send_prompt_logprobs)

    def _send_ready(self, header: Header) -> None:
        self._stream.send(Response(ready=target_pb2.TargetReady(header=convert.header_to_pb(header))))

    def _send_prompt_logprobs(self, first_position: int, logprobs: TokenLogprobs) -> None:
        self._stream.send(Response(prompt_logprobs=convert.prompt_logprobs_to_pb(first_position, logprobs)))

    def _send_verdict(self, verdict: Verdict) -> None:
        self._trace.verified(verdict)
        end = verdict.header.base_length + len(verdict.committed_ids) - 1
        *before, last = in_messages(verdict.features, end)
        for features in before:
            self._stream.send(Response(features=convert.feature_rows_to_pb(features)))
        verdict = dataclasses.replace(verdict, features=last) if before else verdict
        self._stream.send(Response(verdict=convert.verdict_to_pb(verdict)))
        self._turn.decided(len(verdict.committed_ids))

    def _free(self) -> None:
        self._turn.end()
        if self._session is not None:
            self._session.close()
        self._session = None
        if self._sequence is not None:
            self._engine.close_sequence(self._sequence)
            self._sequence = None


def _prefix(
    message: target_pb2.TargetVerify | target_pb2.TargetDecode | target_pb2.TargetIngest,
) -> tuple[Header, list[int]]:
    return convert.header_from_pb(message.header), list(message.committed_ids)


def _features_start(message: target_pb2.TargetVerify | target_pb2.TargetDecode) -> int | None:
    return message.features_start if message.HasField("features_start") else None


def _post(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *values: Any) -> None:
    loop.call_soon_threadsafe(callback, *values)

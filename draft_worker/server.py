"""`DraftService`: sessions on the engine. One driver per stream; its end, for whatever cause, frees everything."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from draft_worker.early_stop import StopMemory
from draft_worker.head_stream import HeadStream
from draft_worker.held_head import HeldHead, check_head_settings
from draft_worker.session import KNOWN_DRAFTERS, DraftSession
from draft_worker.text_drafter import NAME as TEXT
from draft_worker.warm_up import WarmUp
from outrider.drafting.proposal import Proposal
from outrider.drafting.ratio_stop import Judged, Price
from outrider.errors import InvalidArgument
from outrider.lm.interface import LoadedModel
from outrider.serving import convert
from outrider.serving.draft_answers import begun, branched, drawn, opened, out_of_step, proposed
from outrider.serving.messages import AheadWish, Header
from outrider.serving.session_stream import SessionStream, serve_session
from outrider.serving.worker import Worker, serve_worker
from outrider.serving.worker_stream import WorkerStream
from outrider.settings import DraftWorkerSettings
from outrider.v1 import common_pb2, draft_pb2, worker_pb2

SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"]

Request = draft_pb2.DraftServiceSessionRequest
Response = draft_pb2.DraftServiceSessionResponse


async def serve(
    settings: DraftWorkerSettings,
    *,
    loaded: LoadedModel | None = None,
    stop: asyncio.Event | None = None,
    on_ready: Callable[[int], None] | None = None,
) -> None:
    """Runs a draft worker until `stop` is set or the process is asked to end (see `serve_worker`)."""
    check_settings(settings)
    head = HeldHead(settings) if settings.head else None
    await serve_worker(
        settings,
        role=worker_pb2.WORKER_ROLE_DRAFT,
        service=SERVICE,
        make_servicer=partial(DraftServicer, head=head),
        drafters=() if head else settings.drafters,
        equipment=head or WarmUp(settings),
        loaded=loaded,
        stop=stop,
        on_ready=on_ready,
    )


def check_settings(settings: DraftWorkerSettings) -> None:
    """Raises InvalidArgument, naming the setting, on drafters that do not exist or cannot work here."""
    check_head_settings(settings)
    unknown = [name for name in settings.drafters if name not in KNOWN_DRAFTERS]
    if unknown or not settings.drafters:
        names = ", ".join(KNOWN_DRAFTERS)
        elsewhere = "; lookup and suffix run in the coordinator, see its local_drafters"
        hint = elsewhere if {"lookup", "suffix"} & set(unknown) else ""
        raise InvalidArgument(f"drafters {', '.join(unknown) or '(none)'}: choose from {names}{hint}", field="drafters")
    if TEXT in settings.drafters and not settings.target_tokenizer:
        raise InvalidArgument(
            "drafters: text is for a draft model with another tokenizer than the target's: give target_tokenizer, or "
            "leave text out",
            field="drafters",
        )


class DraftServicer:
    """`DraftService` of one worker."""

    def __init__(self, worker: Worker, head: HeldHead | None = None) -> None:
        assert isinstance(worker.settings, DraftWorkerSettings)
        self._head = head
        if TEXT in worker.settings.drafters and worker.loaded.translator is None:
            raise InvalidArgument(
                "drafters: text translates between tokenizers, and the target has this model's own; leave text out",
                field="drafters",
            )
        self._worker = worker
        self._stops = StopMemory()

    async def Session(self, requests: AsyncIterator[Request], context: Any) -> AsyncIterator[Response]:
        settings = self._worker.settings
        stream = SessionStream[Request, Response](
            heartbeat=Response(heartbeat=common_pb2.Heartbeat()),
            heartbeat_ms=settings.heartbeat_ms,
            idle_lease_s=settings.session_idle_lease_s,
        )
        own: _DraftStream | HeadStream
        if self._head is None:
            own = _DraftStream(self._worker, stream, self._stops)
        else:
            own = HeadStream(self._worker, self._head, stream)
        async for response in serve_session(stream, requests, own.drive):
            yield response


class _DraftStream(WorkerStream[DraftSession]):
    """Sessions of a draft model."""

    METHOD = f"{SERVICE.full_name}/Session"

    def __init__(self, worker: Worker, stream: SessionStream[Request, Response], stops: StopMemory) -> None:
        super().__init__(worker, stream)
        self._stops = stops
        self._engine = worker.engine
        self._sequence: Any = None
        self._prefill: asyncio.Task[None] | None = None
        self._ahead: asyncio.Task[None] | None = None

    async def _handle(self, request: Request) -> None:
        match request.WhichOneof("message"):
            case "open":
                await self._open(request.open)
            case "advance":
                await self._advance(request.advance)
            case _:
                raise InvalidArgument("the message is none of open, advance, heartbeat", field="message")

    def _out_of_step(self, header: Header) -> Response:
        return out_of_step(header)

    async def _open(self, message: draft_pb2.DraftOpen) -> None:
        if not self._takes_opening(message.epoch, message.worker_incarnation):
            return
        _refuse_features("open.features", message.features)
        opening = convert.draft_open_from_pb(message)
        settings, loaded = self._worker.settings, self._worker.loaded
        assert isinstance(settings, DraftWorkerSettings)
        make = partial(
            DraftSession.of,
            opening,
            loaded,
            settings,
            counters=self._worker.counters,
            stops=self._stops,
            grammars=self._worker.grammars,
        )
        self._free()
        with self._stream.working():
            session = await self._made(make, opening)
            await self._reserve(session, "")
            self._session = session
        self._stream.send(opened(loaded.description.context_length))
        self._prefill = asyncio.create_task(self._run_prefill(session))

    async def _advance(self, message: draft_pb2.DraftAdvance) -> None:
        session, header = self._opened(), convert.header_from_pb(message.header)
        _refuse_features("advance.features", message.features)
        price, wish = _price(message), convert.ahead_from_pb(message)
        session.check_ahead(wish)
        with self._stream.working():
            session.catch_up_us = await self._end_prefill()
            await self._end_ahead(session, header.prefix_hash)
            await self._reserve(session, message.drafter)
            program = session.advance(
                header,
                list(message.committed_ids),
                message.num_draft_tokens,
                message.drafter,
                message.tree_width,
                price,
                Judged(message.judged_prefix_hash, message.soft_acceptances),
            )
            self._prepare_telling(session, header, message)
            proposal = await self._run(program)
        self._trace.proposed(proposal)
        if proposal is not None and not message.has_proposal:
            untold = _after(proposal, session.stop.num_told)
            num_cancelled = session.ahead.take_num_cancelled()
            self._stream.send(proposed(header, untold, num_cancelled_tokens=num_cancelled))
        if proposal is not None and wish:
            self._ahead = asyncio.create_task(self._run_ahead(session, wish))

    def _prepare_telling(self, session: DraftSession, header: Header, message: draft_pb2.DraftAdvance) -> None:
        """What is sent while the proposal is drawn, where drafts are sampled: each of them, so that no death of this
        worker selects among draws; to an older caller, where with a price the time follows from draws, that it has
        begun. The engine's thread says when."""
        stop = session.stop
        stop.begun = stop.tells = None
        stop.num_told = 0
        if session.log.sampling.decides_by_match:
            return
        soon = asyncio.get_running_loop().call_soon_threadsafe
        if message.tell_drafts:
            stop.tells = lambda draft: soon(self._send_drawn, header, session.asked_for(draft))
        elif message.HasField("price_tokens_per_ms"):
            stop.begun = partial(soon, self._stream.send, begun(header))

    def _send_drawn(self, header: Header, draft: Proposal) -> None:
        self._stream.send(drawn(header, draft))

    async def _run_ahead(self, session: DraftSession, wish: AheadWish) -> None:
        with self._stream.working():
            branches = await self._engine.run(session.draft_ahead(wish))
        self._trace.drafted_ahead(branches)
        if branches is not None and branches.proposals:
            self._stream.send(branched(branches, session.ahead.take_num_cancelled()))

    async def _end_ahead(self, session: DraftSession, prefix_hash: int) -> None:
        """The round has its outcome: where its branch is half drafted it is finished first, all other work ahead is
        given up."""
        if self._ahead is None:
            return
        ahead, self._ahead = self._ahead, None
        if not session.ahead.waits_for(prefix_hash):
            ahead.cancel()
        (fault,) = await asyncio.gather(ahead, return_exceptions=True)
        if isinstance(fault, Exception):
            self._worker.counters.num_failed_drafts += 1

    async def _end_prefill(self) -> int:
        """Microseconds that the prompt's pass was waited for."""
        if self._prefill is None:
            return 0
        started_ns = time.perf_counter_ns()
        await self._prefill
        self._prefill = None
        return (time.perf_counter_ns() - started_ns) // 1000

    async def _run_prefill(self, session: DraftSession) -> None:
        with self._stream.working(), self._trace.timed("prefill"):
            await self._engine.run(session.prefill())

    async def _reserve(self, session: DraftSession, drafter: str) -> None:
        """Places in the draft model's cache, unless the session has them or needs none."""
        if session.needs_sequence(drafter):
            # room for branches is an extra: a cache that is too small for it drafts none, or fewer
            capacity = self._engine.stats().num_blocks * self._engine.block_size
            length = max(session.reserved_length, min(session.ahead_length, capacity))
            self._sequence = session.sequence = await self._engine.open_sequence(length, tenant=session.tenant)

    def _free(self) -> None:
        self._session = None
        for task in (self._prefill, self._ahead):
            if task is not None:
                task.cancel()
                task.add_done_callback(_ignore)
        self._prefill = self._ahead = None
        if self._sequence is not None:
            self._engine.close_sequence(self._sequence)
            self._sequence = None


def _after(chain: Proposal, num_told: int) -> Proposal:
    """The chain without its first drafts, which were told as they were drawn."""
    if not num_told:
        return chain
    return dataclasses.replace(
        chain, token_ids=chain.token_ids[num_told:], q=chain.q[num_told:], confidences=chain.confidences[num_told:]
    )


def _price(message: draft_pb2.DraftAdvance) -> Price | None:
    """Raises InvalidArgument on numbers that are no prices."""
    if not message.HasField("price_tokens_per_ms"):
        return None
    for name in ("price_tokens_per_ms", "row_price_tokens"):
        value = getattr(message, name)
        if not 0 <= value < float("inf"):
            raise InvalidArgument(f"advance.{name} is {value}, must be 0 or more, and finite", field=f"advance.{name}")
    expected = tuple(byte / 255 for byte in message.expected_acceptances)
    return Price(message.price_tokens_per_ms, message.row_price_tokens, expected)


def _refuse_features(field: str, features: str | bytes) -> None:
    if features:
        raise InvalidArgument(f"{field}: the drafters of this worker read no states: leave it empty", field=field)


def _ignore(task: asyncio.Task[None]) -> None:
    """Nobody will ask for its failure once its session is gone; asyncio would log it as forgotten."""
    if not task.cancelled():
        task.exception()

"""One `Generate` from its resolved request to its last event: admission, a stream per choice, one end for all."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from coordinator.admission import Admission
from coordinator.draft_losses import CloseDeaths
from coordinator.drafting import DraftSide
from coordinator.draining import HandedOver, HandOver
from coordinator.live_streams import LiveStream, LiveStreams
from coordinator.metrics import CoordinatorMetrics
from coordinator.outbox import Outbox
from coordinator.pool import SessionPool
from coordinator.records import Records
from coordinator.request import AUTO, ResolvedRequest
from coordinator.round_loop import RoundLoop
from coordinator.standby import Standby
from coordinator.stream import Stream
from coordinator.stream_trace import StreamTrace
from coordinator.suspicion import RequestSuspicion
from coordinator.text.tokenizer import TextCodec
from coordinator.traces import KeepStep, Traces, for_each
from coordinator.verifying import TargetSide
from outrider.errors import DeadlineExceeded
from outrider.results import Started
from outrider.serving.events import ServerEvent
from outrider.settings import CoordinatorSettings


@dataclass(frozen=True, slots=True)
class _Losses:
    """Of workers, which the streams of one request share: they may be its doing."""

    suspicion: RequestSuspicion = field(default_factory=RequestSuspicion)
    draft_deaths: CloseDeaths = field(default_factory=CloseDeaths)


class Generation:
    """Runs requests. Closing the iterator that `events` gives frees both sides of every stream of the request."""

    def __init__(
        self, pool: SessionPool, admission: Admission, metrics: CoordinatorMetrics, settings: CoordinatorSettings
    ) -> None:
        self._pool = pool
        self._metrics = metrics
        self._admission = admission
        self._settings = settings
        self.traces = Traces(settings.trace_steps)
        self.records = Records(settings.record_streams, settings.record_bytes)
        self.live = LiveStreams()
        self.hand_over = HandOver()

    async def events(
        self,
        request: ResolvedRequest,
        codec: TextCodec,
        *,
        arrived: float,
        time_left_s: float | None,
        on_streams: Callable[[Sequence[Stream]], object],
    ) -> AsyncGenerator[ServerEvent, None]:
        """`Started` at once, then what the streams give. Raises the first error of any stream, after ending the others;
        DeadlineExceeded after `time_left_s`, or after the server's longest time for a request. on_streams: is told them
        before they run."""
        limit_s = (
            self._settings.max_request_s if time_left_s is None else min(time_left_s, self._settings.max_request_s)
        )
        deadline = asyncio.get_running_loop().time() + limit_s
        streams = [
            Stream(request, choice, codec, deadline=deadline, has_client_deadline=time_left_s is not None)
            for choice in range(request.num_choices)
        ]
        on_streams(streams)
        ticket = self._admission.enter(
            request.num_choices,
            request.priority,
            tenant=request.tenant,
            model=request.model,
            num_tokens=request.num_cached_tokens,
            time_left_s=limit_s,
        )
        tasks: list[asyncio.Task[None]] = []
        watching = contextlib.ExitStack()
        live = watching.enter_context(self.live.watching(streams, arrived))
        try:
            # one that was refused leaves what is kept of others alone
            self.records.begin(request, streams)
            keep_step = self.traces.begin(request.tenant, request.request_id, request.num_choices)
            yield Started(
                request_id=request.request_id,
                seed=request.sampling.seed,
                acceptance=request.sampling.acceptance,
                prompt_hash=request.prompt_hash,
                num_prompt_tokens=len(request.prompt_ids),
                model=request.model,
                num_speculative_tokens=request.num_speculative_tokens,
                max_speculative_tokens=request.max_draft_tokens,
                drafter=request.drafter or AUTO,
                model_fingerprint=request.model_fingerprint,
                max_tokens=request.stopping.max_tokens,
            )
            outbox = Outbox(
                self._settings.emit_buffer_chunks,
                max_pause_s=self._settings.max_client_pause_s,
                on_end=partial(self._admission.finish, ticket),
                on_pause=self._admission.pause,
            )
            async with asyncio.timeout_at(deadline):
                await self.hand_over.unless_begun(ticket.admitted)
            losses = _Losses()
            tasks = [asyncio.create_task(self._run(one, outbox, arrived, deadline, keep_step, losses)) for one in live]
            for stream in streams:
                outbox.join(stream.choice)
            with self.hand_over.covering(outbox):
                async for event in outbox.events():
                    yield event
            if outbox.was_cut_off:
                raise HandedOver
            await asyncio.gather(*tasks)
        except TimeoutError:
            raise DeadlineExceeded(f"the request waited {limit_s:g} s for a place to run") from None
        finally:
            watching.close()
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                self._admission.leave(ticket)

    async def _run(
        self,
        live: LiveStream,
        outbox: Outbox,
        arrived: float,
        deadline: float,
        keep_step: KeepStep,
        losses: _Losses,
    ) -> None:
        """One stream. Its failure closes the outbox, so that the request ends with it."""
        stream, live.has_place = live.stream, True
        stream.statistics.queue_ms = 1000 * (time.perf_counter() - arrived)
        meter, trace = self._metrics.watch(stream, arrived), StreamTrace(stream)
        stream.keeps_steps |= self.traces.is_on or bool(meter.keeps or trace.keeps)
        standby = Standby(stream, self._pool) if self._settings.warm_standby else None
        target = TargetSide(stream, self._pool, self._settings.target_wait_s, standby, losses.suspicion.of_stream())
        elsewhere = self._pool.not_of_draft_workers(stream)
        draft = DraftSide(stream, self._pool, self._settings.max_q_entries, elsewhere, losses.draft_deaths)
        local = self._pool.local_drafts(stream)
        keep = for_each(keep_step, live.keep, *meter.keeps, *trace.keeps)
        loop = RoundLoop(stream, target, draft, local, self._pool.guarded_policy(stream), outbox, arrived, keep)
        try:
            async with asyncio.timeout_at(deadline):
                if stream.choice and stream.request.prompt_logprobs is not None:
                    await outbox.prompt_told.wait()
                await loop.run()
        except TimeoutError:
            outbox.fail()
            raise DeadlineExceeded("the request's time is up before its text is complete") from None
        except HandedOver:
            raise  # its chunks are still sent
        except BaseException:
            outbox.fail()
            raise
        finally:
            # no await: a second cancellation must find nothing left to do
            draft.close()
            local.close()
            target.close()
            if stream.recorder is not None:
                stream.recorder.ended(stream.finish, stream.matched_stop)
            meter.ended()
            trace.ended()
            outbox.leave()

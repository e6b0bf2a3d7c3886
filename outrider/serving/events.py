"""What a stream tells its client, as wire messages."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.results import Complete, Speculation, Started, Step
from outrider.sampling.params import Origin
from outrider.server_info import StreamStatus
from outrider.serving.same_names import write
from outrider.serving.session_calls import SealedPromptLogprobs
from outrider.serving.token_logprobs import TokenLogprobs
from outrider.v1 import common_pb2, generation_pb2


@dataclass(frozen=True, slots=True)
class SealedChunk:
    """As `Chunk`. `logprobs` go to the client as they came."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    origins: tuple[Origin, ...] = ()
    logprobs: TokenLogprobs | None = None
    step: Step | None = None
    num_draft_tokens: int = 0


ServerEvent = Started | SealedPromptLogprobs | SealedChunk | Complete

_FINISH = {"stop": common_pb2.FINISH_REASON_STOP, "length": common_pb2.FINISH_REASON_LENGTH}


def event_to_pb(event: ServerEvent) -> generation_pb2.GenerateResponse:
    match event:
        case Started():
            return generation_pb2.GenerateResponse(started=write(generation_pb2.GenerateStarted, event))
        case SealedPromptLogprobs():
            return generation_pb2.GenerateResponse(prompt_logprobs=event.message)
        case SealedChunk():
            return generation_pb2.GenerateResponse(chunk=_chunk(event))
        case Complete():
            return generation_pb2.GenerateResponse(complete=_complete(event))


def _chunk(chunk: SealedChunk) -> generation_pb2.GenerateChunk:
    message = generation_pb2.GenerateChunk(
        index=chunk.index,
        token_ids=chunk.token_ids,
        text=chunk.text,
        origins=chunk.origins,  # type: ignore[arg-type]
        step=step_to_pb(chunk.step) if chunk.step is not None else None,
        num_draft_tokens=chunk.num_draft_tokens,
    )
    if chunk.logprobs is not None:
        message.logprobs.MergeFromString(chunk.logprobs.packed)
    return message


def step_to_pb(step: Step) -> generation_pb2.StepRecord:
    return write(generation_pb2.StepRecord, step)


def _complete(complete: Complete) -> generation_pb2.GenerateComplete:
    message = generation_pb2.GenerateComplete(
        index=complete.index,
        finish_reason=_FINISH[complete.finish_reason],
        usage=write(generation_pb2.Usage, complete.usage),
        timings=write(generation_pb2.RequestTimings, complete.timings),
        speculation=speculation_to_pb(complete.speculation),
    )
    if isinstance(complete.matched_stop, str):
        message.matched_stop_string = complete.matched_stop
    elif complete.matched_stop is not None:
        message.matched_stop_token_id = complete.matched_stop
    return message


def stream_status_to_pb(status: StreamStatus) -> generation_pb2.StreamStatus:
    return write(
        generation_pb2.StreamStatus,
        status,
        timings=write(generation_pb2.RequestTimings, status.timings),
        speculation=speculation_to_pb(status.speculation),
        last_step=step_to_pb(status.last_step) if status.last_step is not None else None,
    )


def speculation_to_pb(speculation: Speculation) -> generation_pb2.SpeculationStats:
    return write(
        generation_pb2.SpeculationStats,
        speculation,
        drafter_uses=[write(generation_pb2.DrafterUse, use) for use in speculation.drafter_uses],
        drafter_outlooks=[write(generation_pb2.DrafterOutlook, outlook) for outlook in speculation.drafter_outlooks],
    )

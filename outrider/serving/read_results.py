"""Typed results out of the public service's messages: a client's counterpart of `outrider.serving.events`."""

from __future__ import annotations

import enum
from typing import Any, TypeVar

from outrider.errors import Internal, OutriderError
from outrider.results import (
    Chunk,
    Complete,
    DrafterOutlook,
    DrafterUse,
    Event,
    GammaCause,
    Logprobs,
    PromptLogprobs,
    Speculation,
    Started,
    Step,
    Timings,
    Usage,
)
from outrider.sampling.params import AcceptanceRule, Origin
from outrider.server_info import StreamState, StreamStatus
from outrider.serving.same_names import read
from outrider.serving.token_logprobs import count
from outrider.v1 import common_pb2, generation_pb2

E = TypeVar("E", bound=enum.IntEnum)
UNREADABLE = "UNREADABLE"
"""Reason of an answer that this client cannot read: its server is broken, or something between them is."""


def read_speculation(message: generation_pb2.SpeculationStats) -> Speculation:
    uses = tuple(read(DrafterUse, use) for use in message.drafter_uses)
    outlooks = tuple(read(DrafterOutlook, outlook) for outlook in message.drafter_outlooks)
    return read(Speculation, message, drafter_uses=uses, drafter_outlooks=outlooks)


def read_step(message: generation_pb2.StepRecord) -> Step:
    return read(Step, message, cause=known(GammaCause, message.cause, GammaCause.UNSPECIFIED))


def read_stream_status(message: generation_pb2.StreamStatus) -> StreamStatus:
    return read(
        StreamStatus,
        message,
        state=known(StreamState, message.state, StreamState.UNSPECIFIED),
        timings=read(Timings, message.timings),
        speculation=read_speculation(message.speculation),
        last_step=read_step(message.last_step) if message.HasField("last_step") else None,
    )


def known(cls: type[E], number: int, otherwise: E) -> E:
    """A value of the wire's enum, which newer services may have more of."""
    try:
        return cls(number)
    except ValueError:
        return otherwise


def name_of(wire_enum: Any, number: int, prefix: str) -> str:
    """In lower case and without the wire's prefix; the number's own digits for one that this version does not know."""
    name: str = wire_enum.Name(number) if number in wire_enum.values() else str(number)
    return name.removeprefix(prefix).lower()


def no_message() -> OutriderError:
    """Of an answer whose bytes gRPC could not read."""
    return Internal("the server sent bytes that are no message of this version", reason=UNREADABLE)


def _rule(number: int) -> AcceptanceRule:
    try:
        return AcceptanceRule(number)
    except ValueError:
        raise OutriderError(
            f"the server decides by rule {number}, which this client does not know: update it"
        ) from None


def read_event(response: generation_pb2.GenerateResponse | None) -> Event | None:
    """None for an event that this version does not know: it was not asked for, and older clients go on without it.

    Raises OutriderError on what cannot be read: bytes that are no message (None, as gRPC gives them), an acceptance
    rule that this version does not know, logprobs that are not as many as they say.
    """
    if response is None:
        raise no_message()
    match response.WhichOneof("event"):
        case "started":
            return read(Started, response.started, acceptance=_rule(response.started.acceptance))
        case "prompt_logprobs":
            told = response.prompt_logprobs
            return PromptLogprobs(told.first_position, _logprobs(told.logprobs))
        case "chunk":
            chunk = response.chunk
            return read(
                Chunk,
                chunk,
                origins=tuple(known(Origin, origin, Origin.PLAIN) for origin in chunk.origins),
                logprobs=_logprobs(chunk.logprobs) if chunk.HasField("logprobs") else None,
                step=read_step(chunk.step) if chunk.HasField("step") else None,
            )
        case "complete":
            complete = response.complete
            matched = complete.WhichOneof("matched_stop")
            return read(
                Complete,
                complete,
                finish_reason=name_of(common_pb2.FinishReason, complete.finish_reason, "FINISH_REASON_"),
                matched_stop=getattr(complete, matched) if matched else None,
                usage=read(Usage, complete.usage),
                timings=read(Timings, complete.timings),
                speculation=read_speculation(complete.speculation),
                num_resumes=0,
            )
    return None


def _logprobs(message: common_pb2.TokenLogprobs) -> Logprobs:
    try:
        count(message)
    except ValueError as error:
        raise Internal(f"the server sent {error}", reason=UNREADABLE) from None
    width = message.num_top
    pairs = list(zip(message.top_ids, message.top_logprobs, strict=True))
    rows = range(len(message.token_logprobs)) if width else ()
    return Logprobs(tuple(message.token_logprobs), tuple(tuple(pairs[i * width : (i + 1) * width]) for i in rows))

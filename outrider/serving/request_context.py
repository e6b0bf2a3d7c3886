"""Which request the work at hand is for: the ids that logs tell, and that calls to workers carry in their metadata.

Kept in a context variable, which tasks and threads begun for a call inherit. Traces are told by W3C's `traceparent`.
"""

from __future__ import annotations

import contextvars
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

REQUEST_ID = "x-request-id"
TRACEPARENT = "traceparent"
MAX_TRACEPARENT_CHARS = 512
MAX_REQUEST_ID_CHARS = 128
REQUEST_ID_FORM = re.compile(rf"[A-Za-z0-9._:-]{{1,{MAX_REQUEST_ID_CHARS}}}", re.ASCII)
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span that others are to hang on: 32 and 16 hexadecimal digits."""

    trace_id: str
    span_id: str
    is_sampled: bool

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}"


@dataclass(frozen=True, slots=True)
class RequestContext:
    """request_id: empty where nobody told it. trace: None outside of any trace. recording: of the span that `trace`
    names, where it is recorded in this process."""

    request_id: str = ""
    trace: TraceContext | None = None
    recording: Any = None


NONE = RequestContext()
CURRENT: contextvars.ContextVar[RequestContext] = contextvars.ContextVar("outrider_request", default=NONE)


def received(metadata: Iterable[tuple[str, Any]] | None) -> RequestContext:
    """What a call's metadata tells. What is malformed counts as not told: it must not cost anybody the call."""
    request_id, trace = "", None
    for key, value in metadata or ():
        if key == REQUEST_ID and isinstance(value, str) and REQUEST_ID_FORM.fullmatch(value):
            request_id = value
        elif key == TRACEPARENT and isinstance(value, str):
            trace = read_traceparent(value)
    return RequestContext(request_id, trace)


def to_send() -> tuple[tuple[str, str], ...]:
    """Metadata of a call that is made for the request at hand."""
    current = CURRENT.get()
    metadata = ((REQUEST_ID, current.request_id),) if current.request_id else ()
    return (*metadata, (TRACEPARENT, current.trace.traceparent)) if current.trace is not None else metadata


def read_traceparent(value: str) -> TraceContext | None:
    """None for what is none. Later versions may add fields at its end."""
    match = _TRACEPARENT.fullmatch(value) if len(value) <= MAX_TRACEPARENT_CHARS else None
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & 1))

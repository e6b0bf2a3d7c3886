"""The client's span of a call, in the traces of the program that calls: only where that program uses OpenTelemetry."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

from outrider.serving.request_context import TRACEPARENT, TraceContext

API = "opentelemetry.trace"


@contextlib.contextmanager
def client_span(method: str, metadata: Sequence[tuple[str, str]]) -> Iterator[tuple[tuple[str, str], ...]]:
    """Yields the `traceparent` of a span that lasts as long as the block; nothing where `metadata` has one already, or
    the program has not imported OpenTelemetry. The span goes where the program's others do."""
    api = sys.modules.get(API)
    if api is None or any(key == TRACEPARENT for key, _ in metadata):
        yield ()
        return
    # not made the current one: the block is left and entered again between events, in whatever context
    span = api.get_tracer("outrider").start_span(method, kind=api.SpanKind.CLIENT)
    try:
        found = span.get_span_context()
        if not found.is_valid:
            yield ()
            return
        context = TraceContext(f"{found.trace_id:032x}", f"{found.span_id:016x}", found.trace_flags.sampled)
        yield ((TRACEPARENT, context.traceparent),)
    except Exception as error:
        status = getattr(error, "status", type(error).__name__)  # no words: they may quote the request
        span.set_status(api.StatusCode.ERROR, status)
        raise
    finally:
        span.end()

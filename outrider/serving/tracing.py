"""OpenTelemetry spans, made from times that messages carry anyway. OpenTelemetry is imported where an endpoint is set.

What happens on the way of a token is kept as plain data (`Part`). Spans are made of it once the whole is over, on a
thread of its own, and sent in batches by another. A request that is not sampled makes no object at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any, NamedTuple

from outrider.errors import FailedPrecondition, InvalidArgument
from outrider.serving.request_context import TraceContext
from outrider.settings import ServerSettings

log = logging.getLogger(__name__)

MAX_PARTS = 4096
"""Of one recording, its parts' parts not counted; further ones are counted and left out."""
MAX_QUEUED_SPANS = 65_536
EXPORT_INTERVAL_MS = 1000
EXPORT_TIMEOUT_S = 5.0
FLUSH_S = 5.0
"""What is left when a server stops has so long to be sent."""

Attributes = Mapping[str, str | int | float | bool]


class Part(NamedTuple):
    """A span within a recording. Times in ns since the epoch."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Attributes = {}  # noqa: RUF012  (never changed)
    parts: Sequence[Part] = ()


class Recording:
    """A span that has begun, and what happened within it."""

    def __init__(self, tracing: OtlpTracing, span: Any, start_ns: int, parent: Recording | None = None) -> None:
        self.start_ns = start_ns
        self.children_ended_ns = 0
        """When the last of those within it that have ended did; 0: none has."""
        self._tracing = tracing
        self._span = span
        self._parent = parent
        self._parts: list[Part] = []
        self._num_left_out = 0
        found = span.get_span_context()
        self.context = TraceContext(f"{found.trace_id:032x}", f"{found.span_id:016x}", is_sampled=True)

    def child(self, name: str, start_ns: int) -> Recording:
        """A span within this one, that others can hang on."""
        span = self._tracing.start_span(name, self.context, "internal", start_ns)
        return Recording(self._tracing, span, start_ns, self)

    def add(self, part: Part) -> None:
        """Something that is over."""
        if len(self._parts) < MAX_PARTS:
            self._parts.append(part)
        else:
            self._num_left_out += 1

    def end(self, attributes: Attributes | None = None, error: str = "", end_ns: int | None = None) -> None:
        """error: the status that it ended with, empty: none. No text of any request belongs here."""
        ended = {**(attributes or {})}
        if self._num_left_out:
            ended["outrider.num_parts_left_out"] = self._num_left_out
        end_ns = time.time_ns() if end_ns is None else end_ns
        if self._parent is not None:
            self._parent.children_ended_ns = max(self._parent.children_ended_ns, end_ns)
        self._tracing.finish(self._span, self._parts, ended, error, end_ns)


class Tracing:
    """Nobody looks: nothing is recorded."""

    def begin(
        self, name: str, parent: TraceContext | None, *, kind: str = "server", start_ns: int | None = None
    ) -> Recording | None:
        """A span of this process, if its trace is sampled: as whoever called decided, or by the ratio where the trace
        begins here. kind: server or internal. None: it is not recorded."""
        return None


UNTRACED = Tracing()


class OtlpTracing(Tracing):
    """Sends spans to a collector that speaks OTLP over gRPC."""

    def __init__(self, endpoint: str, sample_ratio: float, service_name: str) -> None:
        """Raises InvalidArgument for an endpoint that is none, FailedPrecondition where OpenTelemetry is missing."""
        if not endpoint.startswith(("http://", "https://")):
            raise InvalidArgument(
                f"otlp_endpoint is {endpoint[:80]!r}, must be http://host:port of a collector's gRPC port, or https://",
                field="otlp_endpoint",
            )
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise FailedPrecondition(
                "otlp_endpoint is set, but OpenTelemetry is not installed: pip install 'outrider[tracing]'",
                field="otlp_endpoint",
            ) from None
        self._trace = trace
        self._sample_ratio = sample_ratio
        self._makers = ThreadPoolExecutor(1, thread_name_prefix="tracing")
        self._provider = TracerProvider(
            # whether to sample is decided in `begin`
            resource=Resource.create({"service.name": service_name, "service.version": version("outrider")}),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(
            endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=EXPORT_TIMEOUT_S
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=MAX_QUEUED_SPANS, schedule_delay_millis=EXPORT_INTERVAL_MS)
        )
        self._tracer = self._provider.get_tracer("outrider", version("outrider"))

    def begin(
        self, name: str, parent: TraceContext | None, *, kind: str = "server", start_ns: int | None = None
    ) -> Recording | None:
        if not (random.random() < self._sample_ratio if parent is None else parent.is_sampled):
            return None
        start_ns = time.time_ns() if start_ns is None else start_ns
        return Recording(self, self.start_span(name, parent, kind, start_ns), start_ns)

    def start_span(self, name: str, parent: TraceContext | None, kind: str, start_ns: int) -> Any:
        trace = self._trace
        context = trace.set_span_in_context(trace.INVALID_SPAN)
        if parent is not None:
            known = trace.SpanContext(
                int(parent.trace_id, 16), int(parent.span_id, 16), is_remote=True, trace_flags=trace.TraceFlags(1)
            )
            context = trace.set_span_in_context(trace.NonRecordingSpan(known))
        return self._tracer.start_span(name, context, kind=trace.SpanKind[kind.upper()], start_time=start_ns)

    def finish(self, span: Any, parts: Sequence[Part], attributes: Attributes, error: str, end_ns: int) -> None:
        with contextlib.suppress(RuntimeError):  # the process ends: nobody waits for its last spans
            self._makers.submit(self._finish, span, parts, attributes, error, end_ns)

    def _finish(self, span: Any, parts: Sequence[Part], attributes: Attributes, error: str, end_ns: int) -> None:
        self._make(span, parts)
        span.set_attributes(attributes)
        if error:
            span.set_status(self._trace.StatusCode.ERROR, error)
        span.end(end_ns)

    def _make(self, parent: Any, parts: Sequence[Part]) -> None:
        context = self._trace.set_span_in_context(parent)
        for part in parts:
            span = self._tracer.start_span(
                part.name, context, attributes=dict(part.attributes), start_time=part.start_ns
            )
            self._make(span, part.parts)
            span.end(part.end_ns)

    def close(self) -> None:
        """Sends what is left. Blocks: not for the event loop."""
        self._makers.shutdown()
        self._provider.shutdown()


@contextlib.asynccontextmanager
async def tracing(settings: ServerSettings, role: str, sample_ratio: float = 0.0) -> AsyncIterator[Tracing]:
    """Of one server, until the block ends. sample_ratio: of calls that no caller has decided about. Raises as
    `OtlpTracing`."""
    if not settings.otlp_endpoint:
        yield UNTRACED
        return
    traced = await asyncio.to_thread(OtlpTracing, settings.otlp_endpoint, sample_ratio, f"outrider-{role}")
    log.info("traces go to %s", settings.otlp_endpoint)
    try:
        yield traced
    finally:
        # a thread that nobody has to wait for: a collector that hangs must not keep the process
        closing = threading.Thread(target=traced.close, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, FLUSH_S)

"""Traces as a collector gets them, over OTLP from real services: joined from client to both workers, and complete."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import grpc.aio
import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from stack import in_process_stack, listening, start

import coordinator.server
from coordinator.round_parts import PARTS
from outrider import Client
from outrider.errors import InvalidArgument
from outrider.serving.json_logs import JsonFormatter
from outrider.settings import CoordinatorSettings

TOY = "toy:vocab=16,seed=1"
PROMPT = [1, 2, 3]
COORDINATOR, DRAFT, TARGET = "outrider-coordinator", "outrider-draft-worker", "outrider-target-worker"
GENERATE = "outrider.v1.GenerationService/Generate"


class Span:
    """As a collector got it."""

    def __init__(self, service: str, span: Any) -> None:
        self.service = service
        self.name = span.name
        self.trace_id, self.id, self.parent = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
        self.start_ns, self.end_ns = span.start_time_unix_nano, span.end_time_unix_nano
        self.attributes = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
        self.status = span.status.message

    @property
    def ns(self) -> int:
        return self.end_ns - self.start_ns


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    async def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            (name,) = (a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
            self.spans += [Span(name, span) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, service: str, name: str) -> list[Span]:
        return [span for span in self.spans if (span.service, span.name) == (service, name)]

    def children(self, parent: Span) -> list[Span]:
        return sorted((span for span in self.spans if span.parent == parent.id), key=lambda span: span.start_ns)


@asynccontextmanager
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    """One that runs, and its address as the settings want it."""
    found, server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(found, server)
    async with listening(server) as address:
        yield found, f"http://{address}"


@asynccontextmanager
async def traced_stack(endpoint: str, ratio: float, **more: Any) -> AsyncIterator[Any]:
    """Stopping the services sends what is left."""
    sends = {"otlp_endpoint": endpoint}
    own = sends | {"trace_sample_ratio": ratio}
    async with in_process_stack(TOY, f"{TOY},agreement=0.8", coordinator=own, worker=sends, **more) as services:
        yield services


async def test_one_trace_from_the_client_to_both_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    own = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(own))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    async with collector() as (seen, endpoint):
        async with traced_stack(endpoint, 0.0) as services:  # whoever calls has decided
            async with Client(services.address, timeout_s=30) as client:
                with provider.get_tracer("of-a-user").start_as_current_span("what-the-user-does") as outer:
                    answer = await client.complete(
                        PROMPT, max_tokens=20, ignore_eos=True, num_speculative_tokens=3, request_id="own-1"
                    )
    assert answer.speculation.num_draft_tokens > 0, "inconclusive: nothing was drafted"

    (called,) = (span for span in own.get_finished_spans() if span.name == GENERATE)
    assert called.parent is not None
    assert called.parent.span_id == outer.get_span_context().span_id
    assert {span.trace_id for span in seen.spans} == {f"{called.context.trace_id:032x}"}
    (served,) = seen.named(COORDINATOR, GENERATE)
    assert served.parent == f"{called.context.span_id:016x}"
    assert served.attributes["outrider.request_id"] == "own-1"
    assert served.attributes["outrider.num_completion_tokens"] == 20
    (stream,) = seen.named(COORDINATOR, "stream")
    assert stream.parent == served.id
    (drafting,) = seen.named(DRAFT, "outrider.v1.DraftService/Session")
    (verifying,) = seen.named(TARGET, "outrider.v1.TargetService/Session")
    assert drafting.parent == verifying.parent == stream.id

    # the coordinator's parts follow one another and leave nothing out
    queue, *rounds, deliver = (span for span in seen.children(stream) if span.service == COORDINATOR)
    assert (queue.name, deliver.name, {span.name for span in rounds}) == ("queue", "deliver", {"round"})
    assert sum(span.attributes["outrider.num_tokens"] for span in rounds) == 20
    assert sum(span.attributes["outrider.num_draft_tokens"] for span in rounds) == answer.speculation.num_draft_tokens
    parts = [part for span in rounds for part in seen.children(span)]
    assert {part.name for part in parts} <= set(PARTS)
    assert {"draft_compute", "verify_compute", "prefill_compute", "verify_network", "emit"} <= {p.name for p in parts}
    pieces = [queue, *parts, deliver]
    for before, after in pairwise(pieces):
        assert abs(after.start_ns - before.end_ns) <= 2
    assert 0.95 * stream.ns <= sum(span.ns for span in pieces) <= 1.05 * stream.ns
    assert served.start_ns <= stream.start_ns <= stream.end_ns <= served.end_ns
    (delivered,) = (span for span in seen.children(served) if span.name == "deliver")
    assert 0.95 * served.ns <= sum(span.ns for span in (*pieces, delivered)) <= 1.05 * served.ns

    # what the workers saw of it is what the coordinator was told
    verifies = [span for span in seen.children(verifying) if span.name in ("prefill", "verify")]
    assert sum(span.attributes["outrider.num_tokens"] for span in verifies) == 20
    for told, parts_of in (("verify_compute", verifies[1:]), ("draft_compute", seen.named(DRAFT, "draft"))):
        computed = sum(c.ns for span in parts_of for c in seen.children(span) if c.name == "compute")
        assert sum(part.ns for part in parts if part.name == told) <= computed + 1000 * len(parts_of)


async def test_a_trace_begins_here_where_no_caller_has_one_and_each_choice_has_its_stream() -> None:
    async with collector() as (seen, endpoint):
        async with traced_stack(endpoint, 1.0) as services:
            async with Client(services.address, timeout_s=30) as client:
                with pytest.raises(InvalidArgument):
                    await client.complete(PROMPT, max_tokens=0)
                async for _ in client.generate(PROMPT, max_tokens=12, ignore_eos=True, n=2):
                    pass
                async for _ in client.generate(PROMPT, max_tokens=1000, ignore_eos=True, num_speculative_tokens=0):
                    break  # the client leaves
    refused, whole, left = sorted(seen.named(COORDINATOR, GENERATE), key=lambda span: span.start_ns)
    assert [refused.parent, whole.parent, left.parent] == ["", "", ""]
    assert (refused.status, whole.status, left.status) == ("INVALID_ARGUMENT", "", "CANCELLED")
    assert seen.children(refused) == []
    streams = [span for span in seen.children(whole) if span.name == "stream"]
    assert {span.attributes["outrider.choice"] for span in streams} == {0, 1}
    for one in streams:
        assert Counter(span.service for span in seen.children(one) if span.name.endswith("Session")) == {
            DRAFT: 1, TARGET: 1
        }  # fmt: skip
    (cut,) = (span for span in seen.children(left) if span.name == "stream")
    assert cut.attributes["gen_ai.usage.output_tokens"] < 1000


async def test_what_is_not_sampled_is_recorded_nowhere() -> None:
    async with collector() as (seen, endpoint):
        async with traced_stack(endpoint, 0.0) as services:
            async with Client(services.address, timeout_s=30) as client:
                await client.complete(PROMPT, max_tokens=8)
        async with traced_stack(endpoint, 1.0) as services:
            unsampled = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"}
            async with Client(services.address, timeout_s=30, metadata=unsampled) as client:
                await client.complete(PROMPT, max_tokens=8)
    assert seen.spans == []


async def test_a_collector_that_is_away_costs_no_request() -> None:
    async with traced_stack("http://127.0.0.1:9", 1.0) as services:
        async with Client(services.address, timeout_s=30) as client:
            assert len((await client.complete(PROMPT, max_tokens=8, ignore_eos=True)).token_ids) == 8


async def test_what_is_no_endpoint_is_refused_by_name() -> None:
    settings = CoordinatorSettings(port=0, otlp_endpoint="collector:4317", drain_grace_s=0)
    with pytest.raises(InvalidArgument, match="otlp_endpoint is 'collector:4317', must be http://host:port"):
        await start(coordinator.server.serve, settings)


HIDDEN = """
import asyncio, sys
if {hides}:
    sys.modules["opentelemetry"] = None
import coordinator.server, target_worker.server, draft_worker.server
from outrider.errors import OutriderError
from outrider.settings import CoordinatorSettings
stop = asyncio.Event()
settings = CoordinatorSettings(port=0, drain_grace_s=0, otlp_endpoint={endpoint!r})
try:
    asyncio.run(coordinator.server.serve(settings, stop=stop, on_ready=lambda port: stop.set()))
except OutriderError as error:
    print(error.message)
print([name for name in sys.modules if name.startswith("opentelemetry.")])
"""


def test_opentelemetry_is_imported_only_when_asked_for_and_its_lack_names_the_extra() -> None:
    def run(**values: Any) -> str:
        program = HIDDEN.format(**values)
        return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    assert run(hides=False, endpoint="") == "[]\n"
    told = run(hides=True, endpoint="http://127.0.0.1:9")
    assert "otlp_endpoint is set, but OpenTelemetry is not installed: pip install 'outrider[tracing]'" in told


async def test_logs_tell_ids_and_never_what_was_asked_or_answered() -> None:
    """All levels of all services, in a good request and in bad ones."""
    lines: list[dict[str, Any]] = []
    handler = logging.Handler()
    handler.setFormatter(JsonFormatter())
    handler.emit = lambda record: lines.append(json.loads(handler.format(record)))  # type: ignore[method-assign]
    packages = [logging.getLogger(name) for name in ("coordinator", "draft_worker", "target_worker", "outrider")]
    verbose = {"log_level": "debug"}
    secret = "#$%&#$"
    traced = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"}
    levels = [package.level for package in packages]
    try:
        async with in_process_stack(TOY, TOY, coordinator=verbose, worker=verbose) as services:
            for package in packages:
                package.addHandler(handler)
            async with Client(services.address, timeout_s=30, metadata=traced) as client:
                answer = await client.complete(secret, max_tokens=30, request_id="good-1", ignore_eos=True)
                for options in ({"max_tokens": 0}, {"stop": ["x" * 300]}, {"model": secret}):
                    with pytest.raises(Exception, match=r"\w"):
                        await client.complete(secret, request_id="bad-1", **options)
    finally:
        for package, level in zip(packages, levels, strict=True):
            package.removeHandler(handler)
            package.setLevel(level)
    written = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    assert secret not in written
    assert answer.text[:12] not in written
    (good,) = (line for line in lines if line["logger"] == "coordinator.journal" and line["request_id"] == "good-1")
    assert good["trace_id"] == "0af7651916cd43dd8448eb211c80319c"
    assert (good["status"], good["num_completion_tokens"], good["finish_reasons"]) == ("OK", 30, "length")
    bad = [line for line in lines if line["logger"] == "coordinator.journal" and line["request_id"] == "bad-1"]
    assert Counter(line["status"] for line in bad) == {"INVALID_ARGUMENT": 2, "NOT_FOUND": 1}

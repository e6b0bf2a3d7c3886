"""The coordinator's unary calls to a worker: description and health."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.errors import Internal
from outrider.lm.interface import ModelDescription
from outrider.lm.timing import PassTiming
from outrider.server_info import CacheCounters, Capacity, TargetDrafter
from outrider.serving.convert_worker import (
    cache_counters_from_pb,
    description_from_pb,
    target_drafter_from_pb,
    timing_from_pb,
)
from outrider.serving.same_names import read, write
from outrider.serving.status import from_rpc_error
from outrider.serving.told_numbers import drop_bad_hints, refuse_unusable
from outrider.v1 import worker_pb2, worker_pb2_grpc

Metadata = Sequence[tuple[str, str]]
DRAFT = "draft"
TARGET = "target"
_ROLES: dict[Any, str] = {worker_pb2.WORKER_ROLE_DRAFT: DRAFT, worker_pb2.WORKER_ROLE_TARGET: TARGET}
_SERVICES = {DRAFT: "outrider.v1.DraftService", TARGET: "outrider.v1.TargetService"}


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """A worker's answer to DescribeWorker. `role` is `draft`, `target`, or empty when it told neither.

    features: states that a target keeps. drafter_features: by drafter of a draft worker, those it drafts from;
    target_fingerprints: of which targets. Empty: of any.
    """

    role: str
    model: ModelDescription
    drafters: tuple[str, ...]
    capacity: Capacity
    incarnation: str
    timings: tuple[PassTiming, ...] = ()
    cache_counters: CacheCounters = field(default_factory=CacheCounters)
    target_drafters: tuple[TargetDrafter, ...] = ()
    features: str = ""
    drafter_features: Mapping[str, str] = field(default_factory=dict)
    max_ahead_branches: int = 0
    target_fingerprints: tuple[str, ...] = ()
    clock_offset_ms: float | None = None
    """How far its clock is ahead of ours, give or take half a round trip; None: not told."""
    versions: Mapping[str, str] = field(default_factory=dict)
    dropped: str = ""
    """Hints that are not here since they cannot be; empty: none."""


async def describe(
    channel: grpc.aio.Channel, *, without_tokenizer: bool, timeout_s: float, metadata: Metadata = ()
) -> WorkerDescription:
    """Raises OutriderError: FailedPrecondition on a worker that cannot be used, for a number that it tells."""
    request, asked_s = worker_pb2.DescribeWorkerRequest(without_tokenizer=without_tokenizer), time.time()
    try:
        answer = await worker_pb2_grpc.WorkerServiceStub(channel).DescribeWorker(  # type: ignore[misc]
            request, timeout=timeout_s, metadata=metadata
        )
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
    told_s = time.time()
    if answer is None:  # gRPC's word for bytes that are no such message
        raise Internal("its description is no message of this version")
    refuse_unusable(answer)
    dropped = drop_bad_hints(answer)
    return WorkerDescription(
        role=_ROLES.get(answer.role, ""),
        model=description_from_pb(answer),
        drafters=tuple(answer.drafters),
        capacity=read(Capacity, answer.capacity),
        incarnation=answer.incarnation,
        timings=tuple(timing_from_pb(timing) for timing in answer.timings),
        cache_counters=cache_counters_from_pb(answer.cache_counters),
        target_drafters=tuple(target_drafter_from_pb(drafter) for drafter in answer.target_drafters),
        features=answer.features,
        drafter_features=dict(answer.drafter_features),
        max_ahead_branches=answer.max_ahead_branches,
        target_fingerprints=tuple(answer.target_fingerprints),
        clock_offset_ms=1000 * (answer.unix_time_s - (asked_s + told_s) / 2) if answer.unix_time_s else None,
        versions=dict(answer.versions),
        dropped=dropped,
    )


async def is_serving(channel: grpc.aio.Channel, role: str, *, timeout_s: float) -> bool:
    """Whether the worker takes new sessions. Raises OutriderError when it does not answer."""
    request = health_pb2.HealthCheckRequest(service=_SERVICES.get(role, ""))
    try:
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)  # type: ignore[misc]
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
    return answer.status == health_pb2.HealthCheckResponse.SERVING


async def watch_serving(channel: grpc.aio.Channel, role: str) -> AsyncGenerator[bool, None]:
    """Whether the worker takes new sessions: now, and whenever that changes. Raises OutriderError when it is lost."""
    request = health_pb2.HealthCheckRequest(service=_SERVICES.get(role, ""))
    call = health_pb2_grpc.HealthStub(channel).Watch(request)
    try:
        async for answer in call:
            yield answer.status == health_pb2.HealthCheckResponse.SERVING
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
    finally:
        call.cancel()


def role_from_pb(role: Any) -> str:
    """`draft`, `target`, or empty."""
    return _ROLES.get(role, "")


def role_to_pb(role: str) -> Any:
    return {name: number for number, name in _ROLES.items()}.get(role, worker_pb2.WORKER_ROLE_UNSPECIFIED)


def capacity_to_pb(capacity: Capacity) -> worker_pb2.WorkerCapacity:
    return write(worker_pb2.WorkerCapacity, capacity)

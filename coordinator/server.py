"""The public service and the fleet's registry on one port: protobuf in, protobuf out, everything else elsewhere."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import platform
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from importlib.metadata import version
from typing import Any

from prometheus_client import CollectorRegistry

from coordinator.admission import Admission
from coordinator.checks import check_ids
from coordinator.fleet.directory import WorkerDirectory
from coordinator.fleet.sources import DnsSource, LeaseSource, Source, StaticSource
from coordinator.form_trials import FormTrials
from coordinator.generate import Generation
from coordinator.journal import Journal
from coordinator.lease_families import lease_families
from coordinator.metrics import ROLE, CoordinatorMetrics
from coordinator.model import ServedModel
from coordinator.pool import SessionPool
from coordinator.prompt import chat_ids, text_ids
from coordinator.request import ResolvedRequest, resolve, resolve_request_id
from coordinator.structured_output import FIELD as STRUCTURED_OUTPUT
from coordinator.structured_output import resolve_grammar
from coordinator.tenants import Tenants
from outrider.errors import Internal, InvalidArgument, PermissionDenied
from outrider.sampling.params import AcceptanceRule
from outrider.serving.access import CALLER, Access, FleetGuard, refuse_to_be_open
from outrider.serving.channel import is_host_and_port
from outrider.serving.convert_worker import cache_counters_to_pb, numerics_to_pb
from outrider.serving.events import event_to_pb, speculation_to_pb, step_to_pb, stream_status_to_pb
from outrider.serving.metrics import Reading, metrics_endpoint, new_registry
from outrider.serving.naming import split_names
from outrider.serving.records import add_rounds, kept_to_pb
from outrider.serving.request_context import REQUEST_ID
from outrider.serving.server import Server, configure_logging, running_server, stop_on_signals
from outrider.serving.tls import WORKER_NAMES, certificate_names
from outrider.serving.tracing import Tracing, tracing
from outrider.serving.worker_calls import DRAFT, TARGET, capacity_to_pb, role_from_pb, role_to_pb
from outrider.settings import CoordinatorSettings
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import record_pb2, worker_pb2

log = logging.getLogger(__name__)

GENERATION = pb.DESCRIPTOR.services_by_name["GenerationService"]
FLEET = worker_pb2.DESCRIPTOR.services_by_name["FleetService"]
DEFAULT_MAX_STREAMS = 256
LONG_REQUEST_BYTES = 16_384
"""From here on a request is checked and tokenized off the event loop; so is one with a form, however short."""


class GenerationServicer:
    """`GenerationService` over one directory of workers."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        directory: WorkerDirectory,
        server: Server,
        registry: CollectorRegistry,
        traced: Tracing,
        tenants: Tenants,
        forms: FormTrials,
    ) -> None:
        self._settings = settings
        self._forms = forms
        self._tenants = tenants
        self._directory = directory
        self._server = server
        self._admission = Admission(settings.max_running_requests, settings.max_waiting_requests, directory.limits)
        is_read = settings.metrics_port is not None
        self._metrics = CoordinatorMetrics(registry, self._admission, directory, is_read=is_read)
        self._journal = Journal(self._metrics.failed, traced)
        self._generation = Generation(SessionPool(directory, settings), self._admission, self._metrics, settings)
        self._started = time.monotonic()

    def hand_over(self, within_s: float) -> None:
        """Ends what still runs so that clients go on elsewhere; see `coordinator.draining`."""
        self._generation.hand_over.begin(within_s)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncGenerator[pb.GenerateResponse, None]:
        arrived = time.perf_counter()
        request_id = resolve_request_id(request)
        context.set_trailing_metadata(((REQUEST_ID, request_id),))
        await context.send_initial_metadata(((REQUEST_ID, request_id),))
        tenant = CALLER.get()
        with self._journal.request(request_id, arrived) as entry:
            model = self._directory.model(request.model)
            entry.model = model.name
            with self._admission.arriving(tenant):
                resolved = await self._resolve(request, model, request_id, tenant)
            entry.begins(resolved)
            self._directory.pick_target(model.name, resolved.model_fingerprint)
            time_left_s = context.time_remaining()
            events = self._generation.events(
                resolved, model.codec, arrived=arrived, time_left_s=time_left_s, on_streams=entry.runs
            )
            try:
                with self._tenants.streams(resolved, request.WhichOneof("prompt") or "prompt"):
                    async with aclosing(events):
                        async for event in events:
                            entry.told(event)
                            yield event_to_pb(event)
            except Internal as error:
                raise Internal(f"request {request_id}: {error.message}", reason=error.reason) from error

    def look_again(self) -> None:
        """The fleet has changed, or may have."""
        self._admission.look()

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        model = self._directory.model(request.model)
        description = model.description
        info = pb.GetModelInfoResponse(
            model=model.name,
            model_fingerprint=description.model_fingerprint,
            tokenizer_fingerprint=description.tokenizer_fingerprint,
            context_length=description.context_length,
            vocab_size=description.vocab_size,
            eos_token_ids=description.eos_token_ids,
            draft_model=model.draft_model,
            drafters=model.drafters,
            acceptance_rules=[int(rule) for rule in AcceptanceRule],  # type: ignore[misc]
            max_speculative_tokens=model.max_draft_tokens,
            has_chat_template=model.chat_template is not None,
            dtype=description.dtype,
            default_max_tokens=self._settings.default_max_tokens,
            simulated=description.simulated,
            aliases=[alias for alias, name in self._directory.model_aliases().items() if name == model.name],
        )
        for name, value in description.generation_defaults.items():
            setattr(info.generation_defaults, name, int(value) if name == "top_k" else value)
        return info

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            versions={name: version(name) for name in ("outrider", "grpcio", "protobuf")}
            | {"python": platform.python_version()},
            models=self._directory.model_names(),
            model_aliases=self._directory.model_aliases(),
            workers=[self._worker_status(worker) for worker in self._directory.workers()],
            num_requests_running=self._admission.num_running,
            num_requests_waiting=self._admission.num_waiting,
            num_requests_paused=self._admission.num_paused,
            uptime_s=time.monotonic() - self._started,
            draining=self._server.draining,
            unix_time_s=time.time(),
        )

    async def GetTrace(self, request: pb.GetTraceRequest, context: Any) -> pb.GetTraceResponse:
        streams = self._generation.traces.of(CALLER.get(), request.request_id)
        return pb.GetTraceResponse(
            streams=[
                pb.StreamTrace(index=one.index, steps=map(step_to_pb, one.steps), num_left_out=one.num_left_out)
                for one in streams
            ]
        )

    async def ListStreams(self, request: pb.ListStreamsRequest, context: Any) -> pb.ListStreamsResponse:
        tenant = CALLER.get()
        is_operator = tenant in self._settings.operator_tenants
        live, num_hidden = self._generation.live.of(None if is_operator else tenant)
        shown = live[: request.max_streams or DEFAULT_MAX_STREAMS]
        return pb.ListStreamsResponse(
            streams=[stream_status_to_pb(one.status()) for one in shown],
            num_left_out=len(live) - len(shown),
            num_hidden=num_hidden,
            models=[
                pb.ModelTotals(model=name, speculation=speculation_to_pb(counts))
                for name, counts in self._generation.live.totals().items()
            ],
            uptime_s=time.monotonic() - self._started,
        )

    async def GetRecord(self, request: record_pb2.GetRecordRequest, context: Any) -> record_pb2.GetRecordResponse:
        streams = self._generation.records.of(CALLER.get(), request.request_id)
        if request.stream_index >= len(streams):
            raise InvalidArgument(
                f"stream_index is {request.stream_index}, the request has {len(streams)} streams", field="stream_index"
            )
        kept = streams[request.stream_index]
        # of one moment: the stream may go on while its rounds are copied
        record, rounds = kept_to_pb(kept), tuple(kept.rounds)
        await asyncio.to_thread(add_rounds, record, rounds)
        return record_pb2.GetRecordResponse(stream=record, num_streams=len(streams))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        model = self._directory.model(request.model)
        match request.WhichOneof("prompt"):
            case "text":
                return pb.TokenizeResponse(token_ids=await asyncio.to_thread(text_ids, request.text, model))
            case "chat":
                return pb.TokenizeResponse(token_ids=await asyncio.to_thread(chat_ids, request.chat, model))
        raise InvalidArgument("prompt is missing: set one of text, chat", field="prompt")

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        model = self._directory.model(request.model)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True

        def decode() -> pb.DetokenizeResponse:
            token_ids = tuple(request.token_ids)
            check_ids("token_ids", token_ids, model.description.vocab_size)
            text = model.codec.decode(token_ids, skip_special_tokens=skip)
            return pb.DetokenizeResponse(
                text=text, token_bytes=model.codec.each(token_ids) if request.each_token else ()
            )

        return await asyncio.to_thread(decode)

    async def _resolve(
        self, request: pb.GenerateRequest, model: ServedModel, request_id: str, tenant: str
    ) -> ResolvedRequest:
        settings = self._tenants.settings_for(tenant, self._settings)
        has_form = request.HasField(STRUCTURED_OUTPUT)
        if has_form and (form := await asyncio.to_thread(resolve_grammar, request)) is not None:
            await self._forms.check(form, tenant=tenant)
        if request.ByteSize() > LONG_REQUEST_BYTES or has_form:
            return await asyncio.to_thread(resolve, request, model, settings, request_id=request_id, tenant=tenant)
        return resolve(request, model, settings, request_id=request_id, tenant=tenant)

    def _worker_status(self, worker: Any) -> pb.WorkerStatus:
        healthy, detail = self._directory.health(worker)
        if worker.role == DRAFT:
            detail = detail or self._directory.standing(worker).fault(time.monotonic())
        if not detail and worker.description is not None and worker.description.dropped:
            detail = f"not used of what it tells: {worker.description.dropped}"
        status = pb.WorkerStatus(
            role=role_to_pb(worker.role),
            address=worker.address,
            healthy=healthy,
            detail=detail,
            num_sessions=worker.num_sessions,
            network_ms=worker.network.value(),
            draft_rounds=pb.DraftRounds(**dataclasses.asdict(worker.draft_rounds)),
        )
        if (description := worker.description) is not None:
            status.model = description.model.model
            status.capacity.CopyFrom(capacity_to_pb(description.capacity))
            status.drafters.extend(description.drafters)
            status.drafters.extend(name for drafter in description.target_drafters for name in drafter.names)
            status.numerics_fingerprint = description.model.numerics_fingerprint
            status.weight_bytes = description.model.weight_bytes
            if description.clock_offset_ms is not None:
                status.clock_offset_ms = description.clock_offset_ms
            status.dtype = description.model.dtype
            status.versions.update(description.versions)
            status.incarnation = description.incarnation
            status.model_fingerprint = description.model.model_fingerprint
            status.numerics.CopyFrom(numerics_to_pb(description.model.numerics))
            status.cache_counters.CopyFrom(cache_counters_to_pb(description.cache_counters))
        return status


class FleetServicer:
    """`FleetService`: leases."""

    def __init__(self, settings: CoordinatorSettings, leases: LeaseSource) -> None:
        self._lease_ms = settings.lease_ms
        self._names_roles = bool(settings.tls_client_ca)
        self._leases = leases

    async def RegisterWorker(
        self, request: worker_pb2.RegisterWorkerRequest, context: Any
    ) -> worker_pb2.RegisterWorkerResponse:
        role = role_from_pb(request.role)
        if not role:
            raise InvalidArgument("role must be WORKER_ROLE_DRAFT or WORKER_ROLE_TARGET", field="role")
        if not is_host_and_port(request.address):
            raise InvalidArgument(f"address is {request.address[:80]!r}, must be host:port", field="address")
        self._check_role(role, context)
        lease_id = self._leases.register(request.address, role)
        return worker_pb2.RegisterWorkerResponse(lease_id=lease_id, lease_ms=self._lease_ms)

    def _check_role(self, role: str, context: Any) -> None:
        """A draft worker that became a target would decide texts."""
        if self._names_roles and WORKER_NAMES[role] not in certificate_names(context):
            raise PermissionDenied(f"the certificate of a {role} worker must name {WORKER_NAMES[role]}", field="role")

    async def RenewWorker(self, request: worker_pb2.RenewWorkerRequest, context: Any) -> worker_pb2.RenewWorkerResponse:
        self._leases.renew(request.lease_id)
        return worker_pb2.RenewWorkerResponse(lease_ms=self._lease_ms)

    async def DrainWorker(self, request: worker_pb2.DrainWorkerRequest, context: Any) -> worker_pb2.DrainWorkerResponse:
        self._leases.drain(request.lease_id)
        return worker_pb2.DrainWorkerResponse()


async def serve(
    settings: CoordinatorSettings,
    *,
    stop: asyncio.Event | None = None,
    on_ready: Callable[[int], None] | None = None,
) -> None:
    """Serves until `stop` is set or SIGTERM or SIGINT comes, then drains and returns.

    `on_ready` gets the port once every listed worker was asked; readiness itself is the health service's to tell.
    """
    configure_logging(settings.log_level, settings.log_format)
    stop = stop or asyncio.Event()
    targets, target_names = split_names(settings.target_workers, "target_workers")
    drafts, draft_names = split_names(settings.draft_workers, "draft_workers")
    if not settings.target_workers:
        log.warning("target_workers is empty: nothing is served until a target worker registers itself")
    registry = new_registry(ROLE)
    tenants = Tenants(settings)
    access = _access(settings, tenants)
    registry.register(Reading(access.families))
    with stop_on_signals(stop):
        async with (
            metrics_endpoint(settings, registry),
            tracing(settings, ROLE, settings.trace_sample_ratio) as traced,
            running_server(settings, [GENERATION, FLEET], access) as server,
        ):
            changed = asyncio.Event()
            forms = FormTrials()
            directory = WorkerDirectory(settings, on_change=changed.set)
            listed = [*((address, TARGET) for address in targets), *((address, DRAFT) for address in drafts)]
            names = [*((name, TARGET) for name in target_names), *((name, DRAFT) for name in draft_names)]
            leases = LeaseSource(directory, lease_ms=settings.lease_ms, max_workers=settings.max_registered_workers)
            registry.register(Reading(partial(lease_families, leases)))
            sources: tuple[Source, ...] = (
                StaticSource(directory, listed),
                DnsSource(directory, names, lease_ms=settings.lease_ms),
                leases,
            )
            try:
                for source in sources:
                    source.start()
                await directory.start()
                generation = GenerationServicer(settings, directory, server, registry, traced, tenants, forms)
                servicers = {GENERATION.full_name: generation, FLEET.full_name: FleetServicer(settings, leases)}
                await server.open(servicers)
                readiness = asyncio.create_task(_follow_fleet(server, directory, changed, generation))
                try:
                    await asyncio.sleep(0)
                    if on_ready is not None:
                        on_ready(server.port)
                    await stop.wait()
                finally:
                    readiness.cancel()
                    await asyncio.gather(readiness, return_exceptions=True)
                await server.drain(generation.hand_over)
            finally:
                for source in sources:
                    await source.close()
                await server.close()
                await forms.close()
                await directory.close()


def _access(settings: CoordinatorSettings, tenants: Tenants) -> Access:
    """Tenants generate, workers register. Raises InvalidArgument where anyone could call from beyond loopback."""
    knows_callers = bool(settings.tokens_file or settings.tls_client_ca)
    remedy = "Give --tokens-file (`outrider token new`), or --tls-client-ca"
    if settings.tls_cert:
        remedy = f"--tls-cert tells callers who this server is, not it who they are. {remedy}"
    refuse_to_be_open(settings, is_guarded=knows_callers, remedy=remedy)
    workers = FleetGuard(settings, WORKER_NAMES.values(), is_closed=knows_callers or bool(settings.tls_cert))
    return Access({GENERATION.full_name: tenants, FLEET.full_name: workers})


async def _follow_fleet(
    server: Server, directory: WorkerDirectory, changed: asyncio.Event, generation: GenerationServicer
) -> None:
    """NOT_SERVING while no target worker is healthy; who waits may be let in. Looks again now and then, since leases
    end without a call, and so do other coordinators' streams."""
    while True:
        changed.clear()
        await server.set_serving(GENERATION.full_name, directory.has_healthy_target())
        generation.look_again()
        try:
            async with asyncio.timeout(1.0):
                await changed.wait()
        except TimeoutError:
            pass

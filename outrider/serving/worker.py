"""The life of a worker process, draft or target: listen, load, serve, drain. And what it tells about itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import platform
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor
from prometheus_client.metrics_core import Metric

from outrider.errors import DRAINING, Aborted, OutriderError
from outrider.lm.build import build_engine
from outrider.lm.engine import Engine
from outrider.lm.interface import LoadedModel
from outrider.sampling.grammar import GrammarVocabulary
from outrider.server_info import CacheCounters
from outrider.serving.access import Access, FleetGuard, refuse_to_be_open
from outrider.serving.convert_worker import (
    cache_counters_to_pb,
    description_to_pb,
    target_drafter_to_pb,
    timing_to_pb,
)
from outrider.serving.engine_watch import watched_engine
from outrider.serving.equipment import Equipment
from outrider.serving.fleet import FleetMember, advertised_address
from outrider.serving.metrics import Reading, metrics_endpoint, new_registry
from outrider.serving.naming import split_names
from outrider.serving.server import Server, configure_logging, running_server, stop_on_signals
from outrider.serving.session_log import SessionCounters
from outrider.serving.session_stream import SessionStream
from outrider.serving.tls import COORDINATOR_NAME, fleet_dialer
from outrider.serving.tracing import UNTRACED, Tracing, tracing
from outrider.serving.worker_calls import role_from_pb
from outrider.serving.worker_metrics import Labels, MoreFamilies, no_families, worker_families
from outrider.settings import DraftWorkerSettings, WorkerSettings
from outrider.v1 import worker_pb2

log = logging.getLogger(__name__)

WORKER_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]


@dataclass(slots=True)
class Worker:
    """What the sessions of a worker share."""

    settings: WorkerSettings
    loaded: LoadedModel
    engine: Engine
    server: Server
    counters: SessionCounters
    equipment: Equipment
    grammars: GrammarVocabulary
    tracing: Tracing = UNTRACED
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Tells this process from others at its address."""
    _streams: set[SessionStream[Any, Any]] = field(default_factory=set)

    @property
    def num_sessions(self) -> int:
        """Open ones."""
        return len(self._streams)

    @contextlib.contextmanager
    def session_open(self, stream: SessionStream[Any, Any]) -> Iterator[None]:
        """Counts a session."""
        self._streams.add(stream)
        try:
            yield
        finally:
            self._streams.discard(stream)

    def hand_over(self, within_s: float) -> None:
        """Ends every session behind the message at hand, and what that takes longer for than half of this time: its
        caller opens it elsewhere from the log, as after an idle lease."""
        text = "the worker is draining: open the session on another one"
        error = Aborted(text, reason=DRAINING, retry_delay_s=0.0)
        for stream in self._streams:
            stream.hand_over(error)
        asyncio.get_running_loop().call_later(within_s / 2, self.lose, error)

    def lose(self, error: OutriderError) -> None:
        """Ends every session at once."""
        for stream in self._streams:
            stream.fail(error)

    def capacity(self) -> worker_pb2.WorkerCapacity:
        """As of now."""
        stats = self.engine.stats()
        return worker_pb2.WorkerCapacity(
            num_blocks=stats.num_blocks,
            block_size=self.settings.block_size,
            num_free_blocks=stats.num_free_blocks - self.equipment.num_held_blocks,
            num_sessions=self.num_sessions,
            num_waiting=stats.num_waiting,
            max_batch_tokens=self.settings.max_batch_tokens,
            max_draft_tokens=self.settings.max_draft_tokens,
            num_promised_blocks=stats.num_promised_blocks,
            max_promised_blocks=stats.max_promised_blocks,
        )

    def cache_counters(self) -> CacheCounters:
        """As of now."""
        stats = self.engine.stats()
        return CacheCounters(
            num_preemptions=stats.num_preemptions,
            num_idle_evictions=stats.num_idle_evictions + self.equipment.num_evictions,
            num_cached_tokens=stats.num_cached_tokens,
            num_copied_blocks=stats.num_copied_blocks,
        )


class WorkerServicer:
    """`WorkerService` of one worker."""

    def __init__(self, worker: Worker, description: worker_pb2.DescribeWorkerResponse) -> None:
        self._worker = worker
        self._description = description
        self._without_tokenizer = worker_pb2.DescribeWorkerResponse()
        self._without_tokenizer.CopyFrom(description)
        for name in ("tokenizer_json", "chat_template"):
            self._without_tokenizer.ClearField(name)

    async def DescribeWorker(
        self, request: worker_pb2.DescribeWorkerRequest, context: Any
    ) -> worker_pb2.DescribeWorkerResponse:
        answer = worker_pb2.DescribeWorkerResponse()
        answer.CopyFrom(self._without_tokenizer if request.without_tokenizer else self._description)
        answer.capacity.CopyFrom(self._worker.capacity())
        answer.cache_counters.CopyFrom(cache_counters_to_pb(self._worker.cache_counters()))
        # a thread of its own: fits take milliseconds, and sessions are waiting for this loop
        timings = await asyncio.to_thread(self._worker.engine.timing.timings)
        answer.timings.extend(timing_to_pb(timing) for timing in timings)
        answer.unix_time_s = time.time()
        return answer


async def serve_worker(
    settings: WorkerSettings,
    *,
    role: worker_pb2.WorkerRole,
    service: ServiceDescriptor,
    make_servicer: Callable[[Worker], Any],
    drafters: tuple[str, ...] = (),
    equipment: Equipment | None = None,
    more_families: MoreFamilies = no_families,
    loaded: LoadedModel | None = None,
    stop: asyncio.Event | None = None,
    on_ready: Callable[[int], None] | None = None,
) -> None:
    """Serves until `stop` is set or SIGTERM or SIGINT comes, then drains and returns.

    loaded: a model already in memory instead of `settings.model`. on_ready gets the port once the worker serves.
    more_families: what this kind of worker exports besides, given the labels of all.
    """
    configure_logging(settings.log_level, settings.log_format)
    equipment = equipment or Equipment()
    stop = stop or asyncio.Event()
    name = f"{role_from_pb(role)}-worker"
    registry = new_registry(name)
    access = _access(settings, (service, WORKER_SERVICE))
    registry.register(Reading(access.families))
    with stop_on_signals(stop):
        async with (
            metrics_endpoint(settings, registry),
            tracing(settings, name) as traced,
            running_server(settings, [service, WORKER_SERVICE], access) as server,
        ):
            address = advertised_address(settings, server.port)
            split_names(settings.coordinators, "coordinators")  # a bad one is told before the model is loaded
            if loaded is None:
                from outrider.lm.loading import load_model  # imports torch for all but toy models

                loaded = await asyncio.to_thread(load_model, settings)
            await asyncio.to_thread(equipment.prepare, loaded)
            engine = build_engine(loaded, settings)
            engine.start()
            try:
                await equipment.try_out(engine)
                about = loaded.description
                grammars = GrammarVocabulary(about.tokenizer_json, about.vocab_size, about.eos_token_ids)
                worker = Worker(settings, loaded, engine, server, SessionCounters(), equipment, grammars, traced)
                description = _describe(worker, role, drafters)
                fleet = _fleet_member(worker, address, description)
                labels = {"role": name, "model_name": description.model}
                registry.register(Reading(partial(_families, worker, labels, more_families)))
                servicers = {
                    service.full_name: make_servicer(worker),
                    WORKER_SERVICE.full_name: WorkerServicer(worker, description),
                }
                await server.open(servicers)
                fleet.start()
                set_serving = partial(server.set_serving_all, service.full_name)
                async with watched_engine(engine.health, set_serving, worker.lose):
                    if on_ready is not None:
                        on_ready(server.port)
                    await stop.wait()
                await fleet.leave()
                await server.drain(worker.hand_over)
            finally:
                # After the drain: running streams needed it to the end.
                await server.close()
                await asyncio.to_thread(engine.stop)


def _access(settings: WorkerSettings, services: tuple[ServiceDescriptor, ...]) -> Access:
    """Coordinators only. Raises InvalidArgument where others could call from beyond loopback."""
    refuse_to_be_open(
        settings,
        is_guarded=bool(settings.tls_client_ca or settings.fleet_token_file),
        remedy="Give --tls-cert, --tls-key and --tls-client-ca, or --fleet-token-file, so that only coordinators may",
    )
    guard = FleetGuard(settings, (COORDINATOR_NAME,))
    return Access({service.full_name: guard for service in services})


def _families(worker: Worker, labels: Labels, more_families: MoreFamilies) -> Iterator[Metric]:
    yield from worker_families(
        labels, num_sessions=worker.num_sessions, stats=worker.engine.stats(), counters=worker.counters
    )
    yield from more_families(labels)


def _describe(
    worker: Worker, role: worker_pb2.WorkerRole, drafters: tuple[str, ...]
) -> worker_pb2.DescribeWorkerResponse:
    equipment = worker.equipment
    description = description_to_pb(worker.loaded.description)
    description.role = role
    description.drafters.extend(drafters or equipment.drafters)
    description.target_drafters.extend(target_drafter_to_pb(drafter) for drafter in equipment.target_drafters)
    description.features = equipment.features
    description.drafter_features.update(equipment.drafter_features)
    description.target_fingerprints.extend(equipment.target_fingerprints)
    if isinstance(worker.settings, DraftWorkerSettings) and worker.loaded.translator is None:
        description.max_ahead_branches = 0 if equipment.drafters else worker.settings.ahead_branches
    description.incarnation = worker.incarnation
    if worker.settings.model_name:
        description.model = worker.settings.model_name
    description.versions["outrider"] = version("outrider")
    description.versions["python"] = platform.python_version()
    return description


def _fleet_member(worker: Worker, address: str, description: worker_pb2.DescribeWorkerResponse) -> FleetMember:
    registration = worker_pb2.RegisterWorkerRequest(
        role=description.role,
        address=address,
        model_fingerprint=description.model_fingerprint,
        tokenizer_fingerprint=description.tokenizer_fingerprint,
        incarnation=description.incarnation,
    )
    dialer = fleet_dialer(worker.settings)
    return FleetMember(worker.settings.coordinators, registration, worker.capacity, dialer=dialer)

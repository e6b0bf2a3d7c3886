"""A worker's leases with its coordinators: take one, renew it at a third of its time, take it again when it is lost.

An unreachable coordinator is tried again for as long as the worker lives; it costs the worker nothing else. A name
stands for all coordinators behind it, and is looked up again and again: they come and go, none of them is special.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

import grpc

from outrider.errors import InvalidArgument
from outrider.serving.naming import Resolve, resolve, split_names
from outrider.serving.refused import is_other_server, mending
from outrider.serving.status import from_rpc_error
from outrider.serving.tls import COORDINATOR_NAME, Dialer
from outrider.settings import WorkerSettings
from outrider.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

MIN_RETRY_S = 0.2
MAX_RETRY_S = 2.0
CALL_TIMEOUT_S = 5.0
RESOLVE_INTERVAL_S = 2.0
WILDCARD_HOSTS = ("0.0.0.0", "::", "[::]", "")


def advertised_address(settings: WorkerSettings, port: int) -> str:
    """host:port that coordinators should use. Raises InvalidArgument when it cannot be told from the settings."""
    if settings.advertise_address:
        return settings.advertise_address
    if settings.coordinators and settings.host in WILDCARD_HOSTS:
        raise InvalidArgument(
            f"host {settings.host!r} is no address that a coordinator can reach: set advertise_address to host:port",
            field="advertise_address",
        )
    return f"{settings.host}:{port}"


class FleetMember:
    """Keeps one lease per coordinator from `start` to `leave`. Raises InvalidArgument on an address that is none."""

    def __init__(
        self,
        coordinators: Sequence[str],
        registration: worker_pb2.RegisterWorkerRequest,
        capacity: Callable[[], worker_pb2.WorkerCapacity],
        *,
        dialer: Dialer | None = None,
        resolve: Resolve = resolve,
        resolve_interval_s: float = RESOLVE_INTERVAL_S,
    ) -> None:
        self._registration = registration
        self._capacity = capacity
        self._dialer = dialer or Dialer()
        self._coordinators, self._names = split_names(coordinators, "coordinators")
        self._resolve = resolve
        self._resolve_interval_s = resolve_interval_s
        self._lease_ids: dict[str, str] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._followers: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to register, in the background."""
        for address in self._coordinators:
            self._keepers[address] = asyncio.create_task(self._keep_lease(address))
        self._followers = [asyncio.create_task(self._follow(name)) for name in self._names]

    async def leave(self) -> None:
        """Gives the leases back: no new streams will come. Idempotent; never raises."""
        tasks = (*self._followers, *self._keepers.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        leases, self._lease_ids = self._lease_ids, {}
        await asyncio.gather(*(self._drain(address, lease_id) for address, lease_id in leases.items()))

    async def _follow(self, name: str) -> None:
        """A lease with each coordinator behind the name. One that left it keeps what it knows until the lease ends."""
        followed: set[str] = set()
        failing = False
        while True:
            try:
                found = set(await self._resolve(name))
                failing = False
            except OSError as error:
                if not failing:
                    log.info("coordinators %s: %s", name, error)
                found, failing = followed, True
            for address in found - self._keepers.keys():
                self._keepers[address] = asyncio.create_task(self._keep_lease(address))
                followed.add(address)
            for address in followed - found:
                self._keepers.pop(address).cancel()
                self._lease_ids.pop(address, None)
                followed.discard(address)
            await asyncio.sleep(self._resolve_interval_s)

    async def _keep_lease(self, address: str) -> None:
        lease: worker_pb2.RegisterWorkerResponse | None = None
        while True:
            version = self._dialer.version
            async with self._dialer.open(address, COORDINATOR_NAME) as channel:
                lease = await self._keep_lease_on(channel, address, lease, version)

    async def _keep_lease_on(
        self,
        channel: grpc.aio.Channel,
        address: str,
        lease: worker_pb2.RegisterWorkerResponse | None,
        version: int,
    ) -> worker_pb2.RegisterWorkerResponse | None:
        """Until the files of TLS are of another version. The lease stays: what it is."""
        stub = worker_pb2_grpc.FleetServiceStub(channel)
        retry_s, warned_of = MIN_RETRY_S, ""
        while self._dialer.version == version:
            try:
                if lease is None:
                    self._registration.capacity.CopyFrom(self._capacity())
                    lease = await stub.RegisterWorker(  # type: ignore[misc]
                        self._registration, timeout=CALL_TIMEOUT_S, metadata=self._dialer.metadata()
                    )
                    log.info("registered with coordinator %s", address)
                    self._lease_ids[address] = lease.lease_id
                    retry_s = MIN_RETRY_S
                await self._renew(stub, lease, version)
                return lease
            except grpc.aio.AioRpcError as error:
                lease = None
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    continue
                told = f"coordinator {address}: {error.code().name} {error.details()}"
                failure = from_rpc_error(error)
                advice = mending(failure, COORDINATOR_NAME)
                if is_other_server(failure):
                    advice = "it is no coordinator, something else answers there: see --coordinators here"
                if advice:
                    told += f"; {advice}"
                log.log(logging.WARNING if advice and told != warned_of else logging.INFO, "%s", told)
                warned_of = told
            await asyncio.sleep(retry_s)
            retry_s = min(MAX_RETRY_S, 2 * retry_s)
        return lease

    async def _renew(
        self, stub: worker_pb2_grpc.FleetServiceStub, lease: worker_pb2.RegisterWorkerResponse, version: int
    ) -> None:
        """Returns when the files of TLS are of another version; raises the error of a renewal that failed."""
        lease_ms = lease.lease_ms
        while self._dialer.version == version:
            await asyncio.sleep(lease_ms / 3000)
            request = worker_pb2.RenewWorkerRequest(lease_id=lease.lease_id, capacity=self._capacity())
            renewed = await stub.RenewWorker(  # type: ignore[misc]
                request, timeout=CALL_TIMEOUT_S, metadata=self._dialer.metadata()
            )
            lease_ms = renewed.lease_ms

    async def _drain(self, address: str, lease_id: str) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async with self._dialer.open(address, COORDINATOR_NAME) as channel:
                stub = worker_pb2_grpc.FleetServiceStub(channel)
                request = worker_pb2.DrainWorkerRequest(lease_id=lease_id)
                await stub.DrainWorker(request, timeout=1.0, metadata=self._dialer.metadata())  # type: ignore[misc]

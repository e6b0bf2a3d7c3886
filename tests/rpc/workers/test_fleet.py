"""Workers that register themselves: lease, renewal, a coordinator that forgot or came back, drain."""

import contextlib

import pytest
from session_clients import running_target, until

from outrider.errors import InvalidArgument, NotFound
from outrider.serving.fleet import advertised_address
from outrider.serving.server import running_server
from outrider.settings import ServerSettings, TargetWorkerSettings
from outrider.v1 import worker_pb2

FLEET_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["FleetService"]


class Fleet:
    """A coordinator's FleetService that remembers what came."""

    def __init__(self, lease_ms=60):
        self.lease_ms = lease_ms
        self.registered = []
        self.leases = {}
        self.num_renewals = 0
        self.drained = []

    async def RegisterWorker(self, request, context):
        self.registered.append(request)
        lease_id = f"lease-{len(self.registered)}"
        self.leases[lease_id] = request.address
        return worker_pb2.RegisterWorkerResponse(lease_id=lease_id, lease_ms=self.lease_ms)

    async def RenewWorker(self, request, context):
        if request.lease_id not in self.leases:
            raise NotFound("no such lease")
        assert request.capacity.num_blocks > 0
        self.num_renewals += 1
        return worker_pb2.RenewWorkerResponse(lease_ms=self.lease_ms)

    async def DrainWorker(self, request, context):
        self.drained.append(self.leases.pop(request.lease_id))
        return worker_pb2.DrainWorkerResponse()


@contextlib.asynccontextmanager
async def coordinator(fleet, port=0):
    async with running_server(ServerSettings(port=port), [FLEET_SERVICE]) as server:
        await server.open({FLEET_SERVICE.full_name: fleet})
        yield server


async def test_lease_is_taken_renewed_taken_again_and_given_back():
    fleet = Fleet()
    async with coordinator(fleet) as server:
        async with running_target(coordinators=(f"127.0.0.1:{server.port}",)) as worker:
            await until(lambda: fleet.num_renewals >= 2)
            (registration,) = fleet.registered
            described = await worker.describe()
            assert registration.role == worker_pb2.WORKER_ROLE_TARGET
            assert registration.address == worker.server.address
            assert registration.incarnation == described.incarnation
            assert registration.tokenizer_fingerprint == described.tokenizer_fingerprint
            assert registration.capacity.num_blocks == described.capacity.num_blocks

            fleet.leases.clear()  # the coordinator forgot: NOT_FOUND
            await until(lambda: len(fleet.registered) == 2)
            assert not fleet.drained
        assert fleet.drained == [worker.server.address]


async def test_a_coordinator_that_comes_later_or_comes_back_is_found():
    first, second = Fleet(), Fleet()
    async with coordinator(first) as server:
        port = server.port
        async with running_target(coordinators=(f"127.0.0.1:{port}",), advertise_address="worker.example:50052"):
            await until(lambda: first.num_renewals)
            await server.close()
            async with coordinator(second, port):
                await until(lambda: second.num_renewals)
                assert second.registered[0].address == "worker.example:50052"


async def test_an_absent_coordinator_does_not_keep_a_worker_from_serving():
    async with running_target(coordinators=("127.0.0.1:1",)) as worker:
        assert (await worker.describe()).model


def test_a_wildcard_host_needs_an_address_to_advertise():
    with pytest.raises(InvalidArgument, match="advertise_address"):
        advertised_address(TargetWorkerSettings(host="0.0.0.0", coordinators=("c:1",)), 5)
    assert advertised_address(TargetWorkerSettings(host="0.0.0.0"), 5) == "0.0.0.0:5"

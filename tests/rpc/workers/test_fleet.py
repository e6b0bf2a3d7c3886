"""Workers that register themselves: lease, renewal, a coordinator that forgot or came back, drain."""

import contextlib

import pytest
from session_clients import running_target
from waiting import until

from outrider.errors import InvalidArgument, NotFound
from outrider.serving.fleet import FleetMember, advertised_address
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
            renewals = fleet.num_renewals
            await until(lambda: fleet.num_renewals > renewals)  # it has the new lease
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


async def test_every_coordinator_behind_a_name_has_a_lease_and_they_come_and_go():
    fleets = [Fleet(), Fleet(), Fleet()]
    registration = worker_pb2.RegisterWorkerRequest(role=worker_pb2.WORKER_ROLE_TARGET, address="worker.example:1")
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(coordinator(fleet)) for fleet in fleets]
        addresses = [f"127.0.0.1:{server.port}" for server in servers]
        behind = set(addresses[:2])

        async def resolve_here(name):
            assert name == "fleet.example:50050"
            if not behind:
                raise OSError("no such name for now")
            return sorted(behind)

        member = FleetMember(
            ("dns:///fleet.example:50050",),
            registration,
            lambda: worker_pb2.WorkerCapacity(num_blocks=1),
            resolve=resolve_here,
            resolve_interval_s=0.02,
        )
        member.start()
        await until(lambda: fleets[0].num_renewals and fleets[1].num_renewals)
        assert not fleets[2].registered

        behind.clear()  # the name fails: nothing is given up for that
        renewals = fleets[0].num_renewals
        await until(lambda: fleets[0].num_renewals > renewals + 2)
        behind.update(addresses[1:])
        await until(lambda: fleets[2].num_renewals)
        renewals = fleets[0].num_renewals
        await until(lambda: fleets[2].num_renewals > 6)
        assert fleets[0].num_renewals <= renewals + 1, "a coordinator that left the name is let go"
        assert [len(fleet.registered) for fleet in fleets] == [1, 1, 1]

        await member.leave()
        assert [fleet.drained for fleet in fleets] == [[], ["worker.example:1"], ["worker.example:1"]]


async def test_a_worker_finds_its_coordinators_by_name():
    fleet = Fleet()
    async with coordinator(fleet) as server:
        async with running_target(coordinators=(f"dns:///localhost:{server.port}",)) as worker:
            await until(lambda: fleet.num_renewals)
            assert fleet.registered[0].address == worker.server.address


def test_a_coordinator_that_is_no_address_is_refused():
    with pytest.raises(InvalidArgument, match="coordinators has 'nowhere'"):
        FleetMember(("nowhere",), worker_pb2.RegisterWorkerRequest(), worker_pb2.WorkerCapacity)

"""The server itself: refusals with details, health, reflection, drain, limits. Real gRPC on loopback."""

import asyncio
import contextlib
import socket

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from session_clients import (
    decode_request,
    failure,
    open_request,
    read,
    running_draft,
    running_target,
    target_opening,
    verify_request,
)
from waiting import until

from outrider.errors import BY_STATUS, InvalidArgument, OutriderError, Unavailable
from outrider.serving.channel import MAX_MESSAGE_BYTES, open_channel
from outrider.serving.server import running_server
from outrider.serving.status import from_rpc_error
from outrider.settings import ServerSettings
from outrider.v1 import target_pb2, worker_pb2, worker_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
WORKER_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]


@contextlib.asynccontextmanager
async def served(describe=None, **settings):
    """A WorkerService of our own making; without `describe` it is not open yet."""
    async with running_server(ServerSettings(port=0, **settings), [WORKER_SERVICE]) as server:
        if describe is not None:
            await server.open(
                {WORKER_SERVICE.full_name: type("Servicer", (), {"DescribeWorker": staticmethod(describe)})}
            )
        async with open_channel(f"127.0.0.1:{server.port}") as channel:
            yield server, channel


async def describe(channel):
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    return await stub.DescribeWorker(worker_pb2.DescribeWorkerRequest(), timeout=10)


async def check(channel, service=""):
    return (
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
    ).status


@pytest.mark.parametrize("kind", BY_STATUS.values(), ids=BY_STATUS)
@pytest.mark.parametrize(
    "details", [{}, {"reason": "QUEUE_FULL", "retry_delay_s": 0.25}, {"field": "sampling.top_p", "reason": "RANGE"}]
)
async def test_errors_round_trip_with_their_details(kind, details):
    async def fail(request, context):
        raise kind("naïve: top_p is 2, must be at most 1", **details)

    async with served(fail) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await describe(channel)
    error = from_rpc_error(caught.value)
    assert type(error) is kind
    assert error.message == "naïve: top_p is 2, must be at most 1"
    assert error.field == details.get("field")
    assert error.reason == details.get("reason", kind.status)
    assert error.retry_delay_s == details.get("retry_delay_s")


async def test_a_bug_is_internal_without_its_trace(caplog):
    async def fail(request, context):
        raise KeyError("a secret path")

    async with served(fail) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await describe(channel)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in caught.value.details()
    assert "a secret path" in caplog.text


async def test_a_caller_that_left_before_a_message_could_go_out_is_no_bug(caplog):
    """As of a process that was killed while its answer waited for it; when gRPC notices is its own affair."""
    closed = []

    class Answering:
        async def Session(self, requests, context):
            try:
                yield target_pb2.TargetServiceSessionResponse()
            finally:
                closed.append(True)

    class Gone:
        invocation_metadata = staticmethod(tuple)
        peer = staticmethod(str)

        async def write(self, message):
            raise grpc.aio.InternalError("Failed to send")

    service = target_pb2.DESCRIPTOR.services_by_name["TargetService"]
    async with running_server(ServerSettings(port=0), [service]) as server:
        await server.open({service.full_name: Answering()})
        await server._handler(service.methods_by_name["Session"]).stream_stream(None, Gone())
    assert closed
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_broken_connection_is_unavailable():
    async with open_channel("127.0.0.1:1") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await describe(channel)
    error = from_rpc_error(caught.value)
    assert isinstance(error, Unavailable)
    assert error.reason == "UNAVAILABLE"


async def test_not_serving_until_opened():
    async with served() as (server, channel):
        for name in ("", WORKER_SERVICE.full_name):
            assert await check(channel, name) == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await describe(channel)
        assert from_rpc_error(caught.value).reason == "STARTING"
        assert from_rpc_error(caught.value).retry_delay_s > 0

        async def answer(request, context):
            return worker_pb2.DescribeWorkerResponse(model="m")

        await server.open({WORKER_SERVICE.full_name: type("S", (), {"DescribeWorker": staticmethod(answer)})})
        for name in ("", WORKER_SERVICE.full_name):
            assert await check(channel, name) == SERVING
        assert (await describe(channel)).model == "m"


async def test_a_taken_port_is_named():
    async with served() as (server, _):
        with pytest.raises(OutriderError, match=str(server.port)):
            async with running_server(ServerSettings(port=server.port), [WORKER_SERVICE]):
                pass


async def test_undecodable_bytes_are_invalid_argument():
    async with running_target() as worker:
        unary = worker.channel.unary_unary("/outrider.v1.WorkerService/DescribeWorker")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await unary(b"\xff\xff\xff", timeout=10)
        assert isinstance(from_rpc_error(caught.value), InvalidArgument)
        assert "DescribeWorkerRequest" in caught.value.details()

        session = worker.channel.stream_stream("/outrider.v1.TargetService/Session")()
        await session.write(b"\x0a\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await session.read()
        assert from_rpc_error(caught.value).reason == "UNDECODABLE_REQUEST"
        await worker.wait_idle()


async def test_a_message_over_16_mib_is_refused_and_one_below_is_read():
    async with running_target() as worker:
        for size, code in [
            (MAX_MESSAGE_BYTES + 1, "RESOURCE_EXHAUSTED"),
            (MAX_MESSAGE_BYTES - 1024, "INVALID_ARGUMENT"),
        ]:
            async with grpc.aio.insecure_channel(
                worker.server.address, options=[("grpc.max_send_message_length", -1)]
            ) as channel:
                session = channel.stream_stream("/outrider.v1.TargetService/Session")()
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await session.write(b"\xff" * size)
                    await session.read()
                assert (await session.code()).name == code


async def test_reflection_lists_services_and_can_be_switched_off():
    async def names(channel):
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
        return {service.name for service in (await call.read()).list_services_response.service}

    async with running_draft() as worker:
        assert await names(worker.channel) >= {
            "outrider.v1.DraftService",
            "outrider.v1.WorkerService",
            "grpc.health.v1.Health",
        }
        request = reflection_pb2.ServerReflectionRequest(file_containing_symbol="outrider.v1.DraftService")
        call = reflection_pb2_grpc.ServerReflectionStub(worker.channel).ServerReflectionInfo(iter([request]))
        files = (await call.read()).file_descriptor_response.file_descriptor_proto
        parsed = [descriptor_pb2.FileDescriptorProto.FromString(data).name for data in files]
        assert "outrider/v1/draft.proto" in parsed
    async with running_draft(reflection=False) as worker:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await names(worker.channel)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def until_draining(worker):
    async def not_serving():
        return await check(worker.channel, "outrider.v1.TargetService") == NOT_SERVING

    await until(not_serving)


async def test_drain_lets_streams_end_refuses_new_ones_and_stops():
    async with running_target(drain_grace_s=20.0) as worker:
        running = worker.target.Session()
        await running.write(open_request(target_opening()))
        verdict = (await read(running)).verdict
        silent = worker.target.Session()  # connected before the drain, opened only after it began
        await silent.write(target_pb2.TargetServiceSessionRequest(heartbeat={}))

        async def both_run():
            return (await worker.describe()).capacity.num_sessions == 2

        await until(both_run)

        worker.server.stop.set()
        await until_draining(worker)
        assert await check(worker.channel) == NOT_SERVING

        await silent.write(open_request(target_opening()))
        for late in (silent, worker.target.Session()):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read(late)
            error = from_rpc_error(caught.value)
            assert isinstance(error, Unavailable)
            assert error.reason == "DRAINING"
            assert error.retry_delay_s > 0

        ids = [1, 2, 3, *verdict.committed_ids]
        await running.write(verify_request(ids))
        assert len((await read(running)).verdict.committed_ids) == 1
        assert not worker.server.task.done()
        await running.done_writing()
        assert await read(running) is None
        async with asyncio.timeout(10):
            await worker.server.task


async def test_drain_hands_over_a_session_that_outstays_the_grace_even_if_it_is_silent():
    async with running_target(drain_grace_s=0.5) as worker:
        session = worker.target.Session()
        await session.write(open_request(target_opening()))
        await read(session)
        worker.server.stop.set()
        error = await failure(session)
        assert (error.status, error.reason, error.retry_delay_s) == ("ABORTED", "DRAINING", 0.0)
        async with asyncio.timeout(10):
            await worker.server.task


async def test_drain_ends_a_run_behind_a_whole_token():
    async with running_target("toy:vocab=16,pass_ms=10", drain_grace_s=0.5) as worker:
        session = worker.target.Session()
        await session.write(open_request(target_opening(max_tokens=3000)))
        ids = [1, 2, 3, *(await read(session)).verdict.committed_ids]
        await session.write(decode_request(ids, 3000))
        worker.server.stop.set()
        while not (verdict := (await read(session)).verdict).decode_ended:
            assert verdict.header.base_length == len(ids), "no token is lost on the way"
            ids += verdict.committed_ids
        assert len(ids) < 3000, "INCONCLUSIVE: it had its end"
        error = await failure(session)
        assert (error.status, error.reason) == ("ABORTED", "DRAINING")
        async with asyncio.timeout(10):
            await worker.server.task


async def test_drain_without_a_grace_cuts_off():
    async with running_target(drain_grace_s=0.0) as worker:
        session = worker.target.Session()
        await session.write(open_request(target_opening()))
        await read(session)
        worker.server.stop.set()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            await read(session)
        assert await session.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        async with asyncio.timeout(10):
            await worker.server.task


async def test_a_worker_that_came_up_is_reached_at_once_whatever_another_channel_had_met_there():
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    async with open_channel(f"127.0.0.1:{port}") as early, open_channel(f"127.0.0.1:{port}") as late:
        with pytest.raises(grpc.aio.AioRpcError):
            await health_pb2_grpc.HealthStub(early).Check(health_pb2.HealthCheckRequest())
        async with running_target(port=port):
            await health_pb2_grpc.HealthStub(late).Check(health_pb2.HealthCheckRequest())

"""What is told beside texts by the three services in this process, and which calls are refused, on toys (simulated)."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from stack import Stack, in_process_stack
from test_coordinator_generate import DRAFT, TARGET, no_sessions
from waiting import until

from outrider import results, server_info
from outrider.client import Client
from outrider.errors import OutriderError
from outrider.sampling.params import AcceptanceRule
from outrider.serving.status import from_rpc_error
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with in_process_stack(TARGET, DRAFT) as running:
        yield running


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with Client(stack.address) as connected:
        yield connected


async def test_queue_is_bounded_with_a_retry_delay() -> None:
    limits = {"max_running_requests": 1, "max_waiting_requests": 1}
    async with (
        in_process_stack(TARGET + ",pass_ms=5", None, coordinator=limits) as stack,
        Client(stack.address) as client,
    ):
        running, waiting = (client.generate("A", temperature=0, max_tokens=2000) for _ in range(2))
        assert isinstance(await anext(running), results.Started)
        assert isinstance(await anext(running), results.Chunk)
        assert isinstance(await anext(waiting), results.Started), "told at once, though it waits for its place"
        with pytest.raises(OutriderError) as full:
            await client.complete("A")
        assert full.value.status == "RESOURCE_EXHAUSTED"
        assert full.value.retry_delay_s
        assert full.value.reason == "QUEUE_FULL"
        await running.aclose()
        assert isinstance(await asyncio.wait_for(anext(waiting), 10), results.Chunk)
        await waiting.aclose()
        await no_sessions(client)


async def test_info_tokenize_and_detokenize(stack: Stack, client: Client) -> None:
    info = await client.model_info()
    assert (info.model, info.vocab_size, info.simulated) == (TARGET, 48, True)
    assert info.drafters == ("model", "lookup", "suffix")
    assert info.draft_model == DRAFT
    assert info.max_speculative_tokens == 16
    assert set(info.acceptance_rules) == set(AcceptanceRule)
    server = await client.server_info()
    assert [(w.role, w.healthy) for w in server.workers] == [("target", True), ("draft", True)]
    fast = server_info.Numerics("fast", environment={"device": "simulated"})
    assert [worker.numerics for worker in server.workers] == [fast, fast]
    assert await client.tokenize('!"#') == [0, 1, 2]
    assert await client.detokenize([0, 1, 2]) == '!"#'
    assert await client.token_bytes([0, 1, 2]) == [b"!", b'"', b"#"]
    with pytest.raises(OutriderError, match="below 48") as bad:
        await client.detokenize([48])
    assert bad.value.field == "token_ids"
    with pytest.raises(OutriderError, match="not served") as unknown:
        await client.complete("A", model="nobody")
    assert (unknown.value.status, unknown.value.field) == ("NOT_FOUND", "model")


@pytest.mark.parametrize(
    ("request_", "status", "field"),
    [
        (pb.GenerateRequest(text="!" * 10_000_000), "INVALID_ARGUMENT", "text"),
        (
            pb.GenerateRequest(text="A", sampling=pb.SamplingOptions(temperature=float("nan"))),
            "INVALID_ARGUMENT",
            "sampling.temperature",
        ),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[99])), "INVALID_ARGUMENT", "token_ids.ids"),
        (pb.GenerateRequest(text="A", lora_adapter="x"), "INVALID_ARGUMENT", "lora_adapter"),
        (
            pb.GenerateRequest(text="A", structured_output=pb.StructuredOutput(regex="((")),
            "INVALID_ARGUMENT",
            "structured_output.regex",
        ),
        (
            pb.GenerateRequest(text="A", resume_token_ids=[1, 2], stopping=pb.StoppingOptions(stop_token_ids=[1])),
            "INVALID_ARGUMENT",
            "resume_token_ids",
        ),
        (pb.GenerateRequest(text="A", request_id="no spaces"), "INVALID_ARGUMENT", "request_id"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_refusals_reach_the_client_with_field_and_leave_others_alone(
    stack: Stack, client: Client, request_: pb.GenerateRequest, status: str, field: str
) -> None:
    other = client.generate("AB", temperature=0, max_tokens=300)
    await anext(other)
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(stack.address, options=options) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request_)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
    error = from_rpc_error(refused.value)
    assert (error.status, error.field) == (status, field)
    rest = [event async for event in other]
    assert isinstance(rest[-1], results.Complete)


async def test_bytes_that_are_no_request_are_refused(stack: Stack) -> None:
    async with grpc.aio.insecure_channel(stack.address) as channel:
        call = channel.unary_stream("/outrider.v1.GenerationService/Generate")(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_tenant_comes_from_trusted_metadata_and_must_be_a_name(stack: Stack) -> None:
    async with Client(stack.address, metadata={"x-outrider-tenant": "team-a"}) as client:
        assert len((await client.complete("A", max_tokens=2)).token_ids) == 2
    async with Client(stack.address, metadata={"x-outrider-tenant": "two words"}) as client:
        with pytest.raises(OutriderError, match="128 characters") as bad:
            await client.complete("A", max_tokens=2)
        assert bad.value.field == "x-outrider-tenant"


async def test_health_tells_whether_a_target_can_be_had(stack: Stack) -> None:
    async with grpc.aio.insecure_channel(stack.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def status(service: str) -> int:
            return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

        serving = health_pb2.HealthCheckResponse.SERVING
        assert await status("outrider.v1.GenerationService") == serving
        await stack.target[0].close()

        async def is_told() -> bool:
            return await status("outrider.v1.GenerationService") != serving

        await until(is_told)
        assert await status("") == serving, "the process itself is alive"
        async with Client(stack.address) as client:
            with pytest.raises(OutriderError) as nobody:
                await client.complete("A")
        assert nobody.value.status == "UNAVAILABLE"
        assert nobody.value.retry_delay_s

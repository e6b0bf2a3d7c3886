"""Two versions side by side: peers that know less than we do, and peers that know more. Real gRPC through relays that
rewrite every message as such a peer would have written it, or as it would have come out of one that read it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from stack import in_process_stack, listening, start

import coordinator.server
import outrider
from outrider.results import GammaCause
from outrider.sampling.params import Origin
from outrider.serving.channel import open_channel
from outrider.serving.read_results import read_event
from outrider.settings import CoordinatorSettings
from outrider.v1 import common_pb2, generation_pb2

ROOT = Path(__file__).parents[2]
TARGET = "toy:vocab=32,seed=5"
DRAFT = "toy:vocab=32,seed=5,agreement=0.8"
UNKNOWN = bytes([0xFA, 0xF0, 0x04, 0x03]) + b"new"
"""Field 9,999, three bytes: nobody has heard of it."""
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0, "num_speculative_tokens": 3, "drafter": "model"},
    {"temperature": 1.0, "seed": 9, "stop": ["zzz"], "logprobs": True, "top_logprobs": 2},
    {"temperature": 1.0, "acceptance": "block", "num_speculative_tokens": 2, "drafter": "model", "report_steps": True},
]
Rewrite = Callable[[type[Message], bytes], bytes]


def baseline() -> descriptor_pool.DescriptorPool:
    """The wire of the version that `buf breaking` compares with."""
    pool = descriptor_pool.DescriptorPool()
    image = descriptor_pb2.FileDescriptorSet.FromString((ROOT / "protos/baseline.binpb").read_bytes())
    for file in image.file:
        pool.Add(file)  # type: ignore[no-untyped-call]
    return pool


BASELINE = baseline()


def as_older(kind: type[Message], data: bytes) -> bytes:
    """Read and written by the baseline: what it does not know is dropped."""
    older = message_factory.GetMessageClass(BASELINE.FindMessageTypeByName(kind.DESCRIPTOR.full_name))
    message = older.FromString(data)
    message.DiscardUnknownFields()  # type: ignore[attr-defined]
    return bytes(message.SerializeToString())


def as_newer(kind: type[Message], data: bytes) -> bytes:
    """Written by a version that has a further field in every message, however deep."""
    message = kind.FromString(data)
    _add_unknown(message)
    return message.SerializeToString()


def _add_unknown(message: Message) -> None:
    for field, value in message.ListFields():
        if field.type != FieldDescriptor.TYPE_MESSAGE or field.message_type.GetOptions().map_entry:
            continue
        for part in value if field.is_repeated else (value,):
            _add_unknown(part)
    message.MergeFromString(UNKNOWN)


def test_the_rewriting_does_what_it_says() -> None:
    chunk = generation_pb2.GenerateChunk(index=1, token_ids=[1, 2], num_draft_tokens=3)
    response = generation_pb2.GenerateResponse(chunk=chunk)
    newer = as_newer(generation_pb2.GenerateResponse, response.SerializeToString())
    assert newer.count(UNKNOWN) == 2
    older = generation_pb2.GenerateResponse.FromString(as_older(generation_pb2.GenerateResponse, newer))
    assert UNKNOWN not in older.SerializeToString()
    assert list(older.chunk.token_ids) == [1, 2]


class Between(grpc.GenericRpcHandler):
    """Carries every call on, messages rewritten both ways; counts them by method."""

    def __init__(self, channel: grpc.aio.Channel, rewrite: Rewrite) -> None:
        self._channel = channel
        self._rewrite = rewrite
        self.num_messages: dict[str, int] = {}

    def service(self, details: Any) -> grpc.RpcMethodHandler | None:
        *_, service, name = details.method.split("/")
        if not service.startswith("outrider.v1."):
            return self._raw(details.method)
        pool = generation_pb2.DESCRIPTOR.pool
        method = pool.FindServiceByName(service).methods_by_name[name]
        request, response = (message_factory.GetMessageClass(kind) for kind in (method.input_type, method.output_type))

        def there(data: bytes) -> bytes:
            self.num_messages[name] = self.num_messages.get(name, 0) + 1
            return self._rewrite(request, data)

        return self._raw(details.method, there, lambda data: self._rewrite(response, data))

    def _raw(
        self,
        method: str,
        there: Callable[[bytes], bytes] = lambda data: data,
        back: Callable[[bytes], bytes] = lambda data: data,
    ) -> grpc.RpcMethodHandler:
        async def carry(requests: AsyncIterator[bytes], context: Any) -> None:
            async def rewritten() -> AsyncIterator[bytes]:
                async for data in requests:
                    yield there(data)

            call = self._channel.stream_stream(method)(rewritten(), timeout=context.time_remaining())
            try:
                async for data in call:
                    await context.write(back(data))
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "", error.trailing_metadata() or ())
            finally:
                call.cancel()

        return grpc.stream_stream_rpc_method_handler(carry)  # type: ignore[arg-type]


@asynccontextmanager
async def between(address: str, rewrite: Rewrite) -> AsyncIterator[tuple[str, Between]]:
    """An address that leads to `address`."""
    async with open_channel(address) as channel:
        server, handler = grpc.aio.server(), Between(channel, rewrite)
        server.add_generic_rpc_handlers((handler,))
        async with listening(server) as reached:
            yield reached, handler


@pytest.mark.parametrize("link", ["client", "target", "draft", "all"])
@pytest.mark.parametrize("rewrite", [as_older, as_newer], ids=["older", "newer"])
async def test_a_peer_of_another_version_changes_no_text(link: str, rewrite: Rewrite) -> None:
    links = ("client", "target", "draft") if link == "all" else (link,)
    async with AsyncExitStack() as cleanup:
        stack = await cleanup.enter_async_context(in_process_stack(TARGET, DRAFT))
        addresses = {"target": stack.target[0].address, "draft": stack.draft[0].address}
        seen: dict[str, Between] = {}
        for name in addresses:
            if name in links:
                addresses[name], seen[name] = await cleanup.enter_async_context(between(addresses[name], rewrite))
        workers = {f"{name}_workers": (address,) for name, address in addresses.items()}
        mixed = await start(coordinator.server.serve, CoordinatorSettings(port=0, log_level="warning", **workers))
        cleanup.push_async_callback(mixed.close)
        address = mixed.address
        if "client" in links:
            address, seen["client"] = await cleanup.enter_async_context(between(address, rewrite))
        plain = await cleanup.enter_async_context(outrider.Client(stack.address))
        client = await cleanup.enter_async_context(outrider.Client(address))
        num_drafted = 0
        for options in REQUESTS:
            whole = await plain.complete([1, 2, 3], max_tokens=60, **options)
            answer = await client.complete([1, 2, 3], max_tokens=60, **options)
            cut = await client.complete([1, 2, 3], max_tokens=60, resume_token_ids=whole.token_ids[:20], **options)
            if "acceptance" not in options:
                assert (answer.token_ids, answer.text) == (whole.token_ids, whole.text)
                assert cut.token_ids == whole.token_ids[20:]
                assert answer.logprobs == whole.logprobs
            assert len(answer.token_ids) == answer.usage.completion_tokens == 60
            num_drafted += answer.speculation.num_draft_tokens
        assert num_drafted > 0, "INCONCLUSIVE"
        assert (await client.model_info()).vocab_size == 32
        assert all(worker.healthy for worker in (await client.server_info()).workers)
        for name, method in {"client": "Generate", "target": "Session", "draft": "Session"}.items():
            assert name not in links or seen[name].num_messages[method] > 5


def test_values_that_this_client_does_not_know_read_as_something_harmless() -> None:
    chunk = generation_pb2.GenerateChunk(
        token_ids=[4], origins=[17], step=generation_pb2.StepRecord(cause=99)  # type: ignore[list-item, arg-type]
    )  # fmt: skip
    event = read_event(generation_pb2.GenerateResponse(chunk=chunk))
    assert isinstance(event, outrider.Chunk)
    assert (event.origins, event.step and event.step.cause) == ((Origin.PLAIN,), GammaCause.UNSPECIFIED)
    end = generation_pb2.GenerateComplete(finish_reason=42)  # type: ignore[arg-type]
    told = read_event(generation_pb2.GenerateResponse(complete=end))
    assert isinstance(told, outrider.Complete)
    assert told.finish_reason == "42"
    assert common_pb2.FinishReason.Name(1) == "FINISH_REASON_STOP"
    assert read_event(generation_pb2.GenerateResponse.FromString(UNKNOWN)) is None, "an event of a later version"
    started = generation_pb2.GenerateStarted(acceptance=77)  # type: ignore[arg-type]
    with pytest.raises(outrider.OutriderError, match="rule 77"):
        read_event(generation_pb2.GenerateResponse(started=started))

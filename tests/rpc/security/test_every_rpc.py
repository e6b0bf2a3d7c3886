"""Any message at any RPC of any service: no crash, no hang, a status of ours. Which RPCs there are the descriptors say.

Messages are drawn from the descriptors, with values at the edges of their kinds; metadata is drawn too.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import pytest
from conftest import scaled
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from stack import Stack, in_process_stack

from outrider import Client
from outrider.errors import OTHER_PROCESS
from outrider.serving.channel import open_channel
from outrider.serving.status import from_rpc_error, is_from_transport
from outrider.v1 import draft_pb2, generation_pb2, target_pb2, worker_pb2

SERVICES = {
    service.full_name: service
    for module in (generation_pb2, draft_pb2, target_pb2, worker_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
}
OURS = {
    "OK", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "ABORTED", "UNIMPLEMENTED",
    "DEADLINE_EXCEEDED", OTHER_PROCESS,
}  # fmt: skip
"""A lone message is no reason for any other: not INTERNAL or UNKNOWN, nor UNAVAILABLE but for a process that it is not
meant for."""
PATIENCE_S = 30.0
TOY = "toy:vocab=16,seed=1,blocks=400"
TYPE = FieldDescriptor
INTEGERS = {
    TYPE.TYPE_INT32: (-(2**31), 2**31 - 1),
    TYPE.TYPE_SINT32: (-(2**31), 2**31 - 1),
    TYPE.TYPE_INT64: (-(2**63), 2**63 - 1),
    TYPE.TYPE_UINT32: (0, 2**32 - 1),
    TYPE.TYPE_FIXED32: (0, 2**32 - 1),
    TYPE.TYPE_UINT64: (0, 2**64 - 1),
    TYPE.TYPE_FIXED64: (0, 2**64 - 1),
    TYPE.TYPE_ENUM: (-1, 99),
}
WORDS = ("", "model", "auto", "lookup", "tree", "127.0.0.1:1", "default", "\x00", "../../etc/passwd", "a" * 300)


def scalar(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.type in INTEGERS:
        low, high = INTEGERS[field.type]
        return st.integers(0, 3) | st.integers(0, 16) | st.sampled_from((low, high)) | st.integers(low, high)
    match field.type:
        case TYPE.TYPE_BOOL:
            return st.booleans()
        case TYPE.TYPE_FLOAT:
            return st.floats(width=32)
        case TYPE.TYPE_DOUBLE:
            return st.floats()
        case TYPE.TYPE_BYTES:
            return st.binary(max_size=64)
        case TYPE.TYPE_STRING:
            return st.sampled_from(WORDS) | st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
    raise AssertionError(f"{field.full_name}: a kind of field that no message had so far")


@cache
def messages(descriptor: Descriptor, depth: int = 0) -> st.SearchStrategy[Any]:
    """Any subset of the fields, each with any value of its kind."""
    fields = [f for f in descriptor.fields if f.message_type is None or depth < 4]
    kept = {field.name: value(field, depth) for field in fields}
    drawn = st.lists(st.sampled_from(fields), max_size=6, unique_by=lambda f: f.name) if fields else st.just([])
    chosen = drawn.flatmap(lambda some: st.fixed_dictionaries({f.name: kept[f.name] for f in some}))
    return chosen.map(lambda values: message_factory.GetMessageClass(descriptor)(**values))


def value(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, content = field.message_type.fields
        kind = scalar(content) if content.message_type is None else messages(content.message_type, depth + 1)
        return st.dictionaries(scalar(key), kind, max_size=3)
    kind = scalar(field) if field.message_type is None else messages(field.message_type, depth + 1)
    return st.lists(kind, max_size=4) if field.is_repeated else kind


def raw(method: MethodDescriptor) -> st.SearchStrategy[list[bytes]]:
    """What is sent, whole messages or not."""
    whole = messages(method.input_type).map(lambda message: message.SerializeToString())
    return st.lists(whole | st.binary(max_size=40), min_size=1, max_size=3 if method.client_streaming else 1)


METADATA = st.dictionaries(
    st.sampled_from(("x-outrider-tenant", "authorization", "traceparent", "tracestate", "x-request-id", "other")),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40) | st.sampled_from(("a", "Bearer x")),
    max_size=3,
)


@asynccontextmanager
async def everything() -> AsyncIterator[Callable[[str], str]]:
    """Address of a service."""
    async with in_process_stack(TOY, f"{TOY},agreement=0.8", coordinator={"max_request_s": 4 * PATIENCE_S}) as stack:

        def address(service: str) -> str:
            worker = {"outrider.v1.DraftService": stack.draft, "outrider.v1.TargetService": stack.target}
            worker["outrider.v1.WorkerService"] = stack.target
            return worker[service][0].address if service in worker else stack.address

        yield address
        await still_serves(stack)


async def still_serves(stack: Stack) -> None:
    async with Client(stack.address, timeout_s=4 * PATIENCE_S) as client:
        answer = await client.complete([1, 2, 3], temperature=0.0, max_tokens=20, num_speculative_tokens=3)
        assert answer.speculation.num_draft_tokens > 0
        info = await client.server_info()
        assert (info.num_requests_running, info.num_requests_waiting) == (0, 0)


LOST_RACE = "Internal error from Core"
"""What gRPC's own client says, of no server, where a call ends just as it writes to it."""


async def status(channel: grpc.aio.Channel, method: MethodDescriptor, sent: list[bytes], metadata: Any) -> str:
    """Of a call that sends these and no more, with its answers read to the end."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    options: dict[str, Any] = {"timeout": PATIENCE_S, "metadata": tuple(metadata.items())}
    try:
        async with asyncio.timeout(2 * PATIENCE_S):
            if method.client_streaming:
                call = channel.stream_stream(path)(iter(sent), **options)
                async for _ in call:
                    pass
            elif method.server_streaming:
                async for _ in channel.unary_stream(path)(sent[0], **options):
                    pass
            else:
                await channel.unary_unary(path)(sent[0], **options)
    except grpc.aio.AioRpcError as error:
        if error.details() == LOST_RACE and is_from_transport(error):
            return await status(channel, method, sent, metadata)
        reason = from_rpc_error(error).reason
        return reason if reason == OTHER_PROCESS else error.code().name
    return "OK"


def test_all_services_are_here() -> None:
    protos = (Path(__file__).parents[3] / "protos/outrider/v1").glob("*.proto")
    told = {name for path in protos for name in re.findall(r"(?m)^service (\w+)", path.read_text(encoding="utf-8"))}
    assert {name.rpartition(".")[2] for name in SERVICES} == told
    assert all(service.methods for service in SERVICES.values())


Drawn = list[tuple[list[bytes], dict[str, str]]]


def examples(method: MethodDescriptor) -> Drawn:
    """The same in every run."""
    found: Drawn = []

    @settings(
        max_examples=scaled(300, 25), deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(sent=raw(method), metadata=METADATA)
    def draw(sent: list[bytes], metadata: dict[str, str]) -> None:
        found.append((sent, metadata))

    draw()
    return found


@pytest.mark.parametrize("service", SERVICES)
async def test_any_message_gets_a_status_of_ours(service: str) -> None:
    drawn = {method: await asyncio.to_thread(examples, method) for method in SERVICES[service].methods}
    async with everything() as address, open_channel(address(service)) as channel:
        for method, calls in drawn.items():
            statuses: Counter[str] = Counter()
            for start in range(0, len(calls), 5):
                batch = calls[start : start + 5]
                found = await asyncio.gather(*(status(channel, method, sent, metadata) for sent, metadata in batch))
                for (sent, metadata), code in zip(batch, found, strict=True):
                    assert code in OURS, f"{method.full_name}: {code}: {sent!r} {metadata}"
                statuses.update(found)
            assert statuses.total() >= 25, f"{method.full_name}: too little was tried"
            assert statuses["INVALID_ARGUMENT"], f"{method.full_name}: {statuses}"

"""Edges of the public service: choices that resume, errors that quote much, requests too long for the event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable

import grpc
import pytest
from conftest import SCALE
from google.protobuf.descriptor import FieldDescriptor
from stack import in_process_stack

from outrider import Client
from outrider.errors import InvalidArgument, OutriderError
from outrider.lm.toy import load_toy
from outrider.serving.channel import CLIENT_OPTIONS
from outrider.serving.status import from_rpc_error
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc

TARGET, DRAFT = "toy:vocab=48,seed=3", "toy:vocab=48,seed=3,agreement=0.85"


async def test_each_of_several_choices_resumes_with_its_very_own_text() -> None:
    options = {"temperature": 1.0, "max_tokens": 24, "num_speculative_tokens": 3, "drafter": "model"}
    async with in_process_stack(TARGET, DRAFT) as stack, Client(stack.address) as client:
        texts: dict[int, list[int]] = {}
        async for event in client.generate([1, 2], n=3, seed=77, **options):
            if hasattr(event, "token_ids"):
                texts.setdefault(event.index, []).extend(event.token_ids)
        assert len({tuple(ids) for ids in texts.values()}) == 3
        for choice, ids in texts.items():
            for cut in range(0, len(ids), 5 if SCALE < 1 else 1):
                rest = await client.complete(
                    [1, 2], seed=77, acceptance="coupled", resume_token_ids=ids[:cut], resume_choice=choice, **options
                )
                assert list(rest.token_ids) == ids[cut:], f"choice {choice}, cut {cut}"


async def test_an_error_that_quotes_much_of_a_request_still_arrives() -> None:
    """gRPC keeps 8 KiB for trailers; beyond them the client would learn nothing of what was wrong."""
    request = pb.TokenizeRequest()
    request.chat.messages.add(role="user", content="A")
    template = "{{ raise_exception('\U0001f600' * 5000) }}"
    loaded = load_toy(TARGET)
    described = dataclasses.replace(loaded, description=dataclasses.replace(loaded.description, chat_template=template))
    async with in_process_stack(described, None) as stack, grpc.aio.insecure_channel(stack.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await generation_pb2_grpc.GenerationServiceStub(channel).Tokenize(request)
        error = from_rpc_error(refused.value)
        assert (error.status, error.field, error.reason) == (
            "INVALID_ARGUMENT",
            "chat.messages",
            "CHAT_TEMPLATE_REFUSED",
        )
        assert error.message.endswith("...")


HUGE = {
    "resume_token_ids": pb.GenerateRequest(text="!", resume_token_ids=[1] * 8_000_000),
    "stopping.stop_token_ids": pb.GenerateRequest(
        text="!", stopping=pb.StoppingOptions(stop_token_ids=[47] * 8_000_000 + [48])
    ),
    "chat": pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="u")] * 1_000_000)),
}


@pytest.mark.parametrize("field", HUGE)
async def test_a_huge_list_is_refused_by_field_and_the_server_goes_on(field: str) -> None:
    async with in_process_stack(TARGET, None) as stack:
        async with grpc.aio.insecure_channel(stack.address, options=CLIENT_OPTIONS) as channel:
            call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(HUGE[field], timeout=60)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            error = from_rpc_error(refused.value)
            assert isinstance(error, InvalidArgument)
            assert error.field == field
        async with Client(stack.address) as client:
            assert len((await client.complete([1], max_tokens=3)).token_ids) == 3


async def test_detokenize_of_a_huge_list_runs_beside_other_calls() -> None:
    async with in_process_stack(TARGET, None) as stack, Client(stack.address) as client:
        big = asyncio.create_task(client.detokenize([1] * 3_000_000))
        num_answers = 0
        while not big.done():
            await client.complete([1], max_tokens=2)
            num_answers += 1
        assert len(await big) == 3_000_000
        assert num_answers > 0
        with pytest.raises(OutriderError, match="index 2"):
            await client.detokenize([1, 2, 48])


def _impossible() -> list[tuple[str, pb.GenerateRequest]]:
    """Every double with NaN and infinities, every int64 below zero and at the top, every list of ids out of range:
    found in the messages themselves, so that a new field is asked too."""
    cases = []

    def add(field: str, set_field: Callable[[pb.GenerateRequest], object]) -> None:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]))
        set_field(request)
        cases.append((field, request))

    for section in ("sampling", "stopping", "output", "speculation"):
        for field in pb.GenerateRequest.DESCRIPTOR.fields_by_name[section].message_type.fields:
            values: tuple[float, ...] = ()
            if field.type == FieldDescriptor.TYPE_DOUBLE:
                values = (math.nan, math.inf, -math.inf, 1e308, -1.0 if field.name == "temperature" else -3.0)
            elif field.type == FieldDescriptor.TYPE_INT64:
                values = (-1, -(2**63), 2**63 - 1)
            for value in values:
                add(f"{section}.{field.name}", lambda r, s=section, f=field, v=value: setattr(getattr(r, s), f.name, v))
    for value in (48, 2**32 - 1):
        add("token_ids.ids", lambda r, v=value: r.token_ids.ids.append(v))
        add("resume_token_ids", lambda r, v=value: r.resume_token_ids.append(v))
        add("stopping.stop_token_ids", lambda r, v=value: r.stopping.stop_token_ids.append(v))
        add("sampling.logit_bias", lambda r, v=value: r.sampling.logit_bias.update({v: 1.0}))
        add("sampling.allowed_token_ids", lambda r, v=value: r.sampling.allowed_token_ids.ids.append(v))
    for value in (math.nan, math.inf, -math.inf, 101.0):
        add("sampling.logit_bias[3]", lambda r, v=value: r.sampling.logit_bias.update({3: v}))
    for value in (-1, 4, 99, 2**31 - 1):
        add("speculation.acceptance", lambda r, v=value: setattr(r.speculation, "acceptance", v))
    return cases


async def test_every_impossible_number_is_refused_by_its_field() -> None:
    cases = _impossible()
    assert len(cases) > 50
    async with in_process_stack(TARGET, DRAFT) as stack:
        async with grpc.aio.insecure_channel(stack.address, options=CLIENT_OPTIONS) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            for field, request in cases:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.Generate(request, timeout=30).read()
                error = from_rpc_error(refused.value)
                assert (error.status, error.field) == ("INVALID_ARGUMENT", field), request
        async with Client(stack.address) as client:
            assert len((await client.complete([1], max_tokens=3)).token_ids) == 3


@pytest.mark.parametrize("kwargs", ['{"x": "\\ud800"}', '{"x": 0}', '{"x": {"y": "\\udfff"}}', '{"x": 1e999}'])
async def test_what_a_template_trips_over_is_the_requests_fault_and_named(kwargs: str) -> None:
    """Half a surrogate pair, a division by zero: neither is an internal error."""
    loaded = load_toy(TARGET)
    template = "{{ x }}{{ 1 // x }}"
    described = dataclasses.replace(loaded, description=dataclasses.replace(loaded.description, chat_template=template))
    request = pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="A")]))
    request.chat.chat_template_kwargs = kwargs
    async with in_process_stack(described, None) as stack, grpc.aio.insecure_channel(stack.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await generation_pb2_grpc.GenerationServiceStub(channel).Generate(request).read()
        error = from_rpc_error(refused.value)
        assert error.status == "INVALID_ARGUMENT"
        assert error.field in ("chat.chat_template_kwargs", "chat.messages", "text")

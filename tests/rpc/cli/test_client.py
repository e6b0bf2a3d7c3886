"""The client against a real in-process server: what arrives there, and what comes back."""

from __future__ import annotations

import asyncio
import math
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from fake_generation import FakeGeneration, serving

import outrider
from outrider.client import MAX_TIMEOUT_S, Client, GenerateOptions, build_request
from outrider.errors import DeadlineExceeded, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from outrider.results import Chunk, Complete, Started
from outrider.sampling.params import MAX_CHOICES, AcceptanceRule, Origin
from outrider.v1 import generation_pb2


@pytest.fixture
def service() -> FakeGeneration:
    return FakeGeneration()


@pytest.fixture
async def client(service: FakeGeneration) -> AsyncIterator[Client]:
    async with serving(service) as address, Client(address, metadata={"x-outrider-tenant": "acme"}) as client:
        yield client


async def test_events_are_typed_and_in_order(client: Client) -> None:
    events = [
        event
        async for event in client.generate(
            [1, 2], temperature=0.0, max_tokens=7, num_speculative_tokens=2, report_steps=True, request_id="r1"
        )
    ]
    started, *chunks, complete = events
    assert started == Started("r1", 0, AcceptanceRule.BLOCK, 7, 2, events[0].model)
    assert all(isinstance(chunk, Chunk) and chunk.step is not None for chunk in chunks)
    assert chunks[1].origins == (Origin.ACCEPTED, Origin.ACCEPTED, Origin.PLAIN)
    assert isinstance(complete, Complete)
    assert (complete.finish_reason, complete.matched_stop, complete.usage.completion_tokens) == ("length", None, 7)


async def test_complete_joins_the_stream(client: Client) -> None:
    options: GenerateOptions = {"temperature": 0.0, "max_tokens": 6, "num_speculative_tokens": 2}
    chunks = [event async for event in client.generate([1, 2], **options) if isinstance(event, Chunk)]
    answer = await client.complete([1, 2], **options)
    assert answer.chunks == tuple(chunks)
    assert answer.token_ids == tuple(token_id for chunk in chunks for token_id in chunk.token_ids)
    assert answer.text == "".join(chunk.text for chunk in chunks)
    assert len(answer.token_ids) == len(answer.origins) == answer.usage.completion_tokens == 6


async def test_complete_refuses_several_choices(client: Client) -> None:
    for several in (2, 0):
        with pytest.raises(InvalidArgument, match="one choice") as refused:
            await client.complete("x", n=several)
        assert refused.value.field == "output.n"
    answer = await client.complete([1], max_tokens=2, n=None)  # type: ignore[arg-type]
    assert len(answer.token_ids) == 2, "None is as good as left out"


async def test_metadata_and_deadline_arrive(client: Client, service: FakeGeneration) -> None:
    await client.complete([1], max_tokens=2, timeout_s=20.0)
    await client.complete([1], max_tokens=2)
    await client.complete([1], max_tokens=2, timeout_s=math.inf)
    async with Client(client.address, timeout_s=MAX_TIMEOUT_S) as patient:
        await patient.complete([1], max_tokens=2)
    assert service.metadata[0]["x-outrider-tenant"] == "acme"
    assert service.deadlines[0] is not None
    assert 0 < service.deadlines[0] <= 21.0  # gRPC rounds it up on the wire
    assert service.deadlines[1:3] == [None, None]
    assert service.deadlines[3] is not None
    assert service.deadlines[3] > 1e7  # gRPC has servers told of three years at most


async def forever(request: generation_pb2.GenerateRequest) -> AsyncIterator[generation_pb2.GenerateResponse]:
    """An answer that starts and never ends."""
    yield generation_pb2.GenerateResponse(started=generation_pb2.GenerateStarted(acceptance=1))
    yield generation_pb2.GenerateResponse(chunk=generation_pb2.GenerateChunk(token_ids=[1]))
    await asyncio.Event().wait()


async def test_a_passed_deadline_is_its_own_error(service: FakeGeneration) -> None:
    service._answer = forever  # type: ignore[method-assign]
    async with serving(service) as address, Client(address, timeout_s=0.2) as client:
        with pytest.raises(DeadlineExceeded, match=r"timeout_s is 0\.2"):
            await client.complete([1])


@pytest.mark.parametrize(
    "address", ["", "nonsense", "host:", "host:0", "host:70000", ":50050", "http://host:1", "a b:1"]
)
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(InvalidArgument, match="host:port") as refusal:
        Client(address)
    assert refusal.value.field == "address"


@pytest.mark.parametrize("timeout_s", [-1.0, 0.0, math.nan, -math.inf, 1e10, 1e12, pytest.param(10**5000, id="huge")])
async def test_a_timeout_that_cannot_be_is_refused(client: Client, timeout_s: float) -> None:
    with pytest.raises(InvalidArgument, match="timeout_s"):
        await client.complete([1], timeout_s=timeout_s)
    with pytest.raises(InvalidArgument, match="timeout_s"):
        Client("127.0.0.1:1", timeout_s=timeout_s)


async def test_a_fault_behind_the_coordinator_is_not_taken_for_its_absence(
    client: Client, service: FakeGeneration
) -> None:
    service.error = Unavailable("worker 10.0.0.1:1: failed to connect to all addresses", reason="WORKER_LOST")
    with pytest.raises(Unavailable, match=r"10\.0\.0\.1.*failed to connect") as caught:
        await client.complete([1])
    assert caught.value.reason == "WORKER_LOST"


async def test_status_details_become_the_error(client: Client, service: FakeGeneration) -> None:
    service.error = ResourceExhausted("queue full", reason="QUEUE_FULL", retry_delay_s=1.5)
    with pytest.raises(ResourceExhausted) as caught:
        await client.complete([1])
    assert (caught.value.message, caught.value.reason, caught.value.retry_delay_s) == ("queue full", "QUEUE_FULL", 1.5)
    service.error = InvalidArgument("top_p is 2", field="sampling.top_p")
    with pytest.raises(InvalidArgument) as refused:
        await client.complete([1])
    assert refused.value.field == "sampling.top_p"
    service.error = NotFound("no such model")
    with pytest.raises(NotFound):
        await client.complete([1])


async def test_nobody_there_names_the_fix() -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1.*outrider up"):
            await client.server_info()
        with pytest.raises(Unavailable, match="outrider up"):
            await client.complete("x")


async def test_leaving_the_loop_cancels_the_request(client: Client, service: FakeGeneration) -> None:
    service._answer = forever  # type: ignore[method-assign]
    stream = client.generate([1])
    async for event in stream:
        if isinstance(event, Chunk):
            break
    await stream.aclose()
    await asyncio.wait_for(service.cancelled.wait(), 10)


async def test_model_and_server_info(client: Client) -> None:
    info = await client.model_info()
    assert info.simulated
    assert info.generation_defaults.temperature == 0.0, "a default of zero is not an absent one"
    assert info.generation_defaults.top_k is None
    assert info.acceptance_rules == tuple(AcceptanceRule)
    server = await client.server_info()
    assert server.versions == {"python": "3"}
    assert (server.workers[0].role, server.workers[0].weight_bytes) == ("target", 5)


async def test_tokenize_and_detokenize(client: Client) -> None:
    assert await client.tokenize("ab") == [97, 98]
    assert await client.tokenize([{"role": "user", "content": "c"}]) == [99]
    assert await client.detokenize([97, 98]) == "ab"


def test_every_option_reaches_its_field() -> None:
    values: GenerateOptions = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.25, "seed": 2**64 - 1, "repetition_penalty": 1.5,
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {5: -1.0}, "max_tokens": 4, "min_tokens": 2,
        "stop": ["a", "b"], "stop_token_ids": [7], "ignore_eos": True, "include_stop_str_in_output": True,
        "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 3, "skip_special_tokens": False, "n": 2, "regex": "a+",
        "num_speculative_tokens": 0, "max_speculative_tokens": 4, "drafter": "lookup",
        "acceptance": AcceptanceRule.TOKEN, "report_steps": True, "model": "m", "request_id": "r", "priority": -1,
        "resume_token_ids": [1, 2], "resume_choice": 1, "prompt_hash": 2**64 - 1, "allowed_token_ids": [4, 9],
        "bad_words": ["c", "d"], "model_fingerprint": "f", "record": True,
    }  # fmt: skip
    one_of = {"json_schema", "regex", "grammar"}
    of_chat = {"add_generation_prompt", "continue_final_message", "chat_template_kwargs"}
    assert values.keys() | one_of | of_chat | {"timeout_s"} == GenerateOptions.__annotations__.keys()
    request = build_request("x", values)
    sections = [
        request,
        request.sampling,
        request.stopping,
        request.output,
        request.speculation,
        request.structured_output,
    ]
    for name, value in values.items():
        (owner,) = (section for section in sections if name in section.DESCRIPTOR.fields_by_name)
        held = owner.allowed_token_ids.ids if name == "allowed_token_ids" else getattr(owner, name)
        assert (dict(held) if name == "logit_bias" else list(held) if isinstance(value, list) else held) == value, name
    assert build_request("x", {"num_speculative_tokens": 0}).speculation.HasField("num_speculative_tokens")
    assert not build_request("x", {}).speculation.HasField("num_speculative_tokens")
    assert build_request("x", {"allowed_token_ids": []}).sampling.HasField("allowed_token_ids")
    assert not build_request("x", {}).sampling.HasField("allowed_token_ids")
    assert list(build_request("x", {"bad_words": "word"}).sampling.bad_words) == ["word"]


def test_prompts_of_all_three_kinds() -> None:
    assert build_request("x", {}).text == "x"
    assert list(build_request([1, 2], {}).token_ids.ids) == [1, 2]
    assert build_request([], {}).WhichOneof("prompt") == "token_ids"
    for prompt in (None, 7, b"ids", {"role": "user", "content": "x"}, iter([1])):
        with pytest.raises(InvalidArgument, match=f"prompt is of type {type(prompt).__name__}, must be a text"):
            build_request(prompt, {})  # type: ignore[arg-type]
    assert build_request([{"role": "user", "content": "c"}], {}).chat.messages[0].content == "c"


def test_the_package_lists_what_it_loads_only_when_asked_for() -> None:
    assert {*outrider.__all__, "__doc__"} <= set(dir(outrider))


def test_options_of_a_conversation() -> None:
    options: GenerateOptions = {
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template_kwargs": {"enable_thinking": False, "budget": 3},
    }
    chat = build_request([{"role": "user", "content": "c"}], options).chat
    assert (chat.add_generation_prompt, chat.HasField("add_generation_prompt")) == (False, True)
    assert chat.continue_final_message
    assert chat.chat_template_kwargs == '{"enable_thinking": false, "budget": 3}'
    for name, value in options.items():
        with pytest.raises(InvalidArgument, match="needs a prompt of chat messages") as refusal:
            build_request("x", {name: value})  # type: ignore[misc]
        assert refusal.value.field == f"chat.{name}"


@pytest.mark.parametrize(
    "metadata",
    [
        {"X-Foo": "a"},
        {"": "a"},
        {":path": "a"},
        {"x foo": "a"},
        {"x-foo": "a\nb"},
        {"x-foo": "\u00e9"},
        {"x-foo": 5},
        {"x-foo-bin": "a"},
    ],
)
def test_metadata_that_no_call_can_carry_is_refused(metadata: dict[str, str]) -> None:
    for make in (partial(Client, metadata=metadata), lambda address: Client(address).with_metadata(metadata)):
        with pytest.raises(InvalidArgument, match="metadata") as refused:
            make("127.0.0.1:1")
        assert refused.value.field == "metadata"
        assert "a\nb" not in refused.value.message, "it may be a secret"


async def test_metadata_of_every_kind_arrives(service: FakeGeneration) -> None:
    told: Any = {"x_a.b-1": " a~", "x-empty": "", "x-any-bin": bytes(range(256))}
    async with serving(service) as address, Client(address, metadata=told) as client:
        await client.complete([1], max_tokens=1)
    assert service.metadata[0]["x_a.b-1"].strip() == "a~"
    assert service.metadata[0]["x-empty"] == ""
    assert service.metadata[0]["x-any-bin"] == told["x-any-bin"]


@pytest.mark.parametrize("n", [0, 17, 2**31])
def test_more_choices_than_a_request_may_have_are_refused_before_anything_is_kept_for_them(n: int) -> None:
    with pytest.raises(InvalidArgument, match=f"output.n is {n}, must be from 1 to {MAX_CHOICES}") as refused:
        Client("127.0.0.1:1").generate("x", n=n)
    assert (refused.value.field, refused.value.reason) == ("output.n", "OUT_OF_RANGE")
    assert build_request("x", {"n": MAX_CHOICES}).output.n == MAX_CHOICES


HALF = "\ud800"
"""Of a surrogate pair: a str of Python's that is no text."""


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        (lambda client: client.complete(HALF), "text"),
        (lambda client: client.complete("x", stop=HALF), "stopping.stop"),
        (lambda client: client.complete("x", model=HALF), "model"),
        (lambda client: client.complete([{"role": "user", "content": HALF}]), "chat.messages[0].content"),
        (lambda client: client.tokenize(HALF), "text"),
        (lambda client: client.tokenize("x", model=HALF), "model"),
        (lambda client: client.tokenize([{"role": HALF, "content": ""}]), "chat.messages[0].role"),
        (lambda client: client.detokenize([1], model=HALF), "model"),
        (lambda client: client.token_bytes([1], model=HALF), "model"),
        (lambda client: client.model_info(HALF), "model"),
        (lambda client: client.trace(HALF), "request_id"),
        (lambda client: client.records(HALF), "request_id"),
        (lambda client: client.activity(max_streams=-1), "max_streams"),
    ],
)
async def test_what_no_message_can_hold_names_its_field(ask: Callable[[Client], Awaitable[object]], field: str) -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(InvalidArgument, match=re.escape(field)) as refused:
            await ask(client)
    assert refused.value.field == field


async def test_unknown_options_are_errors(client: Client) -> None:
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        client.generate("x", temprature=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("x", {"temperature": "hot"}, "sampling.temperature"),
        ("x", {"top_k": -1}, "sampling.top_k"),
        ("x", {"seed": 2**64}, "sampling.seed"),
        ("x", {"seed": 10**5000}, "sampling.seed"),
        ("x", {"temperature": 10**400}, "sampling.temperature"),
        ("x", {"stop_token_ids": [-1]}, "stopping.stop_token_ids"),
        ("x", {"acceptance": "lucky"}, "speculation.acceptance"),
        ([1, -2], {}, "token_ids.ids"),
        ([{"role": "user"}], {}, "chat.messages[0]"),
        ([{"role": "user", "content": 3}], {}, "chat.messages[0].content"),
    ],
)
def test_values_that_no_field_can_hold_name_the_field(prompt: object, options: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        build_request(prompt, options)  # type: ignore[arg-type]
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("first", "second"), [("json_schema", "regex"), ("regex", "grammar"), ("json_schema", "grammar")]
)
def test_a_text_has_one_form(first: str, second: str) -> None:
    for options in ({first: "a", second: "b"}, {second: "b", first: "a"}):
        with pytest.raises(InvalidArgument, match=f"{first} and {second} both give the text a form: give one") as both:
            build_request("x", options)  # type: ignore[arg-type]
        assert both.value.field == f"structured_output.{second}"
    assert build_request("x", {first: "a", second: None}).structured_output.WhichOneof("constraint") == first  # type: ignore[misc]


def test_import_is_light_and_lazy() -> None:
    code = "import sys, outrider; assert 'grpc' not in sys.modules; outrider.Client; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert outrider.Client is Client
    with pytest.raises(AttributeError, match="nothing"):
        outrider.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "user", "content": "x", "name": "me"}, r"chat\.messages\[0\] .* role and content: leave out name$"),
        ({"role": "user"}, r"chat\.messages\[0\] .* role and content$"),
    ],
)
def test_a_turn_of_other_keys_is_refused_by_name(message: dict[str, str], told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        build_request([message], {})

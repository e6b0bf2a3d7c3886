"""A target worker that is broken, beside one that is not: streams go on at the other one, and nothing else is hurt.

A proxy before a real worker that spoils what it says; the gRPC is real. What it says looks like tokens of a text in no
case: such a worker cannot be told from a right one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from faults.rogue import forward
from grpc_health.v1 import health_pb2_grpc
from stack import in_process_stack, listening, start

import coordinator.server as coordinator_server
from outrider import Client
from outrider.settings import CoordinatorSettings
from outrider.v1 import common_pb2, target_pb2, target_pb2_grpc, worker_pb2_grpc

TARGET, DRAFT = "toy:vocab=16,seed=1", "toy:vocab=16,seed=1,agreement=0.8"
PROMPT, LENGTH = [1, 2, 3], 40


def lag(response: Any) -> Any:
    other = target_pb2.TargetServiceSessionResponse()
    other.out_of_step.header.CopyFrom(response.verdict.header)
    other.out_of_step.header.base_length = 1 << 30
    return other


def more(response: Any) -> None:
    response.verdict.committed_ids.extend([1] * 500)
    response.verdict.origins.extend([4] * 500)


def assign(**values: Any) -> Callable[[Any], None]:
    def spoil(response: Any) -> None:
        for name, value in values.items():
            setattr(response.verdict, name, value)

    return spoil


def no_end(response: Any) -> None:
    if response.verdict.finish_reason:
        response.verdict.finish_reason = 0
        response.verdict.decode_ended = False


FAULTS: dict[str, Callable[[Any], Any]] = {
    "none": lambda response: None,
    "ids": lambda response: response.verdict.committed_ids.__setitem__(0, 1 << 31),
    "row choices": lambda response: response.verdict.row_choices.extend([1 << 31] * 50),
    "too many tokens": more,
    "no token": lambda response: response.verdict.ClearField("committed_ids"),
    "no end": no_end,
    "another end": assign(finish_reason=1),
    "drafts": assign(num_draft_tokens=99, soft_acceptances=b"\xff" * 99),
    "accepted": assign(num_accepted=60),
    "another text": lambda response: response.verdict.header.__setattr__("prefix_hash", 1),
    "out of step": lag,
    "logprobs": lambda response: response.verdict.logprobs.ClearField("token_logprobs"),
    "alternatives": lambda response: response.verdict.logprobs.MergeFrom(
        common_pb2.TokenLogprobs(num_top=1, top_ids=[3])
    ),
}


class RogueTarget(target_pb2_grpc.TargetServiceServicer, worker_pb2_grpc.WorkerServiceServicer):
    """Forwards everything to `address`, and spoils verdicts from the third of a session on."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address)
        self.spoil = FAULTS["none"]
        self.num_spoilt = 0
        self.spoil_prompt: Callable[[Any], Any] | None = None
        """Of the logprobs of a prompt; None: they are as they came."""
        self.describe: Callable[[Any], Any] = lambda answer: None

    async def DescribeWorker(self, request: Any, context: Any) -> Any:
        answer = await worker_pb2_grpc.WorkerServiceStub(self.channel).DescribeWorker(request)
        self.describe(answer)
        return answer

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        call, num_verdicts = target_pb2_grpc.TargetServiceStub(self.channel).Session(), 0
        task = asyncio.create_task(forward(requests, call))
        try:
            async for response in call:
                if response.WhichOneof("message") == "verdict":
                    num_verdicts += 1
                    if num_verdicts >= 3:
                        self.num_spoilt += 1
                        response = self.spoil(response) or response
                if response.WhichOneof("message") == "prompt_logprobs" and self.spoil_prompt is not None:
                    self.num_spoilt += 1
                    self.spoil_prompt(response.prompt_logprobs.logprobs)
                yield response
        finally:
            task.cancel()
            call.cancel()


class Health(health_pb2_grpc.HealthServicer):
    def __init__(self, channel: Any) -> None:
        self.stub = health_pb2_grpc.HealthStub(channel)

    async def Check(self, request: Any, context: Any) -> Any:
        return await self.stub.Check(request)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for answer in self.stub.Watch(request):
            yield answer


@asynccontextmanager
async def one_rogue_of_two() -> AsyncIterator[tuple[Client, RogueTarget]]:
    async with in_process_stack(TARGET, DRAFT, num_targets=2) as stack:
        rogue, server = RogueTarget(stack.target[0].address), grpc.aio.server()
        target_pb2_grpc.add_TargetServiceServicer_to_server(rogue, server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(rogue, server)
        health_pb2_grpc.add_HealthServicer_to_server(Health(rogue.channel), server)
        async with AsyncExitStack() as cleanup:
            cleanup.push_async_callback(rogue.channel.close)
            spoilt = await cleanup.enter_async_context(listening(server))
            settings = CoordinatorSettings(
                port=0,
                log_level="error",
                drain_grace_s=0.0,
                drain_delay_s=0.0,
                target_workers=(spoilt, stack.target[1].address),
                draft_workers=(stack.draft[0].address,),
            )
            coordinator = await start(coordinator_server.serve, settings)
            cleanup.push_async_callback(coordinator.close)
            yield await cleanup.enter_async_context(Client(coordinator.address)), rogue


@pytest.mark.parametrize("gamma", [0, 3])
async def test_every_text_is_whole_whatever_a_broken_target_says(gamma: int) -> None:
    options: dict[str, Any] = {
        "temperature": 0, "max_tokens": LENGTH, "num_speculative_tokens": gamma, "logprobs": True,
    }  # fmt: skip
    if gamma:
        options["drafter"] = "model"
    async with one_rogue_of_two() as (client, rogue):
        whole = (await client.complete(PROMPT, **options)).token_ids
        for name, spoil in FAULTS.items():
            rogue.spoil, rogue.num_spoilt = spoil, 0
            while not rogue.num_spoilt:  # a worker that was lost is asked again once it was probed
                async with asyncio.timeout(60):
                    answer = await client.complete(PROMPT, **options)
                assert (answer.token_ids, answer.finish_reason) == (whole, "length"), name
        rogue.spoil = FAULTS["none"]
        async with asyncio.timeout(60):
            while any(w.num_sessions or w.capacity.num_sessions for w in (await client.server_info()).workers):
                await asyncio.sleep(0.02)


LOGPROB_FAULTS: dict[str, Callable[[Any], Any]] = {
    "one short": lambda told: told.top_logprobs.pop(),
    "huge": lambda told: setattr(told, "num_top", 1 << 31),
    "NaN": lambda told: told.token_logprobs.__setitem__(-1, math.nan),
    "infinite": lambda told: told.token_logprobs.__setitem__(0, math.inf),
    "above 0": lambda told: told.top_logprobs.__setitem__(0, 3.0),
    "NaN beside": lambda told: told.top_logprobs.__setitem__(-1, math.nan),
    "ids": lambda told: told.top_ids.__setitem__(0, 4_000_000_000),
    "none": lambda told: told.CopyFrom(common_pb2.TokenLogprobs(token_logprobs=told.token_logprobs)),
    "more": lambda told: told.CopyFrom(
        common_pb2.TokenLogprobs(
            token_logprobs=told.token_logprobs,
            num_top=3,
            top_ids=[1] * 3 * len(told.token_logprobs),
            top_logprobs=[-1.0] * 3 * len(told.token_logprobs),
        )
    ),
}


@pytest.mark.parametrize("of", ["prompt", "text"])
async def test_logprobs_that_are_none_lose_the_worker_and_reach_no_client(of: str) -> None:
    options: dict[str, Any] = {
        "temperature": 0, "max_tokens": 8, "num_speculative_tokens": 0, "logprobs": True, "top_logprobs": 2,
        "prompt_logprobs": 2,
    }  # fmt: skip
    async with one_rogue_of_two() as (client, rogue):
        whole = await client.complete(PROMPT, **options)
        assert whole.prompt_logprobs is not None
        assert len(whole.prompt_logprobs.token_logprobs) == len(PROMPT) - 1
        for name, spoil in LOGPROB_FAULTS.items():
            rogue.num_spoilt = 0
            if of == "prompt":
                rogue.spoil_prompt = spoil
            else:
                rogue.spoil = lambda response, spoil=spoil: spoil(response.verdict.logprobs) and None
            while not rogue.num_spoilt:
                async with asyncio.timeout(60):
                    answer = await client.complete(PROMPT, **options)
                assert answer.token_ids == whole.token_ids, name
                assert (answer.prompt_logprobs, answer.logprobs) == (whole.prompt_logprobs, whole.logprobs), name


async def test_a_number_that_cannot_be_makes_a_target_unusable_or_is_dropped_and_is_named() -> None:
    def spoil_defaults(answer: Any) -> None:
        answer.generation_defaults.top_p = math.nan

    def spoil_hints(answer: Any) -> None:
        answer.timings.add(min_sequences=1, max_sequences=1, base_ms=math.nan, num_passes=99)
        answer.unix_time_s = math.inf

    async with one_rogue_of_two() as (client, rogue):
        for describe, field, is_usable in (
            (spoil_defaults, "generation_defaults.top_p", False),
            (lambda answer: answer.capacity.Clear(), "capacity.num_blocks", False),
            (spoil_hints, "base_ms is nan; unix_time_s is inf", True),
        ):
            rogue.describe = describe
            async with asyncio.timeout(60):
                while not any(
                    field in w.detail and w.healthy == is_usable for w in (await client.server_info()).workers
                ):
                    await asyncio.sleep(0.02)
            answer = await client.complete(PROMPT, max_tokens=8, num_speculative_tokens=3)
            assert len(answer.token_ids) == 8, field

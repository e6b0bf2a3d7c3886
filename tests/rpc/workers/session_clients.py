"""Drives worker sessions over real gRPC, as a coordinator would: one call, one message at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import stack as stack_module
from waiting import until

import draft_worker.server
import target_worker.server
from outrider.drafting.proposal import EMPTY, Proposal
from outrider.errors import OutriderError
from outrider.sampling.noise import hash_ids
from outrider.sampling.params import SamplingParams, StoppingParams
from outrider.serving import convert
from outrider.serving.channel import open_channel
from outrider.serving.messages import DraftOpening, Header, TargetOpening
from outrider.serving.status import from_rpc_error
from outrider.settings import DraftWorkerSettings, TargetWorkerSettings
from outrider.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc, worker_pb2, worker_pb2_grpc

TargetRequest = target_pb2.TargetServiceSessionRequest
DraftRequest = draft_pb2.DraftServiceSessionRequest
TOY = "toy:vocab=16,seed=1"


class Caller:
    """A worker's address and its stubs."""

    def __init__(self, server: stack_module.Server, channel: Any) -> None:
        self.server = server
        self.channel = channel
        self.workers = worker_pb2_grpc.WorkerServiceStub(channel)
        self.target = target_pb2_grpc.TargetServiceStub(channel)
        self.draft = draft_pb2_grpc.DraftServiceStub(channel)

    async def describe(self) -> worker_pb2.DescribeWorkerResponse:
        return await self.workers.DescribeWorker(worker_pb2.DescribeWorkerRequest(), timeout=10)

    async def wait_idle(self) -> None:
        """Until no session and no block is held; raises TimeoutError if they stay."""

        async def idle() -> bool:
            now = (await self.describe()).capacity
            return not now.num_sessions and not now.num_waiting and now.num_free_blocks == now.num_blocks

        await until(idle)


@asynccontextmanager
async def running_target(model: str = TOY, **settings: Any) -> AsyncIterator[Caller]:
    values = {"port": 0, "log_level": "error", "drain_grace_s": 2.0, "model": model, **settings}
    server = await stack_module.start(target_worker.server.serve, TargetWorkerSettings(**values))
    async with open_channel(server.address) as channel:
        yield Caller(server, channel)
    await server.close()


@asynccontextmanager
async def running_draft(model: str = TOY, **settings: Any) -> AsyncIterator[Caller]:
    values = {"port": 0, "log_level": "error", "drain_grace_s": 2.0, "model": model, **settings}
    server = await stack_module.start(draft_worker.server.serve, DraftWorkerSettings(**values))
    async with open_channel(server.address) as channel:
        yield Caller(server, channel)
    await server.close()


def header_of(ids: Sequence[int], epoch: int = 1) -> Header:
    return Header(epoch, len(ids), hash_ids(ids))


def target_opening(prompt_ids: Sequence[int] = (1, 2, 3), *, max_tokens: int = 32, **fields: Any) -> TargetOpening:
    values = {
        "epoch": 1,
        "prompt_ids": list(prompt_ids),
        "sampling": SamplingParams(temperature=0.0),
        "stopping": StoppingParams(max_tokens=max_tokens),
        "max_draft_tokens": 8,
        **fields,
    }
    return TargetOpening(**values)


def draft_opening(prompt_ids: Sequence[int] = (1, 2, 3), *, max_tokens: int = 32, **fields: Any) -> DraftOpening:
    values = {
        "epoch": 1,
        "prompt_ids": list(prompt_ids),
        "sampling": SamplingParams(temperature=0.0),
        "stopping": StoppingParams(max_tokens=max_tokens),
        **fields,
    }
    return DraftOpening(**values)


def open_request(opening: TargetOpening | DraftOpening) -> Any:
    if isinstance(opening, TargetOpening):
        return TargetRequest(open=convert.target_open_to_pb(opening))
    return DraftRequest(open=convert.draft_open_to_pb(opening))


def verify_request(ids: Sequence[int], proposal: Proposal = EMPTY, epoch: int = 1) -> TargetRequest:
    header = convert.header_to_pb(header_of(ids, epoch))
    return TargetRequest(verify=target_pb2.TargetVerify(header=header, proposal=convert.proposal_to_pb(proposal)))


def decode_request(ids: Sequence[int], credit_tokens: int, epoch: int = 1) -> TargetRequest:
    header = convert.header_to_pb(header_of(ids, epoch))
    return TargetRequest(decode=target_pb2.TargetDecode(header=header, credit_tokens=credit_tokens))


def advance_request(
    ids: Sequence[int], committed_ids: Sequence[int], num_draft_tokens: int, drafter: str = ""
) -> DraftRequest:
    header = convert.header_to_pb(header_of(ids))
    return DraftRequest(
        advance=draft_pb2.DraftAdvance(
            header=header, committed_ids=committed_ids, num_draft_tokens=num_draft_tokens, drafter=drafter
        )
    )


async def read(call: Any) -> Any:
    """The next message that is no heartbeat; None at the end. Raises AioRpcError."""
    async with asyncio.timeout(20):
        while True:
            message = await call.read()
            if not hasattr(message, "WhichOneof"):
                await call.code()
                return None
            if message.WhichOneof("message") != "heartbeat":
                return message


async def ask(call: Any, request: Any) -> Any:
    await call.write(request)
    return await read(call)


async def failure(call: Any) -> OutriderError:
    """The error that the call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(call)
    return from_rpc_error(caught.value)


async def opened(worker: Caller, opening: TargetOpening | None = None) -> tuple[Any, list[int]]:
    """A session on a target worker, and the ids of its text so far."""
    call, opening = worker.target.Session(), opening or target_opening()
    verdict = (await ask(call, open_request(opening))).verdict
    return call, [*opening.prompt_ids, *verdict.committed_ids]


async def decoded(call: Any) -> list[Any]:
    """Verdicts up to the one that ends the decode."""
    verdicts: list[Any] = []
    while not (verdicts and verdicts[-1].decode_ended):
        verdicts.append((await read(call)).verdict)
    return verdicts

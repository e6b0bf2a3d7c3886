"""A draft worker that lies: a proxy before a real one that spoils its answers. Simulated faults, real gRPC."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from stack import listening

from outrider.v1 import draft_pb2, draft_pb2_grpc, worker_pb2_grpc

FAULTS = (
    "none",
    "stale_hash",
    "stale_length",
    "wrong_epoch",
    "duplicate",
    "previous",
    "ids_out_of_range",
    "too_many",
    "torn_q",
    "wrong_sum",
    "token_not_in_q",
    "parents",
    "out_of_step_lie",
    "empty",
    "unasked",
    "silence",
)

TRUSTING = {"max_bad_proposals": 1_000_000}
"""A coordinator that asks again whatever it was told, so that every fault is met."""

BRANCH_FAULTS = (
    "none",
    "other_hashes",
    "other_outcomes",
    "no_outcomes",
    "hashes_short",
    "wrong_epoch",
    "older_base",
    "empty",
    "too_many",
    "torn_q",
    "ids_out_of_range",
    "swapped",
    "twice",
    "begun",
)


async def forward(requests: AsyncIterator[Any], call: grpc.aio.StreamStreamCall) -> None:
    """What one side says to the other, until either ends."""
    try:
        async for request in requests:
            await call.write(request)
        await call.done_writing()
    except (asyncio.CancelledError, asyncio.InvalidStateError, grpc.aio.AioRpcError):
        call.cancel()


class RogueDraft(draft_pb2_grpc.DraftServiceServicer, worker_pb2_grpc.WorkerServiceServicer):
    """Forwards everything to `address`; each proposal is spoiled with one of `faults`, and what is told of branches
    with one of `branch_faults`, drawn by `seed`."""

    def __init__(
        self,
        address: str,
        seed: int,
        faults: tuple[str, ...] = FAULTS,
        silence_s: float = 0.3,
        branch_faults: tuple[str, ...] = ("none",),
    ) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._random = random.Random(seed)
        self.faults = faults
        self.incarnation = ""
        """Of another process than the worker's own, where it is set."""
        self.describe: Callable[[Any], None] = lambda answer: None
        """What it makes of the worker's own description."""
        self._silence_s = silence_s
        self._branch_faults = branch_faults
        self.counts = dict.fromkeys(FAULTS, 0)
        self.branch_counts = dict.fromkeys(BRANCH_FAULTS, 0)

    async def DescribeWorker(self, request, context):
        answer = await worker_pb2_grpc.WorkerServiceStub(self._channel).DescribeWorker(request)
        answer.incarnation = self.incarnation or answer.incarnation
        self.describe(answer)
        return answer

    async def Session(self, requests, context):
        call = draft_pb2_grpc.DraftServiceStub(self._channel).Session()

        task = asyncio.create_task(forward(self._to_the_worker(requests), call))
        previous = None
        try:
            async for response in call:
                kind = response.WhichOneof("message")
                if kind == "branches":
                    for spoiled in self._spoil_branches(response):
                        yield spoiled
                if kind != "proposal":
                    if kind != "branches":
                        yield response
                    continue
                original = draft_pb2.DraftServiceSessionResponse()
                original.CopyFrom(response)
                for spoiled in await self._spoil(response, previous):
                    yield spoiled
                previous = original
        finally:
            task.cancel()
            call.cancel()

    async def _to_the_worker(self, requests):
        async for request in requests:
            if self.incarnation and request.WhichOneof("message") == "open":
                assert request.open.worker_incarnation == self.incarnation
                request.open.ClearField("worker_incarnation")
            yield request

    async def _spoil(self, response, previous):
        fault = self._random.choice(self.faults)
        self.counts[fault] += 1
        header, proposal = response.proposal.header, response.proposal.proposal
        match fault:
            case "stale_hash":
                header.prefix_hash ^= 1 << self._random.randrange(64)
            case "stale_length":
                header.base_length -= 1
            case "wrong_epoch":
                header.epoch += 1
            case "duplicate":
                return [response, response, response]
            case "previous":
                return [previous, response] if previous is not None else [response]
            case "ids_out_of_range":
                proposal.token_ids[:] = [self._random.choice((10_000, 2**32 - 1)) for _ in proposal.token_ids]
            case "too_many":
                proposal.token_ids.extend([0] * 100)
            case "torn_q":
                proposal.q_ids = proposal.q_ids[:-3] or b"xyz"
                proposal.q_sizes[:] = [5] * max(1, len(proposal.token_ids))
            case "wrong_sum":
                proposal.q_counts = proposal.q_counts[:-2] + b"\x07\x00"
            case "token_not_in_q":
                proposal.token_ids[:] = [(t + 1) % 4 for t in proposal.token_ids]
            case "parents":
                proposal.parents[:] = [len(proposal.token_ids)] * len(proposal.token_ids)
            case "out_of_step_lie":
                lie = draft_pb2.DraftServiceSessionResponse()
                lie.out_of_step.header.CopyFrom(header)
                lie.out_of_step.header.base_length = self._random.randrange(10_000)
                return [lie]
            case "empty":
                proposal.Clear()
            case "unasked":
                return [response, draft_pb2.DraftServiceSessionResponse()]
            case "silence":
                await asyncio.sleep(self._silence_s)
        return [response]

    def _spoil_branches(self, response):
        fault = self._random.choice(self._branch_faults)
        self.branch_counts[fault] += 1
        told = response.branches
        match fault:
            case "other_hashes":
                told.prefix_hashes[:] = [one ^ (1 << self._random.randrange(64)) for one in told.prefix_hashes]
            case "other_outcomes":
                told.num_accepted[:] = [self._random.choice((0, 1, 7, 2**32 - 1)) for _ in told.num_accepted]
                told.next_token_ids[:] = [self._random.choice((0, 5, 2**32 - 1)) for _ in told.next_token_ids]
            case "no_outcomes":
                del told.num_accepted[:], told.next_token_ids[:]
            case "hashes_short":
                del told.prefix_hashes[-1]
            case "wrong_epoch":
                told.header.epoch += 1
            case "older_base":
                told.header.base_length = self._random.choice((0, max(0, told.header.base_length - 1), 10_000))
            case "empty":
                for proposal in told.proposals:
                    proposal.Clear()
                    proposal.drafter = "model"
            case "too_many":
                told.proposals[0].token_ids.extend([0] * 100)
            case "torn_q":
                for proposal in told.proposals:
                    proposal.q_ids = proposal.q_ids[:-3] or b"xyz"
                    proposal.q_sizes[:] = [5] * len(proposal.token_ids)
            case "ids_out_of_range":
                for proposal in told.proposals:
                    proposal.token_ids[:] = [2**32 - 1 for _ in proposal.token_ids]
            case "swapped":
                told.prefix_hashes[:] = list(told.prefix_hashes)[::-1]
            case "twice":
                return [response, response]
            case "begun":
                lie = draft_pb2.DraftServiceSessionResponse()
                lie.begun.header.CopyFrom(told.header)
                return [lie, response, lie]
        return [response]

    async def close(self) -> None:
        await self._channel.close()


@asynccontextmanager
async def rogue_draft(address: str, seed: int, **kwargs):
    """Serves a RogueDraft before the worker at `address`; yields (its address, the servicer)."""
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc

    server = grpc.aio.server()
    servicer = RogueDraft(address, seed, **kwargs)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    for name in ("", "outrider.v1.DraftService", "outrider.v1.WorkerService"):
        await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
    try:
        async with listening(server) as reached:
            yield reached, servicer
    finally:
        await servicer.close()

"""Random and bent messages at every service: no crash, no hang, a status of ours, nothing leaked, neighbours untouched.

Runs are seeded; a failure names its seed.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from typing import Any

import grpc
import pytest
from conftest import scaled
from mutate import flip_bytes, mutate
from stack import in_process_stack
from workers.session_clients import (
    Caller,
    TargetRequest,
    advance_request,
    ask,
    decode_request,
    draft_opening,
    header_of,
    open_request,
    running_draft,
    running_target,
    target_opening,
    verify_request,
)

import outrider
from outrider.drafting.proposal import Proposal
from outrider.sampling.params import AcceptanceRule, SamplingParams, StoppingParams
from outrider.serving.channel import open_channel
from outrider.serving.status import from_rpc_error
from outrider.v1 import common_pb2, generation_pb2, target_pb2, worker_pb2

TOY = "toy:vocab=16,seed=1,blocks=400"
OURS = {
    "OK", "CANCELLED", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "ABORTED",
    "UNIMPLEMENTED", "DEADLINE_EXCEEDED", "UNAVAILABLE",
}  # fmt: skip
PATIENCE_S = 20.0


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice((0.0, 1.0)),
        top_k=rng.choice((0, 3)),
        repetition_penalty=rng.choice((1.0, 1.3)),
        seed=rng.randrange(2**64),
        acceptance=rng.choice(list(AcceptanceRule)),
    )


class Steps:
    """Requests of one session: mostly such as a coordinator would send, some bent, some out of order."""

    def __init__(self, rng: random.Random, role: str) -> None:
        self.rng, self.role = rng, role
        self.ids = [1, 2, 3]
        self.new: list[int] = []

    def next(self) -> bytes:
        rng = self.rng
        request = self._valid()
        if rng.random() < 0.25:
            mutate(request, rng)
        data = request.SerializeToString()
        return flip_bytes(data, rng) if rng.random() < 0.04 else data

    def opening(self) -> Any:
        rng = self.rng
        stop_ids = frozenset(rng.sample(range(16), 2))
        fields = {
            "sampling": random_params(rng),
            "epoch": rng.choice((0, 1, 1, 2, 3)),
            "stopping": StoppingParams(rng.choice((1, 2, 30)), rng.choice((0, 0, 1)), stop_ids),
            "committed_ids": self.ids[3:] if rng.random() < 0.5 else [],
        }
        if self.role == "target" and rng.random() < 0.3:
            fields["features"] = rng.choice(("0", "-1,1", "2"))
        return open_request(target_opening(**fields) if self.role == "target" else draft_opening(**fields))

    def _valid(self) -> Any:
        rng = self.rng
        if rng.random() < 0.12:
            return self.opening()
        if self.role == "draft":
            if rng.random() < 0.3:
                self.new = [rng.randrange(16) for _ in range(rng.randrange(3))]
                self.ids += self.new
            request = advance_request(self.ids, self.new, rng.randrange(6), rng.choice(("", "model", "tree", "lookup")))
            self._wish(request.advance)
            return request
        match rng.randrange(6):
            case 0:
                return TargetRequest(heartbeat=common_pb2.Heartbeat())
            case 1:
                return TargetRequest(stop=target_pb2.TargetStop())
            case 2:
                request = decode_request(self.ids, rng.choice((1, 3, 1000)), rng.choice((1, 1, 2)))
                self._own_drafts(request.decode)
                return request
        drafts = tuple(rng.randrange(17) for _ in range(rng.randrange(5)))
        request = verify_request(self.ids, Proposal(drafts), rng.choice((1, 1, 2)))
        self._own_drafts(request.verify)
        if rng.random() < 0.3:
            request.verify.expected_token_id = rng.choice((self.ids[-1], self.ids[-1], 3, 2**32 - 1))
        return request

    def _wish(self, advance: Any) -> None:
        """Branches, a price, how drafts were judged; each now and then."""
        rng = self.rng
        if rng.random() < 0.5:
            advance.ahead_branches, advance.ahead_draft_tokens = rng.choice(((2, 3), (8, 5), (1, 1), (0, 4), (3, 0)))
            advance.ahead_value_ms = rng.choice((0.0, 1e-9, 20.0))
            advance.has_proposal = rng.random() < 0.3
        if rng.random() < 0.4:
            advance.price_tokens_per_ms, advance.row_price_tokens = rng.choice(((0.0, 0.0), (1e-3, 0.2), (9.0, 9.0)))
            advance.expected_acceptances = rng.randbytes(rng.choice((0, 1, 8, 100)))
        if rng.random() < 0.5:
            advance.judged_prefix_hash = header_of(self.ids[: len(self.ids) - len(self.new)]).prefix_hash
            advance.soft_acceptances = rng.choice((b"", b"\0", b"\xff" * 9, rng.randbytes(3)))

    def _own_drafts(self, question: Any) -> None:
        rng = self.rng
        if rng.random() < 0.3:
            question.num_draft_tokens, question.drafter = rng.randrange(6), rng.choice(("", "good"))
            if rng.random() < 0.5:
                question.tree_parents.extend(rng.randrange(i + 1) for i in range(question.num_draft_tokens))
        if rng.random() < 0.1:
            question.features_start = rng.choice((0, 2, 1000))

    def heard(self, data: bytes) -> None:
        """Follows the target's text, so that some of the next requests fit it."""
        if self.role == "target":
            response = target_pb2.TargetServiceSessionResponse.FromString(data)
            if response.WhichOneof("message") == "verdict":
                base = response.verdict.header.base_length
                self.ids = [*self.ids[:base], *response.verdict.committed_ids]


async def one_session(caller: Caller, role: str, seed: int) -> str:
    """Sends up to 20 requests without waiting for answers (which are read meanwhile), ends in a random way, and gives
    the status."""
    rng = random.Random(seed)
    steps = Steps(rng, role)
    name = "TargetService" if role == "target" else "DraftService"
    call = caller.channel.stream_stream(f"/outrider.v1.{name}/Session")()

    async def read() -> None:
        with suppress(grpc.aio.AioRpcError):
            while (data := await call.read()) is not grpc.aio.EOF:
                steps.heard(data)

    reader = asyncio.create_task(read())
    end = rng.choice(("half_close", "half_close", "cancel"))
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
        if rng.random() < 0.9:
            await call.write(steps.opening().SerializeToString())
        for _ in range(rng.randrange(20)):
            await call.write(steps.next())
            if rng.random() < 0.5:
                await asyncio.sleep(rng.random() * 0.004)
        if end == "half_close":
            await call.done_writing()
    if end == "cancel":
        call.cancel()
    async with asyncio.timeout(PATIENCE_S):
        with suppress(asyncio.CancelledError):
            await reader
        code = await call.code()
    details = await call.details()
    if details.startswith("Internal error from Core"):
        return "WRITE_CUT"  # this side wrote while the worker ended the call; grpc then keeps the worker's status back
    assert code.name in OURS, f"seed {seed}: {code.name} {details}"
    return code.name


@pytest.mark.parametrize("role", ["target", "draft"])
async def test_sessions(role: str) -> None:
    running, more = {
        "target": (running_target, {"heads": ("good=toy:agreement=0.9",), "features": ("-1", "0", "1")}),
        "draft": (running_draft, {"drafters": ("model", "tree"), "ahead_branches": 8}),
    }[role]
    async with running(TOY, max_draft_tokens=8, **more) as caller:
        witness = asyncio.create_task(_witness(caller, role))
        statuses: Counter[str] = Counter()
        count = scaled(2000)
        for start in range(0, count, 10):
            seeds = range(start, min(count, start + 10))
            statuses.update(await asyncio.gather(*(one_session(caller, role, seed) for seed in seeds)))
        witness.cancel()
        num_texts = await witness
        await caller.wait_idle()
        assert num_texts > 0, "INCONCLUSIVE"
        assert {"OK", "CANCELLED", "INVALID_ARGUMENT"} <= statuses.keys(), statuses


async def _witness(caller: Caller, role: str) -> int:
    """One well-behaved stream after the other beside the noise: each gets the same answers. Counts them until it is
    cancelled."""
    expected, num_texts = None, 0
    with suppress(asyncio.CancelledError):
        while True:
            call = caller.target.Session() if role == "target" else caller.draft.Session()
            try:
                ids = await _well_behaved(call, role)
            finally:
                call.cancel()
            assert expected in (None, ids)
            expected = ids
            num_texts += 1
    return num_texts


async def _well_behaved(call: Any, role: str) -> list[int]:
    ids = [1, 2, 3]
    if role == "target":
        ids += (await ask(call, open_request(target_opening()))).verdict.committed_ids
        for draft in (4, 9, 2):
            ids += (await ask(call, verify_request(ids, Proposal((draft, 3))))).verdict.committed_ids
        return ids
    await ask(call, open_request(draft_opening()))
    for new in (4, 9, 2):
        ids.append(new)
        ids += (await ask(call, advance_request(ids, ids[-7:], 6))).proposal.proposal.token_ids
    return ids


def generate_request(rng: random.Random) -> generation_pb2.GenerateRequest:
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=[rng.randrange(16) for _ in range(3)]),
        stopping=generation_pb2.StoppingOptions(max_tokens=rng.choice((1, 8, 24))),
        sampling=generation_pb2.SamplingOptions(temperature=rng.choice((0.0, 1.0)), seed=rng.randrange(2**64)),
        speculation=generation_pb2.SpeculationOptions(acceptance=rng.choice((0, 1, 2, 3))),  # type: ignore[arg-type]
    )
    if rng.random() < 0.7:
        request.speculation.num_speculative_tokens = rng.randrange(5)
    if rng.random() < 0.3:
        request.resume_token_ids.extend(rng.randrange(16) for _ in range(rng.randrange(4)))
    if rng.random() < 0.3:
        request.output.n = 2
    return request


async def one_generate(channel: grpc.aio.Channel, seed: int) -> str:
    rng = random.Random(seed)
    request = generate_request(rng)
    for _ in range(rng.choice((0, 1, 1, 3))):
        mutate(request, rng)
    data = request.SerializeToString()
    if rng.random() < 0.05:
        data = flip_bytes(data, rng)
    call = channel.unary_stream("/outrider.v1.GenerationService/Generate")(data, timeout=PATIENCE_S)
    cancel_after = rng.choice((None, None, 0, 1, 2))
    num_read, num_complete = 0, 0
    try:
        async with asyncio.timeout(2 * PATIENCE_S):
            async for event in call:
                num_read += 1
                num_complete += generation_pb2.GenerateResponse.FromString(event).HasField("complete")
                if num_read == cancel_after:
                    call.cancel()
        assert num_complete > 0, f"seed {seed}: ended OK without `complete`"
        return "OK"
    except asyncio.CancelledError:
        return "CANCELLED"
    except grpc.aio.AioRpcError as failure:
        caught = failure
    error, status = from_rpc_error(caught), caught.code().name
    assert status in OURS - {"DEADLINE_EXCEEDED", "UNAVAILABLE", "ABORTED"}, f"seed {seed}: {caught}"
    if status == "INVALID_ARGUMENT":
        assert error.field or error.reason == "UNDECODABLE_REQUEST", f"seed {seed}: no field in {caught}"
    return status


async def test_generate() -> None:
    async with in_process_stack(TOY, "toy:vocab=16,seed=1,agreement=0.8,blocks=400") as stack:
        async with open_channel(stack.address) as channel, outrider.Client(stack.address) as client:
            expected = await client.complete([1, 2, 3], temperature=0.0, max_tokens=30, num_speculative_tokens=3)
            assert expected.speculation.num_draft_tokens > 0
            statuses: Counter[str] = Counter()
            count = scaled(2000)
            for start in range(0, count, 10):
                seeds = range(start, min(count, start + 10))
                witness = client.complete([1, 2, 3], temperature=0.0, max_tokens=30, num_speculative_tokens=3)
                same, *ended = await asyncio.gather(witness, *(one_generate(channel, seed) for seed in seeds))
                assert same.token_ids == expected.token_ids
                statuses.update(ended)
            assert {"OK", "INVALID_ARGUMENT"} <= statuses.keys(), statuses
            info = await client.server_info()
            assert (info.num_requests_running, info.num_requests_waiting) == (0, 0)
        for worker in (*stack.draft, *stack.target):
            async with open_channel(worker.address) as channel:
                await Caller(worker, channel).wait_idle()


UNARY = {
    "GenerationService": ("GetModelInfo", "GetServerInfo", "Tokenize", "Detokenize"),
    "FleetService": ("RegisterWorker", "RenewWorker", "DrainWorker"),
    "WorkerService": ("DescribeWorker",),
}


async def test_unary_calls_and_fleet() -> None:
    """Whatever is registered, the workers that are listed stay and serve."""
    rng = random.Random(5)
    async with in_process_stack(TOY, "toy:vocab=16,seed=1,agreement=0.8,blocks=400") as stack:
        addresses = [server.address for server in (*stack.draft, *stack.target)]
        async with open_channel(stack.address) as coordinator, open_channel(addresses[0]) as draft:
            statuses: Counter[str] = Counter()
            for number in range(scaled(1500)):
                service = rng.choice(list(UNARY))
                method = rng.choice(UNARY[service])
                descriptor = {
                    "GenerationService": generation_pb2.DESCRIPTOR,
                }.get(service, worker_pb2.DESCRIPTOR).services_by_name[service].methods_by_name[method]  # fmt: skip
                request = descriptor.input_type._concrete_class()
                if service == "FleetService" and rng.random() < 0.5 and method == "RegisterWorker":
                    request.role, request.address = rng.choice((1, 2)), rng.choice((*addresses, "127.0.0.1:1"))
                else:
                    mutate(request, rng)
                data = request.SerializeToString()
                if rng.random() < 0.1:
                    data = flip_bytes(data, rng)
                channel = draft if service == "WorkerService" else coordinator
                try:
                    await channel.unary_unary(f"/outrider.v1.{service}/{method}")(data, timeout=PATIENCE_S)
                    statuses["OK"] += 1
                except grpc.aio.AioRpcError as failure:
                    statuses[failure.code().name] += 1
                assert statuses.keys() <= OURS, f"call {number}, {method}: {statuses}"
        assert {"OK", "INVALID_ARGUMENT"} <= statuses.keys(), statuses
        async with outrider.Client(stack.address) as client:
            info = await client.server_info()
            known = {worker.address: worker for worker in info.workers}
            assert all(known[address].healthy for address in addresses), known
            answer = await client.complete([1, 2, 3], temperature=0.0, max_tokens=30, num_speculative_tokens=3)
            assert answer.speculation.num_draft_tokens > 0

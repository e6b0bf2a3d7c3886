"""Worker sessions over real gRPC: everything that ends a stream frees it, and silence is noticed."""

import asyncio
import contextlib

import grpc
import numpy as np
import pytest
from conftest import scaled
from session_clients import (
    TargetRequest,
    advance_request,
    ask,
    decode_request,
    decoded,
    draft_opening,
    failure,
    open_request,
    opened,
    read,
    running_draft,
    running_target,
    target_opening,
    verify_request,
)
from waiting import until

from outrider.errors import Aborted, FailedPrecondition, Internal, InvalidArgument, ResourceExhausted
from outrider.serving.status import from_rpc_error
from outrider.v1 import common_pb2

PROMPT = [1, 2, 3]


async def is_waiting(worker, call):
    """For blocks; or it has ended."""
    return call.done() or (await worker.describe()).capacity.num_waiting == 1


@pytest.mark.parametrize("how", ["cancel", "deadline", "half_close"])
@pytest.mark.parametrize("when", ["prefill", "waiting_for_blocks", "idle", "decode"])
async def test_every_end_frees_session_and_blocks(how, when):
    """One block is 16 tokens; each pass takes 20 ms, so that the end comes in the middle of something."""
    async with running_target("toy:vocab=16,seed=1,pass_ms=20,blocks=4", cache_overcommit=1) as worker:
        holder = None
        if when == "waiting_for_blocks":
            holder, _ = await opened(worker, target_opening(max_tokens=50))
        call = worker.target.Session(timeout=0.3 if how == "deadline" else None)
        await call.write(open_request(target_opening(max_tokens=50)))
        if when in ("idle", "decode"):
            with contextlib.suppress(grpc.aio.AioRpcError):  # on a slow machine the deadline may be over already
                ids = [*PROMPT, *(await read(call)).verdict.committed_ids]
                if when == "decode":
                    await call.write(decode_request(ids, 40))
                    await read(call)
        elif when == "waiting_for_blocks":
            await until(lambda: is_waiting(worker, call))
        if how == "cancel":
            call.cancel()
        elif how == "half_close":
            await call.done_writing()
        else:
            await until(call.done)
        if holder is not None:
            holder.cancel()
        await worker.wait_idle()


async def test_many_streams_cancelled_at_random_moments_leave_nothing():
    rng = np.random.default_rng(0)
    async with running_target("toy:vocab=16,seed=1,pass_ms=1,blocks=40") as target:
        async with running_draft("toy:vocab=16,seed=1,pass_ms=1,blocks=40") as draft:

            async def stream(delay_s):
                calls = []
                try:
                    async with asyncio.timeout(delay_s):
                        calls = [target.target.Session(), draft.draft.Session()]
                        verdict = (await ask(calls[0], open_request(target_opening()))).verdict
                        ids = [*PROMPT, *verdict.committed_ids]
                        await ask(calls[1], open_request(draft_opening()))
                        await calls[0].write(decode_request(ids, 20))
                        await ask(calls[1], advance_request(ids, ids[3:], 8))
                        await decoded(calls[0])
                except (TimeoutError, grpc.aio.AioRpcError):
                    pass
                finally:
                    for call in calls:
                        call.cancel()

            for _ in range(scaled(40)):
                await asyncio.gather(*(stream(delay_s) for delay_s in rng.uniform(0.001, 0.08, size=25)))
            await target.wait_idle()
            await draft.wait_idle()


async def test_blocks_run_out_others_wait_and_then_are_refused_with_a_delay():
    async with running_target("toy:vocab=16,seed=1,blocks=2", max_waiting_sessions=1, cache_overcommit=1) as worker:
        holder, _ = await opened(worker, target_opening(max_tokens=28))
        waiting = worker.target.Session()
        await waiting.write(open_request(target_opening(max_tokens=28)))
        await until(lambda: is_waiting(worker, waiting))
        refused = worker.target.Session()
        await refused.write(open_request(target_opening(max_tokens=28)))
        error = await failure(refused)
        assert isinstance(error, ResourceExhausted)
        assert error.retry_delay_s > 0
        impossible = worker.target.Session()
        await impossible.write(open_request(target_opening(max_tokens=1000)))
        assert isinstance(await failure(impossible), InvalidArgument)
        holder.cancel()
        assert (await read(waiting)).verdict.committed_ids
        waiting.cancel()
        await worker.wait_idle()


async def test_heartbeats_flow_while_work_is_outstanding_and_only_then():
    async with running_target("toy:vocab=16,seed=1,pass_ms=300", heartbeat_ms=20) as worker:
        call = worker.target.Session()
        await call.write(open_request(target_opening()))
        kinds = []
        while "verdict" not in kinds:
            kinds.append((await call.read()).WhichOneof("message"))
        assert "heartbeat" in kinds
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call.read(), 0.2)
        call.cancel()


async def test_an_idle_session_is_freed_after_its_lease_and_heartbeats_keep_it():
    async with running_target(session_idle_lease_s=1.0, heartbeat_ms=20) as target:
        async with running_draft(session_idle_lease_s=1.0, heartbeat_ms=20) as draft:
            idle = [target.target.Session(), draft.draft.Session()]
            kept = target.target.Session()
            await ask(idle[0], open_request(target_opening()))
            await ask(idle[1], open_request(draft_opening()))
            verdict = (await ask(kept, open_request(target_opening()))).verdict

            async def keep():
                while True:
                    await kept.write(TargetRequest(heartbeat=common_pb2.Heartbeat()))
                    await asyncio.sleep(0.05)

            keeping = asyncio.create_task(keep())
            for call in idle:
                error = await failure(call)
                assert isinstance(error, Aborted)
                assert error.reason == "SESSION_LOST"
            await draft.wait_idle()
            assert (await target.describe()).capacity.num_sessions == 1
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            assert (await ask(kept, verify_request([*PROMPT, *verdict.committed_ids]))).verdict.committed_ids
            kept.cancel()


async def test_an_ended_stream_refuses_more():
    async with running_target() as worker:
        call, ids = await opened(worker, target_opening(max_tokens=2))
        verdict = (await ask(call, verify_request(ids))).verdict
        assert verdict.finish_reason == common_pb2.FINISH_REASON_LENGTH
        await call.write(verify_request([*ids, *verdict.committed_ids]))
        assert isinstance(await failure(call), FailedPrecondition)


async def test_bad_logits_fail_their_stream_and_no_other():
    async with running_target("toy:vocab=16,seed=1,nan_after=20") as worker:
        good, good_ids = await opened(worker)
        bad, ids = await opened(worker, target_opening([1] * 10, max_tokens=100))
        await bad.write(decode_request(ids, 100))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await decoded(bad)
        error = from_rpc_error(caught.value)
        assert isinstance(error, Internal)
        assert "NaN" in error.message
        assert (await ask(good, verify_request(good_ids))).verdict.committed_ids
        good.cancel()
        await worker.wait_idle()

"""Worker sessions over real gRPC: everything that ends a stream frees it, and silence is noticed."""

import asyncio
import contextlib

import grpc
import numpy as np
import pytest
from conftest import scaled
from session_clients import (
    DraftRequest,
    TargetRequest,
    advance_request,
    ask,
    decode_request,
    draft_opening,
    header_of,
    open_request,
    read,
    running_draft,
    running_target,
    target_opening,
    until,
    verify_request,
)

from outrider.drafting.proposal import Proposal
from outrider.errors import Aborted, FailedPrecondition, Internal, InvalidArgument, ResourceExhausted
from outrider.sampling.params import AcceptanceRule, SamplingParams
from outrider.serving import convert, convert_worker
from outrider.serving.status import from_rpc_error
from outrider.v1 import common_pb2, draft_pb2, target_pb2

PROMPT = [1, 2, 3]


async def failure(call):
    """The error that the call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(call)
    return from_rpc_error(caught.value)


async def is_waiting(worker, call):
    """For blocks; or it has ended."""
    return call.done() or (await worker.describe()).capacity.num_waiting == 1


async def opened(worker, opening=None):
    call = worker.target.Session()
    verdict = (await ask(call, open_request(opening or target_opening()))).verdict
    return call, [*PROMPT, *verdict.committed_ids]


async def decoded(call):
    """Verdicts up to the one that ends the decode."""
    verdicts = []
    while not (verdicts and verdicts[-1].decode_ended):
        verdicts.append((await read(call)).verdict)
    return verdicts


async def test_rounds_through_both_workers_give_the_plain_text():
    params = SamplingParams(acceptance=AcceptanceRule.COUPLED, seed=3)
    async with running_target() as target, running_draft("toy:vocab=16,seed=1,agreement=0.8") as draft:
        plain, ids = await opened(target, target_opening(sampling=params))
        await plain.write(decode_request(ids, 100))
        expected = ids + [v.committed_ids[0] for v in await decoded(plain)]

        verifying, ids = await opened(target, target_opening(sampling=params))
        drafting = draft.draft.Session()
        answer = await ask(drafting, open_request(draft_opening(sampling=params)))
        assert answer.opened.context_length == 4096
        new, num_accepted, num_drafted = ids[3:], 0, 0
        while len(ids) < len(expected):
            proposal = (await ask(drafting, advance_request(ids, new, 4))).proposal
            assert proposal.header == convert.header_to_pb(header_of(ids))
            verify = target_pb2.TargetVerify(header=proposal.header, proposal=proposal.proposal)
            verdict = (await ask(verifying, TargetRequest(verify=verify))).verdict
            new = list(verdict.committed_ids)
            ids += new
            num_accepted += verdict.num_accepted
            num_drafted += verdict.num_draft_tokens
        assert ids == expected
        assert 0 < num_accepted < num_drafted
        for call in (plain, verifying, drafting):
            await call.done_writing()
            assert await read(call) is None
        await target.wait_idle()
        await draft.wait_idle()


async def test_trees_of_guesses_give_the_plain_text_and_their_first_verdict_again():
    """Every third guess is right, and stands among wrong ones."""
    async with running_target() as target:
        plain, ids = await opened(target, target_opening())
        await plain.write(decode_request(ids, 100))
        expected = ids + [v.committed_ids[0] for v in await decoded(plain)]
        call, ids = await opened(target, target_opening())
        num_accepted = 0
        while len(ids) < len(expected):
            right = [*expected[len(ids) : len(ids) + 2], 0, 0]
            wrong = [(right[0] + 1) % 16, (right[1] + 1) % 16]
            drafts = Proposal((wrong[0], right[0], wrong[1], wrong[1], right[1]), parents=(-1, -1, 0, 1, 1))
            request = verify_request(ids, drafts)
            verdict = (await ask(call, request)).verdict
            assert not verdict.proposal_fault
            assert (await ask(call, request)).verdict == verdict
            num_accepted += verdict.num_accepted
            ids += list(verdict.committed_ids)
        assert ids == expected
        assert num_accepted > len(expected) // 3
        for open_call in (plain, call):
            open_call.cancel()
        await target.wait_idle()


async def test_describe_worker_tells_model_limits_and_itself():
    async with running_draft(model_name="small", drafters=("tree", "model"), max_draft_tokens=5) as draft:
        answer = await draft.describe()
        assert (answer.model, answer.vocab_size, answer.context_length) == ("small", 16, 4096)
        assert list(answer.drafters) == ["tree", "model"]
        assert answer.simulated
        assert len(answer.incarnation) == 32
        assert {"outrider", "python"} <= set(answer.versions)
        assert (answer.capacity.max_draft_tokens, answer.capacity.block_size) == (5, 16)
        assert answer.incarnation == (await draft.describe()).incarnation


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


async def test_stop_and_verify_end_a_decode_at_a_token_boundary():
    async with running_target("toy:vocab=16,seed=1,pass_ms=5") as worker:
        call, ids = await opened(worker, target_opening(max_tokens=500))
        await call.write(decode_request(ids, 400))
        for _ in range(3):
            ids += (await read(call)).verdict.committed_ids
        await call.write(TargetRequest(stop=target_pb2.TargetStop()))
        rest = await decoded(call)
        ids += [v.committed_ids[0] for v in rest]
        assert len(ids) < 3 + 1 + 400

        await call.write(TargetRequest(stop=target_pb2.TargetStop()))  # nothing runs: no answer, no harm
        verdict = (await ask(call, verify_request(ids))).verdict
        assert (verdict.header.base_length, verdict.decode_ended) == (len(ids), False)
        ids += verdict.committed_ids

        await call.write(decode_request(ids, 400))
        first = (await read(call)).verdict
        await call.write(verify_request(ids))  # the header of a round that the decode has decided
        rest = await decoded(call)
        ids += [*first.committed_ids, *(v.committed_ids[0] for v in rest)]
        answer = await read(call)
        assert answer.WhichOneof("message") == "out_of_step"
        assert answer.out_of_step.header == convert.header_to_pb(header_of(ids))
        verdict = (await ask(call, verify_request(ids))).verdict
        assert verdict.header.base_length == len(ids)
        call.cancel()


async def test_repeated_stale_and_reopened():
    async with running_target() as worker:
        call, ids = await opened(worker)
        first = (await ask(call, verify_request(ids, Proposal((5, 6))))).verdict
        assert (await ask(call, verify_request(ids, Proposal((7,))))).verdict == first
        ids += first.committed_ids

        await call.write(verify_request(ids, epoch=0))  # stale: no answer
        await call.write(open_request(target_opening(epoch=1)))  # stale: no answer
        reopened = (await ask(call, open_request(target_opening(epoch=2, committed_ids=ids[3:])))).verdict
        assert (reopened.header.epoch, reopened.header.base_length) == (2, len(ids))
        await call.write(verify_request(ids, epoch=1))
        ids += reopened.committed_ids
        assert (await ask(call, verify_request(ids, epoch=2))).verdict.header.epoch == 2
        assert (await worker.describe()).capacity.num_sessions == 1
        call.cancel()
        await worker.wait_idle()


async def test_an_ended_stream_refuses_more():
    async with running_target() as worker:
        call, ids = await opened(worker, target_opening(max_tokens=2))
        verdict = (await ask(call, verify_request(ids))).verdict
        assert verdict.finish_reason == common_pb2.FINISH_REASON_LENGTH
        await call.write(verify_request([*ids, *verdict.committed_ids]))
        assert isinstance(await failure(call), FailedPrecondition)


async def test_a_proposal_of_noise_bytes_is_a_plain_round():
    """Whatever the draft worker put on the wire, the round goes on and says what was wrong."""
    rng = np.random.default_rng(1)
    async with running_target() as worker:
        call, ids = await opened(worker, target_opening(max_tokens=500))
        plain, _ = await opened(worker, target_opening(max_tokens=500))
        await plain.write(decode_request(ids, 60))
        expected = ids + [v.committed_ids[0] for v in await decoded(plain)]
        num_faults = 0
        while len(ids) < len(expected) - 8:
            num_drafts = int(rng.integers(1, 5))
            proposal = common_pb2.Proposal(
                token_ids=rng.integers(2**32, size=num_drafts).tolist(),
                q_sizes=rng.integers(4, size=rng.integers(6)).tolist(),
                q_ids=rng.bytes(int(rng.integers(40))),
                q_counts=rng.bytes(int(rng.integers(20))),
            )
            header = convert.header_to_pb(header_of(ids))
            verdict = (
                await ask(call, TargetRequest(verify=target_pb2.TargetVerify(header=header, proposal=proposal)))
            ).verdict
            num_faults += bool(verdict.proposal_fault)
            ids += verdict.committed_ids
        assert ids == expected[: len(ids)]
        assert num_faults > 0
        call.cancel()
        plain.cancel()


REFUSED = {
    "no open": (TargetRequest(verify=target_pb2.TargetVerify()), InvalidArgument, "message"),
    "nothing": (TargetRequest(), InvalidArgument, "message"),
    "temperature": (
        open_request(target_opening(sampling=SamplingParams(temperature=-1.0))),
        InvalidArgument, "open.sampling.temperature",
    ),
    "acceptance": (
        TargetRequest(open=target_pb2.TargetOpen(prompt_ids=[1])), InvalidArgument, "open.sampling.acceptance",
    ),
    "features": (open_request(target_opening(features="hidden")), InvalidArgument, "open.features"),
    "features not kept": (open_request(target_opening(features="-1")), InvalidArgument, "open.features"),
    "features from": (open_request(target_opening(features_start=2)), InvalidArgument, "open.features_start"),
    "prompt": (open_request(target_opening([])), InvalidArgument, "open.prompt_ids"),
    "long prompt": (open_request(target_opening([1] * 4096)), InvalidArgument, "open.prompt_ids"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
async def test_target_refuses_by_field(case):
    request, kind, field = REFUSED[case]
    async with running_target() as worker:
        call = worker.target.Session()
        await call.write(request)
        error = await failure(call)
        assert (type(error), error.field) == (kind, field)
        await worker.wait_idle()


@pytest.mark.parametrize(
    ("request_after_open", "field"),
    [
        (
            TargetRequest(verify=target_pb2.TargetVerify(expected_token_id=0, committed_ids=[1])),
            "verify.committed_ids",
        ),
        (DraftRequest(advance=draft_pb2.DraftAdvance(ahead_branches=65)), "advance.ahead_branches"),
        (DraftRequest(advance=draft_pb2.DraftAdvance(ahead_draft_tokens=65)), "advance.ahead_draft_tokens"),
    ],
)
async def test_what_is_sent_ahead_is_refused_by_name(request_after_open, field):
    running, opening = running_target, target_opening()
    if isinstance(request_after_open, DraftRequest):
        running, opening = running_draft, draft_opening()
    async with running() as worker:
        call = (worker.draft if running is running_draft else worker.target).Session()
        await ask(call, open_request(opening))
        await call.write(request_after_open)
        error = await failure(call)
        assert (type(error), error.field) == (InvalidArgument, field)
        await worker.wait_idle()


async def test_bad_logits_fail_their_stream_and_no_other():
    async with running_target("toy:vocab=16,seed=1,nan_after=20") as worker:
        good, good_ids = await opened(worker)
        bad, ids = await opened(worker, target_opening([1] * 10, max_tokens=100))
        await bad.write(decode_request([*[1] * 10, *ids[3:]], 100))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await decoded(bad)
        error = from_rpc_error(caught.value)
        assert isinstance(error, Internal)
        assert "NaN" in error.message
        assert (await ask(good, verify_request(good_ids))).verdict.committed_ids
        good.cancel()
        await worker.wait_idle()


async def test_draft_worker_out_of_step_and_prefill():
    async with running_draft("toy:vocab=16,seed=1,pass_ms=30,context=64,blocks=8") as worker:
        call = worker.draft.Session()
        await ask(call, open_request(draft_opening()))
        ids = [*PROMPT, 5]
        answer = await ask(call, advance_request([*ids, 6], [6], 3))
        assert answer.WhichOneof("message") == "out_of_step"
        assert answer.out_of_step.header == convert.header_to_pb(header_of(PROMPT))
        proposal = (await ask(call, advance_request([*ids, 6], [5, 6], 3))).proposal.proposal
        assert (len(proposal.token_ids), proposal.drafter) == (3, "model")
        assert (await worker.describe()).capacity.num_free_blocks < 8

        long = worker.draft.Session()
        await ask(long, open_request(draft_opening([1] * 80)))
        assert not (await ask(long, advance_request([*[1] * 80, 2], [2], 3))).proposal.proposal.token_ids
        for open_call in (call, long):
            open_call.cancel()
        await worker.wait_idle()


async def test_a_worker_tells_what_its_passes_cost():
    async with running_target("toy:vocab=16,pass_ms=2,token_ms=0.1") as worker:
        assert not (await worker.describe()).timings
        call, ids = await opened(worker)
        await call.write(decode_request(ids, 12))
        await decoded(call)
        timings = (await worker.describe()).timings
        assert [(timing.prefill, timing.min_sequences, timing.max_sequences) for timing in timings] == [(False, 1, 1)]
        assert timings[0].num_passes >= 12
        assert convert_worker.timing_from_pb(timings[0]).ms(1, 10) >= 1.5, "2 ms are slept in a pass"

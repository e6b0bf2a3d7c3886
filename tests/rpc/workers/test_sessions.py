"""Worker sessions over real gRPC: what rounds give, what is told of the worker, and what is refused."""

import numpy as np
import pytest
from session_clients import (
    DraftRequest,
    TargetRequest,
    advance_request,
    ask,
    decode_request,
    decoded,
    draft_opening,
    failure,
    header_of,
    open_request,
    opened,
    read,
    running_draft,
    running_target,
    target_opening,
    verify_request,
)

from outrider.drafting.proposal import Proposal
from outrider.errors import InvalidArgument
from outrider.sampling.params import AcceptanceRule, SamplingParams
from outrider.serving import convert, convert_worker
from outrider.v1 import common_pb2, draft_pb2, target_pb2

PROMPT = [1, 2, 3]


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


async def test_a_session_that_is_meant_for_another_process_is_refused_by_either_worker():
    async with running_target() as target, running_draft() as draft:
        for worker, call, opening in (
            (target, target.target.Session, target_opening),
            (draft, draft.draft.Session, draft_opening),
        ):
            incarnation = (await worker.describe()).incarnation
            session = call()
            await session.write(open_request(opening(worker_incarnation="another")))
            error = await failure(session)
            assert (error.status, error.reason) == ("UNAVAILABLE", "OTHER_PROCESS")
            session = call()
            await ask(session, open_request(opening(worker_incarnation=incarnation)))
            await session.write(open_request(opening(epoch=2, worker_incarnation="another")))
            assert (await failure(session)).reason == "OTHER_PROCESS", "an open one too"
            await worker.wait_idle()

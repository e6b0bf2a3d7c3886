"""A target worker that drafts by itself, over real gRPC: told in its description, asked for in verify and decode."""

import grpc
import pytest
from session_clients import (
    advance_request,
    ask,
    decode_request,
    draft_opening,
    open_request,
    read,
    running_draft,
    running_target,
    target_opening,
    verify_request,
)

from outrider.errors import InvalidArgument
from outrider.serving.status import from_rpc_error
from outrider.serving.worker_calls import describe

PROMPT = [1, 2, 3]
HEADS = ("toy:agreement=0.9", "weak=toy:agreement=0.2;seed=1")


async def committed(worker, request_of, num_draft_tokens, drafter=""):
    """The text of one greedy stream, and its verdicts."""
    call = worker.target.Session()
    ids = list(PROMPT)
    verdicts = [(await ask(call, open_request(target_opening(PROMPT)))).verdict]
    ids += verdicts[-1].committed_ids
    while not verdicts[-1].finish_reason:
        request = request_of(ids)
        inner = getattr(request, request.WhichOneof("message"))
        inner.num_draft_tokens, inner.drafter = num_draft_tokens, drafter
        await call.write(request)
        while True:
            verdicts.append((await read(call)).verdict)
            ids += verdicts[-1].committed_ids
            if verdicts[-1].decode_ended or request.WhichOneof("message") == "verify":
                break
    await call.done_writing()
    assert await read(call) is None
    return ids, verdicts


@pytest.mark.parametrize("how", ["verify", "decode"])
@pytest.mark.parametrize("drafter", ["", "weak"])
async def test_same_text_in_fewer_passes(how, drafter):
    requests = {"verify": verify_request, "decode": lambda ids: decode_request(ids, 9)}
    async with running_target(heads=HEADS) as worker:
        plain, _ = await committed(worker, requests[how], 0)
        ids, verdicts = await committed(worker, requests[how], 4, drafter)
        assert ids == plain
        assert any(verdict.drafted_ids for verdict in verdicts), "INCONCLUSIVE: nothing was drafted"
        assert all(len(verdict.drafted_ids) == verdict.num_draft_tokens for verdict in verdicts)
        if not drafter:
            assert len(verdicts) < 32
        await worker.wait_idle()


async def test_the_description_tells_them():
    async with running_target(heads=HEADS) as worker:
        told = await describe(worker.channel, without_tokenizer=True, timeout_s=10)
        assert [(drafter.name, drafter.kind, drafter.source) for drafter in told.target_drafters] == [
            ("toy", "toy", "toy:agreement=0.9"),
            ("weak", "toy", "toy:agreement=0.2;seed=1"),
        ]
        assert told.drafters == ()
    async with running_draft() as worker:
        assert (await describe(worker.channel, without_tokenizer=True, timeout_s=10)).target_drafters == ()


@pytest.mark.parametrize("how", ["verify", "decode"])
@pytest.mark.parametrize(
    ("heads", "drafter", "num_draft_tokens", "field", "told"),
    [
        (HEADS, "eagle3", 2, "drafter", "offers toy, weak"),
        ((), "toy", 2, "drafter", "no drafters of its own"),
        ((), "", 2, "num_draft_tokens", "no drafters of its own"),
        (HEADS, "toy", 9, "num_draft_tokens", "announced 8"),
    ],
)
async def test_what_is_not_offered_is_refused_by_name(how, heads, drafter, num_draft_tokens, field, told):
    async with running_target(heads=heads) as worker:
        call = worker.target.Session()
        ids = [*PROMPT, *(await ask(call, open_request(target_opening(PROMPT)))).verdict.committed_ids]
        request = verify_request(ids) if how == "verify" else decode_request(ids, 4)
        inner = getattr(request, how)
        inner.drafter, inner.num_draft_tokens = drafter, num_draft_tokens
        await call.write(request)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(call)
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidArgument)
        assert error.field == f"{how}.{field}"
        assert told in error.message
        await worker.wait_idle()


async def test_a_failing_head_is_told_and_costs_speed_only():
    async with running_target(heads=("toy:nan_after=10",)) as worker:
        plain, _ = await committed(worker, verify_request, 0)
        ids, verdicts = await committed(worker, verify_request, 3)
        assert ids == plain
        assert any(verdict.drafted_ids for verdict in verdicts), "INCONCLUSIVE: nothing was drafted"
        assert "NaN" in verdicts[-5].proposal_fault or "set aside" in verdicts[-5].proposal_fault


@pytest.mark.parametrize(
    ("heads", "told"),
    [
        (("toy:agreement=0.5", "toy:agreement=0.6"), "two are called toy"),
        (("toy:agreement=0.5", "toy-tree=toy:agreement=0.6"), "two are called toy-tree"),
        (("toy:nonsense=1",), "nonsense"),
        (("nowhere",), "nowhere"),
    ],
)
async def test_heads_that_cannot_be_had_stop_the_start(heads, told):
    with pytest.raises(InvalidArgument, match=told):
        async with running_target(heads=heads):
            pass


async def test_features_are_refused_by_name():
    async with running_draft() as worker:
        call = worker.draft.Session()
        await call.write(open_request(draft_opening(PROMPT, features="-1")))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(call)
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidArgument)
        assert error.field == "open.features"
        call = worker.draft.Session()
        await ask(call, open_request(draft_opening(PROMPT)))
        request = advance_request(PROMPT, (), 2)
        request.advance.features = b"12"
        await call.write(request)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(call)
        assert from_rpc_error(caught.value).field == "advance.features"

"""A draft worker that has a head: drafts from states that are sent, over real gRPC, as a model of its table drafts."""

import asyncio
import dataclasses
from contextlib import asynccontextmanager

import grpc
import numpy as np
import pytest
from session_clients import advance_request, ask, draft_opening, open_request, read, running_draft
from waiting import until

from outrider.drafting.received_features import packed_rows
from outrider.errors import InvalidArgument
from outrider.lm.toy import ToyModel, parse_toy
from outrider.lm.toy_head import BYTES_PER_PAIR, STATES, ToyHead
from outrider.sampling.params import AcceptanceRule, SamplingParams
from outrider.serving.status import from_rpc_error
from outrider.serving.worker_calls import describe
from outrider.v1 import common_pb2, draft_pb2

TARGET, HEAD = "toy:vocab=16,seed=1", "toy:agreement=0.7"
MODEL = ToyModel(parse_toy(TARGET))
PROMPT = [3, 1, 2, 5]
ROW_BYTES = 2 * ToyHead.feature_width
RULES = {
    "greedy": SamplingParams(temperature=0.0),
    "coupled": SamplingParams(acceptance=AcceptanceRule.COUPLED, seed=7, repetition_penalty=1.3),
    "token": SamplingParams(acceptance=AcceptanceRule.TOKEN, seed=7, temperature=0.8, top_p=0.9),
    "block": SamplingParams(acceptance=AcceptanceRule.BLOCK, seed=9, frequency_penalty=0.4),
}
Request = draft_pb2.DraftServiceSessionRequest


def running_head(**settings):
    return running_draft("", head=HEAD, target=TARGET, **settings)


def opening(prompt=PROMPT, **fields):
    about = {"features": "2,-1", "target_fingerprint": MODEL.description.model_fingerprint}
    return draft_opening(prompt, **{**about, **fields}, max_tokens=fields.pop("max_tokens", 200))


def rows(ids, start, end):
    """Of tokens `start` to `end`."""
    return b"".join(packed_rows(MODEL.features_for(ids[: place + 1], STATES)[None]) for place in range(start, end))


def advance(ids, num_new, num_drafts, start=None, data=None):
    """All states but the last token's from `start` on; None: those of the new ids' predecessors."""
    request = advance_request(ids, ids[len(ids) - num_new :], num_drafts)
    start = max(0, len(ids) - 1 - num_new) if start is None else start
    request.advance.features_start = start
    request.advance.features = rows(ids, start, len(ids) - 1) if data is None else data
    return request


def content(proposal):
    return [list(getattr(proposal, name)) for name in ("token_ids", "q_sizes", "q_ids", "q_counts")]


@asynccontextmanager
async def opened(worker, message=None):
    call = worker.draft.Session()
    assert (await ask(call, open_request(message or opening()))).HasField("opened")
    yield call
    call.cancel()


@pytest.mark.parametrize("rule", RULES)
async def test_it_proposes_what_a_model_of_the_same_table_does(rule):
    """Full and partial acceptance, plain tokens between, states whole, in parts, again, and beside others' streams."""
    rng = np.random.default_rng(0)
    async with running_head() as worker, running_draft(TARGET + ",agreement=0.7") as other:
        told = await describe(worker.channel, without_tokenizer=True, timeout_s=10)
        assert (told.drafters, dict(told.drafter_features)) == (("toy-head",), {"toy-head": "2,-1"})
        assert told.target_fingerprints == (MODEL.description.model_fingerprint,)
        mine, theirs = opening(sampling=RULES[rule]), draft_opening(PROMPT, sampling=RULES[rule], max_tokens=200)
        async with opened(worker, mine) as call, opened(other, theirs) as reference:
            ids, end, num_new, drafted = list(PROMPT), 0, 0, 0
            for number in range(15):
                start = max(0, end - number % 3)
                if number % 4 == 3:
                    middle = (start + len(ids)) // 2
                    part = common_pb2.FeatureRows(features_start=start, features=rows(ids, start, middle))
                    await call.write(Request(features=part))
                    start = middle
                proposal = (await ask(call, advance(ids, num_new, 4, start))).proposal
                expected = (await ask(reference, advance_request(ids, ids[len(ids) - num_new :], 4))).proposal
                assert content(proposal.proposal) == content(expected.proposal)
                assert proposal.features_end == len(ids) - 1
                assert not expected.HasField("features_end")
                drafted += len(proposal.proposal.token_ids)
                end = len(ids) - 1
                taken = list(proposal.proposal.token_ids)[: int(rng.integers(5))]
                new = [*taken, *rng.integers(16, size=1 + 6 * (number == 7)).tolist()]
                ids += new
                num_new = len(new)
            assert drafted == 60
        await worker.wait_idle()


async def test_what_is_lacking_costs_drafts_until_it_comes():
    async with running_head() as worker, opened(worker) as call:
        ids = [*PROMPT, 4]
        nothing = (await ask(call, advance(ids, 1, 3, data=b""))).proposal
        assert (len(nothing.proposal.token_ids), nothing.features_end) == (0, 0)
        for start, data in (
            (2, rows(ids, 2, 4)),  # a gap
            (0, rows(ids, 0, 4)[:-1]),  # no whole row
            (0, rows(ids, 0, 300)),  # more than the stream has tokens
            (0, b"\xff\x7f" * (ROW_BYTES // 2)),  # NaN
        ):
            answer = (await ask(call, advance(ids, 0, 3, start, data))).proposal
            assert (len(answer.proposal.token_ids), answer.features_end) == (0, 0)
        half = (await ask(call, advance(ids, 0, 3, 0, rows(ids, 0, 2)))).proposal
        assert (len(half.proposal.token_ids), half.features_end) == (0, 2)
        whole = (await ask(call, advance(ids, 0, 3, 2))).proposal
        assert (len(whole.proposal.token_ids), whole.features_end) == (3, 4)


async def test_memory_is_bounded_and_idle_sessions_lose_theirs():
    """Room for some 40 tokens: six sessions of 12 take turns, each sent all rows again once it has lost them."""
    block_bytes = 4 * (BYTES_PER_PAIR + ROW_BYTES)
    settings = {"kv_cache_bytes": 10 * block_bytes, "block_size": 4, "max_draft_tokens": 4}
    async with running_head(**settings) as worker:
        calls = [worker.draft.Session() for _ in range(6)]
        texts = [[1 + number, *PROMPT, *range(6)] for number in range(6)]
        for call, text in zip(calls, texts, strict=True):
            answer = await ask(call, open_request(opening(text)))
            assert answer.opened.context_length == 40
        num_lost = num_drafted = 0
        for turn in range(4):
            for call, text in zip(calls, texts, strict=True):
                text.append(turn)
                answer = (await ask(call, advance(text, 1, 3))).proposal
                while len(answer.proposal.token_ids) < 3:
                    num_lost += turn > 0
                    answer = (await ask(call, advance(text, 0, 3, answer.features_end))).proposal
                num_drafted += len(answer.proposal.token_ids)
                capacity = (await worker.describe()).capacity
                assert 0 <= capacity.num_free_blocks < capacity.num_blocks == 10
        counters = (await describe(worker.channel, without_tokenizer=True, timeout_s=10)).cache_counters
        assert num_drafted == 72
        assert 0 < num_lost <= counters.num_idle_evictions
        for call in calls:
            call.cancel()
        await worker.wait_idle()


async def test_a_text_beyond_all_memory_is_not_drafted_for_and_not_asked_for():
    settings = {"kv_cache_bytes": 10 * 4 * (BYTES_PER_PAIR + ROW_BYTES), "block_size": 4, "max_draft_tokens": 4}
    async with running_head(**settings) as worker:
        text = [i % 16 for i in range(60)]
        async with opened(worker, opening(text)) as call:
            answer = (await ask(call, advance(text, 0, 3, 0))).proposal
            assert (len(answer.proposal.token_ids), answer.HasField("features_end")) == (0, False)
        async with opened(worker) as call:
            assert (await ask(call, advance(PROMPT, 0, 3, 0))).proposal.features_end == 3
        await worker.wait_idle()


async def test_a_session_opened_anew_begins_without_states():
    async with running_head() as worker, opened(worker) as call:
        assert (await ask(call, advance(PROMPT, 0, 2, 0))).proposal.features_end == 3
        again = dataclasses.replace(opening(), epoch=2, committed_ids=[4, 5])
        assert (await ask(call, open_request(again))).HasField("opened")
        ids = [*PROMPT, 4, 5]
        request = advance(ids, 0, 2, 4)
        request.advance.header.epoch = 2
        assert (await ask(call, request)).proposal.features_end == 0
        request = advance(ids, 0, 2, 0)
        request.advance.header.epoch = 2
        answer = (await ask(call, request)).proposal
        assert (answer.features_end, len(answer.proposal.token_ids)) == (5, 2)
        lagging = advance([*ids, 7, 7], 1, 2)
        lagging.advance.header.epoch = 2
        assert (await ask(call, lagging)).out_of_step.header.base_length == 6


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"features": ""}, "open.features"),
        ({"features": "-1,2"}, "open.features"),
        ({"target_fingerprint": ""}, "open.target_fingerprint"),
        ({"target_fingerprint": "ab"}, "open.target_fingerprint"),
        ({"drafter": "model"}, "open.drafter"),
        ({"max_q_entries": 0}, "open.max_q_entries"),
    ],
)
async def test_what_a_head_cannot_serve_is_refused_by_name(fields, field):
    async with running_head() as worker:
        call = worker.draft.Session()
        await call.write(open_request(opening(**fields)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(call)
        error = from_rpc_error(caught.value)
        assert (type(error), error.field) == (InvalidArgument, field)
        await worker.wait_idle()


async def test_sessions_that_end_while_they_draft_leave_nothing():
    async with running_head() as worker:
        text = [i % 16 for i in range(150)]
        for delay in range(12):
            call = worker.draft.Session()
            await ask(call, open_request(opening(text)))
            await call.write(advance(text, 0, 8, 0))
            await asyncio.sleep(delay / 1000)
            call.cancel()
        await worker.wait_idle()

        async def nothing_held() -> bool:
            capacity = (await worker.describe()).capacity
            return capacity.num_free_blocks == capacity.num_blocks

        await until(nothing_held)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"head": HEAD}, "target"),
        ({"target": TARGET}, "target"),
        ({"head_states": ("2",)}, "head_states"),
        ({"head": HEAD, "target": TARGET, "model": TARGET}, "model"),
        ({"head": HEAD, "target": TARGET, "weight_dtype": "int8"}, "weight_dtype"),
        ({"head": HEAD, "target": TARGET, "drafters": ("model",)}, "drafters"),
        ({"head": HEAD, "target": "nowhere/at-all"}, "target"),
        ({"head": "nowhere", "target": TARGET}, "head"),
    ],
)
async def test_settings_that_do_not_go_together_stop_the_start(settings, field):
    with pytest.raises(InvalidArgument) as caught:
        async with running_draft(**{"model": "", **settings}):
            pass
    assert caught.value.field == field

"""States of the target that come with its verdicts: of each committed token but the last, once, the right ones."""

import dataclasses

import grpc
import pytest
from conftest import scaled
from session_clients import (
    ask,
    decode_request,
    open_request,
    read,
    running_target,
    target_opening,
    verify_request,
)

from outrider.drafting.proposal import Proposal
from outrider.drafting.received_features import packed_rows
from outrider.errors import InvalidArgument
from outrider.lm.toy import ToyModel, parse_toy
from outrider.serving.status import from_rpc_error
from outrider.serving.worker_calls import describe
from target_worker import sent_features

TOY = "toy:vocab=16,seed=1"
MODEL = ToyModel(parse_toy(TOY))
STATES = (2, 0, -1)
SETTINGS = {"features": ("-1", "0", "1", "2"), "heads": ("toy:agreement=0.8",)}
PROMPT = [1, 2, 3, 4, 5, 6, 7]
ROW_BYTES = 2 * len(STATES) * MODEL.hidden_size


def opening(prompt=PROMPT, **fields):
    return target_opening(prompt, **{"features": "2,0,-1", "max_tokens": 40, **fields})


def rows_of(ids, start=0):
    """Of all tokens from `start` on but the last."""
    return b"".join(packed_rows(MODEL.features_for(ids[: place + 1], STATES)) for place in range(start, len(ids) - 1))


class Text:
    """A stream's ids, and the rows that came for them."""

    def __init__(self, prompt, rows=b""):
        self.ids, self.rows, self.num_messages = list(prompt), rows, 0

    async def take(self, call, again_from=None):
        """A verdict and what comes before it."""
        if again_from is not None:
            self.rows = self.rows[: again_from * ROW_BYTES]
        while True:
            message = await read(call)
            told = message.features if message.HasField("features") else message.verdict
            if told.features:
                self.num_messages += 1
                assert told.features_start * ROW_BYTES == len(self.rows), "a gap, or rows twice"
                self.rows += told.features
            if message.HasField("verdict"):
                self.ids += message.verdict.committed_ids
                if not message.verdict.finish_reason:
                    assert self.rows == rows_of(self.ids)
                return message.verdict


async def test_every_committed_token_once_whatever_commits_it():
    """Proposals accepted in part, trees, decodes with and without drafts; then the same text from the prefix cache."""
    async with running_target(TOY, block_size=4, **SETTINGS) as worker:
        assert (await describe(worker.channel, without_tokenizer=True, timeout_s=10)).features == "-1,0,1,2"
        for is_again in (False, True):
            call, text = worker.target.Session(), Text(PROMPT)
            await call.write(open_request(opening()))
            verdict = await text.take(call)
            assert (verdict.num_cached_tokens > 0) == is_again
            accepted = 0
            for number in range(5):
                best = int(MODEL.logits_for(text.ids).argmax())
                after = int(MODEL.logits_for([*text.ids, best]).argmax())
                proposal = (
                    Proposal((best, after, (after + number) % 16, 3)),
                    Proposal(((best + 1) % 16, best, 5, after), parents=(-1, -1, 0, 1)),
                )[number % 2]
                await call.write(verify_request(text.ids, proposal))
                accepted += (await text.take(call)).num_accepted
            assert accepted > 4, "INCONCLUSIVE"
            for num_drafts in (0, 3):
                request = decode_request(text.ids, 6)
                request.decode.num_draft_tokens = num_drafts
                await call.write(request)
                while not (await text.take(call)).decode_ended:
                    pass
            call.cancel()
        await worker.wait_idle()


async def test_rows_come_again_from_where_they_are_asked_for(monkeypatch):
    """In a reopened session, in a round and in a decode; in several messages where they are many."""
    monkeypatch.setattr(sent_features, "MAX_MESSAGE_BYTES", 3 * ROW_BYTES)
    async with running_target(TOY, **SETTINGS) as worker:
        call, text = worker.target.Session(), Text(PROMPT)
        await call.write(open_request(opening()))
        await text.take(call)
        assert text.num_messages == 3  # of 7 rows
        for start, request in ((0, verify_request), (5, verify_request), (2, lambda ids: decode_request(ids, 2))):
            asked = request(text.ids)
            inner = getattr(asked, asked.WhichOneof("message"))
            inner.features_start = start
            await call.write(asked)
            verdict = await text.take(call, again_from=start)
            if asked.HasField("decode"):
                assert not verdict.decode_ended
                assert (await text.take(call)).decode_ended
        again = dataclasses.replace(opening(), epoch=2, committed_ids=text.ids[7:], features_start=9)
        await call.write(open_request(again))
        await text.take(call, again_from=9)
        fresh, other = worker.target.Session(), Text(PROMPT)
        await fresh.write(open_request(opening()))
        await other.take(fresh)
        del fresh


async def test_no_rows_unless_they_are_asked_for():
    async with running_target(TOY, **SETTINGS) as worker:
        call = worker.target.Session()
        verdict = (await ask(call, open_request(opening(features="")))).verdict
        assert (verdict.features, verdict.features_start) == (b"", 0)
        request = verify_request([*PROMPT, *verdict.committed_ids])
        request.verify.features_start = 0
        await call.write(request)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(call)
        assert from_rpc_error(caught.value).field == "verify.features_start"


async def test_lost_blocks_are_computed_again_with_their_states():
    """Far fewer blocks than streams: each turn of one takes those of others, and its rows are right all the same."""
    num_streams = scaled(20, at_least=6)
    settings = {**SETTINGS, "block_size": 4, "kv_cache_bytes": 16 * 4 * (8 + 4 * 4 * 8), "cache_overcommit": 16.0}
    async with running_target(TOY, **settings) as worker:
        calls = [worker.target.Session() for _ in range(num_streams)]
        texts = [Text([1 + i % 15, *PROMPT]) for i in range(num_streams)]
        for call, text in zip(calls, texts, strict=True):
            await call.write(open_request(opening(text.ids, tenant=str(len(text.ids)))))
            await text.take(call)
        for number in range(8):
            for call, text in zip(calls, texts, strict=True):
                request = verify_request(text.ids)
                if number == 5:
                    request.verify.features_start = 0
                await call.write(request)
                await text.take(call, again_from=0 if number == 5 else None)
        counters = (await describe(worker.channel, without_tokenizer=True, timeout_s=10)).cache_counters
        assert counters.num_preemptions + counters.num_idle_evictions > 0, "INCONCLUSIVE: nothing was preempted"
        for call in calls:
            call.cancel()


@pytest.mark.parametrize(
    ("settings", "field", "told"),
    [
        ({"features": ("4",)}, "features", "states 0 to 3"),
        ({"features": ("last",)}, "features", "no comma list"),
        ({"features": ("1", "1")}, "features", "twice"),
    ],
)
async def test_states_that_a_model_has_not_stop_the_start(settings, field, told):
    with pytest.raises(InvalidArgument, match=told) as caught:
        async with running_target(TOY, **settings):
            pass
    assert caught.value.field == field


@pytest.mark.parametrize(("features", "told"), [("2,3", "offers -1, 0, 1, 2"), ("2,", "no comma list")])
async def test_states_that_are_not_kept_are_refused_by_name(features, told):
    async with running_target(TOY, **SETTINGS) as worker:
        call = worker.target.Session()
        await call.write(open_request(opening(features=features)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(call)
        error = from_rpc_error(caught.value)
        assert (type(error), error.field) == (InvalidArgument, "open.features")
        assert told in error.message

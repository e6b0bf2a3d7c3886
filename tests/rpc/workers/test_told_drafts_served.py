"""A draft worker tells the drafts of a sampled chain one by one: in parts the very proposal that it makes as
a whole, so that a caller may use those that have come."""

from __future__ import annotations

from typing import Any

import pytest
from session_clients import advance_request, ask, draft_opening, open_request, read, running_draft

from outrider.sampling.params import AcceptanceRule, SamplingParams
from outrider.serving import convert
from outrider.serving.session_calls import _sealed, joined

PROMPT = [1, 2, 3]
NUM_DRAFTS = 5


async def answers(worker: Any, rule: AcceptanceRule, **fields: Any) -> list[Any]:
    """To one question for drafts, up to the proposal."""
    call = worker.draft.Session()
    opening = draft_opening(sampling=SamplingParams(acceptance=rule, seed=3))
    assert (await ask(call, open_request(opening))).WhichOneof("message") == "opened"
    request = advance_request(PROMPT, [], NUM_DRAFTS)
    for name, value in fields.items():
        setattr(request.advance, name, value)
    await call.write(request)
    found = []
    while not found or found[-1].WhichOneof("message") != "proposal":
        found.append(await read(call))
    call.cancel()
    return found


def kinds(found: list[Any]) -> list[str]:
    return [message.WhichOneof("message") for message in found]


@pytest.mark.parametrize("price", [{}, {"price_tokens_per_ms": 0.0}], ids=["as long as wanted", "priced"])
@pytest.mark.parametrize("rule", [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK])
async def test_the_parts_are_the_whole(rule: AcceptanceRule, price: dict[str, float]) -> None:
    async with running_draft("toy:vocab=16,seed=1,agreement=0.8") as worker:
        (whole,) = await answers(worker, rule)
        told = await answers(worker, rule, tell_drafts=True, **price)
        assert kinds(told) == ["drawn"] * (NUM_DRAFTS - 1) + ["proposal"]
        assert all(len(message.drawn.draft.token_ids) == 1 for message in told[:-1])
        assert {message.drawn.header.SerializeToString() for message in told[:-1]} == {
            told[-1].proposal.header.SerializeToString()
        }
        parts = [_sealed(message.drawn.draft) for message in told[:-1]] + [_sealed(told[-1].proposal.proposal)]
        one, other = (convert.proposal_from_pb(m) for m in (joined(parts).message, whole.proposal.proposal))
        assert one.token_ids == other.token_ids
        assert len(one.token_ids) == NUM_DRAFTS
        for a, b in zip(one.q, other.q, strict=True):
            assert a is not None
            assert b is not None
            assert (a.ids.tolist(), a.counts.tolist()) == (b.ids.tolist(), b.counts.tolist())
        begun = await answers(worker, rule, price_tokens_per_ms=0.0)
        assert kinds(begun) == ["begun", "proposal"], "an older caller is told what it knows"
        assert begun[-1].proposal.proposal.token_ids == whole.proposal.proposal.token_ids
        await worker.wait_idle()


async def test_where_drafts_are_matched_nothing_is_told_before_the_proposal() -> None:
    async with running_draft("toy:vocab=16,seed=1,agreement=0.8") as worker:
        found = await answers(worker, AcceptanceRule.COUPLED, price_tokens_per_ms=0.0, tell_drafts=True)
        assert kinds(found) == ["proposal"]
        assert len(found[0].proposal.proposal.token_ids) == NUM_DRAFTS


async def test_the_prompt_and_a_plain_run_are_told_apart_from_the_drafts() -> None:
    """What a drafter needs to come level is no part of what drafts take: not its queue, not its work."""
    async with running_draft("toy:vocab=16,seed=1,pass_ms=20,token_ms=1") as worker:
        call = worker.draft.Session()
        prompt = [index % 13 for index in range(60)]
        greedy = draft_opening(prompt, max_tokens=200, sampling=SamplingParams(temperature=0.0))
        await ask(call, open_request(greedy))
        run = [5] * 40
        first, behind, level = [
            (await ask(call, advance_request(prompt + ids, new, 1))).proposal.proposal
            for ids, new in (([], []), (run, run), ([*run, 6], [6]))
        ]
        assert first.catch_up_us > 0, "the prompt's pass was under way"
        assert behind.catch_up_us > 40_000, "a pass over 40 rows sleeps as long"
        assert behind.ingested_tokens == len(run)
        assert level.catch_up_us == 0
        call.cancel()
        await worker.wait_idle()

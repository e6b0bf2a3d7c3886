"""Drafts that a worker tells one by one: all that came are used, when time is up, when it dies, and when it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from coordinator.draft_link import MAX_DRAWN, DraftLate, DraftLink
from coordinator.features import FeatureFeed, FeatureRelay
from coordinator.log import Log
from outrider.drafting.proposal import Proposal, SparseQ
from outrider.drafting.ratio_stop import Price
from outrider.errors import Unavailable
from outrider.sampling.noise import hash_ids
from outrider.sampling.params import SamplingParams, StoppingParams
from outrider.serving import convert
from outrider.serving.messages import DraftOpening, Header
from outrider.serving.session_calls import Drawn, Lagging, Opened, Proposed, SealedProposal, _sealed

PROMPT = (1, 2, 3)
PRICE = Price(0.1)
LOST = Unavailable("the worker is gone", reason="WORKER_LOST")


def chain(*token_ids: int, compute_us: int = 0) -> SealedProposal:
    q = tuple(SparseQ(np.array([i, 60 + i], np.uint32), np.array([65_000, 536])) for i in token_ids)
    return _sealed(convert.proposal_to_pb(Proposal(token_ids, q, drafter="model", compute_us=compute_us)))


class Peer:
    """A worker that says these things, and then nothing; an error is what it is lost with."""

    def __init__(self, *messages: Any) -> None:
        self.num_outstanding = 0
        self.sent: list[Any] = []
        self.messages = list(messages)

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def receive(self) -> Any:
        if not self.messages:
            await asyncio.Event().wait()
        message = self.messages.pop(0)
        if isinstance(message, Exception):
            raise message
        return message

    def receive_now(self) -> Any:
        return None


async def link_to(*messages: Any) -> tuple[DraftLink, Any, Header]:
    log = Log(PROMPT, hash_ids(PROMPT))
    header = log.header(1)
    peer: Any = Peer(Opened(64), *(m(header) if callable(m) else m for m in messages))
    link = DraftLink(peer, "worker", log, FeatureFeed(FeatureRelay(), peer, "", ""))
    await link.open(DraftOpening(epoch=1, prompt_ids=PROMPT, sampling=SamplingParams(), stopping=StoppingParams(9)))
    await link.wait_opened()
    return link, peer, header


def drawn(token_id: int, **fields: Any) -> Any:
    return lambda header: Drawn(header, chain(token_id, **fields))


def ended(*token_ids: int, **fields: Any) -> Any:
    return lambda header: Proposed(header, chain(*token_ids, **fields))


async def propose(link: DraftLink, wait_s: float = 30.0, price: Price | None = PRICE) -> SealedProposal:
    return await asyncio.wait_for(link.propose(4, "model", wait_s, price=price), 60)


@pytest.mark.parametrize("rest", [(), (7,)])
async def test_the_end_comes_after_what_was_told(rest: tuple[int, ...]) -> None:
    link, peer, _ = await link_to(drawn(4), drawn(5), ended(*rest, compute_us=9))
    proposal = await propose(link)
    whole = convert.proposal_from_pb(proposal.message)
    assert proposal == chain(4, 5, *rest, compute_us=9)
    assert whole.token_ids == (4, 5, *rest)
    assert [q.ids.tolist() for q in whole.q if q is not None] == [[i, 60 + i] for i in (4, 5, *rest)]
    assert not link.is_cut
    assert peer.sent[-1].advance.tell_drafts
    assert link.ready()


@pytest.mark.parametrize("price", [None, PRICE], ids=["as long as wanted", "priced"])
@pytest.mark.parametrize("end", [(), (LOST,)], ids=["late", "lost"])
async def test_what_has_come_is_used_whatever_becomes_of_the_rest(end: tuple[Any, ...], price: Price | None) -> None:
    link, peer, _ = await link_to(drawn(4), drawn(5, compute_us=7), *end)
    assert await propose(link, 0.05, price) == chain(4, 5, compute_us=7)
    assert peer.sent[-1].advance.tell_drafts
    assert link.is_cut
    assert (link.vain_wait_s > 0) == (not end), "a worker that is lost is charged for where it is found"
    assert not link.ready(), "it owes the rest, which will be dropped"
    assert link.late_s > 0


async def test_before_the_first_draft_a_proposal_is_late_or_lost() -> None:
    link, _, _ = await link_to()
    with pytest.raises(DraftLate):
        await propose(link, 0.02)
    link, _, _ = await link_to(LOST)
    with pytest.raises(Unavailable):
        await propose(link)


async def test_drafts_of_another_prefix_are_none_of_this_round() -> None:
    other = Drawn(Header(1, 4, 99), chain(6))
    link, _, _ = await link_to(other, drawn(4), other, ended())
    assert (await propose(link)).token_ids == (4,)


async def test_one_that_was_out_of_step_begins_anew() -> None:
    link, _, _ = await link_to(drawn(4), Lagging, drawn(5), ended())
    assert (await propose(link)).token_ids == (5,)
    assert not link.is_cut


@pytest.mark.parametrize("end", [(ended(),), ()], ids=["ended", "cut"])
async def test_more_than_were_wanted_are_dropped_and_held_against_the_worker(end: tuple[Any, ...]) -> None:
    link, _, _ = await link_to(*(drawn(4) for _ in range(2 * MAX_DRAWN)), *end)
    assert (await propose(link, 0.2)).num_draft_tokens == 0
    assert link.take_num_dropped() == 1
    assert link.conduct.standing.quarantine.num_bad == 1

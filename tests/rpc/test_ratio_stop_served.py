"""Chains that end by themselves, through the services: they end, the text stays, and lateness selects nothing."""

import asyncio
from typing import Any

import pytest
from stack import in_process_stack

import outrider
from coordinator.draft_link import DraftLate, DraftLink
from coordinator.features import FeatureFeed, FeatureRelay
from coordinator.log import Log
from draft_worker.server import _price
from outrider.drafting.ratio_stop import Price
from outrider.errors import InvalidArgument
from outrider.sampling.noise import hash_ids
from outrider.sampling.params import SamplingParams, StoppingParams
from outrider.serving.messages import DraftOpening, Header
from outrider.serving.session_calls import Begun, Opened, Proposed, SealedProposal
from outrider.v1 import draft_pb2

TARGET, DRAFT = "toy:vocab=32,seed=1,pass_ms=12", "toy:vocab=32,seed=1,agreement=0.95"
"""Drafts that cost next to nothing: several a round pay, however busy the machine is."""
PROMPT = [1, 2, 3]


@pytest.mark.parametrize("rule", ["greedy", "coupled", "block"])
async def test_drafts_have_a_price_and_the_text_stays(rule: str) -> None:
    options: dict[str, Any] = {"temperature": 0.0} if rule == "greedy" else {"acceptance": rule}
    async with (
        in_process_stack(TARGET, DRAFT, coordinator={"draft_ahead": "off"}) as stack,
        outrider.Client(stack.address) as client,
    ):
        for seed in range(3):
            plain = await client.complete(PROMPT, seed=seed, max_tokens=60, num_speculative_tokens=0, **options)
            answer = await client.complete(PROMPT, seed=seed, max_tokens=60, drafter="model", **options)
            assert rule == "block" or answer.token_ids == plain.token_ids
            assert answer.speculation.num_draft_failures == 0
        fixed = await client.complete(
            PROMPT, seed=5, max_tokens=40, num_speculative_tokens=4, drafter="model", report_steps=True, **options
        )  # fmt: skip
    lengths = {s.num_draft_tokens for c in fixed.chunks if (s := c.step) and s.num_draft_tokens_wanted == 4}
    lengths.discard(0)  # a proposal that a busy machine made late
    assert lengths == {4}, "a fixed number of drafts is what was asked for"


class Peer:
    """What a worker sends, and when."""

    def __init__(self, *messages: tuple[float, Any]) -> None:
        self.num_outstanding = 0
        self.sent: list[Any] = []
        self._messages = list(messages)

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def receive(self) -> Any:
        if not self._messages:
            await asyncio.Event().wait()
        after_s, message = self._messages.pop(0)
        await asyncio.sleep(after_s)
        return message


async def link_to(*messages: tuple[float, Any]) -> tuple[DraftLink, Any]:
    log = Log(tuple(PROMPT), hash_ids(PROMPT))
    opening = DraftOpening(epoch=1, prompt_ids=PROMPT, sampling=SamplingParams(), stopping=StoppingParams(9))
    header = log.header(1)
    answers = [(after_s, kind(header) if callable(kind) else kind) for after_s, kind in messages]
    peer: Any = Peer((0.0, Opened(64)), *answers)
    link = DraftLink(peer, "worker", log, FeatureFeed(FeatureRelay(), peer, "", ""))
    await link.open(opening)
    await link.wait_opened()
    return link, peer


async def test_a_proposal_is_given_up_before_it_has_begun_and_not_afterwards() -> None:
    """How long it takes follows from what was drawn: only what came before the first draw may decide."""
    proposal = SealedProposal(num_draft_tokens=1)
    link, peer = await link_to((0.0, Begun), (0.2, lambda header: Proposed(header, proposal)))
    assert await link.propose(4, "model", 0.05, price=Price(0.25, 0.125)) is proposal
    advance = peer.sent[-1].advance
    assert (advance.price_tokens_per_ms, advance.row_price_tokens) == (0.25, 0.125)
    link, _ = await link_to((0.2, Begun), (0.0, lambda header: Proposed(header, proposal)))
    with pytest.raises(DraftLate):
        await link.propose(4, "model", 0.05, price=Price(0.25))
    other = Begun(Header(9, 9, 9))
    link, _ = await link_to((0.0, other), (0.2, lambda header: Proposed(header, proposal)))
    with pytest.raises(DraftLate):
        await link.propose(4, "model", 0.05)


async def test_prices_that_are_none_are_refused_by_name() -> None:
    for fields in ({"price_tokens_per_ms": -1.0}, {"price_tokens_per_ms": 1.0, "row_price_tokens": float("nan")}):
        with pytest.raises(InvalidArgument, match=f"advance.{list(fields)[-1]}"):
            _price(draft_pb2.DraftAdvance(**fields))
    assert _price(draft_pb2.DraftAdvance()) is None

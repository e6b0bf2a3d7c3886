"""What was sent, begun or foretold and comes to nothing: the stream goes on, and waits for nobody for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import loop_law
import pytest
import test_draft_ahead_law as ahead_law
import test_pipelining_law as pipelining_law
from asking_workers import Pair
from loop_law import World, total_variation

import coordinator.draft_link as draft_link
from coordinator.draft_link import DraftLink
from coordinator.drafting import DraftSide
from coordinator.features import FeatureFeed, FeatureRelay
from coordinator.log import Log
from coordinator.target_link import TargetLink
from outrider.errors import Aborted
from outrider.sampling.noise import hash_ids
from outrider.sampling.params import AcceptanceRule, Origin, SamplingParams, StoppingParams
from outrider.serving.messages import DraftOpening, TargetOpening, Verdict
from outrider.serving.session_calls import Begun, Opened, SealedProposal

PROMPT = (1, 2, 3)


class Peer:
    """A worker that says these things, and then nothing."""

    def __init__(self, *messages: Any) -> None:
        self.num_outstanding = 0
        self.messages = list(messages)

    async def send(self, message: Any) -> None:
        pass

    def send_soon(self, *messages: Any) -> None:
        pass

    async def receive(self) -> Any:
        if not self.messages:
            await asyncio.Event().wait()
        return self.messages.pop(0)


class LostDraft(pipelining_law.Foretelling):
    """Its worker was lost while it drafted: of what comes next nothing is known."""

    _link = None
    foretold = DraftSide.foretold  # type: ignore[assignment]


def test_a_draft_worker_lost_before_a_far_verdict_ends_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_law, "FakeTarget", pipelining_law.Pipelined)
    world = World(
        Pair(2, 0), AcceptanceRule.BLOCK, lambda: pipelining_law.Ahead(1, drafts_ahead=True), num_tokens=3,
        drafter="model", max_drafts=1, fixed=1, make_draft=LostDraft,
    )  # fmt: skip
    assert total_variation(world.law(), world.target_law()) < ahead_law.EXACT


async def test_a_proposal_that_was_begun_and_never_comes_loses_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody gives it up for being late; but a worker that hangs, its heart still beating, must not hang the stream."""
    monkeypatch.setattr(draft_link, "MAX_LATE_S", 0.05)
    log = Log(PROMPT, hash_ids(PROMPT))
    peer: Any = Peer(Opened(64), Begun(log.header(1)))
    link = DraftLink(peer, "worker", log, FeatureFeed(FeatureRelay(), peer, "", ""))
    await link.open(DraftOpening(epoch=1, prompt_ids=PROMPT, sampling=SamplingParams(), stopping=StoppingParams(9)))
    await link.wait_opened()
    with pytest.raises(Aborted, match="begun"):
        await asyncio.wait_for(link.propose(4, "model", 0.01), 10)


async def test_a_dropped_round_is_not_waited_for_once_a_run_has_made_its_prefix_after_all() -> None:
    """As after a proposal that the target could not read: it decides plainly, and may go on as was foretold."""
    log = Log(PROMPT, hash_ids(PROMPT))

    def verdict(token_id: int) -> Verdict:
        return Verdict(header=log.header(1), committed_ids=(token_id,), origins=(Origin.PLAIN,), decode_ended=True)

    peer: Any = Peer(verdict(4))
    link = TargetLink(peer, "worker", log, FeatureRelay(), "")
    await link.open(TargetOpening(epoch=1, prompt_ids=PROMPT, sampling=SamplingParams(), stopping=StoppingParams(9)))
    log.append((4,))
    foretold = (5, 6)
    link.verify_next(log.length + 2, hash_ids(foretold, log.header(1).prefix_hash), 6, SealedProposal())
    for token_id in foretold:
        peer.messages.append(verdict(token_id))
        async for timed in link.decode(1):
            log.append(timed.verdict.committed_ids)
    assert not link.is_verifying

"""A link that takes a stream over: what it sends, what it waits for, and whom it does not listen to."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from coordinator.features import FeatureRelay
from coordinator.log import Log
from coordinator.target_link import TargetLink
from outrider.errors import Aborted, OutriderError, Unavailable
from outrider.sampling.noise import hash_ids
from outrider.sampling.params import Origin, SamplingParams, StoppingParams
from outrider.serving.messages import Header, TargetOpening, Verdict
from outrider.serving.session_calls import Lagging, Ready, SealedPromptLogprobs, SealedProposal

PROMPT, OUTPUT = (1, 2, 3), (4, 5)


class Peer:
    """A worker that says these things, or is lost with them. What it was sent: (kind, message)."""

    def __init__(self, *messages: Any) -> None:
        self.num_outstanding = 0
        self.was_asked = False
        self.unheard_s = 0.0
        self.messages = list(messages)
        self.is_gone = False
        self.sent: list[Any] = []

    async def send(self, message: Any) -> None:
        if self.is_gone:
            self.was_asked = self.num_outstanding > 0
            raise Unavailable("nobody there")
        kind = message.WhichOneof("message")
        self.sent.append((kind, getattr(message, kind)))

    async def receive(self) -> Any:
        assert self.messages, "nobody should wait any more"
        message = self.messages.pop(0)
        if isinstance(message, OutriderError):
            self.was_asked = self.num_outstanding > 0
            raise message
        return message


def a_log() -> Log:
    log = Log(PROMPT, hash_ids(PROMPT))
    log.append(OUTPUT)
    return log


LOG = a_log()
OPENING = TargetOpening(
    epoch=3, prompt_ids=PROMPT, committed_ids=OUTPUT, sampling=SamplingParams(), stopping=StoppingParams(9)
)
SUSPECT = dataclasses.replace(OPENING, num_suspect_tokens=2)


def verdict(header: Header, *ids: int) -> Verdict:
    return Verdict(header=header, committed_ids=ids, origins=(Origin.PLAIN,) * len(ids))


def link_to(*messages: Any) -> tuple[TargetLink, Peer]:
    peer: Any = Peer(*messages)
    return TargetLink(peer, "a:1", LOG, FeatureRelay(), ""), peer


async def test_the_question_follows_the_opening_at_once() -> None:
    link, peer = link_to(verdict(LOG.header(3), 6))
    await link.open_deferred(OPENING)
    timed = await link.verify(SealedProposal())
    assert timed.verdict.committed_ids == (6,)
    assert [kind for kind, _ in peer.sent] == ["open", "verify"]
    assert peer.sent[0][1].deferred
    assert not peer.sent[0][1].num_suspect_tokens


async def test_a_suspect_asks_once_its_turn_has_come() -> None:
    link, peer = link_to(Ready(LOG.header(3)))
    opening = asyncio.create_task(link.open_deferred(SUSPECT))
    await opening
    assert peer.sent[0][1].num_suspect_tokens == 2
    peer.messages = [verdict(LOG.header(3), 6)]
    assert (await link.verify(SealedProposal())).verdict.committed_ids == (6,)


async def test_a_verdict_of_an_earlier_epoch_is_not_taken() -> None:
    link, _ = link_to(verdict(LOG.header(2), 8), verdict(LOG.header(1), 9), verdict(LOG.header(3), 6))
    await link.open_deferred(OPENING)
    assert (await link.verify(SealedProposal())).verdict.committed_ids == (6,)


async def test_a_worker_of_an_older_version_gives_a_token_at_once_and_that_is_the_answer() -> None:
    link, peer = link_to(verdict(LOG.header(3), 6))
    await link.open_deferred(SUSPECT)
    assert (await link.verify(SealedProposal())).verdict.committed_ids == (6,)
    assert not peer.messages


@pytest.mark.parametrize("lost", [Unavailable("gone"), Lagging(Header(3, 1, 2))])
async def test_a_suspect_that_waits_for_its_turn_is_not_computed(lost: Any) -> None:
    link, peer = link_to(lost)
    with pytest.raises((Unavailable, Aborted)):
        await link.open_deferred(SUSPECT)
    assert not link.was_asked
    assert not peer.num_outstanding

    link, peer = link_to()
    peer.is_gone = True
    with pytest.raises(Unavailable):
        await link.open_deferred(SUSPECT)
    assert not link.was_asked

    link, peer = link_to(Ready(LOG.header(3)), Unavailable("gone"))
    await link.open_deferred(SUSPECT)
    with pytest.raises(Unavailable):
        await link.verify(SealedProposal())
    assert link.was_asked


async def test_logprobs_of_the_prompt_come_with_the_answer_or_the_session_is_lost() -> None:
    wants = dataclasses.replace(OPENING, prompt_logprobs=1)
    whole = [SealedPromptLogprobs(1, 1), SealedPromptLogprobs(2, 1)]
    link, _ = link_to(*whole, verdict(LOG.header(3), 6), verdict(LOG.header(3), 7))
    await link.open_deferred(wants)
    assert (await link.verify(SealedProposal())).prompt_logprobs == tuple(whole)
    assert not (await link.verify(SealedProposal())).prompt_logprobs
    link, _ = link_to(whole[0], verdict(LOG.header(3), 6))
    await link.open_deferred(wants)
    with pytest.raises(Aborted, match="left out"):
        await link.verify(SealedProposal())


async def test_a_standby_is_sent_what_it_lacks_and_waited_for() -> None:
    log = Log(PROMPT, hash_ids(PROMPT))
    peer: Any = Peer(Ready(log.header(1)))
    link = TargetLink(peer, "a:1", log, FeatureRelay(), "")
    await link.open_deferred(dataclasses.replace(OPENING, epoch=1, committed_ids=()))
    await link.ingest()
    log.append((4, 5, 6))
    peer.messages = [Ready(log.header(1))]
    await link.ingest()
    told = [message for kind, message in peer.sent if kind == "ingest"]
    assert [list(message.committed_ids) for message in told] == [[], [4, 5, 6]]
    assert [message.header.base_length for message in told] == [3, 6]
    log.append((7,))
    peer.messages = [Unavailable("gone")]
    with pytest.raises(Unavailable):
        await link.ingest()
    assert not peer.num_outstanding

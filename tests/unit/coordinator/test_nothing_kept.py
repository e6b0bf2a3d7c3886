"""What has been told on is not kept by the session that it came from, whose stream may be paused for long."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import weakref
from typing import Any

from coordinator.features import FeatureRelay
from coordinator.log import Log
from coordinator.peer import Peer
from coordinator.target_link import TargetLink
from outrider.sampling.params import Origin, SamplingParams, StoppingParams
from outrider.serving.messages import Header, TargetOpening, Verdict
from outrider.serving.session_calls import SealedPromptLogprobs, SealedProposal


class Said:
    """A message, or what a message is a part of."""


class Call:
    """A worker that says what is put into `says`."""

    def __init__(self) -> None:
        self.says: asyncio.Queue[Any] = asyncio.Queue()

    async def read(self) -> Any:
        return await self.says.get()

    async def write(self, message: Any) -> None:
        pass

    def cancel(self) -> None:
        pass


@dataclasses.dataclass
class Read:
    """A message as it was read."""

    message: Said
    own: Said = dataclasses.field(default_factory=Said)


def peer_of(call: Any, read: Any) -> Peer:
    return Peer(
        call, read, address="a:1", heartbeat=None, is_heartbeat=lambda content: False, interval_s=60.0, timeout_s=60.0
    )


async def test_a_peer_keeps_no_message_that_was_taken() -> None:
    call, said = Call(), Said()
    peer, kept = peer_of(call, Read), [weakref.ref(said)]
    call.says.put_nowait(said)
    del said
    read = await peer.receive()
    kept.append(weakref.ref(read.own))
    del read
    gc.collect()
    assert [one() for one in kept] == [None, None]
    peer.close()


async def test_a_target_keeps_no_logprobs_of_a_prompt_that_were_told() -> None:
    log = Log((1, 2, 3))
    opening = TargetOpening(
        epoch=3, prompt_ids=(1, 2, 3), sampling=SamplingParams(), stopping=StoppingParams(9), prompt_logprobs=1
    )
    call = Call()
    peer = peer_of(call, lambda message: message)
    link = TargetLink(peer, "a:1", log, FeatureRelay(), "")
    said = [Said(), Said(), Said()]
    kept = list(map(weakref.ref, said))
    for position, message in enumerate(said[:2], start=1):
        call.says.put_nowait(SealedPromptLogprobs(position, 1, message))
    call.says.put_nowait(verdict(log.header(3), 6))
    await link.open_deferred(opening)
    timed = await link.verify(SealedProposal())
    assert [told.message for told in timed.prompt_logprobs] == said[:2]
    # one that nobody has asked for
    call.says.put_nowait(SealedPromptLogprobs(1, 1, said[2]))
    call.says.put_nowait(verdict(log.header(3), 6))
    assert not (await link.verify(SealedProposal())).prompt_logprobs
    del timed, message, said
    gc.collect()
    assert [one() for one in kept] == [None, None, None]
    peer.close()


def verdict(header: Header, token_id: int) -> Verdict:
    return Verdict(header=header, committed_ids=(token_id,), origins=(Origin.PLAIN,))
